# SPDX-License-Identifier: Apache-2.0
"""The version of this package; `bert_jax.__version__`."""

__version__ = "0.3.0"
