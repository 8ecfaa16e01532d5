# SPDX-License-Identifier: Apache-2.0
"""Data preparation and loading: documents to rows on disk to global batches. Only `pipeline` and `beam` import JAX."""
