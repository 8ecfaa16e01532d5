# SPDX-License-Identifier: Apache-2.0
import contextlib
import dataclasses
import typing

import jax
import numpy as np
import pytest

from bert_jax.errors import InputError
from bert_jax.model.parts import Dropout
from bert_jax.settings.finetuning import (
    EmbeddingConfig,
    FinetuneConfig,
    FinetuneDataConfig,
    FinetuneModelConfig,
    FinetuneTrainConfig,
    ProbeConfig,
    SweepConfig,
    TaskConfig,
)
from bert_jax.settings.model import MODEL_SIZES, MOST_DROPOUT, ModelConfig, check_type_ids, model_size
from bert_jax.settings.pretraining import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    MaskingConfig,
    MeshConfig,
    OptimizerConfig,
    Phase2Config,
    PretrainConfig,
    TeacherConfig,
    TrainConfig,
)
from bert_jax.settings.relatives import BLOCKS, Block
from bert_jax.settings.rules import Affects, affecting, changed_keys, from_dict, is_among, to_dict


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


def test_another_compute_dtype_leaves_what_it_forbids():
    narrow = dataclasses.replace(ModelConfig(), compute_dtype="bfloat16", gradient_dtype="bfloat16")
    assert narrow.computing_in("bfloat16") == narrow and narrow.computing_in("float32") == ModelConfig()
    exact = dataclasses.replace(ModelConfig(), matmul_precision="highest")
    assert exact.computing_in("float32") == exact
    assert exact.computing_in("bfloat16") == dataclasses.replace(ModelConfig(), compute_dtype="bfloat16")


def test_padded_vocabulary():
    assert dataclasses.replace(ModelConfig(), vocab_size=30522).padded_vocab_size == 30592
    assert dataclasses.replace(ModelConfig(), vocab_size=256).padded_vocab_size == 256


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"optimizer": {"learnin_rate": 1.0}}, "did you mean 'learning_rate'"),
        ({"modle": {}}, "did you mean 'model'"),
        ({"train": {"num_steps": 1.5}}, "a number with a fraction; use a whole number"),
        ({"train": 3}, "not a section"),
        ({"data": {"verify": 1}}, "use True or False"),
    ],
)
def test_wrong_keys_and_types_are_one_clear_line(values, expected):
    with pytest.raises(InputError, match=expected) as caught:
        from_dict(PretrainConfig, values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("setting", [{"class_weights": "balanced"}, {"label_smoothing": 0.1}])
def test_what_would_change_nothing_is_refused(setting):
    for name in ("classification", "cola", "of_my_own", "multilabel", "ner", "stsb"):
        values = {"task": {"name": name, **setting}, "data": {"path": "x"}, "init_checkpoint": "y"}
        refused = name in ("multilabel", "ner", "stsb")
        with pytest.raises(InputError, match="is for texts of one class each") if refused else contextlib.nullcontext():
            from_dict(FinetuneConfig, values).validate()


def test_whole_numbers_are_taken_for_floats():
    assert from_dict(PretrainConfig, {"optimizer": {"learning_rate": 1}}).optimizer.learning_rate == 1.0


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (dataclasses.replace(ModelConfig(), num_heads=7), "768 is not divisible by model.num_heads 7; use 763 or 770"),
        (ModelConfig(activation="silu"), "gelu_tanh, gelu_exact, relu"),
        (ModelConfig(family="robreta"), "model.family 'robreta' is unknown; use one of bert, roberta"),
        (ModelConfig(positions="relative"), "use one of learned, none, rotary"),
        (ModelConfig(positions="rotary", position_offset=2), "position_offset 2 is of a learned table"),
        (ModelConfig(positions="rotary", hidden_size=36, num_heads=12), "heads have 3 numbers"),
        (ModelConfig(norm="inside"), "use one of after, before"),
        (ModelConfig(feed_forward="wide"), "use one of plain, gated"),
        (ModelConfig(pooling="max"), "use one of cls, mean"),
        (ModelConfig(initializer="none"), "use one of same, depth"),
        (ModelConfig(rotary_theta=0.5), "model.rotary_theta 0.5 is not from 1 to 1e12"),
        (ModelConfig(window=-1), "model.window -1 is below 0"),
        (ModelConfig(global_every=0), "model.global_every 0 is below 1"),
        (ModelConfig(type_vocab_size=-1), "model.type_vocab_size -1 is below 0"),
        (OptimizerConfig(schedule="step"), "use one of linear, cosine, stable"),
        (OptimizerConfig(schedule="cosine", decay_power=0.5), "decay_power 0.5 is of optimizer.schedule=linear"),
        (OptimizerConfig(schedule="stable", decay_rate=2.0), "decay_rate 2.0 is not a rate"),
        (dataclasses.replace(ModelConfig(), hidden_dropout_rate=1.5), "is not a rate"),
        (MaskingConfig(mask_rate=0.8, random_rate=0.3), "above 1"),
        (CheckpointConfig(keep_last=1), "use 2 or more"),
        (MeshConfig(data=-1, fsdp=-1), "at most once"),
    ],
)
def test_rules(config, expected):
    with pytest.raises(InputError, match=expected):
        config.validate()


