# SPDX-License-Identifier: Apache-2.0
"""Documents to rows on disk to global batches. Only `pipeline` and `beam` may import JAX."""
