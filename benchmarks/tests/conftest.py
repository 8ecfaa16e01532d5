# SPDX-License-Identifier: Apache-2.0
"""The fixtures and the eight CPU devices of `tests/`."""

from conftest import repository, same_ctrl_c, shared_data, toy_data  # noqa: F401
