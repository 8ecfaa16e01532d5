# SPDX-License-Identifier: Apache-2.0
"""Model cards: a run's own records of its model, as the README.md of a Hugging Face repository.

`gather_records` gathers config.json, about.json, metrics.jsonl and results.json of a work directory; `model_card` makes
text of them and reads nothing. Facts without a record are left to the user, above all the licence.
"""

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bert_jax.errors import InputError, one_line
from bert_jax.model.heads.table import HEADS
from bert_jax.settings.rules import Values
from bert_jax.storage.files import JsonObject, read_json
from bert_jax.storage.resolve import Resolved, is_hub
from bert_jax.storage.urls import local_copy

ABOUT = "about.json"  # in a work directory: data and software of the run
_SCORES = {  # of a held-out evaluation -> how the card names it
    "mlm_loss": "masked-token loss, nats",
    "mlm_accuracy": "masked-token accuracy",
    "nsp_loss": "next-sentence loss, nats",
    "nsp_accuracy": "next-sentence accuracy",
    "loss": "loss",
}
_MOST_NAMES = 20  # of inputs that a card lists
_PERCENT = ("mlm_accuracy", "nsp_accuracy")
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
    trained: Mapping[str, int] = field(default_factory=dict)  # step, sequences, tokens, words
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
    workdir = _workdir_of(str(source.place))
    records = Records(model, task, parameters, labels, trained)
    if not workdir:
        return records
    for name, part, value in (
        ("config.json", "run", _read(f"{workdir}/config.json").get("run", {})),
        (ABOUT, "about", _read(f"{workdir}/{ABOUT}")),
        ("metrics.jsonl", "heldout", _evaluation(f"{workdir}/metrics.jsonl", trained.get("step"))),
        ("results.json", "results", _read(f"{workdir}/results.json")),
    ):
        more = replace(records, **{part: value})
        try:
            model_card(more)
        # not as it was written
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            print(
                f"warning: {workdir}/{name} is damaged ({one_line(error)}); the card leaves it out",
                file=sys.stderr,
            )
        else:
            records = more
    return records


def _workdir_of(path: str) -> str:
    """Returns the work directory that a model is in, which may be a URL; "" if it is in none."""
    folder = "" if is_hub(path) else path
    for _ in range(3 if folder else 0):
        if isinstance(_read(f"{folder}/config.json").get("run"), dict):
            return folder
        folder = folder.rpartition("/")[0]
    return ""


def _read(path: str) -> JsonObject:
    """Returns a file of JSON; {} if it is missing or holds something else."""
    try:
        content = read_json(local_copy(path))
    except InputError:
        return {}
    return content if isinstance(content, dict) else {}


def _evaluation(path: str, step: int | None) -> dict[str, float]:
    """Returns the last evaluation until a step, of all steps if it is None; {} if there is none."""
    metrics: dict[str, float] = {}
    with contextlib.suppress(OSError, InputError):
        for line in (
            Path(local_copy(path)).read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                record = json.loads(line)
                if record["kind"] == "eval" and (step is None or record["step"] <= step):
                    metrics = {
                        name: value
                        for name, value in record.items()
                        if name not in ("kind", "time", "phase")
                    }
    return metrics


def model_card(records: Records, name: str = "", library: str = "transformers") -> str:
    """Returns the README.md of a model with the hub's metadata. `name` is its title, `library` what loads it."""
    sections = [
        _metadata(records, library),
        f"# {name or 'BERT'}\n\n{_summary(records)}",
        _section("Model", _model(records)),
        _section("Training", _training(records)),
        _section("Data", _data(records)),
        _section("Scores", _scores(records)),
        _section("Software", _software(records)),
        "## To be filled in\n\nIntended use, limits and biases, contact, and the licence above: no record of the run "
        "says them.",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _metadata(records: Records, library: str) -> str:
    pipeline = HEADS[records.task].pipeline if records.task in HEADS else ""
    tags = ["bert", "bert_jax", *({pipeline} & {"fill-mask"})]
    lines = ["---", "# license: choose one, and remove the # before it", f"library_name: {library}"]
    if pipeline:
        lines.append(f"pipeline_tag: {pipeline}")
    languages = sorted(
        {str(data.get("options", {}).get("language", "")) for data in records.about.get("data", [])}
        - {""}
    )
    if languages:
        lines += ["language:", *(f"- {json.dumps(language)}" for language in languages)]
    return "\n".join([*lines, "tags:", *(f"- {tag}" for tag in tags), "---"])


def _summary(records: Records) -> str:
    layers, hidden = records.model.get("num_layers", 0), records.model.get("hidden_size", 0)
    what = f"A BERT of {layers} layers, hidden size {hidden}, {records.parameters:,} parameters"
    kind = (
        f"fine-tuned for {records.task.replace('_', ' ')}"
        if records.labels or records.results
        else "pre-trained"
    )
    step = records.trained.get("step")
    return f"{what}, {kind} by bert_jax{f' for {step:,} steps' if step is not None else ''}."


def _section(title: str, rows: Sequence[tuple[str, object]]) -> str:
    """Returns a section with a table; "" if there is nothing to say."""
    lines = [f"| {label} | {_cell(value)} |" for label, value in rows if value not in ("", None)]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *lines]) if lines else ""


