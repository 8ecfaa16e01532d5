# SPDX-License-Identifier: Apache-2.0
"""The modules of sentence-transformers around a model: pooling, a dense layer, normalization, prompts and the length.

modules.json lists them. The model lies at the root, or in 0_Transformer, and the others in folders such as 1_Pooling.
Versions before 6 have other names for the types and options, and read what is written here; version 6 does too.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from bert_jax.checkpoints.hf_extras import MODULES
from bert_jax.checkpoints.hf_weights import WEIGHTS, read_tensors, write_weights
from bert_jax.checkpoints.names import find_not_finite
from bert_jax.errors import InputError, reading, shown
from bert_jax.model.objective import Params
from bert_jax.settings.finetuning import EmbeddingConfig, TaskConfig
from bert_jax.settings.model import ModelConfig
from bert_jax.storage import schema
from bert_jax.storage.files import JsonObject
from bert_jax.storage.folder import Folder, open_folder
from bert_jax.storage.writing import write_json
from bert_jax.text.tokenizer import Tokenizer

ABOUT = "config_sentence_transformers.json"
LENGTH = "sentence_bert_config.json"
_LENGTHS = (
    LENGTH,
    *(f"sentence_{kind}_config.json" for kind in ("roberta", "distilbert", "xlm-roberta")),
)
# types of modules
_TYPES = (
    r"(?:sentence_transformers\.(?:models|(?:base|sentence_transformer|multi_vector_encoder)\.modules)"
    r"|pylate\.models)\.(?:\w+\.)*(Transformer|Pooling|Dropout|Dense|Normalize|MultiVectorMask)"
)
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
ACTIVATIONS = {
    "tanh": "torch.nn.modules.activation.Tanh",
    "relu": "torch.nn.modules.activation.ReLU",
    "gelu": "torch.nn.modules.activation.GELU",
    "sigmoid": "torch.nn.modules.activation.Sigmoid",
    "none": "torch.nn.modules.linear.Identity",
}
# names of prompts; of passages the first that has a text
QUERY = "query"
PASSAGES = ("document", "passage", "corpus")
ALONE = f"to use its model alone, remove {MODULES} from a copy"

# The options of each module, and the values that are computed here; () is read below.
_OF_ALL: dict[str, tuple] = dict.fromkeys(
    ("module_input_name", "module_output_name"), (None, "sentence_embedding")
)
_SIZES = ("word_embedding_dimension", "embedding_dimension", "in_features", "out_features")
_POOLING = _OF_ALL | dict.fromkeys((*_SIZES[:2], "pooling_mode", "include_prompt", *_OLD), ())
DENSE = (
    _OF_ALL
    | dict.fromkeys((*_SIZES[2:], "activation_function"), ())
    | {"bias": (None, True, False), "use_residual": (None, False)}
)
FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}
TRANSFORMER = {
    "transformer_task": (None, "feature-extraction"),
    "module_output_name": (None, "token_embeddings"),
    "processing_kwargs": (None, {}),
    "query_length": (None,),
    "document_length": (None,),
    "query_expansion": (None, False),
}
_ARGUMENTS = r"(model|tokenizer|processor|config)_(args|kwargs)"
# of these, for vectors
_HARMLESS = {"trust_remote_code", "attn_implementation", "add_pooling_layer"}


class Pipeline(NamedTuple):
    """The processing of a model's vectors."""

    settings: TaskConfig
    params: Params  # of the projection, if there is one
    notes: list[str]
    tokenizer: Tokenizer | None = None  # in place of the directory's, where prompts are tokens


