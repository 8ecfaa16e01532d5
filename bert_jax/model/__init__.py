# SPDX-License-Identifier: Apache-2.0
"""The encoder, its heads and the objective: the only home of Flax."""
