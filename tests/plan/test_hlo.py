# SPDX-License-Identifier: Apache-2.0
"""What is read from compiled programs: products, FLOPs with loops, and collectives in all their spellings."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from bert_jax.plan import hlo

LOOP = """\
HloModule jit_step, num_partitions=16

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%condition (state: (s32[], f32[8,4])) -> pred[] {
  %state = (s32[]{:T(128)}, f32[8,4]{1,0}) parameter(0)
  %limit = s32[]{:T(128)} constant(24)
  %counter = s32[] get-tuple-element(%state), index=0
  ROOT %less = pred[] compare(%counter, %limit), direction=LT
}

%body (state.1: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %state.1 = (s32[], f32[8,4]{1,0}) parameter(0)
  %x = f32[8,4]{1,0:T(8,128)} get-tuple-element(%state.1), index=1
  %narrow = bf16[8,4]{1,0:T(8,128)(2,1)S(1)} convert(%x)
  %y = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %both = (f32[8,4]{1,0:T(8,128)}, /*index=1*/bf16[8,4]{1,0}) all-reduce(%x, %narrow), channel_id=1, \
replica_groups=[2,8]<=[16], use_global_device_ids=true, to_apply=%add
  %counter.1 = s32[] get-tuple-element(%state.1), index=0
  %step = s32[] constant(1)
  %increased = s32[] add(%counter.1, %step)
  ROOT %next = (s32[], f32[8,4]) tuple(%increased, %x)
}

%wrapped (p: f32[2,4]) -> f32[32,4] {
  %p = f32[2,4]{1,0} parameter(0)
  ROOT %gathered = f32[32,4]{1,0} all-gather(%p), replica_groups=mesh['axis_0'=16,'axis_1'=1] \
{'axis_0','axis_1'}, dimensions={0}
}

ENTRY %main (p.1: f32[8,4]) -> f32[8,4] {
  %p.1 = f32[8,4]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %started = (s32[], f32[8,4]) tuple(%zero, %p.1)
  %loop = (s32[], f32[8,4]) while(%started), condition=%condition, body=%body
  %begin = ((f32[8,4]{1,0}), f32[1,4]{1,0}, u32[]) reduce-scatter-start(%p.1), replica_groups={{0,1,2,3},{4,5,6,7}}
  %end = f32[1,4]{1,0} reduce-scatter-done(%begin)
  %async = ((f32[2,4]), f32[32,4], s32[]) async-start(%end), calls=%wrapped
  %async.done = f32[32,4] async-done(%async)
  %permuted = f32[8,4]{1,0} collective-permute(%p.1), source_target_pairs={{0,1},{1,0}}
  ROOT %result = f32[8,4]{1,0} get-tuple-element(%loop), index=1
}
"""
PRODUCT = 2 * 8 * 8 * 4  # FLOPs of the dot in the loop


def test_collectives_in_all_spellings():
    found = {collective.kind: collective for collective in hlo.collectives(LOOP)}
    assert dataclasses.astuple(found["all-reduce"])[1:5] == (
        ("bf16", "f32"),
        8 * 4 * (4 + 2),
        24,
        8,
    )  # a tuple, in a loop
    assert dataclasses.astuple(found["reduce-scatter"])[1:5] == (("f32",), 128, 1, 4)  # its start and done are one
    assert dataclasses.astuple(found["all-gather"])[1:5] == (("f32",), 16 * 32, 1, 16)  # in an asynchronous computation
    assert found["collective-permute"].bytes == 128
    assert len(hlo.collectives(LOOP)) == 4


@pytest.mark.parametrize(("step", "count"), [(1, 24), (2, 12), (5, 5), (24, 1)])
def test_a_loop_counts_as_often_as_it_runs(step, count):
    """Also one that the compiler has unrolled, by larger steps."""
    assert hlo.flops(LOOP.replace("constant(1)", f"constant({step})")) == count * PRODUCT
    noted = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
    assert hlo.flops(noted) == 7 * PRODUCT


def test_a_counter_that_a_fusion_increases():
    fusion = """%increase (p.2: s32[]) -> s32[] {
  %p.2 = s32[] parameter(0)
  %one = s32[] constant(3)
  ROOT %sum.1 = s32[] add(%p.2, %one)
}

