# SPDX-License-Identifier: Apache-2.0
"""What is said of prepared text: passages, and a warning line with its figure for what is probably a mistake."""

import random
from pathlib import Path

import pytest

from bert_jax.data import pieces, prepare, summary
from bert_jax.data.prepare import PrepareOptions
from tests.data.test_prepare import WORDS


@pytest.fixture
def vocab(tmp_path) -> str:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *WORDS]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens) + "\n")
    return str(tmp_path / "vocab.txt")


@pytest.fixture
def output(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def text(tmp_path):
    return tmp_path / "text"


def sentences(rng: random.Random, count: int, words: list[str] = WORDS, most: int = 12) -> list[str]:
    return [" ".join(rng.choices(words, k=rng.randint(3, most))).capitalize() + "." for _ in range(count)]


def files_without_blank_lines(folder: Path, count: int = 6) -> str:
    """Writes files of some thousand sentences each, a line each, as those of BabyLM are, and returns their glob."""
    rng = random.Random(3)
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.txt").write_text("\n".join(sentences(rng, rng.randint(12000, 24000) // count)))
    return f"{folder}/*.txt"


def said(capsys, text: object, vocab: str, output: Path, num_workers: int = 1, **options) -> tuple[dict, list[str]]:
    """Returns the manifest of a data set, and the warnings."""
    chosen = PrepareOptions(**{"max_seq_length": 32, "duplicates": 1, **options})
    manifest = prepare.prepare(str(text), vocab, str(output), chosen, num_workers)
    return manifest, [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]


def held_out_share(manifest: dict) -> float:
    tokens = {name: split["tokens"] for name, split in manifest["splits"].items()}
    return tokens["heldout"] / sum(tokens.values())


@pytest.mark.parametrize(("count", "next_sentence"), [(6, "nsp"), (1, "none"), (2, "sop")])
def test_files_without_blank_lines_are_cut_into_passages(tmp_path, output, vocab, capsys, count, next_sentence):
    text = files_without_blank_lines(tmp_path / "text", count)
    options = {"holdout_rate": 0.05, "next_sentence": next_sentence}
    manifest, warnings = said(capsys, text, vocab, output, **options)
    assert 0.02 < held_out_share(manifest) < 0.1 and not warnings
    assert manifest["passage_tokens"] % pieces.PART_TOKENS == 0 < manifest["passage_tokens"]
    lines = [line for path in sorted((tmp_path / "text").iterdir()) for line in path.read_text().splitlines()]
    words = sum(len(line.split()) for line in lines)
    expected = {"sentences": len(lines), "text_bytes": sum(len(line) + 1 for line in lines), "words": words}
    expected["tokens"] = words + len(lines)
    assert {name: sum(split[name] for split in manifest["splits"].values()) for name in expected} == expected


def test_too_much_that_is_held_out_is_warned_of(tmp_path, output, vocab, capsys):
    text = [" ".join(sentences(random.Random(number), 40)) for number in range(8)]  # too short to be cut
    (tmp_path / "text").write_text("\n\n".join(text))
    manifest, (warning,) = said(capsys, tmp_path / "text", vocab, output)
    assert "passage_tokens" not in manifest
    assert f"{held_out_share(manifest):.1%} of tokens are held out" in warning and "--holdout_rate=0.01" in warning
    assert not said(capsys, tmp_path / "text", vocab, tmp_path / "other", holdout_rate=0.25)[1]
    assert not said(capsys, tmp_path / "text", vocab, tmp_path / "none", holdout_rate=0.0)[1]


@pytest.mark.parametrize("next_sentence", ["sop", "none"])
def test_documents_of_one_sentence_are_warned_of(text, output, vocab, capsys, next_sentence):
    text.write_text("\n\n".join(sentences(random.Random(0), 300)))
    options = {"holdout_rate": 0.1, "next_sentence": next_sentence}
    _, warnings = said(capsys, text, vocab, output, **options)
    assert len(warnings) == (next_sentence == "sop")
    for warning in warnings:
        assert "100.0% of the next sentences are random" in warning and "--next_sentence=none" in warning


@pytest.mark.parametrize(("share", "warned"), [(0.02, False), (0.5, True)])
def test_text_of_another_language_is_warned_of(text, output, vocab, capsys, share, warned):
    rng = random.Random(0)
    words = [rng.choice(WORDS) if rng.random() > share else f"zq{number}" for number in range(500)]
    text.write_text("\n\n".join("\n".join(sentences(rng, 20, words)) for _ in range(60)))
    manifest, warnings = said(capsys, text, vocab, output, holdout_rate=0.1)
    unknown = manifest["splits"]["train"]["unknown_share"]
    assert unknown == pytest.approx(share * 0.88, abs=0.06) and (unknown > summary.MANY_UNKNOWN) == warned
    assert [f"{unknown:.1%} of the tokens are [UNK]" in warning for warning in warnings] == [True] * warned


@pytest.mark.parametrize(("most", "next_sentence", "warned"), [(8, "nsp", 0), (200, "nsp", 1), (200, "none", 0)])
def test_text_that_is_in_no_row_is_counted_and_warned_of(text, output, vocab, capsys, most, next_sentence, warned):
    documents = ["\n".join(sentences(random.Random(number), 12, most=most)) for number in range(60)]
    text.write_text("\n\n".join(documents))
    options = {"holdout_rate": 0.1, "next_sentence": next_sentence}
    manifest, warnings = said(capsys, text, vocab, output, **options)
    dropped = manifest["splits"]["train"]["dropped_share"]
    assert (dropped > 0.4) == warned and (next_sentence != "none" or dropped == 0)
    assert sum(f"{dropped:.1%} of the tokens are in no row" in warning for warning in warnings) == warned


def test_lines_that_could_not_be_split_are_counted(text, output, vocab, capsys, monkeypatch):
    monkeypatch.setattr(pieces, "split_lines", lambda lines, language: (lines, sum("Bala" in line for line in lines)))
    documents = ["\n".join(sentences(random.Random(number), 12)) for number in range(60)]
    text.write_text("\n\n".join(documents))
    count = "\n".join(documents).count("Bala")
    manifest, warnings = said(capsys, text, vocab, output, holdout_rate=0.1)
    assert manifest["lines_not_split"] == count > 0
    assert warnings == [f"warning: the sentence splitter failed at {count} lines; each of them is one sentence"]
