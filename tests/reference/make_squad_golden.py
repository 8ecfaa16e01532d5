# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/squad.json: windows and answers that Google's run_squad.py makes of questions made up here.

    python3.11 tests/reference/make_squad_golden.py --reference=bert --output=tests/golden/squad.json

`--reference` is a folder with run_squad.py and tokenization.py of google-research/bert; they run unchanged, with
nothing in place of TensorFlow, which their reading, cutting and decoding do not need.
`tests/tasks/squad/test_goldens.py` makes the same questions and logits with the functions below, and
`tests/reference/test_live_squad.py` compares
real data with the same reference.
"""

import argparse
import hashlib
import json
import math
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

NUM_EXAMPLES = 36
SETTINGS = {"max_seq_length": 64, "doc_stride": 16, "max_query_length": 12}
NUM_BEST, MAX_ANSWER_LENGTH = 20, 10
# What text is made of, some of it awkward: accents, hyphens, abbreviations, numbers, brackets, words of no token.
_WORDS = (
    "the of and in a to was is for on as by with he at from his an were are which this also be had or has it "
    "first new one two more city year time war world state school film season team south north university "
    'café naïve Zürich Ángel re-elected mother-in-law U.S. 1,234.5 $20 (born 1954–55) "quoted" don\'t St. '
    "3rd 90% AT&T résumé, Łódź; ☃ 中文 Москва running unbelievably counterrevolutionaries"
).split()


class Settings(NamedTuple):
    """What a comparison is made with."""

    max_seq_length: int = 384
    doc_stride: int = 128
    max_query_length: int = 64
    num_best: int = 20
    max_answer_length: int = 30
    no_answers: bool = False  # whether v2.0


def made_up_data(no_answers: bool) -> dict[str, Any]:
    """Returns questions in SQuAD's format, each with at most one answer; with none too if that may be."""
    rng = random.Random(0)
    paragraphs = []
    for number in range(NUM_EXAMPLES // 3):
        words = rng.choices(_WORDS, k=rng.choice([5, 30, 80, 160]))
        context = " ".join(word + rng.choice(["", "", "", "", ",", "."]) for word in words)
        questions = []
        for which in range(3):
            start = rng.randrange(len(words))
            spans = [0, *(index + 1 for index, char in enumerate(context) if char == " "), len(context) + 1]
            answer = context[spans[start] : spans[min(start + rng.randint(1, 4), len(words))] - 1].rstrip(",.;")
            impossible = which == 2 or not answer
            questions.append(
                {
                    "id": f"{number}-{which}",
                    "question": " ".join(rng.choices(_WORDS, k=rng.choice([3, 6, 20]))) + "?",
                    "answers": [] if impossible else [{"text": answer, "answer_start": spans[start]}],
                    "is_impossible": impossible,
                }
            )
        questions = [question for question in questions if no_answers or question["answers"]]
        paragraphs.append({"context": context, "qas": questions})
    return {"version": "made up", "data": [{"title": "", "paragraphs": paragraphs}]}


def make_logits(number: int, length: int, span: tuple[int, int] | None) -> np.ndarray:
    """Returns [L, 2] float32 logits for the window of this number: noise and, if it is given, a peak at the answer.

    Values are multiples of 1/64, so every sum of two is exact, and equals do occur.
    """
    rng = np.random.default_rng(number)
    logits = np.round(rng.normal(0, 2, (length, 2)) * 64) / 64
    if span is not None:
        logits[span[0], 0] += 6
        logits[span[1], 1] += 6
    return logits.astype(np.float32)


def import_reference(folder: str | Path) -> Any:
    """Returns Google's run_squad.py as a module."""
    names = ("tensorflow", "modeling", "optimization")
    with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in names}):
        modules = {}
        for name in ("tokenization", "run_squad"):
            spec = util.spec_from_file_location(name, Path(folder) / f"{name}.py")
            assert spec and spec.loader
            modules[name] = sys.modules[name] = util.module_from_spec(spec)
            spec.loader.exec_module(modules[name])
    reference = modules["run_squad"]
    reference.tf.gfile.Open = reference.tf.gfile.GFile = lambda path, mode: open(path, mode, encoding="utf-8")
    reference.FLAGS.verbose_logging = False
    return reference