def read_pipeline(folder: Folder, model: ModelConfig, lowercase: bool) -> Pipeline | None:
    """Returns the modules around a model in a directory; None if there are none. `lowercase` is its tokenizer's.

    Symbolic links are followed, also out of the directory: the hub's own cache consists of them.

    Raises: InputError, with its name, for a module or an option that cannot be computed here or is not there.
    """
    home = home_of(folder)
    if MODULES not in home:
        return None
    about = home.object(ABOUT)
    where = home / ABOUT
    modules = modules_of(home, folder)
    kinds = [kind for kind, _ in modules]
    if about.get("model_type") == "CrossEncoder" and kinds == ["Transformer"]:
        return None  # a reranker, a model with a head as others are
    if not re.fullmatch("Transformer Pooling( Dense)?( Normalize)?", " ".join(kinds)):
        what = f"the modules {', '.join(kinds) or 'of an empty list'}, in this order"
        raise InputError(f"{home / MODULES} has {what}, which cannot be computed here; {ALONE}")
    allow(about, {"model_type": (None, "SentenceTransformer")}, where)
    prompts, notes = read_prompts(about, where)
    similarity = about.get("similarity_fn_name")
    if similarity not in (None, "cosine", "dot" if "Normalize" in kinds else None):
        notes.append(
            f"similarity_fn_name {shown(similarity)} is not kept; vectors are compared by their cosine here"
        )
    kept = about.get("truncate_dim")
    if kept is not None:
        number = Annotated[int, schema.Meta(ge=1)]
        schema.check(kept, number, f"{where}: truncate_dim", "correct it")
    folders = dict(modules)
    poolings = _poolings(folders["Pooling"], any(prompts.values()))
    options: dict[str, Any] = {"pooling": ",".join(poolings), "normalize": "Normalize" in kinds}
    params: Params = {}
    if "Dense" in folders:
        dense, params = read_dense(folders["Dense"], model.hidden_size * len(poolings))
        options |= dense
        notes += find_not_finite(params, folders["Dense"] / WEIGHTS)
    # One that is no smaller than the vector cuts nothing.
    if kept is not None and kept < EmbeddingConfig(**options).vector_size(model.hidden_size):
        options["kept_dimensions"] = kept
    if "Normalize" in folders:
        where = folders["Normalize"] / "config.json"
        allow(folders["Normalize"].object("config.json"), _OF_ALL, where)
    check_transformer(folder)
    length = read_length(folder, model, lowercase)
    embedding = EmbeddingConfig(**options, **prompts)
    settings = TaskConfig(name="embeddings", max_seq_length=length, embedding=embedding)
    return Pipeline(settings, params, notes)


def home_of(folder: Folder) -> Folder:
    """Returns the folder with the list of modules, of a model's: older versions have the model in one of its own."""
    inside = re.fullmatch(r"\d+_Transformer", folder.path.name)
    return open_folder(folder.path.parent) if inside else folder


def modules_of(home: Folder, of_model: Folder) -> list[tuple[str, Folder]]:
    """Returns the kind and the folder of each module, one without files where there is none."""
    path = home / MODULES
    modules = []
    with reading(str(path)):
        listed = [(module["type"], module["path"]) for module in home.json(MODULES)]
    for kind, place in listed:
        own = re.fullmatch(_TYPES, str(kind))
        if own is None:
            raise InputError(
                f"{path} has the module {shown(kind)}, which cannot be computed here; {ALONE}"
            )
        if place != "":
            schema.check(place, schema.FileName, f"{path}: the path of {own[1]}", "copy it again")
        folder = home.inside(place)
        if own[1] != "Dropout":  # which does nothing after training
            modules.append((own[1], folder))
    if modules and modules[0][0] == "Transformer":
        inner = modules[0][1]
        # The path may lead to the same place through links, as in the hub's cache.
        if not (inner is of_model or (inner.names and os.path.samefile(inner.path, of_model.path))):
            raise InputError(
                f"{path} has its Transformer in {inner.path}, not here; give that folder"
            )
    return modules


def allow(about: JsonObject, options: Mapping[str, tuple], where: Path) -> None:
    """Raises: InputError if an option has another value than those that it may have; () allows any."""
    for option, allowed in options.items():
        if allowed and about.get(option) not in allowed:
            raise cannot(where, option, about.get(option))


