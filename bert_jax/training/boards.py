# SPDX-License-Identifier: Apache-2.0
"""Boards of others that show the metrics of a run, beside its own records: Weights & Biases. The only home of wandb.

Another service takes `metrics.jsonl`, or a class with these methods, appended to `Reporter.boards`.
"""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from bert_jax.errors import InputError, one_line, package_needed
from bert_jax.storage.files import JsonObject, read_json
from bert_jax.storage.places import Place
from bert_jax.storage.writing import write_json

_ID = "wandb.json"  # in a work directory: the id of its run at Weights & Biases


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
        name = (
            str(workdir.absolute() if isinstance(workdir, Path) else workdir)
            .rstrip("/")
            .rpartition("/")[2]
        )
        identifier = _id_of(workdir)
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "bert_jax"),
                dir=str(folder),
                id=identifier,
                name=name,
                config=settings,
                # goes on with the run of this id, or makes it
                resume="allow",
                settings=wandb.Settings(console="off", silent=True),
            )
        except (wandb.Error, OSError) as error:
            reason = one_line(error)[:120]
            raise InputError(
                f"report.to=wandb does not work ({reason}); log in by `wandb login`"
            ) from None

    def log(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step. Steps that it has already seen, as after a kill, are dropped."""
        self._run.log(
            {f"{kind}/{name}": float(value) for name, value in metrics.items()}, step=step
        )

    def close(self) -> None:
        """Uploads what is left, if it is online."""
        self._run.finish()


def _id_of(workdir: Place) -> str:
    """Returns the id of the run of a work directory, drawn once and kept in it.

    An id made from the path would be the same for a second run there, and for runs of two machines with equal paths.
    Raises: InputError if the file that keeps it is damaged.
    """
    path = workdir / _ID
    if not path.exists():
        write_json(path, {"id": secrets.token_hex(8)})
    kept = read_json(path)
    if not isinstance(kept, dict) or not isinstance(kept.get("id"), str):
        raise InputError(
            f"{path} has no id of a run; delete it, and the run goes on as a new one at Weights & Biases"
        )
    return kept["id"]


def open_boards(to: str, workdir: Place, settings: JsonObject) -> list[Board]:
    """Returns the boards that `report.to` names. Raises: InputError if one cannot be used."""
    return [WandbBoard(workdir, settings)] if to == "wandb" else []
