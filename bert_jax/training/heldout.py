# SPDX-License-Identifier: Apache-2.0
"""Evaluation of pre-training on held-out text, with the scores of a model without context as baselines."""

from collections.abc import Callable, Iterable
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.batch import Batch
from bert_jax.batches.load import eval_batches
from bert_jax.data.records import Dataset
from bert_jax.devices.sharding import on_host
from bert_jax.model.heads.pretraining import next_sentence_weights
from bert_jax.model.objective import Objective, Params
from bert_jax.settings.pretraining import ResolvedConfig
from bert_jax.training.loop import evaluate
from bert_jax.training.program import Program
from bert_jax.training.stages import Evaluation


def make_evaluation(
    config: ResolvedConfig, objective: Objective, dataset: Dataset, mesh: Mesh, params: Params
) -> Evaluation | None:
    """Returns the evaluation on the whole held-out split, or None if nothing is held out.

    Masks are fixed: they are the masks of epoch 0. `params` gives the shapes of the parameters.
    """
    if not dataset.heldout.num_rows:
        return None
    eval_step = Program(mesh).evaluation(objective, params)
    size = config.eval.rows(config.data.batch_size, config.train.microbatches)
    batches = partial(eval_batches, dataset.heldout, size, mesh)
    separator = dataset.load_tokenizer().sep_id if config.model.causal else -1
    baselines = heldout_baselines(
        objective, dataset.token_counts, batches(), config.train.next_sentence, separator
    )

    def evaluation(
        params: Params, stopped: Callable[[], int] = lambda: 0
    ) -> dict[str, float] | None:
        metrics = evaluate(eval_step, params, batches(), stopped)
        if metrics is None:
            return None
        # as in training, where the loss of replaced tokens counts more than others
        worth = {"mlm_loss": 1.0, "nsp_loss": 1.0, "replaced_loss": config.generator.weight}
        metrics["loss"] = sum(metrics[name] * worth[name] for name in worth if name in metrics)
        # of a much larger loss it would be infinite, which JSON does not have
        metrics["mlm_perplexity"] = float(np.exp(min(metrics["mlm_loss"], 80.0)))
        return {name: metrics[name] for name in EVAL_METRICS if name in metrics} | baselines

    return evaluation


_OF_WORDS = ("mlm_loss", "mlm_accuracy", "mlm_perplexity")
_OF_REPLACED = ("replaced_loss", "replaced_accuracy", "replaced_recall")
EVAL_METRICS = ("loss", *_OF_WORDS, "nsp_loss", "nsp_accuracy", *_OF_REPLACED)


def heldout_baselines(
    objective: Objective,
    token_counts: np.ndarray,
    batches: Iterable[Batch],
    next_sentence: bool,
    separator: int = -1,
) -> dict[str, float]:
    """Returns the scores of a model without context on the predictions of held-out batches.

    It predicts tokens from their counts [V] in the training split, plus one each, and every next sentence label as the
    more frequent one. A causal model predicts `separator` too, which is in no text: its share is that of the labels.
    """
    seen = np.zeros(len(token_counts))  # how often each token is a label
    mask = jax.jit(objective.prepare)
    random_next = sequences = 0.0
    for batch in batches:
        masked = on_host(mask(batch))
        seen += np.bincount(masked.mlm_labels[masked.mlm_weights > 0], minlength=len(seen))
        next_labels = masked.next_sentence_labels[np.asarray(next_sentence_weights(masked)) > 0]
        random_next += (next_labels == 1).sum()
        sequences += len(next_labels)
    predictions = max(1.0, seen.sum())
    counts = token_counts.astype(np.float64) + 1
    if 0 <= separator and seen[separator] < predictions:
        counts[separator] = counts.sum() * seen[separator] / (predictions - seen[separator]) + 1
    baselines = {
        "unigram_loss": float(-seen @ np.log(counts / counts.sum()) / predictions),
        "unigram_accuracy": float(seen[np.argmax(counts)] / predictions),
    }
    if next_sentence:
        share = random_next / max(1.0, sequences)
        baselines["nsp_base_rate"] = float(max(share, 1 - share))
    return baselines
