# SPDX-License-Identifier: Apache-2.0
"""Large batches: NVIDIA's LAMB recipe for BERT-Large, 65,536 rows of 128 tokens, then 32,768 of 512, in one run.

Command:   bert_jax train --config=lamb:large --config.data.path=DIR128 --config.phase2.path=DIR512
               --workdir=DIR
           (each batch is divided into microbatches that fit into the memory of a device. To run only the first
           phase: --config.phase2.num_steps=0)
Data:      prepare_corpus --max_seq_length=128 --duplicates=10, and the same with 512
Hardware:  NVIDIA reports, in float16 with AMP, 580 sequences/s of 128 tokens on one A100-80 and 4,591 on eight, and 210
           and 1,657 of 512 tokens: 461 M and 51 M sequences take 28 and 9 hours on eight. A step on eight takes 14 s in
           the first phase and 20 s in the second, so saving every 50 steps means once in about a quarter of an hour
Expect:    a final training loss of 1.2437 on Wikipedia alone, and SQuAD 1.1 F1 90.96. No such run has been made with
           bert_jax yet
Source:    You et al. 2019, arXiv 1904.00962; NVIDIA DeepLearningExamples, BERT for PyTorch, pretrain_config.sh:
           7,038 steps, rate 6e-3, warm-up 28.43 %, then 1,563 steps, rate 4e-3, warm-up 12.8 %; the schedule
           restarts, Adam's moments are kept; square-root decay, bias correction, weight decay 0.01 and no trust
           ratio for parameters without weight decay. bfloat16 replaces their float16
"""

from ml_collections import ConfigDict

from bert_jax.settings.model import model_of_run
from bert_jax.settings.pretraining import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    OptimizerConfig,
    Phase2Config,
    PretrainConfig,
    TrainConfig,
)
from bert_jax.settings.rules import to_dict


def get_config(size: str = "large") -> ConfigDict:
    """Returns the configuration for a model size."""
    config = PretrainConfig(
        model=model_of_run(size),
        data=DataConfig(batch_size=65_536),
        optimizer=OptimizerConfig(
            name="lamb",
            learning_rate=6e-3,
            warmup_steps=0,
            warmup_rate=0.2843,
            decay_power=0.5,
            bias_correction=True,
        ),
        train=TrainConfig(num_steps=7_038),
        phase2=Phase2Config(
            num_steps=1_563,
            batch_size=32_768,
            max_predictions=80,
            learning_rate=4e-3,
            warmup_rate=0.128,
        ),
        eval=EvalConfig(every_steps=500),
        checkpoint=CheckpointConfig(every_steps=50),
    )
    return ConfigDict(to_dict(config))