%condition ("""
    fused = LOOP.replace("%condition (", fusion).replace(
        "%increased = s32[] add(%counter.1, %step)",
        "%increased = s32[] fusion(%counter.1), kind=kLoop, calls=%increase",
    )
    assert hlo.flops(fused) == 8 * PRODUCT


@pytest.mark.parametrize(("known", "unknown"), [("constant(24)", "parameter(1)"), ("constant(1)", "constant(0)")])
def test_a_loop_of_unknown_length_is_an_error(known, unknown):
    with pytest.raises(ValueError, match="cannot tell how often the loop loop of main runs"):
        hlo.flops(LOOP.replace(known, unknown))


def convolution(lhs, rhs, out, window, labels):
    return f"""ENTRY %main (a: {lhs}, b: {rhs}) -> {out} {{
  %a = {lhs} parameter(0)
  %b = {rhs} parameter(1)
  ROOT %c = {out} convolution(%a, %b), {window}dim_labels={labels}
}}"""


@pytest.mark.parametrize(
    ("text", "flops"),
    [
        (convolution("bf16[6,5]", "bf16[5,7]", "f32[6,7]", "", "bf_io->bf"), 2 * 6 * 5 * 7),
        (convolution("bf16[6,5]", "bf16[5,1]", "f32[6,1]", "", "bf_io->bf"), 2 * 6 * 5),
        # Two axes contracted: one of them is the window.
        (
            convolution("bf16[4,6,5]", "bf16[4,5,7]", "f32[1,6,7]", "window={size=4}, ", "0bf_0io->0bf"),
            2 * 4 * 6 * 5 * 7,
        ),
        # A batch of 4 products, as TPU compilers write it: each output meets one number of the dilated input.
        (
            convolution(
                "bf16[6,4,5]",
                "bf16[4,5,7]",
                "f32[6,4,7]",
                "window={size=4 stride=3 pad=0_0 lhs_dilate=4}, ",
                "b0f_0io->b0f",
            ),
            2 * 4 * 6 * 5 * 7,
        ),
        # A window of 3 over 8 places with padding: 3 x 8 taps less the two that meet padding.
        (
            convolution("f32[1,8,2]", "f32[3,2,5]", "f32[1,8,5]", "window={size=3 pad=1_1}, ", "b0f_0io->b0f"),
            2 * 22 * 2 * 5,
        ),
    ],
)
def test_convolutions_count_what_they_multiply(text, flops):
    assert hlo.flops(text) == flops


@pytest.mark.parametrize(("dtype", "bits"), [("bf16", 16), ("pred", 8), ("f8e4m3fn", 8), ("s4", 4), ("token", 0)])
def test_bits(dtype, bits):
    assert hlo.bits_of(dtype) == bits


def layers(x, weights, unroll):
    def layer(x, weight):
        return jnp.tanh(x @ weight), None

    return jnp.sum(jax.lax.scan(layer, x, weights, unroll=unroll)[0])


def test_a_scan_has_the_flops_of_its_unrolled_twin():
    shapes = (jax.ShapeDtypeStruct((16, 32), jnp.float32), jax.ShapeDtypeStruct((6, 32, 32), jnp.float32))
    counted = [
        hlo.flops(
            jax.jit(jax.grad(layers, argnums=(0, 1)), static_argnums=2).lower(*shapes, unroll).compile().as_text()
        )
        for unroll in (1, 6)
    ]
    assert counted == [3 * 6 * 2 * 16 * 32 * 32] * 2


def test_a_kernel_counts_by_what_it_says_of_itself_as_often_as_it_runs():
    text = """
%body (p: (s32[])) -> (s32[]) {
  %p = (s32[]) parameter(0)
  %k = f32[8] custom-call(%p), custom_call_target="tpu_custom_call", backend_config=CONFIG
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %t = (s32[]) tuple(%i)
}

%condition (p: (s32[])) -> pred[] {
  %p = (s32[]) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (x: (s32[])) -> (s32[]) {
  %x = (s32[]) parameter(0)
  ROOT %w = (s32[]) while(%x), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
}
"""
    config = '{"custom_call_config":{"body":"TUzv","cost_estimate":{"flops":"700","transcendentals":"3"}}}'
    assert hlo.flops(text.replace("CONFIG", config)) == 3500
    told = '{}, frontend_attributes={kernel_metadata={\n"blocks":"128"\n}}, metadata={op_name="a/kernel_flops_900/b"}'
    # in lines of its own, and the computation goes on after it
    assert hlo.flops(text.replace("CONFIG", told)) == 4500
