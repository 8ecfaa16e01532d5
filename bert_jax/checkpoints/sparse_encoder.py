# SPDX-License-Identifier: Apache-2.0
"""Directories of sentence-transformers' SparseEncoder: a masked language model, what is made of its logits, a table.

modules.json lists MLMTransformer (before version 6) or Transformer, and SpladePooling. Or it has a Router (or Asym),
whose own file says which modules passages and queries go through: those two, and SparseStaticEmbedding, whose weights
are a tensor or a JSON file of words. What is written here has the names that are older than version 6, which reads them
too.
"""

import re
import shutil
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from bert_jax.checkpoints.hf_extras import MODULES
from bert_jax.checkpoints.hf_weights import PICKLE, WEIGHTS, read_tensors, write_weights
from bert_jax.checkpoints.names import find_not_finite
from bert_jax.checkpoints.sentence_transformers import (
    ABOUT,
    ALONE,
    FORWARD,
    LENGTH,
    TRANSFORMER,
    Pipeline,
    allow,
    cannot,
    check_transformer,
    config_of,
    read_length,
    read_prompts,
    write_about,
)
from bert_jax.errors import InputError, reading, shown
from bert_jax.model.heads.sparse import QUERY_TABLE
from bert_jax.model.objective import Params
from bert_jax.settings.finetuning import EmbeddingConfig, TaskConfig
from bert_jax.settings.model import ModelConfig
from bert_jax.storage import schema
from bert_jax.storage.files import JsonObject
from bert_jax.storage.folder import Folder
from bert_jax.storage.writing import write_json
from bert_jax.text.hf_tokenizer import load_hf_tokenizer
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.tokenizing import read_tokenizer_files

_TYPES = (
    r"sentence_transformers\.(?:models|base\.modules|sparse_encoder\.(?:models|modules))\.(?:\w+\.)*"
    "(Transformer|MLMTransformer|SpladePooling|SparseStaticEmbedding|Router|Asym)"
)
_OURS = r"SpladePooling|SparseStaticEmbedding|MLMTransformer|Router|Asym"
_ROUTES = "router_config.json"
_OLD_ROUTES = "config.json"
_QUERIES = "query"
_PASSAGES = "document"
_SIZES = ("word_embedding_dimension", "embedding_dimension")
_POOLING = {
    "pooling_strategy": (None, "max", "sum"),
    "activation_function": (None, "relu", "log1p_relu"),
    "chunk_size": (),
} | dict.fromkeys(_SIZES, ())
_WRITTEN = "sentence_transformers.sparse_encoder.models."


class _Module(NamedTuple):
    kind: str
    folder: Folder


class _Routes(NamedTuple):
    """The modules that passages and queries go through."""

    passages: list[_Module]
    queries: list[_Module]


def is_sparse_encoder(home: Folder) -> bool:
    """Returns whether a directory lists modules of a SparseEncoder."""
    listed = home.json(MODULES) if MODULES in home else []
    with reading(str(home / MODULES)):
        kinds = [entry.get("type") for entry in listed if isinstance(entry, dict)]
    return any(re.search(rf"\.({_OURS})$", str(kind)) for kind in kinds)


def model_folder(home: Folder) -> Folder:
    """Returns the folder of the masked language model; for other directories itself."""
    return _routes(home).passages[0].folder if is_sparse_encoder(home) else home


