# SPDX-License-Identifier: Apache-2.0
"""Resolves paths to models, data sets and files. Public functions and commands call it first.

Inputs are resolved here, and the functions below take a `Resolved`. Outputs, which need not exist yet, are places
(`places.to_place`).
"""

import contextlib
import dataclasses
import fnmatch
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from bert_jax.errors import InputError
from bert_jax.storage import files, stores, urls
from bert_jax.storage.folder import Folder, open_folder
from bert_jax.storage.places import AnyPath, Place, RemotePath, to_place

# "run" is a work directory of pre-training, "unfinished" one without a model; "model" is a directory that this program
# wrote, also inside a work directory of fine-tuning; "hf" is Hugging Face's format, "tf1" Google's.
Kind: TypeAlias = Literal["run", "unfinished", "model", "hf", "tf1", "data", "file", "nothing"]
Needed: TypeAlias = Literal["model", "data"]

FINETUNED = "finetuned"  # the directory of the model inside a work directory of fine-tuning
# of the models of some steps of a run, which are kept and named WORKDIR@STEP; WORKDIR@STEP,STEP is a mean of them
REVISIONS = "revisions"
MANIFEST = "manifest.json"  # of a data set
HUB = "hf://"

_SIGNS: Mapping[Kind, tuple[str, ...]] = {
    "model": (FINETUNED, "params"),
    "run": ("checkpoints",),
    "hf": ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin"),
    "tf1": ("*.index",),
    "data": (MANIFEST,),
}
# Of a directory with no sign above: models of Hugging Face's that its reader refuses with the fix.
_IN_PARTS = (
    "adapter_config.json",
    "*model.*.safetensors",
    "*model.*.bin",
    "0_Transformer",
    "modules.json",
)
_UNREAD = ("tf_model.h5", "flax_model.msgpack", "model.onnx")

FORMATS: Mapping[Kind, str] = {"run": "bert_jax", "model": "bert_jax", "hf": "hf", "tf1": "tf1"}
_IS: Mapping[Kind, str] = {
    "run": "is a work directory",
    "unfinished": "has no config.json or no tokenizer/; it is not a work directory with a model or an exported model",
    "model": "is a model",
    "hf": "is a model",
    "tf1": "is a model",
    "data": "is a data set",
    "file": "is a file",
    "nothing": "does not exist",
}
# what serves, what a directory lacks, and the fix
_NEEDS: Mapping[Needed, tuple[tuple[Kind, ...], str, str]] = {
    "model": (
        tuple(FORMATS),
        "holds no model: no params/ or checkpoints/ as written here, no model.safetensors and no bert_model.ckpt.index",
        "give a work directory of train or finetune, the directory of a model, or hf://ORG/NAME",
    ),
    "data": (
        ("data",),
        f"holds no {MANIFEST}, so no finished data set",
        "give a data set, as bert_jax prepare_corpus makes it",
    ),
}


@dataclass(frozen=True)
class Resolved:
    """A path and what it holds.

    Attributes:
      given: the path as it was given, for messages.
      place: its location: for WORKDIR@STEP the directory of the revision, for a finished fine-tuning that of its model,
        for a file of Google's checkpoint the checkpoint's prefix. Only the reader of Hugging Face's models opens
        hf://ORG/NAME.
      kinds: the kinds that it holds, with the names of the files that show them; empty for any other directory.
      names: of what is in a directory.
      listed: the directory on this machine, or that of Google's checkpoint.
      averaged: for WORKDIR@STEP,STEP the other models of the mean; this one is the last.
    """

    given: str
    place: Place
    kinds: Mapping[Kind, str]
    names: Sequence[str] = ()
    listed: Folder | None = None
    averaged: "tuple[Resolved, ...]" = ()

    def expect(self, needed: Needed) -> Kind:
        """Returns the kind of the model or data set. Raises: InputError if there is none, or models of two formats."""
        kinds, lacking, fix = _NEEDS[needed]
        there: dict[str, Kind] = {
            FORMATS.get(kind, kind): kind for kind in kinds if kind in self.kinds
        }
        if len(there) > 1:
            signs = [f"{self.kinds[there[form]]} ({form})" for form in there]
            raise InputError(
                f"{self.given} holds models in two formats: {' and '.join(signs[:2])}; part them"
            )
        if there:
            return next(iter(there.values()))
        for kind, what in _IS.items():
            if kind in self.kinds:
                raise InputError(f"{self.given} {what}; {fix}")
        if needed == "model" and (unread := [name for name in _UNREAD if name in self.names]):
            fix = f"{unread[0]} is not read: save it as model.safetensors"
        raise InputError(f"{self.given} {lacking}; {fix}")

    @property
    def format(self) -> str:
        """Returns the format of the model: "bert_jax", "hf" or "tf1". Raises: InputError as `expect`."""
        return FORMATS[self.expect("model")]

    def on_this_machine(self) -> Path:
        """Returns the place, or the copy of the file or directory at a URL.

        Raises: InputError if there is nothing at the URL, or if it cannot be read.
        """
        if isinstance(self.place, Path):
            return self.place
        return (
            Path(urls.local_copy(str(self.place)))
            if "file" in self.kinds
            else urls.local_directory(self.place)
        )

    def folder(self) -> Folder:
        """Returns the directory, or its copy on this machine, as a value. Raises: InputError as `on_this_machine`."""
        return self.listed.checked() if self.listed else open_folder(self.on_this_machine())


