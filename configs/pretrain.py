# SPDX-License-Identifier: Apache-2.0
"""The paper's pre-training, first phase, for a model of any size.

Command:   python train.py --config=configs/pretrain.py:base --config.data.path=DIR --workdir=DIR
           (sizes: tiny mini small medium base large, and L2_H128 ... L12_H768 for the 24 miniatures)
Data:      prepare_corpus --max_seq_length=128 --duplicates=10
Hardware:  BERT-Base took 4 days on 4 Cloud TPUs (16 chips), BERT-Large 4 days on 16 (64 chips)
Expect:    next sentence accuracy 97-98 %; held-out perplexity about 4 (Base), 3.2 (Large), Table 6
Source:    Devlin et al. 2018, appendix A.2: 256 sequences, 1,000,000 steps, 90 % of them at 128 tokens, Adam
           1e-4, warm-up 10,000 steps, linear decay, weight decay 0.01, dropout 0.1
"""

from ml_collections import ConfigDict

from bert_jax.config import PretrainConfig, model_size
from bert_jax.settings import to_dict


def get_config(size: str = "base") -> ConfigDict:
    """Returns the configuration for a model size."""
    return ConfigDict(to_dict(PretrainConfig(model=model_size(size))))
