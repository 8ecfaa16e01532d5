# SPDX-License-Identifier: Apache-2.0
"""The paper's pre-training for a model of any size: rows of one length or, with ",phases", of 128 tokens and then 512.

Command:   bert_jax train --config=pretrain:base --config.data.path=DIR --workdir=DIR
           (sizes: tiny mini small medium base large, and L2_H128 ... L12_H768 for the 24 miniatures)
           bert_jax train --config=pretrain:base,phases --config.data.path=DIR128
               --config.phase2.path=DIR512 --workdir=DIR
           or the second phase as a run of its own:
           bert_jax train --config=pretrain:base,phase=2 --config.data.path=DIR512 --workdir=DIR2
               --config.init_checkpoint=DIR
           bert_jax train --config=pretrain:modern,base,phases --config.data.path=DIR1024
               --config.phase2.path=DIR8192 --workdir=DIR
           (ModernBERT's shape and schedule; sizes mini small base large; without ",phases" the first stage alone)
Data:      prepare_corpus --max_seq_length=128 --duplicates=10; for the second phase 512, with 80 predictions per row
Hardware:  BERT-Base took 4 days on 4 Cloud TPUs (16 chips), BERT-Large 4 days on 16 (64 chips)
Expect:    next sentence accuracy 97-98 %; held-out perplexity about 4 (Base), 3.2 (Large), Table 6
Source:    Devlin et al. 2018, appendix A.2: 256 sequences, 1,000,000 steps, 90 % of them at 128 tokens, Adam
           1e-4, warm-up 10,000 steps, linear decay, weight decay 0.01, dropout 0.1. The paper mentions no second
           warm-up, so one decay goes through both phases. As a run of its own, the second phase is the last 100,000
           steps of that decay, 1e-5 to 0, after 1,000 steps of warm-up, because Adam's moments start at zero; in
           that case, stop the first phase after step 900,000.
           modern: Warner et al. 2024, section 2.2 and appendix A; prepare_corpus --next_sentence=none at 1,024 and at
           8,192 tokens. As there: masks of 30 %, no next sentence, no dropout, StableAdamW with its rates and weight
           decay and no other clipping, a constant rate after warm-up that falls as 1 - sqrt in the last sixth of the
           second stage, rows of 8,192 with a lower rate. Not as there: batches do not grow; theta is 160,000 from the
           first step on; the sizes mini and small, and their steps, are ours
"""

import dataclasses
from typing import NamedTuple

from ml_collections import ConfigDict

from bert_jax.errors import InputError
from bert_jax.settings.model import model_of_run
from bert_jax.settings.pretraining import (
    DataConfig,
    MaskingConfig,
    OptimizerConfig,
    Phase2Config,
    PretrainConfig,
    TrainConfig,
)
from bert_jax.settings.rules import suggest, to_dict


class Modern(NamedTuple):
    """What the modern sizes differ in, beside their shapes."""

    learning_rate: float
    later_rate: float  # in rows of 8,192
    batch_size: int
    num_steps: int
    later_steps: int


MODERN = {
    "mini": Modern(1e-3, 4e-4, 256, 90_000, 9_000),
    "small": Modern(1e-3, 4e-4, 256, 90_000, 9_000),
    "base": Modern(8e-4, 3e-4, 4608, 364_000, 63_600),  # 1.72 T and 300 G tokens
    "large": Modern(5e-4, 5e-5, 4928, 340_800, 59_500),
}


def modern_config(size: str, phases: bool) -> PretrainConfig:
    """Returns ModernBERT's pre-training in rows of 1,024 tokens and, with `phases`, then of 8,192."""
    if size not in MODERN:
        raise InputError(
            f"there is no modern size {size!r}{suggest(size, MODERN)}; sizes: {', '.join(MODERN)}"
        )
    run = MODERN[size]
    later = Phase2Config(
        num_steps=run.later_steps,
        learning_rate=run.later_rate,
        batch_size=max(1, run.batch_size // 8),
        warmup_steps=0,
    )
    return PretrainConfig(
        model=model_of_run(f"modernbert-{size}"),
        data=DataConfig(batch_size=run.batch_size),
        masking=MaskingConfig(rate=0.3),
        optimizer=OptimizerConfig(
            name="stable_adamw",
            learning_rate=run.learning_rate,
            warmup_steps=0,
            warmup_rate=0.002,
            schedule="stable",
            decay_rate=1 / 6,
            beta2=0.98,
            weight_decay=1e-5 / run.learning_rate,  # theirs is decoupled from the rate
            clip_norm=0.0,
            bias_correction=True,
        ),
        train=TrainConfig(num_steps=run.num_steps, next_sentence=False),
        phase2=later if phases else Phase2Config(),
    )


def get_config(argument: str = "base") -> ConfigDict:
    """Returns the configuration for "SIZE" or "SIZE,phases" or "SIZE,phase=1" or "SIZE,phase=2".

    That of "modern", "modern,SIZE" or "modern,SIZE,phases" is ModernBERT's.
    """
    if argument.split(",")[0] == "modern":
        size, _, phases = argument.removeprefix("modern").removeprefix(",").partition(",")
        if phases not in ("", "phases"):
            raise InputError(
                f"{phases!r} of {argument!r} is unknown; use modern,{size} or modern,{size},phases"
            )
        return ConfigDict(to_dict(modern_config(size or "base", bool(phases))))
    size, _, phase = argument.partition(",")
    if phase not in ("", "phases", "phase=1", "phase=2"):
        raise InputError(
            f"{phase!r} of {argument!r} is not a phase; use {size},phase=1 or {size},phase=2, or {size},phases for both"
        )
    config = PretrainConfig(model=model_of_run(size))
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
