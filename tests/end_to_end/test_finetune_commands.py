# SPDX-License-Identifier: Apache-2.0
"""The commands of fine-tuning as a user types them: train, predict, score, export, extract features."""

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pyarrow.parquet
import pytest
from builders import make_learner, make_topics, tiny_model
from commands import assert_one_line, run_python, variables

import bert_jax
from bert_jax.checkpoints.pretrained import Pretrained, save_pretrained
from bert_jax.model.heads.table import HEADS
from bert_jax.model.objective import init_params
from bert_jax.settings.finetuning import EmbeddingConfig, TaskConfig
from bert_jax.settings.rules import to_dict
from bert_jax.tokenizing import load_tokenizer

TOPICS = (
    "--config=configs/finetune.py:classification --config.task.max_seq_length=16 --config.data.batch_size=8 "
    "--config.optimizer.learning_rate=5e-3 --config.optimizer.bias_correction=True --config.report.every_steps=5 "
    "--config.report.tensorboard=False --config.checkpoint.every_steps=5"
).split()
SENTENCES = ["ban ber bis", "dan der dis the the the the the the the the", "fan fer", "gan lar mon pet ."]


def run(repository, *arguments, text=None):
    return run_python(arguments, repository, text, variables(repository))


def tool(repository, name, text=None, **options):
    flags = [f"--{option}={value}" for option, value in options.items()]
    return run(repository, "-m", f"bert_jax.tools.{name}", *flags, text=text)


