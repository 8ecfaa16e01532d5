# SPDX-License-Identifier: Apache-2.0
"""Named entities: schemes of tags, files in columns, rows with one place for each word, entities, scores."""

import json
import random

import numpy as np
import pytest
import tokenizers
from builders import message, write
from described import write_described

from bert_jax import load_tokenizer
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks.ner import FoundEntity, NerTask, Tagged
from bert_jax.tasks.ner_read import read_sentences
from bert_jax.tasks.tagging import (
    NerExample,
    entities,
    read_conll,
    scheme_of,
    score_files,
    score_tags,
    to_tags,
)

LABELS = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
CONLL = "-DOCSTART- -X- -X- O\n\nAda NNP B-NP B-PER\nLovelace NNP I-NP I-PER\n\nparis NN O B-LOC\n"


def task(labels=LABELS, **settings):
    return NerTask(TaskConfig(name="ner", **settings), labels)


@pytest.fixture
def read(tmp_path):
    """Returns what a task reads from a file with such a content."""

    def read(content, split="train", **settings):
        return task((), **settings).read(write(tmp_path / f"{split}.conll", content), split)

    return read


@pytest.mark.parametrize("kind", ["roberta", "modernbert", "xlmr", "words"])
def test_words_have_the_tokens_that_transformers_gives_them(tmp_path, kind):
    """A list of words: each as the file says, with a blank before it or without. A text: the text's own tokens."""
    found = load_tokenizer(write_described(tmp_path, kind))
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    words, text = ["low", "walker", ".", "The", "new"], "The low walkers (new), isn't  it."
    example = task().parse(text, "input 1")
    listed, running = task().make_rows([NerExample(words), example], found, False).rows
    assert listed.token_ids.tolist() == library.encode(words, is_pretokenized=True).ids
    assert running.token_ids.tolist() == library.encode(text).ids
    tokens = found.tokens(running.token_ids[running.detail.positions])
    for word, token in zip(running.detail.words, tokens, strict=True):
        name, part = example.words[word].lower(), token.strip("Ġ▁").lower()
        assert kind == "words" or part in ("<unk>", "") or name.startswith(part) or part.startswith(name)


# Tags


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("I-X I-X B-X I-X", [("X", 0, 2), ("X", 2, 4)]),  # IOB1
        ("O I-X O E-X E-X", [("X", 1, 2), ("X", 3, 4), ("X", 4, 5)]),  # malformed
        ("B-a-b I-a-b I-a", [("a-b", 0, 2), ("a", 2, 3)]),
    ],
)
def test_entities_are_those_of_conlleval(tags, expected):
    assert entities(tags.split()) == expected


@pytest.mark.parametrize(
    ("scheme", "tags"),
    [
        ("IOB2", "B-X B-Y I-Y I-Y B-Y I-Y O"),
        ("BIOES", "S-X B-Y I-Y E-Y B-Y E-Y O"),
        ("BMES", "S-X B-Y M-Y E-Y B-Y E-Y O"),
        ("BILOU", "U-X B-Y I-Y L-Y B-Y L-Y O"),
        ("BMES", "B M E S B E O"),  # as Chinese words are divided
    ],
)
def test_schemes_are_turned_into_each_other(scheme, tags):
    found = entities(tags.split())
    assert [each[1:] for each in found] in ([(0, 1), (1, 4), (4, 6)], [(0, 3), (3, 4), (4, 6)])
    assert to_tags(found, 7, scheme) == tags.split() and scheme_of(tags.split()) == scheme


def test_scores():
    truth = ["B-X I-X O B-Y".split(), "O O".split()]
    said = ["B-X I-X O B-X".split(), "O I-Y".split()]
    expected = {"precision": 1 / 3, "recall": 1 / 2, "f1": 2 / 5, "accuracy": 4 / 6, "f1_X": 2 / 3, "f1_Y": 0.0}
    assert score_tags(truth, said) == pytest.approx(expected)
    assert score_tags([], []) == {"f1": 0.0, "precision": 0.0, "recall": 0.0, "accuracy": 0.0}
    # conlleval.pl and seqeval 1.2.2 give 0.75 and F1 1.0: the same entity, begun with I- in one file
    found = score_tags(["I-X O B-Y I-Y".split()], ["B-X O B-Y I-Y".split()])
    assert (found["accuracy"], found["f1"]) == (0.75, 1.0)
    assert task().score([NerExample("a", ["I-X"])], [Tagged([], ["B-X"], [])])["accuracy"] == 1.0  # a model: in IOB2


