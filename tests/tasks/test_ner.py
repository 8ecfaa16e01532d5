# SPDX-License-Identifier: Apache-2.0
"""Named entities: schemes of tags, files in columns, rows with one place for each word, entities, scores."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from builders import message, write
from described import write_described

from bert_jax import load_tokenizer
from bert_jax.errors import InputError
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks import ner
from bert_jax.tasks.ner import FoundEntity, NerExample, NerTask, Tagged
from bert_jax.tasks.ner_read import read_sentences
from bert_jax.tasks.tagging import Entity, entities, read_conll, scheme_of, score_files, score_tags, to_tags

LABELS = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
CONLL = "-DOCSTART- -X- -X- O\n\nAda NNP B-NP B-PER\nLovelace NNP I-NP I-PER\n\nparis NN O B-LOC\n"


def task(labels=(), **settings):
    return NerTask(TaskConfig(name="ner", **settings), labels)


@pytest.mark.parametrize("kind", ["roberta", "modernbert", "xlmr", "words"])
def test_words_have_the_tokens_that_transformers_gives_them(tmp_path, kind):
    """A list of words: each as the file says, with a blank before it or without. A text: the text's own tokens."""
    found = load_tokenizer(write_described(tmp_path, kind))
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    words, text = ["low", "walker", ".", "The", "new"], "The low walkers (new), isn't  it."
    example = task(LABELS).parse(text, "input 1")
    for mine in (found, found.with_blanks()):
        listed, running = task(LABELS).make_rows([NerExample(words), example], mine, False).rows
        if mine is found:
            assert listed.token_ids.tolist() == library.encode(words, is_pretokenized=True).ids
            assert running.token_ids.tolist() == library.encode(text).ids
        assert listed.token_ids[1:-1].tolist() == [index for word in words for index in mine.encode(word)]
        assert running.token_ids[1:-1].tolist() == mine.encode(text)
        tokens = mine.tokens(running.token_ids[running.detail.positions])
        parts = [token.strip("Ġ▁").lower() for token in tokens]
        for word, part in zip(running.detail.words, parts, strict=True):
            name = example.words[word].lower()
            assert kind == "words" or part in ("<unk>", "") or name.startswith(part) or part.startswith(name)


# Tags


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O B-X I-X O", [("X", 1, 3)]),
        ("I-X I-X B-X I-X", [("X", 0, 2), ("X", 2, 4)]),  # IOB1
        ("B-X B-X I-Y", [("X", 0, 1), ("X", 1, 2), ("Y", 2, 3)]),
        ("B-X I-X E-X S-X S-X", [("X", 0, 3), ("X", 3, 4), ("X", 4, 5)]),  # BIOES
        ("B-X L-X U-X I-X", [("X", 0, 2), ("X", 2, 3), ("X", 3, 4)]),  # BILOU
        ("O I-X O E-X E-X", [("X", 1, 2), ("X", 3, 4), ("X", 4, 5)]),  # malformed
        ("B-a-b I-a-b I-a", [("a-b", 0, 2), ("a", 2, 3)]),
        ("O", []),
        ("", []),
    ],
)
def test_entities_are_those_of_conlleval(tags, expected):
    assert entities(tags.split()) == [Entity(*each) for each in expected]


def test_schemes_are_turned_into_each_other():
    found = [Entity("X", 0, 1), Entity("Y", 1, 4), Entity("Y", 4, 6)]
    expected = {
        "IOB2": "B-X B-Y I-Y I-Y B-Y I-Y O",
        "BIOES": "S-X B-Y I-Y E-Y B-Y E-Y O",
        "BILOU": "U-X B-Y I-Y L-Y B-Y L-Y O",
    }
    for scheme, tags in expected.items():
        assert to_tags(found, 7, scheme) == tags.split() and entities(tags.split()) == found


def test_scores():
    truth = ["B-X I-X O B-Y".split(), "O O".split()]
    said = ["B-X I-X O B-X".split(), "O I-Y".split()]
    found = score_tags(truth, said)
    expected = {"precision": 1 / 3, "recall": 1 / 2, "f1": 2 / 5, "accuracy": 4 / 6, "f1_X": 2 / 3, "f1_Y": 0.0}
    assert found == pytest.approx(expected)
    assert score_tags([["O"]], [["O"]]) == {"f1": 0.0, "precision": 0.0, "recall": 0.0, "accuracy": 1.0}
    assert score_tags([], [])["accuracy"] == 0.0


