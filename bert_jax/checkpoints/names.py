# SPDX-License-Identifier: Apache-2.0
"""From our parameters to arrays with Hugging Face's or Google's names, by the tables of `families`, and back.

Our arrays stack the layers on a leading axis and pad the vocabulary; theirs have one array per layer and no padding.
"""

import re
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import PyTree
from bert_jax.checkpoints.families import FAMILIES, Parameter, table_of
from bert_jax.devices.sharding import is_stacked, path_name
from bert_jax.errors import InputError
from bert_jax.model.objective import Params
from bert_jax.model.shapes import abstract_params
from bert_jax.settings.model import ModelConfig
from bert_jax.text.tokenizer import Tokenizer

Arrays: TypeAlias = dict[str, np.ndarray]
Form: TypeAlias = Literal["hf", "tf1"]  # Hugging Face's or Google's names
Where: TypeAlias = str | Path  # a file, for messages


class Imported(NamedTuple):
    """A model loaded from another format."""

    config: ModelConfig
    params: Params  # float32 on the host; the parts that the source has, and no others
    tokenizer: Tokenizer
    task: str  # of the head, one of `HEADS`
    # the names of a classifier's classes, in their order; () if the source names none
    labels: tuple[str, ...]
    notes: tuple[str, ...]  # lines that the user should see
    # Hugging Face's problem_type, if it does not follow from the number of outputs
    problem: str = ""
    task_settings: Mapping[str, Any] = types.MappingProxyType({})  # as those of `Pretrained`


TABLE = table_of("bert")
_OLD_LEAVES = {"gamma": "weight", "beta": "bias"}  # of layer norms

# Tensors that are ignored, since the model does not compute with them. `hf_weights` checks that Hugging Face's tied
# output table and bias equal the tensors that they repeat.
IGNORED: dict[str, tuple[str, ...]] = {
    "hf": (
        r"\w+\.embeddings\.(position_ids|token_type_ids)",
        *(re.escape(name) for of in FAMILIES.values() for name in of.tied if name),
        *(re.escape(name) + ".*" for of in FAMILIES.values() for name in of.unread),
    ),
    # The moments of Google's, NVIDIA's and TensorFlow's own optimizers; their steps; the scale of the loss in float16.
    "tf1": (
        r".*/((adam|lamb)_[mv]|(Adam\w*?|LAMB\w*?|Momentum|RMSProp|Adagrad|Adadelta)(_\d+)?)",
        r"global_step|beta[12]_power",
        r"current_loss_scale|good_steps",
    ),
}


def canonical_names(
    names: Iterable[str], form: Form, where: Where, family: str = "bert", kind: str = ""
) -> dict[str, str]:
    """Returns {name as in the family's table: name in the file}.

    Hugging Face's may lack "bert." (as in the bare encoder) and may call the parameters of layer norm gamma
    and beta (as before 2019). The class of the model, `kind`, may have names of its own, and makes tensors
    that these replace idle. Raises: InputError if two names mean the same.
    """
    known: dict[str, str] = {}
    names, of = list(names), FAMILIES[family]
    renamed = of.names_in(kind, names)
    idle = set(renamed.values()) - renamed.keys()
    for name in names:
        canonical = name
        if form == "hf":
            module, dot, leaf = name.rpartition(".")
            if module in idle:
                continue
            module = renamed.get(module, module)
            canonical = (
                module
                + dot
                + (_OLD_LEAVES.get(leaf, leaf) if module.endswith("LayerNorm") else leaf)
            )
            if re.match(
                r"(embeddings|embeddings_project|embed_tokens|encoder|pooler|transformer|layers|norm|final_norm)\.",
                canonical,
            ):
                canonical = f"{of.base}.{canonical}"
        if canonical in known:
            raise InputError(
                f"{where}: {known[canonical]} and {name} are two names of one tensor; remove one of them"
            )
        known[canonical] = name
    return known


