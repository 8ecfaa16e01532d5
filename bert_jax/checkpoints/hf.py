# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's model directories, read and written without transformers.

A directory has config.json, tensors (`hf_weights`) and a tokenizer (`text.hf_tokenizer`).
Source: transformers' configuration_bert.py and modeling_bert.py for the meaning of the options.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated

import numpy as np

from bert_jax.checkpoints.families import (
    FAMILIES,
    NAMES_OF_ACTIVATIONS,
    check_expressible,
    class_of,
    name_of,
    of_today,
)
from bert_jax.checkpoints.hf_extras import EXTRAS, MODULES, check_whole, find_extras
from bert_jax.checkpoints.hf_weights import (
    INDEX,
    PICKLE,
    WEIGHTS,
    import_torch,
    open_weights,
    write_weights,
)
from bert_jax.checkpoints.hub import import_hub
from bert_jax.checkpoints.multi_vector import LAYER, STANFORD, read_multi_vector
from bert_jax.checkpoints.names import (
    Arrays,
    Imported,
    check_vocabulary,
    find_not_finite,
    from_params,
    to_params,
)
from bert_jax.checkpoints.sentence_transformers import (
    activation_path,
    check_prompts,
    read_pipeline,
    read_reranker,
)
from bert_jax.checkpoints.sparse_encoder import model_folder, read_sparse
from bert_jax.errors import InputError, shown
from bert_jax.model.heads.base import Head
from bert_jax.model.heads.encoder import ENCODER
from bert_jax.model.heads.multilabel import MULTILABEL
from bert_jax.model.heads.pretraining import MASKED_LM
from bert_jax.model.heads.sequence import SEQUENCES
from bert_jax.model.heads.table import HEADS, embedding_head, head_of, infer_head
from bert_jax.model.objective import Params, parts_of
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.settings.model import ModelConfig, model_size
from bert_jax.settings.rules import Values, from_dict, numbers_of, to_dict
from bert_jax.storage import files, writing
from bert_jax.storage.files import JsonObject
from bert_jax.storage.folder import Folder, open_folder
from bert_jax.storage.places import AnyPath
from bert_jax.storage.schema import Meta, check
from bert_jax.text.hf_tokenizer import load_hf_tokenizer, save_hf_tokenizer
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.text.tokenizer_files import ADDED, DESCRIBED, SETTINGS, SPECIAL, VOCABULARIES
from bert_jax.tokenizing import read_tokenizer_files

_OF_TASKS = "task_specific_params"  # transformers' option for settings of a task
_MULTILABEL = "multilabel"  # of our tasks
_PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")

# Relatives that are refused, and the option that they would need.
_NOT_COMPUTED = {
    "deberta": "disentangled attention (relative_attention, pos_att_type)",
}

_FILES = [
    "config.json",
    "model*.safetensors",
    INDEX,
    *VOCABULARIES,
    DESCRIBED,
    SETTINGS,
    SPECIAL,
    ADDED,
    *EXTRAS,
]


