# SPDX-License-Identifier: Apache-2.0
"""The places in the code that the generated pages are made from. When the code moves, this table follows."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

PRETRAINING = "bert_jax.settings.pretraining"
FINETUNING = "bert_jax.settings.finetuning"

# The settings: page, title, and the dataclass that holds all sections.
SETTINGS = (
    ("pretraining", "Settings of pre-training", f"{PRETRAINING}:PretrainConfig"),
    ("finetuning", "Settings of fine-tuning", f"{FINETUNING}:FinetuneConfig"),
)

PACKAGE = "bert_jax"
TOOLS = "bert_jax/tools"  # every file here that can be run is a command
SCRIPTS = ("train.py", "finetune.py")  # and so are these; a tool of the same name stands for the script

RECIPES = "configs"
NOTEBOOKS = "notebooks"
DECISIONS = "docs/decisions"
CHANGELOG = "CHANGELOG.md"


def load(name: str) -> Any:
    """Returns the object "module:name"."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def sentence(text: str) -> str:
    """Returns a comment or a help text as a sentence: with a capital at its start and a full stop at its end."""
    text = " ".join(text.split())
    if not text:
        return ""
    if re.match(r"[a-z]+[,;]?(\s|$)", text):  # not a name, such as tfds:NAME or data.seed
        text = text[0].upper() + text[1:]
    return text if text[-1] in ".!?" else f"{text}."


def in_markdown(text: str) -> str:
    """Returns plain text as Markdown: words in quotes become code, and nothing else is taken for markup."""
    parts = re.split(r'("[\w.:]+"|`[^`]+`)', text)
    return "".join(_escaped(part) if place % 2 == 0 else f"`{part[1:-1]}`" for place, part in enumerate(parts))


def _escaped(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\*_\[\]{}`])", r"\\\1", text)
