# SPDX-License-Identifier: Apache-2.0
"""FLOPs and collectives of a compiled program, read from its HLO text.

The text is that of `jax.stages.Compiled.as_text()`, the program of one device. Instructions in the body of a loop count
trip-count times; XLA's own cost analysis counts them once.
"""

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from bert_jax.model.attention_kernels import PRODUCTS_OF_KERNELS

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_NAME = r"%?([\w.\-]+)"
_HEADER = re.compile(rf"^(ENTRY )?{_NAME} \(.*\) -> .*\{{$")
_INSTRUCTION = re.compile(rf"^\s*(?:ROOT )?{_NAME} = (.*)$")
# "bf16[16,<=128]{1,0:T(8,128)S(1)}": dynamic sizes are bounds, and S says which memory.
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<= ]*)\](?:\{[^{}]*S\((\d+)\)[^{}]*\})?")
_CALLED = re.compile(rf"\b(?:calls|to_apply|body|true_computation|false_computation)={_NAME}")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_KERNEL = re.compile(r'custom_call_target="(?:__gpu\$xla\.gpu\.triton|triton_kernel_call\w*)"')
# Pallas kernels declare their FLOPs, or stand within a name that does.
_ESTIMATE = re.compile(r'(?:"cost_estimate":\s*\{"flops":\s*"|\bkernel_flops_)(\d+)')
# The start alone: "gemm" or "lt$matmul" follows, and "$f8" in float8.
_CUBLAS = re.compile(r'custom_call_target="__cublas\$')


class Array(NamedTuple):
    """The type of an array."""

    dtype: str
    shape: tuple[int, ...]
    space: int = 0  # of memory: 0 is HBM, others are on the chip or on the host

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * bits_of(self.dtype) // 8


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    opcode: str
    types: tuple[Array, ...]  # of the result, a tuple's parts in order
    operands: tuple[str, ...]
    attributes: str  # the text after the operands


class Module(NamedTuple):
    """A compiled program."""

    computations: dict[str, list[Instruction]]
    entry: str
    num_partitions: int


@dataclass(frozen=True)
class Collective:
    """Communication between devices."""

    kind: str  # one of COLLECTIVES
    dtypes: tuple[str, ...]  # sorted
    bytes: int  # payload of one run: the array to reduce, or the gathered array
    count: int  # runs per step
    group_size: int  # devices that take part together
    where: str  # the instruction's name


def bits_of(dtype: str) -> int:
    """Returns the size of one number of an HLO dtype such as "bf16", "pred" or "f8e4m3fn"; 0 for a token."""
    if dtype in ("pred", "token", "opaque"):
        return 8 * (dtype == "pred")
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) if digits else 0


def parse(text: str) -> Module:
    """Returns the computations of a module in HLO text."""
    computations: dict[str, list[Instruction]] = {}
    entry = ""
    current = None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        # "}}" ends what a kernel says about itself
        elif line.startswith("}") and not line.startswith("}}"):
            current = None
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.append(_instruction(match[1], match[2]))
        elif current:  # what a kernel says about itself may take lines of its own
            current[-1] = current[-1]._replace(attributes=current[-1].attributes + line)
    # in the module's first line, which the layouts of all parameters make long
    partitions = re.search(r"\bnum_partitions=(\d+)", text[:100_000])
    return Module(computations, entry, int(partitions[1]) if partitions else 1)


def _instruction(name: str, rest: str) -> Instruction:
    """Returns the instruction of that name; `rest` is "type opcode(operands), attributes"."""
    # a tuple's type has blanks in it
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    result, rest = rest[:end], rest[end:].lstrip()
    start = rest.index("(")
    stop = _closing(rest, start)
    # Operands have types before their names in some texts; a constant has its value there, without "%".
    operands = re.findall(r"%([\w.\-]+)", rest[start:stop]) or re.findall(
        r"[\w.\-]+", rest[start:stop]
    )
    return Instruction(
        name, rest[:start], tuple(arrays_of(result)), tuple(operands), rest[stop + 1 :]
    )


