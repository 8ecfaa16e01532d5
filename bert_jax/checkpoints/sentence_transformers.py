# SPDX-License-Identifier: Apache-2.0
"""The modules of sentence-transformers around a model: pooling, a dense layer, normalization, prompts and the length.

modules.json lists them. The model lies at the root, or in 0_Transformer, and the others in folders such as 1_Pooling.
Versions before 6 have other names for the types and options, and read what is written here; version 6 does too.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert_jax.checkpoints.hf_extras import MODULES
from bert_jax.checkpoints.hf_weights import WEIGHTS, read_tensors, write_weights
from bert_jax.checkpoints.names import find_not_finite
from bert_jax.errors import InputError, shown
from bert_jax.model.objective import Params
from bert_jax.settings.finetuning import EmbeddingConfig, TaskConfig
from bert_jax.settings.model import ModelConfig
from bert_jax.storage import schema
from bert_jax.storage.files import JsonObject
from bert_jax.storage.folder import Folder, open_folder
from bert_jax.storage.writing import write_json

_ABOUT, _LENGTH = "config_sentence_transformers.json", "sentence_bert_config.json"
_LENGTHS = (
    _LENGTH,
    *(f"sentence_{kind}_config.json" for kind in ("roberta", "distilbert", "xlm-roberta")),
)
# types of modules
_OWN = r"sentence_transformers\.(?:models|(?:base|sentence_transformer)\.modules)\.(?:\w+\.)*(\w+)"
_KINDS = ("Transformer", "Pooling", "Dropout", "Dense", "Normalize")
# Ours -> pooling_mode_* before version 6, where several stand in this order, and the name since.
_POOLINGS = {
    "cls": ("cls_token", "cls"),
    "max": ("max_tokens", "max"),
    "mean": ("mean_tokens", "mean"),
    "sqrt": ("mean_sqrt_len_tokens", "mean_sqrt_len_tokens"),
    "weighted": ("weightedmean_tokens", "weightedmean"),
    "last": ("lasttoken", "lasttoken"),
}
_OLD = {f"pooling_mode_{old}": ours for ours, (old, _) in _POOLINGS.items()}
_POOLING_OPTIONS = (
    "word_embedding_dimension",
    "embedding_dimension",
    "pooling_mode",
    "include_prompt",
    *_OLD,
)
_NAMES_OF_FEATURES = ("module_input_name", "module_output_name")
_DENSE_OPTIONS = (
    "in_features",
    "out_features",
    "bias",
    "activation_function",
    "use_residual",
    *_NAMES_OF_FEATURES,
)
_ACTIVATIONS = {
    "tanh": "torch.nn.modules.activation.Tanh",
    "relu": "torch.nn.modules.activation.ReLU",
    "gelu": "torch.nn.modules.activation.GELU",
    "sigmoid": "torch.nn.modules.activation.Sigmoid",
    "none": "torch.nn.modules.linear.Identity",
}
_QUERY, _PASSAGES = (
    "query",
    ("document", "passage", "corpus"),
)  # names of prompts; of passages the first that has a text
_SENTENCE = "sentence_embedding"  # the feature that modules pass on
_FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}
_ARGUMENTS = tuple(
    f"{of}_{kind}"
    for of in ("model", "tokenizer", "processor", "config")
    for kind in ("args", "kwargs")
)
# of these, for vectors
_HARMLESS = {"trust_remote_code", "attn_implementation", "add_pooling_layer"}
_ALONE = f"to use its model alone, remove {MODULES} from a copy"


class Pipeline(NamedTuple):
    """The processing of a model's vectors."""

    settings: TaskConfig
    params: Params  # of the projection, if there is one
    notes: list[str]


