# SPDX-License-Identifier: Apache-2.0
"""The order of streams: every row once in every epoch, a pure function of the step, on any number of hosts."""

import hashlib
import itertools

import numpy as np
import pytest
from builders import assert_same

from bert_jax.data.order import StreamOrder, StreamWindow, choose_streams, shuffled


def take(order: StreamOrder, step: int, places: np.ndarray, batch_size: int, rows_before: int = 0):
    """Returns the rows and epochs of places of a batch, as the loader does but without memory."""
    taken = np.full((2, len(places)), -1)
    for window, where, first in order.parts(step, places, batch_size, *[rows_before] * bool(rows_before)):
        assert (taken[:, where] == -1).all()
        taken[0, where] = order.rows(window)[first : first + where.stop - where.start]
        taken[1, where] = window.epoch
    assert (taken >= 0).all()
    return taken


def take_steps(order: StreamOrder, steps: int, batch_size: int, rows_before: int = 0):
    places = np.arange(batch_size)
    return np.hstack([take(order, step, places, batch_size, rows_before) for step in range(steps)])


def make_order(num_blocks: int, num_streams: int, window_rows: int, seed: int = 0) -> StreamOrder:
    """Returns an order of blocks of uneven sizes."""
    return StreamOrder(np.random.default_rng(num_blocks).integers(1, 12, num_blocks), num_streams, window_rows, seed)


SHAPES = [(7, 4, 5, 8), (3, 8, 100, 16), (1, 1, 10, 3), (2, 16, 4, 32), (40, 5, 1, 5)]


@pytest.mark.parametrize(("num_blocks", "num_streams", "window_rows", "batch_size"), SHAPES)
def test_every_row_comes_once_in_every_epoch(num_blocks, num_streams, window_rows, batch_size):
    order = make_order(num_blocks, num_streams, window_rows)
    rows, epochs = take_steps(order, 4 * order.num_rows // batch_size + 1, batch_size)
    for epoch in range(4):
        assert sorted(rows[epochs == epoch]) == list(range(order.num_rows))
    # Batches run over the edge between epochs, and never further: place by place they are as in an order of one level.
    numbers = np.arange(len(rows)).reshape(-1, batch_size)
    assert (np.sort(epochs.reshape(-1, batch_size), axis=1) == np.sort(numbers // order.num_rows, axis=1)).all()


@pytest.mark.parametrize("sizes", [(12, 24), (12, 5)])
def test_a_second_phase_goes_on_with_batches_of_any_size(sizes):
    """Also of a size that the number of streams does not divide."""
    order = make_order(9, 6, 4)
    steps = order.num_rows // (2 * sizes[0])
    first = take_steps(order, steps, sizes[0])
    second = take_steps(order, 3 * order.num_rows // sizes[1], sizes[1], rows_before=steps * sizes[0])
    rows, epochs = np.hstack([first, second])
    for epoch in range(3):
        assert sorted(rows[epochs == epoch]) == list(range(order.num_rows))


@pytest.mark.parametrize("num_hosts", [2, 8])
def test_hosts_together_make_the_same_batch_of_streams_of_their_own(num_hosts):
    order = make_order(50, 8, 9)
    streams = [set() for _ in range(num_hosts)]
    apart = np.array([0, 1, 4, 6, 7, 12, 30])  # of a host with devices at several places of the mesh
    for step in range(20):
        whole = take(order, step, np.arange(32), 32)
        shares = np.split(np.arange(32), num_hosts)
        for places in (*shares, apart):
            assert_same(take(order, step, places, 32), whole[:, places])
        for mine, places in zip(streams, shares):
            mine |= {part.window.stream for part in order.parts(step, places, 32)}
    assert sum(map(len, streams)) == 8 and len(set().union(*streams)) == 8  # no stream belongs to two


def test_a_stream_reads_the_same_blocks_in_every_epoch():
    """But for those at its ends. So a host with room for its share reads nothing twice."""
    order = StreamOrder(np.full(400, 10), 8, 50, 0)
    blocks, window = [set(), set(), set()], StreamWindow(3, 0, 0)
    while window.epoch < 3:
        blocks[window.epoch] |= set(order.blocks(window).tolist())
        window = order.next(window)
    assert all(len(one ^ other) <= 2 for one, other in itertools.combinations(blocks, 2))
    assert 50 <= len(blocks[0]) <= 52


@pytest.mark.parametrize(("num_blocks", "num_streams", "window_rows", "batch_size"), SHAPES)
def test_windows_follow_each_other(num_blocks, num_streams, window_rows, batch_size):
    order = make_order(num_blocks, num_streams, window_rows)
    for stream in range(min(num_streams, order.num_rows)):
        window, turn = StreamWindow(stream, 0, 0), 0
        while window.epoch < 3:
            rows = order.rows(window)
            assert order.first_turn(window) == turn and 0 < len(rows) <= window_rows
            ends = np.cumsum(order.block_rows)
            assert set(np.searchsorted(ends, rows, side="right")) == set(order.blocks(window))
            window, turn = order.next(window), turn + len(rows)
        assert order.first_turn(window) == turn


def test_the_order_is_that_of_earlier_versions():
    """A run that goes on with a newer version reads what it would have read."""
    digest = hashlib.sha256()
    for num_items in (1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000):
        digest.update(shuffled(np.arange(num_items), num_items, 3, 1).astype("<i8").tobytes())
    for shape in SHAPES:
        order = StreamOrder(np.arange(1, shape[0] + 1) * 5 % 11 + 1, *shape[1:3], seed=5)
        digest.update(np.stack(take_steps(order, 2 * order.num_rows // shape[3] + 1, shape[3])).astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == "021af4b9a8862552"


@pytest.mark.parametrize(
    ("most", "batch_size", "expected"),
    [(256, 256, 256), (256, 8192, 256), (64, 100, 50), (64, 250, 50), (256, 48, 48), (64, 67, 1), (1, 12, 1)],
)
def test_the_number_of_streams_divides_the_batch(most, batch_size, expected):
    assert choose_streams(most, batch_size) == expected