def load_hf(folder: Folder) -> Imported:
    """Returns the BERT, or the relative, in a directory of Hugging Face's.

    Raises: InputError if a file is missing or damaged, or if the model is not one that can be computed here.
    """
    home = folder
    with files.reading(str(home.path)):
        folder = model_folder(home)
    where = folder / "config.json"
    # first, since an adapter alone has no config.json, and would be told to have one
    check_whole(folder)
    with files.reading(str(where)):
        settings = of_today(folder.json("config.json"))
        config = model_config(settings, where)
        notes = FAMILIES[config.family].notes(settings)
    tokenizer, more = load_hf_tokenizer(read_tokenizer_files(folder))
    notes += more
    check_vocabulary(tokenizer, config.vocab_size, where)
    if config.type_vocab_size > 1 and not tokenizer.template.second_type:
        notes.append(
            "the second text of a pair has the type 0, as the class and the files of the tokenizer say; transformers "
            "has types only if model_input_names in tokenizer_config.json, or the class, names token_type_ids"
        )
    notes += find_extras(folder)
    if "auto_map" in settings:
        notes.append(
            f"{where} names code of the model's own (auto_map), which is not run: it is computed as a "
            f"{name_of(config.family)}"
        )
    known = settings["architectures"] if isinstance(settings.get("architectures"), list) else []
    declared = next(
        (head for head in HEADS.values() if (class_of(head, config.family) or None) in known), None
    )
    kind = class_of(declared, config.family) if declared else ""
    shares = config.block.has_own_words and declared is MASKED_LM
    shares = shares and settings.get("tie_word_embeddings") is True
    if shares:
        notes.append(
            "its masked language model shares the table of words (tie_word_embeddings), and here has a copy, which "
            "training changes by itself"
        )
    with open_weights(folder, config.family, kind, shares) as (name, shapes, read):
        layer = None
        if STANFORD in known and LAYER in shapes:
            layer = read(LAYER)
            shapes = {tensor: shape for tensor, shape in shapes.items() if tensor != LAYER}
        params = to_params(read, shapes, "hf", config, name, kind)
        notes += [
            f"{name} has {what}; it is not read"
            for begin, what in FAMILIES[config.family].unread_by(config).items()
            if any(tensor.startswith(begin) for tensor in shapes)
        ]
    notes += find_not_finite(params, name)
    with files.reading(str(folder.path)):
        pipeline = read_sparse(home, config, tokenizer)
        pipeline = pipeline or read_multi_vector(folder, config, tokenizer, layer)
        pipeline = pipeline or read_pipeline(folder, config, tokenizer.lowercase)
    if layer is not None and MODULES in home:
        notes.append(f"{name} has {LAYER}, which is not read: {MODULES} names what is")
    if pipeline:
        notes += pipeline.notes
        whole = params | pipeline.params
        own = to_dict(pipeline.settings)
        name, tokenizer = embedding_head(pipeline.settings).name, pipeline.tokenizer or tokenizer
        check_prompts(pipeline.settings, tokenizer, folder.path)
        return Imported(config, whole, tokenizer, name, (), tuple(notes), "", own)
    present = parts_of(params)
    missing = sorted(set(declared.parts_in(config)) - set(present)) if declared else []
    notes += [f"{name} has no {part}, which its architecture asks for" for part in missing]
    head = declared if declared and not missing else infer_head(present)
    if not declared and head.own_parts:
        notes.append(f"{where} names no class that is known here (architectures): by its tensors the model is a "
                     f"{class_of(head, config.family) or head.architecture}")  # fmt: skip
    for other in HEADS.values():  # of one architecture
        is_alike = other.architecture == head.architecture
        if is_alike and settings.get("problem_type") in other.problem_types:
            head = other
            break
    with files.reading(str(where)):
        problem = _problem(settings, head, params) if head.problem_types else ""
        labels = _labels(settings, params) if head.has_labels else ()
        own = _task_settings(settings, params, config) if head is MULTILABEL else {}
    if problem:
        notes.append(
            f"problem_type {problem} is kept; there are no predictions of it here, where classes exclude others"
        )
    if head is SEQUENCES and not problem:
        num_outputs = len(params["classifier"]["bias"])
        reranker, more = read_reranker(folder, settings, config, tokenizer.lowercase, num_outputs)
        notes += more
        own = to_dict(reranker) if reranker else {}
    return Imported(config, params, tokenizer, head.name, labels, tuple(notes), problem, own)


