# SPDX-License-Identifier: Apache-2.0
"""A student learns what its teachers say: of masked words and of classes, softened, averaged, in their order."""

import contextlib
import copy
import dataclasses
import json

import jax
import numpy as np
import pytest
from builders import CLS, computed, drawn_like, make_learner, make_pretrained, make_topics, tiny_run, topics_run
from whole_runs import ONE_DEVICE

from bert_jax import InputError, load_pretrained
from bert_jax.batch import pad_rows
from bert_jax.checkpoints.pretrained import save_pretrained
from bert_jax.devices.sharding import make_mesh, row_sharding
from bert_jax.finetuning import Finetuning, finetune, fit_into_memory
from bert_jax.model.heads.embedding import EMBEDDINGS
from bert_jax.model.heads.multilabel import MULTILABEL
from bert_jax.model.objective import init_params
from bert_jax.model.teaching import class_divergence, taught
from bert_jax.pretraining import Pretraining, pretrain
from bert_jax.settings.finetuning import (
    EmbeddingConfig,
    FinetuneConfig,
    FinetuneModelConfig,
    FinetuneTrainConfig,
    ProbeConfig,
    TaskConfig,
)
from bert_jax.settings.pretraining import MeshConfig, TeacherConfig
from bert_jax.settings.rules import to_dict
from bert_jax.storage.places import to_place
from bert_jax.tasks.catalog import make_task
from bert_jax.tasks.prepare import open_task
from bert_jax.training import teachers
from bert_jax.training.choices import choose_precision
from bert_jax.training.phases import open_corpora
from bert_jax.training.report import read_metrics
from bert_jax.training.teachers import Teaching, learnt_from


def test_the_loss_is_hintons():
    rng = np.random.default_rng(0)
    outputs, teacher = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 3, 4))
    weights = np.array([[1, 0, 1], [1, 1, 0]], np.float32)
    wanted, said = (np.exp(each / 2) / np.exp(each / 2).sum(-1, keepdims=True) for each in (teacher, outputs))
    divergence = (wanted * np.log(wanted / said)).sum(-1)
    config = TeacherConfig("x", temperature=2.0, weight=0.25)
    hard = np.float32(3), np.float32(4)

    def losses(*given):
        loss = taught(hard, class_divergence(*given, temperature=2.0), weights, config)
        return *loss, MULTILABEL.divergence(*given, None, 1.0)

    *found, of_labels = computed(losses, outputs, teacher)
    assert float(found[0]) == pytest.approx(0.75 * 3 + 0.25 * 4 * (divergence * weights).sum(), rel=1e-5)
    assert float(found[1]) == 4
    numbers = computed(class_divergence, np.array([[1.0]]), np.array([[3.0]]))
    assert numbers.tolist() == [4]
    shares = 1 / (1 + np.exp(-teacher)), 1 / (1 + np.exp(-outputs))
    both = sum(p * np.log(p / q) for p, q in (shares, [1 - each for each in shares]))
    np.testing.assert_allclose(of_labels, both.mean(-1), rtol=1e-4)


@pytest.fixture(scope="module")
def topics(tmp_path_factory):
    return make_topics(tmp_path_factory.mktemp("topics"))


@pytest.fixture(scope="module")
def start(pretrained):
    return pretrained


@pytest.fixture(scope="module")
def learner(tmp_path_factory):
    """Returns a model that is known to learn, for slow tests."""
    return make_learner(tmp_path_factory.mktemp("learner"))


@pytest.fixture(scope="module")
def teacher(start, tmp_path_factory):
    """Returns a model of the topics with a random classifier, its classes in another order than the student's."""
    return save_with_head(start, tmp_path_factory.mktemp("model") / "teacher", "classification", ("f", "b", "d"))


def save_with_head(start, path, name, labels=(), num_outputs=1, **settings):
    """Saves a model as one of a task, with a random head; returns the path."""
    bert, config = load_pretrained(start), TaskConfig(name=name, **settings)
    head = make_task(config, labels).head
    shapes = jax.eval_shape(
        lambda: init_params(bert.config, jax.random.key(0), head, num_outputs=len(labels) or num_outputs)
    )
    params = {part: drawn_like(shape, 0.1 if part == "encoder" else 3.0) for part, shape in shapes.items()}
    own = {"task": head.name, "labels": labels, "task_settings": to_dict(config)}
    save_pretrained(dataclasses.replace(bert, params=params, **own), path)
    return path


