# SPDX-License-Identifier: Apache-2.0
"""The program's own files, edited or damaged: one line with the file, the place, what stands there and what should."""

import json
import pickle
import shutil

import mutations
import numpy as np
import pytest
from builders import tiny_run

from bert_jax.checkpoints.states import SEAL, seal
from bert_jax.data.building import finished_manifest
from bert_jax.errors import InputError
from bert_jax.inference.pretrained import load_pretrained
from bert_jax.settings.finetuning import FinetuneConfig
from bert_jax.settings.rules import to_dict
from bert_jax.storage import schema
from bert_jax.storage.writing import write_json
from bert_jax.tasks.results import FinetuneResult, read_results
from bert_jax.training.workdir import check_workdir


@pytest.fixture(scope="module")
def model(pretrained):
    """Returns a directory that `save_pretrained` wrote; shared, so not to be changed."""
    return pretrained


@pytest.fixture
def copy(model, tmp_path):
    """Returns a model that may be damaged."""
    return shutil.copytree(model, tmp_path / "model")


def refusal(function, *arguments) -> str:
    message = mutations.outcome(lambda: function(*arguments))
    assert message
    return message


def edit(path, change) -> None:
    """Changes the config.json of an exported model and seals it anew, so that no checksum tells."""
    path.joinpath("config.json").write_bytes(mutations.dump(change(json.loads((path / "config.json").read_text()))))
    arrays = json.loads((path / SEAL).read_text())["arrays"]
    seal(path, {"arrays": arrays})


@pytest.mark.parametrize(
    ("path", "wrong", "expected"),
    [
        (("model", "hidden_size"), "x", 'config.json: model.hidden_size is "x", a text; use a whole number'),
        (("model", "num_layers"), 2**63, "config.json: model.num_layers 9223372036854775808 is not from"),
        (("model", "layer_norm_epsilon"), float("inf"), "layer_norm_epsilon Infinity is not from"),
        (("model", "initializer_stddev"), float("nan"), "initializer_stddev NaN is not from"),
        (("task",), ["encoder"], "config.json: Expected `str`, got `array` - at `$.task`"),
        (("labels",), {"0": "no"}, "config.json: Expected `array`, got `object` - at `$.labels`"),
        (("model", "x" * 300_000), 1, 'config.json: model has no key "xxxx'),
    ],
)
def test_a_wrong_value_in_an_exported_model_is_one_line(copy, path, wrong, expected):
    edit(copy, lambda about: mutations.replaced(about, path, wrong))
    assert expected in refusal(load_pretrained, copy)


def test_a_model_without_words_is_one_line(copy):
    edit(copy, lambda about: about | {"model": {}})
    assert "model.vocab_size is 0, and a model has words" in refusal(load_pretrained, copy)


def test_an_error_is_one_line_whatever_the_value_holds():
    assert str(InputError("a\nb\x1e\ud800\u2028é")) == r"a\nb\x1e\ud800\u2028é"
    assert str(pickle.loads(pickle.dumps(InputError("a\tb")))) == r"a\tb"


def test_a_missing_section_in_an_exported_model_is_one_line(copy):
    edit(copy, lambda about: mutations.without(about, ("model",)))
    assert "config.json: Object missing required field `model`" in refusal(load_pretrained, copy)


def test_parameters_that_were_damaged_before_they_were_sealed_are_one_line(copy):
    metadata = copy / "params" / "_METADATA"
    metadata.write_bytes(b"z" + metadata.read_bytes()[1:])
    edit(copy, lambda about: about)
    assert "params cannot be restored (Expecting value" in refusal(load_pretrained, copy)


def test_a_seal_of_other_arrays_does_not_fit_its_model(copy):
    about = json.loads((copy / SEAL).read_text())
    del about["digest"]  # as versions up to 0.2 wrote them
    arrays = mutations.without(about["arrays"], (next(iter(about["arrays"])),))
    (copy / SEAL).write_bytes(mutations.dump(about | {"format": 1, "arrays": arrays}))
    assert "does not fit this model" in refusal(load_pretrained, copy)