def save_hf(
    directory: AnyPath,
    config: ModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    task: str,
    labels: tuple[str, ...],
    max_shard_bytes: int = 5_000_000_000,
    card: str = "",
    problem: str = "",
    dtype: str = "float32",
    write_more: Callable[[Path], object] = lambda directory: None,
    thresholds: str = "",
    activation: str = "",
    max_seq_length: int = 0,
) -> list[str]:
    """Writes a directory that transformers loads whole, and returns lines that the user should see.

    Parts that the task's architecture lacks are left out, with a note. Tensors of more than `max_shard_bytes` in total
    are divided into shards. `card` is its README.md, if not empty. `problem` is that of `Imported`. `dtype` float16
    takes half the space; numbers beyond 65,504 do not fit. `write_more` writes into the directory before it is there.
    `thresholds` and `activation` are those of `TaskConfig`: transformers keeps them, and does not read them;
    sentence-transformers' CrossEncoder reads the activation. It cuts rows of a model with one output at the tokenizer's
    length, which is `max_seq_length`, or for 0 as many as there are positions.

    Raises: InputError, with nothing written, if the model cannot be expressed or the directory exists.
    """
    if config.causal:
        raise InputError(
            "a left-to-right model (causal) has no counterpart among Hugging Face's BERTs; it stays here"
        )
    family = FAMILIES[config.family]
    check_expressible(config)
    if config.position_offset not in (0, tokenizer.pad_id + 1):
        counted = f"1 + {tokenizer.pad_id}, the id of padding, from which transformers' {family.prefix} counts"
        raise InputError(f"model.position_offset {config.position_offset} is not {counted}")
    present = parts_of(params)
    head, known = _head_there(config, params, task)
    kind = class_of(head, config.family)
    parts = head.parts_in(config)
    notes = [f"{part} is left out: {kind} has none" for part in present if part not in parts]
    if not set(parts) <= set(known):
        notes.append(
            f"there is no pooler: load it with {kind}.from_pretrained(..., add_pooling_layer=False)"
        )
    if family.model_type:
        notes.append(
            "transformers has no such model: it needs trust_remote_code=True and the code that auto_map in config.json "
            f"names, and without loads it as a {family.model_type} that computes something else"
        )
    arrays = _tensors(config, head, params, dtype)
    settings = _settings(config, head, params, tokenizer, labels, problem, dtype)
    if thresholds and head is MULTILABEL:
        settings[_OF_TASKS] = {
            _MULTILABEL: {"thresholds": numbers_of(thresholds, "task.thresholds")}
        }
    most = config.max_positions
    # whose default is the sigmoid
    if head is SEQUENCES and len(params["classifier"]["bias"]) == 1:
        settings["sentence_transformers"] = {"activation_fn": activation_path(activation)}
        most = min(max_seq_length or most, most)
    with writing.new_directory(directory) as temporary:
        write_weights(temporary, arrays, max_shard_bytes)
        writing.write_json(temporary / "config.json", settings)
        notes += save_hf_tokenizer(temporary, tokenizer, most)
        if config.type_vocab_size < 2:  # its tokenizer would give types to texts all the same
            where = temporary / "tokenizer_config.json"
            inputs = {"model_input_names": ["input_ids", "attention_mask"]}
            writing.write_json(where, files.read_json(where) | inputs)
        if card:
            (temporary / "README.md").write_text(card, encoding="utf-8")
        write_more(temporary)
    return notes


def _head_there(config: ModelConfig, params: Params, task: str) -> tuple[Head, Collection[str]]:
    """Returns the head of the class that a model is written as, and the parts that such a class could have."""
    present = parts_of(params)
    # nothing is known of a user's own head
    known = set(present) if task in HEADS else set(present) & {"pooler"}
    known |= set() if config.block.activation else {"pooler"}  # one without parameters
    head = head_of(task, known)
    # heads without parts of their own are written as the bare encoder
    head = head if head.own_parts else ENCODER
    if class_of(head, config.family):
        return head, known
    # the family has fewer classes than BERT
    its_own = [candidate for candidate in HEADS.values() if class_of(candidate, config.family)]
    return next(each for each in its_own if set(each.parts_in(config)) <= set(known)), known


