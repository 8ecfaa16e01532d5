# SPDX-License-Identifier: Apache-2.0
r"""The paper's tables at your own model size, as a queue of commands. Starting it again resumes it.

    python -m benchmarks.ablations --runs=table5,table8 --root=runs/ablations --data=data128 --tokens=20e6 --seeds=3 \
        --size=tiny --tasks=sst2,mrpc,stsb,squad1 --task_data=DIR --pairs=blimp=blimp.jsonl.gz
    python -m benchmarks.ablations ... --status       # a line for each unit; runs nothing
    python -m benchmarks.ablations ... --minutes=25   # stops in time, with its state saved

Each unit (an objective, a size, a seed) has a directory below --root, in which it is pre-trained, evaluated and
fine-tuned; tables share units. What starts from the model of another unit waits until that has been pre-trained. After
each unit the record of its table is collected, of which `benchmarks.results` draws pages. A unit that is whole in a
record is not run again: its directory may be gone, or on another machine. GROUPS below says what each run is.
"""

import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags

from benchmarks.jobs import Job, Stop, Unit, run_unit
from benchmarks.recorded import is_recorded, keep_record, read_recorded
from bert_jax.data.records import open_dataset
from bert_jax.errors import InputError
from bert_jax.settings.model import model_size
from bert_jax.settings.pretraining import MaskingConfig
from bert_jax.settings.rules import suggest
from bert_jax.tools import cli
from bert_jax.training.report import read_metrics

TABLE_8 = ("mask_100_0_0", "mask_80_0_20", "mask_80_20_0", "mask_0_20_80", "mask_0_0_100")
# Run -> the ablations of configs/ablations.py that it compares. "bert" is 80/10/10 of Table 8 as well.
GROUPS: dict[str, tuple[str, ...]] = {
    "main": ("main", "random"),  # the main model with its revisions and features, and its shape without pre-training
    "table5": ("bert", "no_nsp", "ltr", "ltr_bilstm"),  # the last fine-tunes ltr with a BiLSTM on top
    "table6": ("bert",),  # of each of --sizes
    "table8": ("bert", *TABLE_8),
    "later": ("bert", "whole_word", "ngram", "sop"),
    "rows": ("bert", "long_rows"),  # with the short rows of --short_data first, and with those of --data alone
}
FEATURES = ("embeddings", "last", "second_to_last", "weighted_last4", "concat_last4", "weighted_all")  # Table 7
REVISIONS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # of all steps, besides the last: of 100 M tokens, after 1, 2, 5 ... M
# Task -> where its data are below --task_data, and settings that are not those of configs/finetune.py.
TASKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "cola": ("glue/CoLA", ()),
    "sst2": ("glue/SST-2", ()),
    "mrpc": ("glue/MRPC", ()),
    "stsb": ("glue/STS-B", ()),
    "rte": ("glue/RTE", ()),
    "squad1": ("train={0}/squad/dev-v1.1.json[:28],dev={0}/squad/dev-v1.1.json[28:]", ("--config.task.doc_stride=64",)),
    "ner": ("{0}/wnut17/wnut17train.conll,{0}/wnut17/emerging.dev.conll", ()),
}
LARGE = ("sst2", "squad1")  # large tasks: one seed of fine-tuning takes as long as five on another, and varies less
# Settings of fine-tuning for the BiLSTM of Table 5.
BILSTM = ("features=last", "train_encoder=True", "hidden_size=128")