def read_pipeline(folder: Folder, model: ModelConfig, lowercase: bool) -> Pipeline | None:
    """Returns the modules around a model in a directory; None if there are none. `lowercase` is its tokenizer's.

    Symbolic links are followed, also out of the directory: the hub's own cache consists of them.

    Raises: InputError, with its name, for a module or an option that cannot be computed here or is not there.
    """
    home = (
        open_folder(folder.path.parent)
        if re.fullmatch(r"\d+_Transformer", folder.path.name)
        else folder
    )
    if MODULES not in home:
        return None
    about = home.object(_ABOUT)
    model_type = about.get("model_type")
    folders = _folders(home, folder, is_reranker=model_type == "CrossEncoder")
    if not folders:
        return None
    if model_type not in (None, "SentenceTransformer"):
        raise InputError(
            f"{home / _ABOUT}: model_type {shown(model_type)} cannot be computed here; {_ALONE}"
        )
    prompts, notes = _prompts(about, home / _ABOUT)
    kind = about.get("similarity_fn_name")
    if kind not in (None, "cosine", "dot" if "Normalize" in folders else None):
        notes.append(
            f"similarity_fn_name {shown(kind)} is not kept; vectors are compared by their cosine here"
        )
    kept = about.get("truncate_dim")
    if kept is not None and (type(kept) is not int or kept < 1):
        raise InputError(
            f"{home / _ABOUT}: truncate_dim {shown(kept)} is not a number of dimensions; correct it"
        )
    poolings = _poolings(folders["Pooling"], any(prompts.values()))
    size = model.hidden_size * len(poolings)
    dense, params = _dense(folders["Dense"], size) if "Dense" in folders else ({}, {})
    if params:
        notes += find_not_finite(params, folders["Dense"] / WEIGHTS)
    options = {
        "pooling": ",".join(poolings),
        "normalize": "Normalize" in folders,
        **dense,
        **prompts,
    }
    embedding = EmbeddingConfig(**options)
    if kept is not None and kept < embedding.vector_size(model.hidden_size):
        embedding = dataclasses.replace(embedding, kept_dimensions=kept)
    _check_transformer(folder)
    length = _length(folder, model, lowercase)
    return Pipeline(
        TaskConfig(name="embeddings", max_seq_length=length, embedding=embedding), params, notes
    )


def _folders(home: Folder, of_model: Folder, is_reranker: bool) -> dict[str, Folder]:
    """Returns the folder of each module by its kind, one without files where there is none.

    It is {} for a reranker, a model with a head as others are.
    """
    path, modules = home / MODULES, home.json(MODULES)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise InputError(
            f"{path} is not a list of modules; copy it again, or remove it to use the model alone"
        )
    places: list[tuple[str, str]] = []
    for module in modules:
        own, place = re.fullmatch(_OWN, str(module.get("type"))), module.get("path")
        if own is None or own[1] not in _KINDS:
            odd = own[1] if own else shown(module.get("type"))
            raise InputError(
                f"{path} has the module {odd}, which cannot be computed here; {_ALONE}"
            )
        if place not in ("", ".") and not schema.file_name.fits(place):
            raise InputError(
                f"{path}: the path {shown(place)} of {own[1]} is not a folder in this directory"
            )
        places.append((own[1], place))
    kinds = [kind for kind, _ in places if kind != "Dropout"]  # which does nothing after training
    if kinds[:1] == ["Transformer"]:
        inner = home.inside(places[0][1])
        if not (inner is of_model or (inner.names and os.path.samefile(inner.path, of_model.path))):
            raise InputError(
                f"{path} has its Transformer in {inner.path}, not here; give that folder"
            )
    if kinds == ["Transformer"] and is_reranker:
        return {}
    if not re.fullmatch("Transformer Pooling( Dense)?( Normalize)?", " ".join(kinds)):
        what = f"the modules {', '.join(kinds) or 'of an empty list'}, in this order"
        raise InputError(f"{path} has {what}, which cannot be computed here; {_ALONE}")
    found = {kind: home.inside(place) for kind, place in places}
    for kind, folder in found.items():
        where = folder / "config.json"
        if kind in ("Pooling", "Dense") and "config.json" not in folder:
            raise InputError(
                f"{path} names {folder.path.name} for {kind}, and there is no {where}; copy it as well"
            )
        about = {} if kind == "Transformer" else folder.object("config.json")
        for option in _NAMES_OF_FEATURES:
            if (value := about.get(option)) not in (None, _SENTENCE):
                raise InputError(
                    f"{where}: {option} {shown(value)} cannot be computed here; {_ALONE}"
                )
    return found


