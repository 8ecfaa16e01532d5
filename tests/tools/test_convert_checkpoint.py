# SPDX-License-Identifier: Apache-2.0
"""Models of any format through the commands, `load_pretrained` and `init_checkpoint`."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from builders import message, tiny_model, tiny_run
from commands import run_python
from google_files import save_tf1
from hf_models import make_tokenizer, random_params

from bert_jax import load_pretrained, load_tokenizer
from bert_jax.checkpoints import warm_start
from bert_jax.checkpoints.hf import save_hf
from bert_jax.checkpoints.pretrained import Pretrained, save_pretrained
from bert_jax.errors import StoppedError
from bert_jax.inference.compare import differences
from bert_jax.inference.predict import fill_masks
from bert_jax.model.heads.table import HEADS
from bert_jax.model.objective import PretrainingObjective, parts_of
from bert_jax.pretraining import pretrain
from bert_jax.settings.pretraining import MaskingConfig, MeshConfig, TrainConfig
from bert_jax.storage.resolve import resolve


def save_own(directory, config, params, tokenizer, task, labels):
    save_pretrained(Pretrained(config, params, tokenizer, task, tuple(labels)), directory)


SAVERS = {"bert_jax": save_own, "hf": save_hf, "tf1": save_tf1}
LABELS = ("no", "yes", "maybe")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Returns one classifier in all formats; shared, so not to be changed."""
    root = tmp_path_factory.mktemp("models")
    model = (tiny_model(), random_params(parts=("pooler", "classifier")), make_tokenizer(203))
    for form, save in SAVERS.items():
        save(root / form, *model, "sequence_classification", LABELS)
    return root


def command(repository, name, *flags):
    """Returns status, stdout and stderr of a tool."""
    done = run_python(["-m", f"bert_jax.tools.{name}", *flags], repository)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("form", SAVERS)
def test_every_format_is_recognised_and_computes_the_same(models, form):
    assert resolve(models / form).format == form
    bert = load_pretrained(models / form)
    assert (bert.task, bert.labels) == ("sequence_classification", LABELS)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(bert.params))
    found = differences(bert, load_pretrained(models / "bert_jax"))
    assert found == {"hidden": 0, "pooled": 0, "classifier": 0}


@pytest.mark.parametrize("gradient_dtype", ["float32", "bfloat16"])
def test_a_model_that_computes_in_bfloat16_is_compared_in_float32(gradient_dtype, models):
    bert = load_pretrained(models / "hf")
    config = dataclasses.replace(bert.config, compute_dtype="bfloat16", gradient_dtype=gradient_dtype)
    half = dataclasses.replace(bert, config=config)
    assert differences(half, bert) == {"hidden": 0, "pooled": 0, "classifier": 0}


def test_a_model_without_a_head_says_so_where_the_head_is_needed(models):
    problem = "no head that predicts words, its task being sequence_classification"
    assert problem in message(fill_masks, load_pretrained(models / "hf"), ["[MASK]"])


@pytest.mark.parametrize(
    ("task", "labels"),
    [("token_classification", ("O", "B")), ("masked_lm", ()), ("question_answering", ()), ("encoder", ())],
)
def test_an_own_directory_keeps_parts_task_and_labels(tmp_path, task, labels):
    params = random_params(num_classes=2, parts=HEADS[task].parts)
    save_own(tmp_path / "own", tiny_model(), params, make_tokenizer(203), task, labels)
    bert = load_pretrained(tmp_path / "own")
    assert (bert.task, bert.labels) == (task, labels)
    jax.tree.map(np.testing.assert_array_equal, bert.params, params)


