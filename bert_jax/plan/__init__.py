# SPDX-License-Identifier: Apache-2.0
"""How much memory, time and traffic a run will take, before it starts.

Start at `planner`. `hlo` reads compiled programs; `roofline` is arithmetic, as `memory` and `flops` of training are.
"""
