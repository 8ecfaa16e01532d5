# SPDX-License-Identifier: Apache-2.0
"""Evaluation of pre-training on held-out text, with the scores of a model without context as baselines."""

from collections.abc import Callable, Iterable
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.batch import Batch
from bert_jax.data.pipeline import eval_batches
from bert_jax.data.records import Dataset
from bert_jax.devices import cluster
from bert_jax.model.objective import Objective, Params, next_sentence_weights
from bert_jax.settings.pretraining import PretrainConfig
from bert_jax.training.loop import Evaluation, evaluate
from bert_jax.training.step import make_eval_step


def make_evaluation(
    config: PretrainConfig, objective: Objective, dataset: Dataset, mesh: Mesh, params: Params
) -> Evaluation | None:
    """Returns the evaluation on the whole held-out split, or None if nothing is held out.

    Masks are fixed: they are those of epoch 0. `params` gives the shapes of the parameters.
    """
    if not dataset.heldout.num_rows:
        return None
    eval_step = make_eval_step(objective, mesh, params)
    size = config.eval.rows(config.data.batch_size, config.train.accumulate)
    batches = partial(eval_batches, dataset.heldout, size, mesh)
    baselines = heldout_baselines(objective, dataset.token_counts, batches(), config.train.next_sentence)

    def evaluation(params: Params, stopped: Callable[[], int] = lambda: 0) -> dict[str, float] | None:
        metrics = evaluate(eval_step, params, batches(), stopped)
        if metrics is None:
            return None
        metrics["loss"] = sum(metrics[name] for name in ("mlm_loss", "nsp_loss") if name in metrics)
        metrics["mlm_perplexity"] = float(np.exp(min(metrics["mlm_loss"], 80.0)))
        return {name: metrics[name] for name in EVAL_METRICS if name in metrics} | baselines

    return evaluation


EVAL_METRICS = ("loss", "mlm_loss", "mlm_accuracy", "mlm_perplexity", "nsp_loss", "nsp_accuracy")


def heldout_baselines(
    objective: Objective, token_counts: np.ndarray, batches: Iterable[Batch], next_sentence: bool
) -> dict[str, float]:
    """Returns the scores of a model without context on the predictions of held-out batches.

    It predicts tokens from their counts [V] in the training split, plus one each, and every next sentence label as the
    more frequent one.
    """
    counts = token_counts.astype(np.float64) + 1
    log_probabilities = np.log(counts / counts.sum())
    commonest = int(np.argmax(counts))
    mask = jax.jit(objective.prepare)
    loss = hits = predictions = random_next = sequences = 0.0
    for batch in batches:
        masked = cluster.on_host(mask(batch))
        labels = masked.mlm_labels[masked.mlm_weights > 0]
        loss -= log_probabilities[labels].sum()
        hits += (labels == commonest).sum()
        predictions += len(labels)
        next_labels = masked.next_sentence_labels[np.asarray(next_sentence_weights(masked)) > 0]
        random_next += (next_labels == 1).sum()
        sequences += len(next_labels)
    baselines = {
        "unigram_loss": float(loss / max(1.0, predictions)),
        "unigram_accuracy": float(hits / max(1.0, predictions)),
    }
    if next_sentence:
        share = random_next / max(1.0, sequences)
        baselines["nsp_base_rate"] = float(max(share, 1 - share))
    return baselines
