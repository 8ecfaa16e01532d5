# SPDX-License-Identifier: Apache-2.0
"""The kernels of fused attention for NVIDIA GPUs, in Pallas for Triton: one forward, two backward.

Scores of a block of queries and a block of keys live in registers, so softmax is online. Products, exponentials and
the hash of dropout share the time, and the hash is the largest part of the three: an H100 multiplies 64 times as many
numbers as it hashes. One hash decides about rows r and r + L / 2, so a program takes a block of queries from each half
of a row.

In the backward pass one kernel sums over keys for the gradient of queries, and the other over queries for those of keys
and values. Nothing is added up between programs, so results do not depend on their order. The second kernel computes
scores transposed, since the left operand of a product may come from registers. Without dropout a program goes through
the blocks that its sequences and its window see, and no others.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from bert_jax.model.attention import MASKED_SCORE
from bert_jax.model.attention_kernels import AttentionShape, dot, draws

# powers of 2, as all blocks of Triton, and at least a tile of the matrix unit
HEAD_SIZES = (16, 32, 64)
WIDEST_HEAD = 128  # bytes; the blocks below are chosen for heads that are no wider
MOST_PROGRAMS = 65535  # along the second and third axis of a grid of CUDA
_IDS_AT_ONCE = 1024  # that a program looks through
_NO_QUERY = jnp.iinfo(jnp.int32).min  # in place of the id of a query that is padding: no key has it


class Launch(NamedTuple):
    """The blocks of a program of a kernel, at most; chosen for few registers and no spills (decision 0017)."""

    queries: int  # of each of the two blocks of queries
    keys: int
    num_warps: int = 4
    num_stages: int = 2

    def of_row(self, size: int) -> "Launch":
        """Returns blocks that divide a row of that many tokens, and its half."""
        return self._replace(
            queries=math.gcd(size // 2, self.queries), keys=math.gcd(size, self.keys)
        )


# Hopper's matrix unit takes 64 rows of the left operand: of queries in the first two, of keys in the third.
FORWARD = Launch(64, 32)
OF_QUERIES = Launch(64, 32)
OF_KEYS = Launch(32, 64)


def fits(shape: AttentionShape, array: jax.Array) -> bool:
    """Returns whether the kernels support these shapes.

    Halves of a row must be whole tiles of 16. Heads of 64 fit in bfloat16, and in float32 those of 32. Windows fit
    without dropout: the two halves of a row see other keys in them, and would share no hash.
    """
    rows, size, _ = array.shape
    # exported programs have open sizes
    known = isinstance(rows, int) and isinstance(size, int)
    return (
        known
        and not (shape.window and shape.drops)
        and size % 32 == 0
        and shape.head_size in HEAD_SIZES
        and shape.head_size * array.dtype.itemsize <= WIDEST_HEAD
        and max(rows, shape.num_heads) <= MOST_PROGRAMS
        and array.dtype in (jnp.bfloat16, jnp.float32)
    )


def forward(
    shape: AttentionShape, interpret: bool, *arrays: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the context [B, L, H], and for each query the base 2 logarithm of the sum of its exponentials [B, N, L].

    Arrays: query, key, value, sequence ids, keys of dropout.
    """
    query, _, value, *_ = arrays
    rows, size, _ = query.shape
    context = jax.ShapeDtypeStruct(query.shape, value.dtype)
    logs = jax.ShapeDtypeStruct((rows, shape.num_heads, size), jnp.float32)
    context, logs = _call(attention_forward, FORWARD, shape, interpret, arrays, [context, logs])
    return context, logs


def backward(
    shape: AttentionShape,
    interpret: bool,
    gradient: jax.Array,
    context: jax.Array,
    logs: jax.Array,
    *arrays: jax.Array,
) -> tuple[jax.Array, ...]:
    """Returns the gradients of query, key and value. `context` and `logs` are the results of `forward`."""
    query, key, value, *_ = arrays
    like = jax.ShapeDtypeStruct(query.shape, value.dtype)
    means = jax.ShapeDtypeStruct(logs.shape, jnp.float32)
    given = (*arrays, gradient, logs)
    of_query, means = _call(
        attention_queries, OF_QUERIES, shape, interpret, (*given, context), [like, means]
    )
    of_key, of_value = _call(
        attention_keys, OF_KEYS, shape, interpret, (*given, means), [like, like]
    )
    return of_query, of_key, of_value


