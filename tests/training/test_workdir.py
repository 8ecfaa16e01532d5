# SPDX-License-Identifier: Apache-2.0
"""Work directories: a run replaces nothing that is not its own."""

import dataclasses
import json

import pytest

from bert_jax.errors import InputError
from bert_jax.settings.finetuning import FinetuneConfig
from bert_jax.settings.pretraining import MaskingConfig, Phase2Config, PretrainConfig
from bert_jax.settings.rules import to_dict
from bert_jax.training.choices import as_begun
from bert_jax.training.workdir import check_workdir


@pytest.mark.parametrize("config", [PretrainConfig(), FinetuneConfig()])
@pytest.mark.parametrize("name", ["tokenizer", "pretrained", "finetuned", "metrics.jsonl", "predictions"])
def test_a_directory_with_something_else_that_a_run_would_replace_is_refused(tmp_path, config, name):
    (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=f"holds {name}, which a run would replace; give a new"):
        check_workdir(tmp_path, {}, config)


def test_a_directory_with_other_files_or_with_what_a_kill_leaves_is_not(tmp_path):
    for name in (".lock", "notes.txt", ".config.json.12.tmp"):
        (tmp_path / name).touch()
    (tmp_path / "checkpoints").mkdir()
    check_workdir(tmp_path, {}, PretrainConfig())
    # Of a run that has lost its settings, the checkpoints count.
    (tmp_path / "checkpoints" / "00000010").mkdir()
    (tmp_path / "tokenizer").mkdir()
    check_workdir(tmp_path, {}, PretrainConfig())


@pytest.mark.parametrize(("written", "today"), [(True, "on"), (False, "off")])
def test_a_run_that_an_earlier_version_began_keeps_who_updates_what(tmp_path, written, today):
    """`train.zero1` was True or False."""
    config = PretrainConfig()
    identity = {"dataset": "a", "later_datasets": [], "row_lengths": [128], "run": to_dict(config)}
    identity["run"]["train"]["zero1"] = written
    (tmp_path / "config.json").write_text(json.dumps(identity))
    assert as_begun(config, tmp_path).train.zero1 == today


def test_a_run_of_two_phases_that_version_0_2_began_goes_on(tmp_path):
    """It wrote a limit of 20, which no sequence of 128 tokens reaches, and the second phase had one of its own."""
    config = PretrainConfig(phase2=Phase2Config(num_steps=10, max_predictions=80))
    identity = {"dataset": "a", "later_datasets": ["b"], "row_lengths": [128, 512], "run": to_dict(config)}
    before = to_dict(dataclasses.replace(config, masking=MaskingConfig(max_predictions=20)))
    (tmp_path / "config.json").write_text(json.dumps(identity | {"run": before}))
    check_workdir(tmp_path, identity, config)
    config = dataclasses.replace(config, phase2=Phase2Config(num_steps=10))
    before["phase2"]["max_predictions"] = 0
    (tmp_path / "config.json").write_text(json.dumps(identity | {"run": before}))
    with pytest.raises(InputError, match=r"another masking\.max_predictions"):  # 20 of 512 were masked
        check_workdir(tmp_path, identity | {"run": to_dict(config)}, config)
