# SPDX-License-Identifier: Apache-2.0
"""The table of parameter names: ours, Hugging Face's and Google's, and how their arrays differ.

Our arrays stack the layers on a leading axis and pad the vocabulary; theirs have one array per layer and no padding.
Source: google-research/bert modeling.py, run_pretraining.py, run_classifier.py, run_squad.py; the keys of the state
dicts of transformers' modeling_bert.py.
"""

import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import PyTree
from bert_jax.devices.sharding import is_stacked, path_name
from bert_jax.errors import InputError
from bert_jax.model.objective import Params, abstract_params
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
    labels: tuple[str, ...]  # the names of a classifier's classes, in their order; () if the source names none
    notes: tuple[str, ...]  # lines that the user should see
    problem: str = ""  # Hugging Face's problem_type, where it is not what the number of outputs says
    task_settings: Mapping[str, Any] = types.MappingProxyType({})  # as those of `Pretrained`


class Parameter(NamedTuple):
    """One parameter. `{i}` stands for the number of the layer."""

    ours: str
    hf: str
    tf1: str
    kind: str

    def name(self, form: Form, layer: int | None) -> str:
        """Returns its name in a format."""
        return (self.hf if form == "hf" else self.tf1).format(i=layer)

    def is_flipped(self, form: Form) -> bool:
        """Returns whether the matrix is [out, in] there; ours are [in, out]."""
        return self.kind == "head" or (self.kind == "kernel" and form == "hf")


# The leaves of a module: our names, Hugging Face's and Google's. Kinds: "same"; "vocab", whose rows end in
# padding here; "kernel", a matrix that PyTorch keeps [out, in]; "head", one that Google keeps [out, in] as well.
_LEAVES: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "words": (("/embedding", ".weight", "", "vocab"),),
    "table": (("/embedding", ".weight", "", "same"),),
    "dense": (("/kernel", ".weight", "/kernel", "kernel"), ("/bias", ".bias", "/bias", "same")),
    "norm": (("/scale", ".weight", "/gamma", "same"), ("/bias", ".bias", "/beta", "same")),
    "head": (("/kernel", ".weight", "output_weights", "head"), ("/bias", ".bias", "output_bias", "same")),
}

# Our name, Hugging Face's, and Google's unless it is Hugging Face's with slashes in place of dots.
_MODULES: tuple[tuple[str, ...], ...] = (
    ("words", "encoder/embeddings/word", "bert.embeddings.word_embeddings"),
    ("table", "encoder/embeddings/position", "bert.embeddings.position_embeddings"),
    ("table", "encoder/embeddings/type", "bert.embeddings.token_type_embeddings"),
    ("norm", "encoder/embeddings/norm", "bert.embeddings.LayerNorm"),
    ("dense", "encoder/layers/attention/query", "bert.encoder.layer.{i}.attention.self.query"),
    ("dense", "encoder/layers/attention/key", "bert.encoder.layer.{i}.attention.self.key"),
    ("dense", "encoder/layers/attention/value", "bert.encoder.layer.{i}.attention.self.value"),
    ("dense", "encoder/layers/attention/output", "bert.encoder.layer.{i}.attention.output.dense"),
    ("norm", "encoder/layers/attention/norm", "bert.encoder.layer.{i}.attention.output.LayerNorm"),
    ("dense", "encoder/layers/mlp/intermediate", "bert.encoder.layer.{i}.intermediate.dense"),
    ("dense", "encoder/layers/mlp/output", "bert.encoder.layer.{i}.output.dense"),
    ("norm", "encoder/layers/mlp/norm", "bert.encoder.layer.{i}.output.LayerNorm"),
    ("dense", "encoder/pooler", "bert.pooler.dense"),
    ("dense", "mlm/transform", "cls.predictions.transform.dense"),
    ("norm", "mlm/norm", "cls.predictions.transform.LayerNorm"),
    ("head", "next_sentence", "cls.seq_relationship", "cls/seq_relationship/"),
    ("head", "classifier", "classifier", ""),
    ("head", "span", "qa_outputs", "cls/squad/"),
)


