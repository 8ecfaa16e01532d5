# SPDX-License-Identifier: Apache-2.0
"""Command-line tools: thin, each over a function of the package."""
