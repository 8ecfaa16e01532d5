# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning and the tools with an object store in place of a disk."""

import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from builders import make_learner, make_topics, tiny_run, topics_run, write_corpus, write_vocab
from whole_runs import ONE_DEVICE, assert_same_state, stop_at, train

import bert_jax
from bert_jax.data import prepare
from bert_jax.errors import InputError
from bert_jax.finetuning import finetune
from bert_jax.settings.finetuning import FinetuneTrainConfig, SweepConfig
from bert_jax.settings.pretraining import ReportConfig, TrainConfig
from bert_jax.storage.places import to_place
from bert_jax.sweep import sweep

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def topics(tmp_path_factory):
    return make_topics(tmp_path_factory.mktemp("topics"), 96, 40)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def start(tmp_path, bucket):
    """Returns the URL of an untrained model."""
    model = make_learner(tmp_path)
    url = f"{bucket}/start"
    bert_jax.save_pretrained(bert_jax.load_pretrained(model), url)
    assert_same_state(bert_jax.load_pretrained(url).params, bert_jax.load_pretrained(model).params)
    return url


def files_below(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_fine_tuning_from_a_bucket_into_a_bucket_is_as_on_a_disk(
    bucket_server, bucket, start, topics, tmp_path, monkeypatch
):
    config = topics_run(topics, start, train=FinetuneTrainConfig(num_epochs=2.0))
    devices = jax.devices()[:1]
    local = finetune(config, tmp_path / "run", devices)
    workdir = to_place(f"{bucket}/run")
    with monkeypatch.context() as patch:
        stop_at(patch, 8)
        assert finetune(config, workdir, devices).signal
    remote = finetune(config, workdir, devices)
    assert remote.metrics == local.metrics and remote.step == local.step
    names = bucket_server.names(str(workdir))
    ours = sorted(
        path.relative_to(tmp_path / "run").as_posix() for path in (tmp_path / "run").rglob("*") if path.is_file()
    )
    for place in ("predictions/", "results.json", "curves.png", "config.json", "tokenizer/", "finetuned/tokenizer"):
        assert [n for n in names if n.startswith(place)] == [n for n in ours if n.startswith(place)] != []
    for name in (name for name in names if name.startswith("predictions/")):
        assert bucket_server.read(f"{workdir}/{name}") == (tmp_path / "run" / name).read_bytes()
    assert_same_state(bert_jax.load_pretrained(workdir).params, bert_jax.load_pretrained(tmp_path / "run").params)
    bucket_server.flip_byte(f"{workdir}/finetuned/params/manifest.ocdbt")
    with pytest.raises(InputError, match=rf"{workdir}/finetuned is damaged: file params/manifest.ocdbt has another"):
        bert_jax.load_pretrained(workdir)


def test_a_grid_in_a_bucket_is_trained_once(bucket_server, bucket, start, topics):
    config = topics_run(topics, start, train=FinetuneTrainConfig(num_epochs=1.0))
    config = dataclasses.replace(config, sweep=SweepConfig(seeds=2))
    workdir = to_place(f"{bucket}/grid")
    result = sweep(config, workdir, jax.devices()[:1])
    names = bucket_server.names(str(workdir))
    assert {"sweep.json", "config.json", "finetuned/checksums.json"} <= set(names)
    assert not [name for name in names if "/checkpoints/" in name or ".lease" in name]
    best = max(result.outcomes, key=lambda outcome: outcome.score)
    assert_same_state(*(bert_jax.load_pretrained(at).params for at in (workdir, workdir / "runs" / best.name)))
    again = sweep(config, workdir, jax.devices()[:1])
    assert [one.seconds for one in again.outcomes] == [one.seconds for one in result.outcomes]


def test_data_are_prepared_and_packed_into_a_bucket_and_trained_on_from_there(
    bucket_server, bucket, tmp_path, monkeypatch
):
    write_corpus(tmp_path / "text.txt")
    write_vocab(tmp_path / "vocab.txt")
    options = prepare.PrepareOptions(max_seq_length=32, holdout_rate=0.1, next_sentence="none", pack=0)
    arguments = (str(tmp_path / "text.txt"), str(tmp_path / "vocab.txt"))
    local = prepare.prepare(*arguments, str(tmp_path / "data"), options, 1)
    url = f"{bucket}/data"

    with monkeypatch.context() as patch:  # killed before its upload
        patch.setattr("bert_jax.data.building.places.upload_directory", lambda *_: sys.exit(9))
        with pytest.raises(SystemExit):
            prepare.prepare(*arguments, url, options, 1)
    assert bucket_server.names(url) == []
    assert prepare.prepare(*arguments, url, options, 1) == local
    assert bucket_server.names(url) == files_below(tmp_path / "data")
    assert prepare.prepare(*arguments, url, options, 1) == local  # compared, not made again
    assert not (tmp_path / "cache" / "outputs").exists() or not any((tmp_path / "cache" / "outputs").iterdir())
    with pytest.raises(InputError, match=rf"{url} was begun with max_seq_length 32, not 64"):
        prepare.prepare(*arguments, url, dataclasses.replace(options, max_seq_length=64), 1)

    report = ReportConfig(every_steps=1, tensorboard=False, progress=False)
    runs = [
        train(tiny_run(data, mesh=ONE_DEVICE, train=TrainConfig(num_steps=2), report=report), workdir)
        for data, workdir in ((url, to_place(f"{bucket}/run")), (tmp_path / "data", tmp_path / "run"))
    ]
    assert_same_state(runs[0].state, runs[1].state)


def tool(repository, name, *arguments, status=0, text=""):
    """Returns what a tool wrote to stdout, or to stderr where it fails."""
    command = [sys.executable, "-m", f"bert_jax.tools.{name}", *arguments]
    done = subprocess.run(command, cwd=repository, input=text, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr if status else done.stdout


def test_tools_write_to_a_bucket(repository, bucket_server, bucket, start, tmp_path):
    write_corpus(tmp_path / "text.txt")
    vocab = f"{bucket}/vocab"
    tool(repository, "build_vocab", f"--input={tmp_path / 'text.txt'}", f"--output={vocab}", "--vocab_size=80")
    assert bucket_server.names(vocab) == ["tokenizer_config.json", "vocab.txt"]
    assert bert_jax.load_tokenizer(vocab).vocab_size == 80

    tool(repository, "convert_checkpoint", f"--input={start}", f"--output={bucket}/hf", "--to=hf", "--verify")
    assert {"model.safetensors", "config.json", "vocab.txt"} <= set(bucket_server.names(f"{bucket}/hf"))
    told = tool(repository, "convert_checkpoint", f"--input={start}", f"--output={bucket}/hf", "--to=hf", status=1)
    assert told == f"error: output {bucket}/hf exists; give a directory that does not\n"

    lines = "the ban bas .\nthe [MASK] .\n"
    (tmp_path / "lines.txt").write_text(lines)
    out = f"{bucket}/out/predictions.jsonl"
    tool(repository, "predict", f"--checkpoint={start}", "--input=-", f"--output={out}", text="the [MASK] .\n")
    assert "masks" in json.loads(bucket_server.read(out))
    arguments = [f"--checkpoint={bucket}/hf", f"--input={tmp_path / 'lines.txt'}", f"--output={bucket}/out/x.npz"]
    tool(repository, "extract_features", "--layers=-1", *arguments)
    (tmp_path / "x.npz").write_bytes(bucket_server.read(f"{bucket}/out/x.npz"))
    assert np.load(tmp_path / "x.npz")["vectors"].shape[0] == 1  # layer
    assert sorted(bucket_server.names(f"{bucket}/out")) == ["predictions.jsonl", "x.npz"]


def test_an_output_that_cannot_be_written_is_told_before_any_work(repository, bucket_server, tmp_path):
    told = tool(
        repository,
        "convert_checkpoint",
        "--input=nowhere",
        "--output=gs://no-such-bucket/hf",
        "--to=hf",
        status=1,
    )
    assert told.startswith("error: cannot write gs://no-such-bucket/hf: there is no bucket gs://no-such-bucket;")
    told = tool(repository, "export", "--checkpoint=nowhere", "--output=nosuch://x/y", status=1)
    assert told.count("\n") == 1 and "cannot write nosuch://x/" in told