def read_reranker(
    folder: Folder, settings: JsonObject, model: ModelConfig, lowercase: bool, num_outputs: int
) -> tuple[TaskConfig | None, list[str]]:
    """Returns the task of a reranker with one output, if it is not the usual one, and notes.

    `settings` are those of config.json. As sentence-transformers' CrossEncoder has it, the output passes through the
    sigmoid if no file says otherwise; one that transformers calls a regression does not.

    Raises: InputError for an activation that cannot be computed here.
    """
    about = folder.object(_ABOUT) if MODULES in folder else {}
    of_library = settings.get("sentence_transformers")
    named = of_library.get("activation_fn") if isinstance(of_library, Mapping) else None
    given = [
        about.get("activation_fn"),
        named or settings.get("sbert_ce_default_activation_function"),
    ]
    own = [name for name in given if name is not None and not str(name).startswith("torch.")]
    notes = [
        f"the activation {shown(name)} is code of the model's own, which is not run" for name in own
    ]
    if about.get("default_prompt_name"):
        notes.append(
            f"default_prompt_name {shown(about['default_prompt_name'])} is not kept; write it before the texts"
        )
    name = next((name for name in given if str(name).startswith("torch.")), None)
    known = {spelling: ours for ours, path in _ACTIVATIONS.items() for spelling in _spellings(path)}
    activation = known.get(str(name), "")
    if name and activation not in ("tanh", "relu", "sigmoid", "none"):
        raise InputError(
            f"{folder.path}: the activation {shown(name)} cannot be computed here; use torch.nn.Identity"
        )
    if num_outputs > 1:
        if name and activation != "none":
            notes.append(
                f"the activation {activation} is not applied: predictions are probabilities by softmax"
            )
        return None, notes
    because = "as its files say"
    if name is None and settings.get("problem_type") == "regression":
        activation, because = (
            "none",
            "its problem_type is regression; CrossEncoder would give its sigmoid",
        )
    elif name is None:
        activation, because = "sigmoid", "by default"
    what = "output" if activation == "none" else f"{activation} of the output"
    notes.append(f"the number that is predicted is the {what}, {because}")
    length = _length(folder, model, lowercase)
    if activation == "none" and length == model.max_positions:
        return None, notes
    return TaskConfig(
        name="regression", max_seq_length=length, activation=activation.removesuffix("none")
    ), notes


def activation_path(activation: str) -> str:
    """Returns the name of torch's class of a `TaskConfig.activation`."""
    return _ACTIVATIONS[activation or "none"]


def _spellings(path: str) -> tuple[str, str]:
    """Returns both names of a class of torch."""
    return path, f"torch.nn.{path.rpartition('.')[2]}"


