# SPDX-License-Identifier: Apache-2.0
"""The tasks of finetune_torch.py: their files, the rows that a model reads, and their scores."""

import collections
import itertools
import json
import re
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats
import seqeval.metrics
import sklearn.metrics
import transformers

NO_LABEL = -100  # of tokens that are not asked about
NUM_BEST, MAX_ANSWER, MAX_QUERY, STRIDE = 20, 30, 64, 128  # SQuAD
SQUAD_TRAIN_ARTICLES = 28

Example = Any
Row = dict[str, Any]  # input_ids, token_type_ids, and labels or start_positions and end_positions


@dataclass(frozen=True)
class Task:
    """Files, model and score of a task."""

    kind: str  # texts, words or spans
    files: tuple[str, str]  # of training and development
    model: type
    read: Callable[[Path, str], list[Example]]  # the folder and a file -> examples
    metric: str  # by which the best epoch is chosen
    labels: tuple[str, ...] = ()  # of the classes; () for scores, spans, and where the training data names them
    max_length: int = 128
    epochs: int = 3


# Reading


def read_table(path: Path, columns: tuple[str | int, ...]) -> list[tuple[str, ...]]:
    """Returns (text, label) or (text, text, label) of each line; quotes mean nothing, names of columns a header."""
    lines = [line.split("\t") for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    header = lines.pop(0) if isinstance(columns[0], str) else []
    places = [header.index(column) if isinstance(column, str) else column for column in columns]
    return [tuple(line[place].strip() for place in places) for line in lines if len(line) > max(places)]


def read_conll(path: Path) -> list[tuple[list[str], list[str]]]:
    """Returns the words and the tags of each sentence."""
    sentences: list[tuple[list[str], list[str]]] = [([], [])]
    for line in path.read_text(encoding="utf-8").split("\n"):
        if not line.strip():
            sentences.append(([], []))
            continue
        word, tag = line.split("\t")[:2]
        sentences[-1][0].append(word)
        sentences[-1][1].append(tag.strip())
    return [sentence for sentence in sentences if sentence[0]]


def read_squad(folder: Path, part: str) -> list[Row]:
    """Returns the questions of the first articles, or of those after them."""
    articles = json.loads((folder / "dev-v1.1.json").read_text(encoding="utf-8"))["data"]
    chosen = articles[:SQUAD_TRAIN_ARTICLES] if part == "first" else articles[SQUAD_TRAIN_ARTICLES:]
    return [
        question | {"context": paragraph["context"]}
        for article in chosen
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]


def glue(metric: str, columns: tuple[str | int, ...], labels: tuple[str, ...]) -> Task:
    """Returns a task on texts or pairs of texts."""
    return Task(
        "texts",
        ("train.tsv", "dev.tsv"),
        transformers.BertForSequenceClassification,
        lambda folder, file: read_table(folder / file, columns),
        metric,
        labels,
    )


TASKS = {
    "sst2": glue("accuracy", ("sentence", "label"), ("0", "1")),
    "mrpc": glue("f1", ("#1 String", "#2 String", "Quality"), ("0", "1")),
    "rte": glue("accuracy", ("sentence1", "sentence2", "label"), ("entailment", "not_entailment")),
    "cola": glue("matthews", (3, 1), ("0", "1")),
    "stsb": glue("pearson", ("sentence1", "sentence2", "score"), ()),
    "wnut17": Task(
        "words",
        ("wnut17train.conll", "emerging.dev.conll"),
        transformers.BertForTokenClassification,
        lambda folder, file: read_conll(folder / file),
        "f1",
    ),
    "squad1": Task(
        "spans", ("first", "rest"), transformers.BertForQuestionAnswering, read_squad, "f1", max_length=384, epochs=2
    ),
}


# Rows of the model's input


def find_labels(task: Task, examples: list[Example]) -> tuple[str, ...]:
    """Returns the classes; of words the tags that there are."""
    return tuple(sorted({tag for _, tags in examples for tag in tags})) if task.kind == "words" else task.labels


def make_rows(examples: list[Example], task: Task, tokenizer: Any, labels: tuple[str, ...]) -> list[Row]:
    """Returns the rows of the examples, in their order; a question has several where its paragraph is long."""
    if task.kind == "words":
        return word_rows(examples, task, tokenizer, labels)
    return (squad_rows if task.kind == "spans" else text_rows)(examples, task, tokenizer)


def text_rows(examples: list[Example], task: Task, tokenizer: Any) -> list[Row]:
    """Returns a row for each text or pair; of a pair the longer is cut."""
    rows = []
    for *texts, label in examples:
        row = dict(tokenizer(*texts, truncation=True, max_length=task.max_length))
        rows.append(row | {"labels": task.labels.index(label) if task.labels else float(label)})
    return rows


def word_rows(examples: list[Example], task: Task, tokenizer: Any, labels: tuple[str, ...]) -> list[Row]:
    """Returns a row for each sentence; a word's tag stands on its first token, and its place in "words"."""
    rows = []
    for words, tags in examples:
        encoded = tokenizer(words, is_split_into_words=True, truncation=True, max_length=task.max_length)
        owners = encoded.word_ids()
        first = [owner is not None and owner not in owners[:place] for place, owner in enumerate(owners)]
        asked = [labels.index(tags[owner]) if is_first else NO_LABEL for owner, is_first in zip(owners, first)]
        rows.append(dict(encoded) | {"labels": asked, "words": owners})
    return rows


def squad_rows(examples: list[Example], task: Task, tokenizer: Any) -> list[Row]:
    """Returns the windows of each paragraph: [CLS] question [SEP] window [SEP].

    A window that does not hold the whole answer has none: both labels are 0.
    """
    rows = []
    for number, example in enumerate(examples):
        question = tokenizer(example["question"], add_special_tokens=False)["input_ids"][:MAX_QUERY]
        paragraph = tokenizer(example["context"], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        tokens, offsets = paragraph["input_ids"], paragraph["offset_mapping"]
        answer = example["answers"][0]
        first, last = answer["answer_start"], answer["answer_start"] + len(answer["text"]) - 1
        inside = [place for place, (start, stop) in enumerate(offsets) if stop > first and start <= last]
        room = task.max_length - len(question) - 3
        starts = [0]
        while starts[-1] + room < len(tokens):
            starts.append(starts[-1] + STRIDE)
        spans = [(start, min(start + room, len(tokens))) for start in starts]
        for window, (start, stop) in enumerate(spans):
            shift = len(question) + 2 - start
            begin = [tokenizer.cls_token_id, *question, tokenizer.sep_token_id]
            whole = bool(inside) and start <= inside[0] and inside[-1] < stop
            rows.append(
                {
                    "input_ids": [*begin, *tokens[start:stop], tokenizer.sep_token_id],
                    "token_type_ids": [0] * len(begin) + [1] * (stop - start + 1),
                    "start_positions": inside[0] + shift if whole else 0,
                    "end_positions": inside[-1] + shift if whole else 0,
                    "example": number,
                    # Where a token may start an answer, and what it is of the paragraph.
                    "characters": {place + shift: offsets[place] for place in range(start, stop)},
                    "starts": {place + shift for place in range(start, stop) if best_window(place, spans) == window},
                }
            )
    return rows


def best_window(place: int, spans: list[tuple[int, int]]) -> int:
    """Returns the window in which a token has the most context on its poorer side; of equals the first."""
    scores = [
        min(place - start, stop - 1 - place) + 0.01 * (stop - start) if start <= place < stop else -1.0
        for start, stop in spans
    ]
    return int(np.argmax(scores))


# Scores


def score(
    task: Task, labels: tuple[str, ...], examples: list[Example], rows: list[Row], outputs: list[np.ndarray]
) -> dict[str, float]:
    """Returns the metrics of a task, in percent."""
    if task.kind == "spans":
        return score_squad(examples, rows, outputs)
    if task.kind == "words":
        found = [["O"] * len(tags) for _, tags in examples]  # what has no token, or was cut off, is no entity
        for row, output, tags in zip(rows, outputs, found):
            for place, label in enumerate(row["labels"]):
                if label != NO_LABEL:
                    tags[row["words"][place]] = labels[int(output[place].argmax())]
        expected = [tags for _, tags in examples]
        return {"f1": 100 * float(seqeval.metrics.f1_score(expected, found))}
    expected = [row["labels"] for row in rows]
    if not labels:
        values = np.array(outputs)[:, 0]
        return {
            "pearson": 100 * float(scipy.stats.pearsonr(values, expected)[0]),
            "spearman": 100 * float(scipy.stats.spearmanr(values, expected)[0]),
        }
    found = np.array(outputs).argmax(-1)
    return {
        "accuracy": 100 * float(np.mean(found == expected)),
        "f1": 100 * float(sklearn.metrics.f1_score(expected, found)),
        "matthews": 100 * float(sklearn.metrics.matthews_corrcoef(expected, found)),
    }


def score_squad(examples: list[Example], rows: list[Row], outputs: list[np.ndarray]) -> dict[str, float]:
    """Returns exact matches and F1 of the best span of each question, by the official script's rule."""
    best: dict[int, tuple[float, str]] = {}
    for row, (starts, ends) in zip(rows, outputs):
        number, places = row["example"], row["characters"]
        first, last = (np.argsort(-logits, kind="stable")[:NUM_BEST].tolist() for logits in (starts, ends))
        for start, end in itertools.product(first, last):
            if start in row["starts"] and end in places and start <= end < start + MAX_ANSWER:
                value = float(starts[start] + ends[end])
                if number not in best or value > best[number][0]:
                    best[number] = value, examples[number]["context"][places[start][0] : places[end][1]]
    exact, f1 = [], []
    for number, example in enumerate(examples):
        found = normal_words(best[number][1] if number in best else "")
        references = [normal_words(answer["text"]) for answer in example["answers"]]
        exact.append(max(float(found == reference) for reference in references))
        f1.append(max(overlap(found, reference) for reference in references))
    return {"exact": 100 * float(np.mean(exact)), "f1": 100 * float(np.mean(f1))}


def normal_words(text: str) -> list[str]:
    """Returns the words in lower case, without punctuation and articles."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def overlap(found: list[str], reference: list[str]) -> float:
    """Returns the F1 of two bags of words."""
    common = (collections.Counter(found) & collections.Counter(reference)).total()
    return 2 * common / (len(found) + len(reference)) if common else 0.0