def make_model(directory: Path, task: str, head: str, labels=(), **settings) -> Path:
    """Returns a directory with an untrained model for a task, of the toy language."""
    directory.mkdir(exist_ok=True)
    pretrained = bert_jax.load_pretrained(make_learner(directory))
    config = tiny_model(vocab_size=pretrained.tokenizer.vocab_size, initializer_stddev=0.5)
    num_outputs = 1 if task in ("regression", "choice") else len(labels)
    params = jax.jit(functools.partial(init_params, config, head=HEADS[head], num_outputs=num_outputs))(
        jax.random.key(3)
    )
    about = to_dict(TaskConfig(name=task, max_seq_length=32, **settings))
    bert = Pretrained(config, params, pretrained.tokenizer, head, tuple(labels), task_settings=about)
    save_pretrained(bert, directory / "model")
    return directory / "model"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Returns an untrained encoder."""
    return make_learner(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return make_model(
        tmp_path_factory.mktemp("classifier"), "classification", "sequence_classification", ("b", "d", "f")
    )


@pytest.fixture(scope="module")
def topics(tmp_path_factory):
    return make_topics(tmp_path_factory.mktemp("topics"))


@pytest.fixture(scope="module")
def trained(repository, start, topics, tmp_path_factory):
    """Returns the work directory of a finished run, and what it said."""
    workdir = tmp_path_factory.mktemp("finetune") / "run"
    result = run(repository, *train(start, topics, workdir))
    assert result.returncode == 0, result.stderr
    return workdir, result.stderr


def train(start, topics, workdir, *more):
    places = (f"--config.init_checkpoint={start}", f"--config.data.path={topics}", f"--workdir={workdir}")
    named = {flag.partition("=")[0] for flag in more}  # a flag stands once in a command
    usual = [flag for flag in TOPICS if flag.partition("=")[0] not in named]
    first = [flag for flag in (*usual, *more) if flag.startswith("--config=")]  # before the settings that it has
    return ("finetune.py", *first, *(flag for flag in (*usual, *places, *more) if flag not in first))


# Training


@pytest.mark.slow
def test_fine_tuning_says_what_it_does_and_leaves_the_best(trained):
    workdir, said = trained
    for part in (
        "task: classification",
        "3 classes (b, d, f)",
        "train: 160 examples",
        "constant",
        "the best by accuracy",
    ):
        assert part in said
    left = json.loads((workdir / "results.json").read_text())
    assert left["metrics"]["accuracy"] > 0.6 > left["constant"]["accuracy"]
    for name in ("config.json", "metrics.jsonl", "curves.png", "finetuned/config.json", "predictions"):
        assert (workdir / name).exists()


@pytest.mark.slow
def test_killed_fine_tuning_comes_to_the_same_result(repository, trained, start, topics, tmp_path):
    command = train(start, topics, tmp_path / "run")
    with open(tmp_path / "said", "w") as said:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=repository, env=variables(repository), stderr=said, stdout=said
        )
        deadline = time.time() + 300  # a busy machine
        while not (steps := saved(tmp_path / "run")) and time.time() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=120) == -9, (tmp_path / "said").read_text()
    steps = saved(tmp_path / "run")
    assert steps and steps[-1] < 60 and not (tmp_path / "run" / "results.json").exists()
    result = run(repository, *command)
    assert result.returncode == 0, result.stderr
    assert f"resume from step {steps[-1]}" in result.stderr
    left, wanted = (json.loads((path / "results.json").read_text()) for path in (tmp_path / "run", trained[0]))
    assert {**left, "seconds": 0} == {**wanted, "seconds": 0}
    ours, theirs = (bert_jax.load_pretrained(path).params for path in (tmp_path / "run", trained[0]))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def saved(workdir):
    """Returns the steps whose checkpoints are whole."""
    return sorted(int(path.parent.name) for path in (workdir / "checkpoints").glob("*/checksums.json"))


@pytest.mark.slow
def test_a_grid_of_runs_and_how_runs_compare(repository, trained, start, topics, tmp_path):
    grid = ("--config.sweep.seeds=2", "--config.train.num_epochs=0.5")
    result = run(repository, *train(start, topics, tmp_path / "grid", *grid))
    assert result.returncode == 0, result.stderr
    assert "run 2 of 2" in result.stderr and "deviation" in result.stderr
    result = tool(repository, "compare_runs", workdirs=f"{trained[0]},{tmp_path}/grid")
    assert result.returncode == 0, result.stderr
    header, one, two = (line.split() for line in result.stdout.splitlines())
    results = json.loads((trained[0] / "results.json").read_text())
    accuracy, constant = results["metrics"]["accuracy"], results["constant"]["accuracy"]
    assert one[:4] == [str(trained[0]), "accuracy", "1", f"{accuracy:.3f}"]
    assert two[2] == "2" and float(two[4]) <= float(two[3]) <= float(two[5])
    assert header[-2] == "constant" and one[-2] == f"{constant:.3f}"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "results.json").write_text(json.dumps(results | {"metric": "f1"}))
    assert_one_line(tool(repository, "compare_runs", workdirs=tmp_path / "other"), "has no 'f1', only", "accuracy")
    assert_one_line(tool(repository, "compare_runs", workdirs=tmp_path), "no results.json")


# Prediction


@pytest.mark.slow
def test_prediction_of_lines_from_a_file_or_a_pipe(repository, trained, tmp_path):
    workdir, _ = trained
    (tmp_path / "in.txt").write_text("\n\n".join(SENTENCES) + "\n")
    expected = bert_jax.load_predictor(workdir)(SENTENCES)
    result = tool(repository, "predict", checkpoint=workdir, input=tmp_path / "in.txt", output=tmp_path / "out.jsonl")
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [record["input"] for record in records] == ["", *"\n\n".join(SENTENCES).split("\n")][1:]
    assert records[1] == {"input": ""}  # a line for every line
    records = records[::2]
    for record, prediction in zip(records, expected, strict=True):
        assert record["label"] == prediction.label
        assert record["probabilities"] == pytest.approx(prediction.probabilities, abs=1e-5)
    lines = [SENTENCES[0], json.dumps({"sentence": SENTENCES[1]}), json.dumps([SENTENCES[2]]), SENTENCES[3]]
    result = tool(repository, "predict", checkpoint=workdir, format="json", text="\n".join(lines))
    assert result.returncode == 0, result.stderr
    piped = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["label"] for record in piped] == [record["label"] for record in records]
    result = tool(repository, "predict", checkpoint=workdir, text=SENTENCES[0])
    first, second = result.stdout.splitlines()
    assert first == SENTENCES[0] and second.split()[0] == expected[0].label and second.count("%") == 3


@pytest.mark.slow
def test_prediction_of_pairs(repository, tmp_path):
    settings = {"text_column": "sentence1", "second_text_column": "sentence2"}
    model = make_model(tmp_path, "classification", "sequence_classification", ("no", "yes"), **settings)
    pair = ("ban ber", "bis the")
    lines = ["\t".join(pair), json.dumps(pair), json.dumps({"sentence1": pair[0], "sentence2": pair[1]})]
    result = tool(repository, "predict", checkpoint=model, format="json", text="\n".join(lines))
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["input"] for record in records] == [
        list(pair),
        list(pair),
        {"sentence1": pair[0], "sentence2": pair[1]},
    ]
    (expected,) = bert_jax.load_predictor(model)([pair])
    for record in records:
        assert record["probabilities"] == pytest.approx(expected.probabilities, abs=1e-5)
    assert_one_line(tool(repository, "predict", checkpoint=model, text="\t".join(pair) + "\nban\n"), "line 2", "two")


@pytest.mark.slow
def test_a_table_with_labels_is_no_input_of_a_model_of_one_text(repository, trained, topics):
    assert json.loads((trained[0] / "finetuned" / "config.json").read_text())["task_settings"]["num_texts"] == 1
    result = tool(repository, "predict", checkpoint=trained[0], input=topics / "dev.tsv")
    assert_one_line(result, "dev.tsv:1:", "is not one text")


@pytest.mark.slow
def test_a_bad_line_is_named_and_no_output_is_left(repository, classifier, tmp_path):
    lines = ["ban ber", '{"sentence": "ban", ']
    (tmp_path / "in.txt").write_text("\n".join(lines))
    result = tool(
        repository, "predict", checkpoint=classifier, input=tmp_path / "in.txt", output=tmp_path / "out.jsonl"
    )
    assert_one_line(result, "in.txt:2", "JSON")
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("a\tb\tc", ["is not a text or two"]),
        ('{"title": "ban"}', ["has no", "'title'"]),
        ('{"sentence": 3}', ["{'sentence': 3} is not a text"]),
        ('["ban", "ber", "bis"]', ["is not a text"]),
    ],
)
def test_other_bad_lines_are_named(repository, classifier, line, parts):
    result = tool(repository, "predict", checkpoint=classifier, text=f"ban\n\n{line}\nber\n", format="json")
    assert_one_line(result, "line 3", *parts, "or give --lines=text, and every line is one text")
    assert [json.loads(each)["input"] for each in result.stdout.splitlines()] == ["ban", ""]
    options = {"text": f"ban\n\n{line}\nber\n", "format": "json", "lines": "text"}
    result = tool(repository, "predict", checkpoint=classifier, **options)
    assert result.returncode == 0, result.stderr
    assert [json.loads(each)["input"] for each in result.stdout.splitlines()] == ["ban", "", line, "ber"]


@pytest.mark.slow
def test_choices_for_people_and_lines_that_need_several_texts(repository, tmp_path):
    model = make_model(tmp_path, "choice", "multiple_choice")
    result = tool(repository, "predict", checkpoint=model, text="the\tban\tber\n")
    assert result.returncode == 0, result.stderr
    text, shown = result.stdout.splitlines()
    assert json.loads(text) == ["the", "ban", "ber"]
    assert sorted(part.split()[0] for part in shown.strip().split("  ")) == ["0", "1"] and shown.count("%") == 2
    result = tool(repository, "predict", checkpoint=model, text="the\tban\tber\n", lines="text")
    assert_one_line(result, "--lines=text is for models that read one text; leave it out")


@pytest.mark.slow
def test_entities_answers_and_numbers_for_people(repository, tmp_path):
    tags = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
    model = make_model(tmp_path / "ner", "ner", "token_classification", tags)
    text = "ban, ber (bis) dan der dis."
    result = tool(repository, "predict", checkpoint=model, text=text)
    assert result.returncode == 0, result.stderr
    (tagged,) = bert_jax.load_predictor(model)([text])
    assert tagged.entities, "choose another seed"
    lines = [f"{each.type}  {each.text!r}  {each.start}-{each.end}" for each in tagged.entities]
    assert [line.strip() for line in result.stdout.splitlines()] == [text, *lines]
    assert all(text[each.start : each.end] == each.text for each in tagged.entities)

    model = make_model(tmp_path / "squad", "squad1", "question_answering", max_query_length=8)
    question = {"question": "the ban?", "context": "Dan der, bis! Ber."}
    result = tool(repository, "predict", checkpoint=model, text=json.dumps(question))
    assert result.returncode == 0, result.stderr
    (answer,) = bert_jax.load_predictor(model)([question])
    assert answer.text in question["context"] and answer.text
    assert result.stdout.count(answer.text) >= 2  # in the context, and as the answer

    model = make_model(tmp_path / "number", "regression", "sequence_classification")
    result = tool(repository, "predict", checkpoint=model, format="json", text="ban ber")
    assert result.returncode == 0, result.stderr
    (number,) = bert_jax.load_predictor(model)(["ban ber"])
    assert json.loads(result.stdout)["value"] == pytest.approx(number.value, abs=1e-5)


# Export

CALL = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("bert_jax", "flax"):
            raise ImportError(f"{name} is not to be had here")

sys.meta_path.insert(0, Refuse())
try:
    import bert_jax.model.bert
except ImportError:
    pass
else:
    raise SystemExit("bert_jax was found")

import jax, numpy as np
model = jax.export.deserialize(open("model.stablehlo", "rb").read())
params = dict(np.load("params.npz"))
given = dict(np.load(sys.argv[1]))
outputs = jax.jit(model.call)(params, *(given[name] for name in sorted(given)))
np.savez(sys.argv[2], **outputs)
"""