def _closing(text: str, start: int) -> int:
    """Returns the index at which the parenthesis that opens at `start` closes."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index
    return len(text)


def arrays_of(text: str) -> list[Array]:
    """Returns the arrays of a type in HLO text, in order."""
    return [
        Array(
            dtype,
            tuple(
                int(size.removeprefix("<=")) for size in sizes.replace(" ", "").split(",") if size
            ),
            int(space or 0),
        )
        for dtype, sizes, space in _ARRAY.findall(text)
    ]


def counts_of(module: Module) -> dict[str, int]:
    """Returns how often each computation runs in one run of the program; every branch of a conditional counts."""
    counts: dict[str, int] = {}

    def visit(name: str, times: int) -> None:
        counts[name] = counts.get(name, 0) + times
        for instruction in module.computations.get(name, ()):
            if instruction.opcode == "while":
                # not the condition, which runs once more and multiplies nothing
                body = re.search(rf"\bbody={_NAME}", instruction.attributes)
                assert body, f"{instruction.name} has no body"
                visit(body[1], times * trip_count(module, name, instruction))
                continue
            for other in called_computations(instruction):
                visit(other, times)

    visit(module.entry, 1)
    return counts


def called_computations(instruction: Instruction) -> list[str]:
    """Returns the computations that an instruction runs; not the condition of a loop."""
    if _KERNEL.search(instruction.attributes):  # the rest is in another language
        return []
    called = _CALLED.findall(instruction.attributes)
    for branches in _BRANCHES.findall(instruction.attributes):
        called += re.findall(r"[\w.\-]+", branches)
    return called


def trip_count(module: Module, caller: str, loop: Instruction) -> int:
    """Returns the trip count of a loop.

    It is the compiler's annotation if there is one. Else it follows from the loop's condition, "counter < constant"
    with a counter from 0, and the constant that the body adds: 1 in scans, more in loops that the compiler unrolled.

    Raises: ValueError if the loop is of another kind.
    """
    known = re.search(r'"known_trip_count":\s*\{"n":\s*"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    condition, body = (
        match[1] if (match := re.search(rf"\b{part}={_NAME}", loop.attributes)) else ""
        for part in ("condition", "body")
    )
    limits = []
    counters = []
    for name in _with_called(module, condition):
        for instruction in module.computations.get(name, ()):
            limits += _integers(instruction)
            # the part of the state that the condition looks at
            if instruction.opcode == "get-tuple-element" and name == condition:
                counters += [
                    int(index) for index in re.findall(r"\bindex=(\d+)", instruction.attributes)
                ]
    steps = _steps(module, body, counters[0]) if body and len(counters) == 1 else []
    if len(limits) != 1 or len(steps) != 1 or steps[0] < 1:
        raise ValueError(
            f"cannot tell how often the loop {loop.name} of {caller} runs; its limits are {limits}, its steps {steps}"
        )
    return math.ceil(limits[0] / steps[0])


def _integers(instruction: Instruction) -> list[int]:
    """Returns the value of an integer constant in a list; [] for other instructions."""
    if instruction.opcode != "constant" or instruction.types[0].dtype not in ("s32", "u32", "s64"):
        return []
    return [int(value) for value in instruction.operands if re.fullmatch(r"\d+", value)]


def _steps(module: Module, body: str, counter: int) -> list[int]:
    """Returns the constants that one run of a loop's body adds to part `counter` of the loop's state."""
    instructions = {instruction.name: instruction for instruction in module.computations[body]}
    parts = module.computations[body][-1].operands  # the last instruction is the root, a tuple
    # Backwards from the counter's new value to its old one: what is added may be within a fusion.
    constants = []
    names = list(parts[counter : counter + 1])
    while names:
        instruction = instructions.pop(names.pop(), None)
        if instruction is not None and instruction.opcode != "get-tuple-element":
            constants += _integers(instruction)
            names += instruction.operands
            for called in _CALLED.findall(instruction.attributes):
                constants += [
                    number
                    for inner in module.computations.get(called, ())
                    for number in _integers(inner)
                ]
    return constants


def _with_called(module: Module, name: str) -> list[str]:
    """Returns a computation and those it calls."""
    names = [name]
    for instruction in module.computations.get(name, ()):
        for other in _CALLED.findall(instruction.attributes):
            names += _with_called(module, other)
    return names


def flops(text: str | Module) -> int:
    """Returns the FLOPs of all matrix products of a compiled program, loops counted as often as they run.

    TPU compilers write products as convolutions too. Pallas kernels are not in the text; they count by their own cost
    estimates, those for GPUs by `attention_kernels`.
    """
    module = parse(text) if isinstance(text, str) else text
    total = 0
    for name, count in counts_of(module).items():
        types = {
            instruction.name: instruction.types for instruction in module.computations.get(name, ())
        }
        for instruction in module.computations.get(name, ()):
            arrays = [
                types[operand][0] for operand in instruction.operands[:2] if types.get(operand)
            ]
            total += count * _flops_of(instruction, arrays)
    return total


def _flops_of(instruction: Instruction, operands: list[Array]) -> int:
    """Returns the FLOPs of one run of an instruction, 0 unless it is a product or a kernel."""
    if instruction.opcode == "convolution":
        return _convolution_flops(operands[0], operands[1], instruction)
    if instruction.opcode == "dot" or _CUBLAS.search(instruction.attributes):
        contracted = math.prod(
            operands[0].shape[axis] for axis in _contracted_axes(instruction.attributes)
        )
        return 2 * math.prod(instruction.types[0].shape) * contracted
    if instruction.opcode != "custom-call":
        return 0
    # a kernel for TPUs, or a call that computes no product
    if not _KERNEL.search(instruction.attributes):
        estimate = _ESTIMATE.search(instruction.attributes)
        return int(estimate[1]) if estimate else 0
    name = re.search(r'\bname = "(\w+)"', instruction.attributes)
    rows, length, hidden = operands[0].shape  # of the query
    return (PRODUCTS_OF_KERNELS.get(name[1], 0) if name else 0) * 2 * rows * length**2 * hidden


def _contracted_axes(attributes: str) -> list[int]:
    """Returns the axes of its first operand that a dot sums over, or a call of cuBLAS, which writes them as JSON."""
    match = re.search(r"\blhs_contracting_dims=\{([\d,]*)\}", attributes)
    match = match or re.search(r'"lhs_contracting_dimensions":\s*\[([\d," ]*)\]', attributes)
    return [int(number) for number in re.findall(r"\d+", match[1])] if match else []


def _convolution_flops(lhs: Array, rhs: Array, convolution: Instruction) -> int:
    """Returns the FLOPs of a convolution.

    Only taps on elements of the input count: TPU compilers write batches of products as convolutions over dilated or
    padded inputs, in which most taps fall on padding.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes)
    assert labels, f"{convolution.name} has no dim_labels"
    out = convolution.types[0]
    window = re.search(r"window=\{([^}]*)\}", convolution.attributes)
    settings = dict(part.split("=") for part in window[1].split()) if window else {}
    spatial = [label for label in labels[3] if label.isdigit()]
    taps = 1
    for axis, label in enumerate(spatial):
        taps *= _taps(
            size=lhs.shape[labels[1].index(label)],
            kernel=rhs.shape[labels[2].index(label)],
            output=out.shape[labels[3].index(label)],
            stride=_setting(settings, "stride", axis, 1),
            low=_setting(settings, "pad", axis, 0),
            lhs_dilate=_setting(settings, "lhs_dilate", axis, 1),
            rhs_dilate=_setting(settings, "rhs_dilate", axis, 1),
        )
    # each output sums over the taps and over the kernel's input features ("i")
    batch = out.shape[labels[3].index("b")]
    features = out.shape[labels[3].index("f")]
    return 2 * taps * batch * features * rhs.shape[labels[2].index("i")]


