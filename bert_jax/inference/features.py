# SPDX-License-Identifier: Apache-2.0
"""Features of texts, for other programs to learn from: vectors of tokens, vectors of sentences.

Source: paper, section 5.3; google-research/bert extract_features.py.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch, PyTree, Row, pad_rows
from bert_jax.batches.infer import computed, inference_layouts, tokens_at_once
from bert_jax.batches.make import batch_of_layout, spots_of
from bert_jax.batches.pack import Layout, sizes_of
from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.devices.cores import on_all_cores
from bert_jax.devices.sharding import in_no_mesh, make_mesh, tree_shardings
from bert_jax.errors import InputError
from bert_jax.model.heads.encoder import ENCODER
from bert_jax.model.heads.labels import Spot
from bert_jax.model.heads.table import embedding_head
from bert_jax.model.inputs import check_rows
from bert_jax.model.objective import Params, encode, forward
from bert_jax.model.sequences import mean_of_sequences
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.pretraining import MeshConfig
from bert_jax.tasks.base import single_row
from bert_jax.text.fitting import fit_texts, listed, tell_cut

# of kinds of models whose vectors are not these
_OTHERS = {
    "multi_vector": "this model has a vector for each token; take multi_vectors",
    "sparse": "this model makes sparse vectors; take sparse_embeddings",
}
Texts: TypeAlias = Iterable[str] | Iterable[tuple[str, str]]
_TEXTS_AT_ONCE = 8192  # that are tokenized before the first of their vectors are given back
_MANY = 4096  # texts whose programs for several devices are worth compiling
_TOKENS_AT_ONCE = 4096  # whose vectors are in memory, about; a batch, if that is more


class Encodings(NamedTuple):
    """The encoder's outputs for some texts. Arrays are on the host, float32."""

    hidden: np.ndarray  # [B, L, H]: the last layer, one vector per token; 0 for padding
    # [B, H]: the pooler's output for [CLS]; None if the model has no pooler
    pooled: np.ndarray | None
    token_ids: np.ndarray  # [B, L] int32, [CLS] first, padded
    mask: np.ndarray  # [B, L] bool: True for a token, False for padding


class TokenFeatures(NamedTuple):
    """The vectors of the tokens of a text."""

    tokens: list[str]  # [CLS] first
    layers: np.ndarray  # [W, L, H] float32, of the W layers that were asked for
    truncated: bool


@in_no_mesh()
def encode_texts(bert: Pretrained, texts: Texts, long_texts: str = "cut") -> Encodings:
    """Returns the encodings of texts, or of pairs of texts, as long as the longest.

    A text with more tokens than the model has positions is cut, with a warning, or with `long_texts` "refuse" an error.
    Raises: InputError if there is no text, or one is none.
    """
    texts = listed(texts)
    rows, cut = rows_of(bert, texts, bert.config.max_positions, long_texts)
    if not rows:
        raise InputError("there is no text to encode; give a list of texts or of pairs of texts")
    tell_cut(sum(cut), bert.config.max_positions)
    longest = max(len(row.token_ids) for row in rows)
    padded = pad_rows([row.token_ids for row in rows], longest, pad_id=bert.tokenizer.pad_id)
    hidden = np.zeros((len(rows), longest, bert.config.hidden_size), np.float32)
    pooled = np.zeros((len(rows), bert.config.hidden_size), np.float32)
    for row, spot, (of_tokens, of_sequences) in outputs_of(
        bert, rows, partial(_encoded, bert.config), "off"
    ):
        hidden[row.example, : len(row.token_ids)] = of_tokens[spot.tokens]
        if of_sequences is not None:
            pooled[row.example] = of_sequences[spot.places.start]
    mask = np.asarray(padded.sequence_ids) > 0
    return Encodings(
        hidden=hidden,
        pooled=pooled if "pooler" in bert.params["encoder"] else None,
        token_ids=padded.token_ids,
        mask=mask,
    )


