# SPDX-License-Identifier: Apache-2.0
"""Lets `python -m bert_jax COMMAND` be what `bert_jax COMMAND` is."""

import sys

from bert_jax.tools.main import main

if __name__ == "__main__":
    sys.exit(main())
