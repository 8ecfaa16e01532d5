# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other programs: one table of names, Hugging Face's format and Google's."""
