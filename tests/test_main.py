# SPDX-License-Identifier: Apache-2.0
"""The command `bert_jax`: what it lists, how it finds a tool and a recipe, and what it says of a name that is none."""

import ast
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import run_python

import bert_jax.tools
from bert_jax.errors import InputError
from bert_jax.settings.finetuning import FinetuneConfig
from bert_jax.settings.pretraining import PretrainConfig
from bert_jax.tools import main, recipes

TOOLS = Path(bert_jax.tools.__file__).parent
# What the tools share.
INTERNAL = {"__init__", "cli", "lines", "main", "recipes", "shared_flags", "streams"}


def run(*arguments: str, folder: Path | None = None) -> tuple[int, str, str]:
    """Returns the exit status, stdout and stderr of `python -m bert_jax` with some arguments."""
    done = run_python(["-m", "bert_jax", *arguments], folder)
    return done.returncode, done.stdout, done.stderr


def test_every_tool_is_a_command():
    assert sorted(main.NAMES) == sorted({path.stem for path in TOOLS.glob("*.py")} - INTERNAL)
    assert len(set(main.NAMES)) == len(main.NAMES)
    for name in main.NAMES:
        tree = ast.parse((TOOLS / f"{name}.py").read_text("utf-8"))
        assert ast.get_docstring(tree), f"{name} has nothing to say at --help"
        assert "cli.run(main" in ast.unparse(tree.body[-1]), f"{name} does not start as a command does"


def test_help_has_a_line_for_each_and_imports_none():
    lines = main.help_text().splitlines()
    assert max(map(len, lines)) <= 80
    for name in main.NAMES:
        assert sum(bool(re.fullmatch(rf"  {name}  +[^ ].*[^.]", line)) for line in lines) == 1
    command = [sys.executable, "-X", "importtime", "-m", "bert_jax", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, main.help_text() + "\n")
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "bert_jax.tools.main" in modules and not modules & {"absl", "ml_collections", "numpy", "jax"}


def test_help_comes_at_once():
    """In half a second; the best of five, for other work on the machine is no fault of ours."""
    seconds = []
    for _ in range(5):
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "bert_jax", "--help"], capture_output=True)
        seconds.append(time.monotonic() - began)
    assert min(seconds) < 0.5, seconds


def test_help_of_a_command_is_its_own():
    status, out, told = run("train", "--help")
    assert (status, told) == (0, "") and out.startswith("Pre-trains a BERT") and "\nbert_jax train:\n  --config:" in out
    assert run("help", "train") == (0, out, "")
    status, out, _ = run("prepare_corpus", "--help")
    assert status == 0 and "\n    bert_jax prepare_corpus --input=" in out and "python -m" not in out
    tool = run_python(["-m", "bert_jax.tools.prepare_corpus", "--help"])
    assert tool.returncode == 0 and "\n    bert_jax prepare_corpus --input=" in tool.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "expected"),
    [
        (["--version"], 0, f"bert_jax {bert_jax.__version__}\n"),
        (["trian"], 1, "error: bert_jax has no command 'trian' (did you mean train?); bert_jax --help lists them\n"),
        (["xyzzy"], 1, "error: bert_jax has no command 'xyzzy'; bert_jax --help lists them\n"),
        (["two\nlines"], 1, r"error: bert_jax has no command 'two\nlines'; bert_jax --help lists them"),
        (
            ["--workdir=x", "train"],
            1,
            "error: --workdir=x stands before the command; write bert_jax COMMAND --workdir=x",
        ),
        ([], 1, "usage: bert_jax COMMAND"),
        (["train"], 1, "error: --config and --workdir are needed, as in --config=pretrain:tiny --workdir=runs/tiny\n"),
        (["finetune"], 1, "error: --config and --workdir are needed, as in --config=finetune:sst2 --workdir=runs/sst2"),
        (["train", "stray"], 1, "error: unexpected argument 'stray'; options are written --name=value\n"),
    ],
)
def test_what_is_said_and_the_exit_status(arguments, status, expected):
    found, out, told = run(*arguments)
    assert found == status and expected in out + told
    assert (out == "") == (status != 0)


