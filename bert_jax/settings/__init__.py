# SPDX-License-Identifier: Apache-2.0
"""Every setting, its default and its rule.

`model`, `pretraining` and `finetuning` hold the settings, `phases` the parts of a run of several, `rules` how they are
read, written, checked and compared.
"""
