# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning and the tools with an object store in place of a disk."""

import dataclasses
import json

import jax
import pytest
from builders import make_learner, make_topics, topics_run, write_corpus
from commands import run_python
from whole_runs import assert_same_state, stop_at

import bert_jax
from bert_jax.errors import InputError
from bert_jax.settings.finetuning import FinetuneTrainConfig, SweepConfig
from bert_jax.storage.places import to_place
from bert_jax.sweep import sweep

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def start(tmp_path, bucket):
    """Returns the URL of an untrained model."""
    url = f"{bucket}/start"
    bert_jax.save_pretrained(bert_jax.load_pretrained(make_learner(tmp_path)), url)
    return url


def files_below(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_grid_of_a_bucket_in_a_bucket_is_as_on_a_disk(bucket_server, bucket, start, tmp_path, monkeypatch):
    """Stopped in its first run, and given again."""
    topics = make_topics(tmp_path / "topics", 96, 40)
    config = topics_run(topics, start, train=FinetuneTrainConfig(num_epochs=2.0))
    config = dataclasses.replace(config, sweep=SweepConfig(seeds=2))
    devices = jax.devices()[:1]
    local = sweep(config, tmp_path / "grid", devices)
    workdir = to_place(f"{bucket}/grid")
    with monkeypatch.context() as patch:
        stop_at(patch, 8)
        assert sweep(config, workdir, devices).signal
    remote = sweep(config, workdir, devices)
    scores = [[(one.name, one.score, one.step) for one in each.outcomes] for each in (remote, local)]
    assert scores[0] == scores[1]
    names, ours = bucket_server.names(str(workdir)), files_below(tmp_path / "grid")
    assert not [name for name in names if "/checkpoints/" in name or ".lease" in name]
    (run,) = (name for name in names if name.startswith("runs/") and name.endswith("seed0/results.json"))
    for part in ("predictions/", "results.json", "curves.png", "config.json", "tokenizer/", "finetuned/tokenizer"):
        place = run.replace("results.json", part)
        assert [n for n in names if n.startswith(place)] == [n for n in ours if n.startswith(place)] != []
    for name in (name for name in names if "/predictions/" in name):
        assert bucket_server.read(f"{workdir}/{name}") == (tmp_path / "grid" / name).read_bytes()
    assert_same_state(bert_jax.load_pretrained(workdir).params, bert_jax.load_pretrained(tmp_path / "grid").params)
    bucket_server.flip_byte(f"{workdir}/finetuned/params/manifest.ocdbt")
    with pytest.raises(InputError, match=rf"{workdir}/finetuned is damaged: file params/manifest.ocdbt has another"):
        bert_jax.load_pretrained(workdir)


def tool(repository, name, text="", status=0, **options):
    """Returns what a tool wrote to stdout, or to stderr where it fails."""
    flags = [f"--{option}={value}" for option, value in options.items()]
    done = run_python(["-m", "bert_jax", name, *flags], repository, text)
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout


def test_tools_write_to_a_bucket(repository, bucket_server, bucket, start, tmp_path):
    write_corpus(tmp_path / "text.txt")
    tool(repository, "build_vocab", input=tmp_path / "text.txt", output=f"{bucket}/vocab", vocab_size=80)
    assert bucket_server.names(f"{bucket}/vocab") == ["tokenizer_config.json", "vocab.txt"]
    assert bert_jax.load_tokenizer(f"{bucket}/vocab").vocab_size == 80

    convert = {"input": start, "output": f"{bucket}/hf", "to": "hf"}
    tool(repository, "convert_checkpoint", **convert)
    assert {"model.safetensors", "config.json", "vocab.txt"} <= set(bucket_server.names(f"{bucket}/hf"))
    told = tool(repository, "convert_checkpoint", status=1, **convert)
    assert told == f"error: output {bucket}/hf exists; give a directory that does not\n"
    told = tool(repository, "convert_checkpoint", status=1, **convert | {"output": "gs://no-such-bucket/hf"})
    assert told.startswith("error: cannot write gs://no-such-bucket/hf: there is no bucket gs://no-such-bucket;")
    told = tool(repository, "export", status=1, checkpoint=start, output="nosuch://x/y")
    assert told.count("\n") == 1 and "cannot write nosuch://x/" in told

    output = f"{bucket}/out/predictions.jsonl"
    tool(repository, "predict", "the [MASK] .\n", checkpoint=f"{bucket}/hf", output=output)
    assert "masks" in json.loads(bucket_server.read(output))
