# SPDX-License-Identifier: Apache-2.0
"""The batches of inference: every row once, about as many tokens as a device computes at once, in few shapes."""

import itertools

import jax
import numpy as np
import pytest

from bert_jax.batches import infer
from bert_jax.batches.infer import computed, inference_layouts, tokens_at_once
from bert_jax.batches.pack import Layout, Sizes
from bert_jax.batches.shapes import padded_flops
from bert_jax.devices.sharding import make_mesh
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.pretraining import MeshConfig

MODEL = ModelConfig(vocab_size=100)
SHORT = np.clip(np.random.default_rng(1).gamma(2.0, 6.0, 2000).astype(np.int64), 3, 66)  # like phrases of SST-2


def sizes(lengths, sequences=1):
    return Sizes(np.asarray(lengths, np.int64), np.full(len(lengths), sequences, np.int64))


def layouts_of(lengths, *arguments, model=MODEL, **rest):
    of = lengths if isinstance(lengths, Sizes) else sizes(lengths)
    layouts = list(inference_layouts(of, model, *arguments, **rest))
    members = itertools.chain.from_iterable(bins for layout in layouts for bins in layout.bins)
    assert sorted(members) == list(range(len(of.tokens)))
    for layout in layouts:
        assert len(layout.bins) <= layout.num_rows
        for bins in layout.bins:
            assert of.tokens[bins].sum() <= layout.length and of.sequences[bins].sum() <= layout.num_places
    return layouts


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((9,), [(1, 16)]),
        ((200,) * 9, [(2, 224)] * 4 + [(1, 224)]),
        ((400,) * 2, [(1, 448)] * 2),
        ((12,) * 40, [(32, 16), (8, 16)]),
        ((120, 30, 30), [(4, 128)]),
        ((), []),
    ],
)
def test_a_batch_on_a_cpu_has_about_512_tokens(lengths, expected):
    assert [(layout.num_rows, layout.length) for layout in layouts_of(lengths)] == expected


def test_an_accelerator_computes_more_at_once(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert [(layout.num_rows, layout.length) for layout in layouts_of([100] * 200)] == [(146, 112), (64, 112)]
    fused = ModelConfig(attention="fused")
    assert {layout.length for layout in layouts_of([9, 40] * 20_000, model=fused)} == {32, 64}


def test_packed_rows_have_as_many_tokens():
    (first, *_) = layouts_of([20] * 100 + [60], "on")
    assert first.num_rows * first.length <= 512 and len(first.bins) == first.num_rows


def test_a_batch_has_no_more_positions_than_the_rows_that_are_asked_for():
    for pack in ("on", "off"):
        layouts = layouts_of(SHORT, pack, most_rows=4)
        assert max(layout.num_rows * layout.length for layout in layouts) <= 4 * 80


@pytest.mark.parametrize("pack", ["on", "off", "auto"])
@pytest.mark.parametrize("most_rows", [0, 4])
def test_a_split_of_one_shape(pack, most_rows):
    layouts = layouts_of(SHORT[:701], pack, most_rows=most_rows, one_shape=True)
    assert len(layouts) > 1 and len({layout[1:] for layout in layouts}) == 1


def test_rows_that_are_all_of_one_length_gain_nothing_by_packing():
    assert {layout.length for layout in layouts_of([64] * 100, "auto")} == {64}


@pytest.mark.parametrize(("devices", "pack"), [(1, "on"), (4, "on"), (4, "off"), (1, "auto")])
def test_prediction_has_every_row_once_in_few_shapes(devices, pack):
    mesh = make_mesh(MeshConfig(), jax.devices()[:devices])
    layouts = layouts_of(SHORT[:700], pack, mesh)
    assert all(layout.num_rows % devices == 0 for layout in layouts)
    assert all(layout.num_rows * layout.length <= 512 * devices for layout in layouts)
    if pack != "off":
        assert len({layout[1:] for layout in layouts}) <= 2
        assert padded_flops(MODEL, layouts) < padded_flops(MODEL, layouts_of(SHORT[:700], "off", mesh))


def test_few_texts_make_a_small_batch():
    (layout,) = layouts_of([9, 8, 10], "auto")
    assert layout.num_rows * layout.length <= 64
    (layout,) = layouts_of([11], "auto")
    assert (layout.num_rows, layout.length) == (1, 16)


def test_no_row_is_longer_than_the_model_has_positions():
    """The positions of padding run on from 0, and a table that is read beyond its end gives NaN."""
    short = ModelConfig(vocab_size=100, max_positions=70)
    choices = Sizes(np.array([90, 60]), np.array([3, 2]))  # none of them is longer than 70
    for pack in ("on", "off"):
        assert all(layout.length <= 70 for layout in layouts_of(SHORT, pack, model=short))
        assert all(layout.length == 90 for layout in layouts_of(choices, pack, model=short))


def test_choices_stay_together():
    of = Sizes(np.array([30, 50, 20, 40]), np.array([4, 4, 2, 3]))
    assert all(layout.num_places >= 4 for layout in layouts_of(of, "on"))


def test_sets_of_texts_of_any_kind_take_packed_rows_of_few_lengths():
    """Where one CPU computes, each shape is compiled while a person waits."""
    rng = np.random.default_rng(2)
    shapes = set()
    for _ in range(40):
        texts = np.clip(rng.gamma(2.0, 6.0, 256).astype(np.int64), 3, int(rng.integers(30, 70)))
        shapes |= {(each.num_rows, each.length) for each in layouts_of(texts, "auto")}
    assert {length for _, length in shapes} <= {32, 64, 96, 128} and len(shapes) <= 12


def test_many_rows_have_lengths_closer_to_theirs(monkeypatch):
    """As soon as what a program saves is more than the time that its compilation takes."""
    assert {layout.length for layout in layouts_of(SHORT)} == {16, 32, 48, 80}
    many = np.tile(SHORT, 40)
    lengths = {layout.length for layout in layouts_of(many)}
    assert 8 < len(lengths) < 16 and lengths <= set(range(2, 82, 2))
    assert padded_flops(MODEL, layouts_of(many)) < 0.7 * 40 * padded_flops(MODEL, layouts_of(SHORT))
    monkeypatch.setattr(infer, "_COMPILATION", 0)
    assert {layout.length for layout in layouts_of([5, 9, 66, 129])} == {132, 6}  # three rows are a batch


def test_batches_are_dispatched_before_the_one_before_them_is_read():
    seen = []

    def compute(layout):
        seen.append(f"made {layout.length}")
        return {"length": np.array(layout.length)}

    for layout, result in computed((Layout([], 1, length, 1) for length in range(4)), compute):
        seen.append(f"used {layout.length} {result['length']}")
    assert seen == ["made 0", "made 1", "made 2", "used 0 0", "made 3", "used 1 1", "used 2 2", "used 3 3"]
    assert list(computed([], compute)) == [] and tokens_at_once() == 512
