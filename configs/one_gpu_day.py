# SPDX-License-Identifier: Apache-2.0
"""BERT-Base in a day on one GPU: batches of 4,096, a high learning rate, more masks, no next sentence prediction.

Command:   bert_jax train --config=one_gpu_day --config.data.path=DIR --workdir=DIR
           (a batch is divided into as few microbatches as fit a GPU; --config.train.accumulate=32 sets their number)
Data:      prepare_corpus --max_seq_length=128 --next_sentence=none --duplicates=1 on ten gigabytes of text or more:
           102 M sequences are 13 billion tokens, and masks are drawn anew in each pass
Hardware:  one A100, H100 or H200; 7 x 10^10 FLOP per sequence (flops.py) are 7 x 10^18 in all, a day at 86 TFLOP/s:
           28 % of an A100's peak. This is an estimate; nobody has measured it yet
Expect:    MosaicBERT's own baseline, a BERT-Base with these settings on 286.72 M sequences of C4, reached GLUE 83.3 in
           11.5 hours on eight A100; this recipe uses 36 % as many sequences. Not run yet
Source:    Portes et al. 2023 (MosaicBERT): batch, rate, betas, 6 % warm-up, 30 % of the tokens masked, no next
           sentence; Izsak et al. 2021 (academic budget) for what a day can do. Their decay ends at 2 % of the rate,
           ours at 0
"""

import dataclasses

from ml_collections import ConfigDict

from bert_jax.settings.model import model_of_run
from bert_jax.settings.pretraining import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    MaskingConfig,
    OptimizerConfig,
    PretrainConfig,
    TrainConfig,
)
from bert_jax.settings.rules import to_dict


def get_config(size: str = "base") -> ConfigDict:
    """Returns the configuration for a model size."""
    config = PretrainConfig(
        model=dataclasses.replace(model_of_run(size), attention_dropout_rate=0.0),
        data=DataConfig(batch_size=4_096),
        masking=MaskingConfig(rate=0.3, max_predictions=40),
        optimizer=OptimizerConfig(
            learning_rate=5e-4,
            warmup_steps=1_500,
            beta2=0.98,
            weight_decay=0.02,
            bias_correction=True,
        ),
        train=TrainConfig(num_steps=25_000, next_sentence=False),
        eval=EvalConfig(every_steps=1_000),
        checkpoint=CheckpointConfig(every_steps=500),
    )
    return ConfigDict(to_dict(config))
