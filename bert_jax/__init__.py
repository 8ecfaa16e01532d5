# SPDX-License-Identifier: Apache-2.0
"""BERT in JAX: from raw text to trained and fine-tuned models, on a laptop or a TPU pod.

The names in `__all__` are the public interface (docs/api.md). Each is loaded when it is first used (PEP 562), so that
`import bert_jax` takes no time and imports neither JAX nor NumPy.
"""

from typing import TYPE_CHECKING

from bert_jax.version import __version__

# Public name -> "module:attribute" below bert_jax. No public name may also be the name of a module of bert_jax: whoever
# imports the module would replace the public name by it.
_HOMES = {
    "recipe": "tools.recipes:recipe",
    "CutWarning": "text.fitting:CutWarning",
    "Spot": "model.heads.labels:Spot",
    "Encoded": "batch:Encoded",
    "MaskingConfig": "settings.pretraining:MaskingConfig",
    "mask_tokens": "model.masking:mask_tokens",
    "HEADS": "model.heads.table:HEADS",
    "Batch": "batch:Batch",
    "Encoder": "model.bert:Encoder",
    "FinetuneConfig": "settings.finetuning:FinetuneConfig",
    "Head": "model.heads.base:Head",
    "InputError": "errors:InputError",
    "ModelConfig": "settings.model:ModelConfig",
    "PretrainConfig": "settings.pretraining:PretrainConfig",
    "Pretrained": "inference.pretrained:Pretrained",
    "Row": "batch:Row",
    "Rows": "tasks.base:Rows",
    "Task": "tasks.base:Task",
    "TextHead": "model.heads.own:TextHead",
    "TokenHead": "model.heads.own:TokenHead",
    "BatchHead": "model.heads.own:BatchHead",
    "text_task": "tasks.own:text_task",
    "token_task": "tasks.own:token_task",
    "batch_task": "tasks.own:batch_task",
    "Tokenizer": "text.tokenizer:Tokenizer",
    "encode": "model.objective:encode",
    "evaluate_pretrained": "inference.evaluate:evaluate_pretrained",
    "fill_masks": "inference.predict:fill_masks",
    "finetune": "finetuning:finetune",
    "forward": "model.objective:forward",
    "init_params": "model.objective:init_params",
    "load_predictor": "inference.predict:load_predictor",
    "load_pretrained": "inference.pretrained:load_pretrained",
    "load_tokenizer": "tokenizing:load_tokenizer",
    "make_batch": "batches.make:make_batch",
    "Limits": "inference.negatives:Limits",
    "maxsim": "inference.late_interaction:maxsim",
    "multi_vectors": "inference.late_interaction:multi_vectors",
    "mine_negatives": "inference.negatives:mine_negatives",
    "nearest_vectors": "tasks.embeddings.search:nearest_vectors",
    "open_vectors": "data.vectors:open_vectors",
    "quantize": "data.vectors:quantize",
    "write_vectors": "inference.vectors:write_vectors",
    "pretrain": "pretraining:pretrain",
    "save_pretrained": "checkpoints.pretrained:save_pretrained",
    "score_sentences": "inference.sentence_scores:score_sentences",
    "sentence_embeddings": "inference.features:sentence_embeddings",
    "sparse_embeddings": "inference.sparse:sparse_embeddings",
    "tune_process": "devices.tuning:tune_process",
}

__all__ = [
    "HEADS",
    "Batch",
    "BatchHead",
    "CutWarning",
    "Encoded",
    "Encoder",
    "FinetuneConfig",
    "Head",
    "InputError",
    "Limits",
    "MaskingConfig",
    "ModelConfig",
    "PretrainConfig",
    "Pretrained",
    "Row",
    "Rows",
    "Spot",
    "Task",
    "TextHead",
    "TokenHead",
    "Tokenizer",
    "__version__",
    "batch_task",
    "encode",
    "evaluate_pretrained",
    "fill_masks",
    "finetune",
    "forward",
    "init_params",
    "load_predictor",
    "load_pretrained",
    "load_tokenizer",
    "make_batch",
    "mask_tokens",
    "maxsim",
    "mine_negatives",
    "multi_vectors",
    "nearest_vectors",
    "open_vectors",
    "pretrain",
    "quantize",
    "recipe",
    "save_pretrained",
    "score_sentences",
    "sentence_embeddings",
    "sparse_embeddings",
    "text_task",
    "token_task",
    "tune_process",
    "write_vectors",
]

if TYPE_CHECKING:  # the same, for type checkers and editors
    from bert_jax.batch import Batch, Encoded, Row
    from bert_jax.batches.make import make_batch
    from bert_jax.checkpoints.pretrained import save_pretrained
    from bert_jax.data.vectors import open_vectors, quantize
    from bert_jax.devices.tuning import tune_process
    from bert_jax.errors import InputError
    from bert_jax.finetuning import finetune
    from bert_jax.inference.evaluate import evaluate_pretrained
    from bert_jax.inference.features import sentence_embeddings
    from bert_jax.inference.late_interaction import maxsim, multi_vectors
    from bert_jax.inference.negatives import Limits, mine_negatives
    from bert_jax.inference.predict import fill_masks, load_predictor
    from bert_jax.inference.pretrained import Pretrained, load_pretrained
    from bert_jax.inference.sentence_scores import score_sentences
    from bert_jax.inference.sparse import sparse_embeddings
    from bert_jax.inference.vectors import write_vectors
    from bert_jax.model.bert import Encoder
    from bert_jax.model.heads.base import Head
    from bert_jax.model.heads.labels import Spot
    from bert_jax.model.heads.own import BatchHead, TextHead, TokenHead
    from bert_jax.model.heads.table import HEADS
    from bert_jax.model.masking import mask_tokens
    from bert_jax.model.objective import encode, forward, init_params
    from bert_jax.pretraining import pretrain
    from bert_jax.settings.finetuning import FinetuneConfig
    from bert_jax.settings.model import ModelConfig
    from bert_jax.settings.pretraining import MaskingConfig, PretrainConfig
    from bert_jax.tasks.base import Rows, Task
    from bert_jax.tasks.embeddings.search import nearest_vectors
    from bert_jax.tasks.own import batch_task, text_task, token_task
    from bert_jax.text.fitting import CutWarning
    from bert_jax.text.tokenizer import Tokenizer
    from bert_jax.tokenizing import load_tokenizer
    from bert_jax.tools.recipes import recipe
# hidden from type checkers: a module with __getattr__ has every name to them, misspelt ones too
else:

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
