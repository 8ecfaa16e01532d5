# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning tasks: each a small file of examples, rows, decoding and official scores."""
