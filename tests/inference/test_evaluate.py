# SPDX-License-Identifier: Apache-2.0
"""What checkpoints are worth: the same masks for every model, the same figures on any mesh."""

import dataclasses
import json
import math
import shutil

import jax
import numpy as np
import pytest
from builders import drawn_params, growing_bert, make_dataset, message, tiny_model, write, write_corpus
from object_server import serving

import bert_jax
from bert_jax.batches import stream
from bert_jax.batches.load import rows_to_batch
from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.data import blocks
from bert_jax.data.prepare import PrepareOptions, prepare
from bert_jax.data.records import open_dataset
from bert_jax.devices.sharding import make_mesh
from bert_jax.inference.evaluate import check_fits, evaluate_pretrained, evaluate_text, token_masking, word_masking
from bert_jax.model.heads.pretraining import MASKED_LM
from bert_jax.model.losses import cross_entropy
from bert_jax.model.masking import mask_rows
from bert_jax.model.objective import forward as forward_of
from bert_jax.settings.pretraining import MeshConfig


def make_bert(tokenizer, **changes):
    """Returns a random model whose second head has a bias, as a trained one has."""
    config = tiny_model(vocab_size=tokenizer.vocab_size, initializer_stddev=0.2, **changes)
    params = jax.tree.map(np.array, drawn_params(config))
    params["next_sentence"]["bias"] += 0.5
    return Pretrained(config, params, tokenizer)


@pytest.fixture(scope="module")
def dataset(toy_data):
    return open_dataset(toy_data)


@pytest.fixture(scope="module")
def bert(dataset):
    return make_bert(dataset.load_tokenizer())


@pytest.fixture(scope="module")
def one_device():
    return make_mesh(MeshConfig(), jax.devices()[:1])


@pytest.fixture(scope="module")
def found(bert, toy_data, one_device):
    return bert_jax.evaluate_pretrained(bert, toy_data, mesh=one_device)


def masked_loss(bert, split, masking):
    """Returns the masked batch of all rows of a split, and the sum of its losses in nats."""
    rows = split.gather(np.arange(split.num_rows))
    batch = rows_to_batch(rows, np.zeros(len(rows), np.int32))
    special = (bert.tokenizer.cls_id, bert.tokenizer.sep_id)

    @jax.jit
    def compute(params, batch):
        masked = mask_rows(batch, masking, bert.config.vocab_size, bert.tokenizer.mask_id, special)
        logits = forward_of(bert.config, params, masked, MASKED_LM)
        return masked, cross_entropy(logits, masked.mlm_labels, masked.mlm_weights)[0]

    masked, loss = jax.device_get(compute(bert.params, batch))
    return masked, float(loss)


def test_figures_are_those_of_all_rows_in_one_batch(bert, dataset, found):
    masking = token_masking(dataset.row_length)
    assert (masking.rate, masking.mask_rate, masking.random_rate, masking.whole_word) == (0.15, 0.8, 0.1, False)
    masked, loss = masked_loss(bert, dataset.heldout, masking)
    metrics = found["metrics"]
    assert metrics["mlm_loss"] == pytest.approx(loss / float(masked.mlm_weights.sum()), rel=1e-5)
    assert metrics["mlm_perplexity"] == pytest.approx(math.exp(metrics["mlm_loss"]))
    assert set(metrics) == {
        "mlm_loss", "mlm_perplexity", "mlm_accuracy", "nsp_loss", "nsp_accuracy", "bits_per_byte"
    }  # fmt: skip
    # Every word of the toy language is a token, so that a word masked whole is a token masked.
    masking = word_masking(dataset.row_length)
    assert (masking.whole_word, masking.mask_rate, masking.random_rate) == (True, 1.0, 0.0)
    masked, loss = masked_loss(bert, dataset.heldout, masking)
    text = dataset.manifest["splits"]["heldout"]
    bits = loss / float(masked.mlm_weights.sum()) / math.log(2) * text["tokens"] / text["text_bytes"]
    assert metrics["bits_per_byte"] == pytest.approx(bits, rel=1e-5)


@pytest.mark.slow
def test_the_same_on_another_mesh(bert, toy_data, found):
    for mesh in (None, make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))):  # eight devices, two ways
        other = evaluate_pretrained(bert, toy_data, mesh=mesh)
        assert other["metrics"] == pytest.approx(found["metrics"], rel=2e-5)
        assert other | {"metrics": found["metrics"]} == found


