# SPDX-License-Identifier: Apache-2.0
"""The heads, each in one file: all that is asked of a head anywhere. `table.HEADS` lists them."""
