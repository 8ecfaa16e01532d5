# SPDX-License-Identifier: Apache-2.0
"""Packing of several sequences into a row: combinations of lengths, the assignment of sequences, and the rows.

The plan is made from the histogram of lengths, so a billion sequences take no longer than a thousand. It depends only
on lengths and a seed, and decisions use integers, so all machines give the same rows.
Letters: L positions of a row, M places for sequences in it, N sequences, R rows, K combinations of lengths.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from bert_jax.data import records

MAX_PER_ROW = 64  # sequences; more would not make rows fuller, and masking compares them
EMPTY = -1  # a place of a row without a sequence
_ROWS_AT_ONCE = 2048
_SHARES = (0.7, 0.7, 1)  # of what is left, planned one after the other
_MORE_PARTS = 3  # than are aimed at, where they make a row full
_PLENTY = np.int64(1) << 40  # of "nothing", the sequence of length 0


@dataclass(frozen=True)
class PackingPlan:
    """The number of rows for each combination of lengths."""

    combinations: np.ndarray  # int64 [K, M]: lengths, the longest first, then zeros
    counts: np.ndarray  # int64 [K]

    @property
    def num_rows(self) -> int:
        return int(self.counts.sum())


def plan_packing(length_histogram: np.ndarray, row_length: int, max_per_row: int) -> PackingPlan:
    """Returns combinations of lengths that use every sequence once and leave little of the rows empty.

    `length_histogram` [up to L + 1] int says how many sequences have each length; those of length 0 do not count.

    From the longest length on, each is completed by others to exactly L if possible, and nearly if not. In how many
    parts: as many as sequences fall on a row in what is left, so that neither long nor short ones remain. Where several
    pairs complete a row, all are used in proportion to how many there are of them: the remaining histogram keeps its
    shape, where always taking the largest or the most alike would exhaust what others need later. What cannot be
    completed at the end of a share of the sequences is given to the next share, where more is left to complete it.
    Source: the idea of packing on the histogram is of Krell et al. 2021 (arXiv 2107.02027); the method is our own.
    """
    histogram = np.array(length_histogram, np.int64)
    present = np.flatnonzero(histogram[1:]) + 1
    left = np.zeros(row_length + 1, np.int64)
    left[present] = histogram[present]
    plans = []
    for share in _SHARES:
        plan = _plan_at_once(np.ceil(left * share).astype(np.int64), row_length, max_per_row)
        if share < 1:
            full = plan.combinations.sum(axis=1) == row_length
            # Rows that are not full are taken apart: with all that is left, their sequences find
            # better company.
            plan = PackingPlan(plan.combinations[full], plan.counts[full])
        np.subtract.at(left, plan.combinations, plan.counts[:, None])
        left[0] = 0
        plans.append(plan)
    return _merged(plans, max_per_row)


def _plan_at_once(left: np.ndarray, row_length: int, max_per_row: int) -> PackingPlan:
    """Returns a plan for all of a histogram [L + 1], which is used up."""
    num_left = int(left.sum())
    tokens_left = int(left @ np.arange(row_length + 1))
    plans = []
    # Long ones first: short ones fit into what these leave, and not the other way round.
    for longest in np.flatnonzero(left)[::-1]:
        while left[longest]:
            # As many parts as are left for each row, if rows were full; one more does no harm if it fits exactly.
            aim = min(max_per_row, max(2, num_left * row_length // tokens_left))
            used, times = _complete(left, int(longest), row_length, max_per_row, aim)
            np.subtract.at(left, used, times[:, None])
            left[0] = 0
            num_left -= int((used > 0).sum(axis=1) @ times)
            tokens_left -= int(used.sum(axis=1) @ times)
            plans.append(PackingPlan(used, times))
    return _merged(plans, max_per_row)


def _merged(plans: list[PackingPlan], max_per_row: int) -> PackingPlan:
    """Returns all rows of some plans, each combination once."""
    combinations = [np.zeros((0, max_per_row), np.int64)]
    counts = [np.zeros(0, np.int64)]
    for plan in plans:
        missing = max_per_row - plan.combinations.shape[1]
        combinations.append(np.pad(plan.combinations, ((0, 0), (0, missing))))
        counts.append(plan.counts)
    longest_first = -np.sort(-np.concatenate(combinations), axis=1)
    # Sorted, so that the order of rows is that of no dictionary and of no machine.
    unique, places = np.unique(longest_first, axis=0, return_inverse=True)
    totals = np.zeros(len(unique), np.int64)
    np.add.at(totals, places.reshape(-1), np.concatenate(counts))
    return PackingPlan(unique, totals)


def _complete(
    left: np.ndarray, longest: int, row_length: int, max_per_row: int, aim: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns combinations [k, parts] that begin with `longest`, and their numbers [k], at least one in all."""
    room = row_length - longest
    if max_per_row == 1 or not room:
        return _alone([longest], left)
    # "nothing" may stand in any number of places, so shorter combinations need no code of their own
    left[0] = _PLENTY
    partners = np.flatnonzero(_available(left, [longest])[: room + 1] > 0)
    if aim == 2 and partners[-1] == room:  # one more part, exactly
        return _alone([longest, room], left)
    if max_per_row == 2:
        return _alone([longest, int(partners[-1])], left)

    # Exactly, in the parts aimed at or in a few more; or else as nearly as can be.
    fewest = max(3, aim)
    most = min(max_per_row, fewest + _MORE_PARTS)
    tried = []
    for num_parts in range(fewest, most + 1):
        parts, room_left = _first_parts(left, longest, room, num_parts)
        available = _available(left, parts)
        pairs = _pairs(available, room_left)
        if pairs[2].any():
            return _share_out(left, parts, *pairs)
        total = _nearest_sum(available, room_left)
        tried.append((room_left - total, parts, _pairs(available, total)))
    _, parts, pairs = min(tried, key=lambda each: each[0])  # the first of those that leave least
    return _share_out(left, parts, *pairs)


