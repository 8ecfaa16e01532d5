# SPDX-License-Identifier: Apache-2.0
"""Directories of models with a vector for each token: sentence-transformers' MultiVectorEncoder, PyLate's, ColBERT's.

The modules stand around the model as those of one vector do: a dense layer, which tokens count, normalization. PyLate
keeps all but the layer in config_sentence_transformers.json. Stanford's ColBERT has no modules: the layer is a tensor
beside the model's, and the rest is in artifact.metadata.
"""

import json
import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import numpy as np

from bert_jax.checkpoints.hf_extras import MODULES
from bert_jax.checkpoints.hf_weights import WEIGHTS, write_weights
from bert_jax.checkpoints.names import find_not_finite
from bert_jax.checkpoints.sentence_transformers import (
    ABOUT,
    ACTIVATIONS,
    ALONE,
    DENSE,
    FORWARD,
    LENGTH,
    PASSAGES,
    QUERY,
    TRANSFORMER,
    Pipeline,
    allow,
    cannot,
    check_transformer,
    config_of,
    home_of,
    modules_of,
    options_of_transformer,
    read_dense,
    read_length,
    read_prompts,
)
from bert_jax.errors import InputError, shown
from bert_jax.model.objective import Params
from bert_jax.settings.finetuning import EmbeddingConfig, TaskConfig
from bert_jax.settings.model import ModelConfig
from bert_jax.storage import schema
from bert_jax.storage.files import JsonObject
from bert_jax.storage.folder import Folder
from bert_jax.storage.writing import write_json
from bert_jax.text.hf_tokenizer import with_prompt_tokens
from bert_jax.text.tokenizer import Tokenizer

# of Stanford's ColBERT: the class of its models, and the layer among their tensors
STANFORD = "HF_ColBERT"
LAYER = "linear.weight"
_METADATA = "artifact.metadata"
_TOKENS = "token_embeddings"
_OURS = "MultiVectorEncoder"
_PYLATE = "ColBERT"
_PREFIXES = {
    QUERY: "query_prefix",
    PASSAGES[0]: "document_prefix",
}  # of PyLate's, by the name of the prompt
_OF_PYLATE = (*_PREFIXES.values(), "do_query_expansion", "attend_to_expansion_tokens")
_PUNCTUATION = list(string.punctuation)
_ORDER = "Transformer( Dense)?(( MultiVectorMask)?( Normalize)?| Normalize MultiVectorMask)"
_TYPES = "sentence_transformers.base.modules."
_KINDS = {
    "Transformer": f"{_TYPES}transformer.Transformer",
    "Dense": f"{_TYPES}dense.Dense",
    "MultiVectorMask": "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask",
    "Normalize": f"{_TYPES}normalize.Normalize",
}
_KINDS_OF_PYLATE = {
    "Transformer": "sentence_transformers.models.Transformer",
    "Dense": "pylate.models.Dense.Dense",
}

# The options of each module, and the values that are computed here; () is read below.
_OF_ALL: dict[str, tuple] = dict.fromkeys(
    ("module_input_name", "module_output_name"), (None, _TOKENS)
)
_DENSE = DENSE | _OF_ALL | {"bias": (None, False)}
_MASK = {
    "skiplist_words": (),
    "skiplist_tasks": (None, ["document"]),
    "keep_only_token_ids": (None,),
}
_LENGTHS = ("query_length", "document_length")
_TRANSFORMER = TRANSFORMER | dict.fromkeys((*_LENGTHS, "query_expansion"), ())
_Length = Annotated[int, schema.Meta(ge=5)]

# What artifact.metadata says of vectors, with Stanford's defaults.
_USUAL: JsonObject = {
    "dim": 128,
    "query_token_id": "[unused0]",
    "doc_token_id": "[unused1]",
    "query_maxlen": 32,
    "doc_maxlen": 220,
    "attend_to_mask_tokens": False,
    "mask_punctuation": True,
}
# what it says of scores, and the values that are computed here
_SCORED = {
    "similarity": (None, "cosine"),
    "interaction": (None, "colbert"),
    "pool_factor": (None, 0, 1),
}
# what training, indexes and processes were told, and how a prefix is shown
_OF_OTHERS = """
    query_token doc_token checkpoint triples collection queries index_name overwrite root experiment index_root name
    rank nranks amp gpus avoid_fork_if_possible bsize accumsteps lr maxsteps save_every resume warmup warmup_bert relu
    nway use_ib_negatives reranker distillation_alpha ignore_scores model_name index_path index_bsize nbits
    kmeans_niters clustering_mode protected_tokens ncells centroid_score_threshold ndocs load_index_with_mmap meta
""".split()


