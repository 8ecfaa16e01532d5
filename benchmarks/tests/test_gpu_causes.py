# SPDX-License-Identifier: Apache-2.0
"""Causes of what a GPU moves: from a program's text, and of a step that XLA's GPU compiler has made."""

import re
import subprocess
import sys

import pytest

from benchmarks import gpu_causes

PROGRAM = """\
HloModule jit_step

%summed (gradient: bf16[4,1024]) -> f32[1024] {
  %gradient = bf16[4,1024]{1,0} parameter(0)
  %wide = f32[4,1024]{1,0} convert(%gradient)
  %zero = f32[] constant(0)
  ROOT %sum = f32[1024]{0} reduce(%wide, %zero), dimensions={0}, to_apply=%add
}

ENTRY %main (p: bf16[4,1024], w: bf16[1024,1024]) -> f32[1024] {
  %p = bf16[4,1024]{1,0} parameter(0)
  %w = bf16[1024,1024]{1,0} parameter(1)
  %product = (bf16[4,1024]{1,0}, s8[1000]{0}) custom-call(%p, %w), custom_call_target="__cublas$lt$matmul", \
metadata={op_name="jit(whole_step)/transpose(jvp(Model))/encoder/layers/attention/query/dot_general"}
  %gradient.1 = bf16[4,1024]{1,0} get-tuple-element(%product), index=0
  ROOT %fusion = f32[1024]{0} fusion(%gradient.1), kind=kInput, calls=%summed, \
metadata={op_name="jit(whole_step)/transpose(jvp(Model))/encoder/layers/attention/query/reduce_sum"}
}
"""


def test_a_program_is_read_by_cause():
    """A product reads two arrays and writes one; what sums its columns reads that, and writes float32."""
    wide, narrow = 4 * 1024 * 2, 1024 * 4
    assert gpu_causes.causes_of(PROGRAM) == [
        ("products", 1, 2 * wide + 1024**2 * 2),
        ("gradients of biases of q, k, v", 1, wide + narrow),
    ]
    lines = gpu_causes.table(gpu_causes.causes_of(PROGRAM), bandwidth=1e9)
    assert lines[-1] == f"| all | 2 | 0.00 | {(3 * wide + narrow + 1024**2 * 2) / 1e6:.2f} |"


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("jit(whole_step)/jvp(Model)/mlm/RH,VH->RV/reduce", "the vocabulary's logits and losses"),
        ("jit(whole_step)/jvp()/reduce_max", "the vocabulary's logits and losses"),
        ("jit(whole_step)/jvp(Model)/encoder/layers/mlp/Dropout_0/or", "bits of dropout"),
        ("jit(whole_step)/transpose(jvp(Model))/encoder/layers/mlp/Dropout_0/mul", "dropout backward"),
        ("jit(whole_step)/transpose(jvp(Model))/encoder/layers/mlp/norm/reduce_sum", "norm backward"),
        ("jit(whole_step)/jvp(Model)/encoder/layers/mlp/add", "norm, residual and dropout forward"),
        ("jit(whole_step)/transpose(jvp(Model))/encoder/layers/mlp/intermediate/reduce_sum", "activation backward"),
        ("jit(whole_step)/jvp(Model)/encoder/closed_call/layers/mlp/mul", "activation forward"),
        ("jit(whole_step)/add", "optimizer and norm of gradients"),
    ],
)
def test_names_say_the_cause(name, cause):
    instruction = gpu_causes.hlo.Instruction("fusion", "fusion", (), (), f'metadata={{op_name="{name}"}}')
    assert gpu_causes.cause_of(instruction) == cause


@pytest.mark.gpu_aot
def test_a_step_is_compiled_and_read(repository):
    """BERT's mini: its layers have every cause that the table of the page has, and little is left over."""
    command = [sys.executable, "-m", "benchmarks.gpu_causes", "--config=configs/pretrain.py:mini", "--rows=32"]
    done = subprocess.run(command, cwd=repository, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    sizes = dict(re.findall(r"^\| (.+?) \| \d+ \| ([\d.]+) \|", done.stdout, re.M))
    assert set(sizes) >= {"products", "attention", "norm backward", "activation backward", "bits of dropout"}
    assert float(sizes.get("other", 0)) < 0.02 * float(sizes["all"])
