# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning for any task, with the paper's settings.

Command:   bert_jax finetune --config=finetune:sst2 --config.init_checkpoint=PATH --config.data.path=DIR
           --workdir=DIR
           (tasks: cola sst2 mrpc stsb qqp mnli qnli rte wnli, squad1 squad2, choice, ner, and for your own tables
           classification and regression, embeddings for texts that belong together, and reranking)
Data:      GLUE directories, SQuAD files, SWAG as CSV, CoNLL column files; or tfds:glue/sst2 and similar names
Hardware:  one GPU or Cloud TPU: minutes to an hour (paper, section 4); a small model on a CPU as well
Expect:    BERT-Base, paper, Table 1 (test) and 2 (dev): CoLA 52.1, SST-2 93.5, MRPC 88.9, STS-B 85.8, QQP 71.2,
           MNLI 84.6/83.4, QNLI 90.5, RTE 66.4; SQuAD 1.1 80.8/88.5
Source:    Devlin et al. 2018, section 4 and appendix A.3: batch 32, 3 epochs, 5e-5, 4e-5, 3e-5 or 2e-5, dropout 0.1,
           warm-up over 10 % of the steps; google-research/bert run_squad.py for windows of 384 by strides of 128. Where
           the paper gives a range, this uses 5e-5 for SQuAD 1.1 and NER, and 2e-5 otherwise, which is safe for Base.
"""

from ml_collections import ConfigDict

from bert_jax.settings.finetuning import (
    FinetuneConfig,
    FinetuneDataConfig,
    FinetuneTrainConfig,
    TaskConfig,
)
from bert_jax.settings.pretraining import OptimizerConfig
from bert_jax.settings.rules import to_dict

# Task -> batch size, epochs, learning rate, tokens of a row, where they are not the usual 32, 3, 2e-5 and 128.
SETTINGS: dict[str, tuple[int, float, float, int]] = {
    "squad1": (32, 3.0, 5e-5, 384),
    "squad2": (48, 2.0, 5e-5, 384),
    "choice": (16, 3.0, 2e-5, 128),
    "ner": (32, 3.0, 5e-5, 128),
    "embeddings": (128, 3.0, 2e-5, 0),  # the length of an embedding model to start from, or 128
}


def get_config(task: str = "sst2") -> ConfigDict:
    """Returns the configuration for a task."""
    batch_size, num_epochs, learning_rate, max_seq_length = SETTINGS.get(task, (32, 3.0, 2e-5, 128))
    config = FinetuneConfig(
        task=TaskConfig(name=task, max_seq_length=max_seq_length),
        data=FinetuneDataConfig(
            batch_size=batch_size, pack="on" if task == "embeddings" else "auto"
        ),
        optimizer=OptimizerConfig(learning_rate=learning_rate, warmup_steps=0, warmup_rate=0.1),
        train=FinetuneTrainConfig(num_epochs=num_epochs),
    )
    return ConfigDict(to_dict(config))