RUNS = flags.DEFINE_list("runs", [], f"what to run, with commas between: {', '.join(GROUPS)}")
ROOT = flags.DEFINE_string("root", "", "where units and their work directories go; resumes if used")
DATA = flags.DEFINE_string("data", "", "a data set of prepare_corpus with next sentences and a held-out split")
DATA_SOP = flags.DEFINE_string("data_sop", "", "the same text with --next_sentence=sop; without it sop is left out")
SHORT = flags.DEFINE_string(
    "short_data", "", "the text of --data in shorter rows, to begin with; without it all are long"
)
SHORT_SOP = flags.DEFINE_string("short_data_sop", "", "the text of --data_sop in shorter rows; goes with --short_data")
SHORT_RATE = flags.DEFINE_float("short_rate", 0.3, "share of --tokens in short rows", lower_bound=0, upper_bound=1)
SIZE = flags.DEFINE_string("size", "tiny", "of every model but those of table6")
SIZES = flags.DEFINE_list("sizes", ["tiny", "mini", "small"], "of table6")
TOKENS = flags.DEFINE_float("tokens", 20e6, "that each model is trained on", lower_bound=1)
SEEDS = flags.DEFINE_integer("seeds", 3, "of pre-training, from 0 on; the main model has one", lower_bound=1)
BATCH = flags.DEFINE_integer("batch_size", 64, "rows of a batch of pre-training", lower_bound=1)
RATE = flags.DEFINE_float("learning_rate", 1e-3, "of pre-training")
RATES = flags.DEFINE_list("rates", [], "of sizes that want another than --learning_rate, as in --rates=mini=1e-3")
SAVE = flags.DEFINE_integer("save_every", 500, "steps between checkpoints of pre-training", lower_bound=1)
TASK_NAMES = flags.DEFINE_list("tasks", [], f"to fine-tune on: {', '.join(TASKS)}")
TASK_DATA = flags.DEFINE_string("task_data", "", "a directory with glue/SST-2, squad/, wnut17/ and so on")
TASK_RATE = flags.DEFINE_float("task_learning_rate", 1e-4, "of fine-tuning; small models want more than the paper's")
TASK_EPOCHS = flags.DEFINE_float("task_epochs", 4.0, "of fine-tuning", lower_bound=0)
LARGE_TASK_EPOCHS = flags.DEFINE_float(
    "large_task_epochs", 0.0, "of fine-tuning on large tasks; 0 is as many as on others", lower_bound=0
)
TASK_SEEDS = flags.DEFINE_integer("task_seeds", 1, "of fine-tuning, for each seed of pre-training", lower_bound=1)
MAIN_TASK_SEEDS = flags.DEFINE_integer(
    "main_task_seeds", 5, "of fine-tuning main and random, but for large tasks", lower_bound=1
)
FEATURE_TASK = flags.DEFINE_string("feature_task", "ner", "what Table 7's features are read for; empty leaves them out")
FEATURE_EPOCHS = flags.DEFINE_float("feature_epochs", 12.0, "of the BiLSTM on features, which starts at random")
PAIRS = flags.DEFINE_list("pairs", [], "minimal pairs as NAME=PATH or NAME=PATH=BASELINES")
LIMIT = flags.DEFINE_integer("limit", 0, "pairs of each paradigm; 0 is all")
REVISION_LIMIT = flags.DEFINE_integer("revision_limit", 0, "the same for revisions of the main model")
SET = flags.DEFINE_multi_string(
    "set", [], "a flag more for train.py, such as --set=--config.model.compute_dtype=bfloat16"
)
SET_TASK = flags.DEFINE_multi_string(
    "set_task", [], "a flag more for finetune.py; of one task alone as in --set_task=ner:--config.train.num_epochs=12"
)
RECORDS = flags.DEFINE_string("records", "benchmarks/records", "where the record of each run is kept; empty for none")
COMMANDS = flags.DEFINE_bool("commands", False, "print what waits of each unit as commands of a shell, and run nothing")
STATUS = flags.DEFINE_bool("status", False, "say how far each unit is, and run nothing")
MINUTES = flags.DEFINE_float("minutes", 0.0, "to stop after; 0 goes on to the end", lower_bound=0)


class Budget(NamedTuple):
    """The length of pre-training and the interval between revisions, in steps."""

    steps: int
    keep_every: int
    short_steps: int  # of `steps`, the first ones, in batches of
    short_rows: int

    def revisions(self) -> list[int]:
        """Returns the steps of revisions to measure, and the last step, of which the run itself is the model."""
        early = {round(100 * part) * self.keep_every for part in REVISIONS}
        return sorted({step for step in early if 0 < step < self.steps} | {self.steps})


def budget_of(data: str, short_data: str, tokens: float, batch_size: int) -> Budget:
    """Returns the steps that read so many tokens, counting [CLS] and [SEP], and the interval of 100 revisions.

    A step reads as many tokens in short rows as in `batch_size` rows of `data`.
    """
    per_step = batch_size * tokens_of_row(data)
    steps = max(1, math.ceil(tokens / per_step))
    short_steps, short_rows = 0, 0
    if short_data:
        short_steps, short_rows = round(SHORT_RATE.value * steps), max(1, round(per_step / tokens_of_row(short_data)))
    return Budget(steps, max(1, round(steps / 100)), short_steps, short_rows)


def tokens_of_row(data: str) -> float:
    """Returns the mean number of tokens in the rows of a data set."""
    manifest = open_dataset(data, verify=False).manifest
    return manifest["row"]["length"] * manifest["splits"]["train"]["fill"]


def units_of(run: str) -> Iterator[Unit]:
    """Yields the units of a run, those of the first seed first."""
    seeds = range(1 if run == "main" else SEEDS.value)
    sizes = SIZES.value if run == "table6" else [SIZE.value]
    for seed in seeds:
        for size in sizes:
            for name in GROUPS[run]:
                if name != "sop" or DATA_SOP.value:
                    yield make_unit(name, size, seed)


