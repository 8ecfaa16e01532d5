# SPDX-License-Identifier: Apache-2.0
"""A vector for each text, and losses that need all texts of a batch at once: other examples' texts are negatives.

Source: Reimers and Gurevych 2019 for vectors of texts from pooled tokens.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Array, Batch
from bert_jax.devices.sharding import constrain_rows, num_row_shards, whole
from bert_jax.errors import InputError
from bert_jax.model.attention import MASKED_SCORE
from bert_jax.model.bert import Encoded
from bert_jax.model.heads.base import Head, Model
from bert_jax.model.heads.labels import places_of_texts
from bert_jax.model.inputs import check_shapes
from bert_jax.model.losses import Pair
from bert_jax.model.parts import Dense
from bert_jax.model.product import widened
from bert_jax.model.sequences import (
    in_sequences,
    last_positions,
    mean_of_sequences,
    positions_in_sequence,
)
from bert_jax.model.tables import take_rows
from bert_jax.model.teaching import class_divergence
from bert_jax.settings.finetuning import EmbeddingConfig, TaskConfig

_USUAL = EmbeddingConfig()
_MOST_COSINES = 1 << 25  # that a device holds at once, of a batch of many texts


class Texts(NamedTuple):
    """The labels of a batch: E examples of up to T texts, an anchor, its positive and hard negatives."""

    places: (
        # [E, T] int32: index of its vector among those of all rows, row x M + place; beyond them if it has none.
        # Of vectors of tokens [E, T, S]: those that count, row x L + position
        Array
    )
    # [E, T] int32: the same for equal texts, of all the data; -1 where there is none
    numbers: Array
    scores: Array  # [E] float32: how alike the pair is, where that is known
    # [E, T - 1] float32: a teacher's score of each other text, for the losses that are learnt from them
    taught: Array | None = None


class Embeddings(Head):
    """The pooled vectors of the last layer, with a dense layer if there is one, of length 1 if so set."""

    name = "sentence_embedding"
    is_of_several = True
    needs_whole_batch = True
    about_exported = "vectors [B, K] of texts."
    architecture = "BertModel"
    pipeline = "sentence-similarity"
    places: str = "ET"  # the shape of `Texts.places`

    def __init__(self, settings: EmbeddingConfig = _USUAL) -> None:
        self.settings = settings
        self.parts = ("projection",) if settings.projection_size else ()
        self.is_guided = settings.loss == "gist"

    def as_set(self, config: TaskConfig) -> Head:
        """Returns the head that pools, projects and learns as the settings of a task say."""
        is_usual = config.embedding in (_USUAL, EmbeddingConfig(pooling="mean"))
        return EMBEDDINGS if is_usual else Embeddings(config.embedding)

    def logits(
        self, model: Model, encoded: Encoded, batch: Batch, deterministic: bool
    ) -> jax.Array:
        """Returns float32 vectors [B, M, K]."""
        settings = self.settings
        config = model.config
        size = settings.vector_size(config.hidden_size)
        if (most := max(settings.sizes(), default=0)) > size:
            raise InputError(
                f"embedding.dimensions has {most}, and vectors have {size} numbers; use {size} at most"
            )
        parts = [
            _pooled(name, encoded.hidden, batch, config.matmul_precision)
            for name in settings.poolings()
        ]
        vectors = jnp.concatenate(parts, axis=-1)
        if settings.projection_size:
            vectors = Dense(config, settings.projection_size, "float32", name="projection")(vectors)
            vectors = ACTIVATIONS[settings.projection_activation](vectors)
        return (normalized(vectors) if settings.normalize else vectors)[..., :size]

    def weights(self, batch: Batch) -> jax.Array:
        """Returns [E]: 1 for each example."""
        if not isinstance(batch.labels, Texts):
            raise InputError(
                "the batch has no texts of examples; give make_batch labels, and the head"
            )
        places, numbers, scores = batch.labels[:3]
        check_shapes(
            "the batch", places=(places, self.places), numbers=(numbers, "ET"), scores=(scores, "E")
        )
        return (batch.labels.numbers[:, 0] >= 0).astype(jnp.float32)

    def losses(self, logits: jax.Array, batch: Batch, weights: jax.Array) -> dict[str, Pair]:
        """Returns the loss of whole vectors, or the sum of the losses of several numbers of leading dimensions.

        Source of the latter: Kusupati et al. 2022, "Matryoshka Representation Learning".
        """
        if self.is_guided:
            raise InputError(
                "embedding.loss gist needs a teacher's vectors; set teacher.checkpoint"
            )
        if self.settings.loss in TAUGHT_LOSSES:
            loss_of = self._taught
        else:
            loss_of = partial(LOSSES[self.settings.loss or "infonce"], self.settings)
        return self._of_sizes(loss_of, logits, batch, weights)

    def _taught(self, vectors: jax.Array, texts: Texts, weights: jax.Array) -> dict[str, Pair]:
        """Returns the loss of the scores of each example's texts, given a teacher's."""
        if texts.taught is None:
            raise InputError(
                f"embedding.loss {self.settings.loss} needs a teacher's scores; give rows a label with them"
            )
        there = texts.numbers[:, 1:] >= 0
        losses, counts = TAUGHT_LOSSES[self.settings.loss](
            self.scores(vectors), jnp.asarray(texts.taught), there, self.settings.divisor()
        )
        # a mean over what counts, which a step takes for one over the examples
        mean = jnp.sum(losses * weights) / jnp.maximum(jnp.sum(counts * weights), 1)
        total = jnp.sum(weights)
        return {"loss": (mean * total, total)}

    def scores(self, vectors: jax.Array) -> jax.Array:
        """Returns the products [E, T - 1] of the first vector of each example [E, T, K] with its others."""
        return jnp.einsum("EK,ETK->ET", vectors[:, 0], vectors[:, 1:], precision="highest")

    def guided_losses(
        self, logits: jax.Array, teacher: jax.Array, batch: Batch, weights: jax.Array
    ) -> dict[str, Pair]:
        """Returns the same for `gist`, given a teacher's vectors, which may be of another size."""
        loss_of = partial(gist, self.settings, vectors_of_examples(teacher, batch))
        return self._of_sizes(loss_of, logits, batch, weights)

    def _of_sizes(
        self,
        loss_of: Callable[[jax.Array, Texts, jax.Array], dict[str, Pair]],
        logits: jax.Array,
        batch: Batch,
        weights: jax.Array,
    ) -> dict[str, Pair]:
        examples = batch.labels.numbers.shape[:1]
        check_shapes("losses", logits=(logits, "BMK"), weights=(weights, examples))
        vectors = vectors_of_examples(logits, batch)
        sizes = self.settings.sizes()
        sizes = sizes or (logits.shape[-1],)
        results = [loss_of(vectors[..., :size], batch.labels, weights) for size in sizes]
        total = jnp.sum(jnp.stack([result["loss"][0] for result in results]))
        weight = results[0]["loss"][1]
        of_most = results[int(np.argmax(sizes))]
        return of_most | {"loss": (total, weight)}

    def divergence(
        self, logits: jax.Array, teacher: jax.Array, batch: Batch, temperature: float
    ) -> jax.Array:
        """Returns [E] how far the cosines of vectors, whole and of each leading dimension, are from a teacher's.

        With infonce it is the divergence of the softmax over the candidates of an anchor. With other losses it is the
        squared difference, the mean over the texts of an example. A teacher's vectors may be of another size.
        """
        settings = self.settings
        vectors = vectors_of_examples(logits, batch)
        target = vectors_of_examples(teacher, batch)

        def apart(vectors: jax.Array) -> jax.Array:
            if settings.loss in ("", "infonce"):
                of_candidates = partial(divergence_of_candidates, temperature)
                return search_batch(settings, batch.labels, of_candidates, vectors, target)
            student = _scores(settings, vectors) / temperature
            known = _scores(settings, target) / temperature
            there = batch.labels.numbers[:, 1:] >= 0
            errors = jnp.sum(jnp.square(student - known) * there, axis=1)
            return errors / jnp.maximum(jnp.sum(there, axis=1), 1)

        sizes = settings.sizes() or (logits.shape[-1],)
        of_sizes = [apart(vectors[..., :size]) for size in sizes]
        return jnp.sum(jnp.stack(of_sizes), axis=0)

    def mean_of(self, outputs: Sequence[jax.Array]) -> jax.Array:
        """Returns vectors whose cosines are the mean of those of several models."""
        return jnp.concatenate([normalized(output) for output in outputs], axis=-1)

    def labels_of_batch(
        self, bins: Sequence[Sequence[Any]], num_places: int, num_examples: int, length: int = 0
    ) -> Texts:
        """Returns the labels of rows of one text each: (T, its place among them, number, score of the example)."""
        places, rows = places_of_texts(bins, num_places, num_examples)
        numbers = np.full(places.shape, -1, np.int32)
        scores = np.zeros(num_examples, np.float32)
        taught = None
        if self.settings.loss in TAUGHT_LOSSES:
            taught = np.zeros((num_examples, places.shape[1] - 1), np.float32)
        for slot, row in rows:
            _, kind, number, score = row.label
            numbers[slot, kind] = number
            if taught is None:
                scores[slot] = score
            elif kind:
                taught[slot, kind - 1] = score[kind - 1]
        return Texts(places, numbers, scores, taught)

    def constant(self, labels: Sequence[Any], num_outputs: int) -> np.ndarray:
        """Returns outputs that prefer nothing."""
        return np.zeros(num_outputs, np.float32)

    def usual_task(self, num_outputs: int) -> str:
        return "embeddings"

    def exported(self, logits: jax.Array) -> jax.Array:
        return logits[:, 0]


