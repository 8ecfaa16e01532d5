# SPDX-License-Identifier: Apache-2.0
"""Classes of sequences, or numbers. Source: google-research/bert run_classifier.py, create_model."""

from bert_jax.model.heads.base import Head, Linear

SEQUENCES = Head(
    "sequence_classification",
    ("pooler", "classifier"),
    Linear,
    usual_task=lambda num_outputs: "regression" if num_outputs == 1 else "classification",
    probe="sequences",
    exported=lambda logits: logits[:, 0],
    about_exported="logits [B, K], in the order of the labels; of a regression [B, 1], the number before `activation`.",
    architecture="BertForSequenceClassification",
    pipeline="text-classification",
    has_labels=True,
    problem_types=("regression", "single_label_classification"),
)
