# SPDX-License-Identifier: Apache-2.0
r"""Prints the official scores of a file of predictions, as JSON.

bert_jax score --task=squad1 --data=dev-v1.1.json --predictions=predictions.json

Files of ner are those of conlleval, with tabs between columns: `conlleval -d '\t'` reads what `finetune` wrote.
"""

import json
import sys

from absl import flags

from bert_jax.errors import InputError
from bert_jax.tools import cli

TASK = flags.DEFINE_string("task", "", "squad1, squad2, glue:NAME (such as glue:sst2) or ner")
DATA = flags.DEFINE_string(
    "data", "", "file with the correct answers; for SQuAD, FILE[28:] is a range of articles"
)
PREDICTIONS = flags.DEFINE_string(
    "predictions", "", "the file with the predictions, in the task's official format"
)
ODDS = flags.DEFINE_string("na_prob_file", "", "squad2: null_odds.json, to find the best threshold")
THRESHOLD = flags.DEFINE_float(
    "na_prob_thresh", 1.0, "squad2: with --na_prob_file, no answer if odds are above this"
)


def main() -> None:
    """Prints the scores."""
    cli.check_given(TASK, DATA, PREDICTIONS)
    print(json.dumps(_score(), indent=1))


def _score() -> dict[str, float]:
    kind, _, name = TASK.value.partition(":")
    if ODDS.value and kind != "squad2":
        raise InputError(
            f"--na_prob_file {ODDS.value} is for squad2, not for {TASK.value}; leave it out"
        )
    if flags.FLAGS["na_prob_thresh"].present and not ODDS.value:
        raise InputError(
            f"--na_prob_thresh {THRESHOLD.value} is for squad2 with --na_prob_file; give that, or neither"
        )
    if TASK.value in ("squad1", "squad2"):
        from bert_jax.tasks.squad import score as squad_score

        scores, missing = squad_score.score_files(
            kind, DATA.value, PREDICTIONS.value, ODDS.value, THRESHOLD.value
        )
        if missing:
            print(
                f"warning: {PREDICTIONS.value} lacks {missing} questions of {DATA.value}; each scores 0",
                file=sys.stderr,
            )
        return scores
    if kind == "glue" and name:
        from bert_jax.tasks.glue import score as glue_score

        return glue_score.score_files(name, DATA.value, PREDICTIONS.value)
    if TASK.value == "ner":
        from bert_jax.tasks import tagging

        return tagging.score_files(DATA.value, PREDICTIONS.value)
    raise InputError(
        f"--task {TASK.value!r} has no official score; use squad1, squad2, glue:NAME or ner"
    )


if __name__ == "__main__":
    cli.run(main)
