# SPDX-License-Identifier: Apache-2.0
"""Documents go to splits and shards by the hash of their text."""

import numpy as np

from bert_jax.data import pieces, prepare
from bert_jax.data.prepare import PrepareOptions


def test_the_key_is_of_the_text_and_the_seed():
    keys = [pieces.document_key(lines, seed) for lines, seed in ((["a", "b"], 0), (["a b"], 0), (["a", "b"], 1))]
    assert len(set(keys)) == 3
    assert keys[0] == pieces.document_key(["a", "b"], 0) < 1 << 64


def test_shards_are_ranges_of_equally_many_documents_that_cover_all():
    documents = np.ones(1000, pieces.DOCUMENT)
    documents["key"] = np.random.default_rng(0).integers(0, 1 << 64, 1000, np.uint64)
    documents["key"][500:600] = documents["key"][:100]  # copies
    ranges = prepare.plan_ranges(documents, PrepareOptions(holdout_rate=0.1, shards=7))
    keys = documents["key"].astype(object)
    homes = [[shard for shard in ranges if shard.first <= key <= shard.last] for key in keys]
    assert all(len(home) == 1 for home in homes)
    sizes = [
        len({key for key in keys if shard.first <= key <= shard.last}) for shard in ranges if shard.split == "train"
    ]
    assert len(sizes) == 7 and sum(sizes) == 810 and max(sizes) - min(sizes) <= 1
    heldout, *_ = (shard for shard in ranges if shard.split == "heldout")
    assert heldout.last < min(shard.first for shard in ranges if shard.split == "train")