INFINITE, NO_NUMBER = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (DataConfig(path="p", seed=-1), "data.seed -1 is below 0; use 0 or more"),
        (FinetuneDataConfig(source="p", seed=-1), "data.seed -1 is below 0; use 0 or more"),
        (MaskingConfig(seed=2**63), "masking.seed 9223372036854775808 is not in -9223372036854775807"),
        (TrainConfig(seed=-(2**70)), "train.seed -1180591620717411303424 is not in"),
        (DataConfig(path="p", batch_size=10**8), "data.batch_size 100000000 is above 1048576; use 1048576 at most"),
        (FinetuneDataConfig(source="p", batch_size=10**8), "data.batch_size 100000000 is above 1048576"),
        (EvalConfig(batch_size=10**8), "eval.batch_size 100000000 is above 1048576"),
        (Phase2Config(batch_size=10**8), "phase2.batch_size 100000000 is above 1048576"),
        (ModelConfig(hidden_size=10**300), r"model.hidden_size 10{50,}\.\.\. is beyond 16777216, the largest"),
        (ModelConfig(num_layers=10**5000), "model.num_layers a number of thousands of digits is beyond"),
        (TrainConfig(num_steps=2**31), "train.num_steps 2147483648 is not in"),
        (ModelConfig(layer_norm_epsilon=INFINITE), "model.layer_norm_epsilon inf is not above 0 and below 1"),
        (OptimizerConfig(epsilon=NO_NUMBER), "optimizer.epsilon nan is not finite; use a number"),
        (OptimizerConfig(learning_rate=INFINITE), "optimizer.learning_rate inf is not finite"),
        (OptimizerConfig(clip_norm=INFINITE), "optimizer.clip_norm inf is not finite"),
        (OptimizerConfig(clip_norm=1e39), "optimizer.clip_norm 1e[+]39 does not fit in float32; use 0, or a"),
        (OptimizerConfig(epsilon=1e-60), "optimizer.epsilon 1e-60 does not fit in float32"),
        (OptimizerConfig(epsilon=1e39), "optimizer.epsilon 1e[+]39 does not fit in float32"),
        (Phase2Config(learning_rate=1e39), "phase2.learning_rate 1e[+]39 does not fit in float32"),
        (ModelConfig(initializer_stddev=1e39), "model.initializer_stddev 1e[+]39 does not fit in float32"),
        (ModelConfig(layer_norm_epsilon=1e-60), "model.layer_norm_epsilon 1e-60 does not fit in float32"),
        (TeacherConfig(temperature=1e-60), "teacher.temperature 1e-60 does not fit in float32"),
        (EmbeddingConfig(temperature=1e-60), "embedding.temperature 1e-60 does not fit in float32"),
        (EmbeddingConfig(projection_size=2**31 - 1), "embedding.projection_size 2147483647 is above 16777216"),
        (ProbeConfig(num_layers=2**31 - 1), "probe.num_layers 2147483647 is above 100; use 100 at most"),
        (DataConfig(path="p", window_mb=1e300), "data.window_mb 1e[+]300 does not fit in float32"),
        (SweepConfig(seeds=2**31 - 1), "sweep.seeds 2147483647 is above 10000; use 10000 at most"),
        (SweepConfig(learning_rates="5e-5,1e39"), '"5e-5,1e39" is not a list of numbers above 0, up to 1e38'),
        (SweepConfig(learning_rates="5e-5,1e-60"), '"5e-5,1e-60" is not a list of numbers above 0'),
        (
            TaskConfig(name="x", class_weights="1,1e39"),
            "task.class_weights '1,1e39' is not numbers from 0 up to 1e15",
        ),
        (TaskConfig(name="x", thresholds="0.5,-5"), "task.thresholds '0.5,-5' is not numbers from 0 up"),
        (FinetuneTrainConfig(num_epochs=INFINITE), "train.num_epochs inf is not finite"),
        (FinetuneTrainConfig(num_epochs=1e30), "train.num_epochs 1e[+]30 is not above 0 and 1,000,000 at most"),
        (ModelConfig(hidden_dropout_rate=0.999995), "hidden_dropout_rate 0.999995 is not a rate; .* 0.9999 at most"),
        (FinetuneModelConfig(attention_dropout_rate=0.999995), "model.attention_dropout_rate 0.999995 is not a rate"),
    ],
)
def test_numbers_that_nothing_can_be_computed_with(config, expected):
    with pytest.raises(InputError, match=expected) as caught:
        config.validate()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_the_highest_rate_of_dropout_keeps_something():
    with_dropout = Dropout(MOST_DROPOUT)
    kept = with_dropout.apply({}, np.ones((64, 4096), np.float32), False, rngs={"dropout": jax.random.key(0)})
    assert np.isfinite(kept).all() and 0 < (np.asarray(kept) > 0).mean() < 0.001


