# SPDX-License-Identifier: Apache-2.0
"""Pre-trains a BERT, as `bert_jax train` does: python train.py --config=configs/pretrain.py:base ..."""

import sys

from bert_jax.tools.main import launch

if __name__ == "__main__":
    launch("train", "train.py", sys.argv[1:])
