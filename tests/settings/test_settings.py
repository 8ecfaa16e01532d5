# SPDX-License-Identifier: Apache-2.0
import contextlib
import dataclasses
import typing

import jax
import numpy as np
import pytest
from builders import message

from bert_jax.data.prepare import PrepareOptions
from bert_jax.errors import InputError
from bert_jax.model.parts import Dropout
from bert_jax.settings.finetuning import (
    FinetuneConfig,
    FinetuneTrainConfig,
    ProbeConfig,
    SweepConfig,
    TaskConfig,
)
from bert_jax.settings.model import MODEL_SIZES, MOST_DROPOUT, ModelConfig, check_type_ids, model_size
from bert_jax.settings.pretraining import (
    DataConfig,
    MaskingConfig,
    MeshConfig,
    OptimizerConfig,
    Phase2Config,
    PretrainConfig,
    TeacherConfig,
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
    found = message(getattr(config, section).validate)
    assert f"{section}.warmup_rate and {section}.warmup_steps both set" in found


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
        ([], ""),
        ({"model": []}, ""),
        ({"train": {"num_steps": [1] * 1000}}, ""),
    ],
)
def test_wrong_keys_and_types_are_one_clear_line(values, expected):
    found = message(from_dict, PretrainConfig, values)
    assert expected in found and len(found) < (300 if expected else 200)


@pytest.mark.parametrize("setting", [{"class_weights": "balanced"}, {"label_smoothing": 0.1}])
def test_what_would_change_nothing_is_refused(setting):
    for name in ("classification", "cola", "of_my_own", "multilabel", "ner", "stsb"):
        values = {"task": {"name": name, **setting}, "data": {"path": "x"}, "init_checkpoint": "y"}
        refused = name in ("multilabel", "ner", "stsb")
        with pytest.raises(InputError, match="are for texts of") if refused else contextlib.nullcontext():
            from_dict(FinetuneConfig, values).validate()


def test_whole_numbers_are_taken_for_floats():
    assert from_dict(PretrainConfig, {"optimizer": {"learning_rate": 1}}).optimizer.learning_rate == 1.0


INFINITE, NO_NUMBER = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # one of each kind of bound that a field has
        (ModelConfig(activation="swish"), 'model.activation "swish" is not one of gelu_tanh, gelu_exact, relu, silu'),
        (TaskConfig(name="x", activation="silu"), "task.activation \"silu\" is not one of '', sigmoid"),
        (ModelConfig(hidden_size=10**300), r"model.hidden_size 10{50,}\.\.\. is not from 1 to 16777216"),
        (ModelConfig(num_layers=10**5000), "model.num_layers a number of thousands of digits is not from 1"),
        (ModelConfig(hidden_dropout_rate=0.999995), "model.hidden_dropout_rate 0.999995 is not from 0 to 0.9999"),
        (MaskingConfig(seed=2**63), "masking.seed 9223372036854775808 is not from 0 to 9223372036854775807"),
        (DataConfig(path="p", batch_size=10**8), "data.batch_size 100000000 is not from 1 to 1048576"),
        (OptimizerConfig(epsilon=NO_NUMBER), "optimizer.epsilon NaN is not from 1e-37 to 1e[+]38"),
        (OptimizerConfig(clip_norm=INFINITE), "optimizer.clip_norm Infinity is not from 0 to 1e[+]38"),
        (MeshConfig(data=-2), "mesh.data -2 is not from -1"),
        (FinetuneTrainConfig(num_epochs=1e30), "train.num_epochs 1e[+]30 is not from 1e-37 to 1e[+]06"),
        (PrepareOptions(pack=65), "pack 65 is not from 0 to 64"),
        # rules of several settings
        (dataclasses.replace(ModelConfig(), num_heads=7), r"768 is not divisible by model.num_heads 7; use 763 or 770"),
        (ModelConfig(score_bias="vectors", num_key_heads=3), "num_key_heads 3 needs another model.score_bias"),
        (ModelConfig(positions="rotary", position_offset=2), "position_offset 2 needs model.positions=learned"),
        (ModelConfig(positions="rotary", hidden_size=36, num_heads=12), "heads have 3 numbers"),
        (ModelConfig(gradient_dtype="bfloat16"), "gradient_dtype bfloat16 needs model.compute_dtype=bfloat16"),
        (OptimizerConfig(schedule="cosine", decay_power=0.5), "decay_power 0.5 needs optimizer.schedule=linear"),
        (MaskingConfig(mask_rate=0.8, random_rate=0.3), "above 1"),
        (MaskingConfig(rate=0.1, end_rate=0.2), "masking.end_rate 0.2 is above masking.rate 0.1"),
        (
            PretrainConfig(data=DataConfig("p"), masking=MaskingConfig(end_rate=0.1), teacher=TeacherConfig("t")),
            "set masking.end_rate=0, or leave out teacher.checkpoint",
        ),
        (MaskingConfig(max_ngram=3), "masking.max_ngram 3 needs masking.whole_word=True"),
        (MeshConfig(data=-1, fsdp=-1), "at most once"),
        (Phase2Config(num_steps=1), "phase2.path is empty"),
        (Phase2Config(schedule="continue", warmup_steps=1), "phase2.schedule continue has no"),
        (ProbeConfig(train_encoder=True), "task.probe.train_encoder needs task.probe.features"),
        (SweepConfig(learning_rates="5e-5,1e39"), r'"5e-5,1e39" is not numbers from 1e-37 up to 1e[+]38'),
        (TaskConfig(name="x", thresholds="0.5,-5"), 'task.thresholds "0.5,-5" is not numbers from 0 up'),
        (PrepareOptions(language="German"), "language 'German' is not an ISO 639 code"),
    ],
)
def test_rules(config, expected):
    with pytest.raises(InputError, match=expected) as caught:
        config.validate()
    message = str(caught.value).replace(", ".join(BLOCKS), "FAMILIES")
    assert "\n" not in message and len(message) < 200


