# SPDX-License-Identifier: Apache-2.0
"""Texts and pairs with any number of labels each: a probability and a threshold for every label.

Labels are lists in JSON lines and other data with lists, or names in one column with `task.label_separator` between
them; an object gives each label a probability. With `task.labels` they are also lists with a 0 or 1 for each of these,
or columns of such with their names. Thresholds are chosen on dev, for the best F1 of each label.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from bert_jax.errors import InputError
from bert_jax.model.heads.multilabel import MULTILABEL
from bert_jax.settings.finetuning import TaskConfig, numbers_of
from bert_jax.tasks import scores
from bert_jax.tasks.base import choose_metric
from bert_jax.tasks.classify import CLASS_COLUMNS, TextTask
from bert_jax.tasks.classify_read import labels_of, read_texts
from bert_jax.tasks.labels import ClassifyExample, check_labelled, read_labels
from bert_jax.tasks.texts import Labelled, make_rows

_LABELS = ("labels", "label", "tags", "categories", *CLASS_COLUMNS)  # usual names of the column
_NUMBERS = {"0", "1", "true", "false"}  # labels that a list of 0 and 1 may name
METRICS = ("micro_f1", "macro_f1", "mean_average_precision", "subset_accuracy")


class MultilabelTask(TextTask):
    """Any number of labels for each text."""

    head = MULTILABEL

    def __init__(self, config: TaskConfig, labels: Sequence[str] = ()) -> None:
        """Makes the task; labels and columns are as in `ClassificationTask`.

        Raises: InputError if a setting cannot be used.
        """
        super().__init__(config, tuple(labels) or labels_of(config))
        self.metric = choose_metric(config, METRICS)
        self.thresholds = numbers_of(config.thresholds, "task.thresholds")
        if self.thresholds and self.labels and len(self.thresholds) != len(self.labels):
            raise InputError(
                f"task.thresholds has {len(self.thresholds)} numbers for {len(self.labels)} labels"
            )

    def read(self, source, split):
        return read_texts(self.config, _LABELS, self._read_labels, "", source, split)

    def _read_labels(self, value: object, where: str) -> dict[str, float] | None:
        """Returns the labels of a record; a list with a 0 or 1 for each of `task.labels` is in their order.

        Raises: InputError as `read_labels`.
        """
        names = labels_of(self.config)
        shares = value if isinstance(value, list) and len(value) == len(names) else [None]
        if all(share in (0, 1) for share in shares) and not {*names} & _NUMBERS:
            return {name: float(share or 0) for name, share in zip(names, shares)}
        return read_labels(self.config.label_separator, value, where)

    def find_labels(self, examples):
        if self.labels:
            return self.labels
        first: dict[str, str] = {}  # where each label first is
        given = 0
        for example in examples:
            for name in example.label or ():
                first.setdefault(name, example.where)
                given += 1
        names = sorted(first)
        if names in (["0", "1"], ["false", "true"]) and given == 2 * len(examples):
            both = f"the labels {names[0]} and {names[1]}, as a 0 or 1 for each of two labels"
            raise InputError(
                f"{examples[0].where}: all examples have {both}; set task.labels to their names in order"
            )
        if not names or 2 * len(names) > max(given, 40):
            fix = "check task.label_column and task.label_separator, or set task.labels"
            raise InputError(
                f"{examples[0].where}: {len(examples)} examples have {len(names)} different labels; {fix}"
            )
        for name, sign in itertools.product(names, ";|\t"):
            if sign in name and {part.strip() for part in name.split(sign)} <= {*names}:
                raise InputError(
                    f"{first[name]}: label {name!r:.60} is several; set task.label_separator to {sign!r}"
                )
        return tuple(names)

    def make_rows(self, examples, tokenizer, training):
        return make_rows(self.config, self._target, examples, tokenizer, training)

    def _target(self, example: ClassifyExample) -> np.ndarray | None:
        """Returns the probability of each label, [K] float32. Raises: InputError if a label is unknown."""
        if example.label is None:
            return None
        if unknown := sorted(set(example.label) - set(self.labels)):
            known = ", ".join(map(repr, self.labels[:20]))
            raise InputError(
                f"{example.where}: label {unknown[0]!r:.60} is not one of {known}; or set task.labels"
            )
        return np.array([example.label.get(name, 0.0) for name in self.labels], np.float32)

    def decode(self, examples, rows, outputs):
        """Returns the labels of each example, which has one row, whose probability reaches their threshold."""
        thresholds = self.thresholds or (0.5,) * len(self.labels)
        predictions = []
        for logits in outputs:
            # the sigmoid: exp would overflow at a large logit, and tanh does not
            shares = [0.5 * (1 + math.tanh(0.5 * float(logit))) for logit in logits]
            chosen = zip(self.labels, shares, thresholds)
            predicted = tuple(name for name, share, threshold in chosen if share >= threshold)
            predictions.append(Labelled(predicted, dict(zip(self.labels, shares))))
        return predictions

    def _truth(self, examples: Sequence[ClassifyExample]) -> np.ndarray:
        """Returns which labels are given, [N, K] bool."""
        check_labelled(examples)
        targets = [self._target(example) for example in examples]
        return np.array(targets).reshape(-1, len(self.labels)) > 0.5

    def _shares(self, predictions: Sequence[Labelled]) -> np.ndarray:
        """Returns the probabilities, [N, K]."""
        shares = [[each.probabilities[name] for name in self.labels] for each in predictions]
        return np.array(shares).reshape(-1, len(self.labels))

    def score(self, examples, predictions):
        """Returns the metrics, and the F1 of each label, as in scikit-learn, with 0 where they are not defined."""
        truth = self._truth(examples)
        shares = self._shares(predictions)
        said = [[name in each.labels for name in self.labels] for each in predictions]
        predicted = np.array(said, bool).reshape(truth.shape)
        # of each label: right, predicted, true
        counts = np.array([mask.sum(axis=0) for mask in (truth & predicted, predicted, truth)])
        label_f1 = [scores.precision_recall_f1(*each)[2] for each in counts.T.tolist()]
        precisions = list(map(scores.average_precision, truth.T, shares.T))
        is_same = (truth == predicted).all(axis=1)
        return {
            "micro_f1": scores.precision_recall_f1(*counts.sum(axis=1).tolist())[2],
            "macro_f1": float(np.mean(label_f1)),
            "mean_average_precision": float(np.mean(precisions)),
            "subset_accuracy": float(np.mean(is_same)) if len(truth) else 0.0,
            **{f"f1_{name}": value for name, value in zip(self.labels, label_f1)},
        }

    def show(self, prediction):
        return {"labels": list(prediction.labels), "probabilities": prediction.probabilities}

    def value_of(self, prediction: Labelled) -> str:
        return self.config.label_separator.join(prediction.labels)

    def tune(self, examples, predictions):
        """Returns the settings with the threshold of each label that gives the best F1, unless they have thresholds.

        It is 0.5 for labels without examples.
        """
        if self.thresholds:
            return self.config
        columns = zip(self._truth(examples).T, self._shares(predictions).T)
        chosen = [_best_threshold(truth, shares) for truth, shares in columns]
        # 6 digits may round to 1
        return dataclasses.replace(self.config, thresholds=",".join(map(repr, chosen)))


def _best_threshold(truth: np.ndarray, shares: np.ndarray) -> float:
    """Returns the best midpoint of two neighbouring probabilities; of equally good ones, the one nearest to 0.5."""
    if not truth.any() or not np.isfinite(shares).all():  # of a model that has diverged
        return 0.5
    order = np.argsort(-shares, kind="stable")
    right = np.cumsum(truth[order])
    values = shares[order]
    f1 = 2 * right / (np.arange(1, len(order) + 1) + truth.sum())
    ends = np.append(values[1:] < values[:-1], True)  # equal probabilities are taken together
    middles = (values + np.append(values[1:], 0.0)) / 2
    best = np.flatnonzero(ends & (f1 >= f1[ends].max()))
    return float(min(middles[best], key=lambda middle: abs(middle - 0.5)))
