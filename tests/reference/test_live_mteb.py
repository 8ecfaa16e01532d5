# SPDX-License-Identifier: Apache-2.0
"""MTEB evaluates a model as docs/howto/embeddings.md says: an STS task and a retrieval task of our own, offline."""

import random
import re

import numpy as np
import pytest
from builders import tiny_model
from hf_models import make_tokenizer, random_params

import bert_jax
from bert_jax.checkpoints.pretrained import Pretrained, save_pretrained
from bert_jax.settings.finetuning import EmbeddingConfig, TaskConfig
from bert_jax.settings.rules import to_dict
from bert_jax.tasks import scores

mteb = pytest.importorskip("mteb")
datasets = pytest.importorskip("datasets")

pytestmark = pytest.mark.reference

LETTERS = "abcdefgh"


def make_task(kind, name, main_score, load):
    """Returns a task of MTEB whose data are made here."""
    base = {"STS": mteb.abstasks.AbsTaskSTS, "Retrieval": mteb.abstasks.AbsTaskRetrieval}[kind]
    about = mteb.TaskMetadata(
        name=name,
        description="of a test",
        type=kind,
        category="t2t",
        eval_langs=["eng-Latn"],
        main_score=main_score,
        dataset={"path": "own/data", "revision": "1"},
        bibtex_citation="",
    )

    def load_data(self, num_proc=None, **options):
        self.dataset, self.data_loaded = load(), True

    members = {"metadata": about, "load_data": load_data, "min_score": 0, "max_score": 5}
    return type(name, (base,), members)()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    embedding = EmbeddingConfig(pooling="mean", query_prompt="ab ", passage_prompt="cd ")
    task = to_dict(TaskConfig(name="embeddings", max_seq_length=32, embedding=embedding))
    bert = Pretrained(
        tiny_model(), random_params(parts=()), make_tokenizer(203), "sentence_embedding", task_settings=task
    )
    path = tmp_path_factory.mktemp("mteb") / "model"
    save_pretrained(bert, path)
    return path


@pytest.fixture(scope="module")
def as_mteb_calls_it(repository, model):
    page = (repository / "docs" / "howto" / "embeddings.md").read_text("utf-8")
    (code,) = re.findall(r'```python title="mteb_model.py"\n(.*?)```', page, re.DOTALL)
    names = {}
    exec(code, names)
    assert len(code.splitlines()) <= 40
    return names["Model"](str(model), "own/model")


def run(model, task):
    result = mteb.evaluate(model, [task], cache=None, co2_tracker=False)
    return result.task_results[0].scores["test"][0]


def texts(count, seed):
    rng = random.Random(seed)
    return [" ".join("".join(rng.choices(LETTERS, k=3)) for _ in range(rng.randint(2, 8))) for _ in range(count)]


def test_similarity_of_pairs(as_mteb_calls_it, model):
    first, second, graded = texts(40, 0), texts(40, 1), np.random.default_rng(0).random(40) * 5

    def load():
        rows = {"sentence1": first, "sentence2": second, "score": graded.tolist()}
        return datasets.DatasetDict(test=datasets.Dataset.from_dict(rows))

    found = run(as_mteb_calls_it, make_task("STS", "OwnSts", "cosine_spearman", load))
    bert = bert_jax.load_pretrained(model)
    pairs = [bert_jax.sentence_embeddings(bert, side) for side in (first, second)]
    cosines = np.sum(pairs[0] * pairs[1], axis=1)  # of vectors of length 1
    assert found["cosine_spearman"] == pytest.approx(scores.spearman(graded.tolist(), cosines.tolist()), abs=1e-6)


def test_retrieval(as_mteb_calls_it, model):
    """Queries and passages have prompts of their own."""
    queries, passages = texts(12, 2), texts(60, 3)
    relevant = {f"q{n}": {f"d{(5 * n + k) % 60}": k + 1 for k in range(1 + n % 3)} for n in range(12)}

    def load():
        corpus = {"id": [f"d{n}" for n in range(60)], "title": [""] * 60, "text": passages}
        asked = {"id": [f"q{n}" for n in range(12)], "text": queries}
        split = {
            "corpus": datasets.Dataset.from_dict(corpus),
            "queries": datasets.Dataset.from_dict(asked),
            "relevant_docs": relevant,
            "top_ranked": None,
        }
        return {"default": {"test": split}}

    found = run(as_mteb_calls_it, make_task("Retrieval", "OwnRetrieval", "ndcg_at_10", load))
    bert = bert_jax.load_pretrained(model)
    similar = bert_jax.sentence_embeddings(bert, queries, kind="query") @ (
        bert_jax.sentence_embeddings(bert, passages, kind="passage").T
    )
    ranked = [[relevant[f"q{n}"].get(f"d{d}", 0.0) for d in np.argsort(-row)] for n, row in enumerate(similar)]
    ours = scores.ranking_scores(ranked, [list(relevant[f"q{n}"].values()) for n in range(12)])
    assert found["ndcg_at_10"] == pytest.approx(ours["ndcg@10"], abs=2e-5)
    assert found["mrr_at_10"] == pytest.approx(ours["mrr@10"], abs=2e-5)
