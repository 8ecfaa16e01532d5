# SPDX-License-Identifier: Apache-2.0
"""The other generated pages: where things are, recipes, the public API, notebooks, sources that pages link to."""

import ast
import base64
import inspect
import json
import re
from collections.abc import Iterable
from pathlib import Path

import settings
from paths import CHANGELOG, DECISIONS, NOTEBOOKS, PACKAGE, RECIPES, ROOT, in_markdown, load, sentence

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
GITHUB, COLAB = "https://github.com/", "https://colab.research.google.com"


def title_of(path: Path) -> str:
    """Returns the first heading of a Markdown file, as plain text."""
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("# "):
            return line[2:].replace("`", "").strip()
    return path.stem


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""


# ---- where things are


MODULES_INTRODUCTION = """# Where things are

Every folder and file of the package, with the first line of its docstring. Generated from the code.
[How data flows](../architecture.md) says how they work together.
"""


def modules() -> str:
    """Returns the page that lists every file of the package with the first sentence of its docstring."""
    lines = [MODULES_INTRODUCTION]
    folders = sorted({path.parent for path in (ROOT / PACKAGE).rglob("*.py")})
    for folder in folders:
        name = folder.relative_to(ROOT).as_posix()
        about = first_sentence(_docstring(folder / "__init__.py")) if (folder / "__init__.py").exists() else ""
        lines += [f"## `{name}/` {{ #{name} }}", "", in_markdown(about), "", "| File | |", "|---|---|"]
        for path in sorted(folder.glob("*.py")):
            if path.name != "__init__.py":
                lines.append(f"| `{path.name}` | {in_markdown(first_sentence(_docstring(path)))} |")
        lines.append("")
    return "\n".join(lines)


def first_sentence(docstring: str) -> str:
    """Returns the first sentence of a docstring on one line."""
    first = " ".join(docstring.partition("\n\n")[0].split())
    first = re.split(r": (?:python|bert_jax) ", first)[0]
    return sentence(re.split(r"(?<=[.:;])\s+(?=[A-Z])", first)[0].rstrip(":;"))


# ---- recipes

CARD = re.compile(r"^(Command|Data|Hardware|Hours|Expect|Source):\s+", re.MULTILINE)


RECIPES_INTRODUCTION = """# Recipes

A recipe is a file for `--config=FILE.py:ARGUMENT`. It changes the [settings](pretraining.md) that its experiment
changes, and nothing else; any setting can be changed further on the command line. Generated from the card that each
file opens with.
"""


def recipes() -> str:
    """Returns the page of the files in configs/: the card that each opens with."""
    lines = [RECIPES_INTRODUCTION]
    for path in sorted((ROOT / RECIPES).glob("*.py")):
        head, *cards = CARD.split(_docstring(path))
        lines += [f"## `{RECIPES}/{path.name}` {{ #{path.stem} }}", "", in_markdown(" ".join(head.split())), ""]
        for name, text in zip(cards[::2], cards[1::2]):
            words = " ".join(text.split())
            lines += [*_commands(words)] if name == "Command" else [f"**{name}:** {in_markdown(words)}", ""]
    return "\n".join(lines)


def _commands(text: str) -> Iterable[str]:
    """Yields the lines of a card's commands, as code, and of the notes among them."""
    for part in re.split(r" (?=\(|or the |python )", text):
        yield from ["```sh", part, "```", ""] if part.startswith("python ") else [in_markdown(part.strip()), ""]


# ---- the public API


API_INTRODUCTION = """# Python API

What `import bert_jax` offers, by what one does with it. Names are loaded when they are first used, so the import itself
takes no time. These and the command lines are what semantic versioning covers; [what is public](../api.md) has a line
for each, and an example.
"""