def taught_losses(config, teachers, *students):
    """Returns the loss on the first batch of a run for each of some parameters, which learns from teachers alone.

    Nothing is trained: what a run reads, asks its teachers and makes of their answers is all that is compiled.
    """
    config = dataclasses.replace(
        config, teacher=TeacherConfig(",".join(map(str, teachers)), temperature=2.0, weight=1.0)
    )
    mesh = make_mesh(config.mesh, jax.devices()[: config.mesh.data * config.mesh.fsdp * config.mesh.tensor])
    if isinstance(config, FinetuneConfig):
        inputs = fit_into_memory(open_task(choose_precision(config, mesh.devices.flat[0])), mesh, 2.0**40)
        training = Finetuning(inputs, inputs.start, mesh, to_place("nowhere"))
    else:
        training = Pretraining(open_corpora(config, mesh), mesh)
    (stage,) = training.stages
    batches = stage.batches(0)
    batch = next(batches)
    batches.close()
    losses = jax.jit(lambda params: stage.objective.losses(params, batch, None))
    with jax.set_mesh(mesh):
        found = [losses(jax.tree.map(np.asarray, params)) for params in students]
    pairs = [each.get("loss", each.get("mlm_loss")) for each in found]
    return [float(total / weight) for total, weight in pairs]


def another(params):
    """Returns the parameters of another model of the same shapes."""
    return jax.tree.map(lambda leaf: 1.5 * np.asarray(leaf) + np.linspace(-0.1, 0.2, leaf.shape[-1]), params)


def test_classes_are_learnt_from_teachers_alone(topics, start, teacher):
    """Whatever the labels. Their classes have another order, and the mean of a teacher with itself is what it says.

    They are computed in the student's dtype: in float32 the loss would be 1e-3 from bfloat16.
    """
    params = load_pretrained(teacher).params
    ordered = params | {"classifier": {name: leaf[..., [1, 2, 0]] for name, leaf in params["classifier"].items()}}
    model = FinetuneModelConfig(hidden_dropout_rate=0.0, compute_dtype="bfloat16")
    config = topics_run(topics, start, mesh=ONE_DEVICE, model=model)
    same, other = taught_losses(config, [teacher, teacher], ordered, another(ordered))
    assert abs(same) < 1e-5 and other > 1e-3


@pytest.mark.slow
def test_a_student_of_a_trained_teacher_is_as_good(topics, learner, tmp_path):
    """The labels of its training data are wrong, and do not count."""
    config = topics_run(topics, learner, train=FinetuneTrainConfig(num_epochs=5.0))
    config = dataclasses.replace(config, task=dataclasses.replace(config.task, labels="f,b,d"))
    assert finetune(config, tmp_path / "teacher", jax.devices()[:1]).metrics["accuracy"] > 0.95
    teacher = tmp_path / "teacher" / "finetuned"
    lines = (topics / "train.tsv").read_text().splitlines()
    wrong = [lines[0], *(f"{line.rpartition(chr(9))[0]}\t{'bdf'[number % 3]}" for number, line in enumerate(lines[1:]))]
    (tmp_path / "train.tsv").write_text("\n".join(wrong))
    config = topics_run(f"{tmp_path}/train.tsv,{topics}/dev.tsv", learner, train=FinetuneTrainConfig(num_epochs=6.0))
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
    save_with_head(start, tmp_path / "teacher", "classification", labels, probe=ProbeConfig(**theirs))
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


