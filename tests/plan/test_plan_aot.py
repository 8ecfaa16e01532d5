# SPDX-License-Identifier: Apache-2.0
"""Gates on programs that libtpu compiles for pods, on a machine without one: `make test-tpu-aot`.

A compilation takes a core one to three minutes, so each program is compiled once for all gates.
"""

import dataclasses
import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from stablehlo import stablehlo_products

from bert_jax.batch import Batch
from bert_jax.batches.load import abstract_batch
from bert_jax.devices.sharding import make_mesh, row_sharding
from bert_jax.model import fused_attention_tpu as on_tpu
from bert_jax.model import splash_attention_tpu as long_on_tpu
from bert_jax.model.attention_kernels import AttentionShape
from bert_jax.model.heads.embedding import EMBEDDINGS, Texts
from bert_jax.model.objective import TaskObjective, count_parameters, init_params
from bert_jax.plan import hbm, hlo
from bert_jax.plan import planner as planner
from bert_jax.settings.model import model_size
from bert_jax.settings.pretraining import (
    DataConfig,
    MaskingConfig,
    MeshConfig,
    OptimizerConfig,
    PretrainConfig,
    TrainConfig,
)
from bert_jax.training.program import Program
from bert_jax.training.step import abstract_state

pytestmark = pytest.mark.tpu_aot

# Size, phase, topology, rows of a chip: full rows, no rematerialisation, bfloat16.
PROGRAMS = (
    ("large", 1, "v5e:4x4", 16),
    ("large", 1, "v5e:16x16", 16),
    ("large", 2, "v4:4x4x8", 8),
    ("base", 2, "v6e:16x16", 8),
)


def configuration(size, phase, topology, rows, **model):
    model = dataclasses.replace(model_size(size), vocab_size=30522, compute_dtype="bfloat16", **model)
    config = PretrainConfig(
        model=model,
        masking=MaskingConfig(max_predictions=20 if phase == 1 else 80),
        data=DataConfig(path="none"),
        train=TrainConfig(accumulate=1, zero1="off"),  # left open, what does not fit would be divided
    )
    return planner.with_rows(config, topology, rows)


@functools.cache
def plan_of(size, phase, topology, rows, **model):
    return planner.plan(configuration(size, phase, topology, rows, **model), topology)


