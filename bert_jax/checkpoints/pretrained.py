# SPDX-License-Identifier: Apache-2.0
"""A trained BERT: its configuration, its parameters and its tokenizer, loaded from any format and saved in ours."""

import dataclasses
import functools
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import jax
import numpy as np

from bert_jax.checkpoints.arrays import (
    ArrayTable,
    check_arrays,
    describe,
    restore_tree,
    save_tree,
    state_bytes,
)
from bert_jax.checkpoints.hf import fetch, load_hf
from bert_jax.checkpoints.names import flatten, part_of, unflatten
from bert_jax.checkpoints.sealed import SEAL, find_damage, read_newest, seal, state_place
from bert_jax.checkpoints.tf1 import load_tf1
from bert_jax.devices.job import this_job
from bert_jax.devices.sharding import on_host
from bert_jax.devices.work import under_way
from bert_jax.errors import InputError, reading
from bert_jax.model.heads.replaced import REPLACED
from bert_jax.model.heads.sparse import QUERY_TABLE
from bert_jax.model.heads.table import EMBEDDING_KINDS, HEADS
from bert_jax.model.heads.tokens import TOKENS
from bert_jax.model.objective import Params
from bert_jax.model.on_cpu import unstack
from bert_jax.model.replacing import GENERATOR
from bert_jax.model.shapes import abstract_params
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.rules import Values, affecting, drop_removed, from_dict, to_dict
from bert_jax.storage import schema
from bert_jax.storage.files import JsonObject, read_json
from bert_jax.storage.folder import Folder, open_folder
from bert_jax.storage.places import AnyPath, Place, check_no_pattern, is_taken, to_place
from bert_jax.storage.resolve import Resolved, is_hub, revision_path
from bert_jax.storage.urls import local_directory
from bert_jax.storage.writing import check_space, new_directory, write_json
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.tokenizing import read_tokenizer


class Prepared:
    """What inference makes of parameters: made once, and again where one of them was replaced since.

    NumPy's arrays, which can change in place, are read-only from then on.
    """

    def __init__(self, make: Callable[[Params], Params]) -> None:
        self.make = make
        # leaves, their tree, what was made of them
        self.kept: tuple[Any, ...] = ((), jax.tree.structure(()), {})

    def of(self, params: Params) -> Params:
        leaves, tree = jax.tree.flatten(params)
        seen, before, made = self.kept
        if tree == before and all(map(operator.is_, leaves, seen)):
            return made
        for leaf in leaves:
            if isinstance(leaf, np.ndarray):
                leaf.flags.writeable = False
        made = self.make(params)
        self.kept = leaves, tree, made  # at once: other threads ask too
        return made


@dataclass(frozen=True)
class Pretrained:
    """Configuration, parameters and tokenizer of a pre-trained BERT.

    A loaded model has the heads of its source, and no random ones.
    """

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer
    task: str = "pretraining"  # name of the head, one of model.heads.table.HEADS or a user's own
    # of a classifier, in the order of its classes; () where they have no names
    labels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # lines for the user about how it was loaded
    # settings.finetuning.TaskConfig of a fine-tuned model
    task_settings: Values = field(default_factory=dict)
    # if known: step, and the sequences, tokens and words so far; of a mean of several models those of the last, and
    # how many were averaged
    trained: dict[str, int] = field(default_factory=dict)
    # Hugging Face's problem_type, if it does not follow from the number of outputs
    problem: str = ""

    @property
    def prepared(self) -> Params:
        """The parameters as inference reads them: on a CPU those of each layer are apart."""
        return self._prepared.of(self.params)

    @functools.cached_property
    def _prepared(self) -> Prepared:
        def prepare(params: Params) -> Params:
            if jax.default_backend() != "cpu":
                return jax.device_put(params)
            return params | {"encoder": unstack(self.config, params["encoder"])}

        return Prepared(prepare)

    @functools.cached_property
    def embedding(self) -> TaskConfig | None:
        """The settings of a model that makes vectors of texts: pooling, prompts, length; None of other models."""
        kinds = {head.name: kind for kind, head in EMBEDDING_KINDS.items()}
        if self.task not in kinds:
            return None
        usual = {"name": "embeddings", "max_seq_length": self.config.max_positions}
        usual["embedding"] = {"kind": kinds[self.task]}
        return from_dict(TaskConfig, self.task_settings or usual, "task_settings")