def call_exported(directory, tmp_path, *arrays):
    """Returns what the exported model says, in a process that has none of this package."""
    np.savez(tmp_path / "given.npz", **{str(number): array for number, array in enumerate(arrays)})
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", CALL, str(tmp_path / "given.npz"), str(tmp_path / "said.npz")]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(np.load(tmp_path / "said.npz"))


def arrays_of(tokenizer, texts):
    """Returns token ids, types and mask as the artifact's README says them."""
    rows = [[tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id] for text in texts]
    shape = (len(rows), max(map(len, rows)))
    token_ids, mask = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for place, row in enumerate(rows):
        token_ids[place, : len(row)], mask[place, : len(row)] = row, 1
    return token_ids, np.zeros(shape, np.int32), mask


@pytest.mark.slow
def test_an_exported_classifier_runs_without_this_package(repository, trained, tmp_path):
    workdir, _ = trained
    result = tool(repository, "export", checkpoint=workdir, output=tmp_path / "served")
    assert result.returncode == 0, result.stderr
    assert_one_line(tool(repository, "export", checkpoint=workdir, output=tmp_path / "served"), "exists")
    about = json.loads((tmp_path / "served" / "labels.json").read_text())
    assert (about["labels"], about["task"], about["max_length"]) == (["b", "d", "f"], "classification", 64)
    tokenizer = load_tokenizer(tmp_path / "served")  # it lies beside the program
    predictor = bert_jax.load_predictor(workdir)
    for texts in (SENTENCES, SENTENCES[:1]):  # any batch size, any length
        logits = call_exported(tmp_path / "served", tmp_path, *arrays_of(tokenizer, texts))["logits"]
        odds = np.exp(logits - logits.max(-1, keepdims=True))
        expected = [[one.probabilities[label] for label in about["labels"]] for one in predictor(texts)]
        np.testing.assert_allclose(odds / odds.sum(-1, keepdims=True), expected, atol=2e-5)