def cannot(where: Path, option: str, value: object) -> InputError:
    """Returns the error for an option with a value that cannot be computed here."""
    return InputError(f"{where}: {option} {shown(value)} cannot be computed here; {ALONE}")


def config_of(folder: Folder, options: Mapping[str, tuple]) -> tuple[JsonObject, Path]:
    """Returns the options of a module, and their file. Raises: InputError if one is unknown, or as `_allow`."""
    where = folder / "config.json"
    folder.json("config.json")  # which must be there
    about = folder.object("config.json")
    for option in about.keys() - options.keys():
        if about[option] is not None:
            raise InputError(
                f"{where} has the option {shown(option)}, which is not known here; {ALONE}"
            )
    allow(about, options, where)
    return about, where


def read_reranker(
    folder: Folder, settings: JsonObject, model: ModelConfig, lowercase: bool, num_outputs: int
) -> tuple[TaskConfig | None, list[str]]:
    """Returns the task of a reranker with one output, if it is not the usual one, and notes.

    `settings` are those of config.json. As sentence-transformers' CrossEncoder has it, the output passes through the
    sigmoid if no file says otherwise; one that transformers calls a regression does not.

    Raises: InputError for an activation that cannot be computed here.
    """
    about = folder.object(ABOUT) if MODULES in folder else {}
    older = settings.get("sbert_ce_default_activation_function")
    of_library = settings.get("sentence_transformers")
    named = of_library.get("activation_fn") if isinstance(of_library, Mapping) else None
    given = [str(name) for name in (about.get("activation_fn"), named or older) if name is not None]
    notes = [
        f"the activation {shown(name)} is code of the model's own, which is not run"
        for name in given
        if not name.startswith("torch.")
    ]
    if about.get("default_prompt_name"):
        notes.append(
            f"default_prompt_name {shown(about['default_prompt_name'])} is not kept; write it before the texts"
        )
    name = next((name for name in given if name.startswith("torch.")), "")
    activation = _activation(name)
    because = "as its files say"
    if name and activation in ("", "gelu"):
        raise InputError(
            f"{folder.path}: the activation {shown(name)} cannot be computed here; use torch.nn.Identity"
        )
    if num_outputs > 1:
        if activation not in ("", "none"):
            notes.append(
                f"the activation {activation} is not applied: predictions are probabilities by softmax"
            )
        return None, notes
    if not name and settings.get("problem_type") == "regression":
        activation = "none"
        because = "its problem_type is regression; CrossEncoder would give its sigmoid"
    elif not name:
        activation = "sigmoid"
        because = "by default"
    what = "output" if activation == "none" else f"{activation} of the output"
    notes.append(f"the number that is predicted is the {what}, {because}")
    length = read_length(folder, model, lowercase)
    if activation == "none" and length == model.max_positions:
        return None, notes
    activation = activation.removesuffix("none")
    return TaskConfig(name="regression", max_seq_length=length, activation=activation), notes


def activation_path(activation: str) -> str:
    """Returns the name of torch's class of a `TaskConfig.activation`."""
    return ACTIVATIONS[activation or "none"]


def _activation(name: object) -> str:
    """Returns our name of a class of torch, given one of its two names; "" if there is none."""
    classes = {path.rpartition(".")[2]: (path, ours) for ours, path in ACTIVATIONS.items()}
    short = str(name).rpartition(".")[2]
    path, ours = classes.get(short, ("", ""))
    return ours if name in (path, f"torch.nn.{short}") else ""