def save_pretrained(bert: Pretrained, directory: AnyPath, replace: bool = True) -> None:
    """Writes config.json, tokenizer/ and params/ with checksums: all that `load_pretrained` needs, no optimizer.

    The write is atomic. With `replace` it may replace an older model. The directory may be a URL.

    Parameters are written as float32. Raises: InputError if the directory holds something else, another command is
    writing there, or the write fails.
    """
    check_no_pattern(to_place(directory))
    params = jax.tree.map(
        lambda leaf: leaf if leaf.dtype == np.float32 else leaf.astype(np.float32), bert.params
    )
    with new_directory(directory, lambda there: replace and (there / SEAL).exists()) as temporary:
        about: JsonObject = {
            "format": 1,
            "model": to_dict(bert.config),
            "task": bert.task,
            "labels": list(bert.labels),
        }
        about["tokenizer"] = bert.tokenizer.fingerprint
        for name in ("task_settings", "trained", "problem"):
            if value := getattr(bert, name):
                about[name] = value
        write_json(temporary / "config.json", about)
        bert.tokenizer.save(temporary / "tokenizer")
        # Asked for now: Orbax would fill the disk before it fails.
        num_arrays = len(jax.tree.leaves(params))
        check_space(temporary, state_bytes(params) + 4096 * (num_arrays + 16))  # and their metadata
        save_tree(temporary / "params", params)
        seal(temporary, {"arrays": describe(params)})


def leave_pretrained(bert: Pretrained, directory: Place, what: str) -> None:
    """Writes a model with parameters that may be sharded over hosts. Every process calls this; the first writes.

    `what` names the model in the error of the other processes.

    Raises: InputError, on every process, as `save_pretrained`.
    """
    num_bytes = state_bytes(bert.params)
    with under_way("saving", num_bytes):
        whole = dataclasses.replace(bert, params=on_host(bert.params))
        this_job().first_does(f"write {what}", lambda: save_pretrained(whole, directory))


def keep_revision(bert: Pretrained, workdir: Place) -> None:
    """Writes a model as the permanent revision of its step in a work directory.

    It replaces an existing one: a run that resumes before that step may have other settings from there on. Anything
    that is not a model stays. Every process calls this. Raises: InputError, on every process, if it cannot be written.
    """
    path = revision_path(workdir, bert.trained["step"])
    if not this_job().first_does(
        "look at a revision", lambda: is_taken(path) and not (path / SEAL).exists()
    ):
        leave_pretrained(bert, path, f"the revision {path}")


def read_pretrained(source: Resolved) -> Pretrained:
    """Returns the model at a path in one of three formats, as `bert_jax.load_pretrained`, which also warns."""
    if source.averaged:
        return _read_mean(source)
    if source.format == "bert_jax":
        is_model = source.expect("model") == "model"
        if isinstance(source.place, Path):
            return _load_directory(source.folder(), None if is_model else source.place)
        # only small files of a work directory in an object store are copied here
        names = () if is_model else ("config.json", "tokenizer/")
        folder = open_folder(local_directory(source.place, names))
        try:
            return _load_directory(folder, None if is_model else source.place)
        except InputError as error:
            # the place that was given, and not the copy of it in the cache
            raise type(error)(str(error).replace(str(folder.path), str(source.place))) from None
    folder = fetch(source.given) if is_hub(source.given) else source.folder()
    if source.format == "hf":
        imported = load_hf(folder)
    else:
        imported = load_tf1(folder, "" if source.place == folder.path else source.place.name)
    params, settings = (
        jax.tree.map(jax.numpy.asarray, imported.params),
        dict(imported.task_settings),
    )
    return Pretrained(**imported._asdict() | {"params": params, "task_settings": settings})


def _read_mean(source: Resolved) -> Pretrained:
    """Returns the last of several models of a run, with the mean of their parameters; one after the other is read.

    Raises: InputError if they have other shapes or another vocabulary.
    """
    last = read_pretrained(dataclasses.replace(source, averaged=()))
    total = last.params
    for each in source.averaged:
        other = read_pretrained(each)
        if _kind_of(other) != _kind_of(last):
            raise InputError(
                f"{each.place} has another shape or vocabulary than {source.place}; average models of one run"
            )
        total = jax.tree.map(operator.add, total, other.params)
    count = 1 + len(source.averaged)
    return dataclasses.replace(
        last,
        params=jax.tree.map(lambda leaf: leaf / count, total),
        notes=(*last.notes, f"the mean of {count} models of one run"),
        trained=last.trained | {"averaged": count},
    )


