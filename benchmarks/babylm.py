# SPDX-License-Identifier: Apache-2.0
"""The zero-shot tasks of the BabyLM challenge, 2025 and 2026, with predictions as its pipeline writes them.

    python -m benchmarks.babylm --checkpoint=runs/babylm --revisions=chck_1M=runs/babylm@172,chck_2M=runs/babylm@344
        --data=evaluation_data --output=results/NAME

Reads the folders that the challenge gives out: of `full_eval/` BLiMP and its supplement, EWoK, entity tracking, COMPS
and both tasks of made-up words for the checkpoint, of `fast_eval/` the small sets for each revision, and the contexts
of age of acquisition for each revision. What is not there is left out, and said. `--output` then has predictions.json
of each task, and surprisal.json, in the places from which collate_preds takes them. Reading times and fine-tuning are
left to the challenge's own pipeline.

A score is the sum of the log-probabilities of the tokens of a completion, each masked by itself; with a causal model,
each after those before it. The first of equal options is taken, and so right, as there.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

import bert_jax
from bert_jax.errors import InputError
from bert_jax.inference.sentence_scores import token_scores
from bert_jax.storage.writing import write_json
from bert_jax.tasks.readers import read_json_lines
from bert_jax.tasks.records import Record
from bert_jax.tasks.scores import spearman
from bert_jax.tools import cli

FULL = {
    "blimp_filtered": "blimp",
    "supplement_filtered": "blimp",
    "ewok_filtered": "ewok",
    "entity_tracking": "entity_tracking",
    "wug_adj_nominalization": "wug_adj",
    "wug_past_tense": "wug_past",
    "comps": "comps",
}
FAST = {
    "blimp_fast": "blimp",
    "supplement_fast": "blimp",
    "ewok_fast": "ewok",
    "entity_tracking_fast": "entity_tracking",
    "wug_adj_nominalization": "wug_adj",
    "wug_past_tense": "wug_past",
}
AGES = ("aoa/cdi_childes.json", "cdi_childes/cdi_childes.json")  # of 2026, of 2025
SPLITS = ("regular", "ambiref", "move_contents")  # of entity tracking, whose means count equally
_COMPS = {
    "comps_base": "base",
    "comps_wugs": "wugs",
    "comps_wugs_dist-before": "wugs_dist_before",
}
_LAST_OF_COMPS = "wugs_dist_in_between"


class Item(NamedTuple):
    """A question: which option is likeliest? The first is right."""

    subtask: str
    sentences: list[str]
    completions: list[str]  # the ends of the sentences that are scored
    predictions: list[str]  # what is written if an option is taken
    ratio: float = math.nan  # of people, who chose the first


def blimp(record: Record, stem: str) -> Item:
    """Returns the question of a line; the files of the supplement do not name their subtask."""
    options = [record.get_as(name, str) for name in ("sentence_good", "sentence_bad")]
    subtask = record.get_as("UID", str) if "field" in record else stem
    return Item(subtask, options, options, options)


def ewok(record: Record, stem: str) -> Item:
    """Returns the question of a line: which of two targets follows the first context?"""
    completions = [" " + record.get_as(name, str) for name in ("Target1", "Target2")]
    sentences = [record.get_as("Context1", str) + target for target in completions]
    return Item(record.get_as("Domain", str), sentences, completions, completions)


def entity_tracking(record: Record, stem: str) -> Item:
    """Returns the question of a line: what is in a box, after some operations?"""
    options = record.get_as("options", list)
    sentences = [record.get_as("input_prefix", str) + option for option in options]
    return Item(f"{stem}_{record.get('numops')}_ops", sentences, options, options)


def comps(record: Record, stem: str) -> Item:
    """Returns the question of a line: whose property is it?"""
    phrase = record.get_as("property_phrase", str)
    names = ("prefix_acceptable", "prefix_unacceptable")
    sentences = [f"{record.get_as(name, str)} {phrase}" for name in names]
    return Item(_COMPS.get(stem, _LAST_OF_COMPS), sentences, [phrase, phrase], sentences)


def wug(task: str) -> Callable[[Record, str], Item]:
    """Returns what reads a line of a task of made-up words: which of two forms?"""

    def read(record: Record, stem: str) -> Item:
        forms = record.get_as("sentences", str).split("\t")
        return Item(task, forms, forms, forms, float(record["ratio"]))

    return read


READERS: dict[str, Callable[[Record, str], Item]] = {
    "blimp": blimp,
    "ewok": ewok,
    "entity_tracking": entity_tracking,
    "comps": comps,
    "wug_adj": wug("wug_adj"),
    "wug_past": wug("wug_past"),
}


def read_items(folder: Path, task: str) -> list[Item]:
    """Returns the questions of a folder, in the order of its files. Raises: InputError if a line lacks something."""
    return [
        READERS[task](record, path.stem)
        for path in sorted(folder.glob("*.jsonl"))
        for record in read_json_lines(str(path))
    ]


def completion_scores(
    bert: bert_jax.Pretrained, sentences: Sequence[str], completions: Sequence[str]
) -> np.ndarray:
    """Returns the sum of the scores of the tokens of each completion, [n] float64, which ends its sentence.

    A token that is partly in the completion belongs to it. Raises: InputError if a sentence is too long.
    """
    begins = []
    for sentence, completion in zip(sentences, completions, strict=True):
        start = len(sentence) - len(completion)
        _, spans = bert.tokenizer.encode_with_offsets(sentence)
        begins.append(int(np.count_nonzero(spans[:, 1] <= start)))
    scores = token_scores(bert, sentences, long_texts="refuse", begins=begins)
    return np.array([values.sum(dtype=np.float64) for values in scores])


def answer(bert: bert_jax.Pretrained, items: Sequence[Item]) -> list[np.ndarray]:
    """Returns the scores of the options of each item."""
    scores = completion_scores(
        bert,
        [sentence for item in items for sentence in item.sentences],
        [completion for item in items for completion in item.completions],
    )
    return np.split(scores, np.cumsum([len(item.sentences) for item in items])[:-1])


def predictions_of(items: Sequence[Item], scores: Sequence[np.ndarray]) -> dict[str, Any]:
    """Returns the content of predictions.json."""
    found: dict[str, Any] = {}
    for item, of_options in zip(items, scores):
        predictions = found.setdefault(item.subtask, {"predictions": []})["predictions"]
        prediction: dict[str, Any] = {
            "id": f"{item.subtask}_{len(predictions)}",
            "pred": item.predictions[int(np.argmax(of_options))],
        }
        if not math.isnan(item.ratio):
            prediction["prob"] = share_of_first(of_options)
        predictions.append(prediction)
    return found


def share_of_first(scores: np.ndarray) -> float:
    """Returns the softmax of the first score."""
    return float(1 / np.exp(scores - scores[0]).sum())


def summary(task: str, items: Sequence[Item], scores: Sequence[np.ndarray]) -> float:
    """Returns the accuracy in percent, the mean of the subtasks, or Spearman's correlation for made-up words."""
    if task.startswith("wug"):
        shares = [share_of_first(of_options) for of_options in scores]
        return spearman(shares, [item.ratio for item in items])
    right: dict[str, list[bool]] = {}
    for item, of_options in zip(items, scores):
        right.setdefault(item.subtask, []).append(int(np.argmax(of_options)) == 0)
    means = {name: float(np.mean(each)) for name, each in right.items()}
    if task == "entity_tracking":
        groups = [
            [mean for name, mean in means.items() if name.startswith(split)] for split in SPLITS
        ]
        return 100 * float(np.mean([np.mean(group) for group in groups if group]))
    return 100 * float(np.mean(list(means.values())))


