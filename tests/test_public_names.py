# SPDX-License-Identifier: Apache-2.0
"""The public names of `bert_jax`: all there, lazy, the same to Python and to type checkers."""

import ast
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import bert_jax
from bert_jax.errors import InputError, package_needed

PACKAGE = Path(bert_jax.__file__).parent
PUBLIC = [
    *("load_pretrained", "save_pretrained", "Pretrained", "load_predictor", "load_tokenizer", "Tokenizer"),
    *("pretrain", "finetune", "fill_masks", "sentence_embeddings", "score_sentences", "evaluate_pretrained"),
    "sparse_embeddings",
    *("PretrainConfig", "FinetuneConfig", "InputError", "__version__", "HEADS", "Head", "Row", "Rows", "Task"),
    *("Encoder", "ModelConfig", "Batch", "encode", "forward", "init_params", "make_batch", "tune_process"),
    *("mine_negatives", "Limits", "mask_tokens", "MaskingConfig", "Encoded", "Spot", "CutWarning", "recipe"),
    *("TextHead", "TokenHead", "BatchHead", "text_task", "token_task", "batch_task", "multi_vectors"),
    *("maxsim", "write_vectors", "open_vectors", "nearest_vectors", "quantize"),
]


def test_every_public_name_is_there_and_listed():
    for name in PUBLIC:
        value = getattr(bert_jax, name)
        assert not inspect.ismodule(value) and name in dir(bert_jax)
        assert name == "__version__" or value.__doc__, f"{name} has no docstring"


def test_nothing_else_is_public():
    assert set(bert_jax.__all__) == set(PUBLIC)
    assert set(bert_jax._HOMES) == set(bert_jax.__all__) - {"__version__"}
    with pytest.raises(AttributeError, match="module 'bert_jax' has no attribute 'load_pretraind'"):
        _ = bert_jax.load_pretraind


def test_no_public_name_is_a_module():
    """`import bert_jax.NAME` would set the attribute to the module, and `bert_jax.NAME(...)` would fail then."""
    modules = {path.stem for path in PACKAGE.glob("*.py")} | {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert not modules & set(bert_jax.__all__)


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(bert_jax.__file__).read_text("utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {name: f"bert_jax.{home}" for name, home in bert_jax._HOMES.items()}


IMPORTED = """
import json, sys
before = set(sys.modules)
import bert_jax
listed = dir(bert_jax)
after_import = set(sys.modules) - before
bert_jax.InputError, bert_jax.load_tokenizer
print(json.dumps([listed, sorted(after_import), sorted(set(sys.modules) - before)]))
"""


def test_the_import_loads_nothing(repository):
    """`import bert_jax` and dir() load no other module of ours, no JAX and no NumPy; a tokenizer needs no JAX."""
    done = subprocess.run([sys.executable, "-c", IMPORTED], text=True, capture_output=True, cwd=repository, check=True)
    listed, at_import, with_tokenizer = json.loads(done.stdout)
    assert set(bert_jax.__all__) <= set(listed)
    assert [name for name in at_import if name.startswith("bert_jax")] == ["bert_jax", "bert_jax.version"]
    assert not {"jax", "jaxlib", "numpy", "absl", "flax"} & set(at_import)
    assert "bert_jax.text.tokenizer" in with_tokenizer
    assert not {"jax", "jaxlib", "flax", "sentencepiece", "sentencex", "matplotlib"} & set(with_tokenizer)


CHECKED = """
import bert_jax
reveal_type(bert_jax.load_pretrained("x"))
reveal_type(bert_jax.sentence_embeddings(bert_jax.load_pretrained("x"), ["a"]))
bert_jax.load_pretraind
"""


@pytest.mark.slow
def test_pyright_knows_them(repository, tmp_path):
    (tmp_path / "user.py").write_text(CHECKED)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run([*command, tmp_path / "user.py"], text=True, capture_output=True, cwd=repository)
    told = [each["message"] for each in json.loads(done.stdout)["generalDiagnostics"]]
    assert 'Type of "bert_jax.load_pretrained("x")" is "Pretrained"' in told
    assert any(' is "ndarray[' in each for each in told), told
    assert any(each.startswith('"load_pretraind" is not a known attribute of module "bert_jax"') for each in told), told


def test_fill_masks_gives_tokens_with_probabilities(bert):
    ((guesses,),) = bert_jax.fill_masks(bert, ["the [MASK] ."], num_guesses=bert.config.vocab_size)
    tokens, probabilities = zip(*guesses)  # pairs, as their names say too
    assert sorted(tokens) == sorted(bert.tokenizer.vocab)
    assert list(probabilities) == sorted(probabilities, reverse=True)
    assert sum(probabilities) == pytest.approx(1, abs=1e-5) and guesses[0].token == tokens[0]


def test_a_missing_package_is_one_line():
    for install, advice in (("", "pip install nowhere_to_be_found"), ("'bert_jax[y]'", "pip install 'bert_jax[y]'")):
        with pytest.raises(InputError) as caught, package_needed("nowhere_to_be_found", "x", install):
            importlib.import_module("nowhere_to_be_found.part")
        told = f"x needs the package nowhere_to_be_found, which is not installed: {advice}"
        assert str(caught.value).startswith(told)


def test_a_package_that_lacks_something_itself_keeps_its_error(tmp_path, monkeypatch):
    (tmp_path / "broken_inside.py").write_text("import nowhere_to_be_found")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nowhere"), package_needed("broken_inside", "x"):
        importlib.import_module("broken_inside")


WITHOUT = """
import sys
for name in ("sentencepiece", "sentencex", "matplotlib", "tensorboardX", "tensorflow_datasets", "tqdm"):
    sys.modules[name] = None
import bert_jax
bert = bert_jax.load_pretrained(sys.argv[1])
print(len(bert_jax.load_predictor(sys.argv[1])(["the [MASK] ."])))
bert_jax.save_pretrained  # and what it stands in
from bert_jax.data import prepare, sentences
from bert_jax.data.sources import corpus, tfds_text
from bert_jax.training.report import Reporter
from bert_jax.text.sentencepieces import learn_sentencepieces
for attempt in (
    lambda: sentences.split_lines(["One. Two."], "en"),
    lambda: learn_sentencepieces(["one two"], 20),
    lambda: Reporter(sys.argv[2], 10),
    lambda: tfds_text.examples_fingerprint("tfds:lm1b"),
):
    try:
        attempt()
    except bert_jax.InputError as error:
        print(error)
"""


@pytest.mark.slow
def test_what_is_heavy_is_needed_only_when_used(repository, pretrained, tmp_path):
    """Loading and predicting go without; what needs a library says which, and how it is installed."""
    command = [sys.executable, "-c", WITHOUT, str(pretrained), str(tmp_path / "run")]
    done = subprocess.run(command, text=True, capture_output=True, cwd=repository)
    number, *told = done.stdout.splitlines()
    assert (number, done.returncode) == ("1", 0), done.stderr
    assert [line.rpartition("pip install ")[2] for line in told] == [
        *("'bert_jax[train]'", "'bert_jax[sentencepiece]'", "'bert_jax[train]'", "'bert_jax[tfds]'"),
    ]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
