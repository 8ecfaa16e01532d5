# SPDX-License-Identifier: Apache-2.0
"""Work directories: a run replaces nothing that is not its own."""

import pytest

from bert_jax.errors import InputError
from bert_jax.settings.finetuning import FinetuneConfig
from bert_jax.settings.pretraining import PretrainConfig
from bert_jax.training.workdir import check_workdir


@pytest.mark.parametrize("config", [PretrainConfig(), FinetuneConfig()])
@pytest.mark.parametrize("name", ["tokenizer", "pretrained", "finetuned", "metrics.jsonl", "predictions"])
def test_a_directory_with_something_else_that_a_run_would_replace_is_refused(tmp_path, config, name):
    (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=f"holds {name}, which a run would replace, and no run; give a new or an emp"):
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
