# SPDX-License-Identifier: Apache-2.0
"""Search finds what a sort of all cosines finds, chunk by chunk; as a command too."""

import json

import numpy as np
import pytest
from builders import message, write
from commands import run_python

from bert_jax import sentence_embeddings
from bert_jax.data.vectors import unit
from bert_jax.inference import search as module
from bert_jax.inference.search import Hit, Passage, rerank_by_maxsim, rerank_by_pairs, search
from bert_jax.tools.lines import read_passages

ENDS = ("the", "gen", "mot", ".")
TEXTS = [f"{one} {two} {end}" for one in ("ban", "dar", "lin") for two in ("bes", "kut") for end in ENDS]


def test_chunks_change_nothing(bert, monkeypatch):
    queries, passages = ["ban bes", "lin kut the"], [Passage(n, text) for n, text in enumerate(TEXTS)]
    units = [unit(sentence_embeddings(bert, texts)) for texts in (queries, TEXTS)]
    cosines = units[0] @ units[1].T
    expected = np.argsort(-cosines.round(5), axis=1, kind="stable")[:, :7]
    for size in (100, 5):
        monkeypatch.setattr(module, "BLOCK", size)
        found = search(bert, queries, iter(passages), 7)
        assert [[hit.passage for hit in hits] for hits in found] == [[passages[n] for n in row] for row in expected]
        for hits, row, numbers in zip(found, cosines, expected):
            np.testing.assert_allclose([hit.score for hit in hits], row[numbers], atol=1e-5)
    assert len(search(bert, ["ban"], [Passage("a", "ban")], 5)[0]) == 1
    assert search(bert, ["ban"], []) == [[]]


def test_a_reranker_orders_what_was_found(monkeypatch):
    passages = [Passage(number, text) for number, text in enumerate(("bb", "a", "cccc", "ddd"))]
    asked = []

    def judge(pairs):
        asked.append(len(pairs))
        return [len(text) % 4 for _, text in pairs]  # cccc is worst

    monkeypatch.setattr(module, "JUDGED_AT_ONCE", 2)
    found = [[Hit(passage, 0.5) for passage in passages], [], [Hit(passages[2], 1.0), Hit(passages[1], 0.0)]]
    best = rerank_by_pairs(judge, ["x", "y", "z"], found, 3)
    assert [[hit.passage.id for hit in hits] for hits in best] == [[3, 0, 1], [], [1, 2]]
    assert [hit.score for hit in best[0]] == [3.0, 2.0, 1.0] and asked == [4, 2]


def test_candidates_are_encoded_a_part_of_the_queries_at_a_time(monkeypatch):
    asked = []

    def vectors_of(bert, texts, kind, *options):
        asked.append((kind, len(texts)))
        return [np.full((1, 1), len(text), np.float32) for text in texts]

    monkeypatch.setattr(module, "multi_vectors", vectors_of)
    monkeypatch.setattr(module, "JUDGED_AT_ONCE", 2)
    passages = [Passage(number, "x" * number) for number in (1, 2, 3)]
    found = [[Hit(passage, 0.0) for passage in passages], [Hit(passages[1], 0.0)], []]
    best = rerank_by_maxsim(None, ["aa", "b", "c"], found, 2)
    assert [[(hit.passage.id, hit.score) for hit in hits] for hits in best] == [[(3, 6.0), (2, 4.0)], [(2, 2.0)], []]
    assert asked == [("query", 2), ("passage", 3), ("query", 1), ("passage", 0)]


@pytest.mark.slow
def test_the_command(pretrained, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    command = ["-m", "bert_jax", "search", f"--checkpoint={pretrained}", f"--corpus={corpus}"]
    write(corpus, "".join(json.dumps({"_id": f"d{n}", "text": text}) + "\n" for n, text in enumerate(TEXTS)))
    lines = run_python([*command, "--k=2"], text=f"{TEXTS[3]}\n\n{TEXTS[5]}\n").stdout.splitlines()
    assert lines[0] == TEXTS[3] and lines[1].startswith("    1.0000  d3  ")
    assert lines[3:5] == ["", TEXTS[5]] and lines[5].startswith("    1.0000  d5  ")

    write(corpus, '{"_id": true, "text": "ban"}\n\n{"_id": [7], "text": "ban"}\nban\n')
    run_python([*command, f"--output={tmp_path}/found.jsonl"], text='\n{"_id": 5, "text": "ban"}')
    blank, found = map(json.loads, (tmp_path / "found.jsonl").read_text().splitlines())
    assert blank == {"id": "1", "query": "", "found": []} and (found["id"], found["query"]) == (5, "ban")
    assert found["found"][0] == {"id": True, "cosine": 1.0, "text": "ban"}
    assert [each["id"] for each in found["found"]] == [True, [7], "4"]
    write(corpus, 'a\n{"title": "b"}\n')
    done = run_python(command, text="a")
    assert done.returncode == 1 and 'corpus.jsonl:2: the object has no "text"' in done.stderr
    assert done.stderr.count("\n") == 1
    for wrong, said in (
        ([f"--corpus={tmp_path}"], "is a directory without manifest.json; give a file, or vectors that"),
        ([f"--output={tmp_path}/a.trec"], "the id 'q 1' has blanks, which part the columns of a run; write .jsonl"),
        (["--rerank=maxsim", f"--rerank_model={pretrained}"], f"--rerank_model={pretrained} has no vectors of tokens"),
        (["--rerank=pairs", f"--rerank_model={pretrained}"], "does not give a pair of texts a number"),
    ):
        done = run_python([*command, *wrong], text='{"_id": "q 1", "text": "ban"}')
        assert done.returncode == 1 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_lines_are_texts_or_objects_with_ids_as_given(tmp_path):
    lines = ["a", "", '{"_id": 7, "text": " b "}', '{"_id": null, "title": "t", "text": "c"}', "{d} e"]
    found = list(read_passages(write(tmp_path / "a.txt", "\n".join(lines))))
    assert found == [("1", "a"), ("2", ""), (7, "b"), ("4", "t c"), ("5", "{d} e")]
    rows = read_passages(write(tmp_path / "a.csv", '_id,text\nx,"a, b"\ny, \n'))
    assert list(rows) == [("x", "a, b"), ("y", "")]
    other = read_passages(write(tmp_path / "a.tsv", "7\tthe text\n8\tanother\n"))
    assert 'a.tsv:2: the row has no "text" that is a text; call the column of texts so' in message(list, other)
    damaged = read_passages(write(tmp_path / "a.jsonl", '{"_id": "1", "text": "a"\n'))
    assert "a.jsonl:1 is not JSON" in message(list, damaged)
