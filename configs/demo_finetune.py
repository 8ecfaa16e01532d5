# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning of the demo's model: which area of Python's library does a docstring describe? A step of `make demo`.

Command:   bert_jax finetune --config=demo_finetune --workdir=runs/demo/finetune
           bert_jax finetune --config=demo_finetune --workdir=runs/demo/scratch
           --config.init_checkpoint=random:runs/demo/pretrain
Data:      demo_data.py --output=runs/demo, in areas/: 366 docstrings to train on, 288 of other modules to evaluate on.
           Pre-training has read most of these modules too, without their areas.
Hardware:  2 CPU cores, estimated 2 to 3 minutes for the two commands; two seeds each
Expect:    accuracy of about 0.42 after pre-training, 0.30 from scratch, 0.125 for a constant answer
Source:    tuned for few labels. Best dev accuracy in 12 epochs, one run each: from scratch 0.306 with 1e-3, 0.292 with
           3e-3; after two thirds of the pre-training 0.361 with 1e-3, 0.351 with 4e-4. So both use 1e-3. Training from
           scratch is still improving at the end: fewer epochs would favor pre-training.
"""

from ml_collections import ConfigDict

from bert_jax.settings.finetuning import (
    FinetuneConfig,
    FinetuneDataConfig,
    FinetuneModelConfig,
    FinetuneTrainConfig,
    SweepConfig,
    TaskConfig,
)
from bert_jax.settings.pretraining import (
    CheckpointConfig,
    EvalConfig,
    OptimizerConfig,
    ReportConfig,
)
from bert_jax.settings.rules import to_dict


def get_config() -> ConfigDict:
    """Returns the configuration of the demo's fine-tuning."""
    config = FinetuneConfig(
        task=TaskConfig(
            name="classification", max_seq_length=48, text_column="text", label_column="area"
        ),
        model=FinetuneModelConfig(attention_dropout_rate=0.0),
        data=FinetuneDataConfig(source="runs/demo/areas", batch_size=16),
        optimizer=OptimizerConfig(
            learning_rate=1e-3, warmup_steps=0, warmup_rate=0.1, bias_correction=True
        ),
        train=FinetuneTrainConfig(num_epochs=12.0),
        eval=EvalConfig(every_steps=46),
        checkpoint=CheckpointConfig(every_steps=46),
        report=ReportConfig(every_steps=46, tensorboard=False, progress=False),
        sweep=SweepConfig(seeds=2),
        init_checkpoint="runs/demo/pretrain",
    )
    return ConfigDict(to_dict(config))