def _setting(settings: dict[str, str], name: str, axis: int, default: int) -> int:
    """Returns one axis of a setting of a window, such as "2x3" or, of padding, "0_1x15_15"."""
    if name not in settings:
        return default
    return int(settings[name].split("x")[axis].partition("_")[0])


def _taps(
    size: int, kernel: int, output: int, stride: int, low: int, lhs_dilate: int, rhs_dilate: int
) -> int:
    """Returns the number of pairs of output and kernel positions that meet a number of the input, along one axis."""
    # Between the numbers of a dilated input are lhs_dilate - 1 zeros.
    end = (size - 1) * lhs_dilate
    count = 0
    for tap in range(kernel):
        first = tap * rhs_dilate - low
        positions = range(first, first + output * stride, stride)
        if lhs_dilate == 1:
            count += max(0, min(output, (end - first) // stride + 1) - max(0, -(first // stride)))
        else:
            count += sum(
                0 <= position <= end and position % lhs_dilate == 0 for position in positions
            )
    return count


def collectives(text: str | Module) -> list[Collective]:
    """Returns the communication of a compiled program; a pair of start and done is one, a chain of fusions too."""
    module = parse(text) if isinstance(text, str) else text
    merged: dict[str, Collective] = {}
    for name, count in counts_of(module).items():
        types = {
            instruction.name: instruction.types for instruction in module.computations.get(name, ())
        }
        for instruction in module.computations.get(name, ()):
            if (kind := instruction.opcode.removesuffix("-start")) not in COLLECTIVES:
                continue
            # What is sent: the operands. The result of a start is a tuple of operands, results and flags.
            arrays = [
                array for name in instruction.operands for array in types.get(name, ())
            ] or instruction.types
            group_size = _group_size(instruction.attributes, module.num_partitions)
            payload = sum(array.bytes for array in arrays) * (
                group_size if kind == "all-gather" else 1
            )
            # XLA combines small arrays of several dtypes into one
            dtypes = tuple(sorted({array.dtype for array in arrays}))
            where = chain_of(instruction) or f"{name}/{instruction.name}"
            merged.setdefault(
                where, Collective(kind, dtypes, payload, count, group_size, instruction.name)
            )
    return list(merged.values())


def chain_of(instruction: Instruction) -> str:
    """Returns the name of the chain of fusions in which libtpu sends and computes at once, "" if it is in none."""
    match = re.search(r'channel_id=(\d+).*chain_id="(\d+)"', instruction.attributes)
    return f"{match[1]}/{match[2]}" if match else ""


def _group_size(attributes: str, num_partitions: int) -> int:
    """Returns the number of devices that take part together, by `replica_groups` in any of its three spellings."""
    # [groups, size] of all devices in order; axes of a mesh; or each group as a list
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes)
    if iota:
        return int(iota[2])
    axes = re.search(r"replica_groups=mesh\[([^\]]*)\][^{,]*\{([^}]*)\}", attributes)
    if axes:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes[1]))
        return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", axes[2]))
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    return len(listed[1].split(",")) if listed else num_partitions
