# SPDX-License-Identifier: Apache-2.0
"""What one GPU does in a quarter of an hour: training steps, where their time goes, attention, and the peers.

    python -m benchmarks.quarter --output=DIR --seconds=540
    python -m benchmarks.quarter --output=DIR --parts=base,attention --at_once=2

A GPU can be had for minutes, so the parts stand in the order of their worth. Each is a process of its own with a limit
of time, writes a line of JSON for each figure as soon as it is known, and ends without harm to the others;
DIR/quarter.json has all lines so far. With --at_once=N up to N parts compile at the same time, and a lock lets one of
them measure at a time (what XLA tries out while it compiles can still disturb another part's figures).
--size=tiny takes models and rows that a CPU has done in a minute: the test that all of this runs.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from filelock import FileLock

import bert_jax
from benchmarks import contenders, peer_workers, timing, traces
from bert_jax.checkpoints.hf import save_hf
from bert_jax.devices.chips import peak_flops
from bert_jax.errors import InputError
from bert_jax.model.attention import attention_mask
from bert_jax.model.fused_attention import fused_attention
from bert_jax.model.objective import init_params
from bert_jax.settings.model import model_size
from bert_jax.settings.pretraining import PretrainConfig
from bert_jax.settings.rules import from_dict
from bert_jax.storage.writing import write_json
from bert_jax.tokenizing import load_tokenizer
from bert_jax.tools import cli
from configs.pretrain import get_config

OUTPUT = flags.DEFINE_string(
    "output", "", "a folder for quarter.json, the lines of each part, and programs"
)
SECONDS = flags.DEFINE_float("seconds", 540.0, "when all parts end, done or not", lower_bound=1)
PART_SECONDS = flags.DEFINE_float(
    "part_seconds", 120.0, "when a part ends, done or not", lower_bound=1
)
PARTS = flags.DEFINE_list("parts", [], "parts to run, in this order; all if not given")
AT_ONCE = flags.DEFINE_integer("at_once", 1, "parts that compile at the same time", lower_bound=1)
SIZE = flags.DEFINE_enum("size", "full", ["full", "tiny"], "tiny is for a test on a CPU")
INPUT = flags.DEFINE_string(
    "input", "", "a file with a text a line, for embeddings and finetune; without it random words"
)
TOKENIZER = flags.DEFINE_string("tokenizer", "models/bert-mini-en", "for --input")
PEER_PYTHON = flags.DEFINE_string(
    "peer_python", "", "a Python with torch and sentence-transformers; without, no peers"
)
ONE = flags.DEFINE_string(
    "one", "", "a part that this process measures itself; the command starts such processes"
)

ROUNDS, STEPS = 5, 8
LENGTH = 128  # tokens of a text at most


class Lines:
    """Where a part writes its figures, a line of JSON each, and the lock that lets it measure alone."""

    def __init__(self, folder: Path, part: str) -> None:
        self.folder, self.part, self.tiny = folder, part, SIZE.value == "tiny"
        self.alone = FileLock(folder / "measuring.lock")

    def write(self, name: str, **figures: Any) -> None:
        """Appends a line and prints its first figures."""
        line = {"part": self.part, "name": name, **figures}
        with (self.folder / f"{self.part}.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        shown = {
            key: value for key, value in figures.items() if isinstance(value, (int, float, str))
        }
        print(f"{self.part}: {name}: {shown}", file=sys.stderr, flush=True)


class Part(NamedTuple):
    """What is measured in one process."""

    measure: Callable[[Lines], None]
    xla_flags: str = ""


# Training


def training(
    size: str,
    shapes: list[tuple[int, int]],
    profile: bool = False,
    peers: str = "",
    options: dict[str, bool | str] | None = None,
    **model: Any,
) -> Callable[[Lines], None]:
    """Returns what trains BERT or a modern shape in rows [rows, length].

    With `profile` it writes the program and where its time goes; `peers` are modes of torch; `options` are XLA's, and
    `model` settings of the model.
    """

    def measure(lines: Lines) -> None:
        for rows, length in [(8, 32)] if lines.tiny else shapes:
            about = f"{rows} x {length}"
            try:
                config = _with_rows(_recipe(size, lines.tiny), rows, length, model)
                program = lines.folder / f"{lines.part}_{rows}x{length}.hlo.gz" if profile else None
                bench = contenders.train(config, length, STEPS, ["bfloat16"], program, options)
                _compare(lines, config, bench, "train", peers, about)
                if profile:
                    _profile(lines, bench.contenders[0], about)
            except Exception as error:  # noqa: BLE001 - such as memory that does not suffice: the next shape may do
                lines.write(about, error=f"{type(error).__name__}: {error}"[:500])

    return measure


def _with_rows(
    config: PretrainConfig, rows: int, length: int, changes: dict[str, Any]
) -> PretrainConfig:
    masking = config.masking
    if length >= 512 and masking.max_predictions:
        masking = dataclasses.replace(masking, max_predictions=80)  # the paper's second phase
    model = dataclasses.replace(config.model, **changes)
    data = dataclasses.replace(config.data, batch_size=rows)
    return dataclasses.replace(config, model=model, data=data, masking=masking)


def _compare(
    lines: Lines, config: PretrainConfig, bench: contenders.Bench, what: str, peers: str, about: str
) -> None:
    """Measures the contenders of a bench beside peers, in turns, and writes a line for each."""
    sides = list(bench.contenders)
    with contextlib.ExitStack() as stack:
        if peers and PEER_PYTHON.value:
            work = peer_workers.describe_work(
                what, config.model, config.optimizer, 0, jax.default_backend()
            )
            others = stack.enter_context(peer_workers.Peers(PEER_PYTHON.value, work, bench.batches))
            for mode in peers.split(","):
                side = others.contender(mode, bench.counts)
                try:
                    side.facts["first_round_seconds"] = round(side.run().seconds, 2)
                    sides.append(side)
                except InputError as error:
                    lines.write(f"{mode}, {about}", error=str(error)[:500])
        with lines.alone:
            measured = timing.alternate(sides, 2 if lines.tiny else ROUNDS, 1)
    peak = peak_flops(jax.devices()[0].device_kind, "bfloat16")
    for side in sides:
        found = timing.figures(side, measured[side.name], peak)
        del found["rounds"]
        del found["name"]
        lines.write(f"{side.name}, {about}", step_ms=1e3 * found["step_seconds"]["median"], **found)


def _recipe(size: str, tiny: bool) -> PretrainConfig:
    """Returns the settings of `configs/pretrain.py` for a size such as "base" or "modern,base"."""
    if tiny:
        size = size.replace("base", "mini").replace("large", "mini") if "modern" in size else "tiny"
    config = contenders.chosen(from_dict(PretrainConfig, get_config(size).to_dict()))
    vocab_size = 300 if tiny else config.model.vocab_size or 30_522
    model = dataclasses.replace(config.model, attention="fused", vocab_size=vocab_size)
    return dataclasses.replace(config, model=model)


# Profiles


def _profile(lines: Lines, contender: timing.Contender, name: str) -> None:
    """Writes where the time of a round goes on the device: by operation, and between operations."""
    with tempfile.TemporaryDirectory() as folder, lines.alone:
        jax.profiler.start_trace(folder)
        contender.run()
        jax.profiler.stop_trace()
        (trace,) = Path(folder).rglob("*.xplane.pb")
        lines.write(f"profile of {name}", **traces.read_trace(trace.read_bytes(), STEPS))


# Attention


def attention(lines: Lines) -> None:
    """Writes the ms of attention alone, forward and both passes, in 16,384 tokens of 12 heads of 64 in bfloat16.

    Rows are of one sequence and of eight; windows are ModernBERT's. `error` is the norm of the difference from ours
    without a kernel, the contexts and the three gradients together, as a share of the norm.
    """
    tokens, lengths = (64, (32,)) if lines.tiny else (16_384, (128, 512, 1_024, 2_048, 8_192))
    for length, sequences, window in itertools.product(lengths, (1, 8), (0, 64)):
        if window and length < 1_024 and not lines.tiny:
            continue
        reference = None
        for name, function in attentions(length, sequences, window).items():
            about = {"length": length, "sequences": sequences, "window": window}
            try:
                found = _attend(lines, name, function, reference, tokens // length, about)
                reference = found if reference is None else reference
            except Exception as error:  # noqa: BLE001 - a kernel that cannot: the next one
                lines.write(
                    f"{name} {length}", error=f"{type(error).__name__}: {error}"[:300], **about
                )


def attentions(length: int, sequences: int, window: int) -> dict[str, Callable[..., Any]]:
    """Returns functions of query, key, value [B, L, N, H] and ids [B, L] to contexts, by name."""

    def library(implementation: Any, masked: bool) -> Callable[..., Any]:
        def run(query: Any, key: Any, value: Any, ids: Any) -> Any:
            mask = attention_mask(ids)[:, None] if masked else None
            return jax.nn.dot_product_attention(
                query, key, value, mask=mask, implementation=implementation
            )

        return run

    def ours(use_kernels: bool) -> Callable[..., Any]:
        def run(query: Any, key: Any, value: Any, ids: Any) -> Any:
            flat, key, value = (
                array.reshape(*array.shape[:2], -1) for array in (query, key, value)
            )
            context = fused_attention(
                flat,
                key,
                value,
                ids,
                num_heads=query.shape[2],
                window=window,
                use_kernels=use_kernels,
            )
            return context.reshape(query.shape)

        return run

    found = {"ours, no kernel": ours(False), "ours": ours(True)}
    if window:
        return found  # the library has windows for causal attention alone
    if sequences == 1:
        found["cudnn"] = library("cudnn", False)
    if length <= 2_048:  # else a mask and the scores take too much memory
        found |= {"cudnn with a mask": library("cudnn", True), "xla": library("xla", True)}
    return found


def _attend(
    lines: Lines,
    name: str,
    function: Callable[..., Any],
    reference: Any,
    rows: int,
    about: dict[str, int],
) -> Any:
    """Writes how long a function takes and how far it is from a reference; returns its results."""
    length = about["length"]
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, (rows, length, 12, 64), jnp.bfloat16) for key in keys]
    of_row = jnp.arange(length) * about["sequences"] // length + 1
    ids = jnp.broadcast_to(of_row.astype(jnp.int32), (rows, length))

    def both(query: Any, key: Any, value: Any, given: Any, ids: Any) -> Any:
        context, back = jax.vjp(lambda *of: function(*of, ids), query, key, value)
        return context, *back(given)

    forward = jax.jit(function).lower(*arrays[:3], ids).compile()
    passes = jax.jit(both).lower(*arrays, ids).compile()
    results = passes(*arrays, ids)
    with lines.alone:
        figures = {
            "forward_ms": _milliseconds(lambda: forward(*arrays[:3], ids)),
            "both_ms": _milliseconds(lambda: passes(*arrays, ids)),
        }
    if reference is not None:
        norms = [float(jnp.linalg.norm(part.astype(jnp.float32))) for part in reference]
        others = [one.astype(jnp.float32) - other for one, other in zip(results, reference)]
        figures["error"] = max(
            float(jnp.linalg.norm(other)) / norm for other, norm in zip(others, norms)
        )
    lines.write(f"{name} {length}", rows=rows, **figures, **about)
    return results


def _milliseconds(run: Callable[[], Any], calls: int = 20) -> float:
    """Returns the median ms of a call of a function whose work the device does."""
    jax.block_until_ready(run())
    found = []
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready([run() for _ in range(calls)])
        found.append(1e3 * (time.perf_counter() - started) / calls)
    return statistics.median(found)


# Flags of XLA


FLAGS = {
    "no_command_buffers": "--xla_gpu_enable_command_buffer=",
    "latency": "--xla_gpu_enable_latency_hiding_scheduler=true",
}
# in place of what a training step is compiled with
OPTIONS: dict[str, dict[str, bool | str]] = {
    "any_order": {"xla_gpu_exclude_nondeterministic_ops": False},
    "triton": {"xla_gpu_enable_triton_gemm": True},
    "merged": {"xla_gpu_dot_merger_threshold_mb": "64"},
}


# What a user waits for


def embeddings(lines: Lines) -> None:
    """Writes the texts a second of a random BERT-Base in bfloat16, beside sentence-transformers in float16."""
    texts = _texts(16 if lines.tiny else 20_000)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = Path(folder, "model")
        _save_random(lines.tiny, model)
        bert = bert_jax.load_pretrained(model)
        bert = dataclasses.replace(
            bert, config=dataclasses.replace(bert.config, compute_dtype="bfloat16")
        )
        vectors: list[np.ndarray] = []

        def ours() -> timing.Round:
            with timing.Clock() as clock:
                vectors[:] = [bert_jax.sentence_embeddings(bert, texts, max_seq_length=LENGTH)]
            return clock.round(steps=1, texts=len(texts))

        sides = [timing.Contender("ours bfloat16", ours, {"side": "ours", "precision": "bfloat16"})]
        if PEER_PYTHON.value:
            sides.append(_sentence_transformers(stack, model, texts))
        with lines.alone:
            measured = timing.alternate(sides, 2 if lines.tiny else 3, 1)
        if PEER_PYTHON.value:
            both = [vectors[0], np.load(sides[1].facts["vectors"])]
            mine, theirs = (found / np.linalg.norm(found, axis=1, keepdims=True) for found in both)
            lines.write(
                "least cosine of both vectors of a text",
                cosine=float((mine * theirs).sum(axis=1).min()),
            )
    for side in sides:
        found = timing.figures(side, measured[side.name])
        lines.write(found.pop("name"), texts_a_second=found["texts_per_second"]["median"], **found)


def _texts(count: int) -> list[str]:
    """Returns the first lines of --input or, without it, texts of as many random words as sentences have."""
    if INPUT.value:
        lines = Path(INPUT.value).read_text(encoding="utf-8").splitlines()
        return [line.partition("\t")[0] for line in lines if line.strip()][:count]
    rng = np.random.default_rng(0)
    words = "the of and to in a is that was he for it with as his on be at by i this had not are but from".split()
    return [" ".join(rng.choice(words, rng.integers(4, 60))) for _ in range(count)]


def _save_random(tiny: bool, folder: Path) -> None:
    """Writes a random BERT in Hugging Face's format, with the tokenizer of --tokenizer."""
    tokenizer = load_tokenizer(TOKENIZER.value)
    model = dataclasses.replace(
        model_size("tiny" if tiny else "base"), vocab_size=tokenizer.vocab_size
    )
    params = jax.device_get(jax.jit(lambda key: init_params(model, key))(jax.random.key(0)))
    save_hf(folder, model, params, tokenizer, "pretraining", ())


