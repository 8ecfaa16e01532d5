# SPDX-License-Identifier: Apache-2.0
"""SQuAD: reading, windows, answers and the official score."""
