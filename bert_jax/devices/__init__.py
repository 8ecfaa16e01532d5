# SPDX-License-Identifier: Apache-2.0
"""Devices and the processes that drive them.

Start at `sharding`: the mesh, and which axis of it divides which parameter. `job` is what several processes agree on.
"""
