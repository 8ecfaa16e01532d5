# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other programs: one table of names, and for each format two functions.

`load_hf(path)` and `load_tf1(path)` return `names.Imported`. `save_hf` and `save_tf1(directory, config, params,
tokenizer, task, labels)` write a directory that must not exist, whole or not at all, and return lines that the user
should see.
"""
