# SPDX-License-Identifier: Apache-2.0
"""Google's 24 miniatures: the paper's recipe for L layers of width H, with H / 64 heads.

Command:   bert_jax train --config=miniatures:L4_H256 --config.data.path=DIR --workdir=DIR
           (L in 2 4 6 8 10 12, H in 128 256 512 768; tiny is L2_H128, mini L4_H256, small L4_H512, medium L8_H512)
Data:      prepare_corpus --max_seq_length=128 --duplicates=10, uncased, Google's vocabulary of 30,522
Hardware:  not published. By arithmetic (flops.py), 1,000,000 steps of 256 x 128 tokens are 0.2 to 18 x 10^18 FLOP:
           hours on one data-centre GPU for the smallest, days for the largest
Expect:    GLUE test scores 64.2 (tiny), 65.8 (mini), 71.2 (small), 73.5 (medium) after fine-tuning each task with the
           best of batch 8 to 128 and rate 3e-5 to 3e-4, 4 epochs. No such run has been made with bert_jax yet
Source:    Turc et al. 2019, arXiv 1908.08962; README of google-research/bert, "Smaller BERT Models": masks of single
           tokens, and the same regime as the original model, which appendix A.2 of the paper gives
"""

from ml_collections import ConfigDict

from bert_jax.errors import InputError
from bert_jax.settings.model import MINIATURES, model_of_run
from bert_jax.settings.pretraining import PretrainConfig
from bert_jax.settings.rules import to_dict


def get_config(size: str = "L4_H256") -> ConfigDict:
    """Returns the configuration of a miniature, by its layers and its width."""
    if size not in MINIATURES:
        raise InputError(f"there is no miniature {size!r}; they are {', '.join(MINIATURES)}")
    return ConfigDict(to_dict(PretrainConfig(model=model_of_run(size))))
