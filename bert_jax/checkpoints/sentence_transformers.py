# SPDX-License-Identifier: Apache-2.0
"""The modules of sentence-transformers around a model: pooling, a dense layer, normalization, prompts and the length.

modules.json lists them. The model lies at the root, or in 0_Transformer, and the others in folders such as 1_Pooling.
Versions before 6 have other names for the types and options, and read what is written here; version 6 does too.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert_jax.checkpoints.hf_extras import MODULES
from bert_jax.checkpoints.hf_weights import WEIGHTS, read_tensors, write_weights
from bert_jax.errors import InputError, shown
from bert_jax.model.objective import Params
from bert_jax.settings.finetuning import EmbeddingConfig, TaskConfig
from bert_jax.settings.model import ModelConfig
from bert_jax.storage.files import JsonObject, read_json, read_object
from bert_jax.storage.writing import write_json

_ABOUT, _LENGTH = "config_sentence_transformers.json", "sentence_bert_config.json"
_POOLINGS = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}  # ours -> pooling_mode_* before version 6
_IN_VERSION_6 = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
_ACTIVATIONS = {"tanh": "torch.nn.modules.activation.Tanh", "none": "torch.nn.modules.linear.Identity"}
_QUERY, _PASSAGES = "query", ("document", "passage", "corpus")  # names of prompts in sentence-transformers
_SENTENCE = "sentence_embedding"  # the feature that modules pass on
_ALONE = f"to use its model alone, remove {MODULES} from a copy"


class Pipeline(NamedTuple):
    """The processing of a model's vectors."""

    settings: TaskConfig
    params: Params  # of the projection, if there is one
    notes: list[str]


def read_pipeline(directory: Path, model: ModelConfig, lowercase: bool) -> Pipeline | None:
    """Returns the modules around a model in a directory; None if there are none. `lowercase` is its tokenizer's.

    Raises: InputError, with its name, for a module or an option that cannot be computed here.
    """
    home = directory.parent if re.fullmatch(r"\d+_Transformer", directory.name) else directory
    path = home / MODULES
    if not path.exists():
        return None
    modules = read_json(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise InputError(f"{path} is not a list of modules; copy it again, or remove it to use the model alone")
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    about = read_object(home / _ABOUT)
    if kinds == ["Transformer"] and about.get("model_type") == "CrossEncoder":
        return None  # a model with a head, as others are
    if not re.fullmatch("Transformer Pooling( Dense)?( Normalize)?", " ".join(kinds)):
        odd = next((kind for kind in kinds if kind not in ("Transformer", "Pooling", "Dense", "Normalize")), "")
        what = f"the module {odd}" if odd else f"the modules {', '.join(kinds) or 'of an empty list'}, in this order"
        raise InputError(f"{path} has {what}, which cannot be computed here; {_ALONE}")
    folders = dict(zip(kinds, (home / str(module.get("path", "")) for module in modules)))
    for where in (folder / "config.json" for folder in folders.values()):
        for option in ("module_input_name", "module_output_name"):
            if (value := read_object(where).get(option)) not in (None, _SENTENCE):
                raise InputError(f"{where}: {option} {shown(value)} cannot be computed here; {_ALONE}")
    prompts, notes = _prompts(about, path)
    kind = about.get("similarity_fn_name")
    if kind not in (None, "cosine", "dot" if "Normalize" in kinds else None):
        notes.append(f"similarity_fn_name {shown(kind)} is not kept; vectors are compared by their cosine here")
    dense, params = _dense(folders["Dense"], model) if "Dense" in folders else ({}, {})
    pooling = _pooling(folders["Pooling"] / "config.json", any(prompts.values()))
    embedding = EmbeddingConfig(pooling=pooling, normalize="Normalize" in kinds, **dense, **prompts)
    length = _length(home, directory, model, lowercase)
    return Pipeline(TaskConfig(name="embeddings", max_seq_length=length, embedding=embedding), params, notes)


def write_pipeline(directory: Path, settings: TaskConfig, params: Params) -> None:
    """Writes the modules around the model that is in a directory, of whose `params` the projection is one's own."""
    embedding = settings.embedding
    size = params["encoder"]["embeddings"]["norm"]["scale"].shape[0]
    kinds = ["Transformer", "Pooling"]
    if embedding.projection_size:
        kinds.append("Dense")
        layer, folder = params["projection"], directory / "2_Dense"
        folder.mkdir()
        arrays = {"linear.weight": np.array(layer["kernel"]).T.copy(), "linear.bias": np.asarray(layer["bias"])}
        write_weights(folder, arrays, max_bytes=1 << 40)
        options: JsonObject = {"in_features": size, "out_features": embedding.projection_size, "bias": True}
        options["activation_function"] = _ACTIVATIONS[embedding.projection_activation]
        write_json(folder / "config.json", options)
    kinds += ["Normalize"] * embedding.normalize
    paths = [f"{number}_{kind}" if number else "" for number, kind in enumerate(kinds)]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(zip(paths, kinds))
    ]
    for path in filter(None, paths):
        (directory / path).mkdir(exist_ok=True)
    pooling = {f"pooling_mode_{theirs}": ours == embedding.pooling for ours, theirs in _POOLINGS.items()}
    write_json(directory / "1_Pooling" / "config.json", {"word_embedding_dimension": size} | pooling)
    prompts = {_QUERY: embedding.query_prompt, _PASSAGES[0]: embedding.passage_prompt}
    about = {"model_type": "SentenceTransformer", "prompts": prompts, "default_prompt_name": None}
    write_json(directory / _ABOUT, about | {"similarity_fn_name": "cosine"})
    write_json(directory / _LENGTH, {"max_seq_length": settings.max_seq_length, "do_lower_case": False})
    write_json(directory / MODULES, modules)


