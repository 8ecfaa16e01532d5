# SPDX-License-Identifier: Apache-2.0
"""Plans of fine-tuning: the step and the batch are those that `finetune` has."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import pytest
from builders import tiny_model
from hf_models import make_tokenizer, random_params

from bert_jax.checkpoints.pretrained import Pretrained, save_pretrained
from bert_jax.errors import InputError
from bert_jax.plan import planner, tasks
from bert_jax.plan.tasks import plan_task
from bert_jax.settings.finetuning import FinetuneConfig, FinetuneDataConfig, FinetuneTrainConfig, TaskConfig
from bert_jax.settings.pretraining import PretrainConfig, TeacherConfig


@pytest.fixture
def config(tmp_path):
    """40 pairs of at most 17 tokens, 32 in a batch."""
    save_pretrained(Pretrained(tiny_model(), random_params(), make_tokenizer(203)), tmp_path / "bert")
    pairs = [{"anchor": "a b " + "c" * (number % 9), "positive": f"d{number} e f g"} for number in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return FinetuneConfig(
        task=TaskConfig(name="embeddings", max_seq_length=32),
        data=FinetuneDataConfig(str(tmp_path / "train.jsonl"), batch_size=32, pack="on"),
        train=FinetuneTrainConfig(accumulate=2),
        init_checkpoint=str(tmp_path / "bert"),
    )


def take_for_planned(monkeypatch, count):
    """Has CPU devices and their compiler in place of a pod's."""
    for module in (planner, tasks):
        monkeypatch.setattr(module, "planned_devices", lambda *_: (jax.devices()[:count], "a compiler"))


def test_fine_tuning_is_planned(config, monkeypatch):
    """Its step is lowered, and not compiled."""
    take_for_planned(monkeypatch, 1)
    lower = planner.lower_train_step
    monkeypatch.setattr(planner, "lower_train_step", lambda *given: lower(*given) and SimpleNamespace(compile=refuse))
    plan = plan_task(config, "v5e:1x1")
    assert not plan.fits and plan.predictions == 0 < plan.model_flops
    assert "model.compute_dtype=float32 model.attention=plain model.remat=none train.accumulate=2" in plan.choices
    assert plan.batch_size % 2 == 0 and plan.batch_size < 2 * 32  # microbatches; texts share rows
    assert plan.estimate["logits"] == 0 < plan.estimate["params"]


def refuse(**_):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 18.98G of 15.75G hbm. Exceeded by 3.23G.")


def test_the_rows_of_the_data_are_planned(config, monkeypatch):
    """Nothing is compiled for them."""
    take_for_planned(monkeypatch, 8)
    monkeypatch.setattr(tasks, "plan", lambda config, topology, work: (config.data.batch_size, work.batch.token_ids))
    batch_size, ids = plan_task(config, "v5e:2x4")
    assert batch_size == len(ids) and batch_size % 16 == 0 and batch_size < 2 * 32  # devices x microbatches
    alone = dataclasses.replace(config, data=dataclasses.replace(config.data, pack="off"))
    batch_size, ids = plan_task(alone, "v5e:2x4")
    assert batch_size == len(ids) == 2 * 32 and ids.shape[1] <= 17 + 7


def test_a_teacher_is_refused(config):
    with pytest.raises(InputError, match="plans know no teacher; leave it out"):
        plan_task(dataclasses.replace(config, teacher=TeacherConfig(checkpoint="x")), "h100:8")
    with pytest.raises(InputError, match="plans know no teacher; leave it out"):
        planner.plan(PretrainConfig(teacher=TeacherConfig(checkpoint="x")), "h100:8")