class _Metadata(TypedDict):
    query_token_id: str
    doc_token_id: str
    query_maxlen: _Length
    doc_maxlen: _Length
    attend_to_mask_tokens: bool
    mask_punctuation: bool


class _Expansion(TypedDict):
    strategy: Literal["fixed", "min"]
    length: _Length
    attend: NotRequired[bool | None]
    token: NotRequired[str | None]


def read_multi_vector(
    folder: Folder,
    model: ModelConfig,
    tokenizer: Tokenizer,
    layer: np.ndarray | None,
) -> Pipeline | None:
    """Returns what stands around a model in a directory; None if it is not one of vectors of tokens.

    `layer` [D, H] is the dense layer of a directory of Stanford's.

    Raises: InputError, with its name, for a module or an option that cannot be computed here or is not there.
    """
    home = home_of(folder)
    notes: list[str] = []
    params: Params = {}
    if MODULES in home:
        about = home.object(ABOUT)
        where = home / ABOUT
        layer = None
    elif layer is not None:
        about, notes = _about_of_stanford(folder, layer, model)
        where = folder / _METADATA
    else:
        return None
    kind = about.get("model_type")
    is_pylate = kind == _PYLATE or any(name in about for name in _OF_PYLATE)
    if kind != _OURS and not is_pylate:
        return None
    folders = {} if layer is not None else _folders_of(home, folder)
    allow(about, {"similarity_fn_name": (None, "maxsim", "MaxSim")}, where)
    options: dict[str, Any] = {"normalize": "Normalize" in folders or is_pylate}
    if "Dense" in folders:
        dense, params = read_dense(folders["Dense"], model.hidden_size, _DENSE)
        del params["projection"]["bias"]
        options |= dense
        notes += find_not_finite(params, folders["Dense"] / WEIGHTS)
    elif layer is not None:
        with np.errstate(over="ignore"):  # of float64; a note tells
            params = {"projection": {"kernel": np.ascontiguousarray(layer.T, np.float32)}}
        options |= {"projection_size": len(layer), "projection_activation": "none"}
        notes += find_not_finite(params, folder.path)
    if "Normalize" in folders:
        config = folders["Normalize"].object("config.json")
        allow(config, _OF_ALL, folders["Normalize"] / "config.json")
    words = about.get("skiplist_words")
    of_words = where
    if words is None and is_pylate:
        words = _PUNCTUATION
    if "MultiVectorMask" in folders:
        mask, of_words = config_of(folders["MultiVectorMask"], _MASK)
        words = mask.get("skiplist_words")
    schema.check(words or [], list[str], f"{of_words}: skiplist_words", "correct them")
    unknown = [word for word in words or [] if word not in tokenizer.pieces.ids]
    if unknown:
        notes.append(
            f"of skiplist_words the vocabulary lacks {' '.join(unknown)[:80]}, so they leave out nothing"
        )
    options["skipped_words"] = "punctuation" if words == _PUNCTUATION else ""
    if words and words != _PUNCTUATION:
        options["skipped_words"] = json.dumps(words, ensure_ascii=False)
    check_transformer(folder, _TRANSFORMER)
    prompts, more = read_prompts(_with_prefixes(about), where)
    length = read_length(folder, model, tokenizer.lowercase)
    of_model, of_lengths = options_of_transformer(folder)
    if is_pylate:
        of_model, of_lengths = of_model | _expansion_of_pylate(about), where
    for name in _LENGTHS:
        schema.check(of_model.get(name), _Length | None, f"{of_lengths}: {name}", "correct it")
    options |= _lengths_of_queries(of_model, of_lengths, length, tokenizer)
    if model.family == "deberta-v2" and options["query_expansion"] > 0:
        if not options["expansion_is_seen"]:
            notes.append(
                "in transformers' DeBERTa a [MASK] that fills up a query sees all tokens evenly, and here it sees the "
                "query, so vectors of such tokens differ"
            )
    most = min(of_model.get("document_length") or length, model.max_positions)
    options["query_length"] = min(options["query_length"], model.max_positions)
    embedding = EmbeddingConfig(kind="multi_vector", **options, **prompts)
    settings = TaskConfig(name="embeddings", max_seq_length=most, embedding=embedding)
    prefixes = [about.get(name) or "" for name in _PREFIXES.values()]
    finds = with_prompt_tokens(tokenizer, prefixes)
    for prefix in prefixes:
        token = prefix.strip()
        if layer is not None and finds.encode(prefix) != [finds.pieces.ids.get(token)]:
            raise InputError(
                f"{where}: {shown(token)} is no token that the tokenizer finds in a text; copy both again"
            )
    return Pipeline(settings, params, [*notes, *more], finds)


