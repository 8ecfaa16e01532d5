# SPDX-License-Identifier: Apache-2.0
"""A student learns what its teachers say: of masked words and of classes, softened, averaged, in their order."""

import contextlib
import copy
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import make_dataset, make_pretrained, make_topics, tiny_run, topics_run

from bert_jax import InputError, load_pretrained
from bert_jax.checkpoints.pretrained import save_pretrained
from bert_jax.devices.sharding import make_mesh
from bert_jax.finetuning import finetune
from bert_jax.model.heads.multilabel import MULTILABEL
from bert_jax.model.heads.probe import probed
from bert_jax.model.heads.table import HEADS
from bert_jax.model.objective import init_params
from bert_jax.model.teaching import class_divergence, taught
from bert_jax.pretraining import pretrain
from bert_jax.settings.finetuning import EmbeddingConfig, FinetuneTrainConfig, ProbeConfig, TaskConfig
from bert_jax.settings.pretraining import MeshConfig, TeacherConfig, TrainConfig
from bert_jax.settings.rules import to_dict
from bert_jax.tasks.catalog import make_task
from bert_jax.training.report import read_metrics
from bert_jax.training.teachers import Teaching, learnt_from


def test_the_loss_is_hintons():
    rng = np.random.default_rng(0)
    outputs, teacher = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 3, 4))
    weights = np.array([[1, 0, 1], [1, 1, 0]], np.float32)
    wanted, said = (np.exp(each / 2) / np.exp(each / 2).sum(-1, keepdims=True) for each in (teacher, outputs))
    divergence = (wanted * np.log(wanted / said)).sum(-1)
    config = TeacherConfig("x", temperature=2.0, weight=0.25)
    hard = jnp.float32(3), jnp.float32(4)
    apart = class_divergence(jnp.asarray(outputs), jnp.asarray(teacher), temperature=2.0)
    found = taught(hard, apart, weights, config)
    assert float(found[0]) == pytest.approx(0.75 * 3 + 0.25 * 4 * (divergence * weights).sum(), rel=1e-5)
    assert float(found[1]) == 4
    numbers = class_divergence(jnp.array([[1.0]]), jnp.array([[3.0]]))
    assert numbers.tolist() == [4]
    shares = 1 / (1 + np.exp(-teacher)), 1 / (1 + np.exp(-outputs))
    both = sum(p * np.log(p / q) for p, q in (shares, [1 - each for each in shares]))
    np.testing.assert_allclose(
        MULTILABEL.divergence(jnp.asarray(outputs), jnp.asarray(teacher), None, 1.0), both.mean(-1), rtol=1e-4
    )