# Files


def test_columns_documents_and_blanks(tmp_path):
    path = write(tmp_path / "a.conll", CONLL + "\t\n \n-DOCSTART- -X- -X- O\n\nx X O O")
    assert read_conll(path) == [
        (["Ada", "Lovelace"], ["B-PER", "I-PER"], 1, f"{path}:3", "", ()),
        (["paris"], ["B-LOC"], 1, f"{path}:6", "", ()),
        (["x"], ["O"], 2, f"{path}:11", "", ()),
    ]


@pytest.mark.parametrize(
    ("content", "columns", "words"),
    [
        ("a b\tO\n\u00a0\tO\n\u2028x\tB-X\r\n\r\n#\tO\n", {}, [["a b", "\u00a0", "\u2028x"], ["#"]]),
        # the language before every word is removed
        ("de:Haus\tO\nde:de:\tB-X\n\nde::\tO\n", {}, [["Haus", "de:"], [":"]]),
        ("de:Haus\tO\nHaus\tO\n", {}, [["de:Haus", "Haus"]]),
        # a line without a tag that begins with # is a comment
        ("# id 1f\tdomain=en\n#\tO\nb\tB-PER\n\n# a comment\nc\tO\n", {}, [["#", "b"], ["c"]]),
        ("#tag\nb\n", {}, [["#tag", "b"]]),
        ("#\tSYM\n1\tNUM\n", {}, [["#", "1"]]),
        # GermEval
        ("# [2009]\n1\tIn\tO\tO\n\n# b\n1\t#\tO\tO\n2\tx\tO\tO\n", {"text_column": "2"}, [["In"], ["#", "x"]]),
        # a long sentence of no numbers is words
        ("the O\n" * 40 + "Rome B-LOC\n", {}, [["the"] * 40 + ["Rome"]]),
    ],
)
def test_words(read, content, columns, words):
    assert [each.words for each in read(content, "test", **columns)] == words


@pytest.mark.parametrize(
    ("content", "text", "label", "tags"),
    [
        ("1\tUlm\tB-LOC\tO\n", "2", "3", ["B-LOC"]),
        ("1\tUlm\tB-LOC\tO\n", "2", "", ["O"]),
        ("O Ulm\nB-LOC x\n", "2", "1", ["O", "B-LOC"]),
        ("a x\n", "", "4", None),
    ],
)
def test_columns_are_chosen_by_number(read, content, text, label, tags):
    assert read(content, "test", text_column=text, label_column=label)[0].tags == tags


COUNTED = "1 EU NNP I-NP I-ORG\n2 rejects VBZ I-VP O\n"


