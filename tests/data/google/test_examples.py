# SPDX-License-Identifier: Apache-2.0
"""Google's pre-training examples: imported as they are or with their words put back, and trained on."""

import itertools
import os
from pathlib import Path

import google_files
import jax
import numpy as np
import pytest
from builders import assert_same, message, tiny_model
from google_files import write_examples

from bert_jax.batches.load import eval_batches, rows_to_batch, train_batches
from bert_jax.data import records
from bert_jax.data.google import import_examples as module
from bert_jax.data.google import tfrecord
from bert_jax.data.google.examples import INPUTS, LABELS, PREDICTIONS
from bert_jax.data.google.import_examples import import_examples
from bert_jax.devices.sharding import make_mesh
from bert_jax.model.objective import PretrainingObjective
from bert_jax.settings.pretraining import MaskingConfig, MeshConfig
from bert_jax.tokenizing import load_tokenizer

FEATURES = (*INPUTS, *PREDICTIONS, LABELS)
L, P = 64, 12  # of the goldens


@pytest.fixture(scope="module")
def golden(repository: Path) -> dict[str, np.ndarray]:
    """Returns the features that TensorFlow reads, the text and the vocabulary."""
    with np.load(repository / "tests" / "golden" / "google_examples.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def google_file(repository: Path) -> str:
    return str(repository / "tests" / "golden" / "google_examples.tfrecord")


@pytest.fixture(scope="module")
def vocab(golden, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    path.write_text("".join(f"{token}\n" for token in golden["vocab"]), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def imported(google_file, vocab, tmp_path_factory) -> dict[str, Path]:
    """Returns the data sets of both kinds of masks, by kind; not to be changed."""
    folder = tmp_path_factory.mktemp("imported")
    for masks in ("keep", "redraw"):
        import_examples(google_file, vocab, str(folder / masks), google_file_copy(google_file, folder), masks, 1)
    return {masks: folder / masks for masks in ("keep", "redraw")}


def google_file_copy(google_file: str, folder: Path) -> str:
    """Returns a file with the first 20 examples, to hold out."""
    google_files.write_records(folder / "heldout", itertools.islice(tfrecord.read_records(google_file), 20))
    return str(folder / "heldout")


def one_device() -> jax.sharding.Mesh:
    return make_mesh(MeshConfig(), jax.devices()[:1])


# Kept masks


def assert_googles_rows(batch, golden) -> list[int]:
    """Asserts that a batch has Google's examples as they are, and returns which."""
    numbers = np.asarray(batch.sequence_numbers)[:, 0]
    inputs = batch.token_ids, batch.sequence_ids, batch.type_ids
    ours = *inputs, batch.mlm_positions, batch.mlm_labels, batch.mlm_weights, batch.next_sentence_labels
    for name, array in zip(FEATURES, ours, strict=True):
        np.testing.assert_array_equal(array, golden[name][numbers], err_msg=name)
    return numbers.tolist()


def test_every_epoch_has_googles_masks(imported, golden):
    split = records.open_dataset(imported["keep"]).train
    assert split.num_rows == len(golden["input_ids"]) == 105
    seen = []
    for batch in itertools.islice(train_batches(split, 0, 35, 7, one_device()), 9):  # 3 epochs
        seen += assert_googles_rows(jax.device_get(batch), golden)
    for epoch in range(3):
        assert sorted(seen[epoch * 105 : (epoch + 1) * 105]) == list(range(105))
    assert seen[:105] != seen[105:210]


def test_heldout_examples_keep_their_masks_and_missing_rows_predict_nothing(imported, golden):
    split = records.open_dataset(imported["keep"]).heldout
    *whole, last = (jax.device_get(batch) for batch in eval_batches(split, 8, one_device()))
    assert len(whole) == 2 and last.mlm_weights[:4].any()
    assert [number for batch in whole for number in assert_googles_rows(batch, golden)] == list(range(16))
    assert not last.mlm_weights[4:].any() and not last.sequence_ids[4:].any()


def test_the_objective_takes_kept_masks_as_they_are(imported, golden):
    model = tiny_model(vocab_size=235)
    objective = PretrainingObjective(model, MaskingConfig(rate=0.5), mask_id=103, never_predicted=(101, 102))
    batch = rows_to_batch(records.open_dataset(imported["keep"]).train.gather(np.arange(105)), np.ones(105, np.int32))
    assert_googles_rows(objective.prepare(batch), golden)
    assert float(objective.denominators(batch)["mlm_loss"]) == pytest.approx(golden["masked_lm_weights"].sum())


# Masks drawn anew


def test_redraw_gives_the_text_back(imported, golden):
    """Sentences A and B of every row are stretches of a document, as our tokenizer cuts it."""
    dataset = records.open_dataset(imported["redraw"])
    tokenizer = load_tokenizer(dataset.tokenizer_path)
    texts = str(golden["text"]).strip().replace("\n\n", "\t").replace("\n", " ").split("\t")
    documents = [f" {' '.join(tokenizer.tokenize(text))} " for text in texts]
    assert dataset.train.dtype == records.row_dtype(L, 1, tokenizer.vocab_size)
    rows = dataset.train.gather(np.arange(105))
    for row in rows:
        cls, *inside, last = tokenizer.tokens(row["token_ids"][: row["lengths"][0]])
        assert (cls, last) == ("[CLS]", "[SEP]")
        sides = inside[: row["first_lengths"][0] - 2], inside[row["first_lengths"][0] - 1 :]
        homes = [{number for number, text in enumerate(documents) if f" {' '.join(side)} " in text} for side in sides]
        assert all(homes) and (row["labels"][0] == 1 or homes[0] & homes[1])  # B follows A in one document
    starts = records.unpack_word_starts(rows["word_starts"], L)
    assert_same(starts, tokenizer.word_starts[rows["token_ids"]] & (golden["input_mask"] == 1))


def test_both_kinds_count_the_words_of_the_training_text(imported):
    kept, redrawn = (records.open_dataset(imported[masks]) for masks in ("keep", "redraw"))
    rows = redrawn.train.gather(np.arange(105))
    expected = np.bincount(rows["token_ids"][np.arange(L) < rows["lengths"]], minlength=235)
    expected[[101, 102]] = 0  # [CLS] and [SEP]
    for dataset in (kept, redrawn):
        train = dataset.manifest["splits"]["train"]
        assert dataset.token_counts.tolist() == expected.tolist() and train["tokens"] == expected.sum()
        assert train["random_next_share"] == round(float((rows["labels"] == 1).mean()), 4)
        assert train["fill"] == round(rows["lengths"].sum() / 105 / L, 4)
    assert kept.manifest["row"] == redrawn.manifest["row"] | {"predictions": P}


# Several files, stops and refusals


def parts_of(google_file: str, folder: Path) -> str:
    """Returns a glob of the examples in four files, one of them empty."""
    data = list(tfrecord.read_records(google_file))
    for index, part in enumerate((data[:50], [], data[50:53], data[53:])):
        google_files.write_records(folder / f"part{index}.tfrecord", part)
    return str(folder / "part*.tfrecord")


def test_a_run_that_was_stopped_goes_on(google_file, vocab, tmp_path, monkeypatch, capsys):
    pattern, output = parts_of(google_file, tmp_path), str(tmp_path / "stopped")
    monkeypatch.setattr(module, "SHARD_BYTES", 1)  # a shard for every time that examples are read
    whole = import_examples(pattern, vocab, str(tmp_path / "whole"), num_workers=1)
    assert [shard["rows"] for shard in whole["splits"]["train"]["shards"]] == [50, 3, 52]
    monkeypatch.setattr(records, "finish_dataset", lambda *_, **__: 1 / 0)  # the shards have their names by then
    with pytest.raises(ZeroDivisionError):
        import_examples(pattern, vocab, output, num_workers=1)
    monkeypatch.undo()
    assert "holds no manifest.json" in message(records.open_dataset, output)
    assert "was begun with masks 'keep', not 'redraw'" in refusal(pattern, vocab, output, masks="redraw")
    monkeypatch.setattr(module, "check_examples", lambda path, *_: path.endswith("part0.tfrecord") or 1 / 0)
    for _ in range(2):  # no example is read again
        assert import_examples(pattern, vocab, output, num_workers=1) == whole
    assert "already complete" in capsys.readouterr().err
    opened = records.open_dataset(output)
    assert opened.fingerprint == records.open_dataset(tmp_path / "whole").fingerprint
    assert not (tmp_path / "stopped" / "unfinished").exists()
    numbers = opened.train.gather(np.arange(105))["numbers"][:, 0]
    assert len(set(numbers.tolist())) == 105 and numbers[:2].tolist() == [0, 4] and numbers[50] == 2


@pytest.fixture
def bad(tmp_path):
    return tmp_path / "bad"


@pytest.fixture
def output(tmp_path):
    return tmp_path / "data"


def refusal(inputs, vocab, output, **options) -> str:
    """Returns the message with which an import fails."""
    return message(import_examples, str(inputs), vocab, str(output), num_workers=1, **options)


ROW = 2  # the third record


@pytest.mark.parametrize(
    ("feature", "places", "value", "reason"),
    [
        ("input_ids", 5, 235, "input_ids are ids of the vocabulary"),
        ("input_ids", 0, 2, "input_ids begin with"),
        ("input_mask", 3, 0, "input_mask is ones"),
        ("input_mask", slice(1, 64), 0, "input_mask is ones"),
        ("segment_ids", 63, 0, "segment_ids are 0 in sentence A"),
        ("masked_lm_weights", 0, 0.5, "masked_lm_weights are 0 or 1"),
        ("masked_lm_weights", 3, 0, "masked_lm_weights of unused places come last"),
        ("masked_lm_positions", 1, 64, "masked_lm_positions are in the sequence"),
        ("masked_lm_positions", slice(0, 2), 9, "masked_lm_positions are all different"),
        ("masked_lm_ids", 0, 1000, "masked_lm_ids are ids of the vocabulary"),
        ("next_sentence_labels", 0, 2, "next_sentence_labels are 0 or 1"),
    ],
)
def test_examples_that_no_model_can_be_trained_on(golden, vocab, bad, output, feature, places, value, reason):
    columns = {name: golden[name][:5].copy() for name in FEATURES}
    columns[feature][ROW, places] = value
    write_examples(bad, [columns])
    assert f"{bad}, record {ROW + 1}: {reason}" in refusal(bad, vocab, output)
    assert not output.exists()


def test_a_bad_example_far_into_a_file_leaves_no_data_set(golden, vocab, bad, output):
    """The first thousand are good, so the directory is there by then."""
    columns = {name: np.concatenate([golden[name]] * 11) for name in FEATURES}
    columns["masked_lm_ids"][1100, 0] = 500
    write_examples(bad, [columns])
    assert f"{bad}, record 1101: masked_lm_ids" in refusal(bad, vocab, output)
    assert os.listdir(bad.parent) == ["bad"]


SHORT = google_files.encode_payloads(np.ones((1, 13), np.int64))[0]
REALS = google_files.encode_payloads(np.zeros((1, L), np.float32))[0]
ENDLESS = tfrecord.Feature(tfrecord.INTEGERS, b"\xff" * 10 + b"\0")


@pytest.mark.parametrize(
    ("feature", "value", "problem"),
    [
        ("masked_lm_ids", None, "record 7: feature masked_lm_ids is missing"),
        ("input_ids", REALS, "7: feature input_ids is"),
        ("input_mask", SHORT, "record 7: input_mask has 13 values, and others here 64"),
        (LABELS, SHORT, "record 7: next_sentence_labels has 13 values, and others here 1"),
        (LABELS, ENDLESS, "record 7, feature next_sentence_labels is damaged or another kind of file (an integer"),
    ],
)
def test_features_that_are_missing_or_of_another_kind_or_length(
    google_file, vocab, bad, output, feature, value, problem
):
    data = list(tfrecord.read_records(google_file))
    features = tfrecord.parse_example(data[6]) | {feature: value}
    data[6] = google_files.encode_example({name: value for name, value in features.items() if value})
    google_files.write_records(bad, data)
    assert problem in refusal(bad, vocab, output)
    google_files.write_records(bad, [*data[:3], b"no example"])
    assert f"{bad}, record 4 is damaged or another kind of file (" in refusal(bad, vocab, output)
    assert not output.exists()


def test_files_of_another_shape_and_files_of_nothing(google_file, golden, vocab, bad, output, tmp_path):
    both = f"{google_file},{bad}"
    write_examples(bad, [{name: golden[name][:3, : 11 if name in PREDICTIONS else L] for name in FEATURES}])
    told = refusal(both, vocab, output)
    assert f"{bad}, record 1: masked_lm_ids has 11 values, and the first file has 12" in told
    assert "data does not exist" in message(records.open_dataset, output)
    redrawn = import_examples(both, vocab, str(tmp_path / "redrawn"), masks="redraw", num_workers=1)
    assert redrawn["splits"]["train"]["rows"] == 108  # places for predictions do not matter then
    write_examples(bad, [])
    assert "hold no example" in refusal(bad, vocab, output)
    assert "hold no example" in refusal(bad, vocab, output, heldout_inputs=google_file)
    assert "is in input and in heldout_input" in refusal(google_file, vocab, output, heldout_inputs=google_file)


def test_examples_without_tokens_or_without_masks_to_keep(golden, vocab, bad, output):
    write_examples(bad, [{name: golden[name][:3, : 1 if name == LABELS else 0] for name in FEATURES}])
    assert f"{bad}, record 1: input_ids has 0 values; give examples of 2 to 65535" in refusal(bad, vocab, output)
    write_examples(bad, [{name: golden[name][:3, : 0 if name in PREDICTIONS else L] for name in FEATURES}])
    told = refusal(bad, vocab, output)
    assert "record 1: masked_lm_ids has no value to keep; import it with --masks=redraw" in told
    assert import_examples(str(bad), vocab, str(output), masks="redraw", num_workers=1)["row"]["length"] == 64


def test_other_refusals(google_file, vocab, imported, tmp_path):
    assert "masks 'no' is not known; use keep or redraw" in refusal(google_file, vocab, "x", masks="no")
    assert "exists and is not a data set" in refusal(google_file, vocab, tmp_path.parent)
    told = refusal(google_file, vocab, imported["keep"], masks="redraw")
    assert "was begun with masks 'keep', not 'redraw'" in told
    assert "was begun with another heldout_input" in refusal(google_file, vocab, imported["keep"])
