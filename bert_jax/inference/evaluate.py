# SPDX-License-Identifier: Apache-2.0
"""Evaluation of any checkpoint on held-out text, with metrics that can be compared between runs.

Runs may differ in masking: whole words, the share of [MASK], the number of predictions. Their own held-out losses
(`training.heldout`) depend on that. Here all models predict the same tokens of the same text.
"""

import contextlib
import dataclasses
import math
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bert_jax.batch import Batch
from bert_jax.batches.load import eval_batches
from bert_jax.batches.stream import open_in_order
from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.data.prepare import PrepareOptions, prepare
from bert_jax.data.records import Dataset
from bert_jax.devices.sharding import in_no_mesh, make_mesh, tree_shardings
from bert_jax.errors import InputError
from bert_jax.inference.predict import check_predicts_words
from bert_jax.model.heads.pretraining import MASKED_LM
from bert_jax.model.losses import Pair, accuracy, cross_entropy
from bert_jax.model.objective import Objective, Params, PretrainingObjective, forward
from bert_jax.settings.model import check_type_ids
from bert_jax.settings.pretraining import DataConfig, MaskingConfig, MeshConfig
from bert_jax.settings.rules import to_dict
from bert_jax.training.loop import evaluate
from bert_jax.training.program import Program

_RATE = 0.15
_TOKENS_AT_ONCE = 8192  # of a batch on each device
# of the rows of text that is prepared here, unless the model has fewer positions
_TEXT_LENGTH = 128


@in_no_mesh()
def evaluate_pretrained(
    bert: Pretrained,
    data: str | Path,
    split: str = "heldout",
    mesh: Mesh | None = None,
    cache_gb: float = DataConfig.cache_gb,
) -> dict:
    """Returns the metrics of a model on a split of prepared data, and counts of the data. See docs/scoring.md.

    A masked language model has mlm_loss (nats a prediction), mlm_perplexity and mlm_accuracy, by masks of single tokens
    at 15 % that are the same for every model with this vocabulary. A causal model has next_token_loss,
    next_token_perplexity and next_token_accuracy. If the data have labels of a second sentence and the model was
    trained on such, it has nsp_loss and nsp_accuracy; if the data record the length of their text, bits_per_byte.

    Args:
      bert: the model.
      data: a directory made by prepare_corpus with the tokenizer of the model, or its URL.
      split: "heldout" or "train".
      mesh: of the devices to use; None is all of them, each with a share of the rows.
      cache_gb: for data at a URL, the most gigabytes of their rows on the local disk. Only the split is read: once, or
        for bits_per_byte twice if it is larger than this.

    Raises: InputError if the data cannot be used with this model.
    """
    check_predicts_words(bert)
    mesh = mesh or make_mesh(MeshConfig())
    with contextlib.closing(open_in_order(data, bert.tokenizer.fingerprint, cache_gb)) as dataset:
        check_fits(bert, dataset)
        return _evaluate(bert, dataset, split, mesh)


