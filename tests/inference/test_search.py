# SPDX-License-Identifier: Apache-2.0
"""Search finds what a sort of all cosines finds, chunk by chunk; as a command too."""

import json
import subprocess
import sys

import numpy as np
import pytest
from builders import make_pretrained

from bert_jax import InputError, load_pretrained, sentence_embeddings
from bert_jax.inference import search as module
from bert_jax.inference.search import Passage, search


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_pretrained(tmp_path_factory.mktemp("search"))


ENDS = ("the", "gen", "mot", ".")
TEXTS = [f"{one} {two} {end}" for one in ("ban", "dar", "lin") for two in ("bes", "kut") for end in ENDS]


def test_chunks_change_nothing(model, monkeypatch):
    bert, queries = load_pretrained(model), ["ban bes", "lin kut the"]
    unit = lambda a: a / np.linalg.norm(a, axis=1, keepdims=True)  # noqa: E731
    cosines = unit(sentence_embeddings(bert, queries)) @ unit(sentence_embeddings(bert, TEXTS)).T
    expected = np.argsort(-cosines.round(5), axis=1, kind="stable")[:, :7]
    for size in (100, 5, 1):
        monkeypatch.setattr(module, "BLOCK", size)
        found = search(bert, queries, (Passage(str(n), text) for n, text in enumerate(TEXTS)), 7)
        assert [[int(hit.passage.id) for hit in hits] for hits in found] == expected.tolist()
        for hits, row, numbers in zip(found, cosines, expected):
            np.testing.assert_allclose([hit.cosine for hit in hits], row[numbers], atol=1e-5)
            assert [hit.passage.text for hit in hits] == [TEXTS[number] for number in numbers]
    assert len(search(bert, ["ban"], [Passage("a", "ban")], 5)[0]) == 1
    for queries, corpus, problem in (([], ["x"], "there is nothing to search for"), (["a"], [], "the corpus is empty")):
        with pytest.raises(InputError, match=problem):
            search(bert, queries, corpus)


@pytest.mark.slow
def test_the_command(model, tmp_path):
    lines = [json.dumps({"_id": f"d{n}", "title": "", "text": text}) for n, text in enumerate(TEXTS)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "bert_jax", "search", f"--checkpoint={model}", f"--corpus={tmp_path}/corpus.jsonl"]
    done = subprocess.run([*command, "--k=2"], input=f"{TEXTS[3]}\n\n{TEXTS[5]}\n", text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == TEXTS[3] and lines[1].startswith("    1.0000  d3  ") and lines[4].startswith("    1.0000  d5  ")
    output = f"--output={tmp_path}/found.jsonl"
    done = subprocess.run([*command, output], input=TEXTS[3], text=True, capture_output=True)
    found = json.loads((tmp_path / "found.jsonl").read_text())
    assert found["query"] == TEXTS[3] and found["found"][0] == {"id": "d3", "cosine": 1.0, "text": TEXTS[3]}
    (tmp_path / "corpus.jsonl").write_text('a\n{"title": "b"}\n')
    done = subprocess.run(command, input="a", text=True, capture_output=True)
    assert done.returncode == 1 and 'corpus.jsonl:2: the object has no "text"' in done.stderr
    assert done.stderr.count("\n") == 1
