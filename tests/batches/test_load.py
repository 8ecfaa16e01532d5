# SPDX-License-Identifier: Apache-2.0
"""The loader: a batch follows from (seed, step) alone, on any number of hosts."""

import itertools
import json

import jax
import numpy as np
import pytest
from processes import finish, start

from bert_jax.batches.load import eval_batches, rows_to_batch, train_batch, train_batches
from bert_jax.batches.make import on_mesh
from bert_jax.batches.order import train_rows
from bert_jax.data.order import shuffled
from bert_jax.data.records import open_dataset, row_dtype
from bert_jax.devices.sharding import make_mesh
from bert_jax.settings.pretraining import MeshConfig


@pytest.mark.parametrize("num_items", [1, 2, 3, 5, 64, 1000, 4097])
def test_every_epoch_is_a_permutation(num_items):
    for epoch in range(3):
        places = shuffled(np.arange(num_items), num_items, 7, epoch)
        assert sorted(places) == list(range(num_items))


def test_epochs_and_seeds_give_other_orders_that_look_random():
    orders = [shuffled(np.arange(1000), 1000, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for order, other in itertools.combinations([*orders, np.arange(1000)], 2):
        assert abs(np.corrcoef(order, other)[0, 1]) < 0.15
        assert (order == other).sum() < 12
    # Neighbours land anywhere: the mean distance of two random places of 1,000 is 333.
    assert abs(abs(np.diff(orders[0])).mean() - 333) < 30


def test_any_index_costs_no_memory():
    places = shuffled(np.array([0, 10**11]), 2 * 10**11, 0, 0)
    assert ((0 <= places) & (places < 2 * 10**11)).all() and places[0] != places[1]


def test_batches_run_through_all_rows_in_each_epoch():
    seen = [train_rows(step, np.arange(16), 16, 40, seed=3) for step in range(5)]  # 80 places: two epochs of 40
    rows, epochs = (np.concatenate(parts) for parts in zip(*seen, strict=True))
    assert sorted(rows[:40]) == sorted(rows[40:]) == list(range(40))
    assert epochs.tolist() == [0] * 40 + [1] * 40
    assert rows[:40].tolist() != rows[40:].tolist()


@pytest.mark.parametrize("num_hosts", [1, 2, 4])
def test_hosts_together_make_the_same_global_batch(num_hosts):
    """Each host asks for its own places of the batch; together they are the batch of one host."""
    whole = train_rows(9, np.arange(32), 32, 50, seed=1)
    parts = [train_rows(9, places, 32, 50, seed=1) for places in np.split(np.arange(32), num_hosts)]
    for index in range(2):
        np.testing.assert_array_equal(np.concatenate([part[index] for part in parts]), whole[index])


def test_mesh_does_not_change_the_batch(toy_data):
    split = open_dataset(toy_data).train
    batches = [
        jax.device_get(train_batch(split, 3, 16, 0, make_mesh(MeshConfig(**sizes), devices)))
        for sizes, devices in (
            ({}, jax.devices()[:1]),
            ({"data": 8}, jax.devices()),
            ({"data": 2, "fsdp": 2, "tensor": 2}, jax.devices()),
        )
    ]
    for other in batches[1:]:
        jax.tree.map(np.testing.assert_array_equal, batches[0], other)


LOAD = """
import json, sys
import jax, numpy as np
from bert_jax.batches.load import train_batch
from bert_jax.data.records import LocalRows, open_dataset
from bert_jax.devices.sharding import make_mesh
from bert_jax.settings.pretraining import MeshConfig

data, output, *joining = sys.argv[1:]
flags = dict(flag.removeprefix("--").split("=") for flag in joining)
jax.distributed.initialize(flags["coordinator"], int(flags["num_processes"]), int(flags["process_id"]))
found = {}
gather = LocalRows.gather
for sizes in ({"data": 4}, {"data": 2, "tensor": 2}, {"data": 1, "tensor": 4}):
    read = []
    LocalRows.gather = lambda split, rows: read.append(rows.tolist()) or gather(split, rows)
    batch = train_batch(open_dataset(data).train, 3, 8, 0, make_mesh(MeshConfig(**sizes)))
    shards = [np.asarray(shard.data)[:, 0].tolist() for shard in batch.sequence_numbers.addressable_shards]
    found[str(list(sizes.values()))] = {"read": read, "shards": shards}
with open(output + flags["process_id"], "w") as file:
    json.dump(found, file)
"""


def test_a_host_reads_only_its_rows(repository, toy_data, tmp_path):
    """Two processes with two devices each; where all devices have the same rows, each process reads them all."""
    finish(start(repository, ["-c", LOAD, str(toy_data), f"{tmp_path}/found"], num_processes=2, devices=2), timeout=200)
    ours, theirs = (json.loads((tmp_path / f"found{number}").read_text()) for number in range(2))
    split = open_dataset(toy_data).train
    rows, _ = train_rows(3, np.arange(8), 8, split.num_rows, seed=0)
    numbers = split.gather(rows)["numbers"][:, 0].tolist()
    rows = rows.tolist()
    for sizes in ("[4]", "[2, 2]"):
        assert ours[sizes]["read"] == [rows[:4]] and theirs[sizes]["read"] == [rows[4:]]
    assert ours["[1, 4]"]["read"] == theirs["[1, 4]"]["read"] == [rows]
    # And the rows that a device has are those of its place in the mesh.
    assert ours["[4]"]["shards"] + theirs["[4]"]["shards"] == [numbers[at : at + 2] for at in range(0, 8, 2)]
    assert ours["[2, 2]"]["shards"] + theirs["[2, 2]"]["shards"] == [numbers[:4]] * 2 + [numbers[4:]] * 2
    assert ours["[1, 4]"]["shards"] + theirs["[1, 4]"]["shards"] == [numbers] * 4


def test_rows_are_asked_for_once_where_devices_share_them():
    asked = []
    mesh = make_mesh(MeshConfig(data=4, tensor=2))

    def make_rows(places):
        asked.append(places.tolist())
        return {"number": places}

    batch = on_mesh(mesh, 8, make_rows)
    assert asked == [list(range(8))]
    np.testing.assert_array_equal(batch["number"], np.arange(8))


def test_a_stream_begins_anywhere(toy_data):
    split, mesh = open_dataset(toy_data).train, make_mesh(MeshConfig(), jax.devices()[:1])
    from_start = list(itertools.islice(train_batches(split, 0, 8, 0, mesh), 7))
    from_5 = list(itertools.islice(train_batches(split, 5, 8, 0, mesh), 2))
    for ours, theirs in zip(from_start[5:], from_5, strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_rows_become_sentences_a_and_b(toy_data):
    dataset = open_dataset(toy_data)
    rows = dataset.train.gather(np.arange(20))
    batch = rows_to_batch(rows, np.zeros(20, np.int32))
    cls, sep = 2, 3
    for row in range(20):
        length, first = int(rows["lengths"][row, 0]), int(rows["first_lengths"][row, 0])
        assert batch.token_ids[row, 0] == cls
        assert batch.token_ids[row, first - 1] == batch.token_ids[row, length - 1] == sep
        assert batch.type_ids[row].tolist() == [0] * first + [1] * (length - first) + [0] * (32 - length)
        assert batch.sequence_ids[row].tolist() == [1] * length + [0] * (32 - length)
    assert set(np.unique(batch.next_sentence_labels)) <= {0, 1}


def test_evaluation_sees_every_row_once(toy_data):
    split, mesh = open_dataset(toy_data).heldout, make_mesh(MeshConfig(), jax.devices()[:1])
    size = 8
    assert split.num_rows % size  # the last batch is not full
    batches = [jax.device_get(batch) for batch in eval_batches(split, size, mesh)]
    weights = np.concatenate([batch.sequence_weights[:, 0] for batch in batches])
    numbers = np.concatenate([batch.sequence_numbers[:, 0] for batch in batches])
    assert weights.sum() == split.num_rows
    assert sorted(numbers[weights > 0]) == sorted(split.gather(np.arange(split.num_rows))["numbers"][:, 0])
    assert not batches[-1].sequence_ids[weights[-size:] == 0].any()


def test_rows_with_static_masks_give_their_predictions_in_every_epoch():
    rows = np.zeros(3, row_dtype(8, 1, 300, predictions=4))
    rows["lengths"][:, 0], rows["first_lengths"][:, 0] = (8, 6, 0), (4, 3, 0)  # the last row is empty
    rows["mlm_positions"], rows["mlm_labels"], rows["mlm_counts"] = [5, 2, 3, 0], [299, 7, 8, 0], (3, 2, 3)
    for epoch in (0, 5):
        batch = rows_to_batch(rows, np.full(3, epoch, np.int32))
        assert batch.mlm_positions.tolist() == [[5, 2, 3, 0]] * 3
        assert batch.mlm_labels.tolist() == [[299, 7, 8, 0]] * 3
        assert batch.mlm_weights.tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert (batch.mlm_positions.dtype, batch.mlm_labels.dtype, batch.mlm_weights.dtype) == ("i4", "i4", "f4")
    assert rows_to_batch(np.zeros(3, row_dtype(8, 1, 300)), epoch).mlm_positions is None