@pytest.mark.parametrize(
    ("teacher", "settings", "expected"),
    [
        ({}, {}, "embedding.loss gist needs a teacher"),
        ({"checkpoint": "x", "weight": 1.0}, {}, "teacher.weight and temperature are for what is learnt"),
        ({"checkpoint": "x"}, {"both_directions": True}, "embedding.both_directions is for infonce"),
        ({"checkpoint": "x"}, {}, ""),
    ],
)
def test_a_guide_is_a_teacher_that_is_only_asked(teacher, settings, expected):
    task = {"name": "embeddings", "embedding": {"loss": "gist", **settings}}
    values = {"task": task, "data": {"path": "x"}, "init_checkpoint": "y", "teacher": teacher}
    with pytest.raises(InputError, match=expected) if expected else contextlib.nullcontext():
        from_dict(FinetuneConfig, values).validate()


def test_the_highest_rate_of_dropout_keeps_something():
    drop = lambda ones: Dropout(MOST_DROPOUT).apply({}, ones, False, rngs={"dropout": jax.random.key(0)})  # noqa: E731
    kept = np.asarray(jax.jit(drop)(np.ones((64, 4096), np.float32)))
    assert np.isfinite(kept).all() and 0 < (kept > 0).mean() < 0.001


def test_a_whole_number_that_no_float_holds_is_one_short_line():
    config = from_dict(OptimizerConfig, {"learning_rate": 10**400})
    found = message(config.validate)
    assert found.startswith("optimizer.learning_rate ") and " is not from 0 to 1e+38" in found


@pytest.mark.parametrize(("types", "largest"), [(1, 1), (2, 2)])
def test_pairs_need_types(types, largest):
    config = dataclasses.replace(ModelConfig(), type_vocab_size=types)
    assert "it has pairs of texts" in message(check_type_ids, config, largest, "it")
    check_type_ids(config, largest - 1, "it")
    for size in ("roberta-base", "distilbert", "modernbert-base"):  # which have fewer
        check_type_ids(model_size(size), 1, "it")


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
        "data.cache_gb",
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


@pytest.mark.parametrize("size", [name for name in MODEL_SIZES if "-" in name or name == "distilbert"])
def test_the_sizes_of_relatives_are_valid(size):
    config = model_size(size)
    config.validate()
    name = "deberta" if config.family == "deberta-v2" else config.family.replace("_", "-")
    assert name in size


def test_what_stands_before_logits_is_berts_pooler_by_default():
    assert ModelConfig().block == BLOCKS["bert"] == Block()
    assert model_size("modernbert-base").block.of_tokens and BLOCKS["roberta"] == BLOCKS["camembert"]


def test_every_nth_layer_is_global():
    config = model_size("modernbert-base")
    assert config.num_local == 22 - 8 and dataclasses.replace(config, window=0).num_local == 0
    assert config.output_stddev == pytest.approx(0.02 / 44**0.5) and config.classifier_stddev == 768**-0.5
    assert ModelConfig().output_stddev == ModelConfig().classifier_stddev == 0.02
