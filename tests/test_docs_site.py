# SPDX-License-Identifier: Apache-2.0
"""The generated pages of the documentation site: each setting and command is there, described, and rules are true."""

import dataclasses
import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bert_jax.errors import InputError
from bert_jax.tools.main import NAMES

MAKE_PAGES = """
import json, sys
sys.path.insert(0, "docs/_site")
import commands, pages, paths, settings
every = settings.pages() | commands.pages()
every |= {"recipes": pages.recipes(), "api": pages.api(), "modules": pages.modules()}
every |= {"decisions": pages.decisions_page()}
every |= {path: page for path, page in pages.notebooks("https://github.com/org/name").items() if isinstance(page, str)}
print(json.dumps({"pages": every, "roots": [root for _, _, root in paths.SETTINGS],
                  "described": [*settings.DESCRIPTIONS],
                  "names": {root: [[setting.name, setting.rules] for section in settings.sections(root)
                                   for setting in section.settings] for _, _, root in paths.SETTINGS}}))
"""

ENTRY = re.compile(r"^### `(?P<name>[^`]+)` .*\n\n(?P<facts>.*)\n\{ \.facts \}\n\n(?P<text>.*)$", re.MULTILINE)
RECIPES = {"pretraining": ("pretrain.py", "base"), "finetuning": ("finetune.py", "classification")}


class Entry(NamedTuple):
    facts: str
    text: str


def entries(page: str) -> dict[str, Entry]:
    """Returns what a page says of each setting or flag."""
    return {found["name"]: Entry(found["facts"], found["text"].strip()) for found in ENTRY.finditer(page)}


@pytest.fixture(scope="module")
def made(repository) -> dict[str, Any]:
    """Returns the generated pages and some of what they are made from; by another process, for flags are global."""
    done = subprocess.run([sys.executable, "-c", MAKE_PAGES], capture_output=True, text=True, cwd=repository)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    found = {}
    for name, value in settings.items():
        found |= flat(value, f"{prefix}{name}.") if hasattr(value, "items") else {f"{prefix}{name}": value}
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_every_setting_of_a_recipe_has_an_entry_with_its_default(repository, made, name):
    file, argument = RECIPES[name]
    spec = importlib.util.spec_from_file_location("recipe", repository / "configs" / file)
    assert spec is not None and spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    settings = flat(recipe.get_config(argument))
    found = entries(made["pages"][f"reference/{name}.md"])
    assert list(found) != [] and set(found) == set(settings)
    shown = {full: re.search(r"default `([^`]*)`", entry.facts) for full, entry in found.items()}
    changed = {"task.name", "optimizer.learning_rate"} if name == "finetuning" else set()
    for full, value in settings.items():
        match = shown[full]
        assert match is not None, full
        if full not in changed:
            text = "" if match[1] == '""' else match[1]
            assert (text == value) if isinstance(value, str) else (json.loads(text.lower()) == value), full


def test_no_description_is_empty(made):
    counted = 0
    for path, page in made["pages"].items():
        found = entries(page)
        assert page.count("\n### ") == len(found), f"{path}: an entry without facts or description"
        for name, entry in found.items():
            assert len(entry.text) > 3 and entry.facts, f"{path}: {name}"
            counted += 1
    assert counted > 200
    for line in [
        line for name in ("modules", "reference/commands/index.md") for line in made["pages"][name].split("\n")
    ]:
        if line.startswith("| ") and line != "| File | |" and line != "| Command | |":
            assert len(line.split(" | ")[1].rstrip(" |")) > 3, line


def test_rules_are_those_that_validation_has(made):
    checked = 0
    for root, settings in made["names"].items():
        module, _, kind = root.partition(":")
        config = getattr(importlib.import_module(module), kind)()
        for name, rules in settings:
            section: Any = config
            *parts, field = name.split(".")
            for part in parts:
                section = getattr(section, part)
            for rule in rules:
                wrong = wrong_value(rule, getattr(section, field))
                with pytest.raises(InputError, match=field):
                    dataclasses.replace(section, **{field: wrong}).validate()
                checked += 1
    assert checked > 60