EMBEDDINGS = Embeddings()

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "none": lambda vectors: vectors,
}


def _pooled(name: str, hidden: jax.Array, batch: Batch, precision: str) -> jax.Array:
    """Returns what one of `POOLINGS` makes of the tokens' vectors [B, L, H] of each sequence, [B, M, H] float32."""
    ids = batch.sequence_ids
    first = jnp.asarray(batch.cls_positions, jnp.int32)
    if name in ("cls", "last"):
        places = first if name == "cls" else last_positions(ids, first)
        return widened(take_rows(hidden, places))
    num_places = first.shape[1]
    inside = in_sequences(ids, num_places)
    if name == "max":
        # of one place, [B, L], so that [B, M, L, H] is never held
        def largest(inside: jax.Array) -> jax.Array:
            values = jnp.where(inside[..., None], widened(hidden), -jnp.inf)
            return jnp.where(jnp.any(inside, axis=1)[:, None], jnp.max(values, axis=1), 0)

        return jnp.moveaxis(jax.lax.map(largest, jnp.moveaxis(inside, 1, 0)), 0, 1)
    counts = jnp.sum(inside, axis=2, dtype=jnp.float32)[..., None]  # [B, M, 1]
    if name == "weighted":  # 1, 2, ... by place
        hidden = hidden * (positions_in_sequence(ids) + 1.0)[..., None]
    mean = mean_of_sequences(hidden, ids, num_places, precision)
    return mean * {"mean": 1.0, "sqrt": jnp.sqrt(counts), "weighted": 2 / (counts + 1)}[name]


