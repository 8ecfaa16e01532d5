# SPDX-License-Identifier: Apache-2.0
"""The reference pages of the settings, made from the dataclasses: names, types, defaults, comments and rules."""

import ast
import dataclasses
import inspect
import io
import sys
import textwrap
import tokenize
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from paths import SETTINGS, in_markdown, load, sentence

from bert_jax.settings.rules import affecting, bounds, is_among

TYPES = {"int": "whole number", "float": "number", "str": "text", "bool": "True or False"}

# For fields that have no comment in the code.
DESCRIPTIONS = {
    "ModelConfig.hidden_size": "Width of the vectors that go from layer to layer.",
    "ModelConfig.num_layers": "Layers of the encoder.",
    "ModelConfig.num_heads": "Attention heads of a layer.",
    "ModelConfig.intermediate_size": "Width of the feed-forward block.",
    "ModelConfig.max_positions": "Maximum tokens per row: rows of the position table.",
    "ModelConfig.type_vocab_size": "Number of token types: 2, for sentence A and sentence B.",
    "ModelConfig.hidden_dropout_rate": "Dropout rate of the embeddings and of the output of each half of a layer.",
    "ModelConfig.attention_dropout_rate": "Dropout rate of the attention probabilities.",
    "ModelConfig.initializer_stddev": "Standard deviation of the initial parameters (a normal, truncated at two).",
    "ModelConfig.layer_norm_epsilon": "Added to the variance in layer norm.",
    "DataConfig.path": "A directory made by prepare_corpus, or its URL.",
    "MaskingConfig.seed": "Random seed of the masks.",
    "OptimizerConfig.learning_rate": "Peak learning rate, reached at the end of the warm-up.",
    "OptimizerConfig.warmup_steps": "Steps over which the learning rate rises from 0.",
    "OptimizerConfig.beta1": "Decay rate of Adam's mean of gradients.",
    "OptimizerConfig.beta2": "Decay rate of Adam's mean of squared gradients.",
    "OptimizerConfig.epsilon": "Added to the root of Adam's mean square.",
    "OptimizerConfig.weight_decay": "Decoupled weight decay; biases and layer norms have none.",
    "TrainConfig.num_steps": "Steps of the run, or of its first phase if there are two.",
    "Phase2Config.warmup_steps": "Steps of this phase over which the learning rate rises from 0.",
    "CheckpointConfig.keep_last": "Number of newest checkpoints to keep.",
    "ReportConfig.every_steps": "Steps between two lines of metrics.",
    "ReportConfig.tensorboard": "Write files for TensorBoard too.",
    "TaskConfig.label_column": "Column of the label, in your own data.",
    "FinetuneModelConfig.hidden_dropout_rate": "As in pre-training; also of a classifier's input.",
    "FinetuneModelConfig.attention_dropout_rate": "As in pre-training.",
    "FinetuneModelConfig.compute_dtype": "As in pre-training: float32 or bfloat16.",
    "FinetuneModelConfig.remat": "As in pre-training: none, dots or full.",
    "FinetuneModelConfig.unroll": "As in pre-training.",
    "FinetuneDataConfig.source": "A directory with train, dev and test files, a list TRAIN,DEV,TEST, or tfds:NAME.",
    "FinetuneTrainConfig.num_epochs": "Passes over the training data; a fraction is allowed.",
    "FinetuneTrainConfig.accumulate": "Microbatches per step; the result equals that of the whole batch.",
}


class Setting(NamedTuple):
    """One setting, as the reference shows it."""

    name: str  # "optimizer.learning_rate"
    kind: str
    default: str
    description: str
    rules: tuple[str, ...]
    resumable: bool


class Section(NamedTuple):
    """A section of a configuration; "" for the settings that are in none."""

    name: str
    description: str
    settings: tuple[Setting, ...]
    messages: tuple[str, ...]  # of the rules that are more than a range or a choice


def sections(root: str) -> list[Section]:
    """Returns the sections of the configuration "module:class", those within sections after them."""
    kind = load(root)
    config, free = kind(), affecting(kind, "end", "place", "work", "nothing")
    return [_section(section, name, free) for name, section in _walk(config, "")]