def make_unit(name: str, size: str, seed: int) -> Unit:
    """Returns the unit of an ablation: its directory and the commands that fill it."""
    group = f"{name}-{size}"
    directory = Path(ROOT.value) / group / f"seed{seed}"
    checkpoint = directory / "pretrain"
    if name == "random":
        start = Path(ROOT.value) / f"main-{size}" / f"seed{seed}" / "pretrain"
        tasks = task_jobs(directory, f"random:{start}", MAIN_TASK_SEEDS.value)
        return Unit(group, seed, directory, tuple(tasks), start / "pretrained")
    if name == "ltr_bilstm":
        start = Path(ROOT.value) / f"ltr-{size}" / f"seed{seed}" / "pretrain"
        probe = tuple(f"--config.task.probe.{setting}" for setting in BILSTM)
        tasks = task_jobs(directory, str(start), TASK_SEEDS.value, more=probe)
        return Unit(group, seed, directory, tuple(tasks), start / "pretrained")
    data = DATA_SOP.value if name == "sop" else DATA.value
    short = {"sop": SHORT_SOP.value, "long_rows": ""}.get(name, SHORT.value)
    budget = budget_of(data, short, TOKENS.value, BATCH.value)
    jobs = [pretraining_job(name, size, seed, phase_flags(data, short, budget), budget, checkpoint)]
    jobs += score_jobs(directory, str(checkpoint), DATA.value, "", LIMIT.value)
    num_seeds = MAIN_TASK_SEEDS.value if name == "main" else TASK_SEEDS.value
    jobs += task_jobs(directory, str(checkpoint), num_seeds)
    few = model_size(size).num_layers < 4
    if name == "bert" or name in TABLE_8:  # the paper concatenates four layers
        jobs += feature_jobs(directory, str(checkpoint), ("last",) if few else ("concat_last4",))
    if name == "main":
        jobs += feature_jobs(directory, str(checkpoint), [f for f in FEATURES if not (few and f.endswith("last4"))])
        for step in budget.revisions():
            model = str(checkpoint) if step == budget.steps else f"{checkpoint}@{step}"
            jobs += score_jobs(directory, model, DATA.value, f"@{step}", REVISION_LIMIT.value)
            jobs += task_jobs(directory, model, 1, f"@{step}", TASK_NAMES.value[:1])
    return Unit(group, seed, directory, tuple(jobs))


def phase_flags(data: str, short_data: str, budget: Budget) -> list[str]:
    """Returns the flags of one phase, or of two with one learning rate schedule: short rows, then long ones."""
    if not budget.short_steps:
        steps = budget.steps
        return [
            f"--config.data.path={data}",
            f"--config.data.batch_size={BATCH.value}",
            f"--config.train.num_steps={steps}",
        ]
    short, long = (open_dataset(path, verify=False).manifest["row"]["length"] for path in (short_data, data))
    if short >= long:
        raise InputError(f"the rows of {short_data} have {short} tokens, and those of {data} {long}; give shorter ones")
    most = MaskingConfig().limit(long)
    return [
        f"--config.data.path={short_data}",
        f"--config.data.batch_size={budget.short_rows}",
        f"--config.train.num_steps={budget.short_steps}",
        f"--config.masking.max_predictions={math.ceil(most * short / long)}",
        f"--config.phase2.path={data}",
        f"--config.phase2.batch_size={BATCH.value}",
        f"--config.phase2.num_steps={budget.steps - budget.short_steps}",
        f"--config.phase2.max_predictions={most}",
        "--config.phase2.schedule=continue",
    ]


def rates_of_sizes() -> dict[str, float]:
    """Returns the learning rates of --rates, by size. Raises: InputError if an entry is not SIZE=RATE."""
    rates = {}
    for size, _, rate in (entry.partition("=") for entry in RATES.value):
        try:
            rates[size] = float(rate)
        except ValueError:
            raise InputError(f"--rates={size}={rate}: {rate!r} is no number; write like mini=1e-3") from None
        model_size(size)
    return rates


