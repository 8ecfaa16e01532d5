# SPDX-License-Identifier: Apache-2.0
"""Damaged data of tasks and files of predictions: read, or refused in one line."""

import csv
import gzip
import io
import json
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from fuzzing import Reader, make_tests

from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks import tagging
from bert_jax.tasks.catalog import make_task
from bert_jax.tasks.glue import score as glue_score
from bert_jax.tasks.glue.read import TASKS
from bert_jax.tasks.squad import score as squad_score
from bert_jax.text.tokenizer import Tokenizer, wordpiece_tokenizer

WORDS = "the ban ran to old town and sat there".split()
LABELS = {"stsb": "2.5", "mnli": "neutral", "qnli": "entailment", "rte": "not_entailment"}


@cache
def tokenizer() -> Tokenizer:
    return wordpiece_tokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *"abcdefg", "##s"], True)


def read_task(source: Path | str, name: str, split: str = "train", **settings) -> None:
    """Reads the examples of a split, finds their labels and makes rows, as fine-tuning does."""
    settings = {"max_seq_length": 24, "max_query_length": 6, "doc_stride": 4} | settings
    task = make_task(TaskConfig(name=name, **settings))
    examples = task.read(str(source), split)
    labels = task.find_labels(examples)
    assert all(isinstance(label, str) and label.encode() for label in labels)
    if name in ("classification", "multilabel", "ner"):
        task = make_task(task.config, labels)
    task.make_rows(examples, tokenizer(), split == "train")


def make_glue(name: str):
    def make(directory: Path) -> None:
        columns, label = TASKS[name].texts[0], LABELS.get(name, "1")
        header = "\t".join(["index", *columns, TASKS[name].label[0]])
        rows = ["\t".join([str(row), *(" ".join(WORDS[row:]) for _ in columns), label]) for row in range(5)]
        if name == "cola":
            header, rows = "", [f"gj04\t{row % 2}\t*\t{' '.join(WORDS[row:])}" for row in range(5)]
        for split in ("train", "dev"):
            (directory / f"{split}.tsv").write_text("\n".join(filter(None, [header, *rows])) + "\n")

    return make


def glue(name: str, cases: int) -> Reader:
    return Reader(f"glue-{name}", make_glue(name), lambda path: read_task(path, name), ("train.tsv",), cases)


def make_squad(directory: Path) -> None:
    context = "The ban ran to the old town and sat there."
    questions = [
        {
            "id": "a",
            "question": "Who ran?",
            "answers": [{"text": "The ban", "answer_start": 0}],
            "is_impossible": False,
        },
        {"id": "b", "question": "Why?", "answers": [], "is_impossible": True},
    ]
    data = {"version": "2.0", "data": [{"title": "Ban", "paragraphs": [{"context": context, "qas": questions}]}]}
    (directory / "dev.json").write_text(json.dumps(data))
    data["data"][0]["paragraphs"][0]["qas"] = questions[:1]  # as v1.1 has it: each question has an answer
    (directory / "answered.json").write_text(json.dumps(data))
    (directory / "predictions.json").write_text(json.dumps({"a": "the ban", "b": ""}))
    (directory / "odds.json").write_text(json.dumps({"a": -1.5, "b": 3}))


def read_squad(path: Path) -> None:
    read_task(f"dev={path / 'answered.json'}", "squad1", "dev")
    read_task(path / "dev.json", "squad2", "dev")


def score_squad(path: Path) -> None:
    data, said = str(path / "dev.json"), str(path / "predictions.json")
    json.dumps(squad_score.score_files("squad1", str(path / "answered.json"), said))
    json.dumps(squad_score.score_files("squad2", data, said, str(path / "odds.json")))


def make_swag(directory: Path) -> None:
    header = ["video-id", "fold-ind", "sent1", "sent2", "ending0", "ending1", "ending2", "ending3", "label"]
    rows = [
        ["v", str(row), 'The "ban", he said', "It", "ran", "sat", "is", "was, too", str(row % 4)] for row in range(4)
    ]
    stream = io.StringIO()
    csv.writer(stream).writerows([header, *rows])
    (directory / "train.csv").write_text(stream.getvalue())


def lines(name: str, rows: list):
    """Returns what writes a file with a line for each row, as JSON unless it is a text."""
    content = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    return lambda directory: (directory / name).write_text(content)


TAGGED = "-DOCSTART- O\n\n" + "The O\nBan B-PER\nran O\n\nOld B-LOC\nTown I-LOC\n\n" * 2
CHOICES = [{"context": "The ban", "choices": ["ran", "sat"], "label": row % 2, "id": row} for row in range(3)]
SOFT = [{"text": "The ban", "labels": label} for label in (["a", "b"], [], "b,a", {"a": 0.5, "b": 1})] * 6
TRIPLETS = [{"anchor": " ".join(WORDS[row:]), "positive": "the ban", "negatives": ["old"]} for row in range(4)]


def make_tagged(directory: Path) -> None:
    (directory / "train.conll").write_text(TAGGED)
    (directory / "train.txt").write_text(TAGGED.replace(" ", "\t"))
    (directory / "said.conll").write_text(TAGGED)