# What one does, and the names for it. A name that stands nowhere is refused.
ACTS = {
    "Load and save": "load_pretrained load_predictor load_tokenizer save_pretrained Pretrained Tokenizer tune_process",
    "Answer": "fill_masks sentence_embeddings sparse_embeddings multi_vectors maxsim score_sentences "
    "evaluate_pretrained mine_negatives write_vectors open_vectors nearest_vectors quantize",
    "Train": "pretrain finetune recipe",
    "Functions of parameters and a batch": "make_batch encode forward init_params mask_tokens Batch Encoded Encoder",
    "Extend": "Head TextHead TokenHead BatchHead HEADS Spot Task text_task token_task batch_task Row Rows",
    "Settings": "ModelConfig MaskingConfig PretrainConfig FinetuneConfig Limits",
    "Errors and warnings": "InputError CutWarning",
}
# Their fields are on pages of their own.
SETTINGS_OF_RUNS = {"PretrainConfig": "pretraining.md", "FinetuneConfig": "finetuning.md"}


def api() -> str:
    """Returns the page of the public names by act, each for mkdocstrings to fill in from its home, with its fields."""
    homes = _homes()
    acts = {act: names.split() for act, names in ACTS.items()}
    listed = [name for names in acts.values() for name in names]
    if set(listed) != set(_public_names()):
        raise ValueError(f"public names without an act, or acts without a name: {set(listed) ^ set(_public_names())}")
    lines = [API_INTRODUCTION]
    for act, names in acts.items():
        lines += [f"## {act}", ""]
        for name in names:
            lines += [f"::: {homes[name]}.{name}", "    options:", f"      heading: {PACKAGE}.{name}"]
            lines += ["      heading_level: 3", f"      toc_label: {PACKAGE}.{name}"]
            if name == "Encoder":
                lines += ['      filters: ["!^_", "^__call__$"]']
            lines += ["", *_fields(homes[name], name)]
    return "\n".join(lines)


def _fields(module: str, name: str) -> list[str]:
    """Returns a table of the fields of a class, made of the comments above and beside them; [] if it has none."""
    if name in SETTINGS_OF_RUNS:
        return [f"Its fields: [settings]({SETTINGS_OF_RUNS[name]}).", ""]
    kind = load(f"{module}:{name}")
    if not isinstance(kind, type):
        return []
    rows = []
    for each in [base for base in reversed(kind.__mro__) if base.__module__.startswith(f"{PACKAGE}.")]:
        notes = settings.comments_of_fields(inspect.getsource(each), each.__name__)
        defaults = getattr(each, "_field_defaults", vars(each))
        for field, annotation in inspect.get_annotations(each).items():
            if field[0] == "_" or field not in notes:  # Flax adds some
                continue
            of_kind = re.sub(r"\b(?:\w+\.)+(?=\w)", "", inspect.formatannotation(annotation))
            default = f" = {defaults[field]!r}" if field in defaults and not callable(defaults[field]) else ""
            note = notes[field] or settings.DESCRIPTIONS.get(f"{name}.{field}", "")
            rows.append(f"| `{field}: {of_kind}{default}` | {in_markdown(sentence(note))} |")
    return ["", "| Field | |", "|---|---|", *rows, ""] if rows else []


def _init() -> ast.Module:
    return ast.parse((ROOT / PACKAGE / "__init__.py").read_text("utf-8"))


def _public_names() -> list[str]:
    for node in ast.walk(_init()):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            try:
                return [name for name in ast.literal_eval(node.value) if not name.startswith("__")]
            except ValueError:
                break
    return sorted(_homes())


def _homes() -> dict[str, str]:
    """Returns the module of each public name: from the table of lazy names, or what is imported for type checkers."""
    found: dict[str, str] = {}
    for node in ast.walk(_init()):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE}."):
            found |= {alias.asname or alias.name: str(node.module) for alias in node.names}
        elif isinstance(node, ast.Dict):
            try:
                table = ast.literal_eval(node)
            except ValueError:
                continue
            found |= {
                name: home.partition(":")[0] for name, home in table.items() if str(home).startswith(f"{PACKAGE}.")
            }
    return found


