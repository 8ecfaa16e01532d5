# SPDX-License-Identifier: Apache-2.0
"""Search finds what a sort of all cosines finds, chunk by chunk; as a command too."""

import json

import numpy as np
import pytest
from commands import run_python

from bert_jax import InputError, load_pretrained, sentence_embeddings
from bert_jax.inference import search as module
from bert_jax.inference.search import Hit, Passage, rerank_by_pairs, search
from bert_jax.tools.lines import read_passages


@pytest.fixture(scope="module")
def model(pretrained):
    return pretrained


ENDS = ("the", "gen", "mot", ".")
TEXTS = [f"{one} {two} {end}" for one in ("ban", "dar", "lin") for two in ("bes", "kut") for end in ENDS]


def test_chunks_change_nothing(model, monkeypatch):
    bert, queries = load_pretrained(model), ["ban bes", "lin kut the"]
    unit = lambda a: a / np.linalg.norm(a, axis=1, keepdims=True)  # noqa: E731
    cosines = unit(sentence_embeddings(bert, queries)) @ unit(sentence_embeddings(bert, TEXTS)).T
    expected = np.argsort(-cosines.round(5), axis=1, kind="stable")[:, :7]
    for size in (100, 5):
        monkeypatch.setattr(module, "BLOCK", size)
        found = search(bert, queries, (Passage(str(n), text) for n, text in enumerate(TEXTS)), 7)
        assert [[int(hit.passage.id) for hit in hits] for hits in found] == expected.tolist()
        for hits, row, numbers in zip(found, cosines, expected):
            np.testing.assert_allclose([hit.score for hit in hits], row[numbers], atol=1e-5)
            assert [hit.passage.text for hit in hits] == [TEXTS[number] for number in numbers]
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


@pytest.mark.slow
def test_the_command(model, tmp_path):
    lines = [json.dumps({"_id": f"d{n}", "title": "", "text": text}) for n, text in enumerate(TEXTS)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    arguments = [
        "-m",
        "bert_jax",
        "search",
        f"--checkpoint={model}",
        f"--corpus={tmp_path}/corpus.jsonl",
    ]
    done = run_python([*arguments, "--k=2"], text=f"{TEXTS[3]}\n\n{TEXTS[5]}\n")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == TEXTS[3] and lines[1].startswith("    1.0000  d3  ")
    assert lines[3:5] == ["", TEXTS[5]] and lines[5].startswith("    1.0000  d5  ")
    output = f"--output={tmp_path}/found.jsonl"
    done = run_python([*arguments, output], text=TEXTS[3])
    found = json.loads((tmp_path / "found.jsonl").read_text())
    assert (found["id"], found["query"]) == ("1", TEXTS[3])
    assert found["found"][0] == {
        "id": "d3",
        "cosine": 1.0,
        "text": TEXTS[3],
    }
    (tmp_path / "corpus.jsonl").write_text('{"_id": true, "text": "ban"}\n\n{"_id": [7], "text": "ban"}\nban\n')
    done = run_python(arguments, text='{"_id": 5, "text": "ban"}')
    assert [line.split()[1] for line in done.stdout.splitlines()[1:]] == ["true", "[7]", "4"]
    done = run_python([*arguments, output], text='\n{"_id": 5, "text": "ban"}')
    blank, found = map(json.loads, (tmp_path / "found.jsonl").read_text().splitlines())
    assert blank == {"id": "1", "query": "", "found": []} and found["id"] == 5
    assert [each["id"] for each in found["found"]] == [True, [7], "4"]
    (tmp_path / "corpus.jsonl").write_text('a\n{"title": "b"}\n')
    done = run_python(arguments, text="a")
    assert done.returncode == 1 and 'corpus.jsonl:2: the object has no "text"' in done.stderr
    assert done.stderr.count("\n") == 1


def test_lines_are_texts_or_objects_with_ids_as_given(tmp_path):
    lines = [
        "a",
        "",
        '{"_id": 7, "text": " b "}',
        '{"_id": null, "title": "t", "text": "c"}',
        "{d} e",
        '{"_id": ["x"], "text": ""}',
    ]
    (tmp_path / "a.txt").write_text("\n".join(lines) + "\n")
    assert list(read_passages(str(tmp_path / "a.txt"))) == [
        ("1", "a"), ("2", ""), (7, "b"), ("4", "t c"), ("5", "{d} e"), (["x"], "")
    ]  # fmt: skip
    (tmp_path / "a.jsonl").write_text('{"_id": "1", "text": "a"\n')
    with pytest.raises(InputError, match=r"a.jsonl:1 is not JSON"):
        list(read_passages(str(tmp_path / "a.jsonl")))