def to_params(
    read: Callable[[str], np.ndarray],
    shapes: Mapping[str, Sequence[int]],
    form: Form,
    config: ModelConfig,
    where: Where,
    kind: str = "",
) -> Params:
    """Returns our parameters, float32 on the host, of the parts that the source has: the encoder and some heads.

    Args:
      read: name in the file -> array, called once for each tensor that is used.
      shapes: of all tensors of the source, by their names there.
      form: "hf" or "tf1".
      config: the model; its shapes must match the tensors.
      where: the file, for messages.
      kind: the class of the model in transformers, if known.
    Raises: InputError, before any tensor is read, that lists the tensors that are missing, unknown or misshapen.
    """
    names = canonical_names(shapes, form, where, config.family, kind)
    if config.num_stacked > len(names):
        # maybe more than memory can hold
        layers = f"the {config.num_stacked} layers of the configuration beside it"
        raise InputError(
            f"{where} has {len(names)} tensors, too few for {layers}; take both from one place"
        )
    # The number of classes is in no configuration of Google's. Their bias has it, in every format.
    bias = names.get(next(row for row in TABLE if row.ours == "classifier/bias").names(form, 0)[0])
    num_classes = int(shapes[bias][0]) if bias and len(shapes[bias]) == 1 else 1
    expected = flatten(abstract_params(config, num_classes))
    rows = [row for row in table_of(config.family, config.feed_forward) if row.ours in expected]
    wanted = {row.ours: row.names(form, config.num_stacked * is_stacked(row.ours)) for row in rows}
    present = _parts_of(wanted, names.keys())

    rows = [row for row in rows if part_of(row.ours) in present]
    _check_names(names, {name for row in rows for name in wanted[row.ours]}, form, where)
    for row in rows:
        shape = expected[row.ours].shape[is_stacked(row.ours) :]
        if row.kind == "vocab":
            shape = (config.vocab_size, *shape[1:])
        if row.is_flipped(form):
            shape = shape[::-1]
        shape = (shape[0] * row.piece[1], *shape[1:])
        for name in wanted[row.ours]:
            if tuple(shapes[names[name]]) != shape:
                given = f"{names[name]} has shape {tuple(shapes[names[name]])}"
                raise InputError(
                    f"{where}: {given}, the configuration beside it {shape}; take both from one place"
                )

    # Made once, and filled tensor by tensor: a model takes its own memory and that of one tensor.
    flat = {row.ours: np.zeros(expected[row.ours].shape, np.float32) for row in rows}
    # by tensor: views of the arrays that it fills
    targets: dict[str, list[tuple[Parameter, np.ndarray]]] = {}
    for row in rows:
        array = flat[row.ours]
        slices = [array[i] for i in range(len(array))] if is_stacked(row.ours) else [array]
        for target, name in zip(slices, wanted[row.ours], strict=True):
            targets.setdefault(name, []).append((row, target))
    for name, of_tensor in targets.items():
        whole = read(names[name])
        if not jnp.issubdtype(whole.dtype, jnp.floating):
            raise InputError(
                f"{where}: {names[name]} holds {whole.dtype}; save a quantized model in floating point"
            )
        for row, target in of_tensor:
            number, pieces = row.piece
            value = np.split(whole, pieces)[number]
            value = value.T if row.is_flipped(form) else value
            with np.errstate(over="ignore"):  # of float64; `find_not_finite` reports it
                target[: len(value)] = value
    return unflatten(flat)


def _parts_of(wanted: Mapping[str, Sequence[str]], names: Collection[str]) -> set[str]:
    """Returns the parts in a file: parts with a tensor that no other part has, then parts of the remaining tensors.

    `wanted` are the names of our parameters there. ModernBERT's classifiers and its masked language model share some.
    """
    of_parts: dict[str, set[str]] = {}
    for ours, there in wanted.items():
        of_parts.setdefault(part_of(ours), set()).update(there)
    counts = Counter(name for there in of_parts.values() for name in there)
    own = {part: {name for name in there if counts[name] == 1} for part, there in of_parts.items()}
    present = {part for part in of_parts if own[part] & set(names)} | {"encoder"}
    taken = {name for part in present for name in of_parts[part]}
    return present | {
        part for part, there in of_parts.items() if not own[part] and there & set(names) - taken
    }