def _folders_of(home: Folder, folder: Folder) -> dict[str, Folder]:
    """Returns the folder of each module. Raises: InputError if they stand in an order that is not computed here."""
    modules = modules_of(home, folder)
    kinds = " ".join(kind for kind, _ in modules)
    if not re.fullmatch(_ORDER, kinds):
        what = f"the modules {kinds.replace(' ', ', ') or 'of an empty list'}, in this order"
        raise InputError(f"{home / MODULES} has {what}, which cannot be computed here; {ALONE}")
    return dict(modules)


def _about_of_stanford(
    folder: Folder,
    layer: np.ndarray,
    model: ModelConfig,
) -> tuple[JsonObject, list[str]]:
    """Returns what artifact.metadata says, as PyLate has it, and notes.

    Raises: InputError for what cannot be computed here, or does not fit the model.
    """
    where = folder / _METADATA
    folder.json(_METADATA)  # which must be there
    given = {name: each for name, each in folder.object(_METADATA).items() if each is not None}
    about = _USUAL | given
    schema.check(about, _Metadata, where, "correct it")
    for option, allowed in _SCORED.items():
        if about.get(option) not in allowed:
            raise InputError(
                f"{where}: {option} {shown(about[option])} cannot be computed here; it can be {allowed[-1]}"
            )
    shape = list(layer.shape)
    size = [about["dim"], model.hidden_size]
    if shape != size:
        raise InputError(
            f"{folder.path}: {LAYER} has the shape {shape}, and dim and hidden_size are {size}; copy all again"
        )
    unknown = sorted(given.keys() - {*_USUAL, *_SCORED, *_OF_OTHERS})
    notes = [f"{where}: {shown(name)} is not known here" for name in unknown]
    as_pylate: JsonObject = {
        "model_type": _PYLATE,
        "query_prefix": about["query_token_id"] + " ",
        "document_prefix": about["doc_token_id"] + " ",
        "query_length": about["query_maxlen"],
        "document_length": about["doc_maxlen"],
        "attend_to_expansion_tokens": about["attend_to_mask_tokens"],
        "skiplist_words": _PUNCTUATION if about["mask_punctuation"] else [],
    }
    return as_pylate, notes


def _with_prefixes(about: JsonObject) -> JsonObject:
    """Returns the options with PyLate's prefixes as the beginning of prompts."""
    prompts = dict(about.get("prompts") or {})
    for name, prefix in _PREFIXES.items():
        before = about.get(prefix) or ""
        schema.check(before, str, prefix, "correct it")
        if before:
            prompts[name] = before + str(prompts.get(name) or "").removeprefix(before)
    return about | {"prompts": prompts}


def _expansion_of_pylate(about: JsonObject) -> JsonObject:
    """Returns lengths and query expansion as sentence-transformers has them."""
    lengths = {name: about.get(name) for name in _LENGTHS}
    if about.get("do_query_expansion") is False:
        return lengths
    expansion = {
        "strategy": "fixed",
        "attend": bool(about.get("attend_to_expansion_tokens")),
        "length": lengths.pop("query_length") or 32,
    }
    return lengths | {"query_expansion": expansion}