def _evaluate(
    bert: Pretrained,
    dataset: Dataset,
    split: str,
    mesh: Mesh,
) -> dict:
    if split not in ("heldout", "train"):
        raise InputError(f"split {split!r} is unknown; use heldout or train")
    rows = dataset.heldout if split == "heldout" else dataset.train
    if not rows.num_rows:
        raise InputError(
            f"{dataset.path} has no row in its {split} split; prepare it with --holdout_rate above 0, or take the other"
        )
    params = jax.device_put(jax.device_get(bert.params), tree_shardings(mesh, bert.params))
    label = dataset.manifest["identity"]["options"].get("next_sentence", "nsp")
    next_sentence = label != "none" and predicts_next_sentence(bert) and not bert.config.causal
    devices = mesh.shape["data"] * mesh.shape["fsdp"]  # that rows are divided over
    most = max(1, _TOKENS_AT_ONCE // dataset.row_length)
    size = devices * min(most, -(-rows.num_rows // devices))

    def means(objective: Objective) -> dict[str, float]:
        results = evaluate(
            Program(mesh).evaluation(objective, params), params, eval_batches(rows, size, mesh)
        )
        assert results is not None  # it cannot be interrupted
        return results

    masking = token_masking(dataset.row_length)
    tokenizer = bert.tokenizer
    special = tokenizer.mask_id, (tokenizer.cls_id, tokenizer.sep_id)
    kind = PretrainingObjective if next_sentence else _Scoring
    results = means(kind(bert.config, masking, *special, next_sentence))
    name = "next_token" if bert.config.causal else "mlm"
    metrics = {
        f"{name}_loss": results["mlm_loss"],
        f"{name}_perplexity": math.exp(min(results["mlm_loss"], 80.0)),
        f"{name}_accuracy": results["mlm_accuracy"],
    }
    metrics |= {key: results[key] for key in ("nsp_loss", "nsp_accuracy") if key in results}
    if not all(map(math.isfinite, metrics.values())):
        raise InputError(
            "the loss is not finite; the model's parameters are not those of a trained one"
        )
    counts = {"rows": rows.num_rows, "sequences": rows.num_sequences}
    text = dataset.manifest["splits"][split]
    if text.get("text_bytes") and text.get("tokens"):
        if bert.config.causal:
            nats_per_token = results["text_loss"]
        else:
            whole_words = word_masking(dataset.row_length)
            word_results = means(_Scoring(bert.config, whole_words, *special, False))
            nats_per_token = word_results["word_loss"] * word_results["words_per_token"]
        metrics["bits_per_byte"] = (
            nats_per_token / math.log(2) * text["tokens"] / text["text_bytes"]
        )
        counts |= {name: text[name] for name in ("tokens", "text_bytes")}
    return {
        "metrics": {key: float(value) for key, value in metrics.items()},
        "counts": counts,
        "split": split,
        "next_sentence": label if next_sentence else "",
        "masking": {} if bert.config.causal else to_dict(masking),
        "dataset": dataset.fingerprint,
    }


def evaluate_text(
    bert: Pretrained,
    inputs: str,
    next_sentence: str = "nsp",
    max_seq_length: int = 0,
    mesh: Mesh | None = None,
) -> dict:
    """Returns the result of `evaluate_pretrained` on text files, in the formats that prepare_corpus reads.

    The text is prepared in a temporary directory, each document once, in rows of `max_seq_length` tokens (0 is 128, or
    as many as the model has positions for).

    Raises: InputError if the text cannot be read or prepared, or as `evaluate_pretrained`.
    """
    check_predicts_words(bert)
    length = max_seq_length or min(_TEXT_LENGTH, bert.config.max_positions)
    options = PrepareOptions(
        max_seq_length=length,
        next_sentence=next_sentence,
        duplicates=1,
        short_seq_rate=0.0,
        holdout_rate=0.0,
    )
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        bert.tokenizer.save(folder / "tokenizer")
        prepare(inputs, str(folder / "tokenizer"), str(folder / "data"), options, num_workers=1)
        return evaluate_pretrained(bert, folder / "data", "train", mesh)


def token_masking(row_length: int) -> MaskingConfig:
    """Returns the masking of every comparison: the paper's, of single tokens, at 15 % for any row length."""
    return MaskingConfig(rate=_RATE, max_predictions=max(1, round(_RATE * row_length)))


def word_masking(row_length: int) -> MaskingConfig:
    """Returns the masking of `bits_per_byte`: all tokens of a chosen word are replaced by [MASK]."""
    return dataclasses.replace(
        token_masking(row_length), whole_word=True, mask_rate=1.0, random_rate=0.0
    )


def predicts_next_sentence(bert: Pretrained) -> bool:
    """Returns whether the model has a head for the second sentence that was trained.

    The bias of an untrained head is still exactly 0.
    """
    head = bert.params.get("next_sentence")
    return head is not None and "pooler" in bert.params["encoder"] and bool(np.any(head["bias"]))


def check_fits(bert: Pretrained, dataset: Dataset) -> None:
    """Raises: InputError if the rows do not fit the model, or are masked already."""
    if dataset.row_length > bert.config.max_positions:
        raise InputError(
            f"rows of {dataset.row_length} tokens in {dataset.path} are longer than the {bert.config.max_positions} "
            "positions of the model; prepare shorter rows"
        )
    if dataset.manifest["row"].get("predictions"):
        raise InputError(
            f"{dataset.path} has masks of its own, and here all models get the same ones; import it with --masks=redraw"
        )
    label = dataset.manifest["identity"]["options"].get("next_sentence", "nsp")
    check_type_ids(bert.config, int(label != "none"), str(dataset.path))


class _Scoring(PretrainingObjective):
    """Pre-training without the next sentence head, which a model may lack, with the metrics of `bits_per_byte`.

    With whole words that is "word_loss", in which the loss of a word is the sum of those of its tokens, and
    "words_per_token"; for a causal model "text_loss", over tokens other than [CLS] and [SEP].
    """

    def losses(
        self, params: Params, batch: Batch, dropout_key: jax.Array | None
    ) -> dict[str, Pair]:
        special = jnp.array(self.never_predicted)
        logits = forward(self.model, params, batch, MASKED_LM)
        labels = batch.mlm_labels
        weights = batch.mlm_weights
        pairs = {
            "mlm_loss": cross_entropy(logits, labels, weights),
            "mlm_accuracy": accuracy(logits, labels, weights),
        }
        if self.model.causal:
            in_text = weights * ~jnp.isin(labels, special)
            pairs["text_loss"] = cross_entropy(logits, labels, in_text)
        elif self.masking.whole_word:
            starts = jnp.take_along_axis(batch.word_starts, batch.mlm_positions, axis=1)
            tokens = (batch.sequence_ids > 0) & ~jnp.isin(batch.token_ids, special)
            pairs["word_loss"] = pairs["mlm_loss"][0], jnp.sum(starts * weights)
            pairs["words_per_token"] = jnp.sum(tokens & batch.word_starts), jnp.sum(tokens)
        return pairs