def from_params(params: Params, form: Form, config: ModelConfig) -> Arrays:
    """Returns {name: float32 array} of all parameters in a format, "hf" or "tf1"; the inverse of `to_params`."""
    flat = flatten(params)
    rows = {row.ours: row for row in table_of(config.family, config.feed_forward)}
    pieces: dict[str, list[np.ndarray]] = {}
    # so that the parts of a tensor are joined in their order
    for ours in sorted(flat, key=lambda ours: rows[ours].piece if ours in rows else (0, 0)):
        if ours not in rows:
            raise InputError(
                f"{ours} is a parameter of an own head or a probe, which has no name there; it stays here"
            )
        row = rows[ours]
        array = np.asarray(flat[ours], np.float32)
        names = row.names(form, config.num_stacked * is_stacked(ours))
        for part, name in zip(array if is_stacked(ours) else [array], names, strict=True):
            part = part[: config.vocab_size] if row.kind == "vocab" else part
            pieces.setdefault(name, []).append(part.T if row.is_flipped(form) else part)
    return {
        name: np.ascontiguousarray(np.concatenate(of) if len(of) > 1 else of[0])
        for name, of in pieces.items()
    }


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, where: Where) -> None:
    """Raises: InputError if the word table has fewer rows than there are tokens, or 1,024 more.

    Many models round the size up to a multiple of 8, 64 or 128, and some have up to 1,000 rows that belong to no token.
    """
    tokens = tokenizer.vocab_size
    if not 0 <= vocab_size - tokens < 1024:
        two = f"the vocabulary has {tokens} tokens and the table of words {vocab_size} rows"
        raise InputError(f"{where}: {two}; take both from one place")


def find_not_finite(params: Params, where: Where) -> list[str]:
    """Returns a line that the user should see if a parameter holds NaN or infinity, which no trained model has."""
    bad = [ours for ours, leaf in flatten(params).items() if not np.isfinite(leaf).all()]
    what = "NaN or numbers beyond float32, so its outputs are meaningless"
    return [f"{where}: {_listed(bad)} hold{'s' * (len(bad) == 1)} {what}"] if bad else []


def part_of(ours: str) -> str:
    """Returns the part that a parameter belongs to: "encoder", "pooler" or the name of a head."""
    return "pooler" if ours.startswith("encoder/pooler/") else ours.partition("/")[0]


def flatten(params: Params) -> dict[str, PyTree]:
    """Returns {path: leaf} of nested dicts."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def unflatten(flat: Mapping[str, PyTree]) -> Params:
    """Returns nested dicts of {path: leaf}."""
    params: Params = {}
    for path, leaf in flat.items():
        *folders, last = path.split("/")
        node = params
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = leaf
    return params


def _check_names(names: Mapping[str, str], used: set[str], form: Form, where: Where) -> None:
    missing = sorted(used - names.keys())
    unknown = sorted(
        there
        for name, there in names.items()
        if name not in used and not any(re.fullmatch(pattern, name) for pattern in IGNORED[form])
    )
    if missing or unknown:
        lacks = f"lacks {len(missing)} tensors of this model: {_listed(missing)}"
        more = f"holds {len(unknown)} tensors that this model has no place for: {_listed(unknown)}"
        problems = " and ".join([lacks] * bool(missing) + [more] * bool(unknown))
        raise InputError(
            f"{where} {problems}; it is another kind of model, or its configuration is not its own"
        )


def _listed(names: Sequence[str], most: int = 12) -> str:
    """Returns the first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