def _lengths_of_queries(
    about: Mapping[str, Any], where: Path, length: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Returns the settings of the length of queries, and of what fills them up. `length` is that of other texts."""
    expansion = about.get("query_expansion")
    most = about.get("query_length") or length
    if not expansion:
        return {"query_length": most, "query_expansion": 0}
    schema.check(expansion, _Expansion, f"{where}: query_expansion", "correct it")
    for name in expansion.keys() - _Expansion.__annotations__.keys():
        raise cannot(where, f"query_expansion.{name}", expansion[name])
    allow(expansion, {"token": (None, tokenizer.vocab[tokenizer.mask_id])}, where)
    filled = expansion["length"]
    return {
        "query_length": filled if expansion["strategy"] == "fixed" else max(most, filled),
        "query_expansion": filled,
        "expansion_is_seen": bool(expansion.get("attend")),
    }


def write_multi_vector(directory: Path, settings: TaskConfig, params: Params) -> None:
    """Writes sentence-transformers' modules around the model that is in a directory."""
    embedding = settings.embedding
    names = {"module_input_name": _TOKENS, "module_output_name": _TOKENS}
    configs: dict[str, JsonObject] = {"Transformer": {}}
    if embedding.projection_size:
        configs["Dense"] = _dense_config(embedding) | names
    configs["MultiVectorMask"] = {
        "skiplist_words": embedding.skipped(),
        "skiplist_tasks": ["document"],
        "keep_only_token_ids": None,
    }
    if embedding.normalize:
        configs["Normalize"] = names
    _write_modules(directory, configs, _KINDS, params)
    prompts = json.loads(embedding.other_prompts or "{}")
    prompts |= {QUERY: embedding.query_prompt, PASSAGES[0]: embedding.passage_prompt}
    default = embedding.default_prompt or None
    about: JsonObject = {
        "model_type": _OURS,
        "prompts": prompts,
        "similarity_fn_name": "maxsim",
        "default_prompt_name": default if default in (None, *prompts) else PASSAGES[0],
    }
    use: JsonObject = {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": FORWARD},
        "module_output_name": _TOKENS,
        "max_seq_length": settings.max_seq_length,
        "document_length": settings.max_seq_length,
        "query_length": embedding.query_length,
    }
    if filled := embedding.filled_length():
        use["query_expansion"] = {
            "strategy": "fixed" if filled == embedding.query_length else "min",
            "attend": embedding.expansion_is_seen,
            "token": None,
            "length": filled,
        }
    write_json(directory / ABOUT, about)
    write_json(directory / LENGTH, use)


def check_pylate(settings: TaskConfig | None, tokenizer: Tokenizer) -> None:
    """Raises: InputError if PyLate would compute other vectors than a model's, with what it cannot express."""
    if settings is None or settings.embedding.kind != "multi_vector":
        raise InputError(
            "PyLate's models have a vector for each token, and this one has not; use --to=sentence_transformers"
        )
    embedding = settings.embedding
    filled = embedding.filled_length()
    for prompt in (embedding.query_prompt, embedding.passage_prompt):
        if len(tokenizer.encode(prompt)) != 1:
            raise InputError(
                f"the prompt {prompt!r:.60} is {len(tokenizer.encode(prompt))} tokens, and PyLate has a token before "
                "queries and one before passages; use --to=sentence_transformers"
            )
    for wrong, what in (
        (not embedding.projection_size, "no dense layer"),
        (not embedding.normalize, "vectors of any length"),
        (filled not in (0, embedding.query_length), "queries that are filled up in part"),
    ):
        if wrong:
            raise InputError(f"PyLate has no model with {what}; use --to=sentence_transformers")


def write_pylate(
    directory: Path, settings: TaskConfig, params: Params, tokenizer: Tokenizer
) -> None:
    """Writes PyLate's modules around the model that is in a directory; `check_pylate` says which models it has."""
    embedding = settings.embedding
    dense = _dense_config(embedding) | {"use_residual": False}
    _write_modules(directory, {"Transformer": {}, "Dense": dense}, _KINDS_OF_PYLATE, params)
    prefixes = zip(_PREFIXES.values(), (embedding.query_prompt, embedding.passage_prompt))
    about: JsonObject = {
        "model_type": _PYLATE,
        "prompts": json.loads(embedding.other_prompts or "{}"),
        "similarity_fn_name": "MaxSim",
        "default_prompt_name": None,
        "query_length": embedding.query_length,
        "document_length": settings.max_seq_length,
        "do_query_expansion": bool(embedding.filled_length()),
        "attend_to_expansion_tokens": embedding.expansion_is_seen,
        "skiplist_words": embedding.skipped(),
    }
    # a prefix is the name of its token
    about |= {name: tokenizer.tokenize(prompt)[0] for name, prompt in prefixes}
    write_json(directory / ABOUT, about)
    write_json(directory / LENGTH, {"max_seq_length": settings.max_seq_length})


def _dense_config(embedding: EmbeddingConfig) -> JsonObject:
    return {
        "out_features": embedding.projection_size,
        "bias": False,
        "activation_function": ACTIVATIONS[embedding.projection_activation],
    }


def _write_modules(
    directory: Path, configs: dict[str, JsonObject], types: Mapping[str, str], params: Params
) -> None:
    """Writes the list of modules, and of each but the first its folder."""
    modules = []
    for number, (kind, config) in enumerate(configs.items()):
        path = f"{number}_{kind}" if number else ""
        modules.append({"idx": number, "name": str(number), "path": path, "type": types[kind]})
        if not number:
            continue
        (directory / path).mkdir(exist_ok=True)
        if kind == "Dense":
            weight = np.array(params["projection"]["kernel"]).T.copy()
            config = {"in_features": weight.shape[1]} | config
            # one file: a module has no shards
            write_weights(directory / path, {"linear.weight": weight}, max_bytes=1 << 40)
        write_json(directory / path / "config.json", config)
    write_json(directory / MODULES, modules)