@pytest.fixture(scope="module")
def topics(tmp_path_factory):
    return make_topics(tmp_path_factory.mktemp("topics"))


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return make_pretrained(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def teacher(topics, start, tmp_path_factory):
    """A model of the topics, with its classes in another order than the student's."""
    workdir = tmp_path_factory.mktemp("teacher")
    config = topics_run(topics, start, train=FinetuneTrainConfig(num_epochs=5.0))
    config = dataclasses.replace(config, task=dataclasses.replace(config.task, labels="f,b,d"))
    assert finetune(config, workdir / "run", jax.devices()[:1]).metrics["accuracy"] > 0.95
    return workdir / "run" / "finetuned"


def test_classes_are_learnt_from_a_teacher_alone(topics, start, teacher, tmp_path):
    """The labels of its training data are wrong, and do not count; two teachers are averaged."""
    lines = (topics / "train.tsv").read_text().splitlines()
    wrong = [lines[0], *(f"{line.rpartition(chr(9))[0]}\t{'bdf'[number % 3]}" for number, line in enumerate(lines[1:]))]
    (tmp_path / "train.tsv").write_text("\n".join(wrong))
    config = topics_run(f"{tmp_path}/train.tsv,{topics}/dev.tsv", start, train=FinetuneTrainConfig(num_epochs=6.0))
    told = dataclasses.replace(config, teacher=TeacherConfig(f"{teacher},{teacher}", temperature=2.0, weight=1.0))
    result = finetune(told, tmp_path / "run", jax.devices()[:1])
    assert result.metrics["accuracy"] > 0.9
    again = finetune(told, tmp_path / "run", jax.devices()[:1])
    assert again.metrics == result.metrics


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"labels": ("x", "y", "z")}, "has the classes x, y, z, and the student has b, d, f"),
        ({"labels": ()}, "has the classes none, and the student has b, d, f"),
        ({"task": "token_classification"}, "teaches token_classification, and the student's task is"),
    ],
)
def test_a_teacher_that_does_not_fit_is_named(topics, start, teacher, tmp_path, change, problem):
    bert = dataclasses.replace(load_pretrained(teacher), **change)
    save_pretrained(bert, tmp_path / "other")
    config = topics_run(topics, start, teacher=TeacherConfig(str(tmp_path / "other")))
    with pytest.raises(InputError, match=problem):
        finetune(config, tmp_path / "run", jax.devices()[:1])
    assert not (tmp_path / "run").exists()
    for temperature in (0.0, 1e-30, 1e15):  # the loss would not be finite in float32
        with pytest.raises(InputError, match=r"teacher\.temperature .* is not from 0\.001 to 1000"):
            TeacherConfig("x", temperature=temperature).validate()


@pytest.mark.parametrize(
    ("theirs", "ours", "fits"),
    [
        ({"features": "last", "kind": "linear"}, {"features": "embeddings", "kind": "linear"}, False),
        ({"features": "last", "kind": "linear"}, {"features": "last", "hidden_size": 8}, False),
        ({"features": "last", "kind": "linear"}, {}, False),
        ({"features": "last", "kind": "linear", "train_encoder": True}, {"features": "last", "kind": "linear"}, True),
    ],
)
def test_a_teacher_has_the_probe_of_its_student(start, tmp_path, theirs, ours, fits):
    """Another one was computed with the student's features, or ended in a traceback."""
    bert, labels = load_pretrained(start), ("b", "d", "f")
    settings = TaskConfig(name="classification", probe=ProbeConfig(**theirs))
    head = probed(HEADS["sequence_classification"], settings.probe)
    params = init_params(bert.config, jax.random.key(0), head, 3)
    bert = dataclasses.replace(bert, params=params, task=head.name, labels=labels, task_settings=to_dict(settings))
    save_pretrained(bert, tmp_path / "teacher")
    task = make_task(TaskConfig(name="classification", probe=ProbeConfig(**ours)), labels)
    mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    about = Teaching(
        mesh, bert.tokenizer, task.head, bert.config, 16, labels=labels, num_outputs=3, probe=task.config.probe
    )
    told = pytest.raises(InputError, match=r"has the probe features=last kind=linear, and the student .* give both the")
    with contextlib.nullcontext() if fits else told:
        learnt_from(TeacherConfig(str(tmp_path / "teacher")), about)
    if fits:  # a head of one's own may learn from no teacher
        alone = about._replace(head=copy.copy(about.head))
        alone.head.can_learn = False
        with pytest.raises(InputError, match="cannot be learnt from, and the student's task is"):
            learnt_from(TeacherConfig(str(tmp_path / "teacher")), alone)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "train.tsv"
    path.write_text("anchor\tpositive\n" + "".join(f"{a}an {a}ar\t{a}as {a}at\n" for a in "bdfgklmpnrst"))
    return path


def vectors_run(pairs, start, *teachers, model=None, **sections):
    task = TaskConfig(name="embeddings", max_seq_length=16)
    config = topics_run(pairs, start, task=task, teacher=TeacherConfig(",".join(map(str, teachers)), weight=1.0))
    model = dataclasses.replace(config.model, hidden_dropout_rate=0.0, **(model or {}))
    return dataclasses.replace(config, model=model, **sections)