def test_a_seal_says_what_stands_where(copy):
    about = json.loads((copy / SEAL).read_text())
    (copy / SEAL).write_bytes(mutations.dump(mutations.replaced(about, ("files", "config.json", "bytes"), "many")))
    assert "Expected `int`, got `str` - at `$.files[...].bytes`" in refusal(load_pretrained, copy)


IDENTITY = {"dataset": "0" * 64, "later_datasets": []}


def test_a_work_directory_says_what_stands_where(tmp_path):
    config = tiny_run("data")
    identity = IDENTITY | {"run": mutations.replaced(to_dict(config), ("train", "num_steps"), "12")}
    write_json(tmp_path / "config.json", identity)
    message = refusal(check_workdir, tmp_path, IDENTITY, config)
    assert f"{tmp_path / 'config.json'}: run: Expected `int`, got `str` - at `$.train.num_steps`" in message


def test_a_run_of_an_older_version_lacks_settings_and_has_others(tmp_path):
    """It resumes where what it lacks has its default, and differs where it had a setting that is no more."""
    config = tiny_run("data")
    run = mutations.without(to_dict(config), ("phase2",))
    run = mutations.without(run, ("model", "gradient_dtype"))
    write_json(tmp_path / "config.json", IDENTITY | {"run": run})
    ours = IDENTITY | {"run": to_dict(config)}
    check_workdir(tmp_path, ours, config)
    write_json(tmp_path / "config.json", IDENTITY | {"run": mutations.replaced(run, ("model", "old"), 1)})
    assert "belongs to a run with another model.old" in refusal(check_workdir, tmp_path, ours, config)


def test_results_that_are_damaged_are_one_line(tmp_path):
    result = FinetuneResult({"accuracy": 0.5, "loss": float("nan")}, "accuracy", {}, 7, 0, 1.5)
    about = {"task": "sst2"} | result._asdict()
    write_json(tmp_path / "results.json", about)
    read = read_results(tmp_path)
    assert read is not None and read.step == 7 and np.isnan(read.metrics["loss"])
    (tmp_path / "results.json").write_bytes(mutations.dump(mutations.without(about, ("step",))))
    assert "results.json: Object missing required field `step`" in refusal(read_results, tmp_path)


@pytest.mark.parametrize("name", ["/a", "a/../../b", "..", "", "a\n", "\ud800"])
def test_a_file_that_is_not_in_the_directory_is_no_name_of_one(name):
    schema.check(["a", "a/b..c", "a.b/..c"], list[schema.FileName], "x.json", "copy it again")
    with pytest.raises(InputError, match=r"x\.json: .*; copy it again"):
        schema.check([name], list[schema.FileName], "x.json", "copy it again")


def test_a_finished_data_set_with_wrong_types_is_one_line(tmp_path):
    identity = {"format": "x", "version": 1, "options": {"max_seq_length": 32}, "input": "i", "tokenizer": "t"}
    write_json(tmp_path / "manifest.json", {"identity": identity | {"options": []}})
    assert "was begun with max_seq_length None, not 32" in refusal(finished_manifest, tmp_path, identity)


@pytest.mark.parametrize("name", ["\ud800", "x" * 300, "a\nb"])
def test_a_setting_that_is_no_name_is_one_line(tmp_path, name):
    config = tiny_run("data")
    ours = IDENTITY | {"run": to_dict(config)}
    (tmp_path / "config.json").write_bytes(mutations.dump(mutations.replaced(ours, ("run", "model", name), 1)))
    message = refusal(check_workdir, tmp_path, ours, config)
    assert "belongs to a run with another model." in message or "surrogates not allowed" in message


def test_a_setting_that_has_gone_does_not_stop_a_run_from_resuming(tmp_path):
    config = FinetuneConfig()
    before = mutations.replaced(to_dict(config), ("sweep", "together"), False)
    write_json(tmp_path / "config.json", IDENTITY | {"run": before})
    check_workdir(tmp_path, IDENTITY | {"run": to_dict(config)}, config)