def _sentence_transformers(
    stack: contextlib.ExitStack, model: Path, texts: list[str]
) -> timing.Contender:
    """Returns the peer that embeds the same texts, with its vectors in the fact "vectors"."""
    vectors = str(model.with_name("theirs.npy"))
    work = {
        "start": str(model),
        "threads": timing.num_cores(),
        "max_seq_length": LENGTH,
        "platform": jax.default_backend(),
        "texts": texts,
        "vectors": vectors,
        "texts_at_once": 256,
    }
    peer = stack.enter_context(
        peer_workers.Peers(
            PEER_PYTHON.value, work, [], peer_workers.WORKER.with_name("embeddings.py")
        )
    )
    mode = f"eager:{'float32' if jax.default_backend() == 'cpu' else 'float16'}"

    def theirs() -> timing.Round:
        with timing.Clock() as clock:
            reply = peer.ask({"run": mode})
        if "error" in reply:
            raise InputError(f"sentence-transformers has failed: {reply['error']}")
        return clock.round(steps=1, texts=len(texts))

    facts = {"side": "peer", "precision": mode.partition(":")[2], "vectors": vectors}
    return timing.Contender(f"sentence-transformers {mode}", theirs, facts)


def finetuning(lines: Lines) -> None:
    """Writes the time of an epoch of fine-tuning BERT-Base on two classes of texts, beside a loop of torch."""
    tokenizer = load_tokenizer(TOKENIZER.value)
    config = _recipe("base", lines.tiny)
    model = dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size)
    data = dataclasses.replace(config.data, batch_size=8 if lines.tiny else 32)
    config = dataclasses.replace(config, model=model, data=data)
    task = contenders.make_classifier(32 if lines.tiny else LENGTH)
    steps = 2 if lines.tiny else 50
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "texts.txt")
        path.write_text("\n".join(_texts(steps * data.batch_size)), encoding="utf-8")
        rows = contenders.read_rows(task, str(path), tokenizer, steps * data.batch_size)
    bench = contenders.finetune(config, rows, task, steps, ["bfloat16"])
    _compare(lines, config, bench, "finetune", EAGER, bench.about)


