# SPDX-License-Identifier: Apache-2.0
"""What `predict` reads and says: lines as they come, blanks in batches of like lengths."""

import dataclasses
import io
import json
import threading

import jax
import numpy as np
import pytest
from builders import growing_bert, tiny_model
from hf_models import make_tokenizer, random_params

import bert_jax
from bert_jax.checkpoints.hf import save_hf
from bert_jax.errors import InputError
from bert_jax.inference.export import export_model
from bert_jax.inference.predict import Predictor, fill_masks, read_blanks, task_of
from bert_jax.model.heads.table import HEADS
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.settings.rules import to_dict
from bert_jax.storage.files import zstd
from bert_jax.tools.lines import batches_of, converse, open_lines, parse_line, read_input, told

TEXTS = ["the [MASK] .", "ban [MASK] [MASK] [MASK] bas dar dir ban ber bis .", "[MASK]", "ban ber bis dan [MASK] der ."]


def test_texts_together_have_the_guesses_of_each_alone(bert):
    together = fill_masks(bert, TEXTS, 3)
    assert [len(places) for places in together] == [1, 3, 1, 1]
    for text, places in list(zip(TEXTS, together))[1:3]:
        (alone,) = fill_masks(bert, [text], 3)
        for one, other in zip(places, alone, strict=True):
            np.testing.assert_allclose([each.probability for each in one], [each.probability for each in other], 1e-4)
            assert one[0].token == other[0].token


def test_blanks_that_cannot_be_read_are_named(bert):
    with pytest.raises(InputError, match=r"text 2 has no .MASK.: 'ban'"):
        fill_masks(bert, ["[MASK]", "ban"])
    with pytest.raises(InputError, match=r"in.txt:7 has 102 tokens .* there is room for 64; shorten or split it"):
        read_blanks(bert, "[MASK] " * 100, "in.txt:7", "refuse")
    with pytest.raises(InputError, match=r"in.txt:7 has no .MASK. in its first 64 tokens, all that"):
        read_blanks(bert, "ban " * 62 + "[MASK]", "in.txt:7")
    assert len(read_blanks(bert, "[MASK] " * 100, "in.txt:7").places) == 62
    assert fill_masks(bert, []) == []


def with_head(bert, task, part, num_outputs):
    """Returns a model with a head and no settings, as one of Hugging Face's."""
    head = {"kernel": np.zeros((32, num_outputs), np.float32), "bias": np.arange(num_outputs, dtype=np.float32)}
    return dataclasses.replace(bert, params=bert.params | {part: head}, task=task)


def test_a_model_for_choices_has_no_labels(bert):
    (found,) = Predictor(with_head(bert, "multiple_choice", "classifier", 1))(["the ban\tber\tbis"])
    assert found.probabilities == pytest.approx((0.5, 0.5))
    assert task_of(with_head(bert, "sequence_classification", "classifier", 2)).labels == ("LABEL_0", "LABEL_1")


