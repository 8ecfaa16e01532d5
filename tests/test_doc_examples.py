# SPDX-License-Identifier: Apache-2.0
"""The examples of the main functions' documentation run, with the model in the box, and print what they say."""

import doctest

import jax
import numpy as np
import pytest

import bert_jax

MAIN = (
    *("load_pretrained", "load_tokenizer", "fill_masks", "sentence_embeddings", "score_sentences", "make_batch"),
    *("encode", "recipe", "maxsim", "quantize"),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("forward", "init_params", "mask_tokens", "mine_negatives")
    ),  # they compile
)


@pytest.mark.parametrize("name", MAIN)
def test_the_example_of_a_function_prints_what_it_says(repository, monkeypatch, name):
    monkeypatch.chdir(repository)
    function = getattr(bert_jax, name)
    (example,) = doctest.DocTestFinder(recurse=False).find(
        function, name, module=False, globs={"bert_jax": bert_jax, "jax": jax, "np": np}
    )
    assert len(example.examples) > 0
    told: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(example, out=told.append)
    assert not result.failed, "".join(told)