def _cell(value: object) -> str:
    """Returns a value as text that cannot break a table: names of files may hold anything."""
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _model(records: Records) -> list[tuple[str, object]]:
    model = records.model
    names = {
        "num_layers": "layers",
        "hidden_size": "hidden size",
        "num_heads": "attention heads",
        "intermediate_size": "feed-forward size",
        "max_positions": "positions",
        "vocab_size": "vocabulary",
        "activation": "activation",
        "compute_dtype": "computed in",
    }
    rows: list[tuple[str, object]] = [(label, model.get(name)) for name, label in names.items()]
    if length := _trained_positions(records):
        rows.append(("positions that were trained", f"the first {length:,}, the length of a row"))
    labels = ", ".join(records.labels[:50]) + (", ..." if len(records.labels) > 50 else "")
    return [
        ("parameters", records.parameters),
        *rows,
        ("labels", labels),
        ("tokens in transformers", _TOKENS),
    ]


def _trained_positions(records: Records) -> int:
    """Returns the length of the longest rows of pre-training, if the model has more positions; or else 0."""
    if not records.run.get("masking") or records.run.get("init_checkpoint"):
        return 0
    longest = max(
        (data.get("row", {}).get("length", 0) for data in records.about.get("data", [])), default=0
    )
    return longest if longest < records.model.get("max_positions", 0) else 0


def _training(records: Records) -> list[tuple[str, object]]:
    run, trained = records.run, records.trained
    train, optimizer, masking, data = (
        run.get(name, {}) for name in ("train", "optimizer", "masking", "data")
    )
    rows: list[tuple[str, object]] = [("objective", _objective(records))]
    if optimizer:
        rate = optimizer.get("learning_rate")
        warmup = f"{optimizer['warmup_steps']:,} steps" if optimizer.get("warmup_steps") else ""
        warmup = warmup or (
            f"{optimizer['warmup_rate']:.0%} of the steps"
            if optimizer.get("warmup_rate")
            else "no steps"
        )
        rows += [
            ("optimizer", f"{optimizer.get('name')}, weight decay {optimizer.get('weight_decay')}"),
            (
                "schedule",
                f"learning rate {rate:g} after a warm-up of {warmup}, {_decay(optimizer)}"
                if rate
                else "",
            ),
        ]
    length = train.get("num_steps") or (
        f"{train['num_epochs']} epochs" if "num_epochs" in train else ""
    )
    rows += [
        ("steps of the schedule", length),
        ("rows of a batch", data.get("batch_size")),
        ("seed", train.get("seed")),
    ]
    if (second := run.get("phase2", {})).get("num_steps"):
        more = {
            name: second[name]
            for name in ("batch_size", "learning_rate", "max_predictions")
            if second.get(name)
        }
        changes = ", ".join(f"{name} {value}" for name, value in more.items())
        rows.append(
            ("second phase", f"{second['num_steps']:,} steps{', ' if changes else ''}{changes}")
        )
    rows.append(("started from", _name_of(str(run.get("init_checkpoint") or ""))))
    rows += [
        (f"{name} seen" if name != "step" else "steps taken", trained[name]) for name in trained
    ]
    return rows


def _decay(optimizer: Values) -> str:
    """Returns how the learning rate changes after warm-up; records of older versions know linear decay alone."""
    kind, power, share = (optimizer.get(name) for name in ("schedule", "decay_power", "decay_rate"))
    if kind == "stable":
        return f"constant, decay to 0 in the last {share:.0%} of the steps" if share else "constant"
    if kind == "cosine":
        return "cosine decay to 0"
    if power == 0:
        return "constant"
    return "linear decay to 0" if power in (1, None) else f"decay to 0 with power {power:g}"


