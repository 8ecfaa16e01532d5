# SPDX-License-Identifier: Apache-2.0
"""A training step with every loss of vectors, and of candidates, in one program: a table of words stands for the model.

    python every_loss.py OUTPUT --coordinator=HOST:PORT --num_processes=N --process_id=I

is one of N processes, of which the first writes what the step gave.
"""

import itertools
import sys

import conftest  # noqa: F401 - how XLA compiles, before JAX is imported
import jax
import jax.numpy as jnp
import numpy as np
from builders import fresh_state, tiny_model

from bert_jax.batch import Row
from bert_jax.batches.examples import choose_batching, train_batches
from bert_jax.devices.cluster import join
from bert_jax.devices.sharding import make_mesh
from bert_jax.model.heads.embedding import normalized
from bert_jax.model.heads.multi_vector import MultiVectors
from bert_jax.model.heads.ranking import LOSSES, RANKING, Ranking
from bert_jax.model.heads.sparse import SparseEmbeddings
from bert_jax.model.heads.table import embedding_head
from bert_jax.model.objective import TaskObjective
from bert_jax.model.sequences import mean_of_sequences
from bert_jax.settings.finetuning import OF_SCORES, EmbeddingConfig, FinetuneDataConfig, RankingConfig, TaskConfig
from bert_jax.settings.pretraining import MeshConfig, OptimizerConfig, TrainConfig
from bert_jax.training.step import train_step

ALL = ("infonce", "triplet", "cosent", "cosine", "margin_mse", "kl")
OF_WORDS = {"kind": "sparse", "passage_flops": 0.0, "query_flops": 0.0}  # tests/training/test_whole_batch.py has FLOPS
OF_TOKENS = {"kind": "multi_vector", "query_length": 9}
VECTORS = [
    *(({}, loss) for loss in ALL),
    ({"both_directions": True}, "infonce"),
    *(({"dimensions": "8,3"}, loss) for loss in ("triplet", "margin_mse")),
    *((OF_WORDS, loss) for loss in ALL if loss != "cosine"),
    *((OF_TOKENS, loss) for loss in ("infonce", "margin_mse", "kl")),
]


def heads():
    """Returns the heads of all kinds with all losses."""
    made = {}
    for settings, loss in VECTORS:
        task = TaskConfig(max_seq_length=16, embedding=EmbeddingConfig(loss=loss, **settings))
        made[" ".join(map(str, (*settings.values(), loss)))] = embedding_head(task)
    for loss in LOSSES:
        made[f"candidates {loss}"] = RANKING.as_set(TaskConfig(ranking=RankingConfig(loss=loss)))
    return made


def rows_for(head):
    """Returns 24 examples of two to four texts, with a grade or a teacher's scores."""
    rng, rows = np.random.default_rng(0), []
    for number in range(24):
        lengths = rng.integers(3, 10, 2 + number % 3).tolist()
        token_ids = rng.integers(5, 200, sum(lengths)).astype(np.int32)
        scores = tuple(rng.normal(size=len(lengths) - 1).tolist())
        label = (0.1 * (number % 7), *range(4 * number, 4 * number + len(lengths)))
        if isinstance(head, Ranking):
            label = (0.0, 1.0, *rng.integers(0, 2, len(lengths) - 1).tolist())
        elif head.settings.loss in OF_SCORES:
            label = (scores, *label[1:])
        rows.append(Row(number, token_ids, np.zeros(len(token_ids), np.uint8), tuple(lengths), label))
    return rows


class OfTable(TaskObjective):
    """What a head learns of a table of words, without a model, so that all losses compile in seconds."""

    def init(self, key):
        return {"table": jax.random.normal(key, (203, 8))}

    def outputs(self, params, batch, dropout_key):
        words = params["table"][batch.token_ids]
        if isinstance(self.head, MultiVectors):
            return normalized(words)
        texts = mean_of_sequences(words, batch.sequence_ids, batch.cls_positions.shape[1], "highest")
        if isinstance(self.head, SparseEmbeddings):
            return jax.nn.relu(texts)
        return texts[..., :1] if isinstance(self.head, Ranking) else texts


def every_loss(mesh, accumulate):
    """Returns of each head [the loss of a step, what the head says is its mean, moments of the gradient].

    The batch is the last of an epoch, half full.
    """
    model, optimizer = tiny_model(), OptimizerConfig(name="adamw", warmup_steps=0)
    train = TrainConfig(num_steps=10, accumulate=accumulate)
    data = FinetuneDataConfig(source="x", batch_size=16, pack="on", bucket=False)
    states, batches, steps = {}, {}, {}
    with jax.set_mesh(mesh):
        for name, head in heads().items():
            rows, objective = rows_for(head), OfTable(model, head)
            batching = choose_batching(rows, data, model, 16, "on", 10, apart=True)
            batches[name] = next(itertools.islice(train_batches(rows, head, 0, batching, mesh), 1, None))
            states[name] = fresh_state(objective, optimizer, train, mesh)
            steps[name] = objective, train_step(objective, optimizer, train, mesh, states[name])

        @jax.jit
        def run(states, batches, key):
            found = {}
            for name, (objective, step) in steps.items():
                state, metrics = step(states[name], batches[name], key)
                total, weight = objective.losses(states[name].params, batches[name], None)["loss"]
                parts = metrics["loss"][0], total / weight, *jax.tree.leaves(state.optimizer)
                found[name] = jnp.concatenate([jnp.ravel(part) for part in parts])
            return found

        return jax.device_get(run(states, batches, jax.random.key_data(jax.random.key(0))))


if __name__ == "__main__":
    output, *joining = sys.argv[1:]
    coordinator, *numbers = (each.partition("=")[2] for each in joining)
    join("on", coordinator, *map(int, numbers))
    found = every_loss(make_mesh(MeshConfig()), 2)
    if jax.process_index() == 0:
        np.savez(output, **found)