@in_no_mesh()
def token_features(
    bert: Pretrained,
    texts: Texts,
    layers: Sequence[int] = (-1, -2, -3, -4),
    max_seq_length: int = 0,
    long_texts: str = "cut",
) -> Iterator[TokenFeatures]:
    """Yields the vectors of each text, or pair of texts, in the order of the texts.

    Layer 0 is the embeddings, 1 the first layer; -1 is the last. A text with more than `max_seq_length` tokens is cut,
    with a warning at the end, or with `long_texts` "refuse" an error; 0 is as many as the model has positions for.

    Raises: InputError if a layer does not exist, or `max_seq_length` is beyond the model's positions.
    """
    chosen, texts = tuple(layers), listed(texts)
    max_seq_length, num_cut = check_lengths(bert, chosen, max_seq_length), 0
    for first in range(0, len(texts), _TEXTS_AT_ONCE):
        rows, cut = rows_of(
            bert, texts[first : first + _TEXTS_AT_ONCE], max_seq_length, long_texts, first
        )
        num_cut += sum(cut)
        ends = np.cumsum([len(row.token_ids) for row in rows]) // max(
            _TOKENS_AT_ONCE, tokens_at_once()
        )
        for numbers in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(ends)) + 1):
            part = [rows[number] for number in numbers]
            found = {
                row.example: vectors[:, spot.tokens]
                for row, spot, vectors in outputs_of(
                    bert, part, partial(_layers, bert.config, chosen)
                )
            }
            for row in part:
                yield TokenFeatures(
                    tokens=bert.tokenizer.tokens(row.token_ids),
                    layers=found[row.example],
                    truncated=cut[row.example],
                )
    tell_cut(num_cut, max_seq_length)


@in_no_mesh()
@on_all_cores()
def sentence_embeddings(
    bert: Pretrained,
    texts: Texts,
    pooling: str = "",
    layer: int = -1,
    max_seq_length: int = 0,
    long_texts: str = "cut",
    kind: str = "",
) -> np.ndarray:
    """Returns a vector for each text, [number of texts, H] float32.

    A model that was trained to embed texts, here or by sentence-transformers, does it as it was trained: with its own
    pooling, normalization and most tokens, and the prompt of a `kind`: "query", "passage", or the name of another of
    its prompts. "" takes its default prompt, which most models have not, or none.

    `pooling` "mean", which other models take, is the mean over the tokens of a text, [CLS] and [SEP] too; "cls" is the
    vector of [CLS]. Vectors of a model that was not trained to compare sentences tell little about similarity, those of
    [CLS] less than the mean. `max_seq_length` and `long_texts` are those of `token_features`.

    Raises: InputError as `token_features`, or if there is no such pooling or kind, or the model makes other vectors.

    Examples:
      >>> bert = bert_jax.load_pretrained("models/bert-mini-en")
      >>> bert_jax.sentence_embeddings(bert, ["open the door", "the door is open"]).shape
      (2, 256)
    """
    texts = listed(texts)
    if pooling not in ("", "mean", "cls"):
        raise InputError(f"pooling {pooling!r} is unknown; use mean or cls")
    settings = bert.embedding if not pooling and layer == -1 else None
    other = "" if settings is None else _OTHERS.get(settings.embedding.kind, "")
    if other:
        raise InputError(f"{other}, or give a pooling such as mean")
    texts = with_prompt(settings or TaskConfig(), texts, kind)
    size = bert.config.hidden_size
    compute = partial(_pooled, bert.config, layer, pooling != "cls")
    if settings is not None:
        size = settings.embedding.vector_size(size)
        compute = partial(embedded, bert.config, settings)
        max_seq_length = max_seq_length or min(settings.max_seq_length, bert.config.max_positions)
    max_seq_length = check_lengths(bert, (layer,), max_seq_length)
    rows, cut = rows_of(bert, texts, max_seq_length, long_texts)
    embeddings = np.zeros((len(rows), size), np.float32)
    tell_cut(sum(cut), max_seq_length)
    for row, spot, vectors in outputs_of(bert, rows, compute):
        embeddings[row.example] = vectors[spot.places.start]
    return embeddings


def with_prompt(settings: TaskConfig, texts: Texts, kind: str) -> list[Any]:
    """Returns texts with the prompt of their kind before them. Raises: InputError if there is no such kind."""
    prompts = settings.embedding.prompts()
    if kind not in ("", *prompts):
        raise InputError(f"kind {kind!r} is unknown; use {', '.join(prompts)}, or leave it empty")
    prompt = prompts.get(kind or settings.embedding.default_prompt, "")
    if not prompt:
        return list(texts)
    return [
        prompt + text if isinstance(text, str) else (prompt + text[0], *text[1:]) for text in texts
    ]


