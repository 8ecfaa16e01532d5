# SPDX-License-Identifier: Apache-2.0
"""The paper's pre-training for a model of any size: rows of one length or, with ",phases", of 128 tokens and then 512.

Command:   bert_jax train --config=pretrain:base --config.data.path=DIR --workdir=DIR
           (sizes: tiny mini small medium base large, and L2_H128 ... L12_H768 for the 24 miniatures)
           bert_jax train --config=pretrain:base,phases --config.data.path=DIR128
               --config.phase2.path=DIR512 --workdir=DIR
           or the second phase as a run of its own:
           bert_jax train --config=pretrain:base,phase=2 --config.data.path=DIR512 --workdir=DIR2
               --config.init_checkpoint=DIR
Data:      prepare_corpus --max_seq_length=128 --duplicates=10; for the second phase 512, with 80 predictions per row
Hardware:  BERT-Base took 4 days on 4 Cloud TPUs (16 chips), BERT-Large 4 days on 16 (64 chips)
Expect:    next sentence accuracy 97-98 %; held-out perplexity about 4 (Base), 3.2 (Large), Table 6
Source:    Devlin et al. 2018, appendix A.2: 256 sequences, 1,000,000 steps, 90 % of them at 128 tokens, Adam
           1e-4, warm-up 10,000 steps, linear decay, weight decay 0.01, dropout 0.1. The paper mentions no second
           warm-up, so one decay goes through both phases. As a run of its own, the second phase is the last 100,000
           steps of that decay, 1e-5 to 0, after 1,000 steps of warm-up, because Adam's moments start at zero; in
           that case, stop the first phase after step 900,000
"""

import dataclasses

from ml_collections import ConfigDict

from bert_jax.errors import InputError
from bert_jax.settings.model import model_size
from bert_jax.settings.pretraining import MaskingConfig, OptimizerConfig, Phase2Config, PretrainConfig, TrainConfig
from bert_jax.settings.rules import to_dict


def get_config(argument: str = "base") -> ConfigDict:
    """Returns the configuration for "SIZE" or "SIZE,phases" or "SIZE,phase=1" or "SIZE,phase=2"."""
    size, _, phase = argument.partition(",")
    if phase not in ("", "phases", "phase=1", "phase=2"):
        raise InputError(
            f"{phase!r} of {argument!r} is no phase; use {size},phase=1 or {size},phase=2, or {size},phases for both"
        )
    config = PretrainConfig(model=model_size(size))
    if phase == "phases":
        config = dataclasses.replace(
            config,
            train=TrainConfig(num_steps=900_000),
            phase2=Phase2Config(num_steps=100_000, max_predictions=80, schedule="continue"),
        )
    if phase == "phase=2":
        config = dataclasses.replace(
            config,
            masking=MaskingConfig(max_predictions=80),
            optimizer=OptimizerConfig(learning_rate=1e-5, warmup_steps=1_000),
            train=TrainConfig(num_steps=100_000),
        )
    return ConfigDict(to_dict(config))
