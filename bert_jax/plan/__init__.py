# SPDX-License-Identifier: Apache-2.0
"""What compilers say of a training step: memory, FLOPs, bytes and traffic, before it runs anywhere.

Start at `planner`. `hlo` and `hbm` read compiled programs; `search` compares settings.
"""