def normalized(vectors: jax.Array) -> jax.Array:
    """Returns vectors [..., K] of length 1; a vector of zeros stays one."""
    return vectors * jax.lax.rsqrt(jnp.maximum(jnp.sum(vectors**2, axis=-1, keepdims=True), 1e-24))


# Losses: settings, vectors [E, T, K], labels, weights [E] -> sums and weights of the loss, and of the accuracy


def vectors_of_examples(outputs: jax.Array, batch: Batch) -> jax.Array:
    """Returns the vectors of the texts of each example, [E, T, K], from those of all rows; 0 where there is no text."""
    flat = outputs.reshape(-1, outputs.shape[-1])
    return constrain_rows(
        flat.at[batch.labels.places].get(mode="fill", fill_value=0, unique_indices=True)
    )


def dot_products(queries: jax.Array, candidates: jax.Array) -> jax.Array:
    """Returns the products [E, C] of queries [E, K] with candidates [C, K]."""
    return jnp.einsum("EK,CK->EC", queries, candidates, precision="highest")


def info_nce(
    settings: EmbeddingConfig,
    vectors: jax.Array,
    texts: Texts,
    weights: jax.Array,
    compare: Callable[[jax.Array, jax.Array], jax.Array] = dot_products,
) -> dict[str, Pair]:
    """Returns the cross entropy of an anchor's positive among all positives and hard negatives of the batch, by cosine.

    Texts that equal the anchor or its positive, and positives of an equal anchor, are left out.
    Source: van den Oord et al. 2018; Henderson et al. 2017 for negatives from the batch; Gao et al. 2021, "SimCSE", for
    hard negatives and for texts as their own positives. Both directions: Radford et al. 2021, half of each.
    """
    losses, right = search_batch(settings, texts, _nearest, vectors, compare=compare)
    total = jnp.sum(weights)
    return {
        "loss": (jnp.sum(losses * weights), total),
        "accuracy": (jnp.sum(right * weights), total),
    }


