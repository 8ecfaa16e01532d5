# SPDX-License-Identifier: Apache-2.0
"""Classes of sequences, or numbers. Source: google-research/bert run_classifier.py, create_model."""

import jax

from bert_jax.model.heads.base import Linear


class Sequences(Linear):
    """A class for each sequence, or a number."""

    name = "sequence_classification"
    about_exported = (
        "logits [B, K], in label order; of a regression [B, 1], the number before `activation`."
    )
    architecture = "BertForSequenceClassification"
    pipeline = "text-classification"
    has_labels = True
    problem_types = ("regression", "single_label_classification")

    def usual_task(self, num_outputs: int) -> str:
        return "regression" if num_outputs == 1 else "classification"

    def exported(self, logits: jax.Array) -> jax.Array:
        return logits[:, 0]


SEQUENCES = Sequences()
