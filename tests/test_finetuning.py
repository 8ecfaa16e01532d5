# SPDX-License-Identifier: Apache-2.0
"""Whole fine-tuning runs on a toy language: they learn, keep the best, predict, resume, refuse what does not fit."""

import dataclasses
import gc
import json
import shutil
import signal

import jax
import numpy as np
import pytest
from blank_figures import drawn
from builders import make_learner, make_pretrained, make_topics, topics_run
from whole_runs import stop_at

import bert_jax
from bert_jax.errors import InputError
from bert_jax.finetuning import TaskStage, finetune, finish
from bert_jax.model.objective import count_parameters
from bert_jax.settings.finetuning import (
    FinetuneDataConfig,
    FinetuneModelConfig,
    FinetuneTrainConfig,
    ProbeConfig,
    TaskConfig,
)
from bert_jax.settings.pretraining import EvalConfig, MeshConfig, OptimizerConfig
from bert_jax.tasks.embeddings.read import TextsExample
from bert_jax.tasks.evaluation import Data, Split
from bert_jax.tasks.prepare import compared, open_task, prepare
from bert_jax.tasks.results import describe_task
from bert_jax.training.loop import train_loop
from bert_jax.training.report import read_metrics


@pytest.fixture(scope="module")
def topics(tmp_path_factory):
    return make_topics(tmp_path_factory.mktemp("topics"))


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return make_learner(tmp_path_factory.mktemp("start"))


def train(config, workdir):
    return finetune(config, workdir, jax.devices()[: config.mesh.data])


@pytest.fixture(scope="module")
def finished(topics, start, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finetune") / "run"
    with drawn():
        return workdir, train(topics_run(topics, start), workdir)


def evaluations(workdir):
    return {r["step"]: r for r in read_metrics(workdir / "metrics.jsonl") if r["kind"] == "eval"}


def test_it_learns_and_the_best_is_kept(finished):
    workdir, result = finished
    scores = {step: record["accuracy"] for step, record in evaluations(workdir).items()}
    assert sorted(scores) == [10, 20, 30]  # after each epoch of 160 / 16 steps
    assert result.metrics["accuracy"] == max(scores.values()) == scores[result.step]
    assert result.metrics["accuracy"] > 0.8 > 0.6 > result.constant["accuracy"]
    left = json.loads((workdir / "results.json").read_text())
    assert left["metrics"] == result.metrics and left["task"] == "classification"
    assert (workdir / "curves.png").stat().st_size > 5_000


def test_the_model_predicts_what_was_evaluated(finished, topics):
    workdir, result = finished
    predictor = bert_jax.load_predictor(workdir)
    lines = [line.split("\t") for line in (topics / "dev.tsv").read_text().splitlines()[1:]]
    predictions = predictor([text for text, _ in lines])
    hits = [prediction.label == label for prediction, (_, label) in zip(predictions, lines)]
    assert np.mean(hits) == pytest.approx(result.metrics["accuracy"])
    assert all(sum(prediction.probabilities.values()) == pytest.approx(1) for prediction in predictions)
    alone = [predictor([text])[0] for text, _ in lines[:3]]
    for one, other in zip(alone, predictions):
        assert one.label == other.label
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-5)


def test_predictions_of_every_split_are_written(finished):
    names = sorted(path.name for path in (finished[0] / "predictions").iterdir())
    assert any("dev" in name for name in names) and any("test" in name for name in names)
    for path in (finished[0] / "predictions").iterdir():
        assert len(path.read_text().splitlines()) in (20, 21, 60, 61)


def test_labels_and_settings_travel_with_the_model(finished):
    bert = bert_jax.load_pretrained(finished[0])
    assert bert.task == "sequence_classification" and bert.labels == ("b", "d", "f")
    assert bert.task_settings["name"] == "classification" and bert.task_settings["max_seq_length"] == 16


@pytest.mark.slow
def test_fine_tuning_goes_on_from_its_own_head(finished, topics, tmp_path, capsys):
    optimizer = OptimizerConfig(learning_rate=1e-6, warmup_steps=0)
    config = topics_run(topics, finished[0], train=FinetuneTrainConfig(num_epochs=0.1), optimizer=optimizer)
    result = train(config, tmp_path / "run")
    assert result.metrics["accuracy"] == pytest.approx(finished[1].metrics["accuracy"], abs=0.05)
    assert "starts at random" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_head_of_other_classes_is_not_used(finished, tmp_path, capsys):
    source = make_topics(tmp_path / "topics", 40, 10)
    for name in ("train", "dev"):
        path = source / f"{name}.tsv"
        path.write_text(path.read_text().replace("\tf\n", "\tother\n"))
    train(topics_run(source, finished[0], train=FinetuneTrainConfig(num_epochs=0.1)), tmp_path / "run")
    told = capsys.readouterr().err
    assert "its classifier, of b, d, f, is not used" in told and "it has no classifier, which starts at random" in told


