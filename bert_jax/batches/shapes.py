# SPDX-License-Identifier: Apache-2.0
"""The shapes of batches: how long a row is, and how many there are. Each shape is a program to compile."""

from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.batch import Row
from bert_jax.batches.order import plan_epoch
from bert_jax.batches.pack import Layout, Shape, Sizes, best_fit, sizes_apart
from bert_jax.devices.sharding import ROW_AXES
from bert_jax.model.flops import forward_flops
from bert_jax.settings.model import ModelConfig

# of packed rows, besides the length of the task's longest row
ROW_LENGTHS = (32, 64, 96, 128, 192, 256, 384, 512)
COMPILATION = 24  # training steps that take about as long as compiling a step
# per sequence, on average over a packed row; this bounds the number of sequences in it
_FEWEST_TOKENS = 6
_SAMPLED_BATCHES, _SAMPLED_ROWS = 256, 1 << 17  # at most, to choose a shape by


def length_step(attention: str = "plain") -> int:
    """Returns the step between short lengths: 8 on a CPU, 16 elsewhere, 32 for the kernel of fused attention."""
    if jax.default_backend() == "cpu":
        return 8
    return 32 if attention == "fused" else 16


def padded_lengths(tokens: np.ndarray, most: int, step: int) -> np.ndarray:
    """Returns the lengths [R] that rows of so many tokens [R] are padded to, at most `most`.

    Each length is a program to compile, and padding costs time. So lengths are multiples of `step` up to 128, of twice
    that up to 256, of four times that up to 512, and of 256 beyond: about as much is padding in long rows as in short
    ones.
    """
    steps = np.select(
        [tokens <= 128, tokens <= 256, tokens <= 512], [step, 2 * step, 4 * step], 256
    )
    return np.minimum(-(-tokens // steps) * steps, most)


def padded_length(tokens: int, most: int, step: int) -> int:
    """Returns the length that a row of so many tokens is padded to, as `padded_lengths`."""
    return int(padded_lengths(np.array([tokens]), most, step)[0])


def row_lengths(longest: int, most: int, multiple: int) -> list[int]:
    """Returns the lengths that packed rows may have, ascending.

    They are at most `most`, the number of the model's positions, since padding has positions too. Only choices that
    are longer together make a longer row.
    """
    most = max(most, longest)
    own = padded_length(longest, most, multiple)
    return sorted(
        {
            own,
            *(length for length in ROW_LENGTHS if own <= length <= most and length % multiple == 0),
        }
    )


def places_of(length: int, widest: int) -> int:
    """Returns the maximum number of sequences in a packed row; `widest` is the maximum in a row of the task."""
    return max(widest, length // _FEWEST_TOKENS)


def row_group(mesh: Mesh, accumulate: int = 1) -> int:
    """Returns a number that divides the number of rows of every batch."""
    return accumulate * int(np.prod([mesh.shape[axis] for axis in ROW_AXES]))


# FLOPs


def padded_flops(model: ModelConfig, layouts: Iterable[Layout]) -> float:
    """Returns the FLOPs of a forward pass over the batches, padding included."""
    return sum(
        _flops(model, layout.num_rows, layout.length, layout.num_places) for layout in layouts
    )


def needed_flops(model: ModelConfig, rows: Sequence[Row]) -> float:
    """Returns the FLOPs of a forward pass over the tokens of the rows, without padding."""
    # by how often each length occurs: there may be many millions of sequences
    counts = np.bincount(sizes_apart(rows).tokens)
    lengths = np.arange(len(counts))
    tokens = int(counts @ lengths)
    squares = int(counts @ lengths**2)
    return forward_flops(model, tokens, squares, 0, int(counts.sum()))


def _flops(model: ModelConfig, num_rows: float, length: int, num_places: int) -> float:
    return forward_flops(model, num_rows * length, num_rows * length**2, 0, num_rows * num_places)


# Training batches of a task


def choose_shape(
    sizes: Sizes, batch_size: int, model: ModelConfig, multiple: int, group: int, num_steps: int
) -> Shape:
    """Returns the shapes of training batches of `batch_size` random rows of the task that take the fewest FLOPs.

    The choice is based on a sample of random batches, the same for every seed. The length does not depend on the number
    of devices, so neither does dropout. A run of few steps has a single number of rows.
    """
    widest = int(sizes.sequences.max())
    sample = [sizes.of(numbers) for numbers in sample_batches(sizes, batch_size)]

    def num_rows(length: int) -> list[int]:
        return [len(best_fit(batch, length, places_of(length, widest))) for batch in sample]

    counts = {
        length: num_rows(length)
        for length in row_lengths(int(sizes.tokens.max()), model.max_positions, multiple)
    }

    def cost(length: int) -> float:
        rows, _ = few_sizes(counts[length], num_steps)
        return _flops(model, rows, length, places_of(length, widest))

    length = min(counts, key=cost)
    grouped = [-(-count // group) * group for count in counts[length]]
    return Shape(length, places_of(length, widest), few_sizes(grouped, num_steps)[1], group)


def sample_batches(sizes: Sizes, batch_size: int) -> list[np.ndarray]:
    """Returns the numbers of the rows in some random batches, the same for every seed."""
    count = max(1, min(_SAMPLED_BATCHES, _SAMPLED_ROWS // batch_size))
    samples: list[np.ndarray] = []
    epoch = 0
    while len(samples) < count:
        batches = plan_epoch(sizes.tokens, batch_size, 0, epoch, bucket=False)
        full = batches[: max(1, len(sizes.tokens) // batch_size)]
        samples += full[: count - len(samples)]
        epoch += 1
    return samples


def few_sizes(
    counts: Sequence[int], num_steps: int, most: int = 2
) -> tuple[float, tuple[int, ...]]:
    """Returns the cost of filling batches up to at most `most` sizes, and these sizes, ascending.

    The cost is the sum of the counts, each rounded up to the next size, plus the cost of compiling every size. One more
    size is worth its compilation if it saves more than that in `num_steps` steps.
    """
    values, times = (array.tolist() for array in np.unique(counts, return_counts=True))
    until = np.cumsum([0, *times]).tolist()
    compilation = COMPILATION / max(num_steps, 1) * sum(counts)
    best = [
        (value * until[index + 1] + compilation, (value,)) for index, value in enumerate(values)
    ]
    # best[i]: of the counts up to value i, which is the last size
    for _ in range(min(most, len(values)) - 1):
        best = [
            min(
                [
                    best[index],
                    *(
                        (
                            cost + value * (until[index + 1] - until[last + 1]) + compilation,
                            (*few, value),
                        )
                        for last, (cost, few) in enumerate(best[:index])
                    ),
                ]
            )
            for index, value in enumerate(values)
        ]
    return best[-1]


def choose_lengths(
    sizes: Sizes, batch_size: int, bucket: bool, multiple: int, num_steps: int
) -> tuple[int, ...]:
    """Returns the lengths, ascending, of training batches that are not packed."""
    longest = int(sizes.tokens.max())
    if not bucket:
        return (longest,)
    batches = plan_epoch(sizes.tokens, batch_size, 0, 0)
    most = np.array([sizes.tokens[numbers].max() for numbers in batches], np.int64)
    return few_sizes(padded_lengths(most, longest, multiple).tolist(), num_steps, len(batches))[1]