def wrong_value(rule: str, default: Any) -> Any:
    """Returns a value that breaks a rule as the pages spell it."""
    if rule.startswith("one of"):
        return "nonsense"
    if match := re.match(r"from (\S+) to", rule):
        return type(default)(float(match[1]) - max(1, abs(float(match[1]))))
    raise AssertionError(f"no test knows the rule {rule!r}")


def test_some_rules_are_found(made):
    page = made["pages"]["reference/pretraining.md"]
    found = entries(page)
    assert "one of gelu_tanh, gelu_exact" in found["model.activation"].facts
    assert "from 1 to 1048576" in found["data.batch_size"].facts
    assert "may change" in found["mesh.fsdp"].facts and "may change" not in found["optimizer.beta1"].facts
    assert "- `model.hidden_size … is not divisible by model.num_heads …" in page
    # by a function that two sections share
    assert "- `optimizer.warmup_rate and optimizer.warmup_steps both set" in page


def test_descriptions_beside_the_code_are_of_fields_that_there_are(made):
    fields = set()
    for root in made["roots"]:
        module, _, kind = root.partition(":")
        waiting = [getattr(importlib.import_module(module), kind)()]
        while waiting:
            section = waiting.pop()
            for field in dataclasses.fields(section):
                fields.add(f"{type(section).__name__}.{field.name}")
                if dataclasses.is_dataclass(value := getattr(section, field.name)):
                    waiting.append(value)
    assert set(made["described"]) - fields == set()


def test_every_command_has_a_page_with_its_flags(repository, made):
    tools = [path for path in (repository / "bert_jax" / "tools").glob("*.py") if path.stem in NAMES]
    assert len(tools) == len(NAMES)
    pages = {
        path.split("/")[-1].removesuffix(".md") for path in made["pages"] if path.startswith("reference/commands/")
    }
    assert pages - {"index"} == set(NAMES)
    for path in tools:
        page = made["pages"][f"reference/commands/{path.stem}.md"]
        defined = re.findall(r"DEFINE_\w+\(\s*\"(\w+)\"", path.read_text("utf-8"))
        assert {f"--{flag}" for flag in defined} <= set(entries(page)), path.stem
        assert f"({path.stem}.md)" in made["pages"]["reference/commands/index.md"]
    train = entries(made["pages"]["reference/commands/train.md"])
    assert {"--config", "--workdir", "--coordinator"} <= set(train)
    assert "**required**" in entries(made["pages"]["reference/commands/prepare_corpus.md"])["--input"].facts
    assert not any("logtostderr" in page for page in made["pages"].values())


def test_recipes_the_api_and_decisions_are_listed(repository, made):
    for path in (repository / "configs").glob("*.py"):
        assert f"## `configs/{path.name}`" in made["pages"]["recipes"]
    for path in (repository / "docs" / "decisions").glob("0*.md"):
        assert path.stem.startswith("0000") or f"({path.name})" in made["pages"]["decisions"]
    import bert_jax

    public = [name for name in bert_jax.__all__ if not name.startswith("__")]
    assert public and all(f"heading: bert_jax.{name}\n" in made["pages"]["api"] for name in public)
    assert len(re.findall(r"^::: bert_jax\.\w", made["pages"]["api"], re.MULTILINE)) == len(public)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("Batch", "`word_vectors: Any = None`"),
        ("Pretrained", "`labels: tuple[str, ...] = ()` | Of a classifier, in the order of its classes"),
        ("ModelConfig", "`num_layers: int = 12` | Layers of the encoder."),
        ("Encoder", 'filters: ["!^_", "^__call__$"]'),
    ],
)
def test_the_reference_has_the_fields_of_what_one_builds_with(made, name, field):
    (entry,) = re.findall(rf"heading: bert_jax\.{name}\n(.*?)(?=^:::|^## |\Z)", made["pages"]["api"], re.DOTALL | re.M)
    assert field in entry


def written_pages(repository: Path) -> list[Path]:
    """Returns the pages that people wrote, without decision records, which tell of their time."""
    return [path for path in sorted((repository / "docs").rglob("*.md")) if path.parent.name != "decisions"]


