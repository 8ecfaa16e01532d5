# SPDX-License-Identifier: Apache-2.0
"""Says what a model was taught to say of every line of the input.

python -m bert_jax.tools.predict --checkpoint=DIR --input=FILE|- --output=FILE|-

A fine-tuned model does its task: it prints labels with probabilities, answers, or entities with their places. One that
is only pre-trained fills in the blanks of texts with [MASK] in them.

A line is a text; a pair of texts (a question and its context, two sentences) with a tab between; or JSON, an object
with the names that the task's data have, or a list.
"""

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from absl import flags

from bert_jax.allocator import reuse_freed_memory
from bert_jax.errors import InputError
from bert_jax.storage import atomic_path
from bert_jax.tools import cli

CHECKPOINT = flags.DEFINE_string("checkpoint", "", "a work directory, or a model in any format")
INPUT = flags.DEFINE_string("input", "-", "a file with an input a line; - is standard input")
OUTPUT = flags.DEFINE_string("output", "-", "where predictions go; - is standard output")
FORMAT = flags.DEFINE_enum(
    "format", "", ["", "text", "json"], "for people, or an object of JSON a line; json for files"
)
GUESSES = flags.DEFINE_integer("guesses", 5, "words to print for each [MASK]", lower_bound=1)

_ANSWERS_SHOWN = 4  # to people, beside the best
_LINES_AT_ONCE = 512  # are read before the first of them is answered, unless somebody sits at a terminal


def main() -> None:
    """Prints a prediction for every line of the input."""
    if not CHECKPOINT.value:
        raise InputError("--checkpoint is needed: a work directory, or a model in any format")
    as_json = FORMAT.value == "json" or (not FORMAT.value and OUTPUT.value != "-")
    with _open(INPUT.value) as stream, _writer(OUTPUT.value) as write:
        reuse_freed_memory()
        from bert_jax.predict import Predictor, fill_masks
        from bert_jax.pretrained import load_pretrained

        predictor = Predictor(load_pretrained(CHECKPOINT.value))
        task = predictor.task
        if stream.isatty():
            wanted = "a text with [MASK] in it" if task is None else f"an input for {task.config.name}"
            print(f"Write {wanted}; end with Ctrl-D.", file=sys.stderr)
        for chunk in _chunks(_lines(stream, INPUT.value), 1 if stream.isatty() else _LINES_AT_ONCE):
            if task is None:
                for where, text in chunk:
                    try:
                        guesses = fill_masks(predictor.bert, [text], GUESSES.value)[0]
                    except InputError as error:
                        raise InputError(f"{where}: {error}") from None
                    write(_json_of(text, _shown(guesses)) if as_json else _text_of(text, _shown(guesses)))
                continue
            inputs = [(_parsed(line, where), where) for where, line in chunk]
            predictions = predictor.predict([task.parse(value, where) for value, where in inputs])
            for (value, _), prediction in zip(inputs, predictions):
                write((_json_of if as_json else _text_of)(value, task.show(prediction)))


def _shown(guesses: list[list[Any]]) -> dict[str, Any]:
    return {"masks": [[guess._asdict() for guess in place] for place in guesses]}


def _parsed(line: str, where: str) -> Any:
    """Returns a line as the task reads it: JSON, a pair of texts or a text."""
    if line[:1] in "{[":
        try:
            return json.loads(line)
        except ValueError as error:
            if line[:1] == "{":
                raise InputError(f"{where}: begins like an object of JSON and is none ({error}); mend it") from None
    parts = line.split("\t")
    if len(parts) > 2:
        raise InputError(f"{where}: has {len(parts)} columns; write a text, or two with a tab between")
    return line if len(parts) == 1 else (parts[0], parts[1])


def _json_of(value: Any, shown: dict[str, Any]) -> str:
    return json.dumps({"input": value} | shown, ensure_ascii=False)


def _text_of(value: Any, shown: dict[str, Any]) -> str:
    """Returns what a person reads: the input, and below it what the model says."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    lines = [text]
    if "masks" in shown:
        lines += ["  ".join(f"{one['token']} {one['probability']:.0%}" for one in place) for place in shown["masks"]]
    elif "probabilities" in shown:
        ordered = sorted(shown["probabilities"].items(), key=lambda item: -item[1])
        lines.append("  ".join(f"{label} {probability:.1%}" for label, probability in ordered))
    elif "entities" in shown:
        lines += [f"{one['type']}  {one['text']!r}  {one['start']}-{one['end']}" for one in shown["entities"]]
    elif "n_best" in shown:
        lines += [f"{one['probability']:.1%}  {one['answer']!r}  {_place(one)}" for one in _answers(shown)]
    else:
        lines += [f"{name}: {json.dumps(item, ensure_ascii=False)}" for name, item in shown.items()]
    return "\n    ".join(lines)


def _answers(shown: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the answer that is given, "" for none, and the best of the others."""
    others = [one for one in shown["n_best"] if one["answer"] != shown["answer"]]
    return [shown, *others[:_ANSWERS_SHOWN]]


def _place(answer: dict[str, Any]) -> str:
    return "no answer" if answer["start"] is None else f"{answer['start']}-{answer['end']}"


def _open(path: str) -> contextlib.AbstractContextManager[TextIO]:
    if path == "-":
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # whatever the locale
        return contextlib.nullcontext(sys.stdin)
    try:
        return open(path, encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"input {path} cannot be read: {error.strerror}") from None


@contextlib.contextmanager
def _writer(path: str) -> Iterator[Callable[[str], None]]:
    """Yields what writes a line; a file appears when all of it is written."""
    if path == "-":
        yield lambda line: print(line, flush=True)
        return
    with atomic_path(Path(path)) as temporary, open(temporary, "w", encoding="utf-8") as stream:
        yield lambda line: print(line, file=stream)


def _lines(stream: TextIO, path: str) -> Iterator[tuple[str, str]]:
    """Yields where a line stands, and the line without blanks around it; blank ones are passed over."""
    name = "line " if path == "-" else f"{path}:"
    try:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield f"{name}{number}", line.strip()
    except UnicodeDecodeError as error:
        raise InputError(f"input {path} is not UTF-8 ({error.reason} at byte {error.start}); convert it") from None


def _chunks(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    chunk = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


if __name__ == "__main__":
    cli.run(main)