def test_a_model_for_questions_may_have_few_positions(bert):
    task = task_of(with_head(bert, "question_answering", "span", 2))
    assert (task.config.max_seq_length, task.config.max_query_length) == (64, 32)
    long = dataclasses.replace(bert, config=dataclasses.replace(bert.config, max_positions=512))
    assert task_of(with_head(long, "question_answering", "span", 2)).config.max_query_length == 64


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a text", "a text"),
        ("one\ttwo\tthree", ["one", "two", "three"]),
        ('{"text": "x"}', {"text": "x"}),
        ('["one", "two"]', ["one", "two"]),
        ("[12]", "[12]"),
        ("[MASK] is not a list", "[MASK] is not a list"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_a_line_is_json_or_texts_with_tabs_between(line, expected):
    assert parse_line(line, "line 1", is_words=False) == expected
    assert parse_line("New\tYork", "line 1", is_words=True) == "New\tYork"  # a tab is a blank between words


@pytest.mark.parametrize("line", ['{"a":' * 100_000, '{"text": "\\ud800"}', '{"text": '])
def test_bad_json_is_one_line(line):
    with pytest.raises(InputError, match=r"^in:3 (is not JSON|holds half of a character)"):
        parse_line(line, "in:3", is_words=False)


def test_lines_of_bytes(tmp_path):
    """A mark of the byte order is not text, and a bad byte is found where it stands."""
    (tmp_path / "in.txt").write_bytes(b"\xef\xbb\xbfone\r\n\n  two \n" + b"x" * 9000 + b"\xff\n")
    with open_lines(str(tmp_path / "in.txt")) as stream:
        lines = read_input(stream, "in.txt")
        assert [next(lines) for _ in range(3)] == [("in.txt:1", "one"), ("in.txt:2", ""), ("in.txt:3", "two")]
        with pytest.raises(InputError, match=r"in.txt:4 is not UTF-8 .byte 0xff."):
            next(lines)
    with pytest.raises(InputError, match=r"in.txt has lines that end in CR alone, as on old Macs"):
        next(read_input(io.BytesIO(b"one\rtwo\r"), "in.txt"))
    with pytest.raises(InputError, match=r"standard input is UTF-16LE, not UTF-8; convert it with iconv"):
        next(read_input(io.BytesIO("one two\nthree\n".encode("utf-16-le")), "-"))
    assert [text for _, text in read_input(io.BytesIO(b"one\r"), "-")] == ["one"]
    with pytest.raises(InputError, match="cannot read"), open_lines(str(tmp_path / "none")):
        pass


def test_compressed_lines(tmp_path):
    """As the text of all other commands; a damaged file is named, after the lines before the damage."""
    content = zstd.compress(b"".join(b"%d one\n" % number for number in range(50_000)))
    (tmp_path / "in.txt").write_bytes(content)
    with open_lines(str(tmp_path / "in.txt")) as stream:
        assert list(read_input(stream, "in.txt"))[-1] == ("in.txt:50000", "49999 one")
    (tmp_path / "in.txt").write_bytes(content[:-9])
    with (
        pytest.raises(InputError, match=r"in.txt is damaged or another kind of file"),
        open_lines(str(tmp_path / "in.txt")) as stream,
    ):
        list(read_input(stream, "in.txt"))


def test_a_conversation_goes_on_after_a_line_that_cannot_be_read(bert, capsys):
    said = []
    lines = read_input(io.BytesIO(b"no blank\nthe [MASK] .\n"), "-")
    converse(lines, lambda line: said.append(read_blanks(bert, line[1], line[0]).text))
    assert "error: line 1 has no [MASK]" in capsys.readouterr().err and said == ["the [MASK] ."]


def test_rows_of_the_word_table_that_are_no_token_are_no_guess():
    bert = growing_bert(spare_rows=3)
    bert.params["mlm"]["output_bias"][bert.tokenizer.vocab_size :] = 100
    ((guesses,),) = fill_masks(bert, np.array(["the [MASK] ."]), num_guesses=100)
    assert len(guesses) == bert.tokenizer.vocab_size


def test_lines_of_a_pipe_are_answered_as_they_come(capsys):
    """A pause ends a batch; the next lines are not waited for, an error comes after the lines before it."""
    more = threading.Event()

    def slow():
        yield from "abc"
        assert more.wait(60)
        yield from "de"
        raise InputError("line 6 is wrong")

    batches = told(batches_of(slow(), 2, pause=0.05), "lines", seconds=0.0)
    assert [next(batches), next(batches)] == [["a", "b"], ["c"]]
    more.set()
    assert next(batches) == ["d", "e"]
    with pytest.raises(InputError, match="line 6 is wrong"):
        next(batches)
    assert "3 lines after" in capsys.readouterr().err
    assert list(batches_of(iter(range(5)), 2)) == [[0, 1], [2, 3], [4]]


def test_questions_may_have_no_answer_by_a_threshold(tmp_path):
    """A model of Hugging Face does not say whether it learnt SQuAD 2."""
    params = random_params(parts=HEADS["question_answering"].parts)
    save_hf(tmp_path / "hf", tiny_model(), params, make_tokenizer(203), "question_answering", ())
    asked = [{"id": 7, "question": "word1", "context": "word2 word3"}]
    (always,) = bert_jax.load_predictor(tmp_path / "hf")(asked)
    (never,) = bert_jax.load_predictor(tmp_path / "hf", null_threshold=-1e9)(asked)
    (still,) = bert_jax.load_predictor(tmp_path / "hf", null_threshold=1e9)(asked)
    assert always.text and always.null_odds is None
    assert never.text == "" and never.null_odds == still.null_odds and still.text == always.text
    classifier = random_params(parts=HEADS["sequence_classification"].parts)
    save_hf(tmp_path / "classes", tiny_model(), classifier, make_tokenizer(203), "sequence_classification", ())
    with pytest.raises(InputError, match=r"null_threshold 0\.0 must be a number, for a model that finds answers"):
        bert_jax.load_predictor(tmp_path / "classes", null_threshold=0.0)


def test_an_exported_model_says_which_jax_reads_it(bert, tmp_path):
    asks = with_head(bert, "question_answering", "span", 2)
    settings = to_dict(TaskConfig(name="squad2", max_seq_length=32, max_query_length=8, null_threshold=-1.5))
    export_model(dataclasses.replace(asks, task_settings=settings), tmp_path / "served", ("cpu",))
    readme = (tmp_path / "served" / "README.md").read_text()
    assert f"written by jax {jax.__version__} (calling convention" in readme
    assert "[CLS] text [SEP], or [CLS] text [SEP] text [SEP]" in readme and "`null_threshold`" in readme
    assert json.loads((tmp_path / "served" / "labels.json").read_text())["task_settings"]["null_threshold"] == -1.5
