# SPDX-License-Identifier: Apache-2.0
import json
import platform

from bert_jax.training.about import record_of_run
from bert_jax.version import __version__


def test_it_keeps_what_a_card_needs_and_leaves_the_shards():
    manifest = {
        "identity": {"input": "abc", "options": {"duplicates": 2}},
        "inputs": {"names": ["wiki.txt"]},
        "splits": {"train": {"rows": 3, "shards": [{"name": "x"}]}},
        "tokenizer": {"vocab_size": 167},
    }
    about = record_of_run([("wiki", manifest), ("empty", {})], "8 x TPU v5 lite")
    first, second = about["data"]
    assert first["splits"] == {"train": {"rows": 3}} and first["vocab_size"] == 167
    assert (first["name"], first["input"], first["inputs"]) == ("wiki", "abc", manifest["inputs"])
    assert second["name"] == "empty" and second["splits"] == {} and second["vocab_size"] == 0
    assert about["software"]["bert_jax"] == __version__ and about["software"]["python"] == platform.python_version()
    assert about["devices"] == "8 x TPU v5 lite" and json.loads(json.dumps(about)) == about
