# SPDX-License-Identifier: Apache-2.0
"""Prints the predictions of a model for every line of the input.

bert_jax predict --checkpoint=DIR --input=FILE|- --output=FILE|-

A fine-tuned model does its task: it prints labels with probabilities, answers, or entities with their positions. A
model that is only pre-trained predicts the words for each [MASK] in a text.

A line is a text; two texts (a question and its context, or two sentences) separated by a tab; or JSON, either an object
with the field names of the task's data ("text" for a text with [MASK]), or a list. With --lines=text it is a text,
whatever is in it. As JSON, every line of the input has one line of output, with the id of an object that has one, and a
blank line has no prediction. Lines are answered as they come, in their order; what a long input has done is told on
stderr. Output ends before a line that is wrong.
"""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from bert_jax.devices.allocator import reuse_freed_memory
from bert_jax.errors import InputError
from bert_jax.storage.files import JsonObject
from bert_jax.storage.writing import check_file
from bert_jax.tasks.json_values import parse_json
from bert_jax.tools import cli, recipes
from bert_jax.tools.lines import (
    batches_of,
    converse,
    open_lines,
    open_writer,
    parse_line,
    read_input,
    told,
)
from bert_jax.tools.shared_flags import (
    define_checkpoint,
    define_dtype,
    define_format,
    define_long_texts,
    define_recipe,
)

if TYPE_CHECKING:
    from bert_jax.inference.predict import Predictor

CHECKPOINT = define_checkpoint()
INPUT = flags.DEFINE_string("input", "-", "file with one input per line; - is standard input")
OUTPUT = flags.DEFINE_string("output", "-", "file to write predictions to; - is standard output")
is_json = define_format()
LINES = flags.DEFINE_enum(
    "lines",
    "auto",
    ["auto", "text"],
    "what a line is: by what it looks like, or always one text, also with a tab or { in it",
)
DTYPE = define_dtype()
LONG_TEXTS = define_long_texts()
RECIPE = define_recipe()
NULL_THRESHOLD = flags.DEFINE_float(
    "null_threshold",
    None,
    "answers of questions: none if its score is above the best span's by more; of SQuAD 2's models",
)
GUESSES = flags.DEFINE_integer("guesses", 5, "words to print for each [MASK]", lower_bound=1)

_ANSWERS_SHOWN = 4  # to people, beside the best
_LINES_AT_ONCE = 512  # are answered together, if they come at once


def main() -> None:
    """Prints a prediction for every line of the input."""
    cli.check_given(CHECKPOINT)
    if OUTPUT.value != "-":
        check_file(OUTPUT.value, INPUT.value)
    # before JAX starts its threads
    reuse_freed_memory()
    with open_lines(INPUT.value) as stream, open_writer(OUTPUT.value) as write:
        from bert_jax.inference.predict import Predictor

        own = recipes.read_own(RECIPE.value)
        bert = cli.load_model(CHECKPOINT.value, DTYPE.value)
        predictor = Predictor(bert, LONG_TEXTS.value, own, NULL_THRESHOLD.value)
        if LINES.value == "text":
            try:  # now, or the first line would be blamed
                _read(predictor, "a", "", is_text=True)
            except InputError:
                raise InputError(
                    "--lines=text is for models that read one text; leave it out"
                ) from None
        show = _json_of if is_json(OUTPUT.value) else _text_of
        lines = read_input(stream, INPUT.value)
        if stream.isatty():
            task = predictor.task
            wanted = (
                "a text with [MASK] in it" if task is None else f"an input for {task.config.name}"
            )
            print(f"Write {wanted}; end with Ctrl-D.", file=sys.stderr)
            converse(
                lines,
                lambda line: [
                    write(show(*pair)) for pair in _predictions(predictor, [line]) if line[1]
                ],
            )
            return
        # Standard input is answered whenever it pauses, as programs wait for the answer before they
        # write on.
        for chunk in told(
            batches_of(lines, _LINES_AT_ONCE, 0.2 if INPUT.value == "-" else None), "lines"
        ):
            for value, shown in _predictions(predictor, chunk):
                write(show(value, shown))