def pretraining_job(name: str, size: str, seed: int, phases: Sequence[str], budget: Budget, workdir: Path) -> Job:
    """Returns the pre-training of an ablation; the seed is that of parameters, dropout, order and masks."""
    recipe = "bert" if name == "long_rows" else name
    config = f"configs/pretrain.py:{size}" if name == "main" else f"configs/ablations.py:{recipe},{size}"
    command = [
        *(sys.executable, "train.py", f"--config={config}", f"--workdir={workdir}", *phases),
        *(f"--config.{section}.seed={seed}" for section in ("train", "data", "masking")),
        f"--config.optimizer.learning_rate={rates_of_sizes().get(size, RATE.value)}",
        *("--config.optimizer.warmup_steps=0", "--config.optimizer.warmup_rate=0.1"),
        f"--config.eval.every_steps={max(1, budget.steps // 20)}",
        f"--config.checkpoint.every_steps={SAVE.value}",
        f"--config.checkpoint.keep_every={budget.keep_every if name == 'main' else 0}",
        f"--config.report.every_steps={max(1, min(100, budget.steps // 20))}",
        *("--config.report.progress=False", "--config.report.tensorboard=False"),
        *SET.value,
    ]
    return Job("pretrain", tuple(command), workdir / "pretrained")


def score_jobs(directory: Path, checkpoint: str, data: str, suffix: str, limit: int) -> Iterator[Job]:
    """Yields the evaluation on held-out text, and the scoring of minimal pairs, `limit` of each paradigm."""
    output = directory / "evaluations" / f"heldout{suffix}.json"
    command = (sys.executable, "-m", "bert_jax.tools.evaluate", f"--checkpoint={checkpoint}", f"--data={data}")
    yield Job(f"heldout{suffix}", (*command, f"--output={output}"), output)
    for entry in PAIRS.value:
        name, path, baselines = (*entry.split("="), "", "")[:3]
        output = directory / "pairs" / f"{name}{suffix}.json"
        command = (sys.executable, "-m", "bert_jax.tools.score_sentences", f"--checkpoint={checkpoint}")
        command += (f"--pairs={path}", f"--limit={limit}", f"--baselines={baselines}", f"--output={output}")
        yield Job(f"{name}{suffix}", command, output)


def task_jobs(
    directory: Path,
    start: str,
    num_seeds: int,
    suffix: str = "",
    tasks: Sequence[str] | None = None,
    more: Sequence[str] = (),
) -> Iterator[Job]:
    """Yields a fine-tuning on each task, from one seed on the large ones; `more` are further flags."""
    for task in TASK_NAMES.value if tasks is None else tasks:
        workdir = directory / "tasks" / f"{task}{suffix}"
        settings = (f"--config.optimizer.learning_rate={TASK_RATE.value}", *more)
        seeds, epochs = (1, LARGE_TASK_EPOCHS.value) if task in LARGE else (num_seeds, 0)
        yield finetuning_job(task, start, workdir, seeds, epochs or TASK_EPOCHS.value, settings)


def feature_jobs(directory: Path, start: str, features: Sequence[str]) -> Iterator[Job]:
    """Yields the feature-based approach (Table 7): a BiLSTM on features of a frozen encoder."""
    for name in features if FEATURE_TASK.value and TASK_DATA.value else ():
        settings = (
            f"--config.task.probe.features={name}",
            "--config.task.probe.hidden_size=128",
            "--config.optimizer.learning_rate=1e-3",
        )
        workdir = directory / "tasks" / f"{FEATURE_TASK.value}_{name}"
        yield finetuning_job(FEATURE_TASK.value, start, workdir, TASK_SEEDS.value, FEATURE_EPOCHS.value, settings)


def finetuning_job(
    task: str, start: str, workdir: Path, num_seeds: int, num_epochs: float, settings: Sequence[str]
) -> Job:
    """Returns a fine-tuning from several seeds, as a sweep."""
    place, own = TASKS[task]
    source = place.format(TASK_DATA.value) if "{0}" in place else f"{TASK_DATA.value}/{place}"
    command = (
        *(sys.executable, "finetune.py", f"--config=configs/finetune.py:{task}", f"--workdir={workdir}"),
        *(f"--config.init_checkpoint={start}", f"--config.data.source={source}"),
        "--config.task.max_seq_length=128",
        f"--config.train.num_epochs={num_epochs}",
        f"--config.sweep.seeds={num_seeds}",
        *("--config.report.progress=False", "--config.report.tensorboard=False"),
        *own,
        *settings,
        *(more.removeprefix(f"{task}:") for more in SET_TASK.value if more.startswith(("--", f"{task}:"))),
    )
    return Job(f"tasks/{workdir.name}", command, workdir / "sweep.json")


