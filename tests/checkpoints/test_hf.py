# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's format: what transformers computed, computed here; what was read, written again."""

import dataclasses
import json
import shutil
import sys
from types import SimpleNamespace
from unittest import mock

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from builders import assert_same, change_json, computed, message, tiny_model
from hf_models import golden_batch, make_tokenizer, random_params, unpack, write_golden
from read_models import load_hf
from safetensors.numpy import load_file, save_file

from bert_jax import InputError, load_predictor, load_pretrained
from bert_jax.checkpoints.hf import save_hf
from bert_jax.checkpoints.names import from_params
from bert_jax.checkpoints.pretrained import save_pretrained
from bert_jax.model.heads.table import HEADS
from bert_jax.model.losses import cross_entropy
from bert_jax.model.objective import PretrainingObjective, encode, forward
from bert_jax.settings.pretraining import MaskingConfig

# Those of BERT's classes: vectors of texts are a bare encoder's, and replaced tokens are found by ELECTRA.
VECTORS = ("sentence_embedding", "sparse_embedding", "token_embeddings")
TASKS = tuple(task for task in HEADS if task not in (*VECTORS, "replaced_tokens"))
# Several labels have the parameters of one; tests/reference compares them live.
NO_GOLDEN = ("pretraining", "multilabel_classification")
MODELS = ("pretraining_erf", "pretraining_tanh", *(task for task in TASKS if task not in NO_GOLDEN))


@pytest.fixture(scope="module")
def golden(repository):
    return np.load(repository / "tests/golden/hf_models.npz")


@pytest.fixture(scope="module")
def written(golden, tmp_path_factory):
    """Returns the directories of the golden models; shared, so not to be changed."""
    root = tmp_path_factory.mktemp("golden")
    return {name: write_golden(root / name, golden, name) for name in MODELS}


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


# In the fast suite a head of each kind; the others are the same code.
FAST = ("pretraining_erf", "sequence_classification", "question_answering")


OF_PRETRAINING = {"masked_lm": "prediction_logits", "next_sentence": "seq_relationship_logits"}


def expected_logits(golden, name, head):
    """Returns the logits of a head: of tokens [B, L, n], of sequences [B, n]."""
    if head == "question_answering":
        return np.stack([golden[f"{name}/start_logits"], golden[f"{name}/end_logits"]], axis=-1)
    found = golden[f"{name}/{OF_PRETRAINING[head] if name.startswith('pretraining') else 'logits'}"]
    return found if head in ("masked_lm", "token_classification") else found.reshape(4, -1)


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_hidden_states_and_logits_are_those_of_transformers(written, golden, name):
    model = load_hf(written[name])
    assert model.task == name.partition("_erf")[0].partition("_tanh")[0] and model.notes == ()
    config, batch = dataclasses.replace(model.config, unroll=1), golden_batch(golden)
    real = batch.sequence_ids > 0
    encoded = computed(lambda params: encode(config, params, batch, layers=True), {"encoder": model.params["encoder"]})
    for ours, theirs in zip(encoded.layers, golden[f"{name}/hidden_states"].reshape(encoded.layers.shape), strict=True):
        np.testing.assert_allclose(ours[real], theirs[real], atol=1e-5)
    if f"{name}/pooler_output" in golden:
        np.testing.assert_allclose(encoded.pooled[:, 0], golden[f"{name}/pooler_output"], atol=1e-5)
    for head in {"encoder": (), "pretraining": OF_PRETRAINING}.get(model.task, (model.task,)):
        logits = computed(lambda params, head=head: forward(config, params, batch, HEADS[head]), model.params)
        expected = expected_logits(golden, name, head)
        of = real if expected.ndim == 3 else (slice(None), 0)
        theirs = expected[real] if expected.ndim == 3 else expected
        np.testing.assert_allclose(logits[of][..., : expected.shape[-1]], theirs, atol=2e-5)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("pretraining_tanh", "sequence_classification") else pytest.param(name, marks=pytest.mark.slow)
        for name in MODELS
        if name != "encoder"
    ],
)
def test_loss_and_gradients_are_those_of_transformers(written, golden, name):
    model, batch = load_hf(written[name]), golden_batch(golden)
    config = dataclasses.replace(model.config, unroll=1)

    def loss(params):
        if name in HEADS:
            return task_loss(name, forward(config, params, batch, HEADS[name]), golden)
        metrics = PretrainingObjective(config, MaskingConfig(), 4, (2, 3)).losses(params, batch, None)
        return sum(metrics[part][0] / metrics[part][1] for part in ("mlm_loss", "nsp_loss"))

    value, gradients = jax.jit(jax.value_and_grad(loss))(model.params)
    np.testing.assert_allclose(value, golden[f"{name}/loss"], rtol=2e-6)
    ours, theirs = from_params(gradients, "hf", config), unpack(golden, f"{name}/gradients")
    assert ours.keys() == theirs.keys()
    for key, gradient in theirs.items():
        np.testing.assert_allclose(ours[key], gradient, atol=1e-5, err_msg=key)


