# SPDX-License-Identifier: Apache-2.0
"""Large batches: NVIDIA's LAMB recipe for BERT-Large, its first phase (90 % of the samples, 128 tokens).

Command:   python train.py --config=configs/lamb.py:large --config.data.path=DIR --workdir=DIR
           (train.accumulate divides the batch of 65,536 into microbatches: with 64 devices, 1,024 rows a device;
           choose so that a microbatch is a multiple of the devices and fits their memory)
Data:      prepare_corpus --max_seq_length=128 --duplicates=10
Hardware:  NVIDIA reports 580 sequences/s for one A100-80 and 4,591 for eight of them, so 461 M sequences take 28 hours
           of eight
Expect:    with its second phase (1,563 steps of 32,768 x 512 tokens at 4e-3), a final training loss of 1.2437 on
           Wikipedia alone, and SQuAD 1.1 F1 90.96. No such run has been made with bert_jax yet
Source:    You et al. 2019, arXiv 1904.00962; NVIDIA DeepLearningExamples, BERT for PyTorch, pretrain_config.sh:
           7,038 steps, rate 6e-3, warm-up 28.43 %, decay by the square root, bias correction, weight decay 0.01
           and no trust ratio for parameters without decay
"""

from ml_collections import ConfigDict

from bert_jax.config import DataConfig, OptimizerConfig, PretrainConfig, TrainConfig, model_size
from bert_jax.settings import to_dict


def get_config(size: str = "large") -> ConfigDict:
    """Returns the configuration for a model size."""
    config = PretrainConfig(
        model=model_size(size),
        data=DataConfig(batch_size=65_536),
        optimizer=OptimizerConfig(
            name="lamb", learning_rate=6e-3, warmup_steps=2_000, decay_power=0.5, bias_correction=True
        ),
        train=TrainConfig(num_steps=7_038, accumulate=64),
    )
    return ConfigDict(to_dict(config))
