# SPDX-License-Identifier: Apache-2.0
"""The files of configs/: each argument of each gives a valid configuration, and says where its figures come from."""

import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest
from builders import message
from ml_collections import ConfigDict

from bert_jax.errors import InputError
from bert_jax.settings.finetuning import FinetuneConfig
from bert_jax.settings.model import MINIATURES, MODEL_SIZES
from bert_jax.settings.phases import phase_of, phases_of
from bert_jax.settings.pretraining import PretrainConfig
from bert_jax.settings.rules import from_dict, to_dict
from bert_jax.tasks.catalog import NAMES, make_task
from bert_jax.tools import recipes
from bert_jax.tools.recipes import read_own
from bert_jax.training.optim import learning_rate_at

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def load(name):
    spec = importlib.util.spec_from_file_location(name, CONFIGS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configuration(name, *argument):
    values = load(name).get_config(*argument).to_dict()
    values["data"]["path"] = values["data"]["path"] or "somewhere"
    values["phase2"]["path"] = values["phase2"]["path"] or "elsewhere"
    config = from_dict(PretrainConfig, values)
    config.validate()
    return config


ARGUMENTS = {
    "pretrain": (
        *(*MODEL_SIZES, "base,phase=1", "large,phase=2", "large,phases"),
        *("modern", *(f"modern,{size},phases" for size in ("mini", "small", "base", "large"))),
    ),
    "miniatures": tuple(MINIATURES),
    "ablations": tuple(load("ablations").ABLATIONS),
    "lamb": ("large", "base"),
    "babylm": ("mini", "small", "small,strict"),
    "mlperf": ("large",),
    "colab_tpu": ("small", "base"),
    "one_gpu_day": ("base",),
    "demo": (),
}
FINETUNING = ("finetune", "demo_finetune")


def test_every_file_is_tested():
    assert set(recipes.names()) == {*ARGUMENTS, *FINETUNING}


def test_babylm_keeps_what_the_challenge_asks_for():
    words = configuration("babylm").checkpoint.words()
    assert words == tuple(1e6 * count for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30, 40, 50, 60, 70, 80, 90))
    strict = load("babylm").get_config("small,strict")["checkpoint"]["keep_words"].split(",")
    assert tuple(map(float, strict)) == (*words, *(1e8 * count for count in range(1, 10)))
    assert "'loose' is no track of babylm" in message(load("babylm").get_config, "small,loose")


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
    assert re.search(rf"bert_jax (train|finetune) --config={name}\b", card)


def test_the_paper_is_the_default():
    config = configuration("pretrain", "base")
    assert (config.data.batch_size, config.train.num_steps) == (256, 1_000_000)
    assert (config.optimizer.learning_rate, config.optimizer.warmup_steps) == (1e-4, 10_000)
    assert (config.model.num_layers, config.model.hidden_size, config.model.hidden_dropout_rate) == (12, 768, 0.1)
    assert (config.masking.rate, config.masking.mask_rate, config.masking.random_rate) == (0.15, 0.8, 0.1)


def test_the_modern_rate_falls_at_the_end_of_the_second_stage_alone():
    config = configuration("pretrain", "modern,base,phases")
    assert (config.model.max_positions, config.model.family, config.masking.rate) == (8192, "modernbert", 0.3)
    assert not config.train.next_sentence and config.model.hidden_dropout_rate == 0
    assert (config.optimizer.name, config.optimizer.clip_norm) == ("stable_adamw", 0)
    first, total = config.train.num_steps, config.train.num_steps + config.phase2.num_steps
    last = first + config.phase2.num_steps * 5 // 6
    assert rates(config, (first - 1, first, last - 1)) == pytest.approx([8e-4, 3e-4, 3e-4], rel=1e-4)
    assert rates(config, (total - 1,))[0] < 3e-6
    assert rates(configuration("pretrain", "modern,base"), (first - 1,))[0] < 8e-6
    with pytest.raises(InputError, match=r"there is no modern size 'bsae' .did you mean 'base'"):
        configuration("pretrain", "modern,bsae")


def test_the_second_phase_is_the_end_of_the_papers_decay():
    first, second = configuration("pretrain", "base,phase=1"), configuration("pretrain", "base,phase=2")
    assert first == configuration("pretrain", "base")
    assert second.masking.max_predictions == 80
    rate, end_of_first = (learning_rate_at(c.optimizer, c.train.num_steps) for c in (second, first))
    for step in (1_000, 50_000, 99_999):
        assert float(rate(step)) == pytest.approx(float(end_of_first(900_000 + step)), rel=1e-3)


def rates(config, steps):
    """Returns the learning rate at steps of a run."""
    found = []
    for step in steps:
        phase = next(phase for phase in phases_of(config) if step < phase.last_step)
        rate = learning_rate_at(phase.config.optimizer, phase.train.num_steps, phase.schedule_start)
        found.append(float(rate(step)))
    return found