def write_pipeline(directory: Path, settings: TaskConfig, params: Params) -> None:
    """Writes the modules around the model that is in a directory, of whose `params` the projection is one's own."""
    embedding = settings.embedding
    poolings = embedding.poolings()
    size = embedding.projection_size
    pooling: JsonObject = {old: ours in poolings for old, ours in _OLD.items()}
    pooling["word_embedding_dimension"] = len(params["encoder"]["embeddings"]["norm"]["scale"])
    # an order that versions before 6 do not know
    if poolings != [ours for ours in _POOLINGS if ours in poolings]:
        pooling["pooling_mode"] = [_POOLINGS[ours][1] for ours in poolings]
    configs: dict[str, JsonObject] = {"Transformer": {}, "Pooling": pooling}
    if size:
        configs["Dense"] = {
            "in_features": len(params["projection"]["kernel"]),
            "out_features": size,
            "bias": True,
            "activation_function": ACTIVATIONS[embedding.projection_activation],
        }
    if embedding.normalize:
        configs["Normalize"] = {}
    modules = []
    for number, (kind, config) in enumerate(configs.items()):
        path = f"{number}_{kind}" if number else ""
        (directory / path).mkdir(exist_ok=True)
        if config:
            write_json(directory / path / "config.json", config)
        if kind == "Dense":
            weight = np.array(params["projection"]["kernel"]).T.copy()
            arrays = {
                "linear.weight": weight,
                "linear.bias": np.asarray(params["projection"]["bias"]),
            }
            # one file: a module has no shards
            write_weights(directory / path, arrays, max_bytes=1 << 40)
        modules.append((path, f"sentence_transformers.models.{kind}"))
    about: JsonObject = {"model_type": "SentenceTransformer", "similarity_fn_name": "cosine"}
    if embedding.kept_dimensions:
        about["truncate_dim"] = embedding.kept_dimensions
    write_about(directory, settings, modules, about)


def write_about(
    directory: Path, settings: TaskConfig, modules: Sequence[tuple[str, str]], about: JsonObject
) -> None:
    """Writes the list of modules (path, type), what is said about all of them, the prompts and the length."""
    embedding = settings.embedding
    prompts = json.loads(embedding.other_prompts or "{}")
    prompts |= {QUERY: embedding.query_prompt, PASSAGES[0]: embedding.passage_prompt}
    default = embedding.default_prompt or None
    of_prompts = {
        "prompts": prompts,
        "default_prompt_name": default if default in (None, *prompts) else PASSAGES[0],
    }
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": own}
        for number, (path, own) in enumerate(modules)
    ]
    length = {"max_seq_length": settings.max_seq_length, "do_lower_case": False}
    write_json(directory / ABOUT, about | of_prompts)
    write_json(directory / LENGTH, length)
    write_json(directory / MODULES, listed)