def _first_parts(
    left: np.ndarray, longest: int, room: int, num_parts: int
) -> tuple[list[int], int]:
    """Returns all parts of a row but the last two, which are chosen together, and the room that is left for these."""
    parts = [longest]
    while len(parts) < num_parts - 2:
        available = _available(left, parts)[: room // (num_parts - len(parts)) + 1]
        part = int(np.flatnonzero(available > 0)[-1])  # about its share of the room
        if not part:
            break
        parts.append(part)
        room -= part
    return parts, room


def _available(left: np.ndarray, parts: list[int]) -> np.ndarray:
    """Returns the number of sequences left of each length once a row has these parts."""
    available = left.copy()
    np.subtract.at(available, parts, 1)
    return available


def _pairs(available: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the larger and the smaller length of all pairs with this sum, and the number of each pair. All [k]."""
    first = np.arange((total + 1) // 2, total + 1)
    second = total - first
    capacity = np.minimum(available[first], available[second])
    if 2 * first[0] == total:
        capacity[0] = available[first[0]] // 2
    return first, second, capacity


def _nearest_sum(available: np.ndarray, room: int) -> int:
    """Returns the largest sum of at most two available lengths that is not above `room`."""
    lengths = np.flatnonzero(available[: room + 1] > 0)  # 0, which is nothing, is always there
    partner = np.searchsorted(lengths, room - lengths, side="right") - 1
    partner -= (partner == np.arange(len(lengths))) & (available[lengths] < 2)  # the same one twice
    return int((lengths + lengths[partner]).max())


def _share_out(
    left: np.ndarray, parts: list[int], first: np.ndarray, second: np.ndarray, capacity: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows [k, parts + 2] of these parts and pairs in proportion to the pairs' number, and their numbers."""
    number = int((left[parts] // [parts.count(part) for part in parts]).min())
    repeated = np.isin(first, parts) | np.isin(second, parts)
    if not capacity[~repeated].any():  # lengths that the row has already: one combination at a time
        best = int(capacity.argmax())
        return _alone([*parts, int(first[best]), int(second[best])], left)
    capacity = np.where(repeated, 0, capacity)
    # In proportion to the ways to draw a pair; in whole numbers, so that no machine's order of summing decides.
    ways = left[first].astype(np.float64) * np.where(second > 0, left[second], 0)
    weights = np.where(capacity > 0, ways * (2.0**40 / max(1.0, ways.max())) + 1, 0).astype(
        np.int64
    )
    times = np.minimum((weights * (number / int(weights.sum()))).astype(np.int64), capacity)
    # What rounding left over, one for each pair, the plentiful ones first.
    order = np.argsort(-weights, kind="stable")
    more = order[(times < capacity)[order]][: number - int(times.sum())]
    times[more] += 1
    chosen = np.flatnonzero(times)
    used = np.column_stack([np.tile(parts, (len(chosen), 1)), first[chosen], second[chosen]])
    return used, times[chosen]


def _alone(parts: list[int], left: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns one combination, as often as its parts allow."""
    times = min(int(left[part]) // parts.count(part) for part in parts if part)
    return np.array([parts]), np.array([times])


def shard_seed(seed: int, split: str, index: int) -> list[int]:
    """Returns the seed of one shard of a data set."""
    return [seed % (1 << 64), int(split != "train"), index]


def assign(lengths: np.ndarray, plan: PackingPlan, seed: int | list[int]) -> np.ndarray:
    """Returns the sequences of each row of a plan, int64 [R, M]: indices into `lengths` [N], `EMPTY` after the last.

    Sequences of equal length are assigned at random, and the order of the rows is random too: the sequences of a row
    are not neighbours in one document.
    """
    bits = np.random.PCG64(seed)
    shuffled = _shuffled(len(lengths), bits)
    lengths = np.asarray(lengths).astype(np.uint16)
    by_length = shuffled[np.argsort(lengths[shuffled], kind="stable")]
    places = np.repeat(plan.combinations.astype(np.uint16), plan.counts, axis=0)  # [R, M]: lengths
    flat = places.reshape(-1)
    order = np.argsort(flat, kind="stable")
    num_empty = len(flat) - len(lengths)
    if num_empty < 0 or not np.array_equal(flat[order[num_empty:]], lengths[by_length]):
        raise ValueError("the plan is of other lengths")
    rows = np.full(len(flat), EMPTY, np.int64)
    rows[order[num_empty:]] = by_length
    return rows.reshape(places.shape)[_shuffled(len(places), bits)]


def _shuffled(count: int, bits: np.random.BitGenerator) -> np.ndarray:
    """Returns a random order of range(count), from raw bits: numpy keeps only these stable across releases."""
    return np.argsort(bits.random_raw(count), kind="stable")


def join_rows(singles: np.ndarray, places: np.ndarray, dtype: np.dtype, pad_id: int) -> np.ndarray:
    """Returns rows [R] (records of `dtype`) of the sequences that stand in `places` [R, M].

    `singles` are rows of one sequence each, one for each place that is not `EMPTY`, in order.
    """
    taken = places != EMPTY
    joined = np.zeros(len(places), dtype)
    for name in ("lengths", "first_lengths", "labels", "numbers"):
        joined[name][taken] = singles[name][:, 0]
    joined["labels"][~taken] = records.NO_LABEL
    # Tokens of the sequences, one after the other, are tokens of the rows, one after the other.
    row_length, single_length = (kind["token_ids"].shape[0] for kind in (dtype, singles.dtype))
    filled = np.arange(row_length) < joined["lengths"].sum(axis=1, dtype=np.int64)[:, None]
    inside = np.arange(single_length) < singles["lengths"]
    token_ids = np.full((len(places), row_length), pad_id, joined["token_ids"].dtype)
    token_ids[filled] = singles["token_ids"][inside]
    joined["token_ids"] = token_ids
    starts = np.zeros((len(places), row_length), bool)
    starts[filled] = records.unpack_word_starts(singles["word_starts"], single_length)[inside]
    joined["word_starts"] = records.pack_word_starts(starts)
    return joined


def packed_rows(
    lengths: np.ndarray,
    single_rows: Callable[[np.ndarray], np.ndarray],
    dtype: np.dtype,
    pad_id: int,
    seed: int | list[int],
) -> tuple[int, Iterator[np.ndarray]]:
    """Returns the number of rows that hold sequences of these lengths [N], and the rows, a chunk at a time.

    `single_rows(indices)` gives rows of one sequence each; `dtype` says L and M.
    """
    row_length = dtype["token_ids"].shape[0]
    max_per_row = dtype["lengths"].shape[0]
    places = assign(lengths, plan_packing(np.bincount(lengths), row_length, max_per_row), seed)

    def chunks() -> Iterator[np.ndarray]:
        for start in range(0, len(places), _ROWS_AT_ONCE):
            chunk = places[start : start + _ROWS_AT_ONCE]
            yield join_rows(single_rows(chunk[chunk != EMPTY]), chunk, dtype, pad_id)

    return len(places), chunks()