def test_both_phases_in_one_run_are_the_papers_decay():
    together, alone = configuration("pretrain", "base,phases"), configuration("pretrain", "base")
    steps = (0, 9_999, 10_000, 899_999, 900_000, 999_999)
    assert rates(together, steps) == rates(alone, steps)
    assert [phase.config.masking.max_predictions for phase in phases_of(together)] == [0, 80]
    assert not any(phase.resets_moments for phase in phases_of(together))


def test_lamb_is_nvidias():
    """Google's warm-up has rate 0 at the first step, so a step of warm-up lies between the two at its end."""
    config = configuration("lamb")
    ends = rates(config, (0, 2_000, 2_001, 7_037, 7_038, 7_038 + 199, 7_038 + 200))
    expected = [0, 6.00e-3, 5.08e-3, 0.07e-3, 0, 3.98e-3, 3.73e-3]
    assert ends == pytest.approx(expected, abs=6e-6)
    assert [(p.config.optimizer.name, p.resets_moments) for p in phases_of(config)] == [("lamb", False)] * 2


# Rows of each phase, as the cards say: sequences, except where rows are packed (two in one of mlperf).
ROWS = {
    ("pretrain", "base"): (256_000_000,),
    ("pretrain", "base,phases"): (230_400_000, 25_600_000),
    ("pretrain", "base,phase=2"): (25_600_000,),
    ("miniatures", "L4_H256"): (256_000_000,),
    ("lamb", "large"): (461_242_368, 51_216_384),
    ("mlperf", "large"): (3_680 * 768 // 2,),
    ("colab_tpu", "small"): (25_600_000,),
    ("one_gpu_day", "base"): (102_400_000,),
}


@pytest.mark.parametrize(("name", "argument"), ROWS)
def test_steps_times_batch_are_the_recipes_sequences(name, argument):
    phases = phases_of(configuration(name, argument))
    rows = tuple(phase.config.data.batch_size * phase.config.train.num_steps for phase in phases)
    assert rows == ROWS[name, argument]


def test_the_planner_takes_either_phase_as_a_run_of_its_own():
    phases = [phase_of(configuration("lamb"), number) for number in (1, 2)]
    assert [(c.data.batch_size, c.train.accumulate, c.masking.max_predictions) for c in phases] == [
        (65_536, 0, 0),
        (32_768, 0, 80),
    ]
    alone = configuration("pretrain", "large,phase=2")
    assert dataclasses.replace(phase_of(alone, 1), phase2=alone.phase2) == alone
    with pytest.raises(InputError, match="there is no phase 2 in a run that has 1; use 1 to 1"):
        phase_of(configuration("mlperf"), 2)


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
        ("pretrain", "base,phase=3", "'phase=3' of 'base,phase=3' is not a phase; use base,phase=1 or base,phase=2"),
        ("miniatures", "L3_H100", "there is no miniature 'L3_H100'"),
        ("ablations", "nonsp", "there is no ablation 'nonsp'; they are bert, no_nsp"),
        ("ablations", "no_nsp,tny", "did you mean 'tiny'"),
    ],
)
def test_an_unknown_argument_is_refused_with_those_there_are(name, argument, expected):
    with pytest.raises(InputError, match=expected):
        load(name).get_config(argument)


def test_a_recipe_of_an_own_head_is_read_whatever_its_file_is_called(tmp_path):
    (tmp_path / "head.txt").write_text("def get_head(): return 'mine'\n")
    assert read_own(str(tmp_path / "head.txt")).head == "mine"
    (tmp_path / "none.py").write_text("def get_head(): print('nothing')\n")
    with pytest.raises(InputError, match="get_head gives nothing; let it return the head"):
        read_own(str(tmp_path / "none.py"))
    (tmp_path / "other").write_text("some words\n")
    with pytest.raises(InputError, match=r"other, line 1: SyntaxError: invalid syntax.*; correct it"):
        read_own(str(tmp_path / "other"))


def test_settings_are_set_by_the_types_of_the_recipe():
    """As ml_collections has them: with a blank, a text of digits, and True or False in words, alone, or with "no"."""
    line = ["--config=demo", "--config.train.num_steps=7", "--config.data.path", "12", "--config.optimizer.beta1=0.5"]
    line += [
        "--noconfig.data.verify",
        "--config.masking.static",
        "--config.masking.whole_word=false",
        "--workdir=a.b=c",
    ]
    rest, given = recipes.take_settings([*line, "--", "--config.train.seed=1"])
    assert rest == ["--config=demo", "--workdir=a.b=c", "--", "--config.train.seed=1"]
    config = ConfigDict(to_dict(PretrainConfig()))
    recipes.change_settings(config, given)
    assert (config.train.num_steps, config.data.path, config.optimizer.beta1) == (7, "12", 0.5)
    assert (config.data.verify, config.masking.static, config.masking.whole_word) == (False, True, False)