def test_the_accuracy_is_of_tags_as_they_are_written(tmp_path):
    # conlleval.pl and seqeval 1.2.2 give 0.75 and F1 1.0: the same entity, begun with I- in one file
    truth, said = ["I-X O B-Y I-Y".split()], ["B-X O B-Y I-Y".split()]
    assert score_tags(truth, said)["accuracy"] == 0.75 and score_tags(truth, said)["f1"] == 1.0
    examples = [NerExample(list("abcd"), truth[0])]
    assert task(LABELS).score(examples, [Tagged(list("abcd"), said[0], [])])["accuracy"] == 1.0  # of a model: in IOB2


# Files


def test_columns_documents_and_blanks(tmp_path):
    found = read_conll(write(tmp_path / "a.conll", CONLL + "\t\n \n-DOCSTART- -X- -X- O\n\nx X O O"))
    assert [each.words for each in found] == [["Ada", "Lovelace"], ["paris"], ["x"]]
    assert [each.tags for each in found] == [["B-PER", "I-PER"], ["B-LOC"], ["O"]]
    assert [each.document for each in found] == [1, 1, 2]
    assert [each.where for each in found] == [f"{tmp_path}/a.conll:{line}" for line in (3, 6, 11)]


def test_words_may_be_odd(tmp_path):
    found = read_conll(write(tmp_path / "a.tsv", "a b\tO\n\u00a0\tO\n\u2028x\tB-X\r\n\r\n#\tO\n"))
    assert [each.words for each in found] == [["a b", "\u00a0", "\u2028x"], ["#"]]
    assert [each.tags for each in read_conll(write(tmp_path / "b.txt", "a\nb\n\nc\n"))] == [None, None]


def test_the_language_before_every_word_is_removed(tmp_path):
    prefixed = "de:Haus\tO\nde:de:\tB-X\n\nde::\tO\n"
    assert [each.words for each in read_conll(write(tmp_path / "a", prefixed))] == [["Haus", "de:"], [":"]]
    mixed = prefixed + "Haus\tO\n"
    assert read_conll(write(tmp_path / "a", mixed))[0].words == ["de:Haus", "de:de:"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("a\tO\nb\n", ":2 has 1 columns ('b'), not 2"),
        ("a\tO\nb\tX\tO\n", ":2 has 3 columns"),
        ("a\tB-PER\nb\tB\n", ":2: tag 'B' of 'b' is not O, B-TYPE or I-TYPE"),
        ("a\tI-PER\nb\tPER\n", ":2: tag 'PER' of 'b' is not O, B-TYPE or I-TYPE"),
        ("a\tO\nb\tB-PER\u200b\n", ":2: tag 'B-PER\\u200b' of 'b' is not O"),
        ("a\to\nb\tb-per\n", ":1: tag 'o' of 'a' is not O, B-TYPE or I-TYPE"),
        ("a\tO\nb\tB_PER\nc\tI_PER\n", ":2: tag 'B_PER' of 'b' is not O, B-TYPE or I-TYPE"),
        ("a\tO\nb\tb\nc\ti\n", ":2: tag 'b' of 'b' is not O, B-TYPE or I-TYPE"),
        ("a\tO\nb\t\n", ":2 has 1 columns ('b')"),
        (b"a\tO\nb\xff\tO\n", ":2 is not UTF-8"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, content, problem):
    path = write(tmp_path / "a.conll", content)
    assert path + problem in message(task().read, path, "train")


@pytest.mark.parametrize("blank", [" ", "\u00a0", "\u3000", "\u202f ", "\t", " \t "])
def test_blanks_after_a_tag_are_none_of_it(tmp_path, blank):
    content = f"Ada\tB-PER{blank}\nran\tO{blank}\n\nBo\tB-PER\nran\tO\n"
    for text in (content, content.replace("Ada\t", "Ada ").replace("ran\tO", "ran O").replace("Bo\t", "Bo ")):
        found = task().read(write(tmp_path / "train.conll", text), "train")
        assert [each.tags for each in found] == [["B-PER", "O"]] * 2 and found[0].words == ["Ada", "ran"]
        assert (
            score_files(
                write(tmp_path / "gold.conll", "Ada\tB-PER\nran\tO\n\nBo\tB-PER\nran\tO\n"),
                str(tmp_path / "train.conll"),
            )["f1_PER"]
            == 1
        )
    if "\t" not in blank:
        lines = json.dumps({"tokens": ["Ada"], "ner_tags": [f"B-PER{blank}"]})
        assert task().read(write(tmp_path / "train.jsonl", lines), "train")[0].tags == ["B-PER"]
    assert task((f"B-PER{blank}", "I-PER", "O")).labels == ("B-PER", "I-PER", "O")


COUNTED = "1 EU NNP I-NP I-ORG\n2 rejects VBZ I-VP O\n\n1 Peter NNP I-NP I-PER\n2 Blackburn NNP I-NP I-PER\n"


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"1": "0", "2": "1"},
        {"1 ": "1. ", "2 ": "2. "},
        {"1 ": "1) ", "2 ": "2) "},
        {"1 P": "3 P", "2 B": "4 B"},
        {"2 rej": "1-2 du _ _ O\n2 rej"},
    ],
)
def test_a_column_that_counts_is_not_the_words(tmp_path, change):
    text = COUNTED
    for old, new in change.items():
        text = text.replace(old, new)
    path = write(tmp_path / "train.conll", text)
    assert f"{path}:1: the first column counts the words; set task.text_column" in message(task().read, path, "train")
    assert task(text_column="1").read(path, "train")[1].tags == ["I-PER", "I-PER"]
    found = task(text_column="2").read(path, "train")
    assert [[word for word in each.words if word != "du"] for each in found] == [
        ["EU", "rejects"],
        ["Peter", "Blackburn"],
    ]
    assert found[0].tags[0] == "I-ORG"


