# SPDX-License-Identifier: Apache-2.0
"""Measures how fast it is: training, fine-tuning, prediction, preparing text, tokenizing, loading.

    python -m benchmarks.bench --what=train --config=configs/pretrain.py:tiny --config.data.batch_size=32
    python -m benchmarks.bench --what=infer --config=configs/pretrain.py:base --input=FILE --tokenizer=DIR
    python -m benchmarks.bench --what=finetune --config=configs/pretrain.py:base --task=qqp --data=QQP --tokenizer=DIR
    python -m benchmarks.bench --what=loader --data=DIR

Prints a table of medians and ranges, and writes all figures with commit, versions and device as JSON. With
--compare=transformers the same work is done by torch and ONNX Runtime (benchmarks/peers), in turns with ours.
"""

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags
from ml_collections import config_flags

from bert_jax.devices.allocator import reuse_freed_memory
from bert_jax.errors import InputError
from bert_jax.settings.pretraining import PretrainConfig
from bert_jax.settings.rules import from_dict
from bert_jax.storage.writing import write_json
from bert_jax.tools import cli, recipes

if TYPE_CHECKING:
    from benchmarks.contenders import Bench

MODELS = ("train", "finetune", "infer")
WHAT = flags.DEFINE_enum(
    "what", None, [*MODELS, "prepare", "tokenize", "loader"], "what to measure"
)
CONFIG = config_flags.DEFINE_config_file("config", None, recipes.HELP)
DATA = flags.DEFINE_string(
    "data",
    "",
    "train, loader: a data set of prepare_corpus; with --task its directory; else random rows",
)
TASK = flags.DEFINE_string(
    "task", "", "finetune, infer: a task of one or two texts and two classes, such as mrpc"
)
INPUT = flags.DEFINE_string(
    "input", "", "files of text, a text a line; what finetune and infer read ends at a tab"
)
TOKENIZER = flags.DEFINE_string(
    "tokenizer", "", "a tokenizer's directory or a vocabulary file, for --input"
)
OUTPUT = flags.DEFINE_string(
    "output", "", "JSON file to write; benchmarks/results/WHAT-TIME.json if not given"
)
ROUNDS = flags.DEFINE_integer("rounds", 5, "turns of each contender", lower_bound=1)
WARMUP = flags.DEFINE_integer("warmup", 1, "turns before them that do not count", lower_bound=1)
STEPS = flags.DEFINE_integer(
    "steps", 0, "batches of a round; 0 takes 8, of the loader 100", lower_bound=0
)
BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 0, "0 takes data.batch_size, infer 32, loader 4096", lower_bound=0
)
LENGTH = flags.DEFINE_integer(
    "length", 128, "tokens of a row: random, tokenized or prepared", lower_bound=8
)
VOCAB_SIZE = flags.DEFINE_integer(
    "vocab_size", 30522, "tokens, where nothing else tells", lower_bound=10
)
PRECISIONS = flags.DEFINE_list(
    "precisions", [], "of ours: float32, bfloat16 or both; the config's if not given"
)
LIMIT = flags.DEFINE_integer(
    "limit", 0, "lines of --input, of tokenize MB; 0 takes enough", lower_bound=0
)
DUPLICATES = flags.DEFINE_integer("duplicates", 1, "prepare: passes over the text", lower_bound=1)
WORKERS = flags.DEFINE_integer("workers", 1, "prepare: processes; 0 is all cores", lower_bound=0)
COMPARE = flags.DEFINE_string(
    "compare", "", "transformers, or peers by name such as eager:float32,compile:bfloat16"
)
PEER_PYTHON = flags.DEFINE_string(
    "peer_python", "", "a Python that has benchmarks/peers/requirements.txt"
)
PEAK = flags.DEFINE_float(
    "peak_tflops", 0.0, "of all devices together, for MFU; 0 takes the data sheet's", 0.0
)