@pytest.mark.parametrize("script", ["train", "finetune"])
def test_the_scripts_of_a_checkout_are_the_commands(repository, script):
    """Two statements each; help and errors are those of the command, under the script's name."""
    assert len(ast.parse((repository / f"{script}.py").read_text("utf-8")).body) <= 4
    command = [sys.executable, "-X", "importtime", repository / f"{script}.py", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "ml_collections" in modules and "jax" not in modules
    assert (done.returncode, done.stdout) == (
        0,
        run(script, "--help")[1].replace(f"bert_jax {script}:", f"{script}.py:"),
    )


def test_recipes_are_found_by_name_and_files_by_path(repository, tmp_path, monkeypatch):
    configs = repository / "configs"
    assert recipes.directory() == configs and "pretrain" in recipes.names()
    monkeypatch.chdir(tmp_path)  # which has no configs/
    (tmp_path / "pretrain").mkdir()
    assert recipes.find("pretrain:base,phases") == f"{configs}/pretrain.py:base,phases"
    assert recipes.find("demo") == f"{configs}/demo.py"
    assert recipes.find("my/recipe.py:x") == "my/recipe.py:x"
    assert recipes.find("") == ""
    (tmp_path / "own").write_text("")
    assert recipes.find("own:x") == "own:x"
    with pytest.raises(
        InputError, match=r"--config=pretran:base names no recipe \(did you mean --config=pretrain:base\?"
    ):
        recipes.find("pretran:base")
    with pytest.raises(InputError, match=r"no such file here; the recipe .* is --config=finetune:mnli$"):
        recipes.find("configs/finetune.py:mnli")
    monkeypatch.chdir(repository)
    assert recipes.find("configs/finetune.py:mnli") == "configs/finetune.py:mnli"


@pytest.mark.parametrize("given", [["--config=demo"], ["-config=demo"], ["--config", "demo"], ["-config", "demo"]])
def test_every_form_of_the_flag(given):
    resolved = recipes.resolve_recipe([*given, "--config.data.path=demo", "--output=demo"])
    assert resolved[:-2] != given and resolved[-2:] == ["--config.data.path=demo", "--output=demo"]
    assert "".join(resolved[:-2]) == "".join(given).replace("demo", str(recipes.directory() / "demo.py"))
    for none in (["--", *given], ["--config"]):  # what follows two dashes is no flag
        assert recipes.resolve_recipe(none) == none


def test_a_recipe_in_a_flag_file(tmp_path):
    (tmp_path / "flags").write_text("--config=pretrain:tinny\n--workdir=x\n")
    status, _, told = run("train", f"--flagfile={tmp_path}/flags", folder=tmp_path)
    assert status == 1 and told.startswith("error: there is no model size 'tinny' (did you mean 'tiny'?)")


@pytest.mark.parametrize(
    ("command", "config", "expected"),
    [
        ("train", "finetune:mnli", "--config is a recipe of fine-tuning; give it to finetune"),
        ("finetune", "pretrain:tiny", "--config is a recipe of pre-training; give it to train"),
        ("train", "pretrian:tiny", "--config=pretrian:tiny names no recipe (did you mean --config=pretrain:tiny?)"),
        ("train", "configs/pretrain.py:tiny", "the recipe that comes with bert_jax is --config=pretrain:tiny"),
    ],
)
def test_a_config_that_cannot_be_used_is_one_line(tmp_path, command, config, expected):
    status, out, told = run(command, f"--config={config}", f"--workdir={tmp_path}/run", folder=tmp_path)
    assert (status, out, told.count("\n")) == (1, "", 1) and told.startswith("error: ") and expected in told
    assert not (tmp_path / "run").exists()


def test_recipes_are_read_as_the_command_needs_them():
    config = recipes.read_config(PretrainConfig, {"masking": {"rate": 0.3}, "data": {"path": "x"}})
    assert config.masking.rate == 0.3
    with pytest.raises(InputError, match="recipe of pre-training"):
        recipes.read_config(FinetuneConfig, {"masking": {}})


def test_a_reader_of_the_help_that_goes_away_is_no_error(repository):
    """The pipe has no reader from the start, so the write always fails."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        command = [sys.executable, "-m", "bert_jax", "--help"]
        done = subprocess.run(command, cwd=repository, stdout=pipe, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
