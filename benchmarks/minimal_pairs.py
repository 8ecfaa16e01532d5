# SPDX-License-Identifier: Apache-2.0
"""The accuracies of a model on minimal pairs by paradigm, beside published ones.

    bert_jax score_sentences --checkpoint=DIR --pairs=blimp.jsonl.gz --output=blimp.json
    python -m benchmarks.minimal_pairs --scores=blimp.json --baselines=baselines.tsv

The baselines are a table with tabs and a header: the paradigm, perhaps its phenomenon, and a column of accuracies from
0 to 1 for each model. The mean of a model is over the paradigms that are scored, and is left out where it lacks one.
"""

import csv
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from bert_jax.tools import cli

SCORES = flags.DEFINE_string("scores", "", "what score_sentences --pairs wrote with --output")
BASELINES = flags.DEFINE_string("baselines", "", "a table of published accuracies by paradigm")

Baselines = dict[str, dict[str, float]]  # paradigm -> model -> accuracy


def read_baselines(path: Path) -> Baselines:
    """Returns the published accuracies of each paradigm; rows of means, called "overall", are left out."""
    header, *rows = csv.reader(path.read_text(encoding="utf-8").splitlines(), delimiter="\t")
    # the second column may be the phenomenon
    first = 1 if rows[0][1].replace(".", "", 1).isdigit() else 2
    names = [name.removesuffix("_accuracy") for name in header[first:]]
    return {
        row[0]: dict(zip(names, map(float, row[first:])))
        for row in rows
        if row and row[0] != "overall"
    }


def table_lines(scores: Mapping[str, Any], baselines: Baselines) -> list[str]:
    """Returns the lines of the table, in per cent: each paradigm, the mean of each phenomenon, and of all."""
    models = list(dict.fromkeys(model for known in baselines.values() for model in known))
    lines = [
        f"{'paradigm':60}{'pairs':>8}{'right %':>9}{'95 % interval':>15}"
        + "".join(f"{m:>14}" for m in models)
    ]

    def add(title: str, row: Mapping[str, Any], paradigms: Sequence[Mapping[str, Any]]) -> None:
        cells = []
        for model in models:
            known = [
                baselines[one["name"]][model]
                for one in paradigms
                if model in baselines.get(one["name"], {})
            ]
            cells.append(
                f"{100 * statistics.mean(known):14.1f}"
                if len(known) == len(paradigms)
                else " " * 14
            )
        low, high = (100 * bound for bound in row["interval"])
        accuracy = f"{row['pairs']:8,}{100 * row['accuracy']:9.1f}{low:8.1f} - {high:4.1f}"
        lines.append(f"{title:60}{accuracy}{''.join(cells)}")

    for phenomenon in scores["phenomena"]:
        members = [one for one in scores["paradigms"] if one["phenomenon"] == phenomenon["name"]]
        for paradigm in members:
            add(paradigm["name"], paradigm, [paradigm])
        add(phenomenon["name"].upper(), phenomenon, members)
    add("OVERALL", scores["overall"], scores["paradigms"])
    return lines


def main() -> None:
    """Prints the table."""
    cli.check_given(SCORES)
    baselines = read_baselines(Path(BASELINES.value)) if BASELINES.value else {}
    print(
        "\n".join(
            table_lines(json.loads(Path(SCORES.value).read_text(encoding="utf-8")), baselines)
        )
    )


if __name__ == "__main__":
    cli.run(main)
