# SPDX-License-Identifier: Apache-2.0
"""Prints the results of fine-tuning runs side by side.

bert_jax compare_runs --workdirs=DIR,DIR

If a work directory holds a grid of seeds or learning rates, the mean, the worst and the best of its runs are shown.
"""

import statistics

from absl import flags

from bert_jax.errors import InputError
from bert_jax.storage.places import to_place
from bert_jax.tools import cli

WORKDIRS = flags.DEFINE_list("workdirs", [], "work directories of finetune, separated by commas")


def main() -> None:
    """Prints a table with a line for each work directory, with the score of a constant answer to its data."""
    cli.check_given(WORKDIRS)

    from bert_jax.tasks.results import read_results, table

    rows = []
    for name in WORKDIRS.value:
        workdir = to_place(name)
        runs = sorted((workdir / "runs").iterdir()) if (workdir / "runs").is_dir() else []
        results = [
            result for run in runs or [workdir] if (result := read_results(run)) and result.metrics
        ]
        if not results:
            raise InputError(
                f"{name} has no results.json of a run that was evaluated; let finetune finish there"
            )
        metric = results[0].metric
        scores = [result.metrics[metric] for result in results if metric in result.metrics]
        if not scores:
            known = ", ".join(results[0].metrics)
            raise InputError(
                f"{name}: results.json has no {metric!r}, only {known}; give the same command again there"
            )
        constant = results[0].constant.get(metric)
        figures = (statistics.mean(scores), min(scores), max(scores))
        seconds = sum(result.seconds for result in results)
        shown = [
            *(f"{figure:.3f}" for figure in figures),
            "" if constant is None else f"{constant:.3f}",
        ]
        rows.append([name, metric, str(len(results)), *shown, f"{seconds:.0f}"])
    print(
        "\n".join(
            table([["", "metric", "runs", "mean", "worst", "best", "constant", "seconds"], *rows])
        )
    )


if __name__ == "__main__":
    cli.run(main)
