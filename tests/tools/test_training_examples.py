# SPDX-License-Identifier: Apache-2.0
"""Data sets as Google's pre-training examples: the masks of training, or those that were imported."""

import dataclasses
import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from bert_jax.data import records
from bert_jax.data.google.examples import INPUTS, LABELS, PREDICTIONS, read_examples
from bert_jax.data.google.import_examples import import_examples
from bert_jax.data.pipeline import train_batches
from bert_jax.devices.sharding import make_mesh
from bert_jax.errors import InputError
from bert_jax.model.masking import mask_tokens
from bert_jax.settings.pretraining import MaskingConfig, MeshConfig
from bert_jax.storage import files, writing
from bert_jax.text.tokenizer import load_tokenizer
from bert_jax.tools.training_examples import export_examples

FEATURES = (*INPUTS, *PREDICTIONS, LABELS)
L, P = 64, 12  # of the goldens
MASKING = MaskingConfig()


@pytest.fixture(scope="module")
def golden(repository: Path) -> dict[str, np.ndarray]:
    """Returns the features that TensorFlow reads in Google's examples, and their vocabulary."""
    with np.load(repository / "tests" / "golden" / "google_examples.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def imported(golden, repository, tmp_path_factory) -> dict[str, Path]:
    """Returns Google's examples as data sets of both kinds of masks, by kind; not to be changed."""
    folder = tmp_path_factory.mktemp("imported")
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in golden["vocab"]), encoding="utf-8")
    examples = str(repository / "tests" / "golden" / "google_examples.tfrecord")
    for masks in ("keep", "redraw"):
        import_examples(examples, str(folder / "vocab.txt"), str(folder / masks), masks=masks, num_workers=1)
    return {masks: folder / masks for masks in ("keep", "redraw")}


def test_kept_masks_are_exported_as_they_came(imported, golden, tmp_path):
    assert export_examples(str(imported["keep"]), str(tmp_path / "out"), MASKING, num_files=2) == 105
    read = []
    for name in ("train-00000-of-00002.tfrecord", "train-00001-of-00002.tfrecord"):
        ((_, columns),) = read_examples(str(tmp_path / "out" / name))
        read += zip(*(columns[name] for name in FEATURES), strict=True)
    theirs = zip(*(golden[name] for name in FEATURES), strict=True)

    def key(example):
        return [array.tolist() for array in example]

    assert sorted(map(key, read)) == sorted(map(key, theirs))
    assert (tmp_path / "out" / "vocab.txt").read_text().split("\n")[:-1] == golden["vocab"].tolist()


def test_exported_masks_are_those_of_training(imported, tmp_path):
    """Seed, order and epochs as in training; padded to max_predictions; other masks in each epoch."""
    masking = MaskingConfig(max_predictions=14, seed=3)
    data, tokenizer = records.open_dataset(imported["redraw"]), load_tokenizer(imported["redraw"] / "tokenizer")
    assert export_examples(str(imported["redraw"]), str(tmp_path / "out"), masking, epochs=2) == 210
    ((_, columns),) = read_examples(str(tmp_path / "out" / "train-00000-of-00001.tfrecord"))
    assert columns["masked_lm_ids"].shape == (210, 14) and not columns["masked_lm_weights"][:, 10:].any()
    never = (tokenizer.cls_id, tokenizer.sep_id)
    mask = jax.jit(lambda batch: mask_tokens(batch, masking, tokenizer.vocab_size, tokenizer.mask_id, never))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    for step, batch in enumerate(itertools.islice(train_batches(data.train, 0, 70, 3, mesh), 3)):
        masked = jax.device_get(mask(batch))
        ours = (masked.token_ids, masked.sequence_ids, masked.type_ids, masked.mlm_positions, masked.mlm_labels)
        places = slice(step * 70, (step + 1) * 70)
        for name, array in zip((*INPUTS, *PREDICTIONS), (*ours, masked.mlm_weights), strict=True):
            np.testing.assert_array_equal(columns[name][places, : array.shape[1]], array, err_msg=name)
    # and back: the words of an example do not depend on its mask
    manifest = import_examples(
        str(tmp_path / "out" / "*.tfrecord"),
        str(tmp_path / "out"),
        str(tmp_path / "back"),
        masks="redraw",
        num_workers=1,
    )
    back = records.open_dataset(tmp_path / "back").train.gather(np.arange(210))["token_ids"]
    original = data.train.gather(np.arange(105))["token_ids"]
    assert sorted(back.tolist()) == sorted(original.tolist() * 2)
    assert manifest["tokenizer"]["fingerprint"] == tokenizer.fingerprint
    read = [path.stat().st_size for path in (tmp_path / "out").glob("*.tfrecord")]
    assert manifest["inputs"] == {"names": ["*.tfrecord"], "files": len(read), "bytes": sum(read)}
    assert len(np.unique(columns["masked_lm_positions"], axis=0)) > 200