def main() -> None:
    """Measures, prints a table and writes JSON."""
    if WHAT.value is None:
        raise InputError(f"--what is needed: one of {', '.join(MODELS)}, prepare, tokenize, loader")
    if COMPARE.value and not PEER_PYTHON.value:
        raise InputError(
            "--compare needs --peer_python=PATH, a Python that has benchmarks/peers/requirements.txt"
        )
    if COMPARE.value and WHAT.value not in MODELS:
        raise InputError(f"--compare is for {', '.join(MODELS)}; there is no peer for {WHAT.value}")
    config = _config() if WHAT.value in MODELS else None
    _check_data()
    if WHAT.value in MODELS:  # as the commands do
        reuse_freed_memory()
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # compilation is measured too
    # JAX starts here: --help and bad settings answer at once
    from benchmarks import peer_workers as peers
    from benchmarks import timing

    modes = peers.parse_modes(COMPARE.value, WHAT.value)
    bench = _bench_of_model(config) if config else _bench_of_data()
    print(f"{WHAT.value}: {bench.about}", file=sys.stderr)
    contenders, failed = list(bench.contenders), {}
    devices, platform = _devices() if config else ([], "cpu")
    if config and modes:
        work = peers.describe_work(
            WHAT.value, _model(config), config.optimizer, config.train.seed, platform
        )
        with peers.Peers(PEER_PYTHON.value, work, bench.batches) as others:
            for mode in modes:
                contender = others.contender(mode, bench.counts)
                try:
                    contender.facts["first_round_seconds"] = round(contender.run().seconds, 3)
                except InputError as error:  # one that this machine cannot run leaves the others
                    failed[mode] = str(error)
                    print(f"left out: {error}", file=sys.stderr)
                else:
                    contenders.append(contender)
            rounds = timing.alternate(contenders, ROUNDS.value, WARMUP.value, _tell)
    else:
        rounds = timing.alternate(contenders, ROUNDS.value, WARMUP.value, _tell)

    measured = [
        timing.figures(one, rounds[one.name], _peak(one.facts, devices)) for one in contenders
    ]
    compared = timing.comparisons(contenders, rounds)
    lines = [*timing.figures_table(measured), *timing.comparison_lines(compared)]
    print("\n".join(lines))
    kept = [
        argument
        for argument in sys.argv[1:]
        if not argument.startswith(("--peer_python", "--output"))
    ]
    record = {
        "what": WHAT.value,
        "about": bench.about,
        "command": " ".join(["python -m benchmarks.bench", *kept]),
        **timing.environment(devices),
        "figures": measured,
        "comparisons": compared,
        "failed": failed,
    }
    path = Path(OUTPUT.value or _default_output(timing.CHECKOUT))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record)
    print(f"written to {path}", file=sys.stderr)


def _config() -> PretrainConfig:
    """Returns the settings of a model's benchmark. Raises: InputError if they cannot be used."""
    if CONFIG.value is None:
        raise InputError(
            f"--what={WHAT.value} needs --config, as in --config=configs/pretrain.py:tiny"
        )
    for name in PRECISIONS.value:
        if name not in ("float32", "bfloat16"):
            raise InputError(f"precisions {name!r} is neither float32 nor bfloat16")
    config = from_dict(PretrainConfig, CONFIG.value.to_dict())
    data = dataclasses.replace(
        config.data,
        path=DATA.value or config.data.path,
        batch_size=BATCH_SIZE.value or (32 if WHAT.value == "infer" else config.data.batch_size),
    )
    config = dataclasses.replace(config, data=data)
    dataclasses.replace(config, data=dataclasses.replace(data, path=data.path or "none")).validate()
    if WHAT.value == "train" and data.path:
        return config  # the data's tokenizer tells
    if LENGTH.value > config.model.max_positions:
        raise InputError(
            f"length {LENGTH.value} is above model.max_positions {config.model.max_positions}; lower it or raise that"
        )
    model = dataclasses.replace(
        config.model, vocab_size=config.model.vocab_size or VOCAB_SIZE.value
    )
    return dataclasses.replace(config, model=model)