@pytest.mark.parametrize(
    ("content", "settings", "problem"),
    [
        ("a\tO\nb\n", {}, ":2 has 1 columns ('b'), not 2"),
        ("a\tO\nb\t\n", {}, ":2 has 1 columns ('b')"),
        ("a\tB-PER\nb\tB\n", {}, ":2: tag 'B' of 'b' is not O, B-TYPE or I-TYPE"),
        ("a\tO\nb\tB-PER\u200b\n", {}, ":2: tag 'B-PER\\u200b' of 'b' is not O"),
        ("a\to\nb\tb-per\n", {}, ":1: tag 'o' of 'a' is not O"),
        ("\n\t\n", {}, "holds no sentence"),
        ("a\t1\n", {"labels": "PER,LOC"}, ":1: tags are numbers; write all tags in"),
        ("a\t3\n", {"labels": "O,B-PER,I-PER"}, ":1: tag 3 is beyond the 3 of task.labels; write all of them"),
        ("Sentence #\tWord\tTag\n1\tBo\tO\n", {}, " is a table with a word a row"),
        (COUNTED, {"text_column": "word"}, "task.text_column 'word' is not the number of a column"),
        (COUNTED, {"label_column": "0"}, "task.label_column '0' is not the number"),
        (COUNTED, {"text_column": "7"}, ":1 has 5 columns ('1 EU NNP I-NP I-ORG'), not 7"),
        (COUNTED, {"text_column": "2", "label_column": "2"}, "task.label_column 2 is the column of the words"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, content, settings, problem):
    path = write(tmp_path / "a.conll", content)
    found = message(NerTask(TaskConfig(name="ner", **settings)).read, path, "train")
    assert problem in found and (problem[0] != ":" or path + problem in found)


@pytest.mark.parametrize("blank", [" ", "\u3000", " \t "])
def test_blanks_after_a_tag_are_none_of_it(read, blank):
    for text in (f"Ada\tB-PER{blank}\nran\tO{blank}\n", f"Ada B-PER{blank}\nran O{blank}\n"):
        assert read(text)[0][:2] == (["Ada", "ran"], ["B-PER", "O"])
    assert task((f"B-PER{blank}", "I-PER", "O")).labels == ("B-PER", "I-PER", "O")


@pytest.mark.parametrize("numbers", ["1 2 1 2", "0 1 0 1", "1 2 3 4", "1. 2. 1. 2.", "1) 2) 1) 2)"])
def test_a_column_that_counts_is_not_the_words(read, numbers):
    text = "{} EU X I-ORG\n1-2 du _ O\n{} rejects X O\n\n{} Bo X I-PER\n{} Li X I-PER\n".format(*numbers.split())
    assert ":1: the first column counts the words; set task.text_column" in message(read, text)
    found = read(text, text_column="2")
    assert [each[:2] for each in found] == [(["EU", "rejects"], ["I-ORG", "O"]), (["Bo", "Li"], ["I-PER", "I-PER"])]


def test_a_missing_split_has_no_sentences(tmp_path):
    path = write(tmp_path / "train.conll", "a\tO\n")
    assert task().read(path, "dev") == [] == read_sentences(TaskConfig(name="ner"), path, "dev")


TAGS = "O,B-PER,I-PER,B-LOC,I-LOC"


@pytest.mark.parametrize(
    ("name", "content", "labels", "wanted"),
    [
        ("a.jsonl", '{"tokens": ["Bo", "Li"], "ner_tags": ["O", "B-X\u3000"]}', "", ["O", "B-X"]),
        ("a.jsonl", '{"tokens": ["Bo", "Li"], "ner_tags": [1, 2]}', TAGS, ["B-PER", "I-PER"]),
        ("a.jsonl", '{"tokens": ["Bo", "Li"], "ner_tags": ["3", "0"]}', TAGS, ["B-LOC", "O"]),
        ("a.tsv", "Bo\t1\nLi\t0\n", TAGS, ["B-PER", "O"]),
        ("a.tsv", "Bo\t1\nLi\t0\n", "", ["1", "0"]),  # names, as before
        ("a.jsonl", '{"tokens": ["Bo"], "ner_tags": [1]}', "", "are numbers; write all tags in task.labels"),
        ("a.jsonl", '{"text": "Bo ran", "label": [[0, 2, "PER"]]}', "", "s in 'label', as doccano"),
        ("a.csv", "Sentence #,Word,POS,Tag\nSentence: 1,Bo,NNP,B-per\n", "", "a.csv is a table with a word a row"),
        ("a.jsonl", '{"tokens": ["a", "b"], "tags": ["X", "B-X"]}', "", "a.jsonl:1"),
        ("a.jsonl", '{"tokens": ["a"], "tags": ["b-per"]}', "", "a.jsonl:1"),
        ("a.jsonl", '{"tokens": ["a"], "tags": []}', "", "a.jsonl:1"),
    ],
)
def test_json_lines_and_numbers_of_tags(tmp_path, name, content, labels, wanted):
    made, path = NerTask(TaskConfig(name="ner", labels=labels)), write(tmp_path / name, content)
    if isinstance(wanted, list):
        (found,) = made.read(path, "train")
        assert found.tags == wanted and found.where == f"{path}:1"
        assert found.document == 0  # a file is one
    else:
        assert wanted in message(made.read, path, "train")


# Labels


def test_labels_are_those_of_iob2():
    examples = [NerExample(["a", "b"], tags) for tags in (["I-PER", "O"], ["S-a-b", "O"])]
    assert task(()).find_labels(examples) == ("O", "B-PER", "I-PER", "B-a-b", "I-a-b")
    assert task().find_labels([]) == LABELS and task().num_outputs == 5
    assert NerTask(TaskConfig(name="ner", labels="LOC, PER")).labels == LABELS
    assert "f:1: no word has a tag other than O" in message(task(()).find_labels, [NerExample("a", "O", where="f:1")])
    for labels in (("O", "B-PER", "PER"), ("B-X", "I-X")):
        assert "are not O, B-PER" in message(task, labels)
    assert "one of f1, precision" in message(task, (), metric="mcc")


IOB1 = ["I-PER", "I-PER", "B-PER", "I-LOC", "O"]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (LABELS, "B-PER I-PER B-PER B-LOC O"),
        ("O S-LOC S-PER B-PER I-PER E-PER".split(), "B-PER E-PER S-PER S-LOC O"),
        (("O", "I-LOC", "I-PER"), "I-PER I-PER I-PER I-LOC O"),
    ],
)
def test_a_model_is_trained_in_the_scheme_of_its_labels(tokenizer, labels, expected):
    (row,) = task(labels).make_rows([NerExample(["the"] * 5, IOB1)], tokenizer, True).rows
    assert [labels[index] for index in row.label[row.detail.positions]] == expected.split()


