# SPDX-License-Identifier: Apache-2.0
"""Text to token ids: normalisation, tokenizers and vocabularies. Imports no JAX."""