@pytest.mark.parametrize("word", ["the", "2nd", "-"])
def test_a_long_sentence_of_no_numbers_is_words(tmp_path, word):
    path = write(tmp_path / "train.conll", f"{word} O\n" * 40 + "Rome B-LOC\n")
    assert task().read(path, "train")[0].words == [word] * 40 + ["Rome"]


def test_a_line_without_a_tag_that_begins_with_a_hash_is_a_comment(tmp_path):
    content = "# id 1f\tdomain=en\n#\tO\nb\tB-PER\n\n# a comment\nc\tO\n"
    assert [each.words for each in read_conll(write(tmp_path / "a", content))] == [["#", "b"], ["c"]]
    assert [each.words for each in read_conll(write(tmp_path / "b", "#tag\nb\n"))] == [["#tag", "b"]]
    assert read_conll(write(tmp_path / "c", "# x\nb y\n"), tag_column=3)[0].words == ["#", "b"]


def test_columns_are_chosen_by_number(tmp_path):
    germ_eval = "# a page [2009]\n1\tIn\tO\tO\n2\tUlm\tB-LOC\tO\n\n# b\n1\t#\tO\tO\n2\tx\tO\tB-PER\n"
    path = write(tmp_path / "train.tsv", germ_eval)
    found = task(text_column="2", label_column="3").read(path, "train")
    assert [each.words for each in found] == [["In", "Ulm"], ["#", "x"]]
    assert [each.tags for each in found] == [["O", "B-LOC"], ["O", "O"]]
    assert task(text_column="2").read(path, "train")[1].tags == ["O", "B-PER"]
    first = write(tmp_path / "first_test.conll", "O Ulm\nB-LOC x\n")
    assert task(text_column="2", label_column="1").read(first, "test")[0].tags == ["O", "B-LOC"]
    assert task(text_column="2").read(write(tmp_path / "test.conll", "1 a\n2 b\n"), "test")[0].tags is None
    assert task(label_column="4").read(write(tmp_path / "test.txt", "a x\n"), "test")[0].tags is None


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"text_column": "word"}, "task.text_column 'word' is not the number of a column"),
        ({"label_column": "0"}, "task.label_column '0' is not the number"),
        ({"label_column": "-1"}, "task.label_column '-1' is not the number"),
        ({"text_column": "7"}, ":1 has 5 columns ('1 EU NNP I-NP I-ORG'), not 7"),
        ({"label_column": "9"}, "1 has no tags"),
        ({"text_column": "2", "label_column": "2"}, "task.label_column 2 is the column of the words"),
    ],
)
def test_columns_that_cannot_be_chosen(tmp_path, settings, problem):
    path = write(tmp_path / "train.conll", COUNTED)
    assert problem in message(task(**settings).read, path, "train")


def test_files_without_sentences_or_tags(tmp_path):
    assert "holds no sentence" in message(task().read, write(tmp_path / "train.conll", "\n\t\n"), "train")
    path = write(tmp_path / "train.conll", "a\nb\n")
    assert "train.conll:1 has no tags" in message(task().read, path, "train")
    assert task().read(write(tmp_path / "test.conll", "a\nb\n"), "test")[0].tags is None
    assert task().read(path, "dev") == [] == read_sentences(TaskConfig(name="ner"), path, "dev")