# Rows


def test_the_first_token_of_a_word_has_its_label(tokenizer):
    words = ["the", "unaffable", "\u200b", "of"]
    the, unaffable, nothing, of = map(tokenizer.encode, words)
    assert len(unaffable) == 4 and not nothing
    made = task().make_rows([NerExample(words, ["O", "B-PER", "I-PER", "B-LOC"])], tokenizer, True)
    (row,) = made.rows
    assert row.token_ids.tolist() == [tokenizer.cls_id, *the, *unaffable, *of, tokenizer.sep_id]
    assert row.label.tolist() == [-1, 0, 3, -1, -1, -1, 1, -1] and not row.type_ids.any()
    assert made.counts == {"words without token": 1}
    assert "has no tags; training" in message(task().make_rows, [NerExample(["a"])], tokenizer, True)
    unknown = [NerExample(["a", "b"], ["B-ORG", "B-LOC"], where="f:1")]
    assert "f:1: tag 'B-ORG' is not one of O, B-LOC" in message(task().make_rows, unknown, tokenizer, True)
    (row,) = task().make_rows(unknown, tokenizer, False).rows
    assert row.label.tolist() == [-1, -1, 1, -1]  # scored as a miss


def random_examples(rng, num_sentences=40):
    """Returns sentences of words with none, one or more tokens, some of them far too long, in three documents."""
    words = ["the", "of", "unaffable", "\u200b", "and", "x" * 40, "paris"]
    return [
        NerExample(sentence, [rng.choice(LABELS) for _ in sentence], place // 14)
        for place in range(num_sentences)
        for sentence in [rng.choices(words, weights=[9, 9, 3, 1, 9, 1, 3], k=rng.choice([0, 1, 3, 9, 30, 80]))]
    ]


@pytest.mark.parametrize(("context", "length"), [(True, 3), (False, 8), (True, 64)])
def test_every_word_is_asked_for_once(tokenizer, context, length):
    examples = random_examples(random.Random(length))
    mine = task(document_context=context, max_seq_length=length)
    rows = mine.make_rows(examples, tokenizer, True).rows
    asked = [[] for _ in examples]
    for row in rows:
        assert len(row.token_ids) <= length
        assert (row.label >= 0).sum() == len(row.detail.positions) > 0
        words = [examples[row.example].words[word] for word in row.detail.words]
        assert [*row.token_ids[row.detail.positions]] == [tokenizer.encode(word)[0] for word in words]
        asked[row.example] += row.detail.words.tolist()
    for example, words in zip(examples, asked):
        assert words == [place for place, word in enumerate(example.words) if tokenizer.encode(word)]
    if length == 64:  # documents fill the rows, but for words of 40 tokens
        assert np.mean([len(row.token_ids) for row in rows]) > 45
    # What the model is right about comes back, whichever rows it was asked in.
    random.Random(0).shuffle(rows)
    outputs = [np.eye(len(LABELS))[np.maximum(row.label, 0)] for row in rows]
    for example, tagged in zip(examples, mine.decode(examples, rows, outputs)):
        wanted = to_tags(entities(example.tags), len(example.tags))
        assert tagged.tags == [tag if tokenizer.encode(word) else "O" for tag, word in zip(wanted, example.words)]


def test_context_is_of_the_same_document_on_both_sides(tokenizer):
    sentences = [["the"] * 5, ["of"] * 4, ["and"] * 5, ["in"] * 5]
    examples = [NerExample(words, ["O"] * len(words), document) for words, document in zip(sentences, (1, 1, 1, 2))]
    mine = task(document_context=True, max_seq_length=12)
    rows = [tokenizer.decode(row.token_ids[1:-1]) for row in mine.make_rows(examples, tokenizer, True).rows]
    assert rows == [
        "the the the the the of of of of and",
        "the the the of of of of and and and",
        "the of of of of and and and and and",
        "in in in in in",
    ]
    alone = [NerExample(words) for words in sentences]  # inputs of a user are not documents
    assert [len(row.token_ids) for row in mine.make_rows(alone, tokenizer, False).rows] == [7, 6, 7, 7]


def test_what_had_to_be_done_is_counted(tokenizer):
    examples = [NerExample(["the"] * 20), NerExample(["\u200b"]), NerExample([]), NerExample(["x" * 60])]
    made = task(max_seq_length=12).make_rows(examples, tokenizer, False)
    assert made.counts == {
        "words without token": 1, "words truncated": 1, "cut into windows": 1, "skipped: no token": 2,
    }  # fmt: skip
    assert [(row.example, len(row.detail.words)) for row in made.rows] == [(0, 10), (0, 10), (3, 1)]
    assert made.rows[0].label is None
    assert [each.tags for each in task().decode(examples[1:3], [], [])] == [["O"], []]
    assert "is below 3" in message(task(max_seq_length=2).make_rows, [], tokenizer, False)


# Input of a user, predictions


def test_words_of_a_text_know_their_place():
    text = "  Ada's (friend),\tin\nMünchen-日本 नमस्ते e\u0301!"
    found = task().parse(text, "f:1")
    assert found.words == "Ada ' s ( friend ) , in München - 日 本 नमस्ते e\u0301 !".split()
    assert [text[start:].startswith(word) for word, start in zip(found.words, found.starts)] == [True] * 15
    assert task().parse({"text": text}, "f:1") == found


def test_words_may_be_given():
    assert task().parse(["a b", "c"], "f:1").words == ["a b", "c"]
    assert task().parse({"text": "x", "words": ["a b"]}, "f:1").words == ["a b"]  # as in training
    assert task(text_column="w").parse({"tokens": ["x"], "w": ["a b"]}, "f:1").words == ["a b"]


@pytest.mark.parametrize("value", [5, {}, [1]])
def test_what_has_no_words_is_named(value):
    assert message(task().parse, value, "f:1").startswith("f:1: give a text")
    assert """or {"w": ["...", "..."]}""" in message(task(text_column="w").parse, value, "f:1")


@pytest.mark.parametrize(
    ("value", "start"), [("  Ada Lovelace, in  Paris", 2), (["Ada", "Lovelace", ",", "in", "Paris"], 0)]
)
def test_entities_have_offsets_into_the_text(tokenizer, value, start):
    example = task().parse(value, "f:1")
    (row,) = task().make_rows([example], tokenizer, False).rows
    outputs = np.zeros((len(row.token_ids), len(LABELS)))
    outputs[row.detail.positions, [3, 4, 0, 0, 2]] = 1
    (found,) = task().decode([example], [row], [outputs])
    assert found.tags == ["B-PER", "I-PER", "O", "O", "I-LOC"]  # as the model says it
    text = value if isinstance(value, str) else " ".join(value)
    paris = FoundEntity("LOC", "Paris", len(text) - 5, len(text))
    assert found.entities == [FoundEntity("PER", "Ada Lovelace", start, start + 12), paris]
    assert json.loads(json.dumps(task().show(found)))["entities"][1] == paris._asdict()


def test_predictions_are_written_and_scored(tmp_path):
    data = write(tmp_path / "dev.conll", CONLL)
    examples = task().read(data, "dev")
    found = [Tagged([], ["I-PER", "I-PER"], []), Tagged([], ["O"], [])]
    task().write(tmp_path, "predicted", examples, found)
    path = tmp_path / "predicted.conll"
    assert path.read_text() == "Ada\tB-PER\tB-PER\nLovelace\tI-PER\tI-PER\n\nparis\tB-LOC\tO\n\n"
    scores = score_files(data, str(path))
    assert scores == task().score(examples, found) and scores["f1"] == pytest.approx(2 / 3)
    task().write(tmp_path, "test", [NerExample(["\u2028a\tb\r\nc "])], found[1:])
    assert (tmp_path / "test.conll").read_bytes().decode() == "\u2028a b  c \tO\n\n"
    assert "has no tags" in message(task().score, [NerExample(["a"])], found[:1])


def test_scored_files_have_the_same_words(tmp_path):
    data = write(tmp_path / "dev.conll", CONLL)
    other = write(tmp_path / "other", CONLL.replace("paris", "rome"))
    assert f"{data}:6 and {other}:6: {data} and {other} need the same words" in message(score_files, data, other)
    shorter = write(tmp_path / "shorter", CONLL.partition("paris")[0])
    for pair in ((data, shorter), (shorter, data)):
        assert f"{data}:6: {' and '.join(pair)} need the same words" in message(score_files, *pair)


def test_tags_of_entities_without_types(read, tokenizer):
    """As BioBERT's own data have them."""
    found = read("a\tB\nb\tI\n\nc\tO\na\tB\n")
    tagger = task(task(()).find_labels(found))
    assert tagger.labels == ("O", "B", "I") and tagger.metric == "f1"
    rows = tagger.make_rows(found, tokenizer, True).rows
    predictions = tagger.decode(found, rows, [np.eye(3)[np.maximum(row.label, 0)] for row in rows])
    assert predictions[0].entities == [FoundEntity("", "a b", 0, 3)]
    assert tagger.score(found, predictions) == {"f1": 1, "precision": 1, "recall": 1, "accuracy": 1}


def test_tags_that_are_names_are_learnt_as_they_are(tmp_path, read, tokenizer):
    """CoNLL-U: comments, numbers of words, two words in one, columns by number."""
    text = "# text = a b\n1\ta\ta\tNOUN\n2-3\tbc\t_\t_\n2\tb\tb\tNN-PL\n\n# x\n1\tc\tc\tNOUN\n"
    found = read(text, text_column="2", label_column="4")
    assert [each[:2] for each in found] == [(["a", "b"], ["NOUN", "NN-PL"]), (["c"], ["NOUN"])]
    tagger = task(task(()).find_labels(found))
    assert tagger.labels == ("NN-PL", "NOUN") and tagger.metric == "accuracy"
    rows = tagger.make_rows(found, tokenizer, True).rows
    predictions = tagger.decode(found, rows, [np.eye(2)[[1] * len(row.token_ids)] for row in rows])
    assert tagger.show(predictions[0]) == {"words": ["a", "b"], "tags": ["NOUN", "NOUN"]}
    assert tagger.score(found, predictions) == {"accuracy": 2 / 3, "macro_f1": pytest.approx((0.8 + 0) / 2)}
    tagger.write(tmp_path, "dev", found, predictions)
    assert (tmp_path / "dev.conll").read_text() == "a\tNOUN\tNOUN\nb\tNN-PL\tNOUN\n\nc\tNOUN\tNOUN\n\n"
    assert "task.metric 'f1' is not one of accuracy, macro_f1" in message(task, tagger.labels, metric="f1")
