# SPDX-License-Identifier: Apache-2.0
"""Model cards: a run's own records of its model, as the README.md of a Hugging Face repository.

`gather_records` gathers config.json, about.json, metrics.jsonl and results.json of a work directory; `model_card` makes
text of them and reads nothing. Facts without a record are left to the user, above all the licence.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from bert_jax.errors import InputError
from bert_jax.model.heads.table import HEADS
from bert_jax.settings.rules import Values, value_at
from bert_jax.storage.files import JsonObject, read_json
from bert_jax.storage.resolve import Resolved, is_hub
from bert_jax.storage.urls import local_copy

Rows: TypeAlias = dict[
    str, object
]  # of a table: label -> value; those that say nothing are left out

ABOUT = "about.json"  # in a work directory: data and software of the run
# What a card tells of the settings of the model, of those of the run, and of each data set, by their names there.
_SHAPE = """num_layers hidden_size num_heads intermediate_size max_positions vocab_size activation
    compute_dtype"""
_RUN = """masking.rate masking.end_rate masking.max_predictions masking.whole_word masking.max_ngram
    masking.static masking.causal_rate optimizer.name optimizer.learning_rate optimizer.warmup_steps
    optimizer.warmup_rate optimizer.schedule optimizer.decay_power optimizer.decay_rate
    optimizer.weight_decay train.num_steps train.num_epochs train.seed data.batch_size
    phase2.num_steps phase2.batch_size phase2.max_predictions phase2.learning_rate"""
_DATA = """name inputs.files inputs.bytes input row.length row.max_sequences
    splits.train.documents splits.train.tokens splits.train.sequences splits.train.rows
    splits.heldout.documents splits.heldout.tokens splits.heldout.sequences splits.heldout.rows"""
_SOFTWARE = """software.python software.bert_jax software.jax software.jaxlib software.flax
    software.optax software.numpy devices"""
_TOKENS = (  # where tokenizer.json has no way to say what Google's code does
    "those of training, but for upper-case Greek that ends in sigma, which uncased models see as another letter there, "
    "and for characters of private use, such as bullets of PDFs, which are dropped there"
)


@dataclass(frozen=True)
class Records:
    """The known facts about a model. Every part may be empty."""

    model: Values  # the settings of the model
    task: str
    parameters: int
    labels: Sequence[str] = ()
    # step, sequences, tokens, words; averaged
    trained: Mapping[str, int] = field(default_factory=dict)
    run: Values = field(default_factory=dict)  # the settings of the run
    about: JsonObject = field(default_factory=dict)  # as `training.about.record_of_run` returns it
    # metrics of the last evaluation, with its step
    heldout: Mapping[str, float] = field(default_factory=dict)
    results: JsonObject = field(default_factory=dict)  # results.json of fine-tuning


def gather_records(
    source: Resolved,
    model: Values,
    task: str,
    parameters: int,
    labels: Sequence[str],
    trained: Mapping[str, int],
) -> Records:
    """Returns the records of a model: a work directory, its revision WORKDIR@STEP, or a model inside it.

    A model that is not in a work directory has no records beside its own. Neither has a record that cannot be read.
    """
    own = (model, task, parameters, labels, trained)
    workdir = "" if is_hub(source.place) else str(source.place)
    # A model lies in its work directory, a revision two levels below it.
    for _ in range(3 if workdir else 0):
        if isinstance(run := _read(f"{workdir}/config.json").get("run"), dict):
            about, results = (_read(f"{workdir}/{name}") for name in (ABOUT, "results.json"))
            heldout = _evaluation(f"{workdir}/metrics.jsonl", trained.get("step"))
            if "averaged" in trained:  # the scores are of others
                heldout, results = {}, {}
            return Records(*own, run=run, about=about, heldout=heldout, results=results)
        workdir = workdir.rpartition("/")[0]
    return Records(*own)


def _read(path: str) -> JsonObject:
    """Returns a file of JSON; {} if it is missing or holds something else."""
    try:
        content = read_json(local_copy(path))
    except InputError:
        return {}
    return content if isinstance(content, dict) else {}


def _evaluation(path: str, step: int | None) -> dict[str, float]:
    """Returns the last evaluation until a step, of all steps if it is None; {} if there is none."""
    with contextlib.suppress(OSError, InputError):
        for line in reversed(Path(local_copy(path)).read_bytes().splitlines()):
            # the last line of a run that was killed may be cut
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                record = json.loads(line)
                if record["kind"] == "eval" and (step is None or record["step"] <= step):
                    others = ("kind", "time", "phase")
                    return {name: value for name, value in record.items() if name not in others}
    return {}


def model_card(
    records: Records,
    name: str = "",
    library: str = "transformers",
    left_out: Sequence[str] = (),
) -> str:
    """Returns the README.md of a model with the hub's metadata. `name` is its title, `library` what loads it.

    `left_out` are parts of the model that its files do not have.
    """
    is_whole = records.task in HEADS and not left_out
    pipeline = HEADS[records.task].pipeline if is_whole else ""
    data = records.about.get("data")
    data_sets = data if isinstance(data, list) else []
    languages = {str(value_at(each, "options.language")) for each in data_sets} - {"", "nothing"}
    model = records.model
    kind = "pre-trained"
    if records.labels or records.results:
        kind = f"fine-tuned for {records.task.replace('_', ' ')}"
    steps = f" for {records.trained['step']:,} steps" if "step" in records.trained else ""
    lines = [
        "---",
        "# license: choose one, and remove the # before it",
        f"library_name: {library}",
        *[f"pipeline_tag: {pipeline}"] * bool(pipeline),
        *["language:"] * bool(languages),
        *(f"- {json.dumps(language)}" for language in sorted(languages)),
        "tags:",
        "- bert",
        "- bert_jax",
        *["- fill-mask"] * (pipeline == "fill-mask"),
        "---",
        f"\n# {name or 'BERT'}\n",
        f"A BERT of {model.get('num_layers', 0)} layers, hidden size {model.get('hidden_size', 0)}, "
        f"{records.parameters:,} parameters, {kind} by bert_jax{steps}.\n",
        *[f"These files do not have its {', '.join(left_out)}: {library} has no class for it.\n"]
        * bool(left_out),
        *_table("Model", _model(records)),
        *_table("Training", _training(records)),
    ]
    for number, each in enumerate(data_sets, 1):
        made_from = {"made from": _listed(value_at(each, "inputs.names"))}
        lines += _table(
            f"Data {number}" if data_sets[1:] else "Data", _pick(each, _DATA) | made_from
        )
    scores = records.results.get("metrics") or records.heldout
    step = records.results.get("step")
    lines += [
        *_table("Scores", {**scores} | ({"step": step} if step else {})),
        *_table("Software", _pick(records.about, _SOFTWARE)),
        "## To be filled in\n",
        "Intended use, limits and biases, contact, and the licence above: no record of the run says them.\n",
    ]
    return "\n".join(lines)


def _model(records: Records) -> Rows:
    rows = {"parameters": records.parameters} | _pick(records.model, _SHAPE)
    return rows | {"labels": _listed(records.labels), "tokens in transformers": _TOKENS}


def _training(records: Records) -> Rows:
    run = records.run
    rows = Rows()
    if records.results:
        rows["objective"] = (
            f"{records.task.replace('_', ' ')}, task {records.results.get('task', '')}"
        )
    elif records.model.get("causal"):
        rows["objective"] = "the next token, from left to right"
    elif "masking" in run:
        pairs = (
            " and next sentence prediction" if value_at(run, "train.next_sentence") is True else ""
        )
        rows["objective"] = f"masked language model{pairs}"
    rows |= _pick(run, _RUN)
    # A card is published: of a path it says the last part alone, of a model on the hub its name.
    start = str(run.get("init_checkpoint", ""))
    prefix = "random:" if start.startswith("random:") else ""
    start = start.removeprefix(prefix).rstrip("/")
    name = start.partition("?")[0] if is_hub(start) else start.rpartition("/")[2]
    rows["started from"] = prefix + name
    counts = dict(records.trained)
    if averaged := counts.pop("averaged", 0):
        rows["mean of the parameters of"] = f"{averaged} checkpoints"
    return rows | {f"{name} so far": count for name, count in counts.items()}


def _pick(values: object, names: str) -> Rows:
    """Returns the values that have these dotted names."""
    return {name: value_at(values, name) for name in names.split()}


def _listed(names: object) -> str:
    """Returns the first names of a list, and how many more there are; "" if it is none."""
    texts = list(map(str, names)) if isinstance(names, Sequence) and names != "nothing" else []
    return ", ".join(texts[:20]) + (f" and {len(texts) - 20} more" if texts[20:] else "")


def _table(title: str, rows: Mapping[str, object]) -> Iterable[str]:
    """Returns the lines of a section; none if there is nothing to say."""
    known = {label: value for label, value in rows.items() if value not in ("", None, "nothing", 0)}
    lines = [f"| {_cell(label)} | {_cell(value)} |" for label, value in known.items()]
    return [f"## {title}", "", "| | |", "|---|---|", *lines, ""] if lines else []


def _cell(value: object) -> str:
    """Returns a value as text that cannot break a table: names of files may hold anything."""
    text = str(value)
    if isinstance(value, float):
        text = f"{value:.4g}"
    elif isinstance(value, int) and not isinstance(value, bool):
        text = f"{value:,}"
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
