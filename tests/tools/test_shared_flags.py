# SPDX-License-Identifier: Apache-2.0
"""Every option of a data set is a flag with the same default, and is read from it."""

import dataclasses

import pytest
from absl import flags
from commands import run_python

from bert_jax.data.prepare import PrepareOptions
from bert_jax.tools import shared_flags


@pytest.fixture
def values(monkeypatch):
    values = flags.FlagValues()
    for name in ("DEFINE_integer", "DEFINE_string", "DEFINE_float", "DEFINE_bool"):
        define = getattr(flags, name)
        monkeypatch.setattr(flags, name, lambda *args, define=define, **rest: define(*args, flag_values=values, **rest))
    return values


def test_flags_are_the_options(values):
    read = shared_flags.define_options()
    options = {field.name for field in dataclasses.fields(PrepareOptions)}
    assert options == set(values) & options and len([name for name in values if name in options]) == len(options)
    values(["prepare_corpus"])
    assert read() == PrepareOptions()
    values(["prepare_corpus", "--pack=3", "--next_sentence=none", "--holdout_rate=0.5"])
    assert read() == PrepareOptions(pack=3, next_sentence="none", holdout_rate=0.5)


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("prepare_corpus", ("max_seq_length", "text_column", "workers")),
        ("predict", ("checkpoint", "long_texts", "guesses")),
        ("import_tfrecords", ("masks", "heldout_input", "workers")),
    ],
)
def test_help_lists_the_flags_that_others_have_too(command, names):
    said = run_python(["-m", f"bert_jax.tools.{command}", "--help"]).stdout
    assert all(f"--{name}" in said or f"--[no]{name}" in said for name in names)
