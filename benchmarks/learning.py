# SPDX-License-Identifier: Apache-2.0
"""How a model learns: what was measured of its revisions, over the tokens they had read."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.tables import markdown
from bert_jax.errors import InputError

_AT = re.compile(r"(.*)@(\d+)")  # the name of a measurement, and the step of the revision that was measured
ByTokens = dict[float, float]  # tokens read -> accuracy


class Learning(NamedTuple):
    """Accuracies over the tokens read."""

    phenomena: dict[str, ByTokens]  # of minimal pairs
    pairs: ByTokens
    words: ByTokens  # masked words that were guessed
    task: ByTokens  # the task's metric, the mean over fine-tunings; empty if no task is asked for


def learning_of(record: Mapping[str, Any], spec: Mapping[str, Any]) -> Learning:
    """Returns what a page's block `learning` asks for.

    Raises: InputError if there is no such unit, or nothing was measured of its revisions.
    """
    units = [unit for unit in record["units"] if unit["group"] == spec["group"]]
    unit = next((each for each in units if each["seed"] == spec.get("seed", units[0]["seed"])), None)
    if unit is None:
        raise InputError(f"group {spec['group']} has no seed {spec['seed']}; it has {[each['seed'] for each in units]}")
    pairs = revisions(unit.get("pairs", {}), spec["pairs"])
    words = revisions(unit.get("evaluations", {}), spec["evaluation"])
    tasks = revisions(unit.get("tasks", {}), spec.get("task", ""))
    if not pairs or not words:
        raise InputError(
            f"group {spec['group']} has no {spec['pairs']}@STEP or no {spec['evaluation']}@STEP; measure its revisions"
        )
    tokens = {step: tokens_at(unit, step) for step in {*pairs, *words, *tasks}}
    phenomena: dict[str, ByTokens] = {}
    for step, table in pairs.items():
        for line in table["phenomena"]:
            phenomena.setdefault(line["name"], {})[tokens[step]] = line["accuracy"]
    return Learning(
        phenomena,
        {tokens[step]: table["overall"]["accuracy"] for step, table in pairs.items()},
        {tokens[step]: score["metrics"][spec["metric"]] for step, score in words.items()},
        {tokens[step]: _mean(task) for step, task in tasks.items()},
    )


def revisions(measured: Mapping[str, Any], name: str) -> dict[int, Any]:
    """Returns {step: measurement} of those that are called NAME@STEP, by step; step 0 is left out."""
    matches = {key: match for key in measured if (match := _AT.fullmatch(key)) and match[1] == name}
    found = {int(match[2]): measured[key] for key, match in matches.items()}
    return {step: found[step] for step in sorted(found) if step}


def tokens_at(unit: Mapping[str, Any], step: int) -> float:
    """Returns how many tokens a unit had been trained on at a step.

    As the revision's own measurements say, or else the same share of all tokens as the step is of all steps.

    Raises: InputError if neither is known.
    """
    for kind in ("evaluations", "pairs"):
        for measurement in unit.get(kind, {}).values():
            trained = measurement.get("trained") or {}
            if trained.get("step") == step and trained.get("tokens"):
                return float(trained["tokens"])
    trained = unit.get("trained") or {}
    if not trained.get("tokens") or not trained.get("step"):
        raise InputError(f"group {unit['group']}, seed {unit['seed']}: nothing says how many tokens step {step} is")
    return trained["tokens"] * step / trained["step"]


def learning_table(found: Learning, labels: Sequence[str]) -> list[str]:
    """Returns a row for masked words, one for minimal pairs and one for the task, with a column for each revision.

    Raises: InputError if a row has no label.
    """
    rows = [values for values in (found.words, found.pairs, found.task) if values]
    if len(labels) < len(rows):
        raise InputError(f"labels has {len(labels)} names; give {len(rows)}, for masked words, pairs and a task")
    tokens = sorted({each for values in rows for each in values})
    body = [
        [label, *(f"{100 * values[each]:.1f}" if each in values else "" for each in tokens)]
        for label, values in zip(labels, rows, strict=False)
    ]
    return markdown(["tokens read", *(f"{each / 1e6:.3g} M" for each in tokens)], body)


def _mean(task: Mapping[str, Any]) -> float:
    scores = [metrics[task["metric"]] for metrics in task["runs"].values()]
    return sum(scores) / len(scores)
