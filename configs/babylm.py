# SPDX-License-Identifier: Apache-2.0
"""The BabyLM challenge: a BERT from 10 million words, with revisions after 1 to 10 and 20 to 90 million words read.

Command:   bert_jax train --config=babylm:small --config.data.path=DIR --workdir=DIR --config.train.num_steps=N
           (N is ten times the rows of the data over 64: the rules allow ten passes)
           bert_jax train --config=babylm:small,strict ... for the track of 100 million words, which asks for revisions
           after 100 to 900 million words too
Data:      build_vocab --vocab_size=16384, and prepare_corpus --max_seq_length=128 --duplicates=1
           --next_sentence=none --holdout_rate=0.005 --pack=3, from the files as
           the challenge gives them (docs/howto/babylm.md)
Hardware:  mini reads 12,000 tokens a second on two cores of a Xeon with AMX, 10 M words in about 20 minutes
Expect:    no run on the challenge's own text has been made with bert_jax yet. On as many words of Wikipedia and novels
           docs/results has BLiMP and Zorro
Source:    Charpentier et al. 2025, arXiv 2502.10645 (the rules); the rate, the share of masks and no dropout are those
           of docs/results
"""

import dataclasses

from ml_collections import ConfigDict

from bert_jax.errors import InputError
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

MILLIONS = (*range(1, 11), *range(20, 100, 10))  # the model that is left at the end has read 100
STRICT = (*MILLIONS, *range(100, 1000, 100))  # or 1,000


def get_config(arguments: str = "small") -> ConfigDict:
    """Returns the configuration for a model size, with ",strict" for 100 million words."""
    size, comma, track = arguments.partition(",")
    if track != "strict" and comma:
        raise InputError(
            f"{track!r} is no track of babylm; use babylm:{size} or babylm:{size},strict"
        )
    millions = STRICT if comma else MILLIONS
    config = PretrainConfig(
        model=dataclasses.replace(
            model_of_run(size), hidden_dropout_rate=0.0, attention_dropout_rate=0.0
        ),
        data=DataConfig(batch_size=64),
        masking=MaskingConfig(rate=0.2),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=200, bias_correction=True),
        train=TrainConfig(num_steps=170_000 if comma else 17_000),
        eval=EvalConfig(every_steps=1_000),
        checkpoint=CheckpointConfig(keep_words=",".join(f"{count}e6" for count in millions)),
    )
    return ConfigDict(to_dict(config))
