# SPDX-License-Identifier: Apache-2.0
"""What data of texts that belong together are read as, and what is said of data that cannot be."""

import dataclasses

import pytest
from builders import message, write

from bert_jax.settings.finetuning import EmbeddingConfig, TaskConfig
from bert_jax.tasks.catalog import make_task
from bert_jax.tasks.embeddings.beir import OWN_TEXT
from bert_jax.tasks.embeddings.read import NO_TEXT, SAME, read_parts, read_texts

CONFIG = TaskConfig(name="embeddings")


@pytest.fixture
def read(tmp_path):
    """Returns what is read of a file with such a content."""

    def read(content, name="", config=CONFIG):
        name = name or ("train.jsonl" if content.startswith("{") else "train.tsv")
        return read_texts(config, write(tmp_path / name, content), name.partition(".")[0])

    return read


NLI = TaskConfig(name="embeddings", labels="entailment,neutral,contradiction")
NAMED = TaskConfig(name="embeddings", text_column="y", second_text_column="x")
NEGATIVES = dataclasses.replace(NAMED, embedding=EmbeddingConfig(negative_columns="z, w"))
LISTS = '{"query": "a", "pos": ["b", "c"], "neg": ["d"]}'  # as FlagEmbedding has them
ALONE, AGAINST = "'label' is not used with texts alone:", "'score' is not used with negatives:"


@pytest.mark.parametrize(
    ("content", "config", "texts", "counts"),
    [
        ("query\tpositive\tnegative\tnegative_2\na\tb\tc\td\n", CONFIG, ["a b c d"], {}),
        ("query\tpositive\tnegative\tnegative_2\na\tb\t\tc\nd\te\te\t\n", CONFIG, ["a b c", "d e"], {SAME: 1}),
        ('{"anchor": "a", "positive": "b", "negatives": ["c", "d", "b"]}', CONFIG, ["a b c d"], {SAME: 1}),
        (LISTS, CONFIG, ["a b d", "a c d"], {}),
        ("x\ty\tz\tw\na\tb\tc\t3\n", NAMED, ["b a"], {}),
        ("x\ty\tz\tw\na\tb\tc\t3\n", NEGATIVES, ["b a c 3"], {}),
        ("text\tlabel\na\tx\nb\ty\n", CONFIG, ["a a", "b b"], {ALONE: 2}),
        (
            "anchor\tpositive\tnegative\tscore\na\tb\tc\t1\n",
            CONFIG,
            ["a b c"],
            {AGAINST: 1},
        ),
        ("anchor\tpositive\n\tb\nc\t \nd\te\n", CONFIG, ["d e"], {NO_TEXT: 2}),
        (
            "premise\thypothesis\tlabel\na\tb\tentailment\na\tc\tcontradiction\na\td\tneutral\n"
            "e\tf\tentailment\na\tg\tentailment\nh\ti\tcontradiction\n",
            CONFIG,
            ["a b c", "a g c", "e f"],
            {"pairs that are not entailment": 3},
        ),
        ("premise\thypothesis\tlabel\na\tb\t0\na\tc\t2\n", NLI, ["a b c"], {"pairs that are not entailment": 1}),
    ],
)
def test_tables(read, content, config, texts, counts):
    found = read(content, config=config)
    assert [" ".join(example.texts) for example in found] == texts
    assert found.counts == counts and found.metric == "ndcg@10"


def test_scores_and_columns(read):
    (example,) = read("x\ty\tw\na\tb\t3\n", "test.tsv", dataclasses.replace(NAMED, label_column="w"))
    assert example.texts == ("b", "a") and example.score == 3
    assert read("text\tquery\tpositive\tnegative\nx\ta\tb\tc\n").columns == ("query", "positive", "negative")
    own = read("query\tpositive\na\tb\nb\ta\nc\tc\n", "dev.tsv")
    assert own.counts == {OWN_TEXT: 2}


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("First .\nSecond .\n\nThe third has\ta tab .\n", ["First .", "Second .", "The third has\ta tab ."]),
        ("text\nFirst .\n", ["First ."]),  # a column, as before
    ],
)
def test_a_text_a_line(read, content, texts):
    found = read(content, "train.txt")
    assert [each.texts for each in found] == [(text, text) for text in texts]
    assert found[-1].where.endswith(f"train.txt:{content.count(chr(10))}")
    assert found.columns == ("lines",) or len(texts) == 1