@pytest.mark.slow
def test_random_takes_the_shape_alone(topics, start, tmp_path):
    train_config = FinetuneTrainConfig(num_epochs=0.1)
    train(topics_run(topics, f"random:{start}", train=train_config), tmp_path / "run")
    ours = bert_jax.load_pretrained(tmp_path / "run").params["encoder"]["layers"]["mlp"]["output"]["kernel"]
    theirs = bert_jax.load_pretrained(start).params["encoder"]["layers"]["mlp"]["output"]["kernel"]
    assert ours.shape == theirs.shape and not np.allclose(ours, theirs, atol=1e-3)


@pytest.mark.slow
def test_stopped_and_resumed_is_as_if_nothing_had_happened(finished, topics, start, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(patch, 14)
        stopped = train(topics_run(topics, start), tmp_path / "run")
    assert stopped.signal == signal.SIGTERM and 14 <= stopped.step < 30
    resumed = train(topics_run(topics, start), tmp_path / "run")
    assert resumed.metrics == finished[1].metrics and resumed.step == finished[1].step
    ours, theirs = (bert_jax.load_pretrained(path).params for path in (tmp_path / "run", finished[0]))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert {s: r["loss"] for s, r in evaluations(tmp_path / "run").items()} == {
        s: r["loss"] for s, r in evaluations(finished[0]).items()
    }


def test_a_finished_run_is_not_trained_again(finished, topics, start):
    """With other microbatches it is the same run."""
    before = read_metrics(finished[0] / "metrics.jsonl")
    again = train(topics_run(topics, start, train=FinetuneTrainConfig(num_epochs=3.0, accumulate=4)), finished[0])
    assert again.metrics == pytest.approx(finished[1].metrics, rel=1e-5)
    assert read_metrics(finished[0] / "metrics.jsonl") == before


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 1}, {"data": 1, "fsdp": 4}])
def test_parameters_are_held_once(topics, start, tmp_path, monkeypatch, sizes):
    """With Adam's two means while it trains, and alone at the end: the start, copies and other states are dropped."""
    held = {}

    def bytes_of_arrays():
        gc.collect()
        shards = [shard.data for array in jax.live_arrays() for shard in array.addressable_shards]
        return sum({shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}.values())  # some are one buffer

    def at(name, function):
        def measured(*arguments, **more):
            held.setdefault(name, bytes_of_arrays() - before)
            return function(*arguments, **more)

        return measured

    monkeypatch.setattr("bert_jax.training.train.train_loop", at("first step", train_loop))
    monkeypatch.setattr("bert_jax.finetuning.finish", at("end", finish))
    train_file = topics / "train.tsv"  # alone: what evaluates is not compiled
    config = topics_run(train_file, start, mesh=MeshConfig(**sizes))
    size = 4 * count_parameters(bert_jax.load_pretrained(start).params["encoder"])  # a classifier is small
    before = bytes_of_arrays()
    finetune(config, tmp_path / "run", jax.devices()[: sizes.get("fsdp", 1)])
    small = 0.5 * (len(sizes) - 1)  # norms and biases are on each device
    assert 2.9 * size < held["first step"] < (3.1 + small) * size
    assert 0.9 * size < held["end"] < (1.1 + small) * size


@pytest.mark.slow
def test_devices_change_nothing_but_rounding(topics, start, tmp_path):
    data = FinetuneDataConfig(source=str(topics), batch_size=16, pack="on")
    for count in (1, 4):
        train(topics_run(topics, start, data=data, mesh=MeshConfig(data=count)), tmp_path / str(count))
    for step, record in evaluations(tmp_path / "1").items():
        assert evaluations(tmp_path / "4")[step]["loss"] == pytest.approx(record["loss"], rel=2e-3)


