# SPDX-License-Identifier: Apache-2.0
"""The commands of fine-tuning as a user types them: train, predict, score, export, extract features."""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
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

pytestmark = pytest.mark.slow
TOPICS = (
    "--config.task.max_seq_length=16 --config.data.batch_size=8 --config.optimizer.learning_rate=5e-3 "
    "--config.optimizer.bias_correction=True --config.report.every_steps=5 --config.report.tensorboard=False"
).split()
SENTENCES = ["ban ber bis", "dan der dis the the the the the the the the", "fan fer", "gan lar mon pet ."]


def tool(repository, name, text=None, **options):
    """Returns what a command says; a status that is not 0 is a test's own affair."""
    flags = [f"--{option}={value}" for option, value in options.items()]
    return run_python(["-m", f"bert_jax.tools.{name}", *flags], repository, text, variables(repository))


def said(repository, name, **options):
    """Returns the lines that a command prints."""
    result = tool(repository, name, **options)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def make_model(directory: Path, task: str, head: str, labels=(), **settings) -> Path:
    """Returns a directory with an untrained model for a task, of the toy language."""
    directory.mkdir(exist_ok=True)
    pretrained = bert_jax.load_pretrained(make_learner(directory))
    config = tiny_model(vocab_size=pretrained.tokenizer.vocab_size, initializer_stddev=0.5)
    num_outputs = 1 if task in ("regression", "choice") else len(labels)
    init = functools.partial(init_params, config, head=HEADS[head], num_outputs=num_outputs)
    about = to_dict(TaskConfig(name=task, max_seq_length=32, **settings))
    params = jax.jit(init)(jax.random.key(3))
    bert = Pretrained(config, params, pretrained.tokenizer, head, tuple(labels), task_settings=about)
    save_pretrained(bert, directory / "model")
    return directory / "model"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Returns an untrained encoder."""
    return make_learner(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def topics(tmp_path_factory):
    return make_topics(tmp_path_factory.mktemp("topics"))


@pytest.fixture(scope="module")
def trained(repository, start, topics, tmp_path_factory):
    """Returns the work directory of a finished run, and what it said."""
    workdir = tmp_path_factory.mktemp("finetune") / "run"
    return workdir, train(repository, "classification", start, topics, workdir)


def train(repository, task, start, source, workdir, *more):
    """Returns what a run said."""
    places = (f"--config.init_checkpoint={start}", f"--config.data.path={source}", f"--workdir={workdir}")
    named = {flag.partition("=")[0] for flag in more}  # a flag stands once in a command
    usual = [flag for flag in TOPICS if flag.partition("=")[0] not in named]
    command = ["finetune.py", f"--config=configs/finetune.py:{task}", *usual, *places, *more]
    result = run_python(command, repository, environment=variables(repository))
    assert result.returncode == 0, result.stderr
    return result.stderr


def metrics_of(workdir):
    return json.loads((workdir / "results.json").read_text())["metrics"]


def test_fine_tuning_says_what_it_does_and_runs_are_compared(repository, trained, tmp_path):
    workdir, told = trained
    for part in ("task: classification", "3 classes (b, d, f)", "train: 160 examples", "the best by accuracy"):
        assert part in told
    for name in ("config.json", "metrics.jsonl", "curves.png", "finetuned/config.json", "predictions"):
        assert (workdir / name).exists()
    results = json.loads((workdir / "results.json").read_text())
    accuracy, constant = results["metrics"]["accuracy"], results["constant"]["accuracy"]
    assert accuracy > 0.6 > constant
    for number, score in enumerate((0.25, 0.75)):
        run = tmp_path / "grid" / "runs" / str(number)
        run.mkdir(parents=True)
        (run / "results.json").write_text(json.dumps(results | {"metrics": {"accuracy": score}}))
    header, one, two = (
        line.split() for line in said(repository, "compare_runs", workdirs=f"{workdir},{tmp_path}/grid")
    )
    assert one[:4] == [str(workdir), "accuracy", "1", f"{accuracy:.3f}"]
    assert two[2:6] == ["2", "0.500", "0.250", "0.750"]
    assert header[-2] == "constant" and one[-2] == f"{constant:.3f}"
    (tmp_path / "results.json").write_text(json.dumps(results | {"metric": "f1"}))
    assert_one_line(tool(repository, "compare_runs", workdirs=tmp_path), "has no 'f1', only", "accuracy")
    assert_one_line(tool(repository, "compare_runs", workdirs=tmp_path / "none"), "no results.json")


# Prediction


def test_prediction_of_lines_from_a_file_or_a_pipe(repository, trained, tmp_path):
    workdir, _ = trained
    (tmp_path / "in.txt").write_text("\n\n".join(SENTENCES) + "\n")
    expected = bert_jax.load_predictor(workdir)(SENTENCES)
    places = {"input": tmp_path / "in.txt", "output": tmp_path / "out.jsonl"}
    assert said(repository, "predict", checkpoint=workdir, **places) == []
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert records[1] == {"input": ""}  # a line for every line
    assert [record["input"] for record in records[::2]] == SENTENCES
    for record, prediction in zip(records[::2], expected, strict=True):
        assert record["label"] == prediction.label
        assert record["probabilities"] == pytest.approx(prediction.probabilities, abs=1e-5)
    lines = [SENTENCES[0], json.dumps({"sentence": SENTENCES[1]}), json.dumps([SENTENCES[2]]), SENTENCES[3]]
    piped = said(repository, "predict", checkpoint=workdir, format="json", text="\n".join(lines))
    assert [json.loads(line)["label"] for line in piped] == [prediction.label for prediction in expected]
    first, second = said(repository, "predict", checkpoint=workdir, text=SENTENCES[0])
    assert first == SENTENCES[0] and second.split()[0] == expected[0].label and second.count("%") == 3


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("a\tb", "is not one text; give strings"),
        ('{"title": "ban"}', "'title'"),
        ('{"sentence": 3}', "{'sentence': 3} is not"),
        ('{"sentence": "ban",', "JSON"),
    ],
)
def test_a_bad_line_is_named_and_no_output_is_left(repository, trained, tmp_path, line, part):
    lines = f"ban\n\n{line}\nber\n"
    options = {"checkpoint": trained[0], "format": "json", "text": lines}
    result = tool(repository, "predict", **options)
    assert_one_line(result, "line 3", part, "or give --lines=text, and every line is one text")
    assert [json.loads(each)["input"] for each in result.stdout.splitlines()] == ["ban", ""]
    assert_one_line(tool(repository, "predict", output=tmp_path / "out.jsonl", **options), part)
    assert not list(tmp_path.iterdir())
    records = [json.loads(each)["input"] for each in said(repository, "predict", lines="text", **options)]
    assert records == ["ban", "", line, "ber"]


def test_choices_entities_answers_and_numbers_for_people(repository, tmp_path):
    choice = make_model(tmp_path / "choice", "choice", "multiple_choice")
    text, shown = said(repository, "predict", checkpoint=choice, text="the\tban\tber\n")
    assert json.loads(text) == ["the", "ban", "ber"]
    assert sorted(part.split()[0] for part in shown.strip().split("  ")) == ["0", "1"] and shown.count("%") == 2
    refused = tool(repository, "predict", checkpoint=choice, text="the\tban\tber\n", lines="text")
    assert_one_line(refused, "--lines=text is for models that read one text; leave it out")

    tags = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
    model = make_model(tmp_path / "ner", "ner", "token_classification", tags)
    text = "ban, ber (bis) dan der dis."
    (tagged,) = bert_jax.load_predictor(model)([text])
    lines = [f"{each.type}  {each.text!r}  {each.start}-{each.end}" for each in tagged.entities]
    assert lines, "choose another seed"
    assert [line.strip() for line in said(repository, "predict", checkpoint=model, text=text)] == [text, *lines]

    model = make_model(tmp_path / "squad", "squad1", "question_answering", max_query_length=8)
    question = {"question": "the ban?", "context": "Dan der, bis! Ber."}
    (answer,) = bert_jax.load_predictor(model)([question])
    _, best, *_ = said(repository, "predict", checkpoint=model, text=json.dumps(question))
    assert answer.text and f"{answer.text!r}  {answer.start}-{answer.end}" in best

    model = make_model(tmp_path / "number", "regression", "sequence_classification")
    (number,) = bert_jax.load_predictor(model)(["ban ber"])
    (line,) = said(repository, "predict", checkpoint=model, format="json", text="ban ber")
    assert json.loads(line)["value"] == pytest.approx(number.value, abs=1e-5)


# Export

CALL = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("bert_jax", "flax"):
            raise ImportError(f"{name} is not to be had here")

sys.meta_path.insert(0, Refuse())
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


def test_an_exported_classifier_runs_without_this_package(repository, trained, tmp_path):
    workdir, _ = trained
    places = {"checkpoint": workdir, "output": tmp_path / "served"}
    said(repository, "export", **places)
    assert_one_line(tool(repository, "export", **places), "exists")
    assert_one_line(tool(repository, "export", **places, platforms="abacus"), "abacus")
    about = json.loads((tmp_path / "served" / "labels.json").read_text())
    assert (about["labels"], about["task"], about["max_length"]) == (["b", "d", "f"], "classification", 64)
    tokenizer = load_tokenizer(tmp_path / "served")  # it lies beside the program
    predictor = bert_jax.load_predictor(workdir)
    for texts in (SENTENCES, SENTENCES[:1]):  # any batch size, any length
        logits = call_exported(tmp_path / "served", tmp_path, *arrays_of(tokenizer, texts))["logits"]
        odds = np.exp(logits - logits.max(-1, keepdims=True))
        expected = [[one.probabilities[label] for label in about["labels"]] for one in predictor(texts)]
        np.testing.assert_allclose(odds / odds.sum(-1, keepdims=True), expected, atol=2e-5)


# Features


def extracted(repository, checkpoint, tmp_path, form, texts=SENTENCES, **options):
    """Returns what extract_features writes: records of JSON lines, arrays, or the columns of a table."""
    (tmp_path / "in.txt").write_text("\n".join(texts) + "\n")
    output = tmp_path / f"out.{form}"
    said(repository, "extract_features", checkpoint=checkpoint, input=tmp_path / "in.txt", output=output, **options)
    if form == "jsonl":
        records = [json.loads(line) for line in output.read_text().splitlines()]
        assert [record["linex_index"] for record in records] == list(range(len(texts)))
        return records
    return dict(np.load(output)) if form == "npz" else pyarrow.parquet.read_table(output).to_pydict()


def test_features_in_googles_form_and_as_arrays(repository, start, tmp_path):
    texts = [*SENTENCES, "ban ber ||| bis"]
    encoded = bert_jax.load_pretrained(start).encode(SENTENCES)
    expected = [hidden[mask] for hidden, mask in zip(encoded.hidden, encoded.mask)]
    records = extracted(repository, start, tmp_path, "jsonl", texts, layers="-1,0")
    assert [each["token"] for each in records[4]["features"]] == "[CLS] ban ber [SEP] bis [SEP]".split()
    for record, hidden in zip(records, expected):
        assert all([layer["index"] for layer in each["layers"]] == [-1, 0] for each in record["features"])
        np.testing.assert_allclose([each["layers"][0]["values"] for each in record["features"]], hidden, atol=2e-5)
    arrays = extracted(repository, start, tmp_path, "npz", texts, layers="-2,-1")
    starts, vectors = arrays["starts"], arrays["vectors"]
    assert vectors.shape == (2, starts[-1], 32)
    np.testing.assert_allclose(vectors[1, : starts[4]], np.concatenate(expected), atol=2e-5)
    assert arrays["tokens"][starts[4]] == "[CLS]" and arrays["layers"].tolist() == [-2, -1]


def test_vectors_of_sentences(repository, start, tmp_path):
    encoded = bert_jax.load_pretrained(start).encode(SENTENCES)
    mean = [hidden[mask].mean(axis=0) for hidden, mask in zip(encoded.hidden, encoded.mask)]
    options = {"pooling": "mean", "layers": "-1"}
    table = extracted(repository, start, tmp_path, "parquet", **options)
    records = extracted(repository, start, tmp_path, "jsonl", **options)
    assert table["text"] == SENTENCES
    np.testing.assert_allclose(table["embedding"], mean, atol=2e-5)
    np.testing.assert_allclose([record["values"] for record in records], mean, atol=2e-5)
    arrays = extracted(repository, start, tmp_path, "npz", pooling="cls", layers="-1")
    np.testing.assert_allclose(arrays["embeddings"], encoded.hidden[:, 0], atol=2e-5)


@pytest.fixture(params=["sparse", "multi_vector"])
def embedder(request, start, tmp_path):
    """Returns the directory of a model as one that was trained to embed texts, and what it makes of the sentences."""
    kind = request.param
    settings = EmbeddingConfig(kind=kind, query_prompt="the ", query_length=16 if kind == "multi_vector" else 0)
    task = to_dict(TaskConfig(name="embeddings", max_seq_length=16, embedding=settings))
    head = {"sparse": "sparse_embedding", "multi_vector": "token_embeddings"}[kind]
    bert_jax.save_pretrained(
        dataclasses.replace(bert_jax.load_pretrained(start), task=head, task_settings=task), tmp_path / "model"
    )
    bert = bert_jax.load_pretrained(tmp_path / "model")
    if kind == "sparse":
        return tmp_path / "model", bert_jax.sparse_embeddings(bert, SENTENCES, "query", sparse=True)
    return tmp_path / "model", bert_jax.multi_vectors(bert, SENTENCES, kind="query")


def test_words_and_vectors_of_tokens_of_sentences(repository, embedder, tmp_path):
    """As JSON lines and as arrays."""
    model, expected = embedder
    options = {"pooling": "own", "kind": "query"}
    records = extracted(repository, model, tmp_path, "jsonl", **options)
    arrays = extracted(repository, model, tmp_path, "npz", **options)
    of_third = slice(*arrays["starts"][2:4])
    if "ids" in arrays:
        ids, weights = expected[2]
        assert arrays["ids"][of_third].tolist() == ids.tolist() and arrays["starts"][-1] == len(arrays["weights"])
        few = extracted(repository, model, tmp_path, "jsonl", top_k=3, **options)[2]["terms"]
        assert list(few) == list(records[2]["terms"])[:3] == load_tokenizer(model / "tokenizer").tokens(ids[:3])
        np.testing.assert_allclose(list(few.values()), weights[:3], atol=1e-5)
    else:
        for record, vectors in zip(records, expected, strict=True):
            np.testing.assert_allclose(record["vectors"], vectors, atol=1e-5)
        np.testing.assert_allclose(arrays["vectors"][of_third], expected[2], atol=1e-6)
        assert arrays["starts"][-1] == len(arrays["vectors"])
    places = {"checkpoint": model, "input": tmp_path / "in.txt", "output": tmp_path / "out.parquet"}
    told = "makes sparse ones; give .npz or .jsonl" if "ids" in arrays else "makes one for each token; write .npz"
    assert_one_line(tool(repository, "extract_features", **places, **options), told)


@pytest.mark.parametrize(
    ("options", "text", "part"),
    [
        ({"top_k": 5}, "ban\n", "--top_k=5 is of --pooling=own of a sparse model"),
        ({"layers": "-9"}, "ban\n", "layers (-9,)"),
        ({"layers": "last"}, "ban\n", "'last'"),
        ({"max_seq_length": 999, "layers": "-1"}, "ban\n", "999"),
        ({"pooling": "own"}, "ban\n", "--pooling=own is of models that were trained to embed texts; use mean"),
        ({"kind": "query"}, "ban\n", "--kind=query is of --pooling=own"),
        ({}, "", "is empty"),
    ],
)
def test_features_refuse_what_is_not_there(repository, start, tmp_path, options, text, part):
    (tmp_path / "in.txt").write_text(text)
    places = {"checkpoint": start, "input": tmp_path / "in.txt", "output": tmp_path / "out.npz"}
    assert_one_line(tool(repository, "extract_features", **places, **options), part)
    assert not (tmp_path / "out.npz").exists()


# Scores


def test_what_fine_tuning_writes_is_scored_by_the_command(repository, start, tmp_path):
    words = [("ban", "B-B"), ("dan", "O"), ("ber", "B-B"), ("der", "O")]
    sentences = ["\n".join("\t".join(pair) for pair in words[first:]) for first in range(3)]
    (tmp_path / "train.conll").write_text("\n\n".join(sentences) + "\n")
    shutil.copy(tmp_path / "train.conll", tmp_path / "dev.conll")
    train(repository, "ner", start, tmp_path, tmp_path / "ner", "--config.train.num_epochs=2")
    predictions = tmp_path / "ner" / "predictions" / "dev.conll"
    scores = "".join(said(repository, "score", task="ner", data=tmp_path / "dev.conll", predictions=predictions))
    assert json.loads(scores)["f1"] == pytest.approx(metrics_of(tmp_path / "ner")["f1"])

    paragraphs = []
    for number, context in enumerate(("ban ber bis dan der.", "fan fer fis lan ler.")):
        answer = {"text": context[8:11], "answer_start": 8}
        question = {"id": str(number), "question": f"the {context[8:11]}?", "answers": [answer]}
        paragraphs.append({"context": context, "qas": [question]})
    data = tmp_path / "squad.json"
    data.write_text(json.dumps({"version": "1.1", "data": [{"title": "toy", "paragraphs": paragraphs}]}))
    more = ("task.max_query_length=8", "train.num_epochs=2", "task.max_seq_length=32")
    train(repository, "squad1", start, data, tmp_path / "squad", *(f"--config.{change}" for change in more))
    predictions = tmp_path / "squad" / "predictions" / "predictions.json"
    scores = json.loads("".join(said(repository, "score", task="squad1", data=data, predictions=predictions)))
    left = metrics_of(tmp_path / "squad")
    assert (scores["exact_match"], scores["f1"]) == pytest.approx((left["exact_match"], left["f1"]))
