# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning of the demo's model: which area of Python's library does a docstring describe? A step of `make demo`.

Command:   python finetune.py --config=configs/demo_finetune.py --workdir=runs/demo/finetune
           python finetune.py --config=configs/demo_finetune.py --workdir=runs/demo/scratch
           --config.init_checkpoint=random:runs/demo/pretrain
Data:      make_docs_task --output=runs/demo/areas
"""

from ml_collections import ConfigDict

from bert_jax.config import CheckpointConfig, EvalConfig, OptimizerConfig, ReportConfig
from bert_jax.finetune_config import (
    FinetuneConfig,
    FinetuneDataConfig,
    FinetuneModelConfig,
    FinetuneTrainConfig,
    SweepConfig,
    TaskConfig,
)
from bert_jax.settings import to_dict


def get_config() -> ConfigDict:
    """Returns the configuration of the demo's fine-tuning."""
    config = FinetuneConfig(
        task=TaskConfig(name="classification", max_seq_length=48, text_column="text", label_column="area"),
        model=FinetuneModelConfig(attention_dropout_rate=0.0),
        data=FinetuneDataConfig(source="runs/demo/areas", batch_size=16),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=0, warmup_rate=0.1, bias_correction=True),
        train=FinetuneTrainConfig(num_epochs=12.0),
        eval=EvalConfig(every_steps=46),
        checkpoint=CheckpointConfig(every_steps=46),
        report=ReportConfig(every_steps=46, tensorboard=False, progress=False),
        sweep=SweepConfig(seeds=3),
        init_checkpoint="runs/demo/pretrain",
    )
    return ConfigDict(to_dict(config))
