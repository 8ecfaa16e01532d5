# SPDX-License-Identifier: Apache-2.0
"""GLUE: its tasks and the files that its server takes."""
