# SPDX-License-Identifier: Apache-2.0
"""BERT in JAX: from raw text to trained and fine-tuned models, on a laptop or a TPU pod.

Names are loaded when first used (PEP 562), so `import bert_jax.text` imports no JAX.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "evaluate_pretrained": "bert_jax.inference.evaluate",
    "load_predictor": "bert_jax.inference.predict",
    "load_pretrained": "bert_jax.checkpoints.pretrained",
    "load_tokenizer": "bert_jax.text.tokenizer",
    "score_sentences": "bert_jax.inference.sentence_scores",
    "InputError": "bert_jax.errors",
}

__all__ = [
    "InputError",
    "evaluate_pretrained",
    "load_predictor",
    "load_pretrained",
    "load_tokenizer",
    "score_sentences",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'bert_jax' has no attribute {name!r}")
