# SPDX-License-Identifier: Apache-2.0
"""The files of configs/: each argument of each gives a valid configuration, and says where its figures come from."""

import importlib.util
from pathlib import Path

import pytest

from bert_jax.config import MINIATURES, MODEL_SIZES, PretrainConfig
from bert_jax.errors import InputError
from bert_jax.finetune_config import FinetuneConfig
from bert_jax.optim import learning_rate_at
from bert_jax.settings import from_dict
from bert_jax.tasks.catalog import NAMES, make_task

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def load(name):
    spec = importlib.util.spec_from_file_location(name, CONFIGS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configuration(name, *argument):
    values = load(name).get_config(*argument).to_dict()
    values["data"]["path"] = values["data"]["path"] or "somewhere"
    config = from_dict(PretrainConfig, values)
    config.validate()
    return config


ARGUMENTS = {
    "pretrain": (*MODEL_SIZES, "base,phase=1", "large,phase=2"),
    "miniatures": tuple(MINIATURES),
    "ablations": tuple(load("ablations").ABLATIONS),
    "lamb": ("large", "base"),
    "colab_tpu": ("small", "base"),
    "one_gpu_day": ("base",),
    "demo": (),
}
FINETUNING = ("finetune", "demo_finetune")


def test_every_file_is_tested():
    assert {path.stem for path in CONFIGS.glob("*.py")} == {*ARGUMENTS, *FINETUNING}


@pytest.mark.parametrize(("name", "task"), [("demo_finetune", ""), *(("finetune", task) for task in NAMES)])
def test_every_task_has_a_valid_configuration(name, task):
    values = load(name).get_config(*([task] if task else [])).to_dict()
    values["init_checkpoint"] = values["data"]["source"] = "somewhere"
    config = from_dict(FinetuneConfig, values)
    config.validate()
    assert make_task(config.task).metric
    assert config.optimizer.warmup_steps == 0 and config.optimizer.warmup_rate == 0.1
    assert config.task.name == (task or "classification")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument_gives_a_valid_configuration(name):
    assert configuration(name).train.num_steps > 0
    for argument in ARGUMENTS[name]:
        config = configuration(name, argument)  # which validates it
        size = argument.rpartition(",")[2]
        if size in MODEL_SIZES:
            shape = MODEL_SIZES[size]
            assert (config.model.num_layers, config.model.hidden_size) == (shape.num_layers, shape.hidden_size)


@pytest.mark.parametrize("name", sorted(set(ARGUMENTS) - {"demo"}))
def test_every_recipe_opens_with_its_card(name):
    card = load(name).__doc__
    for entry in ("Command:", "Data:", "Hardware:", "Expect:", "Source:"):
        assert entry in card, entry
    assert f"configs/{name}.py" in card


def test_the_paper_is_the_default():
    config = configuration("pretrain", "base")
    assert (config.data.batch_size, config.train.num_steps) == (256, 1_000_000)
    assert (config.optimizer.learning_rate, config.optimizer.warmup_steps) == (1e-4, 10_000)
    assert (config.model.num_layers, config.model.hidden_size, config.model.hidden_dropout_rate) == (12, 768, 0.1)
    assert (config.masking.rate, config.masking.mask_rate, config.masking.random_rate) == (0.15, 0.8, 0.1)


def test_the_second_phase_is_the_end_of_the_papers_decay():
    first, second = configuration("pretrain", "base,phase=1"), configuration("pretrain", "base,phase=2")
    assert first == configuration("pretrain", "base")
    assert second.masking.max_predictions == 80
    rate, end_of_first = (learning_rate_at(c.optimizer, c.train.num_steps) for c in (second, first))
    for step in (1_000, 50_000, 99_999):
        assert float(rate(step)) == pytest.approx(float(end_of_first(900_000 + step)), rel=1e-3)


def test_ablations_are_those_of_the_paper():
    assert not configuration("ablations", "no_nsp").train.next_sentence
    ltr = configuration("ablations", "ltr,tiny")
    assert ltr.model.causal and not ltr.train.next_sentence and ltr.model.num_layers == 2
    mixes = {
        (round(100 * m.mask_rate), round(100 - 100 * m.mask_rate - 100 * m.random_rate), round(100 * m.random_rate))
        for m in (configuration("ablations", name).masking for name in ARGUMENTS["ablations"] if "mask_" in name)
    }
    assert mixes == {(80, 10, 10), (100, 0, 0), (80, 0, 20), (80, 20, 0), (0, 20, 80), (0, 0, 100)}


@pytest.mark.parametrize(
    ("name", "argument", "expected"),
    [
        ("pretrain", "bse", "did you mean 'base'"),
        ("pretrain", "base,phase=3", "'phase=3' of 'base,phase=3' is no phase; use base,phase=1 or base,phase=2"),
        ("miniatures", "L3_H100", "there is no miniature 'L3_H100'"),
        ("ablations", "nonsp", "there is no ablation 'nonsp'; they are bert, no_nsp"),
        ("ablations", "no_nsp,tny", "did you mean 'tiny'"),
    ],
)
def test_an_unknown_argument_is_refused_with_those_there_are(name, argument, expected):
    with pytest.raises(InputError, match=expected):
        load(name).get_config(argument)
