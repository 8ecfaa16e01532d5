# SPDX-License-Identifier: Apache-2.0
"""What a training step moves to and from the memory of a GPU, by its cause, read from the compiled program.

    python -m benchmarks.gpu_causes --config=configs/pretrain.py:base --rows=128 --length=128
    python -m benchmarks.gpu_causes --program=base_128x128.hlo.gz

XLA's GPU compiler makes the program, on a machine without a GPU (pip install 'bert_jax[gpu-plan]'); or it is a file, as
`benchmarks.quarter` writes it on one. Kernels are launches of one step. Milliseconds are bytes at the data sheet's
bandwidth: a bound, which nothing measured. Nothing is timed here, so XLA takes its default algorithms.
"""

import dataclasses
import gzip
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags
from ml_collections import config_flags

from bert_jax.devices.chips import GPUS
from bert_jax.errors import InputError
from bert_jax.plan import hlo
from bert_jax.plan.hbm import moved_by_instructions
from bert_jax.settings.pretraining import PretrainConfig, ResolvedConfig
from bert_jax.settings.rules import from_dict
from bert_jax.storage.writing import write_json
from bert_jax.tools import cli, recipes

# Where an instruction comes from, by JAX's name of its result. The first pattern that is found says its cause.
_BACK = r"transpose\(.*"
CAUSES = (
    ("attention", r"/attention_(forward|queries|keys)/"),
    ("the vocabulary's logits and losses", r"/mlm/|^jvp\(\)/|^transpose\(jvp\(\)\)/"),
    ("embeddings and their tables", r"/embeddings/"),
    ("bits of dropout", r"(Dropout_\d+|vmap\(\))/(.*/)?(or|lt|and|xor|add|iota_2x32_shape)$"),
    ("dropout backward", rf"{_BACK}/Dropout_\d+/"),
    ("norm backward", rf"{_BACK}/norm/"),
    ("norm, residual and dropout forward", r"/norm/|/(attention|mlp)/(add|convert_element_type)$"),
    ("rotary positions", r"/attention/(.*/)?(concatenate|cos|sin)$"),
    ("gradients of biases of q, k, v", rf"{_BACK}/(query|key|value)/reduce_sum"),
    ("gradients of other biases", rf"{_BACK}/output/reduce_sum"),
    ("biases of q, k, v", r"/(query|key|value)/(add|slice)$"),
    ("copies, and sums of gradients", rf"{_BACK}(dot_general|reshape|attention/add_any)$|^$"),
    ("activation backward", rf"{_BACK}/mlp/"),
    ("activation forward", r"/mlp/"),
    ("casts of weights", r"/encoder/(.*/)?(slice|convert_element_type)$"),
    ("optimizer and norm of gradients", r"^(?!.*jvp)"),
)
_PRODUCT = re.compile(r'"__cublas\$|"__triton_(?:nested_)?gemm')


class Cause(NamedTuple):
    """What kernels of one cause do in a step."""

    name: str
    kernels: int
    bytes: int

    def bound_ms(self, bandwidth: float) -> float:
        return 1e3 * self.bytes / bandwidth


def cause_of(instruction: hlo.Instruction) -> str:
    """Returns why an instruction of a compiled step is there."""
    if instruction.opcode in ("dot", "convolution") or _PRODUCT.search(instruction.attributes):
        return "products"
    named = re.search(r'op_name="([^"]*)"', instruction.attributes)
    # the names of the function and of what only wraps others say nothing
    name = re.sub(r"jit\(\w+\)/|closed_call/", "", named[1] if named else "")
    return next((cause for cause, pattern in CAUSES if re.search(pattern, name)), "other")


def causes_of(text: str) -> list[Cause]:
    """Returns the causes of a compiled program, the one with the most bytes first."""
    kernels: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for moved in moved_by_instructions(text):
        name = cause_of(moved.instruction)
        kernels[name] = kernels.get(name, 0) + moved.runs
        sizes[name] = sizes.get(name, 0) + moved.bytes
    causes = [Cause(name, kernels[name], size) for name, size in sizes.items()]
    return sorted(causes, key=lambda cause: -cause.bytes)