def test_teachers_of_vectors_have_their_own_size_and_pooling(start, tmp_path, monkeypatch):
    """On eight devices; what they compute with these is not this test's."""
    asked = []

    def forward(model, params, batch, head, *_):
        asked.append((model.hidden_size, head.settings.pooling))
        return params["encoder"]["embeddings"]["word"]["embedding"][batch.token_ids[:, 1:2]]

    monkeypatch.setattr(teachers, "forward", forward)
    cls = as_embeddings(start, tmp_path / "cls", pooling="cls")
    wide = as_embeddings(make_pretrained(tmp_path, hidden_size=48, num_layers=1), tmp_path / "wide", pooling="max")
    mesh, student = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)), load_pretrained(start)
    about = Teaching(mesh, student.tokenizer, EMBEDDINGS, student.config, 16)
    batch = jax.device_put(pad_rows([[CLS, word] for word in (5, 6, 7, 8)], 16), row_sharding(mesh))
    (found,) = learnt_from(TeacherConfig(f"{cls},{wide}"), about)(iter([batch]))
    assert asked == [(32, "cls"), (48, "max")]
    tables = [load_pretrained(each).params["encoder"]["embeddings"]["word"]["embedding"] for each in (cls, wide)]
    rows = [table[5:9] / np.linalg.norm(table[5:9], axis=-1, keepdims=True) for table in tables]
    np.testing.assert_allclose(found.teacher[:, 0], np.concatenate(rows, axis=-1), rtol=1e-5)


