# SPDX-License-Identifier: Apache-2.0
"""Relatives of BERT with their own tokenizers, from a model of Hugging Face's to a task or a further pre-training."""

import dataclasses
import functools
import json
import random
import signal

import jax
import numpy as np
import pytest
from builders import tiny_run, topics_run, write, write_corpus, write_vocab
from described import write_described
from whole_runs import ONE_DEVICE, assert_same_state, stop_at, train

from bert_jax import load_predictor, load_pretrained, load_tokenizer
from bert_jax.checkpoints.hf import save_hf
from bert_jax.checkpoints.names import flatten
from bert_jax.checkpoints.sentence_transformers import write_pipeline
from bert_jax.data.prepare import PrepareOptions, prepare
from bert_jax.finetuning import finetune
from bert_jax.model.heads.pretraining import MASKED_LM
from bert_jax.model.heads.replaced import REPLACED
from bert_jax.model.objective import init_params
from bert_jax.settings.finetuning import FinetuneTrainConfig, TaskConfig
from bert_jax.settings.model import model_size
from bert_jax.settings.pretraining import CheckpointConfig, EvalConfig, MaskingConfig, TrainConfig

FAMILIES = {  # family -> its size, its kind of tokenizer, a task
    "roberta": ("roberta-base", "roberta", "ner"),
    "xlm-roberta": ("xlm-roberta-base", "xlmr", "classification"),
    "camembert": ("camembert-base", "xlmr", "classification"),
    "distilbert": ("distilbert", "", "multilabel"),
    "electra": ("electra-small", "", "classification"),
    "albert": ("albert-base", "albert", "classification"),
    "mpnet": ("mpnet-base", "mpnet", "squad1"),
    "deberta-v2": ("deberta-v3-small", "deberta", "classification"),
    "jina_bert": ("jina-bert-small", "dnabert", "embeddings"),
    "nomic_bert": ("nomic-bert", "", "classification"),
    "gte": ("gte", "xlmr", "classification"),
    "jina_embeddings_v3": ("jina-embeddings-v3", "xlmr", "classification"),
    "eurobert": ("eurobert-210m", "llama", "classification"),
    "ultrabert": ("ultrabert-mini", "modernbert", "classification"),
    "modernbert": ("modernbert-mini", "modernbert", "choice"),
}
NAMES = {"b": "Ber", "d": "Dén", "f": "Fos"}  # what is found in texts, of more than one token; a label each


def text_of(rng, topic):
    letters = topic * rng.randint(2, 4) + "".join(rng.choices("glmp", k=rng.randint(0, 3)))
    words = [f"{letter}{rng.choice('aeiou')}{rng.choice('nrst')}" for letter in letters]
    words.insert(rng.randint(0, len(words)), NAMES[topic] + rng.choice(("an", "is")))
    return words


def rows_of(task, number):
    """Returns the lines of a file with examples of a task."""
    rng = random.Random(number)
    rows = []
    for place in range(320 if number == 0 else 24):
        topic, other = rng.sample("bdf", 2)
        words = text_of(rng, topic)
        text, name = " ".join(words), next(word for word in words if word[0].isupper())
        rows.append({
            "classification": {"text": text, "label": topic},
            "multilabel": {"text": text, "labels": [topic, "long"] if len(words) > 5 else [topic]},
            "choice": {"context": text, "choices": [NAMES[other], NAMES[topic]], "label": 1},
            "embeddings": {"anchor": text, "positive": " ".join(text_of(rng, topic))},
            "ner": "".join(f"{word}\t{'B-' + topic.upper() if word == name else 'O'}\n" for word in words),
            "squad1": {"id": str(place), "question": f"who {topic} ?", "context": text,
                       "answers": [{"text": name, "answer_start": text.index(name)}]},
        }[task])  # fmt: skip
    return rows