def test_a_failed_save_leaves_nothing_behind(tmp_path, monkeypatch):
    def full_disk(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bert_jax.checkpoints.pretrained.save_tree", full_disk)
    with pytest.raises(StoppedError, match="No space"):
        save_pretrained(Pretrained(tiny_model(), random_params(), make_tokenizer(203)), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


ONE_DEVICE = MeshConfig(data=1)


@pytest.fixture(scope="module")
def start(toy_data):
    """Returns the tokenizer of the toy data, and a model for it that has everything but the next sentence head."""
    tokenizer = load_tokenizer(toy_data / "tokenizer")
    config = tiny_model(vocab_size=tokenizer.vocab_size, activation="gelu_exact", layer_norm_epsilon=1e-9)
    return config, random_params(config, parts=("pooler", "mlm")), tokenizer


def run_from(checkpoint, toy_data, workdir, **changes):
    model = tiny_model(vocab_size=0, **changes)
    config = tiny_run(toy_data, mesh=ONE_DEVICE, model=model, train=TrainConfig(num_steps=1))
    return pretrain(dataclasses.replace(config, init_checkpoint=str(checkpoint)), workdir, jax.devices()[:1])


def test_a_start_of_another_model_spells_the_flags_to_add(start, toy_data, tmp_path):
    save_tf1(tmp_path / "model", *start, "masked_lm", ())
    expected = "is another model; add --config.model.activation=gelu_exact --config.model.layer_norm_epsilon=1e-09"
    assert expected in message(run_from, tmp_path / "model", toy_data, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["tf1", "hf"])
def test_pretraining_goes_on_from_any_format(start, toy_data, tmp_path, form, capsys):
    config, params, tokenizer = start
    if form == "hf":  # which has no masked language model with a pooler
        encoder = {name: part for name, part in params["encoder"].items() if name != "pooler"}
        params = {"encoder": encoder, "mlm": params["mlm"]}
    SAVERS[form](tmp_path / "model", config, params, tokenizer, "masked_lm", ())
    settings = {"activation": "gelu_exact", "layer_norm_epsilon": 1e-9}
    result = run_from(tmp_path / "model", toy_data, tmp_path / "run", **settings)
    trained = jax.device_get(result.state.params)  # step 0 has rate 0
    assert np.abs(trained["next_sentence"]["kernel"]).max() > 0
    kept = {"encoder": {name: trained["encoder"][name] for name in params["encoder"]}, "mlm": trained["mlm"]}
    jax.tree.map(np.testing.assert_array_equal, kept, params)
    lines = capsys.readouterr().err
    assert "it has no next_sentence, which starts at random" in lines
    assert ("it has no pooler, which starts at random" in lines) == (form == "hf")


@pytest.mark.slow
def test_heads_that_pretraining_lacks_are_made_and_others_left(models):
    bert = load_pretrained(models / "hf")
    objective = PretrainingObjective(bert.config, MaskingConfig(), 4, (2, 3))
    whole = warm_start.complete(bert, objective, seed=3)
    assert parts_of(whole.params) == ("pooler", "mlm", "next_sentence")
    assert whole.notes == (
        "it has no mlm, which starts at random",
        "it has no next_sentence, which starts at random",
        "its classifier is not used",
    )
    jax.tree.map(np.testing.assert_array_equal, whole.params["encoder"], bert.params["encoder"])
    assert np.abs(whole.params["mlm"]["transform"]["kernel"]).max() > 0


@pytest.mark.slow
def test_the_command_converts_and_verifies(repository, models, tmp_path):
    output = tmp_path / "out"
    flags = [f"--input={models / 'tf1'}", f"--output={output}", "--to=hf", "--verify"]
    status, stdout, stderr = command(repository, "convert_checkpoint", *flags)
    assert status == 0, stderr
    first, *differences = stdout.splitlines()
    assert "sequence_classification, 2 layers, hidden 32, gelu_tanh" in first and "from tf1 to hf" in first
    assert differences == [f"largest difference of {name}: 0" for name in ("classifier", "hidden", "pooled")]
    assert (output / "model.safetensors").read_bytes() == (models / "hf" / "model.safetensors").read_bytes()
    assert json.loads((output / "config.json").read_text())["id2label"] == {"0": "no", "1": "yes", "2": "maybe"}
    failed = command(repository, "convert_checkpoint", *flags)
    assert failed == (1, "", f"error: output {output} exists; give a directory that does not\n")


def test_parts_that_a_class_lacks_are_not_compared(repository, tmp_path):
    """Of pre-training: DistilBERT's masked language model has neither a pooler nor next sentences, as notes say."""
    params = random_params(parts=("pooler", "mlm", "next_sentence"))
    del params["encoder"]["embeddings"]["type"]
    config = tiny_model(family="distilbert", type_vocab_size=0)
    save_own(tmp_path / "own", config, params, make_tokenizer(203), "pretraining", ())
    flags = [f"--input={tmp_path / 'own'}", f"--output={tmp_path / 'out'}", "--to=hf", "--verify"]
    status, out, error = command(repository, "convert_checkpoint", *flags)
    assert status == 0, error
    assert out.splitlines()[1:] == [f"largest difference of {name}: 0" for name in ("hidden", "mlm")]
    assert "next_sentence is left out" in error


@pytest.mark.parametrize(
    ("task", "part", "to", "library"),
    [
        ("mine", "own_part", "hf", "transformers"),
        ("sequence_classification", "probe", "sentence_transformers", "sentence-transformers"),
    ],
)
def test_a_head_without_a_class_is_said_to_be_left_out(repository, tmp_path, task, part, to, library):
    """That of a recipe, and a probe: in the last line, and in the card."""
    params = random_params(parts=("pooler", "classifier"))
    params[part] = params.pop("classifier")
    save_own(tmp_path / "own", tiny_model(), params, make_tokenizer(203), task, LABELS)
    flags = [f"--input={tmp_path / 'own'}", f"--output={tmp_path / 'out'}", f"--to={to}"]
    status, out, error = command(repository, "convert_checkpoint", *flags)
    assert status == 0, error
    assert out.splitlines()[-1].endswith(f"from bert_jax to {to}, without its {part}: there is no class for it")
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"These files do not have its {part}: {library} has no class for it." in card and "pipeline_tag" not in card


@pytest.mark.slow
def test_half_the_space_on_request(repository, models, tmp_path):
    """Also of a model of large numbers, of which rounding changes more: the files are compared with what they hold."""
    half, whole = tmp_path / "half", tmp_path / "whole"
    bert = load_pretrained(models / "hf")
    larger = lambda path, leaf: leaf * 50 if path[-1].key == "scale" else leaf  # noqa: E731
    save_pretrained(dataclasses.replace(bert, params=jax.tree_util.tree_map_with_path(larger, bert.params)), whole)
    flags = [f"--input={whole}", f"--output={half}", "--dtype=float16", "--verify"]
    status, stdout, stderr = command(repository, "convert_checkpoint", *flags, "--to=hf")
    assert status == 0, stderr
    assert float(re.search("float16 changes at most: .*hidden ([0-9.]+)", stdout)[1]) > 0.02
    assert json.loads((half / "config.json").read_text())["dtype"] == "float16"
    expected = jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float16), load_pretrained(whole).params)
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(half).params, expected)


def test_what_float16_does_not_hold_is_refused(models, tmp_path):
    big = load_pretrained(models / "hf")
    params = jax.tree.map(lambda leaf: np.asarray(leaf) + 1e5, big.params)
    big = big.config, params, big.tokenizer, big.task, LABELS
    problem = "has numbers that float16 does not hold; write float32"
    assert problem in message(save_hf, tmp_path / "big", *big, dtype="float16")


@pytest.mark.slow
def test_show_params(repository, models):
    status, stdout, stderr = command(repository, "show_params", f"--checkpoint={models / 'hf'}")
    assert status == 0, stderr
    first, *rows, last = stdout.splitlines()
    assert first.startswith("hf: sequence_classification, 2 layers, hidden 32, 4 heads, gelu_tanh, vocabulary 203")
    params = random_params(parts=("pooler", "classifier"))
    (kernel,) = [row.split()[-1] for row in rows if row.startswith("classifier/kernel ")]
    assert float(kernel) == pytest.approx(np.linalg.norm(params["classifier"]["kernel"]), rel=1e-5)
    leaves = jax.tree.leaves(params)
    assert len(rows) == len(leaves) and f"{sum(leaf.size for leaf in leaves):,} numbers" in last