def _kind_of(bert: Pretrained) -> tuple[object, ...]:
    """Returns what models must share for a mean of their parameters to be one."""
    shape = [getattr(bert.config, name) for name in affecting(ModelConfig, "model")]
    return shape, describe(bert.params), bert.tokenizer.fingerprint, bert.task, bert.labels


class _About(TypedDict):
    model: dict[str, Any]
    task: NotRequired[str]
    labels: NotRequired[list[str]]
    task_settings: NotRequired[TaskConfig]
    trained: NotRequired[dict[str, schema.Count]]
    tokenizer: NotRequired[str]
    problem: NotRequired[str]


def _load_directory(folder: Folder, workdir: Place | None) -> Pretrained:
    """Returns the model in a directory, or with its parameters from the newest checkpoint of a work directory."""
    path = folder.path
    where = folder / "config.json"
    about = folder.json("config.json")
    schema.check(about, _About, where, "it is damaged, or was not written here")
    with reading(str(where)):
        drop_removed("model", about["model"])
        config = from_dict(ModelConfig, about["model"], "model")
        config.validate()
    task = about.get("task", "pretraining")
    labels = about.get("labels", [])
    tokenizer = read_tokenizer(folder.inside("tokenizer"))
    fingerprint = tokenizer.fingerprint
    _check_tokenizer(path, fingerprint, about.get("tokenizer"))
    # models of version 0.3 had the blank without saying so
    if task == TOKENS.name and about.get("task_settings"):
        tokenizer = tokenizer.with_blanks()
    if workdir is None:
        problem = find_damage(path)
        if problem:
            raise InputError(f"{path} is damaged: {problem}; copy or export it again")
        arrays = folder.json(SEAL)["arrays"]
        abstract = _abstract(path, config, task, arrays)
        params = restore_tree(path / "params", abstract, alone=True)
        trained = about.get("trained", {})
    else:

        def read(path: Place) -> tuple[Params, JsonObject]:
            sealed = read_json(path / SEAL)
            of_model = {
                name: about
                for name, about in sealed["arrays"].items()
                if name.startswith("params/") and not name.startswith(f"params/{GENERATOR}/")
            }
            flat = {name.removeprefix("params/"): about for name, about in of_model.items()}
            abstract = {"params": _abstract(path, config, task, flat)}
            return restore_tree(state_place(path, sealed), abstract, alone=True)["params"], sealed

        (params, sealed), passed_over = read_newest(workdir / "checkpoints", read)
        for line in passed_over:
            print(f"warning: {line}", file=sys.stderr)
        _check_tokenizer(path, fingerprint, sealed.get("tokenizer"))
        trained = {"step": sealed.get("step", 0)} | (sealed.get("notes", {}).get("seen") or {})
    rest = {
        "task_settings": about.get("task_settings", {}),
        "trained": trained,
        "problem": about.get("problem", ""),
    }
    return Pretrained(config, params, tokenizer, task, tuple(labels), **rest)


def _check_tokenizer(path: Path, fingerprint: str, expected: str | None) -> None:
    """Raises: InputError if the tokenizer has another fingerprint than expected; older models expect none."""
    if expected not in (None, fingerprint):
        raise InputError(
            f"{path / 'tokenizer'} gives other ids than the tokenizer that the model was trained with: a file of it is "
            "damaged or was exchanged; copy the tokenizer of the training data there"
        )


def _abstract(where: Place, config: ModelConfig, task: str, arrays: ArrayTable) -> Params:
    """Returns shapes, dtypes and shardings of the stored parts. Raises: InputError if they do not fit the model."""
    num_classes = next(iter(arrays.get("classifier/bias", ["float32", [1]])[1]), 1)
    parts = {part_of(name) for name in arrays} | {"encoder"}
    every = flatten(abstract_params(config, num_classes))
    # The parameters of a probe depend on its settings, and those of a custom head are not known here: their shapes
    # are taken from the checkpoint itself.
    # a run that replaces tokens gives any model such a head
    of_runs = {*REPLACED.parts} - {part_of(name) for name in every}
    own = (
        parts & {"probe", "projection", QUERY_TABLE, *of_runs}
        if task in HEADS
        else parts - {"encoder", "pooler"}
    )
    every = {name: leaf for name, leaf in every.items() if part_of(name) not in own}
    unknown = {name: about for name, about in arrays.items() if part_of(name) in own}
    every |= {
        name: jax.ShapeDtypeStruct(tuple(shape), dtype) for name, (dtype, shape) in unknown.items()
    }
    abstract = unflatten({name: leaf for name, leaf in every.items() if part_of(name) in parts})
    check_arrays(where, arrays, describe(abstract))
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract
    )