def score_sets(
    bert: bert_jax.Pretrained, folder: Path, sets: dict[str, str], output: Path
) -> dict[str, float]:
    """Writes the predictions of all sets that are there, and returns their figures."""
    figures = {}
    for name, task in sets.items():
        items = read_items(folder / name, task)
        if not items:
            print(f"{folder / name}: nothing there; left out", flush=True)
            continue
        scores = answer(bert, items)
        place = output / task / name
        place.mkdir(parents=True, exist_ok=True)
        write_json(place / "predictions.json", predictions_of(items, scores))
        figures[name] = summary(task, items, scores)
        print(f"{name:24}{len(items):8,} {figures[name]:8.2f}", flush=True)
    return figures


def surprisals(
    bert: bert_jax.Pretrained, revision: str, contexts: Iterable[tuple[str, list[str]]]
) -> list[dict[str, Any]]:
    """Returns the surprisal in nats of each word in each of its contexts, as age of acquisition takes it."""
    rows = [
        (word, number, context)
        for word, of_word in contexts
        for number, context in enumerate(of_word)
    ]
    scores = completion_scores(
        bert,
        [f"{context.strip()} {word.strip()}" for word, _, context in rows],
        [word.strip() for word, _, _ in rows],
    )
    return [
        {
            "step": revision,
            "word_count": words_of(revision),
            "target_word": word,
            "context_id": number,
            "context": context,
            "surprisal": -float(score),
        }
        for (word, number, context), score in zip(rows, scores)
    ]


