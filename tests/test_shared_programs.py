# SPDX-License-Identifier: Apache-2.0
"""What tests share is what is equal: a program of something else would pass for the one that a test asks for."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from bert_jax.model import keys


@dataclasses.dataclass(frozen=True)
class Settings:
    rate: float


def compiled(held, **options):
    return jax.jit(lambda x: (x, held), **options)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (Settings(0.5), Settings(0.5), True),
        (Settings(0.5), Settings(0.25), False),
        (np.arange(3), np.arange(3), True),
        (np.arange(3), np.arange(3.0), False),
        (1, True, False),
        (1, 1.0, False),
        (0.0, -0.0, False),
        ((1, 2), (1, 3), False),
        (functools.partial(min, 1), functools.partial(min, 1), True),
        (functools.partial(min, 1), functools.partial(min, 2), False),
        (compiled(1), compiled(1), False),  # of this file's import, before anything was shared
        ([], [], False),  # in which a test may note something
        (object(), object(), False),
    ],
)
def test_functions_are_shared_if_all_that_they_hold_is_equal(one, other, same):
    assert (compiled(one) is compiled(other)) == same


def test_arrays_of_jax_are_equal_to_themselves_alone():
    one, other = jax.numpy.arange(3), jax.numpy.arange(3)
    assert compiled(one) is compiled(one) and compiled(one) is not compiled(other)


def test_options_and_code_are_compared():
    assert compiled(1) is not compiled(1, donate_argnums=0)
    assert jax.jit(lambda x: x + 1) is not jax.jit(lambda x: x + 2)


def test_nothing_is_shared_where_the_package_is_patched(monkeypatch):
    before = compiled(1)
    assert compiled(1) is before
    monkeypatch.setattr(keys, "root_key", None)
    assert compiled(1) is not compiled(1)
    monkeypatch.undo()
    assert compiled(1) is before


def test_a_test_may_have_its_own(own_programs):
    assert compiled(1) is not compiled(1)
