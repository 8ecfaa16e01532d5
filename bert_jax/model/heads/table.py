# SPDX-License-Identifier: Apache-2.0
"""The heads by name, and which of them a model has."""

from collections.abc import Iterable

from bert_jax.model.heads.base import Head
from bert_jax.model.heads.choice import CHOICES
from bert_jax.model.heads.embedding import EMBEDDINGS
from bert_jax.model.heads.encoder import ENCODER
from bert_jax.model.heads.multi_vector import MULTI_VECTORS
from bert_jax.model.heads.multilabel import MULTILABEL
from bert_jax.model.heads.pretraining import MASKED_LM, NEXT_SENTENCE, PRETRAINING
from bert_jax.model.heads.replaced import REPLACED
from bert_jax.model.heads.sequence import SEQUENCES
from bert_jax.model.heads.spans import SPANS
from bert_jax.model.heads.sparse import SPARSE
from bert_jax.model.heads.tokens import TOKENS
from bert_jax.settings.finetuning import TaskConfig

# Of heads with the same parts, the one that parameters alone stand for comes first.
_ALL = (
    *(SPANS, SEQUENCES, MULTILABEL, TOKENS, CHOICES),
    *(PRETRAINING, MASKED_LM, NEXT_SENTENCE, REPLACED, ENCODER, EMBEDDINGS, SPARSE, MULTI_VECTORS),
)
HEADS: dict[str, Head] = {head.name: head for head in _ALL}
# the heads of embedding models by `EmbeddingConfig.kind`
EMBEDDING_KINDS: dict[str, Head] = {
    "dense": EMBEDDINGS,
    "sparse": SPARSE,
    "multi_vector": MULTI_VECTORS,
}


def embedding_head(config: TaskConfig) -> Head:
    """Returns the head of an embedding model with these settings."""
    return EMBEDDING_KINDS[config.embedding.kind].as_set(config)


def has_parts(head: Head, parts: Iterable[str]) -> bool:
    """Returns whether a model with these parts has all of the head's."""
    return set(head.parts) <= set(parts)


def infer_head(parts: Iterable[str]) -> Head:
    """Returns the head of a model with these parts; classifiers without a pooler classify tokens."""
    return next((head for head in HEADS.values() if head.parts and has_parts(head, parts)), ENCODER)


def head_of(name: str, parts: Iterable[str]) -> Head:
    """Returns the head of that name if a model has its parts, and otherwise the one that the parts stand for."""
    head = HEADS.get(name)
    return head if head is not None and has_parts(head, parts) else infer_head(parts)