@pytest.mark.slow
def test_without_buckets_the_evaluation_is_the_same(finished, topics, start, tmp_path):
    shutil.copytree(finished[0], tmp_path / "run")
    data = FinetuneDataConfig(source=str(topics), batch_size=16, bucket=False)
    config = topics_run(topics, finished[0], data=data, train=FinetuneTrainConfig(num_epochs=0.1))
    config = dataclasses.replace(config, optimizer=OptimizerConfig(learning_rate=0.0, warmup_steps=0))
    assert train(config, tmp_path / "other").metrics == pytest.approx(finished[1].metrics, abs=1e-5)


@pytest.mark.slow
def test_evaluation_may_come_more_often(topics, start, tmp_path):
    config = topics_run(topics, start, eval=EvalConfig(every_steps=4), train=FinetuneTrainConfig(num_epochs=1.0))
    train(config, tmp_path / "run")
    assert sorted(evaluations(tmp_path / "run")) == [4, 8, 10]


@pytest.mark.slow
def test_a_probe_trains_predicts_and_leaves_the_encoder(finished, topics, tmp_path):
    probe = ProbeConfig(features="weighted_all", num_layers=1, hidden_size=16)
    task = TaskConfig(name="classification", max_seq_length=16, probe=probe)
    result = train(topics_run(topics, finished[0], task=task), tmp_path / "run")
    assert result.metrics["accuracy"] > 0.6 > result.constant["accuracy"]
    ours, theirs = (bert_jax.load_pretrained(path).params["encoder"] for path in (tmp_path / "run", finished[0]))
    jax.tree.map(np.testing.assert_array_equal, ours["layers"], theirs["layers"])
    jax.tree.map(np.testing.assert_array_equal, ours["embeddings"], theirs["embeddings"])
    assert bert_jax.load_predictor(tmp_path / "run")(["ban ber bis"])[0].label in ("b", "d", "f")


