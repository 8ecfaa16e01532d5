# SPDX-License-Identifier: Apache-2.0
"""Reports of a run: lines on the screen, records in `metrics.jsonl`, and TensorBoard.

The only home of tqdm and tensorboardX; each is imported when it is first needed.
"""

import contextlib
import importlib.util
import json
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from bert_jax.devices.work import under_way
from bert_jax.errors import InputError, StoppedError, package_needed, reading, without_secrets
from bert_jax.storage import schema
from bert_jax.storage.places import AnyPath, RemotePath, scratch, to_place
from bert_jax.storage.writing import atomic_path, cannot_write
from bert_jax.training import goodput
from bert_jax.training.boards import Board
from bert_jax.training.shown import ON_THE_BAR, describe, duration, forgive

METRICS_FILE = "metrics.jsonl"
KINDS = ("train", "eval", goodput.KIND)
# "kind" is one of KINDS, "step" an int, every other value a float
MetricsRecord: TypeAlias = dict[str, Any]


class Reporter:
    """Writes the metrics of one run; a context manager.

    It shows a progress bar on a terminal and plain lines elsewhere, both on stderr. If the run resumes from
    `start_step`, earlier records of later steps are removed, so that there is one curve.
    With `enabled=False`, as on every process but the first, it does nothing. `carried` is the goodput of the attempts
    before this one; None if there is no record of it.

    Object stores cannot append: for a work directory in one, the files are on this machine, and `publish` replaces
    those in the store.
    """

    def __init__(
        self,
        workdir: AnyPath,
        total_steps: int,
        start_step: int = 0,
        progress: bool = True,
        tensorboard: bool = True,
        enabled: bool = True,
    ) -> None:
        self._total_steps = total_steps
        self._start_step = start_step
        self._enabled = enabled
        self._started = time.monotonic()
        self._file = self._board = self._bar = None
        self.carried: MetricsRecord | None = None
        self.boards: list[Board] = []
        self._store = self._spool = None
        self._publishing = threading.Lock()
        self._published: dict[str, tuple[int, int]] = {}
        if not enabled:
            return
        if importlib.util.find_spec("matplotlib") is None:  # checked now, not when the run ends
            raise InputError("drawing curves.png needs matplotlib: pip install 'bert_jax[train]'")
        place = to_place(workdir)
        if isinstance(place, RemotePath):
            self._store = place
            self._spool = scratch(place)
            folder = Path(self._spool.name)
            if (place / METRICS_FILE).exists():
                (folder / METRICS_FILE).write_bytes((place / METRICS_FILE).read_bytes())
        else:
            folder = place
        path = folder / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        kept, self.carried = _drop_after(path, start_step)
        # A run that was killed between an evaluation and the checkpoint that records it evaluates this step again.
        self._known = {record["kind"] for record in kept if record["step"] == start_step} - {
            goodput.KIND
        }
        self._file = open(path, "a", encoding="utf-8")
        if tensorboard:
            with package_needed("tensorboardX", "report.tensorboard=True", "'bert_jax[train]'"):
                from tensorboardX import SummaryWriter

            # The same for TensorBoard: it hides earlier records from this step on.
            purge_step = start_step + 1 if start_step else 0
            self._board = SummaryWriter(
                str(path.parent / "tensorboard"), purge_step=purge_step, flush_secs=30
            )
            writer: Any = self._board.file_writer
            forgive(writer.event_writer._ev_writer, self.message)
        if progress and sys.stderr.isatty():
            with package_needed("tqdm", "report.progress=True", "'bert_jax[train]'"):
                from tqdm import tqdm

            layout = (
                "{percentage:3.0f}% |{bar:20}| {n_fmt}/{total_fmt}  {elapsed}<{remaining}{postfix}"
            )
            self._bar = tqdm(
                total=total_steps, initial=start_step, dynamic_ncols=True, bar_format=layout
            )

    def log(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        """Reports the metrics of a step; `kind` is one of `KINDS`."""
        if self._file is None:
            return
        record = {"step": step, "kind": kind, "time": round(time.time(), 3)}
        record |= {name: _to_json(float(value)) for name, value in metrics.items()}
        if step != self._start_step or kind not in self._known:
            try:
                self._file.write(json.dumps(record, allow_nan=False) + "\n")
                self._file.flush()
            except OSError as error:
                raise cannot_write(self._file.name, error) from error
            # writing to a deleted file succeeds, and nobody can read it
            if not os.path.exists(self._file.name):
                raise StoppedError(
                    f"{self._file.name} is gone: move the work directory back, or begin again"
                )
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(f"{kind}/{name}", float(value), step)
        for board in self.boards:
            board.log(step, kind, metrics)
        self._show(step, kind, metrics)

    def message(self, text: str) -> None:
        """Prints a line, above the progress bar if there is one."""
        text = without_secrets(text)
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        elif self._enabled:
            print(text, file=sys.stderr, flush=True)

    def publish(self) -> None:
        """Uploads records and TensorBoard's files to the work directory, if it is in an object store.

        Raises: StoppedError if it cannot be written.
        """
        if self._store is None or self._spool is None:
            return
        folder = Path(self._spool.name)
        # The thread that seals a checkpoint publishes too.
        with self._publishing, under_way("uploading"):
            if self._board is not None:
                self._board.flush()
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                name, about = (
                    path.relative_to(folder).as_posix(),
                    (path.stat().st_size, path.stat().st_mtime_ns),
                )
                if self._published.get(name) != about:
                    content = path.read_bytes()
                    whole = (
                        content.rpartition(b"\n")[0] + b"\n"
                        if name == METRICS_FILE and content
                        else content
                    )
                    # no half of a line that is being written
                    (self._store / name).write_bytes(whole)
                    self._published[name] = about

    def close(self) -> None:
        """Flushes, publishes and closes all outputs. It may be called twice."""
        bar = self._bar
        board = self._board
        file = self._file
        self._file = self._board = self._bar = None
        try:
            for stream in (bar, board, *self.boards, file):
                if stream is not None:
                    stream.close()
            self.boards.clear()
            self.publish()
        except OSError as error:
            raise cannot_write(file.name if file is not None else METRICS_FILE, error) from error
        finally:
            self._store = None
            if self._spool is not None:
                self._spool.cleanup()
            self._spool = None

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # the error that ends the run says more
        with contextlib.suppress(*([InputError] if kind else [])):
            self.close()

    def _show(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        if kind == goodput.KIND:
            return
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
            if kind == "train":
                self._bar.set_postfix_str(
                    describe({name: metrics[name] for name in ON_THE_BAR if name in metrics})
                )
                return
        line = f"{kind:5} {step:{len(str(self._total_steps))}}/{self._total_steps}  {describe(metrics)}"
        taken = step - self._start_step
        if kind == "train" and taken:
            left = (time.monotonic() - self._started) / taken * (self._total_steps - step)
            line += f"  {duration(left)} left"
        self.message(line)


# Metrics are numbers, or the strings that `_to_json` writes.
_RECORD = schema.record({"step": schema.Count, "kind": Literal[KINDS]})  # type: ignore[valid-type]
_METRICS = dict[str, float | Literal["nan", "inf", "-inf", *KINDS]]  # type: ignore[valid-type]


def read_metrics(path: AnyPath, kinds: Sequence[str] = ("train", "eval")) -> list[MetricsRecord]:
    """Returns the records of these kinds in a metrics file, in the order in which they were written.

    An incomplete last line, as a killed run leaves it, is left out.

    Raises: InputError if the file is missing or another line cannot be read.
    """
    with reading(str(path)):
        text = to_place(path).read_text(encoding="utf-8", errors="replace")
    lines = text.removesuffix("\n").split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            schema.check(record, _RECORD, "it", "")
            schema.check(record, _METRICS, "it", "")
            for name, value in record.items():
                if isinstance(value, str) and name != "kind":
                    record[name] = float(value)  # "nan" and the like
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                reason = " ".join(str(error).split())[:100]
                raise InputError(
                    f"metrics {path} is damaged at line {number} ({reason}); delete this line"
                ) from None
        else:
            records.append(record)
    return [record for record in records if record["kind"] in kinds]


def _drop_after(path: Path, step: int) -> tuple[list[MetricsRecord], MetricsRecord | None]:
    """Removes the records after `step` from a metrics file, all records if `step` is 0.

    Returns the rest, and the goodput until now, which becomes the last record of the file.
    """
    if not path.exists():
        return [], None
    records = read_metrics(path, KINDS)
    kept = [record for record in records if 0 < step >= record["step"]]
    carried = goodput.carried(records, step)
    if carried is not None and carried not in kept[-1:]:
        kept.append(carried)
    text = "".join(
        json.dumps({name: _to_json(value) for name, value in record.items()}, allow_nan=False)
        + "\n"
        for record in kept
    )
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return kept, carried


def _to_json(value: float | str) -> float | str:
    """Returns a value for strict JSON: NaN and infinities become "nan", "inf" and "-inf", which float() reads."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