# What is sent, in bytes of all float32 parameters, by kind and dtype; what is less than 0.02 of them is left out.
CONFIGURATIONS = {
    "gradient_dtype": ({"model": {"gradient_dtype": "bfloat16"}}, {"all-reduce bf16": 0.49}),
    "zero1, accumulate, gradient_dtype": (
        {"train": TrainConfig(zero1="on", accumulate=4), "model": {"gradient_dtype": "bfloat16"}},
        {"all-gather f32": 0.61, "all-gather bf16": 0.2, "reduce-scatter bf16": 0.32, "all-reduce bf16": 0.18},
    ),
    "dcn": ({"mesh": MeshConfig(dcn=2)}, {"all-gather f32": 1.0, "all-reduce f32": 0.6, "reduce-scatter f32": 0.4}),
    "fsdp": (
        {"mesh": MeshConfig(data=1, fsdp=8)},
        {
            "all-reduce f32": 0.62,
            "all-gather f32": 0.61,
            "all-gather bf16": 0.02,
            "collective-permute f32": 0.41,
            "collective-permute bf16": 0.38,
        },
    ),
    # Parts of activations are added up in the compute dtype, and gradients, which are divided too, in float32.
    "mixture": (
        {"mesh": MeshConfig(data=2, fsdp=2, tensor=2)},
        {"all-reduce f32": 0.64, "all-reduce bf16": 0.25, "all-gather f32": 0.34, "all-gather bf16": 0.19},
    ),
    "fused attention over heads": (
        {"model": {"attention": "fused"}, "mesh": MeshConfig(data=2, tensor=4)},
        {"all-reduce f32": 0.32, "all-reduce bf16": 0.24},
    ),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_what_other_configurations_send(name):
    """Two layers of BERT-Base. The word table is 0.60 of the parameters, so layers are 0.39."""
    changes, expected = CONFIGURATIONS[name]
    config = configuration("base", 1, "v5e:2x4", 16, num_layers=2, **changes.get("model", {}))
    config = dataclasses.replace(config, **{part: value for part, value in changes.items() if part != "model"})
    plan = planner.plan(planner.with_rows(config, "v5e:2x4", 16), "v5e:2x4")
    assert 0.95 < plan.compiled_flops / plan.model_flops < 1.05
    sent = Counter()
    model = dataclasses.replace(config.model, vocab_multiple=1)
    size = count_parameters(jax.eval_shape(lambda key: init_params(model, key), jax.random.key(0)))
    for traffic in plan.collectives:
        sent[f"{traffic.kind} {traffic.dtype}"] += traffic.bytes / (4 * size)
    assert {name: share for name, share in sent.items() if share >= 0.02} == pytest.approx(expected, abs=0.02)


def payload(plan):
    return sum(traffic.bytes for traffic in plan.collectives)


@pytest.fixture(params=PROGRAMS, ids=lambda program: "-".join(map(str, program)), scope="module")
def program(request):
    plan = plan_of(*request.param)
    assert plan.fits, plan.problem
    return plan


def test_nothing_is_computed_that_the_model_does_not_need(program):
    assert 0.95 < program.compiled_flops / program.model_flops < 1.05


def test_gradients_are_reduced_once_and_nothing_else_is_moved(program):
    assert {traffic.kind for traffic in program.collectives} == {"all-reduce"}
    assert payload(program) <= 1.02 * program.bytes["params"]


def test_memory_of_a_chip_does_not_grow_with_the_pod():
    small, large = plan_of("large", 1, "v5e:4x4", 16), plan_of("large", 1, "v5e:16x16", 16)
    assert (small.num_chips, large.num_chips) == (16, 256)
    assert large.bytes["total"] == pytest.approx(small.bytes["total"], rel=0.01)


def test_eight_rows_of_512_of_bert_large_fit_a_v5e_chip():
    plain, dots, fused = (
        plan_of("large", 2, "v5e:4x4", 8, **model) for model in ({}, {"remat": "dots"}, {"attention": "fused"})
    )
    for plan, gib in ((plain, 12), (dots, 6), (fused, 6.5)):
        assert plan.fits and plan.bytes["temporaries"] < gib * 2**30
        assert 0.95 < plan.compiled_flops / plan.model_flops < 1.05  # the scores alone are computed again
    too_many = plan_of("large", 2, "v5e:4x4", 16)
    assert not too_many.fits and "model.remat=dots" in too_many.problem


@pytest.mark.parametrize(("size", "phase"), [("base", 1), ("large", 2)])
def test_no_float32_matrix_product_in_bfloat16(size, phase):
    """As asked for: libtpu multiplies bfloat16 whatever comes. The bias of the vocabulary is a vector.

    Beside three products for each matrix there are the gradients of positions and types.
    """
    config = configuration(size, phase, "v5e:4x4", 8)
    mesh = make_mesh(config.mesh, planner.tpu_devices("v5e:4x4")[0])
    found = stablehlo_products(
        planner.lower_train_step(config, mesh, planner.row_of(config, 128 if phase == 1 else 512)).as_text()
    )
    assert {(product.lhs, product.rhs) for product in found if product.is_matrix} == {("bf16", "bf16")}
    assert len([product for product in found if product.is_matrix]) == 3 * (8 + 4) + 2


def test_the_forward_pass_moves_nothing_but_sums():
    config = configuration("large", 1, "v5e:4x4", 16)
    mesh = make_mesh(config.mesh, planner.tpu_devices("v5e:4x4")[0])
    params = planner._state(config, mesh).params
    step = Program(mesh).evaluation(planner._objective(config, mesh), params)
    with jax.set_mesh(mesh):
        lowered = step.lower(params, abstract_batch(planner.row_of(config, 128), config.data.batch_size, mesh))
    found = hlo.collectives(lowered.compile().as_text() or "")
    assert found and all(collective.bytes <= 1024 for collective in found)


@pytest.mark.parametrize(
    ("size", "rows", "dtype"),
    [(32, 64, "bfloat16"), (128, 64, "float32"), (256, 16, "bfloat16"), (384, 8, "float32"), (512, 8, "float32")],
)
def test_programs_of_attention_fit_the_vector_memory(size, rows, dtype):
    """Heads of 64; `rows_of_a_program` reckons with at least as many bytes as libtpu takes."""
    shape = AttentionShape(16, 64, False, 58982)
    mesh = make_mesh(MeshConfig(), planner.tpu_devices("v5e:2x2")[0][:1])
    struct = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    array = struct((rows, size, 1024), jnp.dtype(dtype))
    given = (array, array, array, struct((rows, size), jnp.int32), struct((rows, 16, 2), jnp.int32))
    for function, arrays in ((on_tpu.forward, given), (on_tpu.backward, (array, *given))):
        with jax.set_mesh(mesh):
            text = jax.jit(functools.partial(function, shape, False)).lower(*arrays).compile().as_text() or ""
        call = next(line for line in text.splitlines() if "tpu_custom_call" in line)
        taken = re.search(r'used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"', call)
        assert taken, call[-500:]
        print(size, rows, dtype, function.__name__, taken[1])
        assert int(taken[1]) <= on_tpu.PROGRAM_BYTES


def test_kernels_take_rotary_positions_and_leave_windows_of_other_lengths_to_programs_without_scores():
    """ModernBERT's mini, of whose four layers the first and the last see all: with kernels, and the others without."""
    model = dataclasses.replace(
        model_size("modernbert-mini"), vocab_size=30522, compute_dtype="bfloat16", attention="fused"
    )
    config = PretrainConfig(
        model=model,
        masking=MaskingConfig(rate=0.3),
        data=DataConfig(path="none", batch_size=16),
        optimizer=OptimizerConfig(name="stable_adamw", bias_correction=True, clip_norm=0.0),
        train=TrainConfig(next_sentence=False),
    )
    mesh = make_mesh(config.mesh, planner.tpu_devices("v5e:2x2")[0])
    text = planner.lower_train_step(config, mesh, planner.row_of(config, 448)).compile().as_text() or ""
    assert text.count('custom_call_target="tpu_custom_call"') == 2 * 2  # forward and backward
    scores = [line for line in text.splitlines() if re.search(r"\b(f32|bf16)\[[\d,]*\b448,448\]", line)]
    assert not scores, scores[:3]
    shape, array = AttentionShape(4, 64, False, 2**16), jax.ShapeDtypeStruct((4, 448, 256), jnp.bfloat16)
    assert on_tpu.fits(shape, array) and not on_tpu.fits(shape._replace(window=64), array)


@pytest.mark.parametrize(
    ("topology", "size", "window", "dtype"),
    [
        ("v5e:2x2", 1024, 64, "bfloat16"),
        ("v5e:2x2", 8192, 0, "float32"),
        ("v5p:2x2x1", 1024, 64, "float32"),
        ("v6e:2x2", 8192, 0, "bfloat16"),
    ],
)
def test_long_rows_and_windows_are_compiled_without_scores(topology, size, window, dtype):
    shape = AttentionShape(12, 64, False, 2**16, window=window)
    mesh = make_mesh(MeshConfig(), planner.tpu_devices(topology)[0][:1])
    struct = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    array, ids = struct((2, size, 768), jnp.dtype(dtype)), struct((2, size), jnp.int32)
    assert long_on_tpu.fits(shape, array)

    def both(gradient, query, key, value, ids):
        arrays = (query, key, value, ids, None)
        results = long_on_tpu.forward(shape, False, *arrays)
        return results, long_on_tpu.backward(shape, False, gradient, *results, *arrays)

    with jax.set_mesh(mesh):
        text = jax.jit(both).lower(array, array, array, array, ids).compile().as_text() or ""
    calls = 3 if window else 2
    assert len([line for line in text.splitlines() if '"tpu_custom_call"' in line]) == calls
    assert not re.search(rf"\[[\d,]*\b{size},{size}\]", text)
    needs = 6 * 2 * 2 * size * 768 * (2 * window + 1 if window else size)
    assert hlo.flops(text) / needs < (4.2 if window else 1.2)
    print(topology, size, window, dtype, f"{hbm.moved_bytes(text) / 1e9:.2f} GB")


def test_a_batch_of_65536_pairs_sends_its_vectors_and_fits():
    """Two layers of Base, 64 microbatches: the vectors of texts are gathered, and not those of all places of rows."""
    pairs, length, places = 65_536, 128, 21
    model = dataclasses.replace(model_size("base"), vocab_size=30522, compute_dtype="bfloat16", unroll=1, num_layers=2)
    mesh = make_mesh(MeshConfig(), planner.tpu_devices("v5e:4x4")[0])
    objective, train, optimizer = TaskObjective(model, EMBEDDINGS), TrainConfig(accumulate=64), OptimizerConfig()
    state = abstract_state(objective, optimizer, train, mesh)
    step = Program(mesh).training(objective, optimizer, train, state)

    def rows(dtype, *shape):
        return jax.ShapeDtypeStruct((pairs, *shape), dtype, sharding=row_sharding(mesh))

    labels = Texts(rows(jnp.int32, 2), rows(jnp.int32, 2), rows(jnp.float32))
    tokens = rows(jnp.int32, length), rows(jnp.uint8, length), rows(jnp.int32, length)
    batch = Batch(*tokens, rows(jnp.int32, places), rows(jnp.float32, places), labels=labels)
    with jax.set_mesh(mesh):
        compiled = step.lower(state, batch).compile()
    gathered = sum(each.bytes * each.count for each in hlo.collectives(compiled.as_text()) if each.kind == "all-gather")
    assert gathered < 1.6 * pairs * 2 * model.hidden_size * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 2.2e9
