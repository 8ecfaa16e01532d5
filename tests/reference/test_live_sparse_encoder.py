# SPDX-License-Identifier: Apache-2.0
"""Sparse vectors, losses and directories beside sentence-transformers' SparseEncoder, both ways."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from builders import tiny_model
from hf_models import make_tokenizer, random_params

import bert_jax
from bert_jax.batch import pad_rows
from bert_jax.checkpoints.pretrained import Pretrained, save_pretrained
from bert_jax.model.heads.embedding import Texts
from bert_jax.model.heads.sparse import SparseEmbeddings
from bert_jax.settings.finetuning import EmbeddingConfig, TaskConfig
from bert_jax.settings.rules import to_dict

pytestmark = pytest.mark.reference
TEXTS = ["a small house", "the old man and the sea " * 12, "two", "words of a language, and more", "sea sea the sea"]


@pytest.fixture(scope="module")
def st():
    return pytest.importorskip("sentence_transformers")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A small masked language model of transformers."""
    import torch
    import transformers

    directory = tmp_path_factory.mktemp("hf")
    words = "[PAD] [UNK] [CLS] [SEP] [MASK] a small house the old man and sea two words of language , more ##s w ##o"
    (directory / "vocab.txt").write_text("\n".join(words.split()) + "\n")
    tokenizer = transformers.BertTokenizer(str(directory / "vocab.txt"), model_max_length=40)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words.split()), **sizes, max_position_embeddings=64, initializer_range=0.3
    )
    transformers.BertForMaskedLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory, tokenizer


def convert(source, output):
    command = [sys.executable, "-m", "bert_jax", "convert_checkpoint", f"--input={source}", f"--output={output}"]
    done = subprocess.run([*command, "--to=sentence_transformers", "--verify"], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def assert_same_vectors(theirs, bert, texts=TEXTS):
    for kind, encode in (("", theirs.encode), ("query", theirs.encode_query), ("passage", theirs.encode_document)):
        expected = encode(texts, convert_to_sparse_tensor=False).numpy()
        np.testing.assert_allclose(bert_jax.sparse_embeddings(bert, texts, kind), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "most"),
    [({}, None), ({"pooling_strategy": "sum"}, 7), ({"activation_function": "log1p_relu"}, None)],
)
@pytest.mark.filterwarnings("ignore::bert_jax.CutWarning")
def test_we_read_theirs_and_they_read_it_again(st, hub, tmp_path, settings, most):
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    modules = [st.base.modules.Transformer(str(hub[0]), transformer_task="fill-mask"), SpladePooling(**settings)]
    prompts = {"query": "two ", "document": "small "}
    theirs = st.SparseEncoder(modules=modules, prompts=prompts, max_active_dims=most, device="cpu")
    theirs.save(str(tmp_path / "st"))
    convert(tmp_path / "st", tmp_path / "again")
    bert = bert_jax.load_pretrained(tmp_path / "st")
    for each in (theirs, st.SparseEncoder(str(tmp_path / "again"), device="cpu")):
        assert_same_vectors(each, bert)
    ((token, weight), *_) = theirs.decode(theirs.encode(TEXTS[0]), top_k=3)
    (found, *_) = bert_jax.sparse_embeddings(bert, TEXTS[:1], top_k=3, sparse=True)
    assert bert.tokenizer.tokens(found.ids)[0] == token and found.weights[0] == pytest.approx(weight, abs=1e-5)


@pytest.mark.filterwarnings("ignore::bert_jax.CutWarning")
def test_queries_from_a_table(st, hub, tmp_path):
    import torch
    from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

    torch.manual_seed(1)
    table = SparseStaticEmbedding(hub[1], weight=torch.rand(22))
    passages = [st.base.modules.Transformer(str(hub[0]), transformer_task="fill-mask"), SpladePooling()]
    router = st.base.modules.Router.for_query_document([table], passages)
    theirs = st.SparseEncoder(modules=[router], prompts={"query": "two "}, device="cpu")
    theirs.save(str(tmp_path / "st"))
    convert(tmp_path / "st", tmp_path / "again")
    bert = bert_jax.load_pretrained(tmp_path / "st")
    assert bert.embedding is not None and bert.embedding.embedding.query_table
    for each in (theirs, st.SparseEncoder(str(tmp_path / "again"), device="cpu")):
        assert_same_vectors(each, bert)


@pytest.mark.filterwarnings("ignore::bert_jax.CutWarning")
@pytest.mark.parametrize("has_tensor", [True, False])
def test_queries_from_a_file_of_words(st, hub, tmp_path, monkeypatch, has_tensor):
    """It is looked for from where a program runs, which is the directory here. Words that it lacks weigh nothing."""
    from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

    words = {"a": 0.5, "small": 3, "house": 7.25, "##s": 1e-3, "[UNK]": 0.1, "sea": 2.123456789}
    (tmp_path / "idf.json").write_text(json.dumps(words))
    table = SparseStaticEmbedding.from_json(str(tmp_path / "idf.json"), hub[1], frozen=True)
    passages = [st.base.modules.Transformer(str(hub[0]), transformer_task="fill-mask"), SpladePooling()]
    router = st.base.modules.Router.for_query_document([table], passages)
    st.SparseEncoder(modules=[router], device="cpu").save(str(tmp_path / "st"))
    if not has_tensor:
        (folder,) = (tmp_path / "st").glob("query_*")
        (folder / "config.json").write_text('{"frozen": true, "path": "idf.json"}')
        (folder / "model.safetensors").unlink()
        (tmp_path / "idf.json").rename(tmp_path / "st" / "idf.json")
    monkeypatch.chdir(tmp_path / "st")
    convert(".", tmp_path / "again")
    bert = bert_jax.load_pretrained(".")
    for path in (".", str(tmp_path / "again")):
        assert_same_vectors(st.SparseEncoder(path, device="cpu"), bert)


