# SPDX-License-Identifier: Apache-2.0
"""The optimizer, the step, the loop, and the record of a run.

Start at `loop`; `run` opens a work directory for it, `report` writes its metrics.
"""