def _call(
    kernel: Any,
    launch: Launch,
    shape: AttentionShape,
    interpret: bool,
    arrays: tuple[jax.Array, ...],
    results: list[jax.ShapeDtypeStruct],
) -> list[jax.Array]:
    """Runs a kernel for every row and head; each of its programs sees the whole row."""
    rows, size, hidden = arrays[0].shape
    launch = launch.of_row(size)
    # a program of the other two takes a block of each half of a row
    programs = size // launch.keys if kernel is attention_keys else size // 2 // launch.queries

    def block(array: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
        if array.shape == (rows, size, hidden):
            return pl.BlockSpec(
                (None, size, shape.head_size), lambda part, head, row: (row, 0, head)
            )
        if array.ndim == 2:  # sequence ids
            return pl.BlockSpec((None, size), lambda part, head, row: (row, 0))
        return pl.BlockSpec((None, None, array.shape[2]), lambda part, head, row: (row, head, 0))

    return pl.pallas_call(
        functools.partial(kernel, shape, launch),
        grid=(programs, shape.num_heads, rows),
        in_specs=[block(array) for array in arrays],
        out_specs=[block(result) for result in results],
        out_shape=results,
        compiler_params=triton.CompilerParams(
            num_warps=launch.num_warps, num_stages=launch.num_stages
        ),
        interpret=interpret,
        name=kernel.__name__,
    )(*arrays)


def attention_forward(
    shape: AttentionShape, launch: Launch, query, key, value, ids, keys, context, logs
) -> None:
    """Writes the contexts of two blocks of queries."""
    pair = _Pair(shape, launch, ids, keys, pl.program_id(0) * launch.queries)
    queries = [query[rows, :] for rows in pair.places]

    def add(number, half, sums, keeps):
        columns = pl.ds(number * launch.keys, launch.keys)
        context, largest, total = sums
        scores, _ = pair.scores(
            half, dot(shape, queries[half], key[columns, :], 1, 1), ids[columns], number
        )
        # Online softmax: what is summed so far is scaled to the largest score so far.
        larger = jnp.maximum(largest, jnp.max(scores, axis=1))
        before = jnp.exp2(largest - larger)
        raised = jnp.exp2(scores - larger[:, None])
        dropped = jnp.where(keeps[half], raised, 0.0) if shape.drops else raised
        context = context * before[:, None] + dot(
            shape, dropped.astype(value.dtype), value[columns, :], 1, 0
        )
        # the denominator is that of all keys: dropout drops probabilities, not scores
        return context, larger, total * before + jnp.sum(raised, axis=1)

    zeros = jnp.zeros((launch.queries, shape.head_size), jnp.float32)
    start = (
        zeros,
        jnp.full(launch.queries, -jnp.inf, jnp.float32),
        jnp.zeros(launch.queries, jnp.float32),
    )
    sums = pair.over_keys(add, start)
    for rows, (summed, largest, total) in zip(pair.places, sums):
        context[rows, :] = (summed * (shape.rescale / total)[:, None]).astype(context.dtype)
        logs[rows] = largest + jnp.log2(total)


def attention_queries(
    shape: AttentionShape,
    launch: Launch,
    query,
    key,
    value,
    ids,
    keys,
    gradient,
    logs,
    context,
    of_query,
    means,
) -> None:
    """Writes the gradients of two blocks of queries, and the means of softmax's gradient for `attention_keys`."""
    pair = _Pair(shape, launch, ids, keys, pl.program_id(0) * launch.queries)
    halves = []
    for rows in pair.places:
        of_context = gradient[rows, :]
        # The sum over keys of p * dp, which softmax's gradient takes away, is the context's product with its gradient.
        products = context[rows, :].astype(jnp.float32) * of_context.astype(jnp.float32)
        mean = jnp.sum(products, axis=1) * (1 / shape.rescale)
        means[rows] = mean
        halves.append((query[rows, :], of_context, logs[rows][:, None], mean[:, None]))

    def add(number, half, summed, keeps):
        columns = pl.ds(number * launch.keys, launch.keys)
        queries, of_context, log, mean = halves[half]
        scores, sees = pair.scores(
            half, dot(shape, queries, key[columns, :], 1, 1), ids[columns], number
        )
        of_dropped = dot(shape, of_context, value[columns, :], 1, 1)
        of_scores = pair.of_scores(half, jnp.exp2(scores - log), sees, of_dropped, mean, keeps)
        return summed + dot(shape, of_scores.astype(key.dtype), key[columns, :], 1, 0)

    sums = pair.over_keys(add, jnp.zeros((launch.queries, shape.head_size), jnp.float32))
    for rows, summed in zip(pair.places, sums):
        of_query[rows, :] = (summed * (shape.rescale * shape.head_size**-0.5)).astype(
            of_query.dtype
        )


def attention_keys(
    shape: AttentionShape,
    launch: Launch,
    query,
    key,
    value,
    ids,
    keys,
    gradient,
    logs,
    means,
    of_key,
    of_value,
) -> None:
    """Writes the gradients of a block of keys and of values. Scores are [keys, queries] here."""
    number = pl.program_id(0)
    columns = pl.ds(number * launch.keys, launch.keys)
    own_keys = key[columns, :]
    own_values = value[columns, :]
    own_ids = ids[columns]

    def add(block, sums, chosen):
        pair = _Pair(shape, launch, ids, keys, block * launch.queries, transposed=True)
        keeps = pair.keeps(number * launch.keys)
        summed_key, summed_value = sums
        for half in chosen:
            rows = pair.places[half]
            queries = query[rows, :]
            of_context = gradient[rows, :]
            scores, sees = pair.scores(half, dot(shape, own_keys, queries, 1, 1), own_ids, number)
            raised = jnp.exp2(scores - logs[rows][None, :])
            dropped = jnp.where(keeps[half], raised, 0.0) if shape.drops else raised
            summed_value += dot(shape, dropped.astype(value.dtype), of_context, 1, 0)
            of_dropped = dot(shape, own_values, of_context, 1, 1)
            of_scores = pair.of_scores(half, raised, sees, of_dropped, means[rows][None, :], keeps)
            summed_key += dot(shape, of_scores.astype(query.dtype), queries, 1, 0)
        return summed_key, summed_value

    zeros = jnp.zeros((launch.keys, shape.head_size), jnp.float32)
    half_size = query.shape[0] // 2
    sums = (zeros, zeros)
    # One hash decides about both halves, so both are visited together; without it each goes its own way.
    if shape.drops:
        sums = jax.lax.fori_loop(
            0, half_size // launch.queries, functools.partial(add, chosen=(0, 1)), sums
        )
    else:
        for half in (0, 1):
            place = (half * half_size, half_size)
            first = number * launch.keys
            blocks = _blocks_in_sight(
                shape, ids, place, own_ids, first, launch.queries, by_keys=True
            )
            sums = jax.lax.fori_loop(*blocks, functools.partial(add, chosen=(half,)), sums)
    summed_key, summed_value = sums
    of_key[columns, :] = (summed_key * (shape.rescale * shape.head_size**-0.5)).astype(of_key.dtype)
    of_value[columns, :] = (summed_value * shape.rescale).astype(of_value.dtype)


def _blocks_in_sight(
    shape: AttentionShape,
    ids: Any,
    half: tuple[int, int],
    own: jax.Array,
    first: jax.Array,
    block: int,
    by_keys: bool,
) -> tuple[jax.Array, jax.Array]:
    """Returns the first block that a program must go through, and the end of these blocks.

    Args:
      shape: its `window` and `causal` count.
      ids: sequence ids of the row.
      half: where the tokens that are divided into blocks begin in the row, and how many they are.
      own: ids of the tokens that the program is about.
      first: the place of the first of them in the row.
      block: tokens of a block.
      by_keys: whether the program is about keys, and the blocks are of queries.

    Sequences that are packed into a row stand one after the other, so a few blocks see each other. Nothing is assumed:
    the blocks are those from the first to the last token whose id lies between the least and the largest of `own`.
    """
    offset, size = half
    least = jnp.min(jnp.where(own > 0, own, jnp.iinfo(jnp.int32).max))
    largest = jnp.max(own)
    # a block of Triton has a power of 2 of numbers
    part = math.gcd(size, _IDS_AT_ONCE)

    def look(number: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        there = ids[pl.ds(offset + number * part, part)]
        there = jnp.abs(there) if by_keys else there
        places = number * part + jax.lax.broadcasted_iota(jnp.int32, (part,), 0)
        seen = (there > 0) & (there >= least) & (there <= largest)
        begin = jnp.minimum(found[0], jnp.min(jnp.where(seen, places, size)))
        return begin, jnp.maximum(found[1], jnp.max(jnp.where(seen, places + 1, 0)))

    begin, end = jax.lax.fori_loop(0, size // part, look, (jnp.int32(size), jnp.int32(0)))
    first, last = first - offset, first - offset + len(own)
    if shape.window:
        begin, end = jnp.maximum(begin, first - shape.window), jnp.minimum(end, last + shape.window)
    # a key is seen by queries from its own place on, and a query sees keys up to its own
    if shape.causal and by_keys:
        begin = jnp.maximum(begin, first)
    elif shape.causal:
        end = jnp.minimum(end, last)
    # At least one: a query that is padding divides by a sum too.
    begin = jnp.minimum(begin, size - 1) // block
    return begin, jnp.maximum((jnp.maximum(end, 0) + block - 1) // block, begin + 1)


def _add_to(add: Callable[..., Any], half: int, number: jax.Array, sums: Any) -> Any:
    return add(number, half, sums, [])


class _Pair:
    """Two blocks of queries of one head and row, half a row apart, inside a kernel."""

    def __init__(
        self, shape: AttentionShape, launch: Launch, ids, keys, start, *, transposed: bool = False
    ):
        self.shape = shape
        self.launch = launch
        self.size = ids.shape[0]
        self.start = start
        self.places = [pl.ds(start + half * (self.size // 2), launch.queries) for half in (0, 1)]
        self.first = keys[0]
        self.second = keys[1]
        self.axis = 1 if transposed else 0  # of queries
        self.block = (launch.keys, launch.queries) if transposed else (launch.queries, launch.keys)
        self.all_ids = ids
        own = [jnp.abs(ids[rows]) for rows in self.places]
        # Scores of padding are equal, so that its softmax is uniform and its logarithm exact.
        self.masked = [
            self._of_queries(jnp.where(block_ids == 0, 0.0, MASKED_SCORE)) for block_ids in own
        ]
        self.ids = [
            self._of_queries(jnp.where(block_ids == 0, _NO_QUERY, block_ids)) for block_ids in own
        ]

    def _of_queries(self, values: jax.Array) -> jax.Array:
        return jnp.expand_dims(values, 1 - self.axis)

    def keeps(self, column: jax.Array) -> list[jax.Array]:
        """Returns which scores of both blocks dropout keeps; `column` is the first key."""
        if not self.shape.drops:
            return []
        drawn = draws(self.size, self.start, column, self.block, self.first, self.second, self.axis)
        return [bits < self.shape.kept for bits in drawn]

    def over_keys(self, add: Callable[..., Any], start: Any) -> list[Any]:
        """Returns, for each half, what `add(number, half, sums, keeps)` makes of `start` over the keys that it sees."""
        if not self.shape.drops:
            found = []
            for half in (0, 1):
                first = self.start + half * (self.size // 2)
                own = jnp.abs(self.all_ids[self.places[half]])
                blocks = _blocks_in_sight(
                    self.shape,
                    self.all_ids,
                    (0, self.size),
                    own,
                    first,
                    self.launch.keys,
                    by_keys=False,
                )
                found.append(
                    jax.lax.fori_loop(*blocks, functools.partial(_add_to, add, half), start)
                )
            return found

        def both(number: jax.Array, sums: tuple[Any, Any]) -> tuple[Any, Any]:
            keeps = self.keeps(number * self.launch.keys)
            return add(number, 0, sums[0], keeps), add(number, 1, sums[1], keeps)

        return list(jax.lax.fori_loop(0, self.size // self.launch.keys, both, (start, start)))

    def scores(
        self, half: int, products: jax.Array, key_ids: jax.Array, number: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns scores whose power of 2 softmax takes, of products with keys of block `number`, and which count."""
        sees = self.ids[half] == jnp.expand_dims(key_ids, self.axis)
        if self.shape.causal or self.shape.window:
            rows, columns = (
                jax.lax.broadcasted_iota(jnp.int32, self.block, axis)
                for axis in (self.axis, 1 - self.axis)
            )
            # places in the row: of the block of keys less those of the block of queries
            ahead = number * self.launch.keys - self.start - half * (self.size // 2)
            if self.shape.causal:
                sees &= columns + ahead <= rows
            if self.shape.window:
                sees &= jnp.abs(columns + ahead - rows) <= self.shape.window
        # exp(x) is 2 to the power of x log2(e), and GPUs have an instruction for the power of 2
        scale = self.shape.head_size**-0.5 * math.log2(math.e)
        return jnp.where(sees, products * scale, self.masked[half]), sees

    def of_scores(
        self,
        half: int,
        probabilities: jax.Array,
        sees: jax.Array,
        of_dropped: jax.Array,
        means: jax.Array,
        keeps: list[jax.Array],
    ) -> jax.Array:
        """Returns the gradient of scores, but for the factor of dropout and that of scores."""
        if self.shape.drops:
            of_dropped = jnp.where(keeps[half], of_dropped, 0.0)
        return jnp.where(sees, probabilities * (of_dropped - means), 0.0)