def first_and_last_loss(config, workdir, devices=1):
    finetune(config, workdir, jax.devices()[:devices])
    losses = [each["loss"] for each in read_metrics(workdir / "metrics.jsonl") if each["kind"] == "train"]
    return losses[0], losses[-1]


def as_embeddings(model, path, **settings):
    """Saves a model as one of vectors of texts."""
    task = to_dict(TaskConfig(name="embeddings", max_seq_length=16, embedding=EmbeddingConfig(**settings)))
    save_pretrained(dataclasses.replace(load_pretrained(model), task="sentence_embedding", task_settings=task), path)
    return path


def test_vectors_are_learnt_from_teachers_of_other_sizes(pairs, start, tmp_path):
    """A teacher pools in its own way."""
    other = as_embeddings(start, tmp_path / "cls", pooling="cls")
    wide = as_embeddings(make_pretrained(tmp_path, hidden_size=48, num_layers=1), tmp_path / "wide")
    train = FinetuneTrainConfig(num_epochs=12.0)
    first, last = first_and_last_loss(vectors_run(pairs, start, other, wide, train=train), tmp_path / "run")
    assert 1e-3 < last < first / 2
    train = FinetuneTrainConfig(num_epochs=12.0, accumulate=2)
    divided = vectors_run(pairs, start, other, wide, train=train, mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    assert first_and_last_loss(divided, tmp_path / "divided", 8) == pytest.approx((first, last), rel=1e-2)


def write_questions(directory, name):
    """Writes questions whose answer is the word in which their letter is, as spans and as choices of three words."""
    rng, examples = np.random.default_rng(0), []
    for number in range(48):
        words = [f"{letter}{vowel}n" for letter, vowel in zip(rng.permutation(list("bdf")), rng.choice(list("aio"), 3))]
        label, text = int(rng.integers(3)), " ".join(words)
        question, start = words[label][0], text.index(words[label])
        answers = [{"text": words[label], "answer_start": start}]
        qas = [{"id": str(number), "question": question, "answers": answers}]
        spans = {"title": "", "paragraphs": [{"context": text, "qas": qas}]}
        examples.append(spans if name == "squad1" else {"context": question, "choices": words, "label": label})
    directory.mkdir()
    if name == "squad1":
        (directory / "train-v1.1.json").write_text(json.dumps({"version": "1.1", "data": examples}))
    else:
        (directory / "train.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in examples))
    return directory


@pytest.mark.parametrize(
    ("name", "meshes"),
    [("squad1", 1), ("choice", 1), *(pytest.param(name, 2, marks=pytest.mark.slow) for name in ("squad1", "choice"))],
)
def test_spans_and_choices_are_learnt_alike_on_any_mesh(start, tmp_path, name, meshes):
    task = TaskConfig(name=name, max_seq_length=16, max_query_length=4)
    config = topics_run(write_questions(tmp_path / "data", name), start, task=task)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, hidden_dropout_rate=0.0))
    finetune(config, tmp_path / "teacher", jax.devices()[:1])
    teacher = TeacherConfig(str(tmp_path / "teacher"), weight=1.0)
    config = dataclasses.replace(config, teacher=teacher, train=FinetuneTrainConfig(num_epochs=12.0))
    first, last = first_and_last_loss(config, tmp_path / "run")
    assert last < first / 2
    if meshes == 1:
        return
    train = dataclasses.replace(config.train, accumulate=2)
    divided = dataclasses.replace(config, train=train, mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    assert first_and_last_loss(divided, tmp_path / "divided", 8) == pytest.approx((first, last), rel=1e-2, abs=1e-4)


def test_a_teacher_is_computed_in_the_dtype_of_its_student(pairs, start, tmp_path):
    # A student that is its teacher has nothing to learn.
    same, float32, bfloat16 = as_embeddings(start, tmp_path / "same"), {}, {"compute_dtype": "bfloat16"}
    losses = [
        first_and_last_loss(vectors_run(pairs, start, same, model=each), tmp_path / str(len(each)))[0]
        for each in (float32, bfloat16)
    ]
    assert max(losses) < 1e-5  # in float32 it would be 1e-3 from a student in bfloat16


@pytest.mark.parametrize("probe", [ProbeConfig(), ProbeConfig(features="last", kind="linear")])
def test_numbers_are_learnt_from_a_teacher_of_a_number(start, tmp_path, probe):
    (tmp_path / "train.tsv").write_text("text\tlabel\n" + "ban bar\t1.5\ndan dar\t-0.5\n" * 8)
    task = TaskConfig(name="regression", max_seq_length=16, probe=probe)
    config = topics_run(tmp_path / "train.tsv", start, task=task)
    finetune(config, tmp_path / "teacher", jax.devices()[:1])
    told = dataclasses.replace(config, teacher=TeacherConfig(str(tmp_path / "teacher")))
    assert finetune(told, tmp_path / "run", jax.devices()[:1]).step == 3
    if probe.features:
        return
    bert = load_pretrained(start)
    params = init_params(bert.config, jax.random.key(0), HEADS["sequence_classification"], 3)
    save_pretrained(dataclasses.replace(bert, params=params, task="sequence_classification"), tmp_path / "three")
    told = dataclasses.replace(config, teacher=TeacherConfig(str(tmp_path / "three")))
    with pytest.raises(InputError, match="has another number of outputs than the student; give the same"):
        finetune(told, tmp_path / "other", jax.devices()[:1])


def test_masked_words_are_learnt_from_models_of_masked_words(start, tmp_path):
    """A model of vectors had taken its own head, whose vectors passed for logits."""
    bert = load_pretrained(start)
    config = dataclasses.replace(
        tiny_run(make_dataset(tmp_path)), teacher=TeacherConfig(str(tmp_path / "vectors"), weight=1.0)
    )
    encoder = {"encoder": bert.params["encoder"]}
    save_pretrained(dataclasses.replace(bert, params=encoder, task="sentence_embedding"), tmp_path / "vectors")
    with pytest.raises(InputError, match="teaches sentence_embedding, and the student's task is masked_lm"):
        pretrain(config, tmp_path / "run", jax.devices()[:1])


def test_vectors_are_learnt_from_models_of_vectors(pairs, start, tmp_path):
    with pytest.raises(InputError, match="teaches pretraining, and the student's task is sentence_embedding"):
        finetune(vectors_run(pairs, start, start), tmp_path / "run", jax.devices()[:1])
    assert not (tmp_path / "run").exists()


def test_a_teacher_that_does_not_divide_over_the_mesh_is_named(tmp_path):
    config = tiny_run(make_dataset(tmp_path), mesh=MeshConfig(data=1, fsdp=8))
    teacher = make_pretrained(tmp_path, hidden_size=36)
    with pytest.raises(
        InputError, match=r"teacher\.checkpoint .* model\.hidden_size 36 is not divisible by mesh\.fsdp 8"
    ):
        pretrain(dataclasses.replace(config, teacher=TeacherConfig(str(teacher))), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_masked_words_are_learnt_from_a_teacher(start, toy_data, tmp_path):
    """A student that is its teacher has nothing to learn; of another one it learns, whatever the true words are."""
    config = tiny_run(toy_data, train=TrainConfig(num_steps=6))
    model = dataclasses.replace(config.model, hidden_dropout_rate=0.0, attention_dropout_rate=0.0)
    losses = {}
    for name in ("same", "fresh"):
        told = dataclasses.replace(config, model=model, teacher=TeacherConfig(str(start), weight=1.0))
        told = dataclasses.replace(told, init_checkpoint=str(start) if name == "same" else "")
        pretrain(told, tmp_path / name, jax.devices()[:2])
        records = [each for each in read_metrics(tmp_path / name / "metrics.jsonl") if each["kind"] == "train"]
        losses[name] = [each["mlm_loss"] for each in records]
    assert losses["same"][0] < 1e-5
    assert 1e-3 < losses["fresh"][-1] < losses["fresh"][0]