EAGER = "eager:bfloat16"  # of torch, as peers/worker.py names what it can do
PARTS_BY_NAME = {
    "base": Part(training("base", [(128, 128), (32, 512)], profile=True)),
    "modern": Part(training("modern,base", [(16, 1024), (2, 8192)], profile=True)),
    "attention": Part(attention),
    "large": Part(training("large", [(128, 128), (32, 512)])),
    "torch": Part(
        training(
            "base", [(128, 128)], peers=f"{EAGER},{EAGER}:flash,{EAGER}:efficient,compile:bfloat16"
        )
    ),
    "torch_512": Part(
        training("base", [(32, 512)], peers=f"{EAGER},{EAGER}:cudnn,compile:bfloat16")
    ),
    "embeddings": Part(embeddings),
    "finetune": Part(finetuning),
    "plain": Part(training("base", [(128, 128), (256, 128)], attention="plain")),
    "rows": Part(training("base", [(256, 128), (512, 128)])),
    **{name: Part(training("base", [(128, 128)]), xla_flags) for name, xla_flags in FLAGS.items()},
    **{name: Part(training("base", [(128, 128)], options=one)) for name, one in OPTIONS.items()},
}


def measure_one(name: str) -> None:
    """Measures one part in this process."""
    lines = Lines(Path(OUTPUT.value), name)
    if name not in PARTS_BY_NAME:
        raise InputError(f"there is no part {name!r}; parts: {', '.join(PARTS_BY_NAME)}")
    PARTS_BY_NAME[name].measure(lines)


