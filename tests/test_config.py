# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest

from bert_jax.config import (
    MODEL_SIZES,
    CheckpointConfig,
    MaskingConfig,
    MeshConfig,
    ModelConfig,
    PretrainConfig,
    model_size,
)
from bert_jax.errors import InputError
from bert_jax.settings import changed_keys, from_dict, to_dict


def test_dict_and_back_is_the_same():
    config = PretrainConfig(model=model_size("mini"))
    assert from_dict(PretrainConfig, to_dict(config)) == config


def test_google_sizes():
    assert (model_size("large").num_layers, model_size("large").num_heads) == (24, 16)
    assert model_size("tiny") == model_size("L2_H128")
    assert model_size("base") == ModelConfig()
    assert len([name for name in MODEL_SIZES if name.startswith("L")]) == 24


@pytest.mark.parametrize("section", ["optimizer", "phase2"])
def test_a_warm_up_is_said_in_one_way(section):
    config = from_dict(PretrainConfig, {section: {"warmup_steps": 100, "warmup_rate": 0.1}})
    with pytest.raises(InputError, match=rf"{section}.warmup_rate 0.1 and {section}.warmup_steps 100 .* set {section}"):
        getattr(config, section).validate()


def test_padded_vocabulary():
    assert dataclasses.replace(ModelConfig(), vocab_size=30522).padded_vocab_size == 30592
    assert dataclasses.replace(ModelConfig(), vocab_size=256).padded_vocab_size == 256


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"optimizer": {"learnin_rate": 1.0}}, "did you mean 'learning_rate'"),
        ({"modle": {}}, "did you mean 'model'"),
        ({"train": {"num_steps": 1.5}}, "use a int"),
        ({"train": 3}, "is a section"),
        ({"data": {"verify": 1}}, "use a bool"),
    ],
)
def test_wrong_keys_and_types_are_one_clear_line(values, expected):
    with pytest.raises(InputError, match=expected) as caught:
        from_dict(PretrainConfig, values)
    assert "\n" not in str(caught.value)


def test_whole_numbers_are_taken_for_floats():
    assert from_dict(PretrainConfig, {"optimizer": {"learning_rate": 1}}).optimizer.learning_rate == 1.0


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (dataclasses.replace(ModelConfig(), num_heads=7), "768 is not divisible by model.num_heads 7; use 763 or 770"),
        (dataclasses.replace(ModelConfig(), activation="relu"), "gelu_tanh, gelu_exact"),
        (dataclasses.replace(ModelConfig(), hidden_dropout_rate=1.5), "is not a rate"),
        (MaskingConfig(mask_rate=0.8, random_rate=0.3), "above 1"),
        (CheckpointConfig(keep_last=1), "use 2 or more"),
        (MeshConfig(data=-1, fsdp=-1), "at most once"),
    ],
)
def test_rules(config, expected):
    with pytest.raises(InputError, match=expected):
        config.validate()


def test_changed_keys_are_named_in_full():
    before = to_dict(PretrainConfig())
    after = to_dict(PretrainConfig(model=model_size("mini")))
    assert "model.hidden_size" in changed_keys(before, after)
    assert changed_keys(before, before) == []
