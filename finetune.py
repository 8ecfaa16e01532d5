# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a BERT, as `bert_jax finetune` does: python finetune.py --config=configs/finetune.py:sst2 ..."""

import sys

from bert_jax.tools.main import launch

if __name__ == "__main__":
    launch("finetune", "finetune.py", sys.argv[1:])