@pytest.mark.parametrize("values", [[], "model", 3, None, {"model": []}, {"train": {"num_steps": [1] * 1000}}])
def test_what_is_no_section_is_one_short_line(values):
    with pytest.raises(InputError) as caught:
        from_dict(PretrainConfig, values)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_a_float_that_is_too_large_is_one_short_line():
    with pytest.raises(InputError, match=r"config.optimizer.learning_rate is 1000.*, beyond what a float") as caught:
        from_dict(PretrainConfig, {"optimizer": {"learning_rate": 10**400}})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(("types", "largest", "refused"), [(1, 0, False), (1, 1, True), (2, 1, False), (2, 2, True)])
def test_pairs_need_types(types, largest, refused):
    config = dataclasses.replace(ModelConfig(), type_vocab_size=types)
    with pytest.raises(InputError, match="it has pairs of texts") if refused else contextlib.nullcontext():
        check_type_ids(config, largest, "it")


def test_changed_keys_are_named_in_full():
    before = to_dict(PretrainConfig())
    after = to_dict(PretrainConfig(model=model_size("mini")))
    assert "model.hidden_size" in changed_keys(before, after)
    assert changed_keys(before, before) == []


@pytest.mark.parametrize(
    ("platform", "num_layers", "expected"),
    [("cpu", 48, 48), ("gpu", 24, 24), ("gpu", 25, 1), ("tpu", 12, 12), ("tpu", 24, 1), ("METAL", 2, 1)],
)
def test_all_layers_are_unrolled_where_they_compile_in_time(platform, num_layers, expected):
    model = ModelConfig(num_layers=num_layers)
    assert model.layers_at_once(platform) == expected
    assert dataclasses.replace(model, remat="full").layers_at_once(platform) == 1
    assert dataclasses.replace(model, unroll=2).layers_at_once(platform) == 2
    assert dataclasses.replace(model, unroll=99).layers_at_once(platform) == num_layers


def test_what_a_setting_affects_decides_what_may_change():
    resumable = ("end", "place", "work", "nothing")
    both = {"mesh", "report", "checkpoint", "eval.every_steps", "eval.batch_size", "train.hang_seconds"}
    both |= {"train.steps_per_call", "train.accumulate", "data.path", "model.remat", "model.unroll"}
    own = {
        "train.num_steps",
        "phase2.accumulate",
        "train.zero1",
        "data.verify",
        "data.cache_gb",
        "phase2.num_steps",
        "phase2.path",
    }
    assert set(affecting(PretrainConfig, *resumable)) == both | own
    assert set(affecting(FinetuneConfig, *resumable)) == both | {
        "train.num_epochs",
        "train.patience",
        "data.source",
        "sweep",
    }
    assert affecting(PretrainConfig, "place") == ("data.path", "phase2.path")
    assert is_among("mesh.data", both) and is_among("data.path", both) and not is_among("data.paths", both)


@pytest.mark.parametrize("kind", [PretrainConfig, FinetuneConfig])
def test_settings_affect_what_is_known(kind):
    """And every setting of a configuration affects one of them, or results."""
    known = typing.get_args(Affects)
    names = [name for each in known for name in affecting(kind, each)]
    assert len(names) == len(set(names)) and set(affecting(kind, *known)) == set(names)
    flat = changed_keys(to_dict(kind()), {}) + changed_keys({}, to_dict(kind()))
    assert all(any(is_among(leaf, names) or name.startswith(f"{leaf}.") for name in names) for leaf in flat)


def test_texts_in_pairs_need_two_types_or_a_family_that_has_fewer():
    with pytest.raises(InputError, match="too few to tell them apart"):
        check_type_ids(ModelConfig(type_vocab_size=1), 1, "the input")
    for size in ("roberta-base", "distilbert", "modernbert-base"):
        check_type_ids(model_size(size), 1, "the input")


@pytest.mark.parametrize("size", [name for name in MODEL_SIZES if "-" in name or name == "distilbert"])
def test_the_sizes_of_relatives_are_valid(size):
    config = model_size(size)
    config.validate()
    assert config.family in size or config.family == "distilbert"


def test_what_stands_before_logits_is_berts_pooler_by_default():
    assert ModelConfig().block == BLOCKS["bert"] == Block()
    assert model_size("modernbert-base").block.of_tokens and BLOCKS["roberta"] == BLOCKS["camembert"]


def test_every_nth_layer_is_global():
    config = model_size("modernbert-base")
    assert config.num_local == 22 - 8 and dataclasses.replace(config, window=0).num_local == 0
    assert config.output_stddev == pytest.approx(0.02 / 44**0.5) and config.classifier_stddev == 768**-0.5
    assert ModelConfig().output_stddev == ModelConfig().classifier_stddev == 0.02