LABELS = {"question_answering": "spans", "masked_lm": "labels", "token_classification": "tags",
          "sequence_classification": "classes", "next_sentence": "next_sentence_label"}  # fmt: skip


def task_loss(task, logits, golden):
    """Returns the loss of a task as fine-tuning has it: the mean over what has a label; of spans, of both ends."""
    if task == "multiple_choice":  # two questions of two choices
        logits, labels = logits.reshape(2, 2), np.array([1, 0])
    else:
        labels = golden[f"inputs/{LABELS[task]}"]
    if task == "question_answering":
        real = golden["inputs/attention_mask"] > 0
        logits = jnp.where(real[..., None], logits, -1e9).swapaxes(1, 2)
    elif task in ("sequence_classification", "next_sentence"):
        logits = logits[:, 0]
    total, weight = cross_entropy(logits, np.maximum(labels, 0), (labels >= 0).astype(np.float32))
    return total / weight


def test_thresholds_are_written_for_several_labels_alone(written, tmp_path):
    model = load_hf(written["sequence_classification"])
    several, labels = ",".join("0.5" for _ in model.labels), "multilabel_classification"
    cases = [(labels, several), (labels, ""), ("sequence_classification", several)]
    for number, (task, thresholds) in enumerate(cases):
        out = tmp_path / str(number)
        save_hf(out, model.config, model.params, model.tokenizer, task, model.labels, thresholds=thresholds)
        assert (load_hf(out).task_settings.get("thresholds") == several) == (number == 0)


@pytest.mark.parametrize("name", MODELS)
def test_import_then_export_is_the_identity(written, name, out):
    model = load_hf(written[name])
    assert save_hf(out, model.config, model.params, model.tokenizer, model.task, model.labels) == []
    before, after = (load_file(path / "model.safetensors") for path in (written[name], out))
    assert_same(after, before)
    assert {array.dtype.name for array in after.values()} == {"float32"}
    theirs, ours = (json.loads((path / "config.json").read_text()) for path in (written[name], out))
    kept = theirs.keys() & ours.keys()
    assert {"architectures", "hidden_act", "layer_norm_eps", "vocab_size", "num_hidden_layers"} <= kept
    assert {key: theirs[key] for key in kept} == {key: ours[key] for key in kept}
    again = load_hf(out)
    assert (again.config, again.labels) == (model.config, model.labels)
    assert again.tokenizer.fingerprint == model.tokenizer.fingerprint


def rewrite(directory, change):
    """Changes the tensors of a directory."""
    tensors = change(load_file(directory / "model.safetensors"))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def copy(written, tmp_path):
    """Returns a directory of a pre-trained model that may be changed."""
    return shutil.copytree(written["pretraining_erf"], tmp_path / "copy")


def ignorable(tensors):
    tensors["bert.embeddings.position_ids"] = np.arange(22)[None]
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].copy()
    tensors["cls.predictions.decoder.bias"] = tensors.pop("cls.predictions.bias")
    return tensors


