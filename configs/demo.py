# SPDX-License-Identifier: Apache-2.0
"""A tiny BERT on the documentation inside Python: `make demo`.

Command:   python train.py --config=configs/demo.py --config.data.path=runs/demo/data --workdir=runs/demo/pretrain
Data:      prepare_corpus --input=python-docs --max_seq_length=64 --duplicates=5 --holdout_rate=0.05
"""

import dataclasses

from ml_collections import ConfigDict

from bert_jax.config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    OptimizerConfig,
    PretrainConfig,
    TrainConfig,
    model_size,
    to_dict,
)


def get_config() -> ConfigDict:
    """Returns the configuration of the demo."""
    return ConfigDict(
        to_dict(
            PretrainConfig(
                model=dataclasses.replace(model_size("tiny"), hidden_dropout_rate=0.0, attention_dropout_rate=0.0),
                data=DataConfig(path="runs/demo/data", batch_size=32),
                optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=200),
                train=TrainConfig(num_steps=4000),
                eval=EvalConfig(every_steps=400),
                checkpoint=CheckpointConfig(every_steps=1000),
            )
        )
    )
