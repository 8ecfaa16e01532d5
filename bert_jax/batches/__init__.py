# SPDX-License-Identifier: Apache-2.0
"""How rows are laid into batches: how long a row is, how many there are, what is packed, which shapes are compiled.

Training asks `load` (a corpus; `stream` reads one that is larger than the disk) or `examples` (a task) for the batch of
a step. Whoever computes without training asks `infer`. Below them are `order` (which rows), `pack` (which share a row),
`shapes` (how large) and `make` (the arrays).
"""