@pytest.mark.slow
def test_an_exported_encoder_gives_vectors_and_words(repository, start, tmp_path):
    result = tool(repository, "export", checkpoint=start, output=tmp_path / "served", platforms="cpu")
    assert result.returncode == 0, result.stderr
    bert = bert_jax.load_pretrained(start)
    places = np.array([[1, 2]] * len(SENTENCES), np.int32)
    outputs = call_exported(tmp_path / "served", tmp_path, *arrays_of(bert.tokenizer, SENTENCES), places)
    encoded = bert.encode(SENTENCES)
    np.testing.assert_allclose(outputs["hidden"][encoded.mask], encoded.hidden[encoded.mask], atol=2e-5)
    np.testing.assert_allclose(outputs["pooled"], encoded.pooled, atol=2e-5)
    assert outputs["logits"].shape == (len(SENTENCES), 2, bert.tokenizer.vocab_size)
    assert_one_line(tool(repository, "export", checkpoint=start, output=tmp_path / "x", platforms="abacus"), "abacus")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "head", "labels"),
    [
        ("ner", "token_classification", ("O", "B-PER", "I-PER")),
        ("squad2", "question_answering", ()),
        ("choice", "multiple_choice", ()),
        ("regression", "sequence_classification", ()),
    ],
)
def test_every_head_is_exported(repository, tmp_path, task, head, labels):
    settings = {"max_query_length": 8, "null_threshold": -1.5} if task == "squad2" else {}
    model = make_model(tmp_path, task, head, labels, **settings)
    result = tool(repository, "export", checkpoint=model, output=tmp_path / "served", platforms="cpu")
    assert result.returncode == 0, result.stderr
    arrays = arrays_of(load_tokenizer(tmp_path / "served"), SENTENCES)
    logits = call_exported(tmp_path / "served", tmp_path, *arrays)["logits"]
    length = arrays[0].shape[1]
    about = json.loads((tmp_path / "served" / "labels.json").read_text())["task_settings"]
    assert about["name"] == task and about["null_threshold"] == settings.get("null_threshold", 0.0)
    assert "`null_threshold`" in (tmp_path / "served" / "README.md").read_text()
    assert logits.shape == {"ner": (4, length, 3), "squad2": (4, length, 2), "choice": (4,), "regression": (4, 1)}[task]
    if task == "ner":
        tokens = np.argmax(logits, axis=-1)
        for row, tagged in enumerate(bert_jax.load_predictor(model)([text.split() for text in SENTENCES])):
            assert [labels[each] for each in tokens[row, 1 : len(tagged.tags) + 1]] == tagged.tags
    if task == "regression":
        expected = [one.value for one in bert_jax.load_predictor(model)(SENTENCES)]
        np.testing.assert_allclose(logits[:, 0], expected, atol=2e-5)