def compile_step(config: PretrainConfig) -> str:
    """Returns the text of the training step that XLA compiles for --topology, with rows of --length."""
    # the GPU that is compiled for is not asked for, even where there is one
    os.environ["JAX_PLATFORMS"] = "cpu"
    from bert_jax.devices.sharding import make_mesh
    from bert_jax.plan import gpus, planner

    devices, _ = planner.planned_devices(flags.FLAGS.topology)
    resolved = ResolvedConfig(_as_measured(config))
    mesh = make_mesh(resolved.mesh, devices)
    lowered = planner.lower_train_step(resolved, mesh, planner.row_of(resolved, flags.FLAGS.length))
    options = gpus.OPTIONS | dict(_option(text) for text in flags.FLAGS.options)
    return lowered.compile(compiler_options=options).as_text() or ""


def _as_measured(config: PretrainConfig) -> PretrainConfig:
    """Returns the settings with which `benchmarks.quarter` measures a step."""
    model, masking = config.model, config.masking
    if flags.FLAGS.length >= 512 and masking.max_predictions:
        masking = dataclasses.replace(masking, max_predictions=80)  # the paper's second phase
    model = dataclasses.replace(
        model,
        compute_dtype="bfloat16",
        attention="fused",
        remat="none",
        vocab_size=model.vocab_size or 30_522,
    )
    data = dataclasses.replace(config.data, path="none", batch_size=flags.FLAGS.rows)
    train = dataclasses.replace(config.train, accumulate=1)
    return dataclasses.replace(config, model=model, masking=masking, data=data, train=train)


def _option(text: str) -> tuple[str, str | bool]:
    name, _, value = text.partition("=")
    return name, value == "true" if value in ("true", "false") else value


def table(causes: Iterable[Cause], bandwidth: float) -> list[str]:
    """Returns lines of Markdown, and a last one with the sums."""
    causes = list(causes)
    total = Cause("all", sum(one.kernels for one in causes), sum(one.bytes for one in causes))
    rows = [
        f"| {one.name} | {one.kernels} | {one.bytes / 1e9:.2f} | {one.bound_ms(bandwidth):.2f} |"
        for one in [*causes, total]
    ]
    return ["| cause | kernels | GB | bound, ms |", "|---|---|---|---|", *rows]


def define_flags() -> None:
    """Defines the flags of the command."""
    config_flags.DEFINE_config_file("config", None, recipes.HELP)
    flags.DEFINE_integer("rows", 128, "rows of a step", lower_bound=1)
    flags.DEFINE_integer("length", 128, "tokens of a row", lower_bound=8)
    flags.DEFINE_string("topology", "h200:1", "one GPU: h200:1, h100:1 or a100:1")
    flags.DEFINE_string("program", "", "read this HLO text, and compile nothing")
    flags.DEFINE_list("options", [], "of XLA, as name=value, in place of the package's own")
    flags.DEFINE_string("save", "", "a file for the program's text")
    flags.DEFINE_string("output", "", "a file for the figures, as JSON")


def main() -> None:
    """Prints the causes, and writes them."""
    if flags.FLAGS.program:
        opened = gzip.open if flags.FLAGS.program.endswith(".gz") else open
        with opened(flags.FLAGS.program, "rt", encoding="utf-8") as stream:
            text = stream.read()
    elif flags.FLAGS.config is None:
        raise InputError(
            "--config is needed, as in --config=configs/pretrain.py:base; or --program"
        )
    else:
        text = compile_step(from_dict(PretrainConfig, flags.FLAGS.config.to_dict()))
    if flags.FLAGS.save:
        Path(flags.FLAGS.save).write_text(text, encoding="utf-8")
    bandwidth = GPUS[flags.FLAGS.topology.partition(":")[0]].hbm_bandwidth
    causes = causes_of(text)
    print("\n".join(table(causes, bandwidth)))
    if flags.FLAGS.output:
        write_json(flags.FLAGS.output, record(causes, bandwidth))


def record(causes: list[Cause], bandwidth: float) -> dict[str, Any]:
    """Returns the figures, and what they are of."""
    from benchmarks import timing

    return timing.environment() | {
        "command": " ".join(["python -m benchmarks.gpu_causes", *sys.argv[1:]]),
        "causes": [
            one._asdict() | {"bound_ms": round(one.bound_ms(bandwidth), 4)} for one in causes
        ],
    }


if __name__ == "__main__":
    define_flags()
    cli.run(main)
