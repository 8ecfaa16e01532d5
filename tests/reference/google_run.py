# SPDX-License-Identifier: Apache-2.0
"""A whole pre-training and a whole fine-tuning beside those that Google's own code made, step by step.

    python tests/reference/google_run.py    # in the checkout

Google's are in tests/golden/google_run.npz, made by tests/reference/make_google_run_golden.py. Ours run here, through
`import_tfrecords`, a checkpoint of TensorFlow 1, `pretrain` and `finetune`, in float32 and without dropout, on
the same records in the same order. Writes the figures to benchmarks/records/google_run.json, and draws both curves and
their difference in docs/results/google_run.png.
"""

import json
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from google_files import write_bundle

from bert_jax.checkpoints.names import from_params
from bert_jax.data.google.import_examples import import_examples
from bert_jax.finetuning import finetune
from bert_jax.inference.pretrained import load_pretrained
from bert_jax.pretraining import pretrain
from bert_jax.settings.finetuning import (
    FinetuneConfig,
    FinetuneDataConfig,
    FinetuneModelConfig,
    FinetuneTrainConfig,
    TaskConfig,
)
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.pretraining import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    MeshConfig,
    OptimizerConfig,
    PretrainConfig,
    ReportConfig,
    TrainConfig,
)
from bert_jax.storage.writing import write_json
from bert_jax.tools import cli
from bert_jax.training.report import read_metrics

Arrays = dict[str, np.ndarray]

KINDS = ("pretraining", "finetuning")
GOLDEN = Path("tests/golden/google_run.npz")
EXAMPLES = ("google_examples.tfrecord", "google_examples.npz")  # beside the golden file
CHECKPOINT = "bert_model.ckpt"

RECORD, PICTURE = Path("benchmarks/records/google_run.json"), Path("docs/results/google_run.png")


class Trajectory(NamedTuple):
    """A run, by its steps and by its end."""

    losses: np.ndarray  # [number of steps], before each step
    rates: np.ndarray  # [number of steps], the learning rate of each step
    params: Arrays  # after the last step, by Google's names


class Golden(NamedTuple):
    """What Google's code did, and what it was given."""

    arrays: Arrays
    settings: dict[str, Any]
    made_with: str

    def part(self, prefix: str) -> Arrays:
        """Returns the arrays whose names start with `prefix`/, by the rest of the name."""
        return {
            name.removeprefix(f"{prefix}/"): self.arrays[name] for name in self.arrays if name.startswith(f"{prefix}/")
        }

    def trajectory(self, kind: str) -> Trajectory:
        part = self.part(kind)
        return Trajectory(part["losses"], part["rates"], self.part(f"{kind}/last"))


def read_golden(path: Path) -> Golden:
    """Returns what tests/reference/make_google_run_golden.py has written."""
    with np.load(path) as file:
        arrays = dict(file)
    return Golden(arrays, json.loads(str(arrays["settings"])), str(arrays["made_with"]))


