# SPDX-License-Identifier: Apache-2.0
"""What a pre-training run reads: settings that follow from the data, and the data of each phase."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import tiny_run

from bert_jax.batches.load import train_batches
from bert_jax.data.records import open_dataset
from bert_jax.devices.sharding import make_mesh
from bert_jax.errors import InputError
from bert_jax.model.objective import Objective
from bert_jax.pretraining import PhaseStage, Pretraining
from bert_jax.settings.pretraining import MeshConfig, Phase2Config, TrainConfig
from bert_jax.training.optim import learning_rate_at
from bert_jax.training.phases import open_corpora, resolve
from bert_jax.training.program import Program
from bert_jax.training.step import abstract_state


def test_what_the_data_decide_is_filled_in(toy_data):
    config = tiny_run(toy_data)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=0))
    corpora = open_corpora(config, make_mesh(MeshConfig()))
    assert corpora.config.model.vocab_size == corpora.tokenizer.vocab_size > 0
    assert len(corpora.phases) == 1 and corpora.phases[0].dataset.path.samefile(toy_data)


def test_data_without_labels_switch_the_next_sentence_loss_off(toy_data):
    corpora = open_corpora(tiny_run(toy_data), make_mesh(MeshConfig()))
    dataset = open_dataset(toy_data)
    assert corpora.config.train.next_sentence
    dataset.manifest["identity"]["options"]["next_sentence"] = "none"
    assert not resolve(corpora.config, [dataset], corpora.tokenizer).train.next_sentence
    other = open_dataset(toy_data)
    config = dataclasses.replace(corpora.config, phase2=Phase2Config(num_steps=4, path=str(toy_data)))
    with pytest.raises(InputError, match=r"--next_sentence=none, .* with nsp; prepare both alike"):
        resolve(config, [dataset, other], corpora.tokenizer)


def test_each_phase_goes_on_in_the_rows_and_has_a_schedule_of_its_own(toy_data):
    config = tiny_run(toy_data, train=TrainConfig(num_steps=8), phase2=Phase2Config(num_steps=4, path=str(toy_data)))
    corpora = open_corpora(config, make_mesh(MeshConfig()))
    first, second = corpora.phases
    assert (first.rows_before, second.rows_before) == (0, first.phase.last_step * config.data.batch_size)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    settings = corpora.config.optimizer, corpora.config.train
    abstract = abstract_state(first.objective, *settings, mesh)
    stages = [PhaseStage(part, corpora, mesh, abstract) for part in corpora.phases]
    rates = [learning_rate_at(each.optimizer, each.train.num_steps, each.schedule_start) for each in stages]
    last = first.phase.last_step
    assert rates[0](last) == 0 < rates[1](last)  # the first phase's schedule has ended where the second's begins
    # Of the second phase's step no more than the rate is compiled.
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract)._replace(step=np.int32(last))
    batch = next(train_batches(second.dataset.train, 0, second.phase.config.data.batch_size, 0, mesh))
    own = stages[1].optimizer, stages[1].train
    step = Program(mesh).training(AnyLoss(second.objective), *own, abstract, stages[1].schedule_start)
    rate = jax.jit(lambda state, batch: step(state, batch)[1]["learning_rate"][0])
    assert rate(state, batch) == pytest.approx(float(rates[1](last)))


class AnyLoss(Objective):
    """A loss of the parameters of another objective, which costs nothing to trace."""

    def __init__(self, other):
        self.model, self.other = other.model, other

    def init(self, key):
        return self.other.init(key)

    def losses(self, params, batch, key):
        return {"loss": (jnp.sum(params["next_sentence"]["bias"]), jnp.float32(1))}

    def denominators(self, batch):
        return {"loss": jnp.float32(1)}


def test_a_model_carries_the_counts_of_its_data(toy_data):
    corpora = open_corpora(tiny_run(toy_data), make_mesh(MeshConfig()))
    trained_model = Pretraining(corpora, make_mesh(MeshConfig(), jax.devices()[:1])).trained_model
    model = trained_model(7, {"encoder": {}}, {"tokens": 99})
    assert model.trained == {"step": 7, "tokens": 99} and model.config == corpora.config.model
    assert trained_model(7, {}, None).trained == {"step": 7}