def test_json_lines(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"tokens": ["a", "b"], "ner_tags": ["O", "B-X"]}\n')
    assert task().read(path, "train") == [NerExample(["a", "b"], ["O", "B-X"], 0, f"{path}:1")]
    large = write(tmp_path / "b.jsonl", '{"Words": ["a"], "Tags": ["B-X"]}\n')
    assert task().read(large, "train")[0][:2] == (["a"], ["B-X"])
    for line in (
        '{"tokens": "a"}',
        '{"tokens": ["a", "b"], "tags": ["X", "B-X"]}',
        '{"tokens": ["a"], "tags": ["b-per"]}',
        '{"tokens": ["a"], "tags": []}',
        '{"tags": []}',
    ):
        path = write(tmp_path / "a.jsonl", line)
        assert message(task().read, path, "train").startswith(f"{path}:1")


TAGS = "O,B-PER,I-PER,B-LOC,I-LOC"


@pytest.mark.parametrize(
    ("name", "content", "labels", "wanted"),
    [
        ("a.jsonl", '{"tokens": ["Bo", "Li"], "ner_tags": [1, 2]}\n', TAGS, ["B-PER", "I-PER"]),
        ("a.jsonl", '{"tokens": ["Bo", "Li"], "ner_tags": ["3", "0"]}\n', TAGS, ["B-LOC", "O"]),
        ("a.tsv", "Bo\t1\nLi\t0\n", TAGS, ["B-PER", "O"]),
        ("a.tsv", "Bo\t1\nLi\t0\n", "", ["1", "0"]),  # names, as before
        (
            "a.jsonl",
            '{"tokens": ["Bo"], "ner_tags": [1]}\n',
            "",
            "are numbers; write all tags in task.labels",
        ),
        (
            "a.jsonl",
            '{"tokens": ["Bo"], "ner_tags": [1]}\n',
            "PER,LOC",
            "a.jsonl:1: tags are numbers; write all tags in",
        ),
        ("a.tsv", "Bo\t5\n", TAGS, "a.tsv:1: tag 5 is beyond the 5 of task.labels; write all of them"),
        ("a.jsonl", '{"text": "Bo ran", "label": [[0, 2, "PER"]]}\n', "", "s in 'label', as doccano"),
        ("a.jsonl", '{"text": "Bo ran", "entities": [{"start": 0}]}\n', "", "s in 'entities', as"),
        ("a.csv", "Sentence #,Word,POS,Tag\nSentence: 1,Bo,NNP,B-per\n", "", "a.csv is a table with a word a row"),
        ("a.tsv", "Sentence #\tWord\tTag\nSentence: 1\tBo\tO\n", "", "a.tsv is a table with a word a row"),
    ],
)
def test_numbers_of_tags_and_what_other_programs_write(tmp_path, name, content, labels, wanted):
    made, path = NerTask(TaskConfig(name="ner", labels=labels)), write(tmp_path / name, content)
    if isinstance(wanted, list):
        assert made.read(path, "train")[0].tags == wanted
    else:
        assert wanted in message(made.read, path, "train")


def test_damaged_files_give_sentences_or_one_error(tmp_path):
    rng = random.Random(0)
    failures = 0
    for _ in range(60):
        data = bytearray((CONLL * 2).encode())
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(data))
            data[place : place + rng.randint(0, 3)] = rng.choice([b"", b"\t", b" ", b"\n", b"\xff", b"-", b"\x00"])
        path = write(tmp_path / "a.conll", bytes(data))
        try:
            task().read(path, "train")
        except InputError as error:
            failures += 1
            assert f"{path}:" in str(error) and "\n" not in str(error)
    assert 5 < failures < 60


# Labels


def test_labels_are_those_of_iob2(tmp_path):
    examples = [NerExample(["a", "b"], tags) for tags in (["I-PER", "O"], ["S-a-b", "O"])]
    assert task().find_labels(examples) == ("O", "B-PER", "I-PER", "B-a-b", "I-a-b")
    assert task(labels=LABELS).find_labels([]) == LABELS and task(LABELS).num_outputs == 5
    by_types = NerTask(TaskConfig(name="ner", labels="LOC, PER"))
    assert by_types.labels == LABELS
    assert "no word has a tag other than O" in message(task().find_labels, [NerExample(["a"], ["O"])])
    assert "are not O, B-PER" in message(task, ("O", "B-PER", "PER"))
    assert "are not O, B-PER" in message(task, ("B-X", "I-X"))
    assert "one of f1, precision" in message(lambda: task(metric="mcc"))


