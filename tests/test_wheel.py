# SPDX-License-Identifier: Apache-2.0
"""The wheel: what is in it, and that it trains where there is no checkout."""

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import make_pretrained
from short_notebooks import SHORTER, write_inputs

UV = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
# What a build reads, without what git ignores: nothing that lies about in a checkout gets into the wheel.
SOURCES = "bert_jax configs docs tests README.md CHANGELOG.md CONTRIBUTING.md LICENSE MANIFEST.in Makefile".split()
SOURCES += "SECURITY.md constraints.txt finetune.py pyproject.toml setup.cfg setup.py train.py".split()

REPOSITORY = "https://github.com/org/name"  # any; the wheel of the tests is built as that of a release

SENTENCES = "The [MASK] of the list.\nReturn a new [MASK] object.\n"


def call(*command: str | Path, folder: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder, as a user would; fails the test if the command fails.

    The environment has no path to this checkout, and nothing that the other tests set for JAX.
    """
    ours = ("PYTHONPATH", "VIRTUAL_ENV", "XLA_", "JAX_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment |= {"BERT_JAX_CACHE": str(folder / "cache"), **changes}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def setup(repository: Path) -> configparser.ConfigParser:
    found = configparser.ConfigParser()
    found.read(repository / "setup.cfg")
    return found


def test_what_a_plain_install_brings(repository):
    """It loads, predicts, embeds and converts; the figures are in docs/decisions/0020-wheel-and-extras.md."""
    required = setup(repository)["options"]["install_requires"]
    extras = setup(repository)["options.extras_require"]
    for library in ("jax", "flax", "optax", "orbax-checkpoint"):
        assert re.search(rf"\n{library} >= [\d.]+, < ", required)  # a minor version that was not tried may break it
    for library, extra in (("sentencex", "train"), ("matplotlib", "train"), ("sentencepiece", "sentencepiece")):
        assert library not in required and f"\n{library} >=" in extras[extra]
    assert "tensorflow-datasets" not in required and "tensorflow-datasets" in extras["tfds"]
    assert {name for name in "tpu cuda12 cuda13 hub gcs all".split() if name not in extras} == set()


@pytest.fixture(scope="module")
def wheel(repository, tmp_path_factory) -> Path:
    """Returns the wheel, built in a copy of the tree by way of a source distribution, as a release is."""
    folder = tmp_path_factory.mktemp("build")
    tree = folder / "tree"
    tree.mkdir()
    for name in SOURCES:
        if (repository / name).is_dir():
            shutil.copytree(repository / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "golden"))
        else:
            shutil.copy(repository / name, tree / name)
    if UV:
        build: list[str | Path] = [UV, "build", "--quiet", "--out-dir", folder / "dist", tree]
    else:
        build = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "-w", folder / "dist", tree]
    call(*build, folder=folder, BERT_JAX_REPOSITORY=REPOSITORY)
    (found,) = (folder / "dist").glob("bert_jax-*.whl")
    return found


@pytest.mark.slow
@pytest.mark.network
def test_what_is_in_the_wheel(repository, wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
        (entries,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    ours = {f"bert_jax/{path.relative_to(repository / 'bert_jax')}" for path in (repository / "bert_jax").rglob("*.py")}
    ours |= {f"bert_jax/configs/{path.name}" for path in (repository / "configs").iterdir() if path.is_file()}
    ours |= {"bert_jax/py.typed", "bert_jax/text/unicode_14.json", "bert_jax/text/unicode_library.json"}
    assert {name for name in names if ".dist-info/" not in name} == ours
    assert "bert_jax = bert_jax.tools.main:main" in entries
    assert "Description-Content-Type: text/markdown" in metadata and "Provides-Extra: tfds" in metadata
    assert f"Project-URL: Source, {REPOSITORY}\n" in metadata
    assert "# bert_jax" in metadata and wheel.stat().st_size < 1_000_000
    if UV:
        (source,) = wheel.parent.glob("bert_jax-*.tar.gz")
        with tarfile.open(source) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        assert {"train.py", "configs/pretrain.py", "tests/test_wheel.py", "docs/differences.md"} <= names


@pytest.fixture(scope="module")
def environment(repository, wheel, tmp_path_factory) -> Iterator[tuple[Path, str]]:
    """Yields a fresh environment that has the wheel with `train`, and what it says of a corpus before it has `train`.

    uv links packages that it has unpacked before, here for the environment of the tests, in place of a download.
    """
    place = tmp_path_factory.mktemp("fresh") / "venv"
    folder, python = place.parent, place / "bin" / "python"
    if UV:
        call(UV, "venv", "--quiet", "--python", sys.executable, place, folder=folder)
        install: list[str | Path] = [UV, "pip", "install", "--quiet", "--python", python]
    else:
        call(sys.executable, "-m", "venv", place, folder=folder)
        install = [python, "-m", "pip", "install", "--quiet"]
    install += ["--constraint", repository / "constraints.txt"]
    call(*install, wheel, folder=folder)
    model = make_pretrained(folder)
    code = "import sys, bert_jax; print(len(bert_jax.load_predictor(sys.argv[1])(['the [MASK] .'])))"
    assert call(python, "-c", code, model, folder=folder, JAX_PLATFORMS="cpu").stdout == "1\n"
    (folder / "text.txt").write_text("One. Two.\n\nThree.\n")
    prepare = ["prepare_corpus", "--input=text.txt", f"--tokenizer={model}/tokenizer", "--output=data"]
    done = subprocess.run([python.parent / "bert_jax", *prepare], cwd=folder, capture_output=True, text=True)
    call(*install, f"{wheel}[train]", folder=folder)
    yield place, done.stderr
    shutil.rmtree(place)  # pytest keeps the folders of the last runs, and this one has 800 MB


@pytest.fixture(scope="module")
def installed(environment) -> Path:
    """Returns the programs of the environment."""
    return environment[0] / "bin"


@pytest.mark.slow
@pytest.mark.network
def test_it_trains_converts_and_predicts(repository, installed, tmp_path):
    """The way of the README, with the installed program alone, in a folder that has nothing of the checkout."""
    program = installed / "bert_jax"

    def bert_jax(*arguments: str, **changes: str) -> str:
        done = call(program, *arguments, folder=tmp_path, JAX_PLATFORMS="cpu", **changes)
        return done.stdout

    where = call(
        installed / "python", "-c", "import bert_jax; print(bert_jax.__file__)", folder=tmp_path
    ).stdout.strip()
    assert Path(where).is_relative_to(installed.parent)
    listed = bert_jax("--help")
    assert "  train  " in listed and "  predict  " in listed
    assert bert_jax("train", "--help").startswith("Pre-trains a BERT")

    call(installed / "python", "-m", "bert_jax.configs.demo_data", "--output=demo", folder=tmp_path)
    bert_jax("build_vocab", "--input=demo/text.txt", "--output=vocab", "--vocab_size=2000")
    prepare = ["prepare_corpus", "--input=demo/text.txt", "--tokenizer=vocab", "--output=data", "--holdout_rate=0.01"]
    bert_jax(*prepare, "--max_seq_length=32", "--duplicates=1", "--workers=2")
    settings = ["--config.data.path=data", "--config.data.batch_size=16", "--config.train.num_steps=10"]
    settings += ["--config.optimizer.learning_rate=2e-3", "--config.optimizer.warmup_steps=2"]
    bert_jax("train", "--config=pretrain:tiny", "--workdir=run", *settings)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    before, after = (record for record in metrics if record["kind"] == "eval")
    assert (before["step"], after["step"]) == (0, 10) and after["mlm_loss"] < before["mlm_loss"] - 0.1
    assert (tmp_path / "run" / "curves.png").stat().st_size > 10_000

    (tmp_path / "in.txt").write_text(SENTENCES)
    predicted = bert_jax("predict", "--checkpoint=run", "--input=in.txt", "--format=json").splitlines()
    assert len(predicted) == 2 and all(json.loads(line) for line in predicted)
    bert_jax("convert_checkpoint", "--input=run", "--output=hf", "--to=hf", "--verify")
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    again = bert_jax("predict", "--checkpoint=hf", "--input=in.txt", "--format=json").splitlines()
    assert [json.loads(line) for line in again] == [json.loads(line) for line in predicted]

    code = "import bert_jax; print(bert_jax.sentence_embeddings(bert_jax.load_pretrained('hf'), ['a list']).shape)"
    assert call(installed / "python", "-c", code, folder=tmp_path, JAX_PLATFORMS="cpu").stdout == "(1, 128)\n"


@pytest.mark.slow
@pytest.mark.network
def test_what_is_an_extra_is_named(environment, installed, tmp_path):
    """The one-line error says how it gets there."""
    command = [installed / "bert_jax", "build_vocab", "--input=tfds:lm1b", "--output=x", "--vocab_size=100"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: tfds:lm1b needs the package tensorflow_datasets, which is not installed")
    assert done.stderr.endswith("pip install 'bert_jax[tfds]'\n")
    assert environment[1].splitlines()[-1].endswith("pip install 'bert_jax[train]'")


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Colab's versions have no wheels for it")
def test_the_notebooks_install_the_wheel_over_the_versions_of_colab(repository, wheel, tmp_path):
    """Top to bottom, each in the environment that the one before has left."""
    call(sys.executable, "-m", "venv", "venv", folder=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    install = [UV, "pip", "install", "--python", python] if UV else [python, "-m", "pip", "install"]
    call(*install, "--quiet", "--requirement", repository / "notebooks" / "colab.txt", folder=tmp_path)
    assert call(python, "-c", "import jax; print(jax.__version__)", folder=tmp_path).stdout == "0.7.2\n"
    inputs = write_inputs(tmp_path, repository)
    printed = {}
    for name, lines in SHORTER.items():
        path = tmp_path / f"{name}.ipynb"
        shutil.copy(repository / "notebooks" / path.name, path)
        (source,) = re.findall(r'SOURCE = \\"bert_jax(\[.*?\])\\"', path.read_text("utf-8"))
        lines += f'SOURCE = "{wheel}{source}"\n'
        execute = [python, repository / "docs" / "_site" / "execute.py", path, lines, *inputs]
        call(
            *execute,
            folder=tmp_path,
            JAX_PLATFORMS="cpu",
            TMPDIR=str(tmp_path),
            PATH=f"{python.parent}:{os.environ['PATH']}",
        )
        cells = json.loads(path.read_text("utf-8"))["cells"]
        printed[name] = "".join(
            line for cell in cells for out in cell.get("outputs", []) for line in out.get("text", [])
        )
    assert "trained to step 16" in printed["pretrain_tiny"]
    assert "the best by f1" in printed["finetune_mrpc"] and "MRPC-dev.tsv" in printed["finetune_mrpc"]
    assert "copy a directory tree" in printed["embeddings"]
    version = "from importlib.metadata import version; print(version('fsspec'))"
    assert call(python, "-c", version, folder=tmp_path).stdout == "2025.3.0\n"  # which gcsfs and datasets ask for
    shutil.rmtree(tmp_path / "venv")
