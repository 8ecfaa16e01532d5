# SPDX-License-Identifier: Apache-2.0
"""The batches of inference: prediction, evaluation, embedding, filling and scoring take them all here."""

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.batch import PyTree
from bert_jax.batches.pack import Layout, Sizes, best_fit
from bert_jax.batches.shapes import (
    COMPILATION,
    ROW_LENGTHS,
    length_step,
    padded_flops,
    padded_lengths,
    places_of,
    row_group,
    row_lengths,
)
from bert_jax.devices.allocator import give_back_freed_memory
from bert_jax.devices.cores import usable_cores
from bert_jax.settings.model import ModelConfig

_TOKENS_ON_CPU, _TOKENS_ELSEWHERE = 512, 16384  # that a device computes at once
# batches that take about as long as compiling a program; a training step goes back too
_COMPILATION = 3 * COMPILATION
_FINEST_STEP = 2  # between lengths
_IN_FLIGHT = 2  # batches that are computed while the host makes the next


def tokens_at_once() -> int:
    """Returns how many tokens a device computes at once in inference, padding included.

    On a CPU the arrays of about 512 tokens stay in the caches: with 16 rows of 208 tokens a row takes twice as long as
    alone. An accelerator needs more to be busy.
    """
    return _TOKENS_ON_CPU if jax.default_backend() == "cpu" else _TOKENS_ELSEWHERE


def inference_layouts(
    sizes: Sizes,
    model: ModelConfig,
    pack: str = "off",
    mesh: Mesh | None = None,
    most_rows: int = 0,
    one_shape: bool = False,
) -> Iterator[Layout]:
    """Yields batches that hold every row once, the longest first, in few shapes: those of every inference.

    A batch has about as many tokens as its devices compute at once (`tokens_at_once`), or with fewer rows a power of
    two of them, so that sets of any number of texts take the same few programs. Its length is one of a few, and of more
    only where the set is so large that what they save pays for compiling them.

    Args:
      sizes: of the rows.
      model: gives the number of positions and the FLOPs.
      pack: "on" puts several rows of the task into a row of a batch, "off" one; "auto" is what takes fewer FLOPs.
      mesh: its devices share each batch; None is one device.
      most_rows: a batch has no more positions than so many of the longest rows; 0 sets no limit.
      one_shape: all batches are one program, for a split that is read once an epoch.
    """
    if not len(sizes.tokens):
        return
    group = 1 if mesh is None else row_group(mesh)
    longest = int(sizes.tokens.max())
    most = max(longest, model.max_positions)
    step = max(length_step(model.attention), 16)
    order = np.argsort(-sizes.tokens, kind="stable")
    lengths = padded_lengths(sizes.tokens[order], most, step)
    positions = tokens_at_once() * group
    if most_rows:
        positions = min(positions, most_rows * int(lengths[0]))
    if one_shape:
        lengths[:] = lengths[0]
    elif model.attention != "fused":  # whose kernel takes no other lengths
        lengths = _finer_lengths(lengths, sizes.tokens[order], most, step, positions)

    def packed(sizes: Sizes, length: int) -> Iterator[Layout]:
        num_places = places_of(length, int(sizes.sequences.max()))
        bins = best_fit(sizes, length, num_places)
        return _batches(bins, [length] * len(bins), num_places, positions, group, one_shape)

    widest = int(sizes.sequences.max())
    alone = _batches(
        [[number] for number in order.tolist()], lengths, widest, positions, group, one_shape
    )
    # a single row has nothing to share a row with
    if pack == "off" or (pack == "auto" and len(order) == 1):
        yield from alone
        return
    # A few thousand rows of all lengths decide the length of packed rows.
    sample = sizes.of(order[:: 1 + len(order) // 4096])
    choices = row_lengths(longest, most, step)
    if not one_shape:  # otherwise each set of texts could compile a length of its own
        choices = [length for length in choices if length in ROW_LENGTHS] or choices
    together = list(
        packed(sizes, min(choices, key=lambda length: padded_flops(model, packed(sample, length))))
    )
    apart = list(alone) if pack == "auto" else together
    yield from together if padded_flops(model, together) <= padded_flops(model, apart) else apart


def _batches(
    bins: list[list[int]],
    lengths: Sequence[int] | np.ndarray,
    num_places: int,
    positions: int,
    group: int,
    fixed: bool,
) -> Iterator[Layout]:
    """Yields batches of these rows of their lengths, of at most about `positions` positions.

    Each has one of a few numbers of rows; if `fixed`, all have that of the first.
    """
    first = 0
    while first < len(bins):
        length = int(lengths[first])
        full = max(group, positions // length // group * group)
        part = bins[first : first + full]
        enough = group << (-(-len(part) // group) - 1).bit_length()  # a power of two, of groups
        yield Layout(part, full if fixed and first else min(enough, full), length, num_places)
        first += full


def _finer_lengths(
    lengths: np.ndarray, tokens: np.ndarray, most: int, step: int, positions: int
) -> np.ndarray:
    """Returns shorter lengths for rows of these lengths [R], where all that would have one save its program's time."""
    while step > _FINEST_STEP:
        step //= 2
        finer = padded_lengths(tokens, most, step)
        for length in np.unique(lengths):
            members = lengths == length
            if (lengths - finer)[members].sum() > _COMPILATION * positions:
                lengths[members] = finer[members]
    return lengths


def computed(
    layouts: Iterable[Layout], compute: Callable[[Layout], PyTree]
) -> Iterator[tuple[Layout, PyTree]]:
    """Yields each layout and `compute(layout)` on the host, while devices compute those of the next layouts.

    A single CPU computes as many batches at once as it has cores, each on a thread: one alone leaves cores idle.
    """
    cores = _cores()
    begun: set[tuple[int, int]] = set()  # shapes
    started: deque[tuple[Layout, Callable[[], PyTree]]] = deque()
    with ThreadPoolExecutor(cores) as pool:  # starts no thread before it has work
        have_settings = functools.cache(functools.partial(_has_the_same_settings, pool))
        for layout in layouts:
            shape = layout.num_rows, layout.length
            if cores > 1 and shape in begun and have_settings():
                started.append((layout, pool.submit(_on_host, compute, layout).result))
            else:  # here, so that a program is compiled once
                started.append((layout, _later(compute(layout))))
            begun.add(shape)
            if len(started) > max(cores, _IN_FLIGHT):
                yield _finished(*started.popleft())
        while started:
            yield _finished(*started.popleft())


def _cores() -> int:
    """Returns the cores of this process if they are its one device, else 1."""
    if jax.default_backend() != "cpu" or jax.device_count() > 1:
        return 1  # programs of several devices wait for each other, so all take them in one order
    return usable_cores()


def _has_the_same_settings(pool: Executor) -> bool:
    """Returns whether threads of a pool see JAX's settings of this one, which a `with` block may have changed."""
    return pool.submit(lambda: dict(jax.config.values)).result() == dict(jax.config.values)


def _on_host(compute: Callable[[Layout], PyTree], layout: Layout) -> PyTree:
    return jax.device_get(compute(layout))


def _later(result: PyTree) -> Callable[[], PyTree]:
    """Returns a function that waits for a dispatched result."""
    return lambda: jax.device_get(result)


def _finished(layout: Layout, wait: Callable[[], PyTree]) -> tuple[Layout, PyTree]:
    arrays = wait()
    give_back_freed_memory()
    return layout, arrays