def write_start(golden: Golden, kind: str, vocab: Path, folder: Path) -> Path:
    """Writes the checkpoint that a run starts from as Google's code writes one, and returns its directory."""
    folder.mkdir()
    unit = np.float32(golden.settings["unit"])
    values = {name: value * unit for name, value in golden.part(f"{kind}/first").items()}
    settings = dict(golden.settings["model"])
    if kind == "finetuning":
        values = golden.part("pretraining/last") | values
        settings |= {"bert_jax": {"task": "sequence_classification", "labels": golden.settings["labels"]}}
    write_bundle(folder / CHECKPOINT, values)
    (folder / "bert_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "vocab.txt").write_bytes(vocab.read_bytes())
    return folder


def write_vocab(folder: Path, golden_folder: Path) -> Path:
    """Writes the vocabulary of the examples, and returns its path."""
    with np.load(golden_folder / EXAMPLES[1]) as file:
        tokens = file["vocab"].tolist()
    path = folder / "vocab.txt"
    path.write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    return path


def train(golden: Golden, golden_folder: Path, kind: str, folder: Path) -> Trajectory:
    """Returns our run of the same training, made in an empty folder."""
    vocab = write_vocab(folder, golden_folder)
    start = write_start(golden, kind, vocab, folder / "start")
    if kind == "pretraining":
        import_examples(str(golden_folder / EXAMPLES[0]), str(vocab), str(folder / "data"), num_workers=1)
        pretrain(_pretraining(golden, start, folder / "data"), folder / "run", jax.devices()[:1])
    else:
        rows = [["label", "sentence1", "sentence2"], *golden.arrays["finetuning/pairs"].tolist()]
        (folder / "data").mkdir()
        (folder / "data" / "train.tsv").write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
        finetune(_finetuning(golden, start, folder / "data"), folder / "run", jax.devices()[:1])
    steps = [record for record in read_metrics(folder / "run" / "metrics.jsonl") if record["kind"] == "train"]
    losses, rates = (np.array([record[name] for record in steps]) for name in ("loss", "learning_rate"))
    bert = load_pretrained(folder / "run")
    return Trajectory(losses, rates, from_params(bert.params, "tf1", bert.config))


def optimizer(run: dict[str, Any], **changes: Any) -> OptimizerConfig:
    """Returns Google's optimizer: AdamWeightDecayOptimizer and the schedule of create_optimizer."""
    return OptimizerConfig(learning_rate=run["learning_rate"], warmup_steps=run["warmup_steps"], **changes)


def _pretraining(golden: Golden, start: Path, data: Path) -> PretrainConfig:
    model, run = golden.settings["model"], golden.settings["pretraining"]
    return PretrainConfig(
        model=ModelConfig(
            hidden_size=model["hidden_size"],
            num_layers=model["num_hidden_layers"],
            num_heads=model["num_attention_heads"],
            intermediate_size=model["intermediate_size"],
            max_positions=model["max_position_embeddings"],
            hidden_dropout_rate=0.0,
            attention_dropout_rate=0.0,
            initializer_stddev=model["initializer_range"],
            matmul_precision="highest",
        ),
        data=DataConfig(path=str(data), batch_size=run["batch_size"], seed=run["data_seed"]),
        optimizer=optimizer(run),
        train=TrainConfig(num_steps=run["num_steps"]),
        eval=EvalConfig(every_steps=0),
        mesh=MeshConfig(data=1),
        checkpoint=CheckpointConfig(every_steps=0),
        report=ReportConfig(every_steps=1, tensorboard=False, progress=False),
        init_checkpoint=str(start),
    )


def _finetuning(golden: Golden, start: Path, data: Path) -> FinetuneConfig:
    run = golden.settings["finetuning"]
    return FinetuneConfig(
        task=TaskConfig(name="classification", max_seq_length=golden.settings["max_seq_length"]),
        model=FinetuneModelConfig(hidden_dropout_rate=0.0, attention_dropout_rate=0.0, matmul_precision="highest"),
        data=FinetuneDataConfig(source=str(data), batch_size=run["batch_size"], seed=run["data_seed"], pack="off"),
        optimizer=optimizer(run),
        train=FinetuneTrainConfig(
            num_epochs=run["num_steps"] * run["batch_size"] / len(golden.arrays["finetuning/pairs"])
        ),
        mesh=MeshConfig(data=1),
        report=ReportConfig(every_steps=1, tensorboard=False, progress=False),
        init_checkpoint=str(start),
    )


def distances(ours: Arrays, theirs: Arrays) -> dict[str, float]:
    """Returns the largest distance in each of Google's variables; a variable that is not there is infinitely far."""
    return {
        name: float(np.abs(ours[name] - value).max()) if name in ours and ours[name].shape == value.shape else np.inf
        for name, value in theirs.items()
    }


def figures(golden: Golden, kind: str, ours: Trajectory) -> dict[str, Any]:
    """Returns how far apart two runs are."""
    theirs = golden.trajectory(kind)
    apart = np.abs(ours.losses - theirs.losses)
    far = distances(ours.params, theirs.params)
    first = golden.part(f"{kind}/first")
    start: Arrays = {name: value * golden.settings["unit"] for name, value in first.items()}
    start = golden.part("pretraining/last") | start if kind == "finetuning" else start
    return {
        **golden.settings[kind],
        "first_loss": float(theirs.losses[0]),
        "last_loss": float(theirs.losses[-1]),
        "largest_loss_distance": float(apart.max()),
        "largest_loss_distance_step": int(apart.argmax()) + 1,
        "mean_loss_distance": float(apart.mean()),
        "largest_rate_distance": float(np.abs(ours.rates - theirs.rates).max()),
        "parameters": int(sum(value.size for value in theirs.params.values())),
        "largest_parameter_distance": max(far.values()),
        "largest_parameter_distance_name": max(far, key=lambda name: far[name]),
        "largest_parameter_change": max(distances(start, theirs.params).values()),
        "distances": far,
    } | _looked_up(golden, kind)


def _looked_up(golden: Golden, kind: str) -> dict[str, float]:
    """Returns how far Google's run is from itself where it clips by the norm of gathered rows."""
    losses = golden.part(kind).get("losses_looked_up")
    return (
        {} if losses is None else {"looked_up_loss_distance": float(np.abs(losses - golden.part(kind)["losses"]).max())}
    )


def draw(path: Path, pairs: Sequence[tuple[str, np.ndarray, np.ndarray]]) -> None:
    """Draws, for each kind of run, Google's losses and ours over each other, and the difference below."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(pairs), figsize=(10, 5.5), sharex="col", height_ratios=(2, 1), squeeze=False)
    for (title, ours, theirs), (above, below) in zip(pairs, axes.T, strict=True):
        steps = np.arange(1, len(theirs) + 1)
        above.plot(steps, theirs, linewidth=5, alpha=0.3, label="google-research/bert, TensorFlow")
        above.plot(steps, ours, linewidth=1.2, label="bert_jax")
        apart = np.abs(ours - theirs)
        below.plot(steps[apart > 0], apart[apart > 0], ".", markersize=3)
        below.axhline(1e-4, color="gray", linestyle=":", linewidth=1)
        below.set_yscale("log")
        above.set_title(title)
        above.set_ylabel("loss of the step")
        below.set_ylabel("difference")
        below.set_xlabel("step")
        above.legend()
        for each in (above, below):
            each.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Trains, compares, and writes figures and picture."""
    golden = read_golden(GOLDEN)
    record: dict[str, Any] = {
        "made_with": golden.made_with,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "model": golden.settings["model"],
    }
    pairs = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            ours = train(golden, GOLDEN.parent, kind, Path(folder))
        record[kind] = figures(golden, kind, ours)
        pairs.append((f"{record[kind]['num_steps']} steps of {kind}", ours.losses, golden.trajectory(kind).losses))
        print(
            f"{kind}: losses differ by {record[kind]['largest_loss_distance']:.1e} at most, parameters at the end by "
            f"{record[kind]['largest_parameter_distance']:.1e} ({record[kind]['largest_parameter_distance_name']})"
        )
    write_json(RECORD, record)
    draw(PICTURE, pairs)


def _processor() -> str:
    """Returns the name of the processor, where Linux says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    cli.run(main)