def status(unit: Unit, is_recorded: bool) -> str:
    """Returns a line that says how far a unit is."""
    done, waiting = len(unit.jobs) - len(unit.waiting), unit.waiting
    line = f"{unit.group:24} seed {unit.seed}  {done:2} of {len(unit.jobs)} done"
    if is_recorded:
        return f"{line}, all recorded before"
    if waiting:
        line += f", {unit.lacks}" if unit.lacks else f", next {waiting[0].name}"
        metrics = unit.directory / "pretrain" / "metrics.jsonl"
        if waiting[0].name == "pretrain" and metrics.exists():
            records = read_metrics(metrics)
            line += f" at step {max((record['step'] for record in records), default=0):,}"
    return line


def check_flags() -> None:
    """Raises: InputError if a flag is missing or names something unknown."""
    rates_of_sizes()
    for run in RUNS.value:
        if run not in GROUPS:
            raise InputError(f"there is no run {run!r}{suggest(run, GROUPS)}; runs: {', '.join(GROUPS)}")
    if not RUNS.value or not ROOT.value or not DATA.value:
        raise InputError("--runs, --root and --data are needed: what to run, where, and a prepared data set")
    if "rows" in RUNS.value and not SHORT.value:
        raise InputError("--runs=rows compares a start in short rows with none; give --short_data")
    if (SHORT_SOP.value or flags.FLAGS["short_rate"].present) and not SHORT.value:
        raise InputError(
            "--short_data_sop and --short_rate have no effect without --short_data; give it, or leave them out"
        )
    if SHORT.value and DATA_SOP.value and not SHORT_SOP.value:
        raise InputError("--data_sop and --short_data need --short_data_sop too: all units learn in the same phases")
    masking, later = (f"--config.{part}.max_predictions" for part in ("masking", "phase2"))
    given = {entry.partition("=")[0] for entry in SET.value}
    if SHORT.value and masking in given and later not in given:
        raise InputError(f"--set={masking} is of the short rows; give --set={later} too, which is of the long ones")
    if wrong := [task for task in [*TASK_NAMES.value, *filter(None, [FEATURE_TASK.value])] if task not in TASKS]:
        raise InputError(f"there is no task {wrong[0]!r}{suggest(wrong[0], TASKS)}; tasks: {', '.join(TASKS)}")
    if TASK_NAMES.value and not TASK_DATA.value:
        raise InputError("--tasks needs --task_data, a directory with their data")
    if wrong := [entry for entry in PAIRS.value if not 2 <= len(entry.split("=")) <= 3]:
        raise InputError(f"--pairs={wrong[0]} is not NAME=PATH or NAME=PATH=BASELINES; name the pairs")
    for more in SET_TASK.value:
        task, colon, _ = more.partition(":--")
        if not more.startswith("--") and not (colon and task in TASKS):
            raise InputError(f"--set_task={more} is neither a flag nor TASK:FLAG; tasks: {', '.join(TASKS)}")
    names = [entry.partition("=")[0] for entry in PAIRS.value]
    if len(set(names)) < len(names):
        raise InputError(f"--pairs has one name twice, of {', '.join(names)}; name each file differently")


def main() -> int:
    """Runs the waiting jobs, or prints their status; returns 1 if a job or a record failed, or a unit still waits."""
    check_flags()
    plan = {run: list(units_of(run)) for run in RUNS.value}
    everything = [unit for units in plan.values() for unit in units]
    if "later" in plan and not DATA_SOP.value:
        print("sop is left out: --data_sop is not given", flush=True)
    paths = {run: Path(RECORDS.value) / f"{run}.json.gz" for run in GROUPS} if RECORDS.value else {}
    recorded = read_recorded(paths.values(), everything)

    def keep(run: str) -> bool:
        try:
            if paths:
                keep_record(paths[run], plan[run], recorded)
        except InputError as error:
            print(f"the record of {run} is not written: {error}", flush=True)
            return False
        return True

    undone, only_told, stop = 0, STATUS.value or COMMANDS.value, Stop(60 * MINUTES.value)
    with stop.on_signals():
        for run, units in plan.items():
            for unit in () if only_told else units:
                if unit.waiting and not stop.asked and not is_recorded(unit, recorded, everything):
                    problem = run_unit(unit, stop)
                    undone += " failed " in problem or problem.startswith("waits for ")
                    print(f"{unit.group} seed {unit.seed}: {problem or 'finished'}", flush=True)
                    keep(run)
            if not only_told:
                undone += not keep(run)  # of units that another run has finished, too
            for unit in units:
                is_whole = is_recorded(unit, recorded, everything)
                if not COMMANDS.value:
                    print(f"{run}: {status(unit, is_whole)}", flush=True)
                for job in unit.waiting if COMMANDS.value and not is_whole else ():
                    print(shlex.join(job.command), flush=True)
    return 1 if undone else 0


if __name__ == "__main__":
    cli.run(main)