# ---- notebooks


def notebooks(repository: str | None = None) -> dict[str, str | bytes]:
    """Returns a page for each notebook, with its outputs, the pictures in them and the notebook itself.

    From a `repository` on GitHub, its page opens it in Colab.
    """
    made: dict[str, str | bytes] = {}
    for path in sorted((ROOT / NOTEBOOKS).glob("*.ipynb")):
        made |= _notebook(path, repository or "")
    return made


def _notebook(path: Path, repository: str) -> dict[str, str | bytes]:
    pictures: dict[str, str | bytes] = {}
    parts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            text = "".join(output.get("text", "")) or "".join(data.get("text/plain", ""))
            if "image/png" in data:
                name = f"{path.stem}-{len(pictures) + 1}.png"
                pictures[f"{NOTEBOOKS}/{name}"] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![The curves that the cell above shows]({name})")
            elif text.strip():
                parts.append(f"```text {{ .output }}\n{ANSI.sub('', text).rstrip()}\n```")
    parts[0] += "\n\n"
    if repository.startswith(GITHUB):
        at = f"{repository.removeprefix(GITHUB).strip('/')}/blob/main/{NOTEBOOKS}/{path.name}"
        parts[0] += f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]({COLAB}/github/{at}) "
    parts[0] += f"[Download this notebook]({path.name}){{ download }}"
    page = "\n\n".join(parts) + "\n"
    return {f"{NOTEBOOKS}/{path.stem}.md": page, f"{NOTEBOOKS}/{path.name}": path.read_bytes()} | pictures


# ---- decisions and the changelog


def decisions() -> dict[str, str]:
    """Returns the title of each decision record by its path in docs/, without the number that it opens with."""
    found = {}
    for path in sorted((ROOT / DECISIONS).glob("[0-9]*.md")):
        title = re.sub(r"^\d+[.:]\s*", "", title_of(path))
        if not path.stem.startswith("0000"):  # the template
            found[path.relative_to(ROOT / "docs").as_posix()] = f"{path.stem[:4]} {sentence(title).removesuffix('.')}"
    return found


DECISIONS_INTRODUCTION = """# Decisions

Why things are as they are: one page each, with the evidence, the cost, and what would make us think again.
"""


def decisions_page() -> str:
    """Returns the page that lists the decision records."""
    lines = [DECISIONS_INTRODUCTION, "| | |", "|---|---|"]
    for path, title in decisions().items():
        number, _, words = title.partition(" ")
        lines.append(f"| {number} | [{in_markdown(words)}]({Path(path).name}) |")
    return "\n".join(lines) + "\n"


def changelog() -> str:
    """Returns the changelog, with links to pages of docs/ as the site has them."""
    return (ROOT / CHANGELOG).read_text("utf-8").replace("](docs/", "](")


# ---- sources

LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)((?:#[^)\s]*)?)(?=\))")
LANGUAGES = {".py": "python", ".sh": "sh", ".cfg": "ini", ".toml": "toml", ".md": "markdown", ".json": "json"}


def source_of(page: str, target: str) -> str:
    """Returns the path in the repository that a link of a page leads to, if it is a file outside docs/; else ""."""
    parts = [*Path("docs", page).parent.parts]
    for part in target.split("/"):
        if part == ".." and parts:
            parts.pop()
        elif part not in (".", ""):
            parts.append(part)
    inside = bool(parts) and parts[0] == "docs"
    return "" if inside or not (ROOT / "/".join(parts)).is_file() else "/".join(parts)


def source_page(path: str) -> str:
    """Returns the page that shows a file of the repository."""
    language = LANGUAGES.get(Path(path).suffix, "text")
    text = (ROOT / path).read_text("utf-8")
    fence = "`" * max(4, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"---\nsearch:\n  exclude: true\n---\n\n# `{path}`\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"