@pytest.mark.parametrize("settings", [{}, {"query_table": True, "max_terms": 20}])
def test_it_loads_ours(st, tmp_path, settings):
    params = random_params(parts=("mlm",))
    if settings:
        params["query_table"] = {"weight": np.linspace(0.5, 2, 203, dtype=np.float32)}
    embedding = EmbeddingConfig(kind="sparse", query_prompt="ab ", **settings)
    task = to_dict(TaskConfig(name="embeddings", max_seq_length=16, embedding=embedding))
    bert = Pretrained(tiny_model(), params, make_tokenizer(203), "sparse_embedding", task_settings=task)
    save_pretrained(bert, tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "st")
    theirs = st.SparseEncoder(str(tmp_path / "st"), device="cpu")
    assert theirs.similarity_fn_name == "dot" and theirs.max_active_dims == (20 if settings else None)
    assert_same_vectors(theirs, bert, [text.replace(" ", "")[:12] for text in TEXTS])


def test_a_masked_language_model_alone_gives_the_same_vectors(st, hub):
    bert = bert_jax.load_pretrained(hub[0])
    short = [TEXTS[0], *TEXTS[2:]]
    assert_same_vectors(st.SparseEncoder(str(hub[0]), device="cpu"), bert, short)


@pytest.mark.parametrize("least", [(0, 0), (14, 16)])
def test_the_loss_is_its_own(st, least):
    """Of pairs with a hard negative, without equal texts."""
    import torch
    from sentence_transformers.sparse_encoder import losses

    vectors = np.maximum(np.random.default_rng(0).normal(size=(8, 3, 30)), 0).astype(np.float32) * 0.5

    class Given(torch.nn.Module):  # a model whose features are vectors
        similarity_fn_name = "dot"

        def forward(self, features):
            return {"sentence_embedding": features["given"]}

    given = Given()
    base = losses.SparseMultipleNegativesRankingLoss(given)
    names = ("document_regularizer_threshold", "query_regularizer_threshold")
    limits = dict(zip(names, (each or None for each in least)))
    theirs = losses.SpladeLoss(given, base, document_regularizer_weight=0.3, query_regularizer_weight=0.2, **limits)
    features = [{"given": torch.tensor(vectors[:, column])} for column in range(3)]
    expected = {name: float(value) for name, value in theirs(features, torch.zeros(8)).items()}
    numbers = np.arange(24, dtype=np.int32).reshape(8, 3)
    batch = pad_rows(np.ones((24, 3), np.int32), 3)._replace(labels=Texts(numbers, numbers, np.zeros(8, np.float32)))
    settings = {"passage_flops": 0.3, "query_flops": 0.2, "passage_least": least[0], "query_least": least[1]}
    head = SparseEmbeddings(EmbeddingConfig(kind="sparse", **settings))
    metrics = jax.jit(lambda outputs: head.losses(outputs, batch, np.ones(8, np.float32)))(vectors.reshape(24, 1, 30))
    found = {name: float(total / weight) for name, (total, weight) in metrics.items()}
    assert found["loss"] == pytest.approx(expected["base_loss"], rel=1e-5)
    worth = {name: float(value) for name, value in head.further_losses(np.float32(99), 100).items()}
    assert found["passage_flops"] * worth["passage_flops"] == pytest.approx(
        expected["document_regularizer_loss"], rel=1e-5
    )
    assert found["query_flops"] * worth["query_flops"] == pytest.approx(expected["query_regularizer_loss"], rel=1e-5)


def test_the_gradient_of_the_loss_is_its_own(st, hub, tmp_path):
    """Of all parameters, through the masked language model: its gradients are read as a model's tensors."""
    import torch
    from sentence_transformers.sparse_encoder import losses

    pairs = [("a small house", "the old man"), ("two words", "words of a language"), ("sea", "the man and the sea")]
    theirs = st.SparseEncoder(str(hub[0]), device="cpu")
    theirs.eval()  # without dropout
    base = losses.SparseMultipleNegativesRankingLoss(theirs)
    of_theirs = losses.SpladeLoss(theirs, base, document_regularizer_weight=0.03, query_regularizer_weight=0.02)
    # its pooling changes logits in place outside of training, which has no gradient
    theirs[1].train()
    found = of_theirs([theirs.preprocess(list(column)) for column in zip(*pairs)], torch.zeros(3))
    total = sum(found.values())
    total.backward()
    model = theirs[0].model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(tmp_path / "gradient")
    hub[1].save_pretrained(tmp_path / "gradient")
    expected = bert_jax.load_pretrained(tmp_path / "gradient").params

    bert = bert_jax.load_pretrained(hub[0])
    head = SparseEmbeddings(EmbeddingConfig(kind="sparse", passage_flops=0.03, query_flops=0.02))
    batch = bert_jax.make_batch(bert, [list(pair) for pair in pairs], labels=[0.0] * 3, head=head)

    def loss(params):
        outputs = bert_jax.forward(bert.config, params, batch, head)
        metrics = head.losses(outputs, batch, head.weights(batch))
        worth = head.further_losses(np.float32(9), 10)
        return metrics["loss"][0] / 3 + sum(metrics[name][0] * each for name, each in worth.items())

    value, gradient = jax.jit(jax.value_and_grad(loss))(bert.params)
    assert float(value) == pytest.approx(total.item(), rel=1e-5)
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    for ours, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, other, atol=1e-5 * largest)