# Features


@pytest.mark.slow
def test_features_in_googles_form_and_as_arrays(repository, start, tmp_path):
    (tmp_path / "in.txt").write_text("\n".join([*SENTENCES, "ban ber ||| bis"]) + "\n")
    places = {"checkpoint": start, "input": tmp_path / "in.txt"}
    result = tool(repository, "extract_features", output=tmp_path / "out.jsonl", layers="-1,0", **places)
    assert result.returncode == 0, result.stderr
    bert = bert_jax.load_pretrained(start)
    encoded = bert.encode(SENTENCES)
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [record["linex_index"] for record in records] == [0, 1, 2, 3, 4]
    assert [each["token"] for each in records[4]["features"]] == "[CLS] ban ber [SEP] bis [SEP]".split()
    for place, record in enumerate(records[:4]):
        expected = encoded.hidden[place][encoded.mask[place]]
        assert [[layer["index"] for layer in each["layers"]] for each in record["features"]] == [[-1, 0]] * len(
            expected
        )
        found = [each["layers"][0]["values"] for each in record["features"]]
        np.testing.assert_allclose(found, expected, atol=2e-5)
    result = tool(repository, "extract_features", output=tmp_path / "out.npz", layers="-2,-1", **places)
    assert result.returncode == 0, result.stderr
    with np.load(tmp_path / "out.npz") as arrays:
        starts, vectors = arrays["starts"], arrays["vectors"]
        assert vectors.shape == (2, starts[-1], bert.config.hidden_size)
        for place in range(4):
            expected = encoded.hidden[place][encoded.mask[place]]
            np.testing.assert_allclose(vectors[1, starts[place] : starts[place + 1]], expected, atol=2e-5)
        assert arrays["tokens"][starts[4]] == "[CLS]" and arrays["layers"].tolist() == [-2, -1]


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_of_sentences(repository, start, tmp_path, pooling):
    (tmp_path / "in.txt").write_text("\n".join(SENTENCES) + "\n")
    places = {"checkpoint": start, "input": tmp_path / "in.txt", "pooling": pooling, "layers": "-1"}
    result = tool(repository, "extract_features", output=tmp_path / "out.npz", **places)
    assert result.returncode == 0, result.stderr
    assert ("says little" in result.stderr) == (pooling == "cls")
    encoded = bert_jax.load_pretrained(start).encode(SENTENCES)
    mean = [hidden[mask].mean(axis=0) for hidden, mask in zip(encoded.hidden, encoded.mask)]
    expected = mean if pooling == "mean" else encoded.hidden[:, 0]
    with np.load(tmp_path / "out.npz") as arrays:
        np.testing.assert_allclose(arrays["embeddings"], expected, atol=2e-5)
    result = tool(repository, "extract_features", output=tmp_path / "out.jsonl", **places)
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    np.testing.assert_allclose([record["values"] for record in records], expected, atol=2e-5)
    result = tool(repository, "extract_features", output=tmp_path / "out.parquet", **places)
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert table["text"] == SENTENCES
    np.testing.assert_allclose(table["embedding"], expected, atol=2e-5)