def main() -> None:
    """Starts a process for each part, and keeps what they write in one file."""
    if not OUTPUT.value:
        raise InputError("--output is needed, a folder")
    if ONE.value:
        return measure_one(ONE.value)
    names = PARTS.value or list(PARTS_BY_NAME)
    if unknown := set(names) - set(PARTS_BY_NAME):
        raise InputError(f"there is no part {min(unknown)!r}; parts: {', '.join(PARTS_BY_NAME)}")
    folder = Path(OUTPUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + SECONDS.value
    about = timing.environment() | {
        "command": " ".join(["python -m benchmarks.quarter", *sys.argv[1:]])
    }
    waiting, running, ended = list(names), {}, {}
    with tempfile.TemporaryDirectory() as cache:
        while waiting or running:
            while waiting and len(running) < AT_ONCE.value and time.monotonic() < until:
                name = waiting.pop(0)
                running[name] = _start(name, cache), time.monotonic()
            if time.monotonic() >= until:
                waiting.clear()
            for name, (process, started) in list(running.items()):
                now = time.monotonic()
                if now >= min(until, started + PART_SECONDS.value):
                    os.killpg(process.pid, signal.SIGKILL)
                if process.poll() is not None or now >= min(until, started + PART_SECONDS.value):
                    ended[name] = {"status": process.wait(), "seconds": round(now - started, 1)}
                    del running[name]
                    _collect(folder, about | {"parts": ended})
            time.sleep(0.1)
    print(f"written to {folder / 'quarter.json'}", file=sys.stderr)


def _start(name: str, cache: str) -> "subprocess.Popen[bytes]":
    kept = [argument for argument in sys.argv[1:] if not argument.startswith("--parts")]
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the peers need memory too
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {PARTS_BY_NAME[name].xla_flags}".strip(),
    }
    command = [sys.executable, "-m", "benchmarks.quarter", *kept, f"--one={name}"]
    with (Path(OUTPUT.value) / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )


def _collect(folder: Path, about: dict[str, Any]) -> None:
    """Writes quarter.json anew, with all lines so far."""
    found = [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.endswith("}")  # the last one of a process that was ended may be half written
    ]
    write_json(folder / "quarter.json", about | {"lines": found})


if __name__ == "__main__":
    cli.run(main)