def write_pipeline(directory: Path, settings: TaskConfig, params: Params) -> None:
    """Writes the modules around the model that is in a directory, of whose `params` the projection is one's own."""
    embedding = settings.embedding
    size = params["encoder"]["embeddings"]["norm"]["scale"].shape[0]
    kinds = ["Transformer", "Pooling"]
    if embedding.projection_size:
        kinds.append("Dense")
        layer, folder = params["projection"], directory / "2_Dense"
        folder.mkdir()
        arrays = {
            "linear.weight": np.array(layer["kernel"]).T.copy(),
            "linear.bias": np.asarray(layer["bias"]),
        }
        write_weights(folder, arrays, max_bytes=1 << 40)
        options: JsonObject = {"in_features": len(layer["kernel"]), "bias": True}
        options["out_features"] = embedding.projection_size
        options["activation_function"] = _ACTIVATIONS[embedding.projection_activation]
        write_json(folder / "config.json", options)
    kinds += ["Normalize"] * embedding.normalize
    paths = [f"{number}_{kind}" if number else "" for number, kind in enumerate(kinds)]
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, (path, kind) in enumerate(zip(paths, kinds))
    ]
    for path in filter(None, paths):
        (directory / path).mkdir(exist_ok=True)
    poolings = embedding.poolings()
    pooling: JsonObject = {"word_embedding_dimension": size} | {
        old: ours in poolings for old, ours in _OLD.items()
    }
    # an order that versions before 6 do not know
    if poolings != [ours for ours in _POOLINGS if ours in poolings]:
        pooling["pooling_mode"] = [_POOLINGS[ours][1] for ours in poolings]
    write_json(directory / "1_Pooling" / "config.json", pooling)
    others = json.loads(embedding.other_prompts or "{}")
    prompts = others | {_QUERY: embedding.query_prompt, _PASSAGES[0]: embedding.passage_prompt}
    default = embedding.default_prompt if embedding.default_prompt in prompts else _PASSAGES[0]
    about: JsonObject = {
        "model_type": "SentenceTransformer",
        "prompts": prompts,
        "similarity_fn_name": "cosine",
    }
    about["default_prompt_name"] = default if embedding.default_prompt else None
    if embedding.kept_dimensions:
        about["truncate_dim"] = embedding.kept_dimensions
    write_json(directory / _ABOUT, about)
    write_json(
        directory / _LENGTH, {"max_seq_length": settings.max_seq_length, "do_lower_case": False}
    )
    write_json(directory / MODULES, modules)