def left_out(config: ModelConfig, params: Params, task: str) -> list[str]:
    """Returns the parts of a task's head that `save_hf` leaves out, since no class of transformers has them."""
    head, _ = _head_there(config, params, task)
    kept = {"encoder", "mlm", "next_sentence", *head.parts_in(config)}
    return sorted(params.keys() - kept)


def _tensors(config: ModelConfig, head: Head, params: Params, dtype: str) -> Arrays:
    """Returns the tensors of a model as transformers names them. Raises: InputError if `dtype` does not hold one."""
    family = FAMILIES[config.family]
    parts = head.parts_in(config)
    encoder = {
        name: part
        for name, part in params["encoder"].items()
        if name != "pooler" or "pooler" in parts
    }
    kept = {name: part for name, part in params.items() if name in parts}
    arrays = from_params(kept | {"encoder": encoder}, "hf", config)
    for own, canonical in family.names_in(class_of(head, config.family)).items():
        for name in [name for name in arrays if name.rpartition(".")[0] == canonical]:
            arrays[own + name.removeprefix(canonical)] = arrays.pop(name)
    if dtype != "float32":
        with np.errstate(over="ignore"):  # it is refused below
            arrays = {name: array.astype(dtype) for name, array in arrays.items()}
        if wide := [name for name, array in arrays.items() if not np.isfinite(array).all()]:
            raise InputError(f"{wide[0]} has numbers that {dtype} does not hold; write float32")
    if not head.own_parts:  # the bare encoder's names begin further on
        arrays = {name.removeprefix(f"{family.base}."): array for name, array in arrays.items()}
    return arrays


def _settings(
    config: ModelConfig,
    head: Head,
    params: Params,
    tokenizer: Tokenizer,
    labels: tuple[str, ...],
    problem: str,
    dtype: str,
) -> JsonObject:
    """Returns the content of config.json."""
    family = FAMILIES[config.family]
    settings = (
        {theirs: getattr(config, ours) for ours, theirs in family.settings.items()}
        | {
            "architectures": [class_of(head, config.family)],
            "model_type": family.model_type or config.family,
            family.activation: NAMES_OF_ACTIVATIONS[config.activation],
            "pad_token_id": tokenizer.pad_id,
            "tie_word_embeddings": not config.block.has_own_words,
        }
        | {theirs: getattr(tokenizer, name) for theirs, name in family.token_ids.items()}
        | family.write(config)
        | ({} if dtype == "float32" else {"dtype": dtype, "torch_dtype": dtype})
    )  # for newer and older versions
    if head.has_labels:
        names = labels or _usual_labels(len(params["classifier"]["bias"]))
        settings["id2label"] = {str(index): label for index, label in enumerate(names)}
        settings["label2id"] = {label: index for index, label in enumerate(names)}
        if head.problem_types:
            settings["problem_type"] = problem or _usual_problem(head, params)
    return settings


def model_config(settings: JsonObject, where: Path) -> ModelConfig:
    """Returns the model that a config.json describes.

    To be called where `where` is read: an option of another type fails as it may.

    Raises: InputError, with the name of the option, if it is not a BERT, or a relative, as it is computed here.
    """
    name = str(settings.get("model_type") or "bert")
    family = FAMILIES.get(name, FAMILIES["bert"])
    if name in _NOT_COMPUTED:
        raise InputError(
            f"{where}: model_type {name} cannot be computed here: {_NOT_COMPUTED[name]}"
        )
    for option, allowed in (
        ("model_type", (None, *FAMILIES)),
        *family.refused,
        (family.activation, (None, *family.activations)),
        ("is_decoder", (None, False)),
        ("add_cross_attention", (None, False)),
        ("is_encoder_decoder", (None, False)),
        ("pruned_heads", (None, {}, [])),
        ("quantization_config", (None,)),
    ):
        if settings.get(option) not in allowed:
            most = ", ".join(str(value) for value in allowed if value) or "left out"
            given = f"{option} is {shown(settings.get(option))}"
            raise InputError(
                f"{where}: {given}, which this {name_of(name)} cannot compute; it can be {most}"
            )
    values = {
        ours: settings[theirs] for ours, theirs in family.settings.items() if theirs in settings
    }
    values["activation"] = family.activations[
        settings.get(family.activation) or family.usual_activation
    ]
    # What config.json leaves out is the default of the family's class, and not always BERT's.
    usual = dataclasses.replace(model_size(family.usual), family=name)
    config = from_dict(ModelConfig, to_dict(usual) | values | family.read(settings), "model")
    config.validate()
    return config


