# SPDX-License-Identifier: Apache-2.0
"""Kernels for accelerators. Each computes what plain code computes, which stays, and which it is tested against."""