def _predictions(
    predictor: "Predictor", lines: Sequence[tuple[str, str]]
) -> Iterator[tuple[object, JsonObject]]:
    """Yields each input and the model's prediction for it, {} for a blank line.

    Raises: InputError at the first line that is wrong, after those before it.
    """
    inputs: list[tuple[object, Any]] = []
    wrong = None
    for where, line in lines:
        try:
            inputs.append(
                _read(predictor, line, where, LINES.value == "text") if line else (line, None)
            )
        except InputError as error:
            advice = ""
            with contextlib.suppress(InputError):
                if LINES.value != "text" and _read(predictor, line, where, is_text=True):
                    advice = "; or give --lines=text, and every line is one text, whatever is in it"
            wrong = InputError(f"{error}{advice}")
            break
    predictions = iter(
        _predict(predictor, [example for _, example in inputs if example is not None])
    )
    for (where, _), (value, example) in zip(lines, inputs):
        shown = {} if example is None else next(predictions)
        try:
            json.dumps(shown, allow_nan=False)
        except ValueError:
            raise InputError(
                f"{where}: the prediction is not finite, so the model's parameters are not"
            ) from None
        yield value, shown
    if wrong is not None:
        raise wrong


def _read(predictor: "Predictor", line: str, where: str, is_text: bool) -> tuple[object, Any]:
    """Returns a line as the user gave it, and as the model reads it."""
    from bert_jax.inference.predict import read_blanks

    if predictor.task is None:
        value = line
        text = line
        with contextlib.suppress(InputError):  # if it is not JSON, it is a text that begins with {
            given: Any = parse_json(line, where) if line[:1] == "{" and not is_text else {}
            value, text = (
                (given, given["text"]) if isinstance(given.get("text"), str) else (line, line)
            )
        return value, read_blanks(predictor.bert, text, where, LONG_TEXTS.value, needed=not is_text)
    is_words = predictor.task.head.takes_words
    if is_text:
        return line, predictor.parse(line if is_words else (line,), where)
    value = parse_line(line, where, is_words)
    return value, predictor.parse(value, where)


def _predict(predictor: "Predictor", inputs: Sequence[Any]) -> list[JsonObject]:
    from bert_jax.inference.predict import fill_blanks

    if predictor.task is not None:
        return (
            [predictor.task.show(prediction) for prediction in predictor.predict(inputs)]
            if inputs
            else []
        )
    filled = fill_blanks(predictor.bert, inputs, GUESSES.value)
    return [
        {"masks": [[guess._asdict() for guess in blank] for blank in blanks]} for blanks in filled
    ]


def _json_of(value: object, shown: JsonObject) -> str:
    known = {"id": value["id"]} if isinstance(value, dict) and "id" in value else {}
    return json.dumps(known | {"input": value} | shown, ensure_ascii=False)


def _text_of(value: object, shown: JsonObject) -> str:
    """Returns a prediction as readable text: the input, and the prediction below it."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    lines = [text]
    if "masks" in shown:
        lines += [
            "  ".join(f"{one['token']} {one['probability']:.0%}" for one in blank)
            for blank in shown["masks"]
        ]
    elif "probabilities" in shown:
        probabilities = shown["probabilities"]  # of classes by name, or of choices in their order
        named = (
            probabilities.items() if isinstance(probabilities, dict) else enumerate(probabilities)
        )
        ordered = sorted(named, key=lambda item: -item[1])
        lines += [", ".join(shown["labels"]) or "no label"] if "labels" in shown else []
        lines.append("  ".join(f"{label} {probability:.1%}" for label, probability in ordered))
    elif "entities" in shown:
        lines += [
            f"{one['type']}  {one['text']!r}  {one['start']}-{one['end']}"
            for one in shown["entities"]
        ]
    elif "n_best" in shown:
        # the answer that is given, "" for none, and the best of the others
        others = [answer for answer in shown["n_best"] if answer["answer"] != shown["answer"]]
        for one in [shown, *others[:_ANSWERS_SHOWN]]:
            place = "no answer" if one["start"] is None else f"{one['start']}-{one['end']}"
            lines.append(f"{one['probability']:.1%}  {one['answer']!r}  {place}")
    else:
        lines += [f"{name}: {json.dumps(item, ensure_ascii=False)}" for name, item in shown.items()]
    return "\n    ".join(lines)


if __name__ == "__main__":
    cli.run(main)