def fetch(url: str) -> Folder:
    """Returns a local copy of the files of a model at hf://ORG/NAME or hf://ORG/NAME@REVISION.

    Raises: InputError if huggingface_hub is not installed, or if it cannot get the files.
    """
    name, _, revision = url.removeprefix("hf://").partition("@")
    huggingface_hub = import_hub(url)

    def download(*more: str) -> Folder:
        patterns = [*_FILES, *more]
        return open_folder(
            Path(
                huggingface_hub.snapshot_download(
                    name, revision=revision or None, allow_patterns=patterns
                )
            )
        )

    try:
        folder = download()
        own = model_folder(folder)
        # Only then, as a repository often has both, and a pickle would be as large again.
        if WEIGHTS not in own and INDEX not in own:
            check_whole(folder)
            import_torch(url)
            folder = download("pytorch_model*.bin", f"{PICKLE}.index.json")
    except InputError:
        raise
    except (OSError, ValueError) as error:  # its errors are one or the other
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"cannot get {url}: {reason}; check the name and the network") from None
    return folder


def _problem(settings: Mapping[str, object], head: Head, params: Params) -> str:
    """Returns the declared problem_type if it is not the usual one, and one that transformers knows; "" otherwise."""
    problem = settings.get("problem_type")
    return str(problem) if problem in _PROBLEMS and problem != _usual_problem(head, params) else ""


def _usual_problem(head: Head, params: Params) -> str:
    """Returns the problem_type that follows from head and number of outputs, as in transformers: one is a score."""
    return head.problem_types[0 if len(params["classifier"]["bias"]) == 1 else -1]


def _task_settings(settings: JsonObject, params: Params, config: ModelConfig) -> Values:
    """Returns the settings of a task whose thresholds `save_hf` wrote; {} if there are none."""
    of_task = (settings.get(_OF_TASKS) or {}).get(_MULTILABEL) or {}
    if "thresholds" not in of_task:
        return {}
    thresholds = of_task["thresholds"]
    count = len(params["classifier"]["bias"])
    kind = Annotated[
        list[Annotated[float, Meta(ge=0, le=1e15)]], Meta(min_length=count, max_length=count)
    ]
    check(thresholds, kind, "thresholds", "correct them")
    text = ",".join(map(repr, thresholds))
    return to_dict(
        TaskConfig(name=_MULTILABEL, max_seq_length=config.max_positions, thresholds=text)
    )


def _labels(settings: JsonObject, params: Params) -> tuple[str, ...]:
    """Returns the names of the classes in their order; () if they are only numbers."""
    count = len(params["classifier"]["bias"])
    numbers = settings.get("label2id") or {}
    names = settings.get("id2label") or {index: name for name, index in numbers.items()}
    of_ids = {int(index): str(name) for index, name in names.items()}
    labels = tuple(of_ids[index] for index in sorted(of_ids))
    if of_ids and (sorted(of_ids) != list(range(count)) or len(set(labels)) < count):
        raise InputError(
            f"id2label or label2id does not name each of the {count} classes; correct or remove them"
        )
    return () if labels == _usual_labels(count) else labels


def _usual_labels(count: int) -> tuple[str, ...]:
    """Returns the names that transformers gives classes without names."""
    return tuple(f"LABEL_{index}" for index in range(count))