def read_prompts(about: JsonObject, where: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of prompts, and notes."""
    prompts = about.get("prompts") or {}
    default = about.get("default_prompt_name")
    schema.check(prompts, dict[str, str | None], f"{where}: prompts", "correct them")
    if default not in (None, QUERY, PASSAGES[0], *prompts):
        raise InputError(
            f"{where}: default_prompt_name {shown(default)} is not the name of a prompt; correct it"
        )
    texts = {name: text for name, text in prompts.items() if text}
    passage = next((name for name in PASSAGES if name in texts), "")
    notes = []
    if passage not in ("", PASSAGES[0]):
        notes.append(
            f"passages take the prompt named {passage}, as there is none named document; sentence-transformers' "
            "encode_document gives them none"
        )
    # an empty prompt is as good as none
    if default not in texts:
        default = ""
    settings = {
        "query_prompt": texts.pop(QUERY, ""),
        "passage_prompt": texts.pop(passage, ""),
        "default_prompt": PASSAGES[0] if default and default == passage else default,
        "other_prompts": json.dumps(texts, ensure_ascii=False) if texts else "",
    }
    return settings, notes


def check_prompts(settings: TaskConfig, tokenizer: Tokenizer, where: object) -> None:
    """Raises: InputError if a prompt has a token such as [SEP], which is text here and a token to the library."""
    for name, prompt in settings.embedding.prompts().items():
        ids = tokenizer.encode(prompt, allow_special=True)
        if ids != tokenizer.encode(prompt) and set(ids) & set(tokenizer.special_ids):
            raise InputError(
                f"{where}: the prompt {name} is {shown(prompt)}, with a special token that is text here and a token to "
                "sentence-transformers, so vectors would differ; use other words"
            )


def _poolings(folder: Folder, has_prompts: bool) -> list[str]:
    """Returns the names of what stands side by side in a vector."""
    about, where = config_of(folder, _POOLING)
    modes: Any = about.get("pooling_mode", "mean")  # the default there
    if "pooling_mode" not in about and about.keys() & _OLD.keys():
        # In the order in which sentence-transformers joins them, which is not that of the file.
        modes = [_POOLINGS[ours][1] for name, ours in _OLD.items() if about.get(name) is True]
    modes = [modes] if isinstance(modes, str) else modes
    known = {theirs: ours for ours, (_, theirs) in _POOLINGS.items()}
    if not isinstance(modes, list) or not modes or not all(mode in list(known) for mode in modes):
        raise cannot(where, "pooling_mode", modes)
    if not about.get("include_prompt", True) and has_prompts:
        raise cannot(where, "include_prompt", False)
    return [known[mode] for mode in modes]


def read_dense(
    folder: Folder, input_size: int, options: Mapping[str, tuple] = DENSE
) -> tuple[dict[str, Any], Params]:
    """Returns the settings of a dense layer, and its parameters."""
    about, where = config_of(folder, options)
    given = about.get("activation_function", ACTIVATIONS["tanh"])
    activation = _activation(given)
    if activation in ("", "sigmoid"):
        raise cannot(where, "activation_function", given)
    tensors = read_tensors(folder)
    size = about.get("out_features")
    shapes = {"linear.weight": (size, input_size), "linear.bias": (size,)}
    if about.get("bias") is False:
        del shapes["linear.bias"]
    if {name: tensor.shape for name, tensor in tensors.items()} != shapes:
        wanted = f"{' and '.join(shapes)} of {input_size} inputs and {shown(size)} outputs"
        raise InputError(
            f"{folder.path} has other tensors than {wanted}, as {where.name} asks for; copy both again"
        )
    weight = tensors["linear.weight"]
    parts = {"kernel": weight.T, "bias": tensors.get("linear.bias", np.zeros(len(weight)))}
    with np.errstate(over="ignore"):  # of float64; a note tells
        arrays = {name: np.ascontiguousarray(part, np.float32) for name, part in parts.items()}
    settings = {"projection_size": len(weight), "projection_activation": activation}
    return settings, {"projection": arrays}


def check_transformer(
    folder: Folder,
    options: Mapping[str, tuple] = TRANSFORMER,
    forward: JsonObject = FORWARD,
) -> None:
    """Raises: InputError if a model is not used as it is here: as an encoder, if nothing else is given."""
    about, where = options_of_transformer(folder)
    allow(about, options, where)
    modalities = about.get("modality_config", {"text": forward})
    if not isinstance(modalities, dict) or modalities.get("text") != forward:
        raise cannot(where, "modality_config", modalities)
    for option, value in about.items():
        if re.fullmatch(_ARGUMENTS, option) and not set(value or ()) <= _HARMLESS:
            raise cannot(where, option, value)


def options_of_transformer(folder: Folder) -> tuple[JsonObject, Path]:
    """Returns how the model is used, {} if no file says it, and the file."""
    name = next((name for name in _LENGTHS if folder.object(name)), LENGTH)
    return folder.object(name), folder / name


def read_length(folder: Folder, model: ModelConfig, lowercase: bool) -> int:
    """Returns the largest number of tokens of a text; version 6 stores it with the tokenizer."""
    about, where = options_of_transformer(folder)
    if about.get("do_lower_case") and not lowercase:
        raise cannot(where, "do_lower_case beside a cased tokenizer", True)
    of_tokenizer = folder.object("tokenizer_config.json").get("model_max_length")
    limit = about.get("max_seq_length") or of_tokenizer or model.max_positions
    number = Annotated[float, schema.Meta(ge=0)]
    schema.check(limit, number, f"{where}: max_seq_length", "correct it")
    return int(min(limit, model.max_positions))