def reference_features(
    reference: Any, data: str | Path, vocab: str | Path, lowercase: bool, settings: Settings, training: bool
) -> tuple[list, list]:
    """Returns the reference's examples and its features, the windows."""
    reference.FLAGS.version_2_with_negative = settings.no_answers
    tokenizer = reference.tokenization.FullTokenizer(vocab_file=str(vocab), do_lower_case=lowercase)
    examples = reference.read_squad_examples(str(data), is_training=training)
    features: list[Any] = []
    sizes = settings.max_seq_length, settings.doc_stride, settings.max_query_length
    reference.convert_examples_to_features(examples, tokenizer, *sizes, training, features.append)
    return examples, features


def reference_predictions(
    reference: Any,
    examples: Sequence,
    features: Sequence,
    logits: Sequence[np.ndarray],
    settings: Settings,
    lower: bool,
) -> tuple[dict, dict, dict]:
    """Returns predictions, n-best and null odds as the reference writes them.

    `logits` are without padding: padding gets logits that are never among the best.
    """
    reference.FLAGS.version_2_with_negative = settings.no_answers
    reference.FLAGS.null_score_diff_threshold = 0.0
    results = []
    for feature, values in zip(features, logits):
        padded = np.full((settings.max_seq_length, 2), -1e6)
        padded[: len(values)] = values
        results.append(reference.RawResult(feature.unique_id, padded[:, 0].tolist(), padded[:, 1].tolist()))
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{name}" for name in ("predictions", "nbest", "odds")]
        reference.write_predictions(
            examples, features, results, settings.num_best, settings.max_answer_length, lower, *paths
        )
        values = [json.loads(Path(path).read_text()) if Path(path).exists() else {} for path in paths]
    return values[0], values[1], values[2]


def fingerprint(values: Any) -> str:
    """Returns a short hash of anything that JSON has."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def make_goldens(reference: Any, vocab: Path, no_answers: bool) -> dict[str, Any]:
    """Returns what the reference makes of the questions that are made up."""
    settings = Settings(**SETTINGS, num_best=NUM_BEST, max_answer_length=MAX_ANSWER_LENGTH, no_answers=no_answers)
    data = made_up_data(no_answers)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(data, file)
        file.flush()
        _, training = reference_features(reference, file.name, vocab, True, settings, True)
        examples, features = reference_features(reference, file.name, vocab, True, settings, False)
    logits = [
        make_logits(number, len(feature.tokens), (labelled.start_position, labelled.end_position))
        for number, (feature, labelled) in enumerate(zip(features, training))
    ]
    failed = alignment_failures(reference)
    predictions, n_best, odds = reference_predictions(reference, examples, features, logits, settings, True)
    windows = [
        [
            feature.example_index,
            fingerprint(feature.input_ids[: len(feature.tokens)]),
            "".join(str(int(value)) for value in feature.token_is_max_context.values()),
            labelled.start_position,
            labelled.end_position,
        ]
        for feature, labelled in zip(features, training)
    ]
    best: dict[str, list] = {
        name: [[span["text"], span["start_logit"] + span["end_logit"], span["probability"]] for span in spans[:5]]
        for name, spans in n_best.items()
    }
    return {"windows": windows, "predictions": predictions, "n_best": best, "odds": odds, "not_aligned": sorted(failed)}


def alignment_failures(reference: Any) -> set[str]:
    """Returns a set that from now on gets the answers for which the reference gives up and takes whole words."""
    failed: set[str] = set()
    align: Callable = getattr(reference.get_final_text, "unrecorded", reference.get_final_text)

    def recorded(predicted: str, original: str, lower: bool) -> str:
        messages: list[Any] = []
        reference.FLAGS.verbose_logging = True
        with mock.patch.object(reference.tf.logging, "info", lambda *values: messages.append(values)):
            text = align(predicted, original, lower)
        reference.FLAGS.verbose_logging = False
        if messages:
            failed.add(text)
        return text

    recorded.unrecorded = align  # type: ignore[attr-defined]
    reference.get_final_text = recorded
    return failed


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reference", required=True)
    parser.add_argument("--vocab", default="tests/fixtures/tokenizer/vocab.txt")
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    goldens = {
        name: make_goldens(import_reference(arguments.reference), Path(arguments.vocab), name == "squad2")
        for name in ("squad1", "squad2")
    }
    assert not any(math.isnan(value) for golden in goldens.values() for value in golden["odds"].values())
    Path(arguments.output).write_text(json.dumps(goldens, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
