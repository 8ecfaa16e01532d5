# SPDX-License-Identifier: Apache-2.0
"""Boards of others that show the metrics of a run, beside its own records: Weights & Biases. The only home of wandb.

Another service takes `metrics.jsonl`, or a class with these methods, appended to `Reporter.boards`.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from bert_jax.errors import InputError, one_line, package_needed
from bert_jax.storage.files import JsonObject
from bert_jax.storage.places import Place


class Board(Protocol):
    """Where metrics go."""

    def log(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step; `kind` is train, eval or goodput."""

    def close(self) -> None:
        """Ends the run's part."""


class WandbBoard:
    """A run of Weights & Biases, the same whenever the run of this work directory goes on.

    WANDB_PROJECT, WANDB_MODE=offline and the like are its own settings. What is offline is in `wandb/` of the work
    directory, or of the current one for a work directory in a bucket.
    """

    def __init__(self, workdir: Place, settings: JsonObject) -> None:
        with package_needed("wandb", "report.to=wandb", "'bert_jax[wandb]'"):
            import wandb  # pyright: ignore[reportMissingImports]: an extra
        folder = workdir if isinstance(workdir, Path) else Path.cwd()
        name = str(workdir.absolute() if isinstance(workdir, Path) else workdir)
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "bert_jax"),
                dir=str(folder),
                id=hashlib.sha256(name.encode()).hexdigest()[:16],
                name=name.rstrip("/").rpartition("/")[2],
                config=settings,
                resume="allow",
                settings=wandb.Settings(console="off", silent=True),
            )
        except (wandb.Error, OSError) as error:
            raise InputError(
                f"report.to=wandb does not work ({one_line(error)[:120]}); log in with `wandb login`, or set "
                "WANDB_MODE=offline"
            ) from None

    def log(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step. Steps that it has already seen, as after a kill, are dropped."""
        self._run.log({f"{kind}/{name}": float(value) for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        """Uploads what is left, if it is online."""
        self._run.finish()


def open_boards(to: str, workdir: Place, settings: JsonObject) -> list[Board]:
    """Returns the boards that `report.to` names. Raises: InputError if one cannot be used."""
    return [WandbBoard(workdir, settings)] if to == "wandb" else []