def make_parquet(directory: Path) -> None:
    features = {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}}
    table = pa.table({"text": ["ban", "old town"] * 8, "label": [0, 1] * 8})
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, directory / "train.parquet")


def make_table(suffix: str):
    def make(directory: Path) -> None:
        rows = [{"text": " ".join(WORDS[row:]), "label": "ab"[row % 2]} for row in range(4)]
        if suffix == ".jsonl":
            content = "".join(json.dumps(row) + "\n" for row in rows)
        elif suffix == ".json":
            content = json.dumps({"data": rows})
        else:
            mark = {".tsv": "\t", ".csv": ","}[suffix.removesuffix(".gz")]
            content = "".join(
                f"{row['text']}{mark}{row['label']}\n" for row in [{"text": "text", "label": "label"}, *rows]
            )
        data = content.encode()
        (directory / f"train{suffix}").write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)

    return make


def table(suffix: str, cases: int) -> Reader:
    name = f"train{suffix}"
    return Reader(
        f"table{suffix}", make_table(suffix), lambda path: read_task(path / name, "classification"), (name,), cases
    )


def make_beir(directory: Path) -> None:
    texts = [{"_id": str(row), "title": "the", "text": " ".join(WORDS[row:])} for row in range(4)]
    for name in ("corpus", "queries"):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    (directory / "qrels").mkdir(exist_ok=True)
    for split in ("train", "dev"):
        rows = "".join(f"{row}\t{3 - row}\t{row}\n" for row in range(4))
        (directory / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + rows)


def read_beir(path: Path) -> None:
    for split in ("train", "dev"):
        read_task(path, "embeddings", split)


def make_submission(name: str):
    def make(directory: Path) -> None:
        make_glue(name)(directory)
        label = LABELS.get(name, "1")
        lines = ["index\tprediction", *(f"{row}\t{label}" for row in range(5))]
        (directory / "said.tsv").write_text("\n".join(lines) + "\n")

    return make


def submission(name: str, cases: int) -> Reader:
    def read(path: Path) -> None:
        json.dumps(glue_score.score_files(name, str(path / "dev.tsv"), str(path / "said.tsv")))

    return Reader(f"score-{name}", make_submission(name), read, ("dev.tsv", "said.tsv"), cases)


READERS = [
    *(glue(name, 60) for name in TASKS if name != "ax"),
    Reader("squad", make_squad, read_squad, ("dev.json", "answered.json"), 500),
    Reader("swag", make_swag, lambda path: read_task(path, "choice"), ("train.csv",), 250),
    Reader("choices", lines("train.jsonl", CHOICES), lambda path: read_task(path, "choice"), ("train.jsonl",), 250),
    Reader("ner-blanks", make_tagged, lambda path: read_task(path / "train.conll", "ner"), ("train.conll",), 150),
    Reader("ner-tabs", make_tagged, lambda path: read_task(path / "train.txt", "ner"), ("train.txt",), 150),
    Reader(
        "ner-jsonl",
        lines("train.jsonl", [{"tokens": ["The", "Ban"], "ner_tags": ["O", "B-PER"]}] * 3),
        lambda path: read_task(path, "ner"),
        ("train.jsonl",),
        200,
    ),
    *(table(suffix, 150) for suffix in (".tsv", ".csv", ".jsonl", ".json", ".tsv.gz")),
    Reader("labels", lines("train.jsonl", SOFT), lambda path: read_task(path, "multilabel"), ("train.jsonl",), 250),
    Reader("columns", make_parquet, lambda path: read_task(path, "classification"), ("train.parquet",), 300),
    Reader(
        "regression",
        lines("train.tsv", ["text\tlabel", *(f"the ban\t{row}.5" for row in range(4))]),
        lambda path: read_task(path, "regression"),
        ("train.tsv",),
        150,
    ),
    Reader(
        "triplets",
        lines("train.jsonl", TRIPLETS),
        lambda path: read_task(path, "embeddings"),
        ("train.jsonl",),
        150,
    ),
    Reader(
        "graded",
        lines("train.tsv", ["sentence1\tsentence2\tscore", *(f"the ban {row}\tthe town\t{row}.5" for row in range(4))]),
        lambda path: read_task(path, "embeddings"),
        ("train.tsv",),
        150,
    ),
    Reader(
        "sentences",
        lines("train.txt", ["the ban ran", "the town\tsat", "", "the sea"]),
        lambda path: read_task(path / "train.txt", "embeddings"),
        ("train.txt",),
        100,
    ),
    Reader("beir", make_beir, read_beir, ("*.jsonl", "qrels/*.tsv"), 200),
    Reader("score-squad", make_squad, score_squad, ("*.json",), 300),
    *(submission(name, 100) for name in ("sst2", "stsb", "mnli")),
    Reader(
        "score-ner",
        make_tagged,
        lambda path: tagging.score_files(str(path / "train.conll"), str(path / "said.conll")),
        ("*.conll",),
        150,
    ),
]

test_some_damage, test_much_damage = make_tests(READERS)