def test_no_next_sentence_where_the_model_has_none(bert, toy_data, found, one_device):
    """A model without the head, and one whose head never learnt, have the other figures all the same."""
    encoder = {name: value for name, value in bert.params["encoder"].items() if name != "pooler"}
    for params in ({"encoder": encoder, "mlm": bert.params["mlm"]}, without_bias(bert.params)):
        other = evaluate_pretrained(dataclasses.replace(bert, params=params), toy_data, mesh=one_device)
        expected = {name: value for name, value in found["metrics"].items() if not name.startswith("nsp")}
        assert other["metrics"] == pytest.approx(expected, rel=1e-6) and other["next_sentence"] == ""


def without_bias(params):
    head = params["next_sentence"]
    return params | {"next_sentence": head | {"bias": head["bias"] * 0}}


@pytest.mark.slow
def test_no_next_sentence_where_the_data_have_none_and_text(bert, tmp_path, one_device):
    """Text is prepared, each document once; a model of fewer positions than 128 gets shorter rows."""
    write_corpus(tmp_path / "text.txt", num_documents=12)
    found = evaluate_text(bert, str(tmp_path / "text.txt"), next_sentence="none", mesh=one_device)
    assert "nsp_loss" not in found["metrics"] and found["split"] == "train"
    num_bytes = len((tmp_path / "text.txt").read_bytes())
    assert 0.9 * num_bytes < found["counts"]["text_bytes"] <= num_bytes
    assert evaluate_text(bert, str(tmp_path / "text.txt"), next_sentence="none", mesh=one_device) == found


def test_a_causal_model_has_other_names(bert, toy_data, one_device):
    """One that started from a BERT still has that BERT's head for the second sentence; it is not used."""
    warm = dataclasses.replace(bert, config=dataclasses.replace(bert.config, causal=True))
    found = evaluate_pretrained(warm, toy_data, mesh=one_device)
    names = {"next_token_loss", "next_token_perplexity", "next_token_accuracy", "bits_per_byte"}
    assert set(found["metrics"]) == names and found["masking"] == {}
    causal = dataclasses.replace(warm, params=without_bias(bert.params))
    assert evaluate_pretrained(causal, toy_data, mesh=one_device) == found


def test_data_that_do_not_fit_are_refused(bert, dataset, toy_data, tmp_path, one_device):
    short = dataclasses.replace(bert, config=dataclasses.replace(bert.config, max_positions=16))
    broken = dataclasses.replace(bert, params=jax.tree.map(lambda leaf: leaf * np.nan, bert.params))
    headless = dataclasses.replace(bert, params={"encoder": {}})
    for model, data, split, told in (
        (bert, make_dataset(tmp_path, holdout_rate=0.0), "heldout", "no row in its heldout split"),
        (bert, toy_data, "test", "split 'test' is unknown"),
        (short, toy_data, "heldout", "longer than the 16 positions"),
        (broken, toy_data, "heldout", "the loss is not finite"),
        (headless, toy_data, "heldout", "no head that predicts words"),
    ):
        assert told in message(evaluate_pretrained, model, data, split, one_device)
    manifest = dataset.manifest | {"row": dataset.manifest["row"] | {"predictions": 5}}
    assert "has masks of its own" in message(check_fits, bert, dataclasses.replace(dataset, manifest=manifest))
    check_fits(bert, dataset)


@pytest.fixture(scope="module")
def in_blocks(tmp_path_factory):
    """Returns the directory of a data set of three shards with blocks of ten rows; shared, so not to be changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", 450)
        return make_dataset(tmp_path_factory.mktemp("blocks"), shards=3, duplicates=4, holdout_rate=0.4)


@pytest.fixture
def remote(in_blocks, tmp_path, monkeypatch):
    """Yields a server of a copy of that data set, to this test's own cache."""
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 450)
    shutil.copytree(in_blocks, tmp_path / "served" / "data")
    with serving(tmp_path / "served") as server:
        yield server


@pytest.fixture(scope="module")
def of_heldout(bert, in_blocks, one_device):
    """Returns the figures of that data set where it is local."""
    return evaluate_pretrained(bert, in_blocks, mesh=one_device)


@pytest.fixture
def caches(monkeypatch):
    """Returns a list to which every cache of blocks is added when it is made."""
    made = []

    class Noted(stream.BlockCache):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(stream, "BlockCache", Noted)
    return made


