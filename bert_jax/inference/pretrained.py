# SPDX-License-Identifier: Apache-2.0
"""A trained BERT as a user has it in Python: loaded from any format, and asked for its encodings."""

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from bert_jax.batch import Batch, Encoded, PyTree
from bert_jax.batches.make import make_batch
from bert_jax.checkpoints import pretrained
from bert_jax.checkpoints.pretrained import read_pretrained
from bert_jax.errors import InputError, shown
from bert_jax.inference.features import Encodings, Texts, encode_texts
from bert_jax.model.heads.base import Head
from bert_jax.model.heads.sequence import SEQUENCES
from bert_jax.model.objective import encode
from bert_jax.settings.model import ModelConfig
from bert_jax.storage.places import AnyPath
from bert_jax.storage.resolve import resolve

DTYPES = ("float32", "bfloat16")


class Pretrained(pretrained.Pretrained):
    """Configuration, parameters and tokenizer of a pre-trained BERT, which encodes texts.

    A loaded model has the heads of its source, and no random ones.
    """

    def encode(self, texts: Texts, long_texts: str = "cut") -> Encodings:
        """Returns the encodings of texts, or of pairs of texts, as `encode_texts`, which says what it raises."""
        return encode_texts(self, texts, long_texts)

    def batch(
        self,
        texts: Texts,
        labels: Sequence[Any] | None = None,
        max_length: int | None = None,
        head: Head = SEQUENCES,
    ) -> Batch:
        """Returns texts, or pairs of texts, as a batch that fits the model: `make_batch`, which says what it raises."""
        return make_batch(self, texts, max_length, labels=labels, head=head)

    def apply(
        self,
        batch: Batch,
        dropout_key: jax.Array | None = None,
        layers: bool = False,
        attentions: bool = False,
    ) -> Encoded:
        """Returns the encoder's outputs for a batch: `bert_jax.encode` of this model.

        The model is a pytree with its parameters as leaves: `jax.jit(lambda bert, batch: bert.apply(batch))` takes it
        as an argument, and `jax.grad` gives a model of gradients.
        """
        return encode(self.config, self.params, batch, dropout_key, layers, attentions)

    def __repr__(self) -> str:
        config = self.config
        leaves = jax.tree.leaves(self.params)
        numbers = sum(math.prod(getattr(leaf, "shape", ())) for leaf in leaves)
        labels = f" of {', '.join(self.labels)}" if self.labels else ""
        return (
            f"Pretrained({config.family}, {config.num_layers} layers of {config.hidden_size}, {numbers / 1e6:.1f} M "
            f"parameters, computes in {config.compute_dtype})\n"
            f"  {self.task}{labels[:80]}; {config.vocab_size} words, at most {config.max_positions} tokens"
        )


class _Known(NamedTuple):
    """What a model knows beside its parameters; programs are compiled for it."""

    config: ModelConfig
    others: dict[str, Any]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Known) or self.config != other.config:
            return False
        return all(self.others[name] is other.others[name] for name in self.others)

    def __hash__(self) -> int:
        return hash(self.config)


def _flatten(bert: Pretrained) -> tuple[tuple[PyTree], _Known]:
    fields = {field.name: getattr(bert, field.name) for field in dataclasses.fields(bert)}
    return (fields.pop("params"),), _Known(fields.pop("config"), fields)


def _unflatten(known: _Known, children: tuple[PyTree]) -> Pretrained:
    return Pretrained(config=known.config, params=children[0], **known.others)


jax.tree_util.register_pytree_node(Pretrained, _flatten, _unflatten)


def load_pretrained(path: AnyPath, dtype: str = "") -> Pretrained:
    """Returns the pre-trained BERT at `path`, in one of three formats.

    Ours is a directory that `save_pretrained` wrote, or a work directory; Hugging Face's is a directory as transformers
    writes it, or hf://ORG/NAME; Google's a directory with bert_config.json and bert_model.ckpt.*, or a prefix such as
    DIR/bert_model.ckpt.

    A work directory of pre-training gives its newest undamaged checkpoint, one of fine-tuning its best model;
    WORKDIR@STEP is the revision of that step (`checkpoint.keep_every`), WORKDIR@STEP,STEP the mean of the parameters of
    several. A path may be a URL, such as gs://BUCKET/RUN: the parameters of a checkpoint are read from there, and
    a model's files are copied to the cache.

    The parameters are float32 and on one device. With `dtype` "bfloat16" or "float32" the model computes in that type,
    else in its own: float32, unless it was trained in bfloat16. `notes` of the result list differences from its source;
    Python warns of a classifier whose outputs are not those of one class.

    Raises: InputError if there is no model, a file is damaged, or the model is not a BERT that can be computed here.

    Examples:
      >>> bert_jax.load_pretrained("models/bert-mini-en")
      Pretrained(bert, 4 layers of 256, 5.5 M parameters, computes in float32)
        pretraining; 8192 words, at most 512 tokens
    """
    bert = read_pretrained(resolve(path))
    if bert.problem:
        warnings.warn(
            f"{path} has the problem_type {bert.problem}: its outputs are not the scores of classes that exclude each "
            "other, so take no softmax of them; load_predictor refuses it",
            stacklevel=2,
        )
    return Pretrained(**vars(computing_in(bert, dtype)))


def computing_in(bert: pretrained.Pretrained, dtype: str) -> pretrained.Pretrained:
    """Returns a model that computes in `dtype`; "" keeps its own. Raises: InputError for another name."""
    if not dtype:
        return bert
    if dtype not in DTYPES:
        raise InputError(f"dtype {shown(dtype)} is none of {', '.join(DTYPES)}")
    return dataclasses.replace(bert, config=bert.config.computing_in(dtype))