def _rows() -> Iterator[Parameter]:
    for leaves, ours, hf, *differs in _MODULES:
        tf1 = differs[0] if differs else hf.replace("layer.{i}", "layer_{i}").replace(".", "/")
        for our_leaf, hf_leaf, tf1_leaf, kind in _LEAVES[leaves]:
            yield Parameter(ours + our_leaf, hf + hf_leaf, tf1 + tf1_leaf, kind)
    yield Parameter("mlm/output_bias", "cls.predictions.bias", "cls/predictions/output_bias", "vocab")


TABLE = tuple(_rows())

# Tensors that are ignored, since the model does not compute with them. `hf_weights` checks that Hugging Face's tied
# output table and bias equal the tensors that they repeat.
IGNORED: dict[str, tuple[str, ...]] = {
    "hf": (r"bert\.embeddings\.(position_ids|token_type_ids)", r"cls\.predictions\.decoder\.(weight|bias)"),
    # The moments of Google's, NVIDIA's and TensorFlow's own optimizers; their steps; the scale of the loss in float16.
    "tf1": (
        r".*/((adam|lamb)_[mv]|(Adam\w*?|LAMB\w*?|Momentum|RMSProp|Adagrad|Adadelta)(_\d+)?)",
        r"global_step|beta[12]_power",
        r"current_loss_scale|good_steps",
    ),
}


def canonical_names(names: Iterable[str], form: Form, where: Where) -> dict[str, str]:
    """Returns {name as in `TABLE`: name in the file}.

    Hugging Face's may lack "bert." (those of the bare encoder do) and may call the parameters of layer norm gamma
    and beta (those made before 2019 do). Raises: InputError if two names mean the same.
    """
    found: dict[str, str] = {}
    for name in names:
        canonical = name
        if form == "hf":
            canonical = re.sub(r"(LayerNorm)\.(gamma|beta)$", _new_norm_name, canonical)
            if re.match(r"(embeddings|encoder|pooler)\.", canonical):
                canonical = f"bert.{canonical}"
        if canonical in found:
            raise InputError(f"{where}: {found[canonical]} and {name} are two names of one tensor; remove one of them")
        found[canonical] = name
    return found


def _new_norm_name(match: re.Match) -> str:
    return f"{match[1]}.{'weight' if match[2] == 'gamma' else 'bias'}"


def to_params(
    read: Callable[[str], np.ndarray],
    shapes: Mapping[str, Sequence[int]],
    form: Form,
    config: ModelConfig,
    where: Where,
) -> Params:
    """Returns our parameters, float32 on the host, of the parts that the source has: the encoder and some heads.

    Args:
      read: name in the file -> array, called once for each tensor that is used.
      shapes: of all tensors of the source, by their names there.
      form: "hf" or "tf1".
      config: the model; its shapes must be those of the tensors.
      where: the file, for messages.
    Raises: InputError, before any tensor is read, that lists the tensors that are missing, unknown or misshapen.
    """
    names = canonical_names(shapes, form, where)
    if config.num_layers > len(names):
        raise InputError(
            f"{where} has {len(names)} tensors, and the configuration beside it asks for {config.num_layers} layers; "
            "the two do not belong together, so take both from one place"
        )
    bias = names.get(next(row for row in TABLE if row.ours == "classifier/bias").name(form, None))
    num_classes = int(shapes[bias][0]) if bias and len(shapes[bias]) == 1 else 1
    expected = flatten(abstract_params(config, num_classes))
    wanted = {row.ours: _names_of(row, form, config) for row in TABLE}
    present = {part_of(ours) for ours, there in wanted.items() if any(name in names for name in there)}
    present.add("encoder")

    used = {name for ours, there in wanted.items() if part_of(ours) in present for name in there}
    _check_names(names, used, form, where)
    for row in TABLE:
        if part_of(row.ours) in present:
            shape = _their_shape(row, form, expected[row.ours].shape, config)
            for name in wanted[row.ours]:
                if tuple(shapes[names[name]]) != shape:
                    raise InputError(
                        f"{where}: {names[name]} has shape {tuple(shapes[names[name]])} where the configuration "
                        f"beside it asks for {shape}; the two do not belong together, so take both from one place"
                    )

    flat = {}
    for row in TABLE:
        if part_of(row.ours) not in present:
            continue
        array = np.zeros(expected[row.ours].shape, np.float32)
        slices = [array[i] for i in range(len(array))] if is_stacked(row.ours) else [array]  # views
        for target, name in zip(slices, wanted[row.ours], strict=True):
            value = read(names[name])
            if not jnp.issubdtype(value.dtype, jnp.floating):
                raise InputError(
                    f"{where}: {names[name]} holds {value.dtype}, not floating-point numbers; a quantized model must "
                    "be saved in floating point first"
                )
            value = value.T if row.is_flipped(form) else value
            with np.errstate(over="ignore"):  # of float64; `find_not_finite` tells of it
                target[: len(value)] = value
        flat[row.ours] = array
    return unflatten(flat)