def _objective(records: Records) -> str:
    masking, train = records.run.get("masking"), records.run.get("train", {})
    if records.results:
        return f"{records.task.replace('_', ' ')}, task {records.results.get('task', '')}"
    if not masking:
        return ""
    if records.model.get("causal"):
        return "the next token, from left to right"
    unit = "words" if masking.get("whole_word") else "tokens"
    if masking.get("max_ngram", 1) > 1:
        unit = f"n-grams of up to {masking['max_ngram']} words"
    how = "the same in every epoch" if masking.get("static") else "drawn anew in every epoch"
    rate, limit = masking.get("rate", 0), masking.get("max_predictions", 0)
    length = next(
        (data.get("row", {}).get("length", 0) for data in records.about.get("data", [])), 0
    )
    share = f"{limit / length:.1%}" if 0 < limit < round(rate * length) else f"{rate:.0%}"
    line = f"masked language model: {share} of tokens, {unit} masked, {how}"
    line += f", at most {limit} a sequence" if limit else ""
    line += (
        f"; {masking['causal_rate']:.1%} of rows from left to right"
        if masking.get("causal_rate")
        else ""
    )
    return line + (
        "; next sentence prediction"
        if train.get("next_sentence")
        else "; no next sentence prediction"
    )


def _data(records: Records) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = []
    many = len(records.about.get("data", [])) > 1
    for number, data in enumerate(records.about.get("data", []), 1):
        phase = f"phase {number}: " if many else ""
        splits, row = data.get("splits", {}), data.get("row", {})
        rows.append((f"{phase}name", data.get("name")))
        rows.append((f"{phase}made from", _inputs(data.get("inputs", {}))))
        rows.append((f"{phase}sha256 of the text", data.get("input")))
        for split, label in (("train", ""), ("heldout", "held-out ")):
            values = splits.get(split, {})
            rows += [
                (f"{phase}{label}{name}", values.get(name))
                for name in ("documents", "tokens", "sequences", "rows")
            ]
        rows.append((f"{phase}tokens of a row", row.get("length")))
        packed = row.get("max_sequences", 1)
        rows.append((f"{phase}sequences of a row", f"up to {packed}" if packed > 1 else ""))
    if not rows and records.run.get("data", {}).get("path"):
        rows.append(("name", _name_of(str(records.run["data"]["path"]))))
    return rows


def _name_of(path: str) -> str:
    """Returns what a published card may say of a path: the last part, or all of the name of a model on the hub."""
    prefix = "random:" if path.startswith("random:") else ""
    path = path.removeprefix(prefix).rstrip("/")
    if is_hub(path):
        return prefix + path.partition("?")[0]
    return prefix + path.rpartition("/")[2]


def _inputs(inputs: JsonObject) -> str:
    """Returns the names of the files that data were made from, and how much they hold; "" if that was not recorded."""
    names = list(inputs.get("names", ()))
    if not names:
        return ""
    listed = ", ".join(names[:_MOST_NAMES]) + (
        f" and {len(names) - _MOST_NAMES} more" if names[_MOST_NAMES:] else ""
    )
    files = inputs.get("files", 0)
    return (
        f"{listed} ({files:,} file{'s' * (files > 1)}, {inputs.get('bytes', 0):,} bytes)"
        if files
        else listed
    )


def _scores(records: Records) -> list[tuple[str, object]]:
    if records.results:
        metrics = records.results.get("metrics", {})
        rows: list[tuple[str, object]] = [
            (f"development set, {name}", f"{value:.4g}") for name, value in metrics.items()
        ]
        return [*rows, ("step of these scores", records.results.get("step"))]
    heldout = records.heldout
    rows = []
    for name, label in _SCORES.items():
        if name in heldout and not (name == "loss" and "mlm_loss" in heldout):
            value = float(heldout[name])
            rows.append(
                (f"held-out {label}", f"{value:.1%}" if name in _PERCENT else f"{value:.4f}")
            )
    if rows and "step" in heldout:
        rows.append(("step of these scores", int(heldout["step"])))
    return rows


def _software(records: Records) -> list[tuple[str, object]]:
    software = records.about.get("software", {})
    return [
        *((name, str(version)) for name, version in software.items()),
        ("devices", records.about.get("devices")),
    ]
