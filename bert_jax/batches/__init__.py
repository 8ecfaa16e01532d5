# SPDX-License-Identifier: Apache-2.0
"""How rows are laid into batches: how long a row is, how many there are, what is packed, which shapes are compiled.

Training asks `load` (a corpus) or `examples` (a task) for the batch of a step; whoever computes without training asks
`infer`. Below them are `order` (which rows), `pack` (which share a row), `shapes` (how large) and `make` (the arrays).
"""
