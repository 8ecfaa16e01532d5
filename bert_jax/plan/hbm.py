# SPDX-License-Identifier: Apache-2.0
"""Bytes that a compiled program moves to and from the memory of the device (HBM), read from its HLO text.

XLA's own figure, "bytes accessed", counts loops once, on-chip memory as HBM, and of a slice the whole array.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bert_jax.plan.hlo import (
    Array,
    Instruction,
    Module,
    called_computations,
    chain_of,
    counts_of,
    parse,
)

# They name arrays, or mark when something is ready.
_FREE = frozenset(
    "parameter constant get-tuple-element tuple bitcast after-all partition-id replica-id opt-barrier add-dependency "
    "while conditional call".split()
)
_SLICES = ("dynamic-slice", "slice", "gather")
# in a fusion: names, or numbers as they come
_SAME = ("bitcast", "reshape", "copy", "transpose", "convert")
_RESERVED = 'custom_call_target="AllocateBuffer"'  # memory that something else will write
_WORKSPACE = re.compile(r'custom_call_target="__cu(?:blas|dnn)')


class Moved(NamedTuple):
    """The bytes that one instruction reads from HBM and writes to it in one run of a program."""

    instruction: Instruction
    runs: int
    bytes: int  # of all runs


def moved_bytes(text: str | Module) -> int:
    """Returns the bytes that one run of a program reads from HBM and writes to it.

    Every instruction outside of fusions reads its operands once and writes its result once; of a slice only the slice
    counts, of an update in place only the update, and of an array in another memory space nothing. Loops count as
    often as they run. Reads that a cache answers count too.
    """
    return sum(moved.bytes for moved in moved_by_instructions(text))


def moved_by_instructions(text: str | Module) -> list[Moved]:
    """Returns what `moved_bytes` adds up: all instructions outside of fusions, but those that only name arrays."""
    module = parse(text) if isinstance(text, str) else text
    counts = counts_of(module)
    inside = _inside_of_fusions(module)
    found = []
    for name, instructions in module.computations.items():
        if name not in counts or name in inside:
            continue
        known = {op.name: op for op in instructions}
        for instruction in instructions:
            if instruction.opcode in _FREE:
                continue
            size = _moved(module, instruction, known)
            found.append(Moved(instruction, counts[name], counts[name] * size))
    return found


def _inside_of_fusions(module: Module) -> set[str]:
    """Returns the computations that run inside one instruction: those of fusions, reductions and the like."""
    inside: set[str] = set()
    for instructions in module.computations.values():
        for instruction in instructions:
            if instruction.opcode not in ("while", "conditional", "call"):
                inside |= set(called_computations(instruction))
    waiting = list(inside)
    while waiting:
        for instruction in module.computations.get(waiting.pop(), ()):
            more = set(called_computations(instruction)) - inside
            inside |= more
            waiting += more
    return inside


def _moved(module: Module, instruction: Instruction, known: Mapping[str, Instruction]) -> int:
    """Returns the bytes that an instruction outside of fusions moves."""
    opcode = instruction.opcode
    if opcode in _FREE or _RESERVED in instruction.attributes:
        return 0
    if opcode.endswith("-done"):  # its start has read; now it is written
        return _in_hbm(instruction.types)
    operands = [known[name] for name in instruction.operands if name in known]
    if opcode.endswith("-start"):
        ended = next((op for op in known.values() if instruction.name in op.operands), None)
        most = (
            sum(array.bytes for array in ended.types)
            if ended and "slice" in _wrapped(module, instruction)
            else 0
        )
        read = sum(_in_hbm(operand.types) for operand in operands if len(operand.types) == 1)
        return min(read, most) if most else read
    inner = _fused(module, instruction)
    read = sum(
        min(_in_hbm(operand.types), _read_of(module, instruction, inner, number))
        for number, operand in enumerate(operands)
        if len(operand.types) == 1
    )
    return read + _written(module, instruction, inner, known)


def _in_hbm(arrays: Sequence[Array]) -> int:
    return sum(array.bytes for array in arrays if array.space == 0)


def _wrapped(module: Module, instruction: Instruction) -> str:
    """Returns the opcodes that an asynchronous instruction stands for."""
    names = called_computations(instruction)
    inner = [op.opcode for name in names for op in module.computations.get(name, ())]
    return " ".join([instruction.opcode, *inner])


def _fused(module: Module, instruction: Instruction) -> list[Instruction]:
    """Returns the instructions of a fusion, [] of another instruction."""
    if instruction.opcode != "fusion":
        return []
    return [
        op for name in called_computations(instruction) for op in module.computations.get(name, ())
    ]


def _read_of(
    module: Module, instruction: Instruction, inner: list[Instruction], number: int
) -> int:
    """Returns an upper bound for the bytes of operand `number` that an instruction reads."""
    own = sum(array.bytes for array in instruction.types)
    if instruction.opcode in _SLICES and number == 0:
        return own
    if instruction.opcode in ("dynamic-update-slice", "scatter") and number == 0:
        return 0
    everything = 2**62
    if not inner:
        return everything
    parameter = next(
        (op for op in inner if op.opcode == "parameter" and op.operands[:1] == (str(number),)), None
    )
    if parameter is None:
        return everything
    if number in _in_place(instruction).values() and inner[-1].opcode == "tuple":
        inner = inner[:-1]  # an array that passes through to the result is not read for that
    return _read_inside(module, inner, parameter.name, everything)


def _read_inside(module: Module, inner: list[Instruction], name: str, everything: int) -> int:
    """Returns an upper bound for the bytes of an array that the instructions of a fusion read."""
    total = 0
    for user in (op for op in inner if name in op.operands):
        if user.opcode in _SLICES and user.operands[0] == name:
            total += sum(array.bytes for array in user.types)
        elif user.opcode in ("bitcast", "reshape"):
            total += _read_inside(module, inner, user.name, everything)
        elif user.opcode == "fusion":
            total += _read_of(module, user, _fused(module, user), user.operands.index(name))
        elif user.opcode != "dynamic-update-slice" or user.operands[0] != name:
            return everything
    return min(total, everything)


def _written(
    module: Module,
    instruction: Instruction,
    inner: list[Instruction],
    known: Mapping[str, Instruction],
) -> int:
    """Returns the bytes that an instruction writes."""
    if instruction.opcode == "dynamic-update-slice":
        return _update(instruction, known)
    results = list(instruction.types)
    if _WORKSPACE.search(instruction.attributes) and len(results) > 1:
        results = results[:-1]  # the last one is room for the library to work in
    if not inner:
        return _in_hbm(results)
    within = {op.name: op for op in inner}
    root = inner[-1]
    roots = (
        [within[name] for name in root.operands if name in within]
        if root.opcode == "tuple"
        else [root]
    )
    if len(roots) != len(results):
        return _in_hbm(results)
    in_place = _in_place(instruction)
    return sum(
        _in_hbm([array]) and min(array.bytes, _new_bytes(module, op, within))
        for number, (array, op) in enumerate(zip(results, roots))
        if number not in in_place or not (op.opcode == "parameter" or chain_of(op))
    )


def _in_place(instruction: Instruction) -> dict[int, int]:
    """Returns the results of a fusion that have the memory of an operand, and the numbers of these operands."""
    aliases = re.search(r"output_to_operand_aliasing=\{(.*?)\}, \w+=", instruction.attributes)
    pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}", aliases[1]) if aliases else []
    return {int(result or 0): int(operand) for result, operand in pairs}


def _new_bytes(module: Module, root: Instruction, within: Mapping[str, Instruction]) -> int:
    """Returns the bytes of a fusion's result that are new: those of the update, if it is an update in place."""
    while root.opcode in _SAME and root.operands[0] in within:
        root = within[root.operands[0]]
    if root.opcode == "dynamic-update-slice":
        return _update(root, within)
    inner = _fused(module, root)
    return (
        _new_bytes(module, inner[-1], {op.name: op for op in inner}) if inner else _everything(root)
    )


def _update(instruction: Instruction, known: Mapping[str, Instruction]) -> int:
    """Returns the bytes that an update in place writes; those of its result if that is in another memory space."""
    if not _in_hbm(instruction.types):
        return 0
    update = known.get(instruction.operands[1])
    return sum(array.bytes for array in update.types) if update else _everything(instruction)


def _everything(instruction: Instruction) -> int:
    return sum(array.bytes for array in instruction.types)