def _prompts(about: JsonObject, where: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of prompts, and notes."""
    prompts = about.get("prompts") or {}
    if not isinstance(prompts, Mapping) or not all(
        isinstance(text, str | None) for text in prompts.values()
    ):
        raise InputError(f"{where}: prompts {shown(prompts)} are not texts by name; correct them")
    default = about.get("default_prompt_name")
    if default is not None and default not in (_QUERY, _PASSAGES[0], *prompts):
        raise InputError(
            f"{where}: default_prompt_name {shown(default)} is not the name of a prompt; correct it"
        )
    texts = {name: text for name, text in prompts.items() if text}
    passage = next((name for name in _PASSAGES if name in texts), "")
    notes = []
    if passage not in ("", _PASSAGES[0]):
        notes.append(
            f"passages take the prompt named {passage}, as there is none named document; sentence-transformers' "
            "encode_document gives them none"
        )
    others = {name: text for name, text in texts.items() if name not in (_QUERY, passage)}
    return {
        "query_prompt": texts.get(_QUERY, ""),
        "passage_prompt": texts.get(passage, ""),
        "other_prompts": json.dumps(others, ensure_ascii=False) if others else "",
        "default_prompt": (_PASSAGES[0] if default == passage else default)
        if default in texts
        else "",
    }, notes


def _poolings(folder: Folder, has_prompts: bool) -> list[str]:
    """Returns the names of what stands side by side in a vector."""
    about, path = folder.object("config.json"), folder / "config.json"
    _check_known(about, _POOLING_OPTIONS, path)
    modes: Any = "mean"  # the default there
    if "pooling_mode" in about:
        modes = about["pooling_mode"]
    elif any(name in about for name in _OLD):
        modes = [_POOLINGS[ours][1] for name, ours in _OLD.items() if about.get(name) is True]
    modes = [modes] if isinstance(modes, str) else modes
    known = {theirs: ours for ours, (_, theirs) in _POOLINGS.items()}
    if not isinstance(modes, list) or not modes or not all(mode in list(known) for mode in modes):
        raise InputError(
            f"{path}: pooling {shown(modes)} cannot be computed here, only {', '.join(known)}; {_ALONE}"
        )
    if not about.get("include_prompt", True) and has_prompts:
        raise InputError(
            f"{path}: include_prompt false, pooling without the prompt, cannot be computed here; {_ALONE}"
        )
    return [known[mode] for mode in modes]


def _check_known(about: JsonObject, options: tuple[str, ...], where: Path) -> None:
    """Raises: InputError for an option of an unknown name: nothing tells what it changes."""
    if unknown := [
        name for name, value in about.items() if name not in options and value is not None
    ]:
        raise InputError(
            f"{where} has the option {shown(unknown[0])}, which is not known here; {_ALONE}"
        )


def _dense(folder: Folder, input_size: int) -> tuple[dict[str, Any], Params]:
    """Returns the settings of a dense layer, and its parameters."""
    about, where = folder.object("config.json"), folder / "config.json"
    _check_known(about, _DENSE_OPTIONS, where)
    computed = ("tanh", "relu", "gelu", "none")
    names = {spelling: ours for ours in computed for spelling in _spellings(_ACTIVATIONS[ours])}
    activation, has_bias = (
        about.get("activation_function", _ACTIVATIONS["tanh"]),
        about.get("bias", True),
    )
    for option, value, right in (
        ("activation_function", activation, activation in list(names)),
        ("use_residual", about.get("use_residual"), not about.get("use_residual")),
        ("in_features", about.get("in_features"), about.get("in_features") == input_size),
        ("bias", has_bias, isinstance(has_bias, bool)),
    ):
        if not right:
            raise InputError(f"{where}: {option} {shown(value)} cannot be computed here; {_ALONE}")
    tensors, size = read_tensors(folder), about.get("out_features")
    shapes = {"linear.weight": (size, input_size)} | ({"linear.bias": (size,)} if has_bias else {})
    if {name: tensor.shape for name, tensor in tensors.items()} != shapes:
        wanted = f"{' and '.join(shapes)} of {shown(size)} outputs"
        raise InputError(
            f"{folder.path} has other tensors than {wanted}, as {where.name} asks for; copy both again"
        )
    weight = tensors["linear.weight"]
    settings: dict[str, Any] = {
        "projection_size": len(weight),
        "projection_activation": names[activation],
    }
    parts = {"kernel": weight.T, "bias": tensors.get("linear.bias", np.zeros(len(weight)))}
    with np.errstate(over="ignore"):  # of float64; a note tells
        arrays = {name: np.ascontiguousarray(part, np.float32) for name, part in parts.items()}
    return settings, {"projection": arrays}


def _check_transformer(folder: Folder) -> None:
    """Raises: InputError if a model is not used as the encoder that it is here."""
    where, about = _of_transformer(folder)
    for option, allowed in {
        "transformer_task": (None, "feature-extraction"),
        "module_output_name": (None, "token_embeddings"),
        "processing_kwargs": (None, {}),
        "query_length": (None,),
        "document_length": (None,),
        "query_expansion": (None, False),
    }.items():
        if about.get(option) not in allowed:
            raise InputError(
                f"{where}: {option} {shown(about[option])} cannot be computed here; {_ALONE}"
            )
    modalities = about.get("modality_config", {"text": _FORWARD})
    if not isinstance(modalities, dict) or modalities.get("text") != _FORWARD:
        raise InputError(
            f"{where}: modality_config {shown(modalities)} cannot be computed here; {_ALONE}"
        )
    for option in _ARGUMENTS:
        value = about.get(option) or {}
        if not isinstance(value, dict) or not value.keys() <= _HARMLESS:
            raise InputError(f"{where}: {option} {shown(value)} cannot be computed here; {_ALONE}")


def _of_transformer(folder: Folder) -> tuple[Path, JsonObject]:
    """Returns the file that says how the model is used, and what it holds; {} if there is none."""
    name = next((name for name in _LENGTHS if folder.object(name)), _LENGTH)
    return folder / name, folder.object(name)


def _length(folder: Folder, model: ModelConfig, lowercase: bool) -> int:
    """Returns the largest number of tokens of a text; version 6 stores it with the tokenizer."""
    where, about = _of_transformer(folder)
    if about.get("do_lower_case") and not lowercase:
        raise InputError(
            f"{where}: do_lower_case true beside a cased tokenizer cannot be computed here; {_ALONE}"
        )
    limit = (
        about.get("max_seq_length")
        or folder.object("tokenizer_config.json").get("model_max_length")
        or 0
    )
    if isinstance(limit, bool) or not (isinstance(limit, int | float) and limit >= 0):
        raise InputError(
            f"{where}: max_seq_length {shown(limit)} is not a number of tokens; correct it"
        )
    return int(min(limit or model.max_positions, model.max_positions))
