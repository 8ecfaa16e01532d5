# SPDX-License-Identifier: Apache-2.0
"""The command `bert_jax COMMAND`: one entry point for every tool. `bert_jax --help` imports none of them."""

import difflib
import importlib.util
import os
import sys
import types
from collections.abc import Sequence

# The commands, in the order in which they are used, with their lines in --help. Each is a module of bert_jax.tools.
COMMANDS = {
    "Prepare text": {
        "build_vocab": "learn a vocabulary from text",
        "prepare_corpus": "convert text to a data set for pre-training",
        "prepare_pairs": "convert pairs of texts to a data set to train on",
        "prepare_beam": "the same on many machines, with Apache Beam",
        "import_tfrecords": "make a data set from Google's TFRecords",
    },
    "Train": {
        "train": "pre-train a BERT",
        "finetune": "fine-tune a BERT for a task",
        "plan": "memory, FLOPs and bytes of a step on a TPU pod or GPUs",
        "compare_runs": "results of fine-tuning runs, side by side",
    },
    "Use a model": {
        "predict": "fill in [MASK], or do the task that was learnt",
        "extract_features": "write vectors of tokens and of texts",
        "search": "find the nearest passages of a corpus for each query",
        "mine_negatives": "find hard negatives for pairs to train on",
        "score_sentences": "score how likely sentences are, or minimal pairs",
    },
    "Measure a model": {
        "evaluate": "loss and accuracy of a checkpoint on held-out text",
        "score": "official scores of a file of predictions",
    },
    "Convert a model": {
        "convert_checkpoint": "to Hugging Face's formats, and from theirs and Google's",
        "export": "StableHLO, to serve it without this package",
        "grow_model": "add words or positions to a trained model",
        "show_params": "every parameter with its shape, type and norm",
    },
}
NAMES = tuple(name for commands in COMMANDS.values() for name in commands)

_USAGE = """\
usage: bert_jax COMMAND [--name=value ...]
       bert_jax COMMAND --help"""


def main() -> int:
    """Runs the command that the command line names; returns the exit status where it does not end by itself."""
    arguments = sys.argv[1:]
    if not arguments:
        print(help_text(), file=sys.stderr)
        return 1
    name, *rest = arguments
    if name in ("--help", "-h", "-help", "help") and not rest:
        _print(help_text())
        return 0
    if name in ("--version", "-version", "version"):
        from bert_jax.version import __version__

        _print(f"bert_jax {__version__}")
        return 0
    if name == "help":  # bert_jax help train
        name, rest = rest[0], ["--help"]
    if name not in NAMES:
        print(f"error: {_unknown(name)}", file=sys.stderr)
        return 1
    launch(name, f"bert_jax {name}", rest)
    return 0


def _print(text: str) -> None:
    """Prints a text to stdout, where the reader may have gone away, as `head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def launch(name: str, program: str, arguments: Sequence[str]) -> None:
    """Runs a tool as `python -m bert_jax.tools.NAME` does: as the program's main module, which worker processes import.

    `program` is the command that the user has called; help names it.
    """
    spec = importlib.util.find_spec(f"bert_jax.tools.{name}")
    assert spec is not None and spec.loader is not None
    module = types.ModuleType("__main__")
    module.__spec__ = spec
    module.__file__ = spec.origin
    module.__package__ = spec.parent
    sys.modules["__main__"] = module
    sys.argv[:] = [program, *arguments]
    exec(spec.loader.get_code(spec.name), module.__dict__)  # pyright: ignore[reportAttributeAccessIssue]


def help_text() -> str:
    """Returns the text of `bert_jax --help`, with a line for each command. Imports none of them."""
    lines = ["BERT in JAX: from raw text to trained and fine-tuned models.", "", _USAGE]
    column = max(map(len, NAMES)) + 2
    for title, commands in COMMANDS.items():
        lines += ["", f"{title}:", *(f"  {name:{column}}{line}" for name, line in commands.items())]
    return "\n".join(lines)


def _unknown(name: str) -> str:
    if name.startswith("-"):
        return f"{name} stands before the command; write bert_jax COMMAND {name}, and see bert_jax --help"
    close = difflib.get_close_matches(name.replace("-", "_").removesuffix(".py"), NAMES, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"bert_jax has no command {name!r:.100}{hint}; bert_jax --help lists them"
