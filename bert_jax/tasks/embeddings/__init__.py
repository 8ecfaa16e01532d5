# SPDX-License-Identifier: Apache-2.0
"""Embeddings of texts: examples in `read`, the task in `task`, exact search among vectors in `search`."""