@pytest.mark.slow
def test_words_of_sentences(repository, start, tmp_path):
    """Of a sparse model, as JSON lines and as arrays."""
    bert = bert_jax.load_pretrained(start)
    task = TaskConfig(name="embeddings", embedding=EmbeddingConfig(kind="sparse", query_prompt="the "))
    bert = dataclasses.replace(bert, task="sparse_embedding", task_settings=to_dict(task))
    bert_jax.save_pretrained(bert, tmp_path / "sparse")
    (tmp_path / "in.txt").write_text("\n".join(SENTENCES) + "\n")
    places = {"checkpoint": tmp_path / "sparse", "input": tmp_path / "in.txt", "pooling": "own", "kind": "query"}
    result = tool(repository, "extract_features", output=tmp_path / "out.jsonl", top_k=3, **places)
    assert result.returncode == 0, result.stderr
    expected = bert_jax.sparse_embeddings(bert, SENTENCES, "query", sparse=True)
    for number, line in enumerate((tmp_path / "out.jsonl").read_text().splitlines()):
        record, (ids, weights) = json.loads(line), expected[number]
        assert record["linex_index"] == number and list(record["terms"]) == bert.tokenizer.tokens(ids[:3])
        np.testing.assert_allclose(list(record["terms"].values()), weights[:3], atol=1e-5)
    result = tool(repository, "extract_features", output=tmp_path / "out.npz", **places)
    with np.load(tmp_path / "out.npz") as arrays:
        ids, starts = arrays["ids"], arrays["starts"]
        assert ids[starts[2] : starts[3]].tolist() == expected[2].ids.tolist() and starts[-1] == len(arrays["weights"])
    refused = tool(repository, "extract_features", output=tmp_path / "out.parquet", **places)
    assert_one_line(refused, "holds dense vectors, and the model makes sparse ones; give .npz or .jsonl")