def check_lengths(bert: Pretrained, layers: tuple[int, ...], max_seq_length: int) -> int:
    """Returns the most tokens of a text. Raises: InputError if the model lacks a layer, or positions for them."""
    most = bert.config.num_layers
    if not layers or not all(-most - 1 <= layer <= most for layer in layers):
        raise InputError(
            f"layers {layers} are not some of the model's; use 0 (embeddings) to {most}, or -1 to {-most - 1}"
        )
    length = max_seq_length or bert.config.max_positions
    if not 5 <= length <= bert.config.max_positions:
        raise InputError(
            f"max_seq_length {length} is not from 5 to the model's {bert.config.max_positions} positions"
        )
    return length


def rows_of(
    bert: Pretrained,
    texts: Sequence[Any],
    most: int,
    long_texts: str,
    before: int = 0,
) -> tuple[list[Row], list[bool]]:
    """Returns the rows of some texts, and whether each was cut; `before` is the number of texts before them."""
    fitted = fit_texts(bert.tokenizer, texts, most, long_texts, before)
    rows = [
        single_row(number, text.token_ids, type_ids=text.type_ids)
        for number, text in enumerate(fitted)
    ]
    check_rows(bert.config, rows, "the input")
    return rows, [text.was_cut for text in fitted]


def outputs_of(
    bert: Pretrained,
    rows: Sequence[Row],
    compute: Callable[[Params, Batch], PyTree],
    pack: str = "auto",
) -> Iterator[tuple[Row, Spot, PyTree]]:
    """Yields each text with its spot in a row of a batch, and the outputs of this row.

    Many texts are divided over this host's devices.
    """
    devices = jax.local_devices()
    mesh = make_mesh(MeshConfig(), devices) if len(devices) > 1 and len(rows) >= _MANY else None
    if mesh is None:
        params = bert.prepared
    else:
        params = jax.device_put(bert.params, tree_shardings(mesh, bert.params))

    def of_layout(layout: Layout) -> PyTree:
        batch = batch_of_layout(rows, layout, ENCODER, mesh)
        if mesh is None:
            return compute(params, batch)
        with jax.set_mesh(mesh):
            return compute(params, batch)

    layouts = inference_layouts(sizes_of(rows), bert.config, pack, mesh)
    for layout, outputs in computed(layouts, of_layout):
        for line, numbers in enumerate(layout.bins):
            of_line = jax.tree.map(lambda array, line=line: array[line], outputs)
            for row, spot in spots_of([rows[number] for number in numbers]):
                yield row, spot, of_line


@partial(jax.jit, static_argnums=0)
def _encoded(
    config: ModelConfig, params: Params, batch: Batch
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the last layer [B, L, H], and the pooled outputs [B, M, H] if the model has a pooler."""
    encoded = encode(config, params, batch)
    return encoded.hidden, encoded.pooled


@partial(jax.jit, static_argnums=(0, 1))
def _layers(
    config: ModelConfig,
    chosen: tuple[int, ...],
    params: Params,
    batch: Batch,
) -> jax.Array:
    layers = encode(config, params, batch, layers=True).layers
    assert layers is not None
    # [B, W, L, H]
    return jnp.stack([layers[layer] for layer in chosen], axis=1).astype(jnp.float32)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _pooled(
    config: ModelConfig,
    layer: int,
    mean: bool,
    params: Params,
    batch: Batch,
) -> jax.Array:
    layers = encode(config, params, batch, layers=True).layers
    assert layers is not None
    hidden = layers[layer].astype(jnp.float32)
    if mean:
        return mean_of_sequences(hidden, batch.sequence_ids, batch.cls_positions.shape[1])
    return jnp.take_along_axis(hidden, batch.cls_positions[..., None], axis=1)


@partial(jax.jit, static_argnums=(0, 1))
def embedded(
    config: ModelConfig,
    settings: TaskConfig,
    params: Params,
    batch: Batch,
) -> jax.Array:
    """Returns the vectors of a batch, as an embedding model with these settings makes them."""
    return forward(config, params, batch, embedding_head(settings))