def _check_data() -> None:
    """Raises: InputError if a benchmark that reads data is not given its path."""
    if WHAT.value == "loader" and not DATA.value:
        raise InputError("--what=loader needs --data, a directory made by prepare_corpus")
    if WHAT.value in ("prepare", "tokenize") and not INPUT.value:
        raise InputError(f"--what={WHAT.value} needs --input and --tokenizer")
    if (INPUT.value or TASK.value) and not TOKENIZER.value:
        raise InputError(
            "--input and --task need --tokenizer, a tokenizer's directory or a vocabulary file"
        )
    if TASK.value and (WHAT.value not in ("finetune", "infer") or not DATA.value or INPUT.value):
        raise InputError(
            "--task is for --what=finetune and infer, with --data=DIR, the task's directory, and no --input"
        )


def _bench_of_model(config: PretrainConfig) -> "Bench":
    from benchmarks import contenders as bench
    from bert_jax.tokenizing import load_tokenizer

    config = bench.chosen(config)
    precisions = PRECISIONS.value or [config.model.compute_dtype]
    steps, size = STEPS.value or 8, config.data.batch_size
    if WHAT.value == "train":
        made = bench.train(config, LENGTH.value, steps, precisions)
        if COMPARE.value and not made.batches:
            raise InputError("--compare needs rows of one sequence; peers cannot read packed rows")
        return made
    task = bench.make_classifier(LENGTH.value, TASK.value or "classification")
    if INPUT.value or TASK.value:
        tokenizer = load_tokenizer(TOKENIZER.value)
        if tokenizer.vocab_size > config.model.vocab_size:
            raise InputError(
                f"the tokenizer has {tokenizer.vocab_size} tokens and the model {config.model.vocab_size}; "
                f"add --vocab_size={tokenizer.vocab_size}"
            )
        most = LIMIT.value or steps * size
        if TASK.value:
            rows = bench.task_rows(task, DATA.value, tokenizer, WHAT.value == "finetune", most)
        else:
            rows = bench.read_rows(task, INPUT.value, tokenizer, most)
        steps = -(-len(rows) // size)
    else:
        rows = bench.random_rows(steps * size, LENGTH.value, config.model.vocab_size)
    if WHAT.value == "infer":
        return bench.infer(config, rows, task, size, precisions)
    return bench.finetune(config, rows, task, steps, precisions)


def _bench_of_data() -> "Bench":
    from benchmarks import contenders as bench
    from bert_jax.data.prepare import PrepareOptions

    if WHAT.value == "loader":
        return bench.load(DATA.value, BATCH_SIZE.value or 4096, STEPS.value or 100)
    if WHAT.value == "tokenize":
        return bench.tokenize(INPUT.value, TOKENIZER.value, (LIMIT.value or 8) * 10**6)
    options = PrepareOptions(max_seq_length=LENGTH.value, duplicates=DUPLICATES.value)
    return bench.prepare_text(INPUT.value, TOKENIZER.value, options, WORKERS.value)


def _model(config: PretrainConfig) -> Any:
    """Returns the model's shape; where the data's tokenizer decides how many words there are, with as many."""
    if config.model.vocab_size:
        return config.model
    from bert_jax.data.records import open_dataset
    from bert_jax.tokenizing import load_tokenizer

    tokenizer = load_tokenizer(open_dataset(config.data.path, verify=False).tokenizer_path)
    return dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size)


def _devices() -> tuple[list[Any], str]:
    import jax

    return jax.devices(), jax.default_backend()


def _peak(facts: dict[str, Any], devices: list[Any]) -> float:
    """Returns the FLOP/s that a contender could reach at best, or 0 if nobody knows."""
    from bert_jax.devices.chips import peak_flops

    if PEAK.value or not devices:
        return PEAK.value * 1e12
    return peak_flops(devices[0].device_kind, facts["precision"]) * len(devices)


def _default_output(checkout: Path) -> Path:
    root = checkout if (checkout / "benchmarks").is_dir() else Path.cwd()
    return (
        root
        / "benchmarks"
        / "results"
        / f"{WHAT.value}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.json"
    )


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    cli.run(main)