def labels_of(mine, tokenizer, tags, training=True):
    """Returns the labels of the first tokens of as many words."""
    (row,) = mine.make_rows([NerExample(["the"] * len(tags), tags, None, "f:1")], tokenizer, training).rows
    return [mine.labels[index] if index >= 0 else "" for index in row.label[row.detail.positions]]


def test_a_model_is_trained_in_the_scheme_of_its_labels(tokenizer):
    iob1 = ["I-PER", "I-PER", "B-PER", "I-LOC", "O"]
    assert labels_of(task(LABELS), tokenizer, iob1) == ["B-PER", "I-PER", "B-PER", "B-LOC", "O"]
    bioes = ("O", *(f"{prefix}-{kind}" for kind in ("LOC", "PER") for prefix in "BIES"))
    assert labels_of(task(bioes), tokenizer, iob1) == ["B-PER", "E-PER", "S-PER", "S-LOC", "O"]
    assert labels_of(task(("O", "I-LOC", "I-PER")), tokenizer, iob1) == ["I-PER"] * 3 + ["I-LOC", "O"]
    assert "f:1: tag 'B-ORG' is not one of O, B-LOC" in message(labels_of, task(LABELS), tokenizer, ["B-ORG"])
    assert labels_of(task(LABELS), tokenizer, ["B-ORG", "B-LOC"], False) == ["", "B-LOC"]  # scored as a miss


# Rows


def test_the_first_token_of_a_word_has_its_label(tokenizer):
    words = ["the", "unaffable", "\u200b", "of"]
    pieces = [tokenizer.encode(word) for word in words]
    assert len(pieces[1]) > 1 and not pieces[2]
    made = task(LABELS).make_rows([NerExample(words, ["O", "B-PER", "I-PER", "B-LOC"])], tokenizer, True)
    (row,) = made.rows
    ids = [tokenizer.cls_id, *pieces[0], *pieces[1], *pieces[3], tokenizer.sep_id]
    assert row.token_ids.tolist() == ids and row.lengths == (len(ids),) and not row.type_ids.any()
    expected = [-1, 0, 3, *[-1] * (len(pieces[1]) - 1), 1, -1]
    assert row.label.tolist() == expected and row.label.dtype == np.int32
    assert made.counts == {"words without token": 1}
    assert row.detail.words.tolist() == [0, 1, 3]
    assert "has no tags; training" in message(task(LABELS).make_rows, [NerExample(["a"])], tokenizer, True)