@pytest.mark.slow
@pytest.mark.parametrize("bilstm", [False, True])
def test_a_model_that_reads_from_left_to_right_learns_too(topics, tmp_path, bilstm):
    probe = ProbeConfig(features="last", num_layers=1, hidden_size=16, train_encoder=True) if bilstm else ProbeConfig()
    task = TaskConfig(name="classification", max_seq_length=16, probe=probe)
    start = make_learner(tmp_path, causal=True)
    result = train(topics_run(topics, start, task=task), tmp_path / "run")
    assert result.metrics["accuracy"] > 0.7 > 0.6 > result.constant["accuracy"]
    left = bert_jax.load_pretrained(tmp_path / "run")
    assert left.config.causal and ("probe" in left.params) == bilstm
    before = bert_jax.load_pretrained(start).params["encoder"]["layers"]["mlp"]["output"]["kernel"]
    assert not np.array_equal(left.params["encoder"]["layers"]["mlp"]["output"]["kernel"], before)
    lines = [line.split("\t") for line in (topics / "dev.tsv").read_text().splitlines()[1:]]
    found = bert_jax.load_predictor(tmp_path / "run")([text for text, _ in lines])
    right = np.mean([each.label == label for each, (_, label) in zip(found, lines)])
    assert right == pytest.approx(result.metrics["accuracy"])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"task": TaskConfig(name="")}, "task.name is empty"),
        ({"task": TaskConfig(name="sst3")}, r"no task 'sst3' \(did you mean 'sst2'\?\)"),
        ({"task": TaskConfig(name="ax")}, "has no training data"),
        ({"task": TaskConfig(name="classification", max_seq_length=512)}, "above the 64 positions"),
        (
            {"task": TaskConfig(name="classification", max_seq_length=16, label_column="x")},
            "it has 'sentence', 'label'",
        ),
        ({"data": FinetuneDataConfig()}, "data.path is empty"),
        ({"data": FinetuneDataConfig(source="nowhere")}, "nowhere"),
        ({"data": FinetuneDataConfig(source="a", path="b")}, "name two places"),
        ({"init_checkpoint": ""}, "init_checkpoint is empty"),
        ({"init_checkpoint": "nowhere"}, "nowhere does not exist"),
        ({"train": FinetuneTrainConfig(num_epochs=0.0)}, "num_epochs 0.0 is not from"),
        ({"train": FinetuneTrainConfig(accumulate=3)}, "16 is not divisible by accumulate 3"),
        ({"optimizer": OptimizerConfig(layer_decay=0.0)}, "layer_decay 0.0 is not from"),
        (
            {"task": TaskConfig(name="classification", max_seq_length=16, probe=ProbeConfig(features="concat_last4"))},
            "of 4 layers, and the model has 2",
        ),
        (
            {"task": TaskConfig(name="classification", max_seq_length=16, probe=ProbeConfig(train_encoder=True))},
            "task.probe.train_encoder needs task.probe.features",
        ),
    ],
)
def test_bad_settings_are_one_line_and_write_nothing(topics, start, tmp_path, change, expected):
    with pytest.raises(InputError, match=expected) as caught:
        train(topics_run(topics, start, **change), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_table_is_not_streamed(topics, start, tmp_path):
    data = FinetuneDataConfig(source=str(topics), stream="on")
    with pytest.raises(InputError, match=r"stream=on reads prepared pairs while a run trains, and .* is read whole"):
        train(topics_run(topics, start, data=data), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("dev", "sentence\tlabel\nban\tq\n", r"dev.tsv:2.*'q'"),
        ("train", "sentence\tlabel\n", "train"),
        ("train", "", "train.tsv"),
        ("train", "sentence\tlabel\nban\n", "train.tsv:2"),
        ("train", "sentence\tlabel\nban\t\n", "train.tsv:2.*label"),
    ],
)
def test_bad_data_names_file_and_line(topics, start, tmp_path, name, text, expected):
    shutil.copytree(topics, tmp_path / "data")
    (tmp_path / "data" / f"{name}.tsv").write_text(text)
    with pytest.raises(InputError, match=expected) as caught:
        train(topics_run(tmp_path / "data", start), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_dev_row_without_a_label_is_found_before_training(topics, start, tmp_path):
    shutil.copytree(topics, tmp_path / "data")
    (tmp_path / "data" / "dev.tsv").write_text("sentence\tlabel\nban\tb\nban\t\n")
    with pytest.raises(InputError, match=r"dev.tsv:3 has no label"):
        prepare(topics_run(tmp_path / "data", start), bert_jax.load_pretrained(start))


@pytest.mark.parametrize(
    ("trained", "changes", "expected"),
    [
        ({"gradient_dtype": "bfloat16"}, {"compute_dtype": "float32"}, ("float32", "float32", "default")),
        ({"gradient_dtype": "bfloat16"}, {"compute_dtype": "bfloat16"}, ("bfloat16", "bfloat16", "default")),
        ({"gradient_dtype": "bfloat16"}, {"matmul_precision": "highest"}, ("float32", "float32", "highest")),
    ],
)
def test_the_model_of_a_run_may_be_computed_in_another_dtype(topics, tmp_path, trained, changes, expected):
    narrow = make_pretrained(tmp_path, compute_dtype="bfloat16", **trained)
    settings = FinetuneModelConfig(**{"compute_dtype": "float32"} | changes)
    model = open_task(topics_run(topics, narrow, model=settings)).model
    model.validate()  # as when it is loaded
    assert (model.compute_dtype, model.gradient_dtype, model.matmul_precision) == expected


@pytest.mark.parametrize(("num_outputs", "kept"), [(3, False), (1, True)])
def test_a_head_without_names_is_kept_for_as_many_outputs(start, tmp_path, num_outputs, kept):
    (tmp_path / "train.tsv").write_text("text\tscore\nban\t1\nbis\t2\n")
    classifier = {"kernel": np.zeros((32, num_outputs)), "bias": np.zeros(num_outputs)}
    bert = bert_jax.load_pretrained(start)
    bert = dataclasses.replace(
        bert, params=bert.params | {"classifier": classifier}, task="sequence_classification", labels=()
    )
    task = TaskConfig(name="regression", max_seq_length=16)
    _, found, _ = prepare(topics_run(tmp_path / "train.tsv", start, task=task), bert)
    assert ("classifier" in found.params) == kept
    assert ("its classifier, of 3 classes, is not used" in found.notes) != kept


def test_evaluating_on_the_training_data_is_told(topics, start):
    def lines(source):
        config = topics_run(source, start)
        task, bert, data = prepare(config, bert_jax.load_pretrained(start))
        return describe_task(config, task, data, 1)

    train_file = topics / "train.tsv"
    warnings = [line for line in lines(f"{train_file},{train_file}") if line.startswith("warning")]
    assert warnings == [
        "warning: dev is the training data, so the metrics say nothing of new data; give TRAIN_FILE,DEV_FILE"
    ]
    told = " ".join(lines(topics))
    assert "warning" not in told and "train: 160 examples of columns sentence, label, 160 rows" in told
    assert "test: 20 examples of columns sentence, 20 rows" in told


@pytest.mark.slow
def test_squad2_predicts_by_a_threshold_that_reproduces_the_best_f1(start, tmp_path):
    """A model that has learnt nothing is best where it answers nothing."""
    qas = [{"id": str(number), "question": "ban", "answers": [], "is_impossible": True} for number in range(8)]
    qas.append({"id": "x", "question": "bis", "answers": [{"text": "fun", "answer_start": 12}]})
    source = tmp_path / "own.json"
    source.write_text(json.dumps({"data": [{"paragraphs": [{"context": "ban bis den fun", "qas": qas}]}]}))
    config = topics_run(
        source,
        start,
        task=TaskConfig(name="squad2", max_seq_length=32, max_query_length=8),
        train=FinetuneTrainConfig(num_epochs=1.0),
        optimizer=OptimizerConfig(learning_rate=0.0, warmup_steps=0),
    )
    metrics = train(config, tmp_path / "run").metrics
    assert metrics["best_f1_thresh"] == 0 and metrics["f1"] == metrics["best_f1"] == pytest.approx(800 / 9)
    settings = bert_jax.load_pretrained(tmp_path / "run").task_settings
    assert settings["null_threshold"] != 0
    said = json.loads((tmp_path / "run" / "predictions" / "predictions.json").read_text())
    assert set(said.values()) == {""}


def test_a_work_directory_of_another_run_is_refused(finished, topics, start):
    config = topics_run(topics, start, optimizer=OptimizerConfig(learning_rate=1e-5))
    with pytest.raises(InputError, match=r"another .*optimizer\.learning_rate"):
        train(config, finished[0])


def test_other_data_is_refused(finished, start, tmp_path):
    with pytest.raises(InputError, match="was trained on other data"):
        train(topics_run(make_topics(tmp_path / "other", 30), start), finished[0])


def test_a_run_without_better_evaluations_ends_early(topics, start, tmp_path, monkeypatch):
    """The notes of its last checkpoint say so: the same command adds no step, and gives the same results."""
    evaluation = TaskStage.evaluation

    def none_is_better_than_the_first(stage):
        evaluate = evaluation(stage)
        return lambda *given, **options: evaluate(*given, **options) | {"accuracy": 0.5}

    monkeypatch.setattr(TaskStage, "evaluation", none_is_better_than_the_first)
    config = topics_run(
        topics, start, train=FinetuneTrainConfig(num_epochs=3.0, patience=2), eval=EvalConfig(every_steps=4)
    )
    result = train(config, tmp_path / "run")
    steps = sorted(evaluations(tmp_path / "run"))
    assert steps == [4, 8, 12] and result.step == 4 and not result.signal
    again = train(config, tmp_path / "run")
    assert again.metrics == result.metrics and sorted(evaluations(tmp_path / "run")) == steps
    longer = dataclasses.replace(config, train=FinetuneTrainConfig(num_epochs=3.0, patience=3))
    train(longer, tmp_path / "run")
    assert len(evaluations(tmp_path / "run")) == 4


@pytest.mark.slow
def test_microbatches_may_change_when_a_run_goes_on(topics, start, tmp_path, monkeypatch):
    config = topics_run(
        topics,
        start,
        model=FinetuneModelConfig(0.0, 0.0),
        data=FinetuneDataConfig(source=str(topics), batch_size=16, pack="off"),
    )
    train(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_at(patch, 12)
        assert train(config, tmp_path / "changed").signal
    train(dataclasses.replace(config, train=FinetuneTrainConfig(num_epochs=3.0, accumulate=4)), tmp_path / "changed")
    losses = [
        [r["loss"] for r in read_metrics(tmp_path / name / "metrics.jsonl") if r["kind"] == "train"]
        for name in ("whole", "changed")
    ]
    np.testing.assert_allclose(*losses, rtol=2e-3, atol=1e-5)


def test_processes_compare_what_rows_do_not_hold():
    """The grades of a query's passages are in no row; where each process read them is its own affair."""

    def told(where, grade):
        query = TextsExample(("a",), id="q", where=where, relevant={"p": grade})
        empty = Split("train", [], [], {})
        return compared(
            bert_jax.Pretrained(bert_jax.ModelConfig(), {}, None), Data(empty, [Split("dev", [query], [], {})], [])
        )

    assert told("/here/qrels.tsv, line 2", 1.0) == told("/there/qrels.tsv, line 2", 1.0) != told("/here/qrels.tsv", 2.0)
