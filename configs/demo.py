# SPDX-License-Identifier: Apache-2.0
"""A tiny BERT on the documentation inside Python: the third step of `make demo`.

Command:   bert_jax train --config=demo --workdir=runs/demo/pretrain
Data:      demo_data.py, and prepare_corpus --input=text.txt --max_seq_length=64 --duplicates=5 --holdout_rate=0.05
Hardware:  2 CPU cores, about 5 minutes
Expect:    held-out MLM loss more than 1.2 nats below the unigram baseline
Source:    tuned for this corpus of 0.4 M tokens (docs/results). On a small corpus, a model stays long on the plateau of
           token frequencies. It leaves it within minutes with larger initial matrices, as a hidden size of 128 needs;
           30 % of the tokens masked, to learn more from each step; bias correction; and no dropout.
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


def get_config() -> ConfigDict:
    """Returns the configuration of the demo."""
    model = dataclasses.replace(
        model_of_run("tiny"),
        hidden_dropout_rate=0.0,
        attention_dropout_rate=0.0,
        initializer_stddev=0.08,
        unroll=2,
    )
    config = PretrainConfig(
        model=model,
        data=DataConfig(path="runs/demo/data", batch_size=32),
        masking=MaskingConfig(rate=0.3),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=200, bias_correction=True),
        train=TrainConfig(num_steps=2250),
        eval=EvalConfig(every_steps=250),
        checkpoint=CheckpointConfig(every_steps=750),
    )
    return ConfigDict(to_dict(config))
