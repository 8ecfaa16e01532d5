# SPDX-License-Identifier: Apache-2.0
"""Bytes of HBM that are read from compiled programs: loops, slices, updates in place, memory spaces, libraries."""

from bert_jax.plan import hlo
from bert_jax.plan.hbm import moved_bytes

PROGRAM = """\
HloModule jit_step

%condition (state: (s32[], f32[24,1024])) -> pred[] {
  %state = (s32[], f32[24,1024]{1,0}) parameter(0)
  %limit = s32[] constant(24)
  %counter = s32[] get-tuple-element(%state), index=0
  ROOT %less = pred[] compare(%counter, %limit), direction=LT
}

%one_layer (whole: f32[24,1024], place: s32[]) -> f32[24,1024] {
  %whole = f32[24,1024]{1,0} parameter(0)
  %place = s32[] parameter(1)
  %zero = s32[] constant(0)
  %layer = f32[1,1024]{1,0} dynamic-slice(%whole, %place, %zero), dynamic_slice_sizes={1,1024}
  %doubled = f32[1,1024]{1,0} add(%layer, %layer)
  ROOT %updated = f32[24,1024]{1,0} dynamic-update-slice(%whole, %doubled, %place, %zero)
}

%body (state.1: (s32[], f32[24,1024])) -> (s32[], f32[24,1024]) {
  %state.1 = (s32[], f32[24,1024]{1,0}) parameter(0)
  %counter.1 = s32[] get-tuple-element(%state.1), index=0
  %stack = f32[24,1024]{1,0} get-tuple-element(%state.1), index=1
  %in_place = f32[24,1024]{1,0} fusion(%stack, %counter.1), kind=kLoop, calls=%one_layer
  %step = s32[] constant(1)
  %increased = s32[] add(%counter.1, %step)
  ROOT %next = (s32[], f32[24,1024]) tuple(%increased, %in_place)
}

ENTRY %main (p: f32[24,1024]) -> f32[24,1024] {
  %p = f32[24,1024]{1,0} parameter(0)
  %start = s32[] constant(0)
  %started = (s32[], f32[24,1024]) tuple(%start, %p)
  %loop = (s32[], f32[24,1024]) while(%started), condition=%condition, body=%body
  ROOT %result = f32[24,1024]{1,0} get-tuple-element(%loop), index=1
}
"""


def entry(*lines):
    return "\n".join(["HloModule jit_step", "", "ENTRY %main (p: bf16[512,512]) -> bf16[512,512] {", *lines, "}"])


def test_a_loop_counts_in_full_and_of_a_slice_the_slice():
    of_counter = 4 + 4 + 4  # two numbers are read and one is written
    of_layer = 4 * 1024 + 4 + 4 * 1024
    assert moved_bytes(PROGRAM) == 24 * (of_counter + of_layer)


def test_other_memory_spaces_are_free_and_an_asynchronous_copy_is_one():
    text = entry(
        "  %p = bf16[512,512]{1,0} parameter(0)",
        "  %begin = (bf16[512,512]{1,0:T(8,128)S(1)}, bf16[512,512]{1,0}, u32[]) copy-start(%p)",
        "  %end = bf16[512,512]{1,0:T(8,128)S(1)} copy-done(%begin)",
        "  %twice = bf16[512,512]{1,0:T(8,128)S(1)} add(%end, %end)",
        "  ROOT %out = bf16[512,512]{1,0} negate(%twice)",
    )
    assert moved_bytes(text) == 2 * 512 * 512 * 2  # read once at the start, written once at the end


def test_memory_that_is_set_aside_is_not_written():
    text = entry(
        '  %stack = bf16[24,512,512]{2,1,0} custom-call(), custom_call_target="AllocateBuffer"',
        "  %zero = s32[] constant(0)",
        "  ROOT %out = bf16[1,512,512]{2,1,0} dynamic-slice(%stack, %zero, %zero, %zero), "
        "dynamic_slice_sizes={1,512,512}",
    )
    assert moved_bytes(text) == 2 * 512 * 512 * 2 + 3 * 4  # the slice, read and written, and where it begins


def test_the_workspace_of_a_library_is_not_moved():
    text = entry(
        "  %p = bf16[512,512]{1,0} parameter(0)",
        "  %both = (bf16[512,512]{1,0}, s8[33554432]{0}) custom-call(%p, %p), "
        'custom_call_target="__cublas$lt$matmul", backend_config={}',
        "  ROOT %out = bf16[512,512]{1,0} get-tuple-element(%both), index=0",
    )
    assert moved_bytes(text) == 3 * 512 * 512 * 2


CHAIN = (
    """\
HloModule jit_step, num_partitions=4

%begin (part: bf16[64,512]) -> (bf16[64,512], bf16[256,512]) {
  %part = bf16[64,512]{1,0} parameter(0)
  %sent = bf16[256,512]{1,0} all-gather(%part), channel_id=23, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %begun = (bf16[64,512]{1,0}, bf16[256,512]{1,0}) custom-call(%sent), custom_call_target="AsyncCollectiveStart"
}

%meanwhile (part.1: bf16[64,512], whole: bf16[256,512], x: bf16[8,8]) -> (bf16[8,8], bf16[64,512], bf16[256,512]) {
  %x = bf16[8,8]{1,0} parameter(2)
  %doubled = bf16[8,8]{1,0} add(%x, %x)
  %part.1 = bf16[64,512]{1,0:S(1)} parameter(0)
  %whole = bf16[256,512]{1,0} parameter(1)
  %sent.1 = bf16[256,512]{1,0} all-gather(%part.1), channel_id=23, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %both = (%RESULTS) tuple(%doubled, %part.1, %whole, %sent.1)
}

ENTRY %main (p: bf16[64,512], q: bf16[8,8]) -> bf16[256,512] {
  %p = bf16[64,512]{1,0} parameter(0)
  %q = bf16[8,8]{1,0} parameter(1)
  %started = (%BEGUN) fusion(%p), kind=kCustom, output_to_operand_aliasing={{0}: (0, {})}, calls=%begin
  %one = bf16[64,512]{1,0:S(1)} get-tuple-element(%started), index=0
  %two = bf16[256,512]{1,0} get-tuple-element(%started), index=1
  %going = (%RESULTS) fusion(%one, %two, %q), kind=kOutput, %ALIASES, calls=%meanwhile, metadata={}
  ROOT %result = bf16[256,512]{1,0} get-tuple-element(%going), index=3
}
""".replace("%RESULTS", "bf16[8,8]{1,0}, bf16[64,512]{1,0:S(1)}, bf16[256,512]{1,0}, bf16[256,512]{1,0}")
    .replace("%BEGUN", "bf16[64,512]{1,0:S(1)}, bf16[256,512]{1,0}")
    .replace("%ALIASES", "output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {}), {3}: (1, {})}")
)


def test_what_is_gathered_while_something_else_is_computed_is_gathered_once():
    whole, part, other = 2 * 256 * 512, 2 * 64 * 512, 2 * 8 * 8
    assert moved_bytes(CHAIN) == part + whole + 2 * other
    (found,) = hlo.collectives(CHAIN)
    assert (found.kind, found.bytes, found.count) == ("all-gather", whole, 1)


def test_a_result_that_is_a_copy_of_an_operand_is_written():
    alone = CHAIN.replace("output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {}), {3}: (1, {})}, ", "")
    whole = 2 * 256 * 512
    assert moved_bytes(alone) == moved_bytes(CHAIN) + 3 * whole  # read once, written twice