def test_scores_of_a_teacher_stay_with_their_texts(read):
    row = '{"query": "a", "positive": ["b", "c"], "negative": ["d", "b", " "], "scores": [4, 3.5, 1, -2, 0]}\n'
    found = read(row)
    assert [each.texts for each in found] == [("a", "b", "d"), ("a", "c", "d", "b")] and found.counts[SAME]
    assert [each.scores for each in found] == [(4.0, 1.0), (3.5, 1.0, -2.0)]
    task = make_task(dataclasses.replace(CONFIG, embedding=EmbeddingConfig(loss="kl")))
    assert task.settle(found).embedding.loss == "kl"
    assert "not all examples have them" in message(task.settle, read('{"query": "a", "positive": "b"}\n' + row))


def test_graded_pairs_choose_the_metric_of_dev(tmp_path, read):
    found = read("sentence_A\tsentence_B\trelatedness_score\na\tb\t3.5\nc\td\t1\n", "dev.tsv")
    assert [example.score for example in found] == [3.5, 1.0] and found[0].is_query(0) and found[0].is_query(1)
    plain = write(tmp_path / "train.tsv", "text\na\nb\n \n")
    found = read_texts(CONFIG, f"{plain},{tmp_path}/dev.tsv", "train")
    assert [each.texts for each in found] == [("a", "a"), ("b", "b")] and found.metric == "spearman"
    assert found[0].is_query(1)


def test_questions_and_their_paragraphs(tmp_path):
    qas = '[{"id": "N", "question": "qN", "answers": []}]'
    article = f'{{"paragraphs": [{{"context": "text N", "qas": {qas}}}]}}'
    articles = ", ".join(article.replace("N", number) for number in "012")
    path = write(tmp_path / "all.json", f'{{"data": [{articles}]}}')
    train, dev = (read_texts(CONFIG, f"{path}[:2],{path}[2:]", split) for split in ("train", "dev"))
    assert [each.texts for each in (*train, *dev)] == [(f"q{number}", f"text {number}") for number in range(3)]
    assert len(train) == 2 and len(read_texts(CONFIG, path, "train")) == 3
    assert [len(part) for part in read_parts(CONFIG, path, 1)] == [3]


BAD = TaskConfig(name="embeddings", embedding=EmbeddingConfig(negative_columns="bad"))


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("train.tsv", "x\ty\na\tb\n", "such as task.text_column"),
        ("train.tsv", "sentence1\tsentence2\tscore\na\tb\t\n", ":2 has no 'score'; give each pair a score"),
        ("train.tsv", "sentence1\tsentence2\tscore\na\tb\tx\n", ":2: label 'x' is not a finite number"),
        ("train.tsv", "premise\thypothesis\tlabel\na\tb\tentailment\na\tb\tboth\n", ":3: label 'both'"),
        ("train.tsv", "premise\thypothesis\tlabel\na\tb\t0\n", ":2: label '0' is not one of entailment, "),
        ("train.tsv", "anchor\tpositive\n", "holds no example"),
        ("train.tsv", "First .\nSecond .\n", "train.tsv has no column anchor, positive"),
        ("train.txt", "a\tb\nc\td\n", "train.txt: all lines have tabs"),
        ("dev.tsv", "text\na\n", "give a dev set of pairs"),
        ("dev.txt", "First .\nSecond .\n", "single texts score no vectors"),
        ("dev.tsv", "anchor\tpositive\na\t\nb\t\n", "in all 2 rows anchor or positive is empty"),
        ("", LISTS.replace('"b", "c"', ""), "in all 1 rows query or pos is empty"),
        ("", '{"query": "a", "pos": "b", "neg": ["d", ""], "scores": [4, 3, 1]}', "train.jsonl:1 has 3 scores for 2 p"),
        ("", '{"query": "a", "positive": "b", "negative": "d", "scores": ["x", 1]}', "train.jsonl:1"),
        ("", '{"query": "a", "pos": "b", "neg": ["d"], "scores": [4, null]}', "train.jsonl:1 has 1 scores for 2 pos"),
        (
            "train.csv",
            "query,positive\na,b\nquery, positive\nc,d\n",
            "csv:3 has the names of the columns in line 1 again",
        ),
        ("", '{"anchor": null, "positive": "b"}\n{"anchor": 5, "positive": "b"}', ":2: 'anchor' is 5, not a text"),
    ],
)
def test_what_cannot_be_read_is_named(read, name, content, problem):
    assert problem in message(read, content, name)


def test_a_column_of_the_settings_that_is_missing(read):
    problem = "has no column bad; it has 'anchor', 'positive': set the column of the task"
    assert problem in message(read, "anchor\tpositive\na\tb\n", config=BAD)