def random_examples(rng, num_sentences=40):
    """Returns sentences of words with none, one or more tokens, some of them far too long, in three documents."""
    words = ["the", "of", "unaffable", "\u200b", "and", "x" * 40, "paris"]
    return [
        NerExample(sentence, [rng.choice(LABELS) for _ in sentence], place // 14)
        for place in range(num_sentences)
        for sentence in [rng.choices(words, weights=[9, 9, 3, 1, 9, 1, 3], k=rng.choice([0, 1, 3, 9, 30, 80]))]
    ]


@pytest.mark.parametrize("document_context", [False, True])
@pytest.mark.parametrize("max_seq_length", [3, 8, 16, 64])
def test_every_word_is_asked_for_once(tokenizer, document_context, max_seq_length):
    examples = random_examples(random.Random(max_seq_length))
    mine = task(LABELS, document_context=document_context, max_seq_length=max_seq_length)
    made = mine.make_rows(examples, tokenizer, True)
    asked = [[] for _ in examples]
    for row in made.rows:
        assert len(row.token_ids) <= max_seq_length
        assert (row.token_ids[0], row.token_ids[-1]) == (tokenizer.cls_id, tokenizer.sep_id)
        assert (row.label >= 0).sum() == len(row.detail.positions) > 0
        for position, word in zip(row.detail.positions, row.detail.words):
            assert row.token_ids[position] == tokenizer.encode(examples[row.example].words[word])[0]
        asked[row.example] += row.detail.words.tolist()
    for example, words in zip(examples, asked):
        assert words == [place for place, word in enumerate(example.words) if tokenizer.encode(word)]
    if document_context and max_seq_length == 64:  # documents fill the rows, but for words of 40 tokens
        assert np.mean([len(row.token_ids) for row in made.rows]) > 45
    # What the model is right about comes back, whichever rows it was asked in.
    outputs = [np.eye(len(LABELS), dtype=np.float32)[np.maximum(row.label, 0)] for row in made.rows]
    order = list(range(len(outputs)))
    random.Random(0).shuffle(order)
    found = mine.decode(examples, [made.rows[place] for place in order], [outputs[place] for place in order])
    for example, tagged in zip(examples, found):
        wanted = to_tags(entities(example.tags), len(example.tags))
        assert tagged.tags == [tag if tokenizer.encode(word) else "O" for tag, word in zip(wanted, example.words)]


def test_context_is_of_the_same_document_on_both_sides(tokenizer):
    sentences = [["the"] * 5, ["of"] * 4, ["and"] * 5, ["in"] * 5]
    examples = [NerExample(words, ["O"] * len(words), document) for words, document in zip(sentences, (1, 1, 1, 2))]
    mine = task(LABELS, document_context=True, max_seq_length=12)
    rows = [tokenizer.decode(row.token_ids[1:-1]).split() for row in mine.make_rows(examples, tokenizer, True).rows]
    assert rows == [
        ["the"] * 5 + ["of"] * 4 + ["and"],
        ["the"] * 3 + ["of"] * 4 + ["and"] * 3,
        ["the"] + ["of"] * 4 + ["and"] * 5,
        ["in"] * 5,
    ]
    alone = [NerExample(words, None) for words in sentences]  # inputs of a user are not documents
    assert [len(row.token_ids) for row in mine.make_rows(alone, tokenizer, False).rows] == [7, 6, 7, 7]


@pytest.mark.parametrize("name", ["a.jsonl", "a.conll"])
def test_a_file_is_one_document(tmp_path, tokenizer, name):
    sentences = [["the", "of"], ["and"]]
    lines = [json.dumps({"tokens": words, "tags": ["O"] * len(words)}) + "\n" for words in sentences]
    if name == "a.conll":
        lines = ["".join(f"{word}\tO\n" for word in words) + "\n" for words in sentences]
    examples = task().read(write(tmp_path / name, "".join(lines)), "train")
    rows = task(LABELS, document_context=True).make_rows(examples, tokenizer, True).rows
    assert [tokenizer.decode(row.token_ids[1:-1]) for row in rows] == ["the of and"] * 2


def test_what_had_to_be_done_is_counted(tokenizer):
    examples = [NerExample(["the"] * 20), NerExample(["\u200b"]), NerExample([]), NerExample(["x" * 60])]
    made = task(LABELS, max_seq_length=12).make_rows(examples, tokenizer, False)
    assert made.counts == {
        "words without token": 1, "words truncated": 1, "cut into windows": 1, "skipped: no token": 2,
    }  # fmt: skip
    assert [row.example for row in made.rows] == [0, 0, 3] and made.rows[0].label is None
    assert [len(row.detail.words) for row in made.rows] == [10, 10, 1]
    assert [each.tags for each in task(LABELS).decode(examples[1:3], [], [])] == [["O"], []]
    assert "is below 3" in message(task(LABELS, max_seq_length=2).make_rows, [], tokenizer, False)


# Input of a user, predictions


def test_words_of_a_text_know_their_place():
    text = "  Ada's (friend),\tin\nMünchen-日本語 नमस्ते e\u0301!"
    found = task(LABELS).parse(text, "f:1")
    assert found.words == [
        "Ada", "'", "s", "(", "friend", ")", ",", "in", "München", "-", "日", "本", "語", "नमस्ते", "e\u0301", "!",
    ]  # fmt: skip
    assert all(text[start : start + len(word)] == word for word, start in zip(found.words, found.starts, strict=True))
    assert task(LABELS).parse({"text": text}, "f:1") == found
    for value in (["a b", "c"], {"tokens": ["a b", "c"]}, ("a b", "c")):
        assert task(LABELS).parse(value, "f:1") == NerExample(["a b", "c"], None, None, "f:1")
    words, named = ["a b", "c"], task(LABELS, text_column="w")
    assert task(LABELS).parse({"text": "x", "words": words}, "f:1").words == words  # as in training
    assert named.parse({"tokens": ["x"], "w": words}, "f:1").words == words
    assert named.parse({"text": "x"}, "f:1").words == ["x"]
    assert """or {"w": ["...", "..."]}""" in message(named.parse, {}, "f:1")
    for value in (5, None, {}, [1], {"text": 5}):
        assert message(task(LABELS).parse, value, "f:1").startswith("f:1: give a text")


def test_entities_have_offsets_into_the_text(tokenizer):
    mine = task(LABELS)
    for value, start in (("  Ada Lovelace, in  Paris", 2), (["Ada", "Lovelace", ",", "in", "Paris"], 0)):
        example = mine.parse(value, "f:1")
        (row,) = mine.make_rows([example], tokenizer, False).rows
        outputs = np.zeros((len(row.token_ids), len(LABELS)), np.float32)
        wanted = [3, 4, 0, 0, 2]
        outputs[row.detail.positions, wanted] = 1
        (found,) = mine.decode([example], [row], [outputs])
        assert found.tags == ["B-PER", "I-PER", "O", "O", "I-LOC"]  # as the model says it
        text = value if isinstance(value, str) else " ".join(value)
        assert [each[:2] for each in found.entities] == [("PER", "Ada Lovelace"), ("LOC", "Paris")]
        assert all(text[each.start : each.end] == each.text for each in found.entities)
        assert found.entities[0].start == start
    shown = json.loads(json.dumps(mine.show(found)))
    assert shown["entities"][0] == {"type": "PER", "text": "Ada Lovelace", "start": 0, "end": 12}


def test_predictions_are_written_and_scored(tmp_path):
    data = write(tmp_path / "dev.conll", CONLL)
    mine = task(LABELS)
    examples = mine.read(data, "dev")
    found = [Tagged(list(each.words), tags, []) for each, tags in zip(examples, (["I-PER", "I-PER"], ["O"]))]
    mine.write(tmp_path, "predicted", examples, found)
    path = str(tmp_path / "predicted.conll")
    assert Path(path).read_text() == "Ada\tB-PER\tB-PER\nLovelace\tI-PER\tI-PER\n\nparis\tB-LOC\tO\n\n"
    assert score_files(data, path) == mine.score(examples, found)
    assert score_files(data, data)["f1"] == 1.0 and score_files(data, path)["f1"] == pytest.approx(2 / 3)
    mine.write(tmp_path, "test", [each._replace(tags=None) for each in examples], found)
    assert (tmp_path / "test.conll").read_text().startswith("Ada\tB-PER\nLovelace\tI-PER\n")
    assert "has no tags" in message(mine.score, [NerExample(["a"])], found[:1])
    other = write(tmp_path / "other", CONLL.replace("paris", "rome"))
    assert f"{data}:6 and {other}:6: {data} and {other} need the same words" in message(score_files, data, other)
    shorter = write(tmp_path / "other", CONLL.partition("paris")[0])
    assert f"{data}:6: {data} and {shorter} need the same words" in message(score_files, data, shorter)
    assert f"{data}:6: {shorter} and {data} need the same words" in message(score_files, shorter, data)


def test_odd_words_of_predictions_come_back(tmp_path):
    words = ["a\u00a0b", "\u3000", "\u2028x", "a  b", "\u00a0"]
    data = write(tmp_path / "dev.conll", "".join(f"{word}\tO\n" for word in words))
    mine = task(LABELS)
    examples = mine.read(data, "dev")
    mine.write(tmp_path, "predicted", examples, [Tagged(words, ["O"] * 5, [])])
    path = str(tmp_path / "predicted.conll")
    assert read_conll(path)[0].words == words and score_files(data, path)["accuracy"] == 1.0
    mine.write(tmp_path, "predicted", [NerExample(["a\tb\r\nc"])], [Tagged(["a\tb\r\nc"], ["O"], [])])
    assert Path(path).read_bytes() == b"a b  c\tO\n\n"


# Real data


def test_wnut(shared_data, tokenizer):
    source = str(shared_data / "wnut17")
    for split, sentences, tokens in (("train", 3394, 62730), ("dev", 1009, 15733)):
        examples = task().read(source, split)
        assert (len(examples), sum(len(each.words) for each in examples)) == (sentences, tokens)
    labels = task().find_labels(examples)
    assert len(labels) == 13 and "I-creative-work" in labels
    made = task(labels).make_rows(examples[:200], tokenizer, True)
    assert sum(len(row.detail.words) for row in made.rows) + made.counts.get("words without token", 0) == sum(
        len(each.words) for each in examples[:200]
    )


@pytest.mark.slow
def test_wikiann(shared_data):
    for split, sentences, tokens in (("train", 20000, 195387), ("dev", 10000, 97805)):
        examples = task().read(str(shared_data / "wikiann_de"), split)
        assert (len(examples), sum(len(each.words) for each in examples)) == (sentences, tokens)
    assert task().find_labels(examples) == ("O", "B-LOC", "I-LOC", "B-ORG", "I-ORG", "B-PER", "I-PER")
    assert examples[0].words[:2] == ["Anton", "Wilhelm"]
    truth = [each.tags for each in examples]
    assert score_tags(truth, truth)["f1"] == 1.0


def test_found_entities_are_plain_tuples():
    assert FoundEntity("PER", "Ada", 0, 3)._asdict() == {"type": "PER", "text": "Ada", "start": 0, "end": 3}
    assert ner.Asked._fields == ("positions", "words")


def test_tags_that_are_no_entities_are_predicted_as_they_are(tokenizer):
    for labels in (("NOUN", "VERB", "NN-PL"), ("LABEL_0", "LABEL_1", "LABEL_2")):
        tagger = task(labels)
        examples = [tagger.parse("a b", "f:1")]
        rows = tagger.make_rows(examples, tokenizer, False).rows
        outputs = [np.eye(3)[[0] * (len(rows[0].token_ids) - 2) + [2, 2]]]
        (found,) = tagger.decode(examples, rows, outputs)
        assert tagger.show(found) == {"words": ["a", "b"], "tags": [labels[0], labels[2]]} and not found.entities
    assert "are not O, B-PER" in message(task, ("O", "B-PER", "X"))


def test_tags_of_entities_without_types(tmp_path, tokenizer):
    """As BioBERT's own data have them, and as Chinese words are divided."""
    found = task().read(write(tmp_path / "train.tsv", "a\tB\nb\tI\n\nc\tO\na\tB\n"), "train")
    tagger = task(task().find_labels(found))
    assert tagger.labels == ("O", "B", "I") and tagger.metric == "f1"
    rows = tagger.make_rows(found, tokenizer, True).rows
    assert [row.label[row.label >= 0].tolist() for row in rows] == [[1, 2], [0, 1]]
    predictions = tagger.decode(found, rows, [np.eye(3)[np.maximum(row.label, 0)] for row in rows])
    assert predictions[0].entities == [FoundEntity("", "a b", 0, 3)]
    assert tagger.score(found, predictions) == {"f1": 1, "precision": 1, "recall": 1, "accuracy": 1}
    words = ["B", "M", "E", "S", "B", "E"]
    assert entities(words) == [Entity("", 0, 3), Entity("", 3, 4), Entity("", 4, 6)]
    assert to_tags(entities(words), 6, scheme_of(words)) == words
    typed = ["B-X", "M-X", "E-X", "O", "S-Y"]
    assert to_tags(entities(typed), 5, scheme_of(typed)) == typed


def test_tags_that_are_names_are_learnt_as_they_are(tmp_path, tokenizer):
    """CoNLL-U: comments, numbers of words, two words in one, columns by number."""
    text = "# text = a b\n1\ta\ta\tNOUN\n2-3\tbc\t_\t_\n2\tb\tb\tVERB\n\n# x\n1\tc\tc\tNOUN\n"
    columns = {"text_column": "2", "label_column": "4"}
    found = task(**columns).read(write(tmp_path / "train.conllu", text), "train")
    assert [(each.words, each.tags) for each in found] == [(["a", "b"], ["NOUN", "VERB"]), (["c"], ["NOUN"])]
    tagger = task(task().find_labels(found), **columns)
    assert tagger.labels == ("NOUN", "VERB") and tagger.metric == "accuracy"
    rows = tagger.make_rows(found, tokenizer, True).rows
    predictions = tagger.decode(found, rows, [np.eye(2)[[0] * len(row.token_ids)] for row in rows])
    assert tagger.score(found, predictions) == {"accuracy": 2 / 3, "macro_f1": pytest.approx((0.8 + 0) / 2)}
    tagger.write(tmp_path, "dev", found, predictions)
    assert (tmp_path / "dev.conll").read_text() == "a\tNOUN\tNOUN\nb\tVERB\tNOUN\n\nc\tNOUN\tNOUN\n\n"
    assert score_files(str(tmp_path / "dev.conll"), str(tmp_path / "dev.conll"))["accuracy"] == 1
    with pytest.raises(InputError, match=r"task\.metric 'f1' is not one of accuracy, macro_f1"):
        task(tagger.labels, metric="f1")
    hashes = write(tmp_path / "hash.tsv", "#\tSYM\n1\tNUM\n")
    assert task().read(hashes, "train")[0].words == ["#", "1"]