def read_sparse(home: Folder, model: ModelConfig, tokenizer: Tokenizer) -> Pipeline | None:
    """Returns what a SparseEncoder does beside its model; None if the directory is not one.

    Raises: InputError, with its name, for a module or an option that cannot be computed here or is not there.
    """
    if not is_sparse_encoder(home):
        return None
    passages, queries = _routes(home)
    transformer, pooling = passages
    about = home.object(ABOUT)
    where = home / ABOUT
    allow(about, {"model_type": (None, "SparseEncoder")}, where)
    prompts, notes = read_prompts(about, where)
    if about.get("similarity_fn_name") not in (None, "dot"):
        given = shown(about["similarity_fn_name"])
        notes.append(f"similarity_fn_name {given} is not kept; vectors are compared by dot product")
    options: dict[str, Any] = {"kind": "sparse"}
    most = about.get("max_active_dims")
    if most is not None:
        number = Annotated[int, schema.Meta(ge=1)]
        schema.check(most, number, f"{where}: max_active_dims", "correct it")
        options["max_terms"] = most
    # Without its task a Transformer of theirs would give hidden states.
    known = (None,) if transformer.kind == "MLMTransformer" else ()
    allowed = TRANSFORMER | {"transformer_task": (*known, "fill-mask")}
    check_transformer(transformer.folder, allowed, FORWARD | {"method_output_name": "logits"})
    given, where = config_of(pooling.folder, _POOLING)
    for name in _SIZES:
        if given.get(name) not in (None, model.vocab_size):
            raise cannot(where, f"{name} beside a vocabulary of {model.vocab_size}", given[name])
    options["pooling"] = given.get("pooling_strategy") or "max"
    options["log_times"] = 2 if given.get("activation_function") == "log1p_relu" else 1
    params: Params = {}
    table = queries[0]
    if table.kind == "SparseStaticEmbedding":
        params[QUERY_TABLE] = {"weight": _table(home, table.folder, model, tokenizer)}
        notes += find_not_finite(params, table.folder.path)
        options["query_table"] = True
    length = read_length(transformer.folder, model, tokenizer.lowercase)
    settings = EmbeddingConfig(**options, **prompts)
    task = TaskConfig(name="embeddings", max_seq_length=length, embedding=settings)
    return Pipeline(task, params, notes)


def _routes(home: Folder) -> _Routes:
    """Raises: InputError if texts go through other modules than are known here."""
    modules = [_module(home, entry, home / MODULES) for entry in home.json(MODULES)]
    kinds = [module.kind for module in modules]
    routes = _Routes(modules, modules)
    if kinds in (["Router"], ["Asym"]):
        routes = _routes_of(modules[0].folder)
    passages = [module.kind for module in routes.passages]
    queries = [module.kind for module in routes.queries]
    places = [
        [module.folder.path for module in routes.passages],
        [module.folder.path for module in routes.queries],
    ]
    is_known = re.fullmatch("(MLM)?Transformer SpladePooling", " ".join(passages))
    is_same = queries == passages and places[0] == places[1]
    if not is_known or not (is_same or queries == ["SparseStaticEmbedding"]):
        what = (
            f"the modules {', '.join(passages)} for passages and {', '.join(queries)} for queries"
        )
        raise InputError(f"{home / MODULES} has {what}, which cannot be computed here; {ALONE}")
    return routes


def _routes_of(folder: Folder) -> _Routes:
    """Returns the routes of a Router."""
    name = _ROUTES if _ROUTES in folder else _OLD_ROUTES
    where = folder / name
    about = folder.object(name)
    kinds = {
        "types": dict[str, str],
        "structure": dict[str, list[str]],
    }
    for part, of_part in kinds.items():
        schema.check(about.get(part), of_part, f"{where}: {part}", "copy it again")
    options = about.get("parameters") or {}
    known = {
        "default_route": (None, _PASSAGES),
        "route_mappings": (None, {}),
    }
    allow(options, known, where)
    structure = about["structure"]
    if structure.keys() != {_QUERIES, _PASSAGES}:
        raise cannot(where, "structure", sorted(structure))
    routes = []
    for route in (_PASSAGES, _QUERIES):
        entries = [{"type": about["types"].get(path), "path": path} for path in structure[route]]
        routes.append([_module(folder, entry, where) for entry in entries])
    return _Routes(*routes)


def _module(home: Folder, entry: JsonObject, where: Path) -> _Module:
    """Returns a module of a list, with the folder of its files."""
    own = re.fullmatch(_TYPES, str(entry.get("type")))
    if own is None:
        kind = shown(entry.get("type"))
        raise InputError(f"{where} has the module {kind}, which cannot be computed here; {ALONE}")
    place = entry.get("path")
    if place != "":
        schema.check(place, schema.FileName, f"{where}: the path of {own[1]}", "copy it again")
    return _Module(own[1], home.inside(str(place)))


