# SPDX-License-Identifier: Apache-2.0
"""SQuAD: the span of a paragraph that answers a question (v1.1), or no answer (v2.0).

For the sources of data see `tasks.squad.read`.
"""

import dataclasses
import json
from collections.abc import Sequence

import numpy as np

from bert_jax.errors import InputError
from bert_jax.model.heads.spans import SPANS
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.storage import writing
from bert_jax.tasks.base import Task, choose_metric
from bert_jax.tasks.squad.decode import Span, SpanPrediction, decode_spans
from bert_jax.tasks.squad.read import SquadExample, parse_question, read_squad
from bert_jax.tasks.squad.score import (
    check_answered,
    find_usable_threshold,
    score_squad1,
    score_squad2,
)
from bert_jax.tasks.squad.windows import make_squad_rows

_SPAN = ("text", "probability", "start_logit", "end_logit")  # what is written of each
VERSIONS = {"squad1": "1.1", "squad2": "2.0"}
_METRICS = {
    "squad1": ("f1", "exact_match"),
    "squad2": ("best_f1", "best_exact", "f1", "exact_match"),
}  # the default first


class SquadTask(Task[SquadExample, SpanPrediction]):
    """squad1 or squad2, as the name in the settings says: only in squad2 may a question have no answer."""

    head = SPANS

    def __init__(self, config: TaskConfig, labels: Sequence[str] = ()) -> None:
        """Makes the task, which has no labels.

        Raises: InputError if its windows have no room for the context, or the metric is not one of the task's.
        """
        super().__init__(config)
        room = config.max_seq_length - config.max_query_length - 3
        if room < 1:
            question = f"a question may have task.max_query_length {config.max_query_length} tokens, and 3 are special"
            raise InputError(
                f"task.max_seq_length {config.max_seq_length} leaves no room for the context: {question}"
            )
        self.has_no_answers = config.name == "squad2"
        if self.has_no_answers and config.num_best < 2:
            raise InputError(
                f"task.num_best {config.num_best} has no room for an answer beside none; use 20"
            )
        self.metric = choose_metric(config, _METRICS[config.name])

    def read(self, source, split):
        examples = read_squad(source, split, VERSIONS[self.config.name])
        if not self.has_no_answers and split == "dev":  # before any training
            check_answered(examples)
        return examples

    def parse(self, value, where):
        return parse_question(value, where)

    def make_rows(self, examples, tokenizer, training):
        return make_squad_rows(examples, tokenizer, training, self.config)

    def decode(self, examples, rows, outputs):
        return decode_spans(examples, rows, outputs, self.config)

    def score(self, examples, predictions):
        """Returns exact_match and f1 in percent; of squad2 at the threshold of the predictions, and the best over all.

        best_exact, best_f1 and their thresholds are found with the best span for every question, as the official script
        does with predictions that were written with an infinite threshold; it cannot bring back answers that were left
        out.
        """
        texts = {prediction.id: prediction.text for prediction in predictions}
        if self.has_no_answers:
            # predictions already have no answer where the odds are above the model's threshold
            scores = score_squad2(examples, texts, threshold=np.inf)
            best = score_squad2(examples, *_spans_and_odds(predictions), threshold=np.inf)
            scores |= {name: value for name, value in best.items() if name.startswith("best_")}
            scores = {"exact_match": scores.pop("exact"), **scores}
        else:
            scores = score_squad1(examples, texts)
        scores = {name: value for name, value in scores.items() if not name.endswith("total")}
        count = sum(not prediction.found for prediction in predictions)
        return scores | ({"num_without_span": float(count)} if count else {})

    def show(self, prediction):
        """Returns a prediction as JSON values; `start` and `end` are null for no answer."""
        odds = {} if prediction.null_odds is None else {"null_odds": prediction.null_odds}
        return _shown(prediction) | odds | {"n_best": [_shown(span) for span in prediction.n_best]}

    def write(self, directory, split, examples, predictions):
        """Writes predictions.json, nbest_predictions.json and for squad2 null_odds.json, as Google's run_squad.py does.

        Names begin with the split unless it is "dev", the official one.
        """
        prefix = "" if split == "dev" else f"{split}_"
        texts = {}
        n_best = {}
        odds = {}
        for said in predictions:
            texts[said.id] = said.text
            n_best[said.id] = [
                {name: getattr(span, name) for name in _SPAN} for span in said.n_best
            ]
            if said.null_odds is not None:
                odds[said.id] = said.null_odds
        files = {"predictions": texts, "nbest_predictions": n_best} | (
            {"null_odds": odds} if odds else {}
        )
        for name, values in files.items():
            with writing.atomic_path(directory / f"{prefix}{name}.json") as temporary:
                temporary.write_text(json.dumps(values, indent=4) + "\n", encoding="utf-8")

    def tune(self, examples, predictions):
        """Returns the settings with the best threshold of no answer, if there may be none."""
        if not self.has_no_answers:
            return self.config
        best = find_usable_threshold(examples, *_spans_and_odds(predictions))
        return dataclasses.replace(self.config, null_threshold=best.value)


def _shown(answer: Span | SpanPrediction) -> dict[str, object]:
    start, end = (answer.start, answer.end) if answer.text else (None, None)
    return {"answer": answer.text, "probability": answer.probability, "start": start, "end": end}


def _spans_and_odds(
    predictions: Sequence[SpanPrediction],
) -> tuple[dict[str, str], dict[str, float]]:
    """Returns the best span of each question at any threshold, and the odds of no answer."""
    spans = {}
    odds = {}
    for prediction in predictions:
        best = prediction.best_span
        spans[prediction.id] = best.text if best else ""
        odds[prediction.id] = prediction.null_odds or 0.0
    return spans, odds