def test_files_that_pages_name_are_there(repository):
    name = re.compile(r"`((?:bert_jax|tests|benchmarks|configs|docs|notebooks)/[\w./*-]+\.(?:py|md|ipynb))\b")
    found = [(path, named) for path in written_pages(repository) for named in name.findall(path.read_text("utf-8"))]
    assert len(found) > 30
    assert [(path.name, named) for path, named in found if not list(repository.glob(named))] == []


def test_commands_that_pages_show_have_these_flags(repository, made):
    flags = {}
    for path, page in made["pages"].items():
        if "/commands/" in path:
            flags[Path(path).stem] = set(entries(page))
    settings = {kind: set(entries(made["pages"][f"reference/{kind}.md"])) for kind in RECIPES}
    call = re.compile(r"(?:bert_jax (\w+)|python (train|finetune)\.py)((?:(?!bert_jax |python |[`|;]).)*)")
    unknown, checked = [], 0
    for path in written_pages(repository):
        for tool, script, rest in call.findall(path.read_text("utf-8").replace("\\\n", " ")):
            command = tool or script
            if command == "COMMAND":
                continue
            for flag in re.findall(r"(?<!\S)--([\w.]+)", rest):
                section, _, setting = flag.partition(".")
                kind = "finetuning" if command == "finetune" else "pretraining"
                known = (
                    setting in settings[kind]
                    if section == "config" and setting
                    else f"--{flag}" in flags.get(command, ())
                )
                unknown += [] if known else [f"{path.name}: {command} --{flag}"]
                checked += 1
    assert unknown == [] and checked > 150


@pytest.mark.parametrize("name", ["pretrain_tiny", "finetune_mrpc", "embeddings"])
def test_notebooks_show_what_came_out_when_they_ran(repository, made, name):
    cells = json.loads((repository / "notebooks" / f"{name}.ipynb").read_text("utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output["output_type"] == "error" for output in outputs)
    assert "tmp" not in json.dumps([output.get("text", "") for output in outputs])
    page = made["pages"][f"notebooks/{name}.md"]
    assert "```text { .output }" in page and f"]({name}-1.png)" in page
    assert f"](https://colab.research.google.com/github/org/name/blob/main/notebooks/{name}.ipynb)" in page


@pytest.fixture
def hooks(repository, monkeypatch):
    pytest.importorskip("mkdocs")
    folder = repository / "docs" / "_site"
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location("site_hooks", folder / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in ("commands", "pages", "paths", "settings"):
        sys.modules.pop(name, None)


def build(hooks, site: Path) -> None:
    """Does what follows a build of the site."""
    config = hooks.MkDocsConfig()
    config["site_dir"] = str(site)
    hooks.on_post_build(config)


@pytest.mark.parametrize(
    "html", ["<link rel=stylesheet href=//fonts.example/css>", '<img alt="a" src="http://example/a.png">']
)
def test_a_page_that_loads_from_elsewhere_is_refused(hooks, tmp_path: Path, html):
    (tmp_path / "a.html").write_text('<script src="assets/x.js"><img src="a.png"><a href="https://example">')
    build(hooks, tmp_path)
    (tmp_path / "b.html").write_text(html)
    with pytest.raises(hooks.PluginError, match="without a network"):
        build(hooks, tmp_path)


def test_the_index_of_the_search_is_a_script_too(hooks, tmp_path):
    """A page that is opened as a file can load no other."""
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "search_index.json").write_text('{"docs": ["über"]}', encoding="utf-8")
    build(hooks, tmp_path)
    assert (tmp_path / "search" / "search_index.js").read_text("utf-8") == 'var __index = {"docs": ["über"]}'


def test_links_to_code_are_told_from_links_between_pages(hooks):
    assert hooks.pages.source_of("architecture.md", "../train.py") == "train.py"
    assert hooks.pages.source_of("decisions/0004-row-format.md", "../../train.py") == "train.py"
    assert hooks.pages.source_of("decisions/0004-row-format.md", "../benchmarks.md") == ""
    assert hooks.pages.source_of("architecture.md", "../no_such_file.py") == ""
    assert hooks.pages.LINK.findall("[a](../train.py#L3) [b](https://x/y.py) [c](planner.md)") == [
        ("../train.py", "#L3")
    ]
