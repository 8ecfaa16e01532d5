# SPDX-License-Identifier: Apache-2.0
"""A small BERT in an afternoon on Colab's TPU: four layers of width 512, bfloat16, 25.6 M sequences.

Command:   bert_jax train --config=colab_tpu --config.data.path=DIR --workdir=DIR
           (with --workdir on a mounted drive, the same command resumes the run after Colab disconnects)
Data:      prepare_corpus --max_seq_length=128 --duplicates=5, of a gigabyte of text or more
Hardware:  one TPU v5e or v6e chip, or a v2-8; all devices are used, and 256 rows divide over 1, 2, 4 or 8
Hours:     about 1.2 x 10^10 FLOP per sequence (flops.py), so 3 x 10^17 in all: 1 hour at 40 % of a v5e's 197 TFLOP/s
           if two cores can feed it. This is an estimate; nobody has measured it yet
Expect:    held-out loss below that of Google's L4_H512 after the same number of sequences; not run yet
Source:    the shape is Google's BERT-Small (Turc et al. 2019); rate, warm-up and betas follow MosaicBERT
           (Portes et al. 2023), without dropout because no sequence is seen often
"""

import dataclasses

from ml_collections import ConfigDict

from bert_jax.settings.model import model_of_run
from bert_jax.settings.pretraining import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    OptimizerConfig,
    PretrainConfig,
    TrainConfig,
)
from bert_jax.settings.rules import to_dict


def get_config(size: str = "small") -> ConfigDict:
    """Returns the configuration for a model size."""
    model = dataclasses.replace(
        model_of_run(size),
        hidden_dropout_rate=0.0,
        attention_dropout_rate=0.0,
    )
    config = PretrainConfig(
        model=model,
        data=DataConfig(batch_size=256),
        optimizer=OptimizerConfig(
            learning_rate=5e-4, warmup_steps=6_000, beta2=0.98, bias_correction=True
        ),
        train=TrainConfig(num_steps=100_000),
        eval=EvalConfig(every_steps=5_000),
        checkpoint=CheckpointConfig(every_steps=2_500),
    )
    return ConfigDict(to_dict(config))
