# SPDX-License-Identifier: Apache-2.0
"""Ablations of BERT: Tables 5 and 8 of the paper, and later ones.

Command:   bert_jax train --config=ablations:no_nsp --config.data.path=DIR --workdir=DIR
           (for a size other than base, add it after a comma: no_nsp,tiny)
Data:      prepare_corpus --max_seq_length=128 --duplicates=10, with --next_sentence=sop for sop and otherwise nsp;
           for ablations without next sentence prediction, --next_sentence=none gives rows of running text
Hardware:  as configs/pretrain.py
Expect:    Table 5, BERT-Base, dev MNLI-m and SQuAD F1: bert 84.4 and 88.5, no_nsp 83.9 and 87.9, ltr 82.1 and 77.8.
           Table 8, dev MNLI of BERT-Base by what replaces the chosen tokens (mask / same / random):
           mask_80_10_10 84.2, mask_100_0_0 84.3, mask_80_0_20 84.1, mask_80_20_0 84.4, mask_0_20_80 83.7,
           mask_0_0_100 83.6. Whole words, BERT-Large: SQuAD 1.1 F1 92.8 instead of 90.9 (Google's README).
           Our own curves of tiny models, by held-out loss alone, are in docs/results
Source:    Devlin et al. 2018, section 5.1 and appendix C.2; README of google-research/bert, "Whole Word Masking";
           Lan et al. 2019 (sop, runs of words)
"""

import dataclasses

from ml_collections import ConfigDict

from bert_jax.errors import InputError
from bert_jax.settings.model import model_of_run
from bert_jax.settings.pretraining import MaskingConfig, PretrainConfig, TrainConfig
from bert_jax.settings.rules import to_dict

# mask / same / random, in percent; what is neither masked nor random stays the same.
TABLE_8 = ((80, 10, 10), (100, 0, 0), (80, 0, 20), (80, 20, 0), (0, 20, 80), (0, 0, 100))

MASKS = {
    "whole_word": MaskingConfig(whole_word=True),
    "ngram": MaskingConfig(whole_word=True, max_ngram=3),
    "static": MaskingConfig(static=True),  # the paper's masks, as many as there are duplicates
} | {
    f"mask_{mask}_{same}_{random}": MaskingConfig(mask_rate=mask / 100, random_rate=random / 100)
    for mask, same, random in TABLE_8
}
# sop is the data's choice: --next_sentence=sop. ltr reads from left to right and has no next sentence either.
ABLATIONS = ("bert", "no_nsp", "ltr", "sop", *MASKS)


def get_config(argument: str = "bert") -> ConfigDict:
    """Returns the configuration of an ablation, "name" or "name,size"."""
    name, _, size = argument.partition(",")
    if name not in ABLATIONS:
        raise InputError(f"there is no ablation {name!r}; they are {', '.join(ABLATIONS)}")
    config = PretrainConfig(
        model=dataclasses.replace(model_of_run(size or "base"), causal=name == "ltr"),
        masking=MASKS.get(name, MaskingConfig()),
        train=TrainConfig(next_sentence=name not in ("no_nsp", "ltr")),
    )
    return ConfigDict(to_dict(config))