def resolve(path: AnyPath) -> Resolved:
    """Resolves a path: a str, a Path, gs://..., hf://ORG/NAME, WORKDIR@STEP or WORKDIR@STEP,STEP.

    Raises: InputError if the file system cannot be asked, or a work directory has no revision of such a step.
    """
    given = str(path)
    place = to_place(path)
    if is_hub(path):
        # the hub's own message would quote what may be a password
        if re.search("[?#:]", given.removeprefix(HUB)):
            raise InputError(
                f"{given} has more than a name; write hf://ORG/NAME, and give a token as HF_TOKEN"
            )
        return Resolved(given, place, {"hf": given})
    found = _look(given, place)
    # Only then: a directory may have an @ in its name.
    if "nothing" in found.kinds and (revisions := _revisions(given)):
        *others, last = [_look(given, revision) for revision in revisions]
        found = dataclasses.replace(last, averaged=tuple(others))
    # A finished fine-tuning: its model is read, and it is still called a work directory.
    if found.kinds.get("model") == FINETUNED:
        inside = _look(given, found.place / FINETUNED)
        found = dataclasses.replace(inside, kinds=found.kinds)
    return found


def _look(given: str, place: Place) -> Resolved:
    """Returns what is at a place, by one listing of it where it is a directory."""
    if isinstance(place, RemotePath):
        if stores.protocol_of(str(place)) in ("http", "https"):  # it has no directories
            with contextlib.suppress(InputError):  # the server may forbid the request
                if (place / MANIFEST).exists():
                    return Resolved(given, place, {"data": MANIFEST})
        elif place.is_dir():
            names = [child.name for child in place.iterdir()]
            return Resolved(given, place, _kinds_of(names), names)
        return Resolved(given, place, {"file" if place.exists() else "nothing": ""})
    with files.reading(str(place)):
        try:
            listed = Folder(place)
            return Resolved(given, place, _kinds_of(listed.names), listed.names, listed)
        # the last for a name with a zero byte
        except (FileNotFoundError, NotADirectoryError, ValueError):
            exists = os.path.exists(place)
    for prefix in (place, Path(re.sub(r"\.(index|meta|data-\d{5}-of-\d{5})$", "", str(place)))):
        if os.path.isfile(f"{prefix}.index"):
            listed = open_folder(prefix.parent)
            return Resolved(given, prefix, {"tf1": f"{prefix.name}.index"}, listed.names, listed)
    return Resolved(given, place, {"file" if exists else "nothing": ""})


def is_hub(path: AnyPath) -> bool:
    """Returns whether a path is a model of the Hugging Face hub, hf://ORG/NAME, and not a file there."""
    return str(path).startswith(HUB) and not str(path).startswith(
        (f"{HUB}datasets/", f"{HUB}spaces/")
    )


def revision_path(workdir: Place, step: int) -> Place:
    """Returns the path of the revision of a step."""
    return workdir / REVISIONS / f"{step:08d}"


def _kinds_of(names: Sequence[str]) -> dict[Kind, str]:
    """Returns the kinds that a directory holds, with the names of the files that show them, given all its names."""
    names = sorted(names)
    kinds: dict[Kind, str] = {}
    for kind, patterns in _SIGNS.items():
        if matches := [name for pattern in patterns for name in fnmatch.filter(names, pattern)]:
            kinds[kind] = matches[0]
    if "model" in kinds:  # then nobody asks for the checkpoints
        kinds.pop("run", "")
    if kinds.get("model") != FINETUNED and not {"config.json", "tokenizer"} <= set(names):
        if own := kinds.pop("model", "") or kinds.pop("run", ""):
            kinds["unfinished"] = own
    if not kinds and (
        matches := [name for pattern in _IN_PARTS for name in fnmatch.filter(names, pattern)]
    ):
        kinds["hf"] = matches[0]
    return kinds


def _revisions(path: str) -> list[Place]:
    """Returns the directories that WORKDIR@STEP,STEP names, by ascending steps; none if the path is not such a name.

    Raises: InputError, with the steps that there are, if the work directory has no revision of one of these.
    """
    workdir, _, names = path.rpartition("@")
    wanted = names.split(",")
    are_steps = all(step.isdecimal() and len(step) < 19 for step in wanted)
    if not (workdir and are_steps) or not to_place(workdir).is_dir():
        return []
    revisions = []
    for step in sorted(set(map(int, wanted))):
        revision = revision_path(to_place(workdir), step)
        if not revision.is_dir():
            kept = revision.parent.iterdir() if revision.parent.is_dir() else ()
            steps = sorted(int(path.name) for path in kept if path.name.isdecimal())
            there = (
                f"it has those of steps {', '.join(map(str, steps))}" if steps else "it has none"
            )
            raise InputError(
                f"{workdir} has no revision of step {step}; {there}: see checkpoint.keep_every"
            )
        revisions.append(revision)
    return revisions