def _walk(config: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    yield prefix.removesuffix("."), config
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(value := getattr(config, field.name)):
            yield from _walk(value, f"{prefix}{field.name}.")


def _section(config: Any, name: str, free: tuple[str, ...]) -> Section:
    kind = type(config)
    comments = _comments(kind)
    settings = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            continue
        full = f"{name}.{field.name}".lstrip(".")
        description = comments.get(field.name) or DESCRIPTIONS.get(f"{kind.__name__}.{field.name}", "")
        settings.append(
            Setting(
                full,
                TYPES[type(value).__name__],
                shown(value),
                sentence(description),
                (bounds(field),) if bounds(field) else (),
                is_among(full, free),
            )
        )
    return Section(name, inspect.getdoc(kind) or "", tuple(settings), tuple(dict.fromkeys(_messages(kind.rules, {}))))


def shown(value: Any) -> str:
    """Returns a default as it would be typed after --config.section.key=."""
    if isinstance(value, float):
        return f"{value:.12g}".replace("e-0", "e-").replace("e+0", "e+") if value % 1 or value > 1e6 else f"{value:.1f}"
    return '""' if value == "" else str(value)


def _comments(kind: type) -> dict[str, str]:
    """Returns what the comments above and beside each field of a class say."""
    return comments_of_fields(textwrap.dedent(inspect.getsource(kind)), kind.__name__)


def comments_of_fields(source: str, name: str) -> dict[str, str]:
    """Returns the same, from the source of its file, or of the class alone."""
    comments, alone = {}, set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.lstrip("# ").strip()
            if not token.line[: token.start[1]].strip():
                alone.add(token.start[0])
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name]
    found = {}
    for node in [node for kind in classes for node in kind.body]:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno
            while first - 1 in alone:
                first -= 1
            lines = range(first, (node.end_lineno or node.lineno) + 1)
            found[node.target.id] = " ".join(comments[line] for line in lines if line in comments)
    return found


def _messages(function: Callable, bound: Mapping[str, str]) -> Iterator[str]:
    """Yields the messages of rules of several settings: those of a section, and of functions that return one."""
    module = vars(sys.modules[function.__module__])
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    for node in ast.walk(definition):
        given = node.value if isinstance(node, (ast.Yield, ast.Return)) else None
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield _message(node.exc.args[0], module, bound)
        elif isinstance(given, ast.Tuple) and len(given.elts) == 2:
            yield _message(given.elts[1], module, bound)
        elif isinstance(given, ast.Call) and isinstance(given.func, ast.Name):
            called = module[given.func.id]
            values = zip(inspect.signature(called).parameters, given.args)
            literals = {name: _value(argument, module) for name, argument in values}
            yield from _messages(called, {name: str(value) for name, value in literals.items() if value is not None})


def _value(node: ast.expr, module: Mapping[str, Any]) -> Any:
    """Returns the value of a literal, or of a constant of the module; None for anything else."""
    if isinstance(node, ast.Name):
        value = module.get(node.id)
        return value if isinstance(value, (int, float, str, tuple)) else None
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return None


def _message(node: ast.expr, module: Mapping[str, Any], bound: Mapping[str, str]) -> str:
    """Returns the message of an error, with … for the values of a run."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    parts = []
    for part in node.values if isinstance(node, ast.JoinedStr) else []:
        if isinstance(part, ast.Constant):
            parts.append(str(part.value))
        elif isinstance(part, ast.FormattedValue):
            name = part.value.id if isinstance(part.value, ast.Name) else ""
            parts.append(bound.get(name) or str(_value(part.value, module) or "…"))
    return "".join(parts)


INTRODUCTION = """# {title}

Each is a flag: `--config.optimizer.learning_rate=2e-4`. A name that does not exist is refused, with a suggestion. In
Python they are the fields of `{name}`. This page is generated from the code: descriptions are the comments beside the
fields, rules are those that are checked before anything is written.

A run that is resumed must have the settings it began with. Those marked *may change* are exempt: they change when and
where work is done, and not what is computed.
"""
BROKEN = "**A run that breaks a rule of this section ends before it begins**, with one of these lines:"


def page(title: str, root: str) -> str:
    """Returns the reference page of a configuration as Markdown."""
    name = root.partition(":")[2]
    lines = [INTRODUCTION.format(title=title, name=name)]
    for section in sections(root):
        if not section.settings:
            continue
        lines += [f"## {section.name or 'In no section'}", ""]
        lines += [in_markdown(section.description.partition("\n\n")[0]), ""] if section.name else []
        for setting in section.settings:
            lines += _entry(setting)
        messages = section.messages
        if messages:
            lines += [BROKEN, "", *(f"- `{message.replace('`', '')}`" for message in messages), ""]
    return "\n".join(lines)


def _entry(setting: Setting) -> list[str]:
    facts = [setting.kind, f"default `{setting.default}`", *setting.rules]
    facts += ["*may change when a run resumes*"] if setting.resumable else []
    return [
        f"### `{setting.name}` {{ #{setting.name} }}",
        "",
        " · ".join(facts),
        "{ .facts }",
        "",
        in_markdown(setting.description),
        "",
    ]


def pages() -> dict[str, str]:
    """Returns the pages by their paths on the site."""
    return {f"reference/{place}.md": page(title, root) for place, title, root in SETTINGS}