@pytest.mark.parametrize(
    "change", [ignorable, lambda tensors: {key.removeprefix("bert."): v for key, v in tensors.items()}]
)
def test_other_names_of_the_same_tensors(written, copy, change):
    rewrite(copy, change)
    found = load_hf(copy)
    assert found.task == "pretraining"
    assert_same(found.params, load_hf(written["pretraining_erf"]).params)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_floats_come_in_as_float32(copy, dtype):
    before = load_file(copy / "model.safetensors")
    rewrite(copy, lambda tensors: {key: value.astype(dtype) for key, value in tensors.items()})
    for key, array in from_params((model := load_hf(copy)).params, "hf", model.config).items():
        assert_same(array, before[key].astype(dtype).astype(np.float32))


def shard(directory):
    """Divides the tensors of a directory into two shards with an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    homes = {}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        part = dict(sorted(tensors.items())[number - 1 :: 2])
        save_file(part, directory / name)
        homes |= dict.fromkeys(part, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))


def mix_shards(directory):
    shard(directory)
    save_file({"bert.pooler.dense.bias": np.zeros(12, np.float32)}, directory / "model-00002-of-00002.safetensors")


def lose(name):
    def change(directory):
        shard(directory)
        (directory / name).unlink()

    return change


def shards_and_whole(directory):
    whole = (directory / "model.safetensors").read_bytes()
    shard(directory)
    (directory / "model.safetensors").write_bytes(whole)


def truncate(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def remove(name):
    return lambda directory: (directory / name).unlink()


def setting(**changes):
    return lambda directory: change_json(directory / "config.json", **changes)


def other_decoder(directory):
    rewrite(directory, lambda t: t | {"cls.predictions.decoder.weight": np.zeros((43, 12), np.float32)})


def added_token(directory):
    (directory / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"44": {"content": "<new>"}}}')


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (truncate, r"model\.safetensors is damaged or another kind of file .*; copy it again"),
        (remove("config.json"), r"config\.json"),
        (remove("model.safetensors"), "has no model.safetensors"),
        (remove("vocab.txt"), "has no vocab.txt and no tokenizer.json"),
        (mix_shards, r"model.safetensors.index.json lacks 22 tensors of this model"),
        (lose("model-00002-of-00002.safetensors"), r"model-00002-of-00002\.safetensors"),
        (lose("model.safetensors.index.json"), r"has no model.safetensors, model.safetensors.index.json or"),
        (shards_and_whole, "has both model.safetensors and shards"),
        (setting(hidden_size=14), r"is not divisible by model.num_heads 3; use 12 or"),
        (setting(num_hidden_layers=1), r"holds 16 tensors that this model has no place for: bert.encoder.layer.1"),
        (setting(vocab_size=42), r"the vocabulary has 43 tokens and the table of words 42 rows; take both"),
        (setting(vocab_size="43"), r'config.json: model.vocab_size is "43", a text'),
        (setting(hidden_act="relu"), 'hidden_act is "relu", which this BERT cannot compute; it can'),
        (setting(hidden_act="x" * 300_000), "which this BERT cannot compute"),
        (setting(hidden_size=10**300), "config.json: model.hidden_size "),
        (setting(quantization_config={"bits": 4}), "quantization_config is"),
        (other_decoder, "decoder.weight differs from bert.embeddings.word_embeddings.weight"),
        (added_token, '"<new>" has the id 44, and transf'),
    ],
)
def test_bad_input_is_one_clear_line(copy, damage, expected):
    damage(copy)
    with pytest.raises(InputError, match=expected) as caught:
        load_hf(copy)
    assert "\n" not in str(caught.value) and str(copy) in str(caught.value) and len(str(caught.value)) < 1000


def test_odd_settings_are_taken_and_said(copy):
    setting(architectures=["Other", "BertForMaskedLM"], auto_map={"AutoModel": "code.Bert"})(copy)
    model = load_hf(copy)
    assert model.task == "masked_lm" and "code of the model's own (auto_map), which is not run" in model.notes[0]
    for architectures in (5, "BertForMaskedLM", [["BertForMaskedLM"]], None):
        setting(architectures=architectures)(copy)
        model = load_hf(copy)
        assert model.task == "pretraining" and "by its tensors the model is a BertForPreTraining" in str(model.notes)
    rewrite(copy, lambda t: t | {"cls.predictions.bias": np.full(43, 1e300)})
    assert "mlm/output_bias holds NaN or numbers beyond float32" in str(load_hf(copy).notes)


def test_large_models_are_written_in_shards(written, tmp_path):
    model, out = load_hf(written["pretraining_erf"]), tmp_path / "out"
    save_hf(out, *model[:5], max_shard_bytes=4000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    parts = {path.name: load_file(path) for path in out.glob("*.safetensors")}
    assert len(parts) > 2 and f"model-00001-of-{len(parts):05d}.safetensors" in parts
    assert index["weight_map"] == {tensor: name for name, part in parts.items() for tensor in part}
    sizes = {name: sum(array.nbytes for array in part.values()) for name, part in parts.items()}
    assert index["metadata"] == {"total_size": sum(sizes.values())}
    assert all(len(part) == 1 or sizes[name] <= 4000 for name, part in parts.items())
    assert_same(load_hf(out).params, model.params)


@pytest.mark.parametrize(
    ("count", "problem", "other", "said"),
    [
        (
            1,
            "regression",
            "single_label_classification",
            ("the number that is predicted is the output, as its files say",),
        ),
        (3, "single_label_classification", "regression", ()),
    ],
)
def test_what_a_classifier_is_for_is_kept_or_said(out, count, problem, other, said):
    params = random_params(num_classes=count, parts=HEADS["sequence_classification"].parts)
    save_hf(out, tiny_model(), params, make_tokenizer(203), "sequence_classification", ())
    assert json.loads((out / "config.json").read_text())["problem_type"] == problem
    said = ("the number that is predicted is the output, as its files say",)
    assert load_hf(out).notes == (said if count == 1 else ())
    setting(problem_type=other)(out)
    found = load_hf(out)
    assert found.problem == other and "no predictions of it here" in found.notes[0]


def test_several_numbers_are_kept_and_not_predicted_as_one(tmp_path):
    params = random_params(num_classes=3, parts=HEADS["sequence_classification"].parts)
    model = tiny_model(), params, make_tokenizer(203), "sequence_classification", ("a", "b", "c")
    save_hf(tmp_path / "hf", *model, problem="regression")
    with pytest.warns(UserWarning, match="hf has the problem_type regression: its outputs are not the scores"):
        bert = load_pretrained(tmp_path / "hf")
    save_pretrained(bert, tmp_path / "own")
    with pytest.warns(UserWarning, match="own has the problem_type regression"):
        own = load_pretrained(tmp_path / "own")
    assert bert.problem == own.problem == "regression"
    assert "problem_type is regression, and what is predicted here is one class" in message(
        load_predictor, tmp_path / "own"
    )
    save_hf(tmp_path / "again", *model, problem=own.problem)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["problem_type"] == "regression"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "vocab.txt", "config.json"])
def test_a_directory_without_its_large_files_is_named(copy, name):
    (copy / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4665a5\nsize 440449768\n")
    with pytest.raises(InputError, match=rf"{name} is a pointer of Git LFS in place of the file; .* git lfs pull"):
        load_pretrained(copy)


@pytest.mark.parametrize("rows", [48, 49])
def test_a_table_with_more_rows_than_there_are_tokens_is_taken(copy, rows):
    """Many are rounded up, and some, such as multilingual MiniLM's, have other rows that are left over."""
    setting(vocab_size=rows)(copy)
    more = rows - 43

    def longer(tensors):
        table, bias = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
        ones = {table: np.ones((more, 12), np.float32), bias: np.ones(more, np.float32)}
        return tensors | {name: np.concatenate([tensors[name], rest]) for name, rest in ones.items()}

    rewrite(copy, longer)
    model = load_hf(copy)
    assert (model.config.vocab_size, model.tokenizer.vocab_size) == (rows, 43)
    np.testing.assert_array_equal(model.params["mlm"]["output_bias"][43:50], [1] * more + [0] * (7 - more))