def changed_copy(source: Path, target: Path, max_sequences: int = 1, label: int = 0) -> Path:
    """Returns a data set like `source` without held-out rows, of so many sequences a row, all with this label."""
    shutil.copytree(source, target)
    manifest = files.read_json(target / records.MANIFEST)
    rows = np.zeros(105, records.row_dtype(L, max_sequences, 235))
    rows["labels"] = label
    shard = manifest["splits"]["train"]["shards"][0]
    manifest["splits"]["train"]["shards"] = [records.write_shard(target / shard["name"], rows.dtype, 105, [rows])]
    manifest["splits"]["heldout"]["shards"] = []
    manifest["row"]["max_sequences"] = max_sequences
    writing.write_json(target / records.MANIFEST, manifest)
    return target


def test_what_cannot_be_exported(imported, tmp_path):
    def message(data=imported["redraw"], output=tmp_path / "out", masking=MASKING, **options) -> str:
        with pytest.raises(InputError) as caught:
            export_examples(str(data), str(output), masking, **options)
        assert not (tmp_path / "out").exists() and "\n" not in str(caught.value)
        return str(caught.value)

    assert "epochs 0 is less than 1" in message(epochs=0)
    assert "seed -1 is below 0; use 0 or more" in message(masking=dataclasses.replace(MASKING, seed=-1))
    assert "num_files 211 is more than the 210 examples" in message(num_files=211, epochs=2)
    assert "exists; give a directory that does not" in message(output=imported["keep"])
    assert "has static masks" in message(imported["keep"], epochs=2)
    assert "has static masks" in message(imported["keep"], masking=dataclasses.replace(MASKING, rate=0.3))
    packed = changed_copy(imported["redraw"], tmp_path / "packed", max_sequences=3)
    assert "packs up to 3 sequences into a row, and an example has one" in message(packed)
    unlabelled = changed_copy(imported["redraw"], tmp_path / "unlabelled", label=records.NO_LABEL)
    assert "has no next sentences" in message(unlabelled)
    assert "has no row in its split heldout" in message(unlabelled, split="heldout")


@pytest.mark.slow
def test_commands_from_googles_file_to_ours_and_back(golden, repository, tmp_path):
    examples = repository / "tests" / "golden" / "google_examples.tfrecord"
    (tmp_path / "vocab.txt").write_text("".join(f"{token}\n" for token in golden["vocab"]), encoding="utf-8")

    def run(tool: str, *options: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", f"bert_jax.tools.{tool}", *options]
        return subprocess.run(command, cwd=repository, capture_output=True, text=True)

    done = run("import_tfrecords", f"--input={examples}", f"--tokenizer={tmp_path}", f"--output={tmp_path / 'data'}")
    assert done.returncode == 0 and "train: 105 examples" in done.stderr
    done = run("export_tfrecords", f"--data={tmp_path / 'data'}", f"--output={tmp_path / 'out'}")
    assert done.returncode == 0 and "105 examples" in done.stderr
    assert (tmp_path / "out" / "train-00000-of-00001.tfrecord").stat().st_size == examples.stat().st_size
    done = run("import_tfrecords", f"--input={examples}", f"--tokenizer={tmp_path}", "--output=x", "--masks=some")
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    done = run("export_tfrecords", f"--data={tmp_path}", f"--output={tmp_path / 'other'}")
    assert done.returncode == 1 and "holds no manifest.json" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.reference
def test_tensorflow_reads_what_is_exported(imported, golden, tmp_path):
    """With the features and lengths that run_pretraining.py asks for."""
    tensorflow = pytest.importorskip("tensorflow")
    masking = MaskingConfig(max_predictions=14, seed=3)
    export_examples(str(imported["redraw"]), str(tmp_path / "out"), masking)
    path = str(tmp_path / "out" / "train-00000-of-00001.tfrecord")
    features = {
        name: tensorflow.io.FixedLenFeature(
            [L if name in INPUTS else 14 if name in PREDICTIONS else 1],
            tensorflow.float32 if name == "masked_lm_weights" else tensorflow.int64,
        )
        for name in FEATURES
    }
    read = tensorflow.io.parse_example(list(tensorflow.data.TFRecordDataset(path).as_numpy_iterator()), features)
    ((_, columns),) = read_examples(path)
    for name in FEATURES:
        np.testing.assert_array_equal(columns[name], read[name].numpy(), err_msg=name)
