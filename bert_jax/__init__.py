# SPDX-License-Identifier: Apache-2.0
"""BERT in JAX: from raw text to trained and fine-tuned models, on a laptop or a TPU pod.

The names in `__all__` are the public interface (docs/api.md). Each is loaded when it is first used (PEP 562), so that
`import bert_jax` takes no time and imports neither JAX nor NumPy.
"""

from typing import TYPE_CHECKING

__version__ = "0.2.0.dev0"

# Public name -> "module:attribute" below bert_jax. No public name may also be the name of a module of bert_jax: whoever
# imports the module would replace the public name by it.
_HOMES = {
    "FinetuneConfig": "finetune_config:FinetuneConfig",
    "InputError": "errors:InputError",
    "PretrainConfig": "config:PretrainConfig",
    "Pretrained": "pretrained:Pretrained",
    "Tokenizer": "text.tokenizer:Tokenizer",
    "evaluate_pretrained": "pretrained_scores:evaluate_pretrained",
    "fill_masks": "predict:fill_masks",
    "load_predictor": "predict:load_predictor",
    "load_pretrained": "pretrained:load_pretrained",
    "load_tokenizer": "text.tokenizer:load_tokenizer",
    "save_pretrained": "pretrained:save_pretrained",
    "score_sentences": "sentence_scores:score_sentences",
    "sentence_embeddings": "features:sentence_embeddings",
}

__all__ = [
    "FinetuneConfig",
    "InputError",
    "PretrainConfig",
    "Pretrained",
    "Tokenizer",
    "__version__",
    "evaluate_pretrained",
    "fill_masks",
    "load_predictor",
    "load_pretrained",
    "load_tokenizer",
    "save_pretrained",
    "score_sentences",
    "sentence_embeddings",
]

if TYPE_CHECKING:  # the same, for type checkers and editors
    from bert_jax.config import PretrainConfig
    from bert_jax.errors import InputError
    from bert_jax.features import sentence_embeddings
    from bert_jax.finetune_config import FinetuneConfig
    from bert_jax.predict import fill_masks, load_predictor
    from bert_jax.pretrained import Pretrained, load_pretrained, save_pretrained
    from bert_jax.pretrained_scores import evaluate_pretrained
    from bert_jax.sentence_scores import score_sentences
    from bert_jax.text.tokenizer import Tokenizer, load_tokenizer
else:  # hidden from type checkers: a module with __getattr__ has every name to them, misspelt ones too

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module 'bert_jax' has no attribute {name!r}")
        import importlib

        module, _, attribute = _HOMES[name].partition(":")
        value = getattr(importlib.import_module(f"bert_jax.{module}"), attribute)
        globals()[name] = value  # the next use does not come here
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