def test_a_declared_head_that_is_not_there_is_said_and_not_made_up(copy):
    rewrite(copy, lambda tensors: {key: v for key, v in tensors.items() if "seq_relationship" not in key})
    model = load_hf(copy)
    assert model.task == "masked_lm" and "next_sentence" not in model.params
    assert "has no next_sentence, which its architecture asks for" in model.notes[0]


def test_labels_keep_their_order_beyond_ten(out):
    labels = tuple(f"class {index}" for index in range(12))
    params = random_params(num_classes=12, parts=HEADS["sequence_classification"].parts)
    save_hf(out, tiny_model(), params, make_tokenizer(203), "sequence_classification", labels)
    assert load_hf(out).labels == labels
    numbers = {label: index for index, label in enumerate(reversed(labels))}
    setting(id2label=None, label2id=numbers)(out)
    assert load_hf(out).labels == labels[::-1]
    twice = dict(enumerate("aacdefghijkl"))
    for names in ({"id2label": twice}, {"id2label": {"0": "a", "1": "b"}}):
        setting(**names)(out)
        assert "id2label or label2id does not name each of the 12 classes" in message(load_hf, out)


def test_what_cannot_be_expressed_is_refused_with_nothing_written(tmp_path, out, monkeypatch):
    rest = random_params(), make_tokenizer(203), "pretraining", ()
    assert "left-to-right" in message(save_hf, out, tiny_model(causal=True), *rest)
    assert "exists; give a directory that does not" in message(save_hf, tmp_path, tiny_model(), *rest)

    def full_disk(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bert_jax.checkpoints.hf_weights.safetensors.numpy.save_file", full_disk)
    assert "No space left on device" in message(save_hf, out, tiny_model(), *rest)
    assert not list(tmp_path.iterdir())


def test_a_pickle_is_read_by_torchs_safe_loader_or_not_at_all(written, copy, monkeypatch):
    arrays = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(b"a pickle")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "pytorch_model.bin is a pickle" in message(load_hf, copy)

    def tensor(array):
        of_numbers = SimpleNamespace(is_floating_point=lambda: True, float=lambda: of_numbers, numpy=lambda: array)
        return SimpleNamespace(detach=lambda: of_numbers)  # a Parameter has no `numpy` before

    load = mock.Mock(return_value={key: tensor(array) for key, array in arrays.items()})
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(load=load))
    assert_same(load_hf(copy).params, load_hf(written["pretraining_erf"]).params)
    assert load.call_args.kwargs["weights_only"] is True
    load.side_effect = RuntimeError("Weights only load failed\nat length")
    assert "Weights only load failed" in message(load_hf, copy)


def test_hub_names_are_fetched_through_huggingface_hub(written, copy, monkeypatch):
    asked = []

    def snapshot_download(name, revision, allow_patterns):
        asked.append((name, revision))
        assert "model*.safetensors" in allow_patterns and "pytorch_model*.bin" not in allow_patterns
        return str(copy)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert_same(load_pretrained("hf://org/name@v1").params, load_hf(written["pretraining_erf"]).params)
    load_pretrained("hf://org/name")
    assert asked == [("org/name", "v1"), ("org/name", None)]
    no_network = huggingface_hub.errors.LocalEntryNotFoundError("no route to the host\nat length")
    monkeypatch.setattr("huggingface_hub.snapshot_download", mock.Mock(side_effect=no_network))
    assert "cannot get hf://org/name: no route to the host; check the name" in message(load_pretrained, "hf://org/name")
