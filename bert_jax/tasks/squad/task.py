# SPDX-License-Identifier: Apache-2.0
"""SQuAD: the span of a paragraph that answers a question (v1.1), or no answer (v2.0).

For the sources of data see `tasks.squad.read`.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence

import numpy as np

from bert_jax.batch import Row
from bert_jax.errors import InputError
from bert_jax.model.heads.spans import SPANS
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.storage import writing
from bert_jax.storage.places import Place
from bert_jax.tasks.base import Rows, Task, choose_metric
from bert_jax.tasks.squad.decode import Span, SpanPrediction, decode_spans
from bert_jax.tasks.squad.read import SquadExample, parse_question, read_squad
from bert_jax.tasks.squad.score import (
    check_answered,
    find_usable_threshold,
    score_squad1,
    score_squad2,
)
from bert_jax.tasks.squad.windows import make_squad_rows
from bert_jax.text.tokenizer import Tokenizer

VERSIONS = {"squad1": "1.1", "squad2": "2.0"}
_METRICS = {
    "squad1": ("f1", "exact_match"),
    "squad2": ("best_f1", "best_exact", "f1", "exact_match"),
}  # the default first


class SquadTask(Task):
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

    def read(self, source: str, split: str) -> list[SquadExample]:
        examples = read_squad(source, split, VERSIONS[self.config.name])
        if not self.has_no_answers and split == "dev":  # before any training
            check_answered(examples)
        return examples

    def parse(self, value: object, where: str) -> SquadExample:
        return parse_question(value, where)

    def make_rows(
        self, examples: Sequence[SquadExample], tokenizer: Tokenizer, training: bool
    ) -> Rows:
        return make_squad_rows(examples, tokenizer, training, self.config)

    def decode(
        self, examples: Sequence[SquadExample], rows: Sequence[Row], outputs: Sequence[np.ndarray]
    ) -> list[SpanPrediction]:
        return decode_spans(examples, rows, outputs, self.config)

    def score(
        self, examples: Sequence[SquadExample], predictions: Sequence[SpanPrediction]
    ) -> dict[str, float]:
        """Returns exact_match and f1 in percent; of squad2 at the threshold of the predictions, and the best over all.

        best_exact, best_f1 and their thresholds are found with the best span for every question, as the official script
        does with predictions that were written with an infinite threshold; it cannot bring back answers that were left
        out.
        """
        if not self.has_no_answers:
            scores = score_squad1(examples, _texts(predictions))
            return {name: scores[name] for name in ("exact_match", "f1")} | _no_span(predictions)
        scores = score_squad2(examples, _texts(predictions), threshold=np.inf)
        best = score_squad2(examples, *_spans_and_odds(predictions), threshold=np.inf)
        scores |= {name: value for name, value in best.items() if name.startswith("best_")}
        scores = {"exact_match": scores.pop("exact"), **scores}
        return {
            name: value for name, value in scores.items() if not name.endswith("total")
        } | _no_span(predictions)

    def show(self, prediction: SpanPrediction) -> dict[str, object]:
        """Returns a prediction as JSON values; `start` and `end` are null for no answer."""
        odds = {} if prediction.null_odds is None else {"null_odds": prediction.null_odds}
        return _shown(prediction) | odds | {"n_best": [_shown(span) for span in prediction.n_best]}

    def write(
        self,
        directory: Place,
        split: str,
        examples: Sequence[SquadExample],
        predictions: Sequence[SpanPrediction],
    ) -> None:
        """Writes predictions.json, nbest_predictions.json and for squad2 null_odds.json, as Google's run_squad.py does.

        Names begin with the split unless it is "dev", the official one.
        """
        prefix = "" if split == "dev" else f"{split}_"
        names = ("text", "probability", "start_logit", "end_logit")
        n_best = {}
        for prediction in predictions:
            n_best[prediction.id] = [
                {name: getattr(span, name) for name in names} for span in prediction.n_best
            ]
        _write(directory / f"{prefix}predictions.json", _texts(predictions))
        _write(directory / f"{prefix}nbest_predictions.json", n_best)
        odds = {pred.id: pred.null_odds for pred in predictions if pred.null_odds is not None}
        if odds:
            _write(directory / f"{prefix}null_odds.json", odds)

    def tune(
        self, examples: Sequence[SquadExample], predictions: Sequence[SpanPrediction]
    ) -> TaskConfig:
        """Returns the settings with the best threshold of no answer, if there may be none."""
        if not self.has_no_answers:
            return self.config
        best = find_usable_threshold(examples, *_spans_and_odds(predictions))
        return dataclasses.replace(self.config, null_threshold=best.value)


def _shown(answer: Span | SpanPrediction) -> dict[str, object]:
    start, end = (answer.start, answer.end) if answer.text else (None, None)
    return {"answer": answer.text, "probability": answer.probability, "start": start, "end": end}


def _texts(predictions: Sequence[SpanPrediction]) -> dict[str, str]:
    return {prediction.id: prediction.text for prediction in predictions}


def _spans_and_odds(
    predictions: Sequence[SpanPrediction],
) -> tuple[dict[str, str], dict[str, float]]:
    """Returns the best span of each question at any threshold, and the odds of no answer."""
    spans = {
        prediction.id: best.text if (best := prediction.best_span) else ""
        for prediction in predictions
    }
    return spans, {prediction.id: prediction.null_odds or 0.0 for prediction in predictions}


def _no_span(predictions: Sequence[SpanPrediction]) -> dict[str, float]:
    """Returns the count of questions without a valid span, if there are any."""
    count = sum(not prediction.found for prediction in predictions)
    return {"num_without_span": float(count)} if count else {}


def _write(path: Place, values: Mapping[str, object]) -> None:
    with writing.atomic_path(path) as temporary:
        temporary.write_text(json.dumps(values, indent=4) + "\n", encoding="utf-8")