def _prompts(about: JsonObject, path: Path) -> tuple[dict[str, Any], list[str]]:
    prompts = about.get("prompts") or {}
    if not isinstance(prompts, Mapping) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise InputError(f"{path.parent}: prompts {shown(prompts)} are not texts by name; correct them")
    passage = next((name for name in _PASSAGES if prompts.get(name)), "")
    others = [name for name, text in prompts.items() if text and name not in (_QUERY, passage)]
    notes = [f"the prompts {', '.join(others)} are not kept; write them before the texts"] if others else []
    if name := about.get("default_prompt_name"):
        notes.append(f"default_prompt_name {shown(name)} is not kept; say whether texts are queries or passages")
    return {"query_prompt": prompts.get(_QUERY) or "", "passage_prompt": prompts.get(passage) or ""}, notes


def _pooling(path: Path, has_prompts: bool) -> str:
    about = read_object(path)
    modes = about.get("pooling_mode") or [
        name.removeprefix("pooling_mode_") for name, on in about.items() if name.startswith("pooling_mode_") and on
    ]
    modes = [modes] if isinstance(modes, str) else modes or ["mean"]
    known = _IN_VERSION_6 | {theirs: ours for ours, theirs in _POOLINGS.items()}
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in list(known):
        raise InputError(
            f"{path}: pooling {shown(modes)} cannot be computed here, only mean, cls or lasttoken; {_ALONE}"
        )
    if about.get("include_prompt") is False and has_prompts:
        raise InputError(f"{path}: include_prompt false, pooling without the prompt, cannot be computed here; {_ALONE}")
    return known[modes[0]]


def _dense(folder: Path, model: ModelConfig) -> tuple[dict[str, Any], Params]:
    """Returns the settings of a dense layer, and its parameters."""
    about, where = read_object(folder / "config.json"), folder / "config.json"
    names = {theirs: ours for ours, theirs in _ACTIVATIONS.items()}
    activation = about.get("activation_function", _ACTIVATIONS["tanh"])
    for option, value, right in (
        ("activation_function", activation, activation in list(names)),
        ("use_residual", about.get("use_residual"), not about.get("use_residual")),
        ("in_features", about.get("in_features"), about.get("in_features") == model.hidden_size),
    ):
        if not right:
            raise InputError(f"{where}: {option} {shown(value)} cannot be computed here; {_ALONE}")
    tensors, size = read_tensors(folder), about.get("out_features")
    kernel, bias = (tensors.get(f"linear.{name}") for name in ("weight", "bias"))
    if kernel is None or kernel.shape != (size, model.hidden_size) or (bias is not None and bias.shape != (size,)):
        raise InputError(
            f"{folder / WEIGHTS} has no linear.weight and linear.bias of {shown(size)} outputs; copy it again"
        )
    settings: dict[str, Any] = {"projection_size": size, "projection_activation": names[activation]}
    bias = np.zeros(len(kernel)) if bias is None else bias
    parts = {"kernel": kernel.T, "bias": bias}
    return settings, {"projection": {name: np.ascontiguousarray(part, np.float32) for name, part in parts.items()}}


def _length(home: Path, directory: Path, model: ModelConfig, lowercase: bool) -> int:
    """Returns the largest number of tokens of a text; version 6 stores it with the tokenizer."""
    about = read_object(home / _LENGTH) | read_object(directory / _LENGTH)
    if about.get("do_lower_case") and not lowercase:
        raise InputError(f"{home}: do_lower_case true beside a cased tokenizer cannot be computed here; {_ALONE}")
    limit = about.get("max_seq_length") or read_object(directory / "tokenizer_config.json").get("model_max_length") or 0
    if not (isinstance(limit, int | float) and limit >= 0):
        raise InputError(f"{home}: max_seq_length {shown(limit)} is not a number of tokens; correct it")
    return int(min(limit or model.max_positions, model.max_positions))
