# SPDX-License-Identifier: Apache-2.0
"""Every setting, its default and its rule.

`model`, `pretraining` and `finetuning` define the settings. `phases` splits a run of two phases. `rules` reads, writes,
checks and compares settings.
"""