def _table(home: Folder, folder: Folder, model: ModelConfig, tokenizer: Tokenizer) -> np.ndarray:
    """Returns the weights [V] of a table. Raises: InputError if it is for other tokens, or two forms differ."""
    about, where = config_of(folder, {"frozen": (None, True, False), "path": ()})
    path = about.get("path")
    if path is None:
        weight = _tensor(folder, model)
    else:
        schema.check(path, schema.FileName, f"{where}: path", "name a file of the directory")
        if not path.endswith(".json"):
            raise cannot(where, "path", path)
        weight = _weights_of_words(home, folder, path, model, tokenizer)
        has_tensor = bool({WEIGHTS, PICKLE} & set(folder.names))
        if has_tensor and not np.array_equal(weight, _tensor(folder, model)):
            raise InputError(
                f"{folder.path} has other weights than {path}, which its config.json names; remove what is not meant"
            )
    own, _ = load_hf_tokenizer(read_tokenizer_files(folder))
    if own.fingerprint != tokenizer.fingerprint:
        raise InputError(
            f"{folder.path} has another tokenizer than the model of passages, so queries have other words; {ALONE}"
        )
    return weight


def _tensor(folder: Folder, model: ModelConfig) -> np.ndarray:
    """Returns the weights [V] that are a tensor. Raises: InputError if they are for another number of words."""
    tensors = read_tensors(folder)
    if {name: tensor.shape for name, tensor in tensors.items()} != {"weight": (model.vocab_size,)}:
        raise InputError(
            f"{folder.path} has other tensors than weight of {model.vocab_size} words; copy it again"
        )
    return np.ascontiguousarray(tensors["weight"], np.float32)


def _weights_of_words(
    home: Folder,
    folder: Folder,
    path: str,
    model: ModelConfig,
    tokenizer: Tokenizer,
) -> np.ndarray:
    """Returns the weights [V] in a JSON file {token: weight}; 0 of other tokens. Raises: InputError if it is none.

    It is in the folder of the table or, if it is not there, in the directory. sentence-transformers looks for it from
    where it runs.
    """
    place, _, name = path.rpartition("/")
    folder = folder.inside(place)
    if name not in folder:
        folder = home.inside(place)
    folder.json(name)  # which must be there
    where = folder / name
    ids = tokenizer.pieces.ids
    weight = np.zeros(model.vocab_size, np.float32)
    for token, value in folder.object(name).items():
        schema.check(value, float, f"{where}: {shown(token)}", "correct it")
        if token not in ids:
            raise InputError(
                f"{where} has a weight of {shown(token)}, which the tokenizer lacks; copy both again"
            )
        with np.errstate(over="ignore"):  # a note tells
            weight[ids[token]] = value
    return weight


def write_sparse(directory: Path, settings: TaskConfig, params: Params, vocab_size: int) -> None:
    """Writes the modules around the masked language model that is in a directory, and the table of `params`."""
    embedding = settings.embedding
    pooling = {
        "pooling_strategy": embedding.poolings()[0],
        "activation_function": "relu" if embedding.log_times == 1 else "log1p_relu",
        "word_embedding_dimension": vocab_size,
    }
    chain = {
        "": f"{_WRITTEN}MLMTransformer",
        "1_SpladePooling": f"{_WRITTEN}SpladePooling",
    }
    _, place = chain
    (directory / place).mkdir()
    write_json(directory / place / "config.json", pooling)
    modules = list(chain.items())
    if embedding.query_table:
        table = _write_table(directory, np.asarray(params[QUERY_TABLE]["weight"]))
        routes = {
            "types": chain | {table: f"{_WRITTEN}SparseStaticEmbedding"},
            "structure": {
                _QUERIES: [table],
                _PASSAGES: list(chain),
            },
            "parameters": {
                "default_route": _PASSAGES,
                "allow_empty_key": True,
            },
        }
        write_json(directory / _ROUTES, routes)
        modules = [("", "sentence_transformers.models.Router")]
    about: JsonObject = {
        "model_type": "SparseEncoder",
        "similarity_fn_name": "dot",
    }
    if embedding.max_terms:
        about["max_active_dims"] = embedding.max_terms
    write_about(directory, settings, modules, about)


def _write_table(directory: Path, weight: np.ndarray) -> str:
    """Writes the folder of a table, with the tokenizer of the model again, and returns its name."""
    place = "query_0_SparseStaticEmbedding"
    (directory / place).mkdir()
    write_json(directory / place / "config.json", {"frozen": False})
    write_weights(directory / place, {"weight": weight}, max_bytes=1 << 40)
    of_model = ("config.json", "README.md", LENGTH)
    for path in directory.iterdir():
        if path.is_file() and path.name not in of_model and "model.safetensors" not in path.name:
            shutil.copy(path, directory / place)
    return place