@pytest.mark.slow
def test_vectors_of_trained_students_are_alike_on_any_mesh(pairs, learner, tmp_path):
    other = as_embeddings(learner, tmp_path / "cls", pooling="cls")
    wide = as_embeddings(make_pretrained(tmp_path, hidden_size=48, num_layers=1), tmp_path / "wide")
    train = FinetuneTrainConfig(num_epochs=12.0)
    first, last = first_and_last_loss(vectors_run(pairs, learner, other, wide, train=train), tmp_path / "run")
    assert 1e-3 < last < first / 2
    train = FinetuneTrainConfig(num_epochs=12.0, accumulate=2)
    divided = vectors_run(pairs, learner, other, wide, train=train, mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    assert first_and_last_loss(divided, tmp_path / "divided", 8) == pytest.approx((first, last), rel=1e-2)


@pytest.mark.slow
def test_scores_of_tokens_are_learnt_from_a_teacher_of_another_size_on_any_mesh(pairs, start, tmp_path):
    settings = EmbeddingConfig(kind="multi_vector", projection_size=8, projection_activation="none", query_length=9)
    own, kernels = dataclasses.replace(settings, projection_size=4), np.random.default_rng(0).normal(size=(32, 12))
    teacher, student = load_pretrained(start), load_pretrained(start).params["encoder"]
    projected = {"encoder": student, "projection": {"kernel": np.float32(kernels[:, :8])}}
    task = to_dict(TaskConfig(name="embeddings", max_seq_length=16, embedding=settings))
    save_pretrained(
        dataclasses.replace(teacher, params=projected, task="token_embeddings", task_settings=task), tmp_path / "own"
    )
    config = vectors_run(pairs, start, mesh=ONE_DEVICE)
    config = dataclasses.replace(config, task=dataclasses.replace(config.task, embedding=settings))
    narrow = {"encoder": student, "projection": {"kernel": np.float32(kernels[:, 8:])}}
    (same,) = taught_losses(config, [tmp_path / "own"], projected)
    assert same == pytest.approx(0, abs=1e-6)
    config = dataclasses.replace(config, task=dataclasses.replace(config.task, embedding=own))
    (one,) = taught_losses(config, [tmp_path / "own"], narrow)
    divided = dataclasses.replace(config, mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    assert taught_losses(divided, [tmp_path / "own"], narrow) == [pytest.approx(one, rel=1e-4)] and one > 1e-3


@pytest.mark.slow
def test_a_guide_is_asked_on_any_mesh(pairs, learner, tmp_path):
    """Gist, in microbatches on eight devices too, learns what it learns on one, and not what InfoNCE learns."""
    guide = as_embeddings(make_pretrained(tmp_path, hidden_size=48, num_layers=1), tmp_path / "wide")

    def losses(name, devices=1, accumulate=1, **settings):
        task = TaskConfig(name="embeddings", max_seq_length=16, embedding=EmbeddingConfig(**settings))
        train = FinetuneTrainConfig(num_epochs=4.0, accumulate=accumulate)
        config = dataclasses.replace(vectors_run(pairs, learner, train=train), task=task)
        if settings:
            config = dataclasses.replace(config, teacher=TeacherConfig(str(guide)))
        if devices > 1:
            config = dataclasses.replace(config, mesh=MeshConfig(data=2, fsdp=2, tensor=2))
        return first_and_last_loss(dataclasses.replace(config), tmp_path / name, devices)

    first, last = losses("gist", loss="gist")
    assert last < first and abs(first - losses("infonce")[0]) > 1e-2
    assert losses("divided", 8, 2, loss="gist") == pytest.approx((first, last), rel=1e-2)


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["squad1", "choice"])
def test_spans_and_choices_are_learnt_from_a_teacher(start, tmp_path, name):
    source = write_questions(tmp_path / "data", name)
    settings = {"max_seq_length": 16, "max_query_length": 4}
    teacher = save_with_head(start, tmp_path / "teacher", name, **settings)
    config = topics_run(source, start, task=TaskConfig(name=name, **settings), mesh=ONE_DEVICE)
    params = load_pretrained(teacher).params
    same, other = taught_losses(config, [teacher], params, another(params))
    assert abs(same) < 1e-5 and other > 1e-3


PROBE = ProbeConfig(features="last", kind="linear")


def numbers_run(start, directory):
    """Returns a run of regression, whose head is a probe."""
    (directory / "train.tsv").write_text("text\tlabel\n" + "ban bar\t1.5\ndan dar\t-0.5\n" * 8)
    task = TaskConfig(name="regression", max_seq_length=16, probe=PROBE)
    return topics_run(directory / "train.tsv", start, task=task, mesh=ONE_DEVICE)


def test_numbers_are_learnt_from_a_teacher_of_the_same_probe_and_number_of_outputs(start, tmp_path):
    config = numbers_run(start, tmp_path)
    teacher = save_with_head(start, tmp_path / "teacher", "regression", probe=PROBE)
    params = load_pretrained(teacher).params
    same, other = taught_losses(config, [teacher], params, another(params))
    assert abs(same) < 1e-5 and other > 1e-3
    three = save_with_head(start, tmp_path / "three", "regression", num_outputs=3, probe=PROBE)
    with pytest.raises(InputError, match="has another number of outputs than the student; give the same"):
        taught_losses(config, [three], params)


def test_masked_words_are_learnt_from_models_of_masked_words(start, toy_data, tmp_path):
    """A model of vectors had taken its own head, whose vectors passed for logits."""
    bert = load_pretrained(start)
    config = dataclasses.replace(tiny_run(toy_data), teacher=TeacherConfig(str(tmp_path / "vectors"), weight=1.0))
    encoder = {"encoder": bert.params["encoder"]}
    save_pretrained(dataclasses.replace(bert, params=encoder, task="sentence_embedding"), tmp_path / "vectors")
    with pytest.raises(InputError, match="teaches sentence_embedding, and the student's task is masked_lm"):
        pretrain(config, tmp_path / "run", jax.devices()[:1])


def test_vectors_are_learnt_from_models_of_vectors(pairs, start, tmp_path):
    with pytest.raises(InputError, match="teaches pretraining, and the student's task is sentence_embedding"):
        finetune(vectors_run(pairs, start, start), tmp_path / "run", jax.devices()[:1])
    assert not (tmp_path / "run").exists()


def test_a_teacher_that_does_not_divide_over_the_mesh_is_named(toy_data, tmp_path):
    config = tiny_run(toy_data, mesh=MeshConfig(data=1, fsdp=8))
    teacher = make_pretrained(tmp_path, hidden_size=36)
    with pytest.raises(
        InputError, match=r"teacher\.checkpoint .* model\.hidden_size 36 is not divisible by mesh\.fsdp 8"
    ):
        pretrain(dataclasses.replace(config, teacher=TeacherConfig(str(teacher))), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_masked_words_are_learnt_from_a_teacher(start, toy_data):
    """A student that is its teacher has nothing to learn, whatever the true words are; from another one it learns."""
    params = load_pretrained(start).params
    same, other = taught_losses(tiny_run(toy_data, mesh=MeshConfig(data=2)), [start], params, another(params))
    assert abs(same) < 1e-5 and other > 1e-3
