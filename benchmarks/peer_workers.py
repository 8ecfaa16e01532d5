# SPDX-License-Identifier: Apache-2.0
"""The other side of a comparison: a process with libraries of its own that does the same work on the same batches.

`benchmarks/peers/worker.py` runs there. We hand it a file of batches and one that describes the work; it answers with a
line of JSON when it is ready. Then, for every line `{"run": MODE}` that it reads, it does one round, all batches once,
and answers with seconds, CPU seconds and the most memory used so far, or with an error. The end of its input ends it.
"""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import CHECKOUT, Contender, Round, num_cores
from bert_jax.errors import InputError
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.pretraining import OptimizerConfig

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
WORKER = CHECKOUT / "benchmarks" / "peers" / "worker.py"
PRECISIONS = ("float32", "bfloat16")
# What "transformers" stands for. Torch computes bfloat16 by its autocast; ONNX Runtime infers only.
_TORCH = ("eager:float32", "eager:bfloat16", "compile:float32", "compile:bfloat16")
_ONNX = ("onnx:float32",)
# Kernels that torch's scaled_dot_product_attention can be held to; without one torch chooses.
ATTENTIONS = ("cudnn", "flash", "efficient", "math")
# of eager torch, for finetune and infer: the tokens of a batch without padding
UNPADDED = "unpadded"


def parse_modes(text: str, what: str) -> tuple[str, ...]:
    """Returns the peers that a list with commas names, as BACKEND:PRECISION or BACKEND:PRECISION:ATTENTION.

    "transformers" is all of the first form; a backend without precision is float32. Raises: InputError for another
    name.
    """
    known = _TORCH + (_ONNX if what == "infer" else ())
    modes: list[str] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name == "transformers":
            modes += known
            continue
        mode = name if ":" in name else f"{name}:float32"
        peer, attention = ":".join(mode.split(":")[:2]), mode.split(":")[2:]
        if peer not in known or (attention and peer not in _TORCH):
            raise InputError(
                f"compare {name!r} is not a peer for {what}; use transformers, or some of {', '.join(known)}"
            )
        allowed = ATTENTIONS + ((UNPADDED,) if what != "train" and peer.startswith("eager") else ())
        if attention and (len(attention) > 1 or attention[0] not in allowed):
            raise InputError(
                f"compare {name!r} names no attention of torch after {peer}; use {', '.join(allowed)}, or none"
            )
        modes.append(mode)
    return tuple(dict.fromkeys(modes))


def describe_work(
    what: str, model: ModelConfig, optimizer: OptimizerConfig, seed: int, platform: str
) -> dict[str, Any]:
    """Returns what the worker needs besides the batches: shape, dropout and optimizer, as ours."""
    return {
        "what": what,
        "model": dataclasses.asdict(model),
        "optimizer": dataclasses.asdict(optimizer),
        "num_classes": 2,
        "seed": seed,
        "threads": num_cores(),
        "platform": platform,
    }


def tied(command: Sequence[str]) -> list[str]:
    """Returns a command that gets SIGTERM when the process that starts it is killed; the same one without prctl."""
    if not sys.platform.startswith("linux"):
        return list(command)
    code = (
        "import ctypes, os, sys; "
        f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGTERM)}); "
        f"os.getppid() == {os.getpid()} or sys.exit(1); "  # it was killed before that
        "os.execvp(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-c", code, *command]


def save_batches(path: Path, batches: Sequence[dict[str, np.ndarray]]) -> None:
    """Writes batches as one .npz: arrays named NUMBER/NAME."""
    arrays = {
        f"{number}/{name}": array
        for number, batch in enumerate(batches)
        for name, array in batch.items()
    }
    np.savez(path, **arrays)  # pyright: ignore[reportArgumentType]


class Peers:
    """The process of the peers; a context manager."""

    def __init__(
        self,
        python: str,
        work: dict[str, Any],
        batches: Sequence[dict[str, np.ndarray]],
        worker: Path | None = None,
    ) -> None:
        worker = worker or WORKER
        if not worker.exists():
            raise InputError(
                f"{worker} is missing; --compare needs a checkout of the project, not a wheel"
            )
        self._folder = tempfile.TemporaryDirectory(prefix="bert_jax_peers_")
        folder = Path(self._folder.name)
        save_batches(folder / "batches.npz", batches)
        (folder / "work.json").write_text(json.dumps(work), encoding="utf-8")
        self._errors = open(folder / "errors.txt", "w+", encoding="utf-8", errors="replace")
        command = [python, str(worker), str(folder / "work.json"), str(folder / "batches.npz")]
        if shutil.which(python) is None:
            self.close()
            raise InputError(
                f"peer_python {python} does not start: there is no such program; give a Python's path"
            )
        self._process = subprocess.Popen(
            tied(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.about = self._read()

    def contender(self, mode: str, counts: dict[str, float]) -> Contender:
        """Returns a contender whose round is one of this mode; `counts` is what all batches hold."""
        backend, precision, *attention = mode.split(":")
        facts: dict[str, Any] = {
            "versions": self.about["versions"],
            "side": "peer",
            "precision": precision,
        }
        if attention:
            facts["attention"] = attention[0]

        def run() -> Round:
            reply = self.ask({"run": mode})
            if "error" in reply:
                raise InputError(f"peer {mode} has failed: {reply['error']}")
            facts.update(
                peak_memory_bytes=reply["peak_memory_bytes"], peak_memory_of=reply["peak_memory_of"]
            )
            return Round(reply["seconds"], reply["cpu_seconds"], dict(counts))

        return Contender(f"{'onnxruntime' if backend == 'onnx' else 'torch'} {mode}", run, facts)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the worker's answer. Raises: InputError if it has ended, with its last words."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer will be missing
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        status = self._process.wait()
        self._errors.seek(0)
        words = [line.strip() for line in self._errors if line.strip()]
        self.close()
        raise InputError(
            f"the peers' process has ended with status {status}: {words[-1] if words else 'it said nothing'}; "
            "--peer_python must have what benchmarks/peers/requirements.txt names"
        )

    def close(self) -> None:
        """Ends the process; closing twice does no harm."""
        process = getattr(self, "_process", None)
        if process is not None and process.poll() is None:
            process.stdin.close()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process is not None:
            process.stdout.close()
        self._errors.close()
        self._folder.cleanup()

    def __enter__(self) -> "Peers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ask(peer: Peers, mode: str) -> dict[str, float]:
    """Returns the peer's answer. Raises: InputError if it is an error."""
    if "error" in (reply := peer.ask({"run": mode})):
        raise InputError(f"sentence-transformers has failed: {reply['error']}")
    return reply