def words_of(revision: str) -> int:
    """Returns how many words a revision has read. Raises: InputError if its name does not say it."""
    match = re.fullmatch(r"chck_(\d+)M", revision)
    if match is None:
        raise InputError(f"revision {revision!r} does not say its words; name it as chck_10M")
    return 1_000_000 * int(match[1])


def read_contexts(path: Path) -> list[tuple[str, list[str]]]:
    """Returns the words of more than one letter, each with its contexts."""
    content = json.loads(path.read_text("utf-8"))
    return [
        (word, [each["context"] for each in contexts])
        for word, contexts in content.items()
        if len(word) > 1
    ]


def define_flags() -> None:
    """Defines the flags of the command."""
    flags.DEFINE_string("checkpoint", "", "the model; as other commands take it")
    flags.DEFINE_list("revisions", [], "earlier ones, such as chck_1M=runs/babylm@172")
    flags.DEFINE_string("data", "evaluation_data", "with full_eval/, fast_eval/ or both")
    flags.DEFINE_string("output", "", "a folder for the predictions, named as the model")


def main() -> None:
    """Scores the model and its revisions."""
    given = flags.FLAGS
    if not given.checkpoint or not given.output:
        raise InputError("--checkpoint and --output are needed; --help says what they are")
    data, output = Path(given.data), Path(given.output)
    revisions = [revision.partition("=")[::2] for revision in given.revisions]
    for name, _ in revisions:
        words_of(name)
    bert = bert_jax.load_pretrained(given.checkpoint)
    backend = "causal" if bert.config.causal else "mlm"
    figures = {
        "main": score_sets(bert, data / "full_eval", FULL, output / "main/zero_shot" / backend)
    }
    ages = [data / "full_eval" / name for name in AGES if (data / "full_eval" / name).exists()]
    found: list[dict[str, Any]] = []
    for name, checkpoint in revisions:
        print(name, flush=True)
        bert = bert_jax.load_pretrained(checkpoint)
        place = output / name / "zero_shot" / backend
        figures[name] = score_sets(bert, data / "fast_eval", FAST, place)
        if ages:
            found += surprisals(bert, name, read_contexts(ages[0]))
    if found:
        place = output / "main/zero_shot" / backend / "AoA_word"
        place.mkdir(parents=True, exist_ok=True)
        steps = len(revisions)
        about = {"model_name": output.name, "use_bos_only": False}
        about |= {"total_steps": steps, "completed_steps": steps}
        write_json(place / "surprisal.json", {"metadata": about, "results": found})
    write_json(output / "figures.json", figures)


if __name__ == "__main__":
    define_flags()
    cli.run(main)