def sent(server):
    """Returns the bytes of rows that a server has sent, by the name of the file."""
    found = {}
    for name, start, end in server.data_requests():
        found[name.rpartition("/")[2]] = found.get(name.rpartition("/")[2], 0) + end - start
    return found


def test_data_at_a_url_have_the_figures_of_local_ones_and_are_read_once(
    bert, remote, caches, tmp_path, of_heldout, one_device
):
    """Of the training rows the test of a small cache says the same."""
    assert evaluate_pretrained(bert, f"{remote.url}/data", mesh=one_device) == of_heldout
    local = open_dataset(remote.root / "data")
    rows, shards = local.heldout, local.manifest["splits"]["heldout"]["shards"]
    assert sent(remote) == {shard["name"]: shard["rows"] * rows.dtype.itemsize for shard in shards}
    assert len(caches) == 1 and not [path for path in (tmp_path / "cache").rglob("*.npy") if "-of-" in path.name]


@pytest.mark.slow
def test_a_small_cache_reads_twice_and_stays_small(bert, remote, caches, tmp_path, one_device):
    expected = evaluate_pretrained(bert, remote.root / "data", "train", one_device)
    assert not remote.requests
    found = evaluate_pretrained(bert, f"{remote.url}/data", "train", one_device, cache_gb=1.9e-6)
    assert found == expected
    rows = open_dataset(remote.root / "data").train
    (cache,), once = caches, rows.num_rows * rows.dtype.itemsize
    assert cache.num_slots * 450 <= 1900 < once / 5
    assert 2 * once - 1900 <= sum(sent(remote).values()) <= 2 * once + 8 * 450


def test_a_cache_without_room_for_two_blocks_is_refused(bert, remote, one_device):
    for gigabytes in (1e-7, float("nan")):
        told = message(evaluate_pretrained, bert, f"{remote.url}/data", mesh=one_device, cache_gb=gigabytes)
        assert f"cache_gb {gigabytes:g} is too small for two blocks of http" in told and "set it to 9e-07" in told


def test_remote_data_of_an_earlier_version_are_copied_whole(bert, remote, caches, tmp_path, of_heldout, one_device):
    """Their blocks have no checksums."""
    path = remote.root / "data" / "manifest.json"
    manifest = json.loads(path.read_text())
    for values in manifest["splits"].values():
        for shard in values["shards"]:
            del shard["blocks"]
    path.write_text(json.dumps(manifest))
    assert evaluate_pretrained(bert, f"{remote.url}/data", mesh=one_device) == of_heldout
    assert not caches and [path for path in (tmp_path / "cache").rglob("*.npy") if "-of-" in path.name]


@pytest.mark.slow
def test_bits_of_words_of_several_pieces(tmp_path, one_device):
    """The loss of a word is the sum of those of its pieces, all of which are hidden."""
    model = growing_bert()
    text = "\n\n".join(f"the corona {word} .\nbanana ban {word} .\nthe di ." for word in ("bas", "dar", "co", "di"))
    write(tmp_path / "text.txt", text + "\n")
    model.tokenizer.save(tmp_path / "tokenizer")
    options = PrepareOptions(max_seq_length=16, next_sentence="none", duplicates=1, holdout_rate=0.0)
    prepare(str(tmp_path / "text.txt"), str(tmp_path / "tokenizer"), str(tmp_path / "data"), options, num_workers=1)
    rows = open_dataset(tmp_path / "data").train
    masked, nats = masked_loss(model, rows, word_masking(16))
    begins = model.tokenizer.word_starts
    num_words = begins[masked.mlm_labels[masked.mlm_weights > 0]].sum()
    ids = rows_to_batch(rows.gather(np.arange(rows.num_rows)), np.zeros(rows.num_rows, np.int32)).token_ids
    words = ids[ids > model.tokenizer.mask_id]  # and pieces of them
    found = evaluate_pretrained(model, tmp_path / "data", "train", one_device)
    bits = nats / num_words * begins[words].mean() / math.log(2)
    expected = bits * found["counts"]["tokens"] / found["counts"]["text_bytes"]
    assert found["metrics"]["bits_per_byte"] == pytest.approx(expected, rel=1e-5)
    assert found["counts"]["text_bytes"] == pytest.approx(len(text), abs=8)