def from_params(params: Params, form: Form, config: ModelConfig) -> Arrays:
    """Returns {name: float32 array} of all parameters in a format, "hf" or "tf1"; the inverse of `to_params`."""
    flat = flatten(params)
    rows = {row.ours: row for row in TABLE}
    arrays = {}
    for ours, array in flat.items():
        if ours not in rows:
            raise InputError(f"{ours} is a parameter of an own head or a probe, which has no name there; it stays here")
        row, array = rows[ours], np.asarray(array, np.float32)
        for part, name in zip(array if is_stacked(ours) else [array], _names_of(row, form, config), strict=True):
            part = part[: config.vocab_size] if row.kind == "vocab" else part
            arrays[name] = np.ascontiguousarray(part.T if row.is_flipped(form) else part)
    return arrays


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, where: Where) -> None:
    """Raises: InputError if the number of rows of the word table is not that of tokens, which may be rounded up.

    Many models round the size up to a multiple of 8, 64 or 128; the additional rows belong to no token.
    """
    tokens = tokenizer.vocab_size
    if vocab_size not in {-(-tokens // multiple) * multiple for multiple in (1, 2, 4, 8, 16, 32, 64, 128)}:
        raise InputError(
            f"{where}: the vocabulary has {tokens} tokens and the table of words {vocab_size} rows; take both from one "
            "place" + ("" if tokens > vocab_size else ", or add the missing tokens, one a line, in their order")
        )


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
        place = params
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = leaf
    return params


def _names_of(row: Parameter, form: Form, config: ModelConfig) -> list[str]:
    layers = range(config.num_layers) if is_stacked(row.ours) else [None]
    return [row.name(form, layer) for layer in layers]


def _their_shape(row: Parameter, form: Form, shape: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    shape = shape[1:] if is_stacked(row.ours) else shape
    shape = (config.vocab_size, *shape[1:]) if row.kind == "vocab" else shape
    return shape[::-1] if row.is_flipped(form) else shape


def _check_names(names: Mapping[str, str], used: set[str], form: Form, where: Where) -> None:
    missing = sorted(used - names.keys())
    unknown = sorted(
        there
        for name, there in names.items()
        if name not in used and not any(re.fullmatch(pattern, name) for pattern in IGNORED[form])
    )
    problems = [f"lacks {len(missing)} tensors of this model: {_listed(missing)}"] if missing else []
    problems += (
        [f"holds {len(unknown)} tensors that this model has no place for: {_listed(unknown)}"] if unknown else []
    )
    if problems:
        raise InputError(
            f"{where} {' and '.join(problems)}; it is another kind of model, or its configuration is not its own"
        )


def _listed(names: Sequence[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