def _nearest(
    scores: jax.Array, is_partner: jax.Array, is_other: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns for each query its cross entropy, and 1 if its partner is alone the nearest candidate."""
    others = jnp.where(is_other, scores, MASKED_SCORE)
    # a masked sum: its gradient needs no scatter
    partner = jnp.sum(jnp.where(is_partner, scores, 0), axis=-1)
    both = jnp.logaddexp(partner, jax.nn.logsumexp(others, axis=-1))
    return both - partner, (partner > jnp.max(others, axis=-1)).astype(jnp.float32)


def divergence_of_candidates(
    temperature: float,
    student: jax.Array,
    target: jax.Array,
    is_partner: jax.Array,
    is_other: jax.Array,
) -> jax.Array:
    """Returns how far the softmax of scores over the candidates of each query is from a teacher's."""
    counts = is_partner | is_other
    student, target = (
        jnp.where(counts, scores / temperature, MASKED_SCORE) for scores in (student, target)
    )
    return class_divergence(student, target)


def search_batch(
    settings: EmbeddingConfig,
    texts: Texts,
    function: Callable[..., Any],
    *models: jax.Array,
    compare: Callable[[jax.Array, jax.Array], jax.Array] = dot_products,
) -> Any:
    """Returns a function's result for each anchor, [E]; with both directions, its mean with that for each positive.

    `models` are the vectors [E, T, K] of one or several, or [E, T, S, K] of tokens, which `compare` compares. The
    function takes the scores [e, C] of each, and for every query which candidate is its partner, and which are others.
    It may see some of the queries at a time.
    """
    count, width = texts.numbers.shape
    vectors = [_compared(settings, model) for model in models]
    passages = texts.numbers[:, 1:].reshape(-1)
    anchors = texts.numbers[:, 0]
    positives = texts.numbers[:, 1]
    number = jnp.arange(count)
    # a hard negative to no anchor
    belongs = jnp.where(jnp.arange(width - 1) == 0, anchors[:, None], -2).reshape(-1)

    def find(query: int, candidates: int | slice, *numbers: jax.Array) -> Any:
        pairs = [
            (model[:, query], model[:, candidates].reshape(-1, *model.shape[2:]))
            for model in vectors
        ]
        return _find(function, compare, settings.divisor(), pairs, *numbers)

    result = find(0, slice(1, None), anchors, positives, number * (width - 1), passages, belongs)
    if settings.both_directions:
        back = find(1, 0, positives, anchors, number, anchors, positives)
        result = jax.tree.map(lambda one, other: (one + other) / 2, result, back)
    return result


def _find(
    function: Callable[..., Any],
    compare: Callable[[jax.Array, jax.Array], jax.Array],
    temperature: float,
    pairs: Sequence[tuple[jax.Array, jax.Array]],
    own: jax.Array,
    partners: jax.Array,
    places: jax.Array,
    numbers: jax.Array,
    belongs: jax.Array,
    *of_queries: jax.Array,
) -> Any:
    """Returns a function's result for the scores of queries [E, ...] with candidates [C, ...], a pair for each model.

    `own` and `partners` are the numbers of the queries' texts and of their partners, [E], `places` the partners' places
    among the candidates; `numbers` and `belongs` those of the candidates' texts and partners, [C]; -1 stands for none.
    The function takes `of_queries`, [E], too.
    """
    numbers, belongs, *candidates = (
        whole(array) for array in (numbers[None], belongs[None], *(pair[1] for pair in pairs))
    )

    def find(own: jax.Array, partners: jax.Array, places: jax.Array, *rest: jax.Array) -> Any:
        own, partners = own[:, None], partners[:, None]
        queries = rest[: len(candidates)]
        of_queries = rest[len(candidates) :]
        same = (numbers == partners) | (numbers == own) | (belongs == own)
        is_partner = jnp.arange(numbers.size)[None] == places[:, None]
        scores = map(compare, queries, candidates)
        return function(
            *(score / temperature for score in scores),
            is_partner,
            (numbers >= 0) & ~same & ~is_partner,
            *of_queries,
        )

    queries = [pair[0] for pair in pairs]
    width = numbers.size * len(pairs)
    return _in_blocks(find, width, own, partners, places, *queries, *of_queries)


def _in_blocks(function: Callable[..., Any], width: int, *arrays: jax.Array) -> Any:
    """Returns function(*arrays), rows [E] of numbers, from `width` numbers for each row; few of them are held at once.

    Each device keeps its own rows.
    """
    rows = arrays[0].shape[0] // num_row_shards()
    count = next(
        count
        for count in range(1, rows + 1)
        if not rows % count and rows // count * width <= _MOST_COSINES
    )
    if count == 1:
        return function(*arrays)
    pieces = [jnp.swapaxes(array.reshape(-1, count, *array.shape[1:]), 0, 1) for array in arrays]
    results = jax.lax.map(lambda piece: jax.checkpoint(function)(*piece), tuple(pieces))
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1).reshape(-1), results)