def write_task(directory, task):
    for number, split in enumerate(("train", "dev")):
        rows = rows_of(task, number)
        if task == "ner":
            write(directory / f"{split}.conll", "\n".join(rows))
        elif task == "squad1":
            paragraphs = [{"context": row["context"], "qas": [row]} for row in rows]
            about = {"version": "1.1", "data": [{"title": "", "paragraphs": paragraphs}]}
            write(directory / f"{split}-v1.1.json", json.dumps(about))
        else:
            write(directory / f"{split}.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))
    return directory


def inputs_of(task):
    rows = rows_of(task, 2)
    if task == "ner":
        return [[line.split("\t")[0] for line in row.splitlines()] for row in rows]
    names = {"squad1": ("question", "context"), "choice": ("context", "choices"), "embeddings": ("anchor",)}
    found = [{name: row[name] for name in names.get(task, ("text",))} for row in rows]
    return [next(iter(row.values())) if len(row) == 1 else row for row in found]


def write_tokenizer(home, family):
    """Writes a tokenizer of the family's kind that knows the toy language; returns its place."""
    _, kind, _ = FAMILIES[family]
    if not kind:
        write_vocab(home / "vocab.txt")
        return home / "vocab.txt"
    write_corpus(home / "text.txt")
    lines = (home / "text.txt").read_text().splitlines()
    lines += [row["text"] for row in rows_of("classification", 0)]
    return write_described(home / "described", kind, lines)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Returns a function from a family to a random model of it, as Hugging Face has it."""

    @functools.cache
    def make(family):
        home = tmp_path_factory.mktemp(family)
        size, _, _ = FAMILIES[family]
        tokenizer = load_tokenizer(write_tokenizer(home, family))
        shape = {"hidden_size": 24, "num_heads": 2, "num_layers": 2, "intermediate_size": 32, "max_positions": 64}
        shape |= {"embedding_size": 16} if family in ("electra", "albert") else {}
        shape |= {"window": 8, "global_every": 2} if family in ("ultrabert", "modernbert") else {}
        shape |= {"global_first": 1} if family == "ultrabert" else {}
        shape |= {"position_offset": tokenizer.pad_id + 1} if model_size(size).position_offset else {}
        config = dataclasses.replace(model_size(size), vocab_size=tokenizer.vocab_size, initializer_stddev=0.1, **shape)
        head = REPLACED if family == "electra" else MASKED_LM
        params = jax.jit(functools.partial(init_params, config, head=head))(jax.random.key(0))
        save_hf(home / "hf", config, params, tokenizer, head.name, ())
        assert (home / "hf" / "tokenizer.json").exists()
        (home / "hf" / "vocab.txt").unlink(missing_ok=True)
        return home / "hf"

    return make


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_relative_learns_a_task_predicts_and_goes_back(start, tmp_path, family):
    task = FAMILIES[family][2]
    source = write_task(tmp_path / "data", task)
    settings = TaskConfig(name=task, max_seq_length=40, doc_stride=8, max_query_length=8)
    epochs = FinetuneTrainConfig(num_epochs=5.0 if task == "ner" else 2.0)  # most words have no name's tag
    config = topics_run(source, start(family), task=settings, train=epochs)
    result = finetune(config, tmp_path / "run", jax.devices()[:1])
    assert result.metrics[result.metric] > result.constant[result.metric]
    bert, before = load_pretrained(tmp_path / "run"), load_pretrained(start(family))
    expected = before.tokenizer.with_blanks() if task == "ner" else before.tokenizer  # its texts are lists of words
    assert bert.config.family == family and bert.tokenizer.fingerprint == expected.fingerprint
    more = {"write_more": lambda there: write_pipeline(there, bert.embedding, bert.params)} if bert.embedding else {}
    save_hf(tmp_path / "hf", bert.config, bert.params, bert.tokenizer, bert.task, bert.labels, **more)
    ours, theirs = (load_predictor(tmp_path / name)(inputs_of(task)) for name in ("run", "hf"))
    if task in ("multilabel", "embeddings"):  # the former has no thresholds there, and arrays are compared one by one
        ours, theirs = ([one[-1] for one in each] for each in (ours, theirs))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mpnet", "deberta-v2", "jina_bert", "eurobert", "modernbert"])
def test_pretraining_goes_on_from_a_relative(start, tmp_path, monkeypatch, family):
    write_corpus(tmp_path / "text.txt")
    options = PrepareOptions(max_seq_length=32, next_sentence="none", duplicates=1, holdout_rate=0.1)
    prepare(str(tmp_path / "text.txt"), str(start(family)), str(tmp_path / "data"), options, num_workers=1)
    before = load_pretrained(start(family))
    config = tiny_run(
        tmp_path / "data", model=dataclasses.replace(before.config, vocab_size=0), train=TrainConfig(num_steps=4),
        masking=MaskingConfig(whole_word=True), eval=EvalConfig(every_steps=4), mesh=ONE_DEVICE,
        checkpoint=CheckpointConfig(every_steps=2), init_checkpoint=str(start(family)),
    )  # fmt: skip
    whole = train(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        stopped = train(config, tmp_path / "run")
    assert stopped.signal == signal.SIGTERM and stopped.step < 4
    assert_same_state(train(config, tmp_path / "run").state, whole.state)
    bert = load_pretrained(tmp_path / "run")
    assert bert.config == before.config and bert.tokenizer.fingerprint == before.tokenizer.fingerprint
    now = flatten(bert.params)
    moved = [float(abs(now[name] - value).max()) for name, value in flatten(before.params).items()]
    assert 0 < max(moved) < 0.01  # it began where the model stood
    save_hf(tmp_path / "hf", bert.config, bert.params, bert.tokenizer, bert.task, bert.labels)
    text = "the " + bert.tokenizer.template.specials[4] + " ."
    assert load_predictor(tmp_path / "hf")([text]) == load_predictor(tmp_path / "run")([text])