@pytest.mark.slow
def test_vectors_of_the_tokens_of_sentences(repository, start, tmp_path):
    """Of a multi-vector model, as JSON lines and as arrays."""
    bert = bert_jax.load_pretrained(start)
    settings = EmbeddingConfig(kind="multi_vector", passage_prompt="the ", query_length=8)
    task = to_dict(TaskConfig(name="embeddings", max_seq_length=16, embedding=settings))
    bert_jax.save_pretrained(
        dataclasses.replace(bert, task="token_embeddings", task_settings=task), tmp_path / "tokens"
    )
    bert = bert_jax.load_pretrained(tmp_path / "tokens")
    (tmp_path / "in.txt").write_text("\n".join(SENTENCES) + "\n")
    places = {"checkpoint": tmp_path / "tokens", "input": tmp_path / "in.txt", "pooling": "own", "kind": "passage"}
    result = tool(repository, "extract_features", output=tmp_path / "out.jsonl", **places)
    assert result.returncode == 0, result.stderr
    expected = bert_jax.multi_vectors(bert, SENTENCES, kind="passage")
    for number, line in enumerate((tmp_path / "out.jsonl").read_text().splitlines()):
        record = json.loads(line)
        assert record["linex_index"] == number
        np.testing.assert_allclose(record["vectors"], expected[number], atol=1e-5)
    tool(repository, "extract_features", output=tmp_path / "out.npz", **places)
    with np.load(tmp_path / "out.npz") as arrays:
        vectors, starts = arrays["vectors"], arrays["starts"]
        np.testing.assert_allclose(vectors[starts[1] : starts[2]], expected[1], atol=1e-6)
        assert starts[-1] == len(vectors)
    refused = tool(repository, "extract_features", output=tmp_path / "out.parquet", **places)
    assert_one_line(refused, "the model makes one for each token; write .npz")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "text", "parts"),
    [
        ({"top_k": 5}, "ban\n", ["--top_k=5 is of --pooling=own of a sparse model"]),
        ({"layers": "-9"}, "ban\n", ["layers (-9,)", "0 (embeddings) to 2"]),
        ({"layers": "last"}, "ban\n", ["'last'"]),
        ({"max_seq_length": 999, "layers": "-1"}, "ban\n", ["999"]),
        ({"pooling": "own"}, "ban\n", ["--pooling=own is of models that were trained to embed texts; use mean"]),
        ({"kind": "query"}, "ban\n", ["--kind=query is of --pooling=own"]),
        ({}, "", ["is empty"]),
    ],
)
def test_features_refuse_what_is_not_there(repository, start, tmp_path, options, text, parts):
    (tmp_path / "in.txt").write_text(text)
    places = {"checkpoint": start, "input": tmp_path / "in.txt", "output": tmp_path / "out.npz"}
    assert_one_line(tool(repository, "extract_features", **places, **options), *parts)
    assert not (tmp_path / "out.npz").exists()


# Scores


@pytest.mark.slow
def test_what_fine_tuning_writes_is_scored_by_the_command(repository, start, tmp_path):
    words = "ban ber bis dan der dis".split()
    sentences = [
        [(word, f"B-{word[0].upper()}") if word[0] == "b" else (word, "O") for word in words[n : n + 3]]
        for n in range(4)
    ]
    text = "\n\n".join("\n".join("\t".join(pair) for pair in sentence) for sentence in sentences)
    for name in ("train", "dev"):
        (tmp_path / f"{name}.conll").write_text(text + "\n")
    command = train(
        start, tmp_path, tmp_path / "ner", "--config=configs/finetune.py:ner", "--config.train.num_epochs=2"
    )
    result = run(repository, *command)
    assert result.returncode == 0, result.stderr
    left = json.loads((tmp_path / "ner" / "results.json").read_text())["metrics"]
    predictions = tmp_path / "ner" / "predictions" / "dev.conll"
    result = tool(repository, "score", task="ner", data=tmp_path / "dev.conll", predictions=predictions)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["f1"] == pytest.approx(left["f1"])

    contexts = ["ban ber bis dan der.", "fan fer fis lan ler."]
    questions = [
        {
            "id": str(place),
            "question": f"the {context.split()[2]}?",
            "answers": [{"text": context.split()[2], "answer_start": 8}],
        }
        for place, context in enumerate(contexts)
    ]
    paragraphs = [{"context": context, "qas": [question]} for context, question in zip(contexts, questions)]
    data = tmp_path / "squad.json"
    data.write_text(json.dumps({"version": "1.1", "data": [{"title": "toy", "paragraphs": paragraphs}]}))
    more = (
        "--config=configs/finetune.py:squad1",
        "--config.task.max_query_length=8",
        "--config.train.num_epochs=2",
        "--config.task.max_seq_length=32",
    )
    result = run(repository, *train(start, data, tmp_path / "squad", *more))
    assert result.returncode == 0, result.stderr
    left = json.loads((tmp_path / "squad" / "results.json").read_text())["metrics"]
    predictions = tmp_path / "squad" / "predictions" / "predictions.json"
    result = tool(repository, "score", task="squad1", data=data, predictions=predictions)
    assert result.returncode == 0, result.stderr
    scores = json.loads(result.stdout)
    assert {name: scores[name] for name in ("exact_match", "f1")} == pytest.approx(
        {name: left[name] for name in ("exact_match", "f1")}
    )