def gist(
    settings: EmbeddingConfig,
    guide: jax.Array,
    vectors: jax.Array,
    texts: Texts,
    weights: jax.Array,
) -> dict[str, Pair]:
    """Returns InfoNCE without the negatives that a teacher finds nearer than the positive, less a margin.

    Other anchors are negatives of an anchor too, and other positives of its positive. `guide` [E, T, G] are the
    teacher's vectors. Texts that equal the anchor or its positive are left out as in `info_nce`.
    Source: Solatorio 2024, "GISTEmbed".
    """
    count, width = texts.numbers.shape
    models = [normalized(vectors), normalized(guide)]
    anchors = texts.numbers[:, 0]
    positives = texts.numbers[:, 1]
    limit = (_scores(settings, guide)[:, 0] - settings.guide_margin) / settings.temperature

    def nearest(
        scores: jax.Array,
        guides: jax.Array,
        is_partner: jax.Array,
        is_other: jax.Array,
        limit: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        # a partner counts whatever the teacher says
        partner = jnp.sum(jnp.where(is_partner, scores, 0), axis=-1)
        others = jnp.where(is_other & (guides <= limit[:, None]), scores, MASKED_SCORE)
        return partner, jax.nn.logsumexp(others, axis=-1), jnp.max(others, axis=-1)

    def find(query: int, candidates: slice, places: jax.Array, belongs: jax.Array) -> Any:
        pairs = [
            (model[:, query], model[:, candidates].reshape(-1, model.shape[-1])) for model in models
        ]
        return _find(
            nearest,
            dot_products,
            settings.temperature,
            pairs,
            anchors,
            positives,
            places,
            texts.numbers[:, candidates].reshape(-1),
            belongs,
            limit,
        )

    nowhere = jnp.full(count, -1)
    of_anchors = jnp.where(jnp.arange(width - 1) == 0, anchors[:, None], -2).reshape(-1)
    partner, *with_passages = find(0, slice(1, None), jnp.arange(count) * (width - 1), of_anchors)
    _, *with_anchors = find(0, slice(0, 1), nowhere, jnp.full(count, -2))
    _, *of_positive = find(1, slice(1, 2), nowhere, anchors)
    sums, best = zip(with_passages, with_anchors, of_positive)
    both = jax.nn.logsumexp(jnp.stack([partner, *sums]), axis=0)
    nearer = (partner > jnp.max(jnp.stack(best), axis=0)).astype(jnp.float32)
    total = jnp.sum(weights)
    return {
        "loss": (jnp.sum((both - partner) * weights), total),
        "accuracy": (jnp.sum(nearer * weights), total),
    }


def triplet(
    settings: EmbeddingConfig, vectors: jax.Array, texts: Texts, weights: jax.Array
) -> dict[str, Pair]:
    """Returns the triplet loss of distances: by how much the positive is not nearer than hard negatives by a margin.

    It is the mean over the negatives of an anchor. Source: Schroff et al. 2015; Reimers and Gurevych 2019, section 3.
    """
    squares = jnp.sum((vectors[:, :1] - vectors[:, 1:]) ** 2, axis=-1)
    distances = jnp.sqrt(jnp.maximum(squares, 1e-12))  # the gradient of a root at 0 is infinite
    there = (texts.numbers[:, 2:] >= 0) & (texts.numbers[:, 2:] != texts.numbers[:, 1:2])
    excess = jax.nn.relu(distances[:, :1] - distances[:, 1:] + settings.margin)
    losses = jnp.sum(excess * there, axis=1) / jnp.maximum(jnp.sum(there, axis=1), 1)
    nearer = jnp.all((distances[:, :1] < distances[:, 1:]) | ~there, axis=1)
    total = jnp.sum(weights)
    return {
        "loss": (jnp.sum(losses * weights), total),
        "accuracy": (jnp.sum(nearer * weights), total),
    }


def cosent(
    settings: EmbeddingConfig, vectors: jax.Array, texts: Texts, weights: jax.Array
) -> dict[str, Pair]:
    """Returns log(1 + the sum of exp((cosine of j - cosine of i) / temperature) over pairs i that are graded above j).

    Source: Su 2022, "CoSENT".
    """
    cosines = _scores(settings, vectors)[:, 0] / settings.divisor()
    others = [whole(array[None]) for array in (cosines, texts.scores, weights)]

    def above(cosines: jax.Array, scores: jax.Array, weights: jax.Array) -> jax.Array:
        counts = (scores[:, None] > others[1]) & (weights[:, None] * others[2] > 0)
        return jax.nn.logsumexp(
            jnp.where(counts, others[0] - cosines[:, None], MASKED_SCORE), axis=-1
        )

    rows = _in_blocks(above, len(cosines), cosines, texts.scores, weights)
    total = jnp.sum(weights)
    return {"loss": (jax.nn.logsumexp(jnp.append(rows, 0.0)) * total, total)}


def squared_cosine(
    settings: EmbeddingConfig, vectors: jax.Array, texts: Texts, weights: jax.Array
) -> dict[str, Pair]:
    """Returns the squared error of the cosine of pairs. Source: Reimers and Gurevych 2019, section 3."""
    errors = jnp.square(_scores(settings, vectors)[:, 0] - texts.scores / settings.best_score)
    return {"loss": (jnp.sum(errors * weights), jnp.sum(weights))}


def margin_mse(
    scores: jax.Array, taught: jax.Array, there: jax.Array, divisor: float
) -> tuple[jax.Array, jax.Array]:
    """Returns for each example the squared errors of how far the positive is above each negative, and their number.

    Source: Hofstätter et al. 2020, "Improving Efficient Neural Ranking Models with Cross-Architecture Knowledge
    Distillation".
    """
    errors = (scores[:, :1] - scores[:, 1:]) - (taught[:, :1] - taught[:, 1:])
    counts = there[:, 1:]
    return jnp.sum(jnp.square(errors) * counts, axis=1), jnp.sum(counts, axis=1, dtype=jnp.float32)


def score_divergence(
    scores: jax.Array, taught: jax.Array, there: jax.Array, divisor: float
) -> tuple[jax.Array, jax.Array]:
    """Returns for each example how far the softmax of its texts' scores is from that of a teacher's, and 1."""
    student = jnp.where(there, scores / divisor, MASKED_SCORE)
    target = jnp.where(there, taught, MASKED_SCORE)
    return class_divergence(student, target), jnp.ones(len(scores))


# Losses of the scores of an example's texts, a teacher's, which texts are there, all [E, T - 1], and what scores are
# divided by -> [E] sums and counts
TAUGHT_LOSSES: dict[str, Callable[..., tuple[jax.Array, jax.Array]]] = {
    "margin_mse": margin_mse,
    "kl": score_divergence,
}


def _compared(settings: EmbeddingConfig, vectors: jax.Array) -> jax.Array:
    """Returns vectors whose products are their scores: cosines of dense ones."""
    return normalized(vectors) if settings.kind == "dense" else vectors


def _scores(settings: EmbeddingConfig, vectors: jax.Array) -> jax.Array:
    """Returns the scores of the first vector of each example with its others, [E, T - 1]."""
    vectors = _compared(settings, vectors)
    return jnp.sum(vectors[:, :1] * vectors[:, 1:], axis=-1)


LOSSES: dict[str, Callable[[EmbeddingConfig, jax.Array, Texts, jax.Array], dict[str, Pair]]] = {
    "infonce": info_nce,
    "triplet": triplet,
    "cosent": cosent,
    "cosine": squared_cosine,
}
