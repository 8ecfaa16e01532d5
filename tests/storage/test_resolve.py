# SPDX-License-Identifier: Apache-2.0
"""What a path means: the kinds of what may be there, and the lines for what cannot be used."""

import fsspec
import pytest
from builders import message

from bert_jax.errors import InputError
from bert_jax.storage.places import RemotePath
from bert_jax.storage.resolve import resolve

FILES = {  # what is there -> the files of it
    "model": ("params/x", "config.json", "tokenizer/vocab.txt"),
    "hf": ("model.safetensors", "config.json"),
    "sharded": ("model.safetensors.index.json", "model-00001-of-00002.safetensors"),
    "pickled": ("pytorch_model.bin",),
    "parts": ("modules.json", "1_Pooling/config.json"),
    "adapter": ("adapter_config.json", "adapter_model.safetensors"),
    "tf1": ("bert_model.ckpt.index", "bert_model.ckpt.data-00000-of-00001", "bert_config.json"),
    "run": ("checkpoints/00000004/checksums.json", "config.json", "tokenizer/vocab.txt"),
    "unfinished": ("checkpoints/00000004/checksums.json", "config.json"),
    "finetuned": ("checkpoints/00000004/checksums.json", "config.json", "finetuned/params/x"),
    "data": ("manifest.json", "tokenizer/vocab.txt", "train-00000.npy"),
    "sweep": ("runs/1/config.json", "finetuned/params/x"),
    "tables": ("train.tsv", "dev.tsv"),
}
KINDS = dict.fromkeys(("sharded", "pickled", "parts", "adapter"), "hf")
KINDS |= {"finetuned": "model", "sweep": "model", "tables": None}


@pytest.fixture(params=["here", "bucket"])
def root(request, tmp_path, memory):
    """Returns a place with what `FILES` names, on this machine or in an object store."""
    place = tmp_path if request.param == "here" else RemotePath("memory://test")
    for name, files in FILES.items():
        for file in files:
            (place / name / file).parent.mkdir(parents=True, exist_ok=True)
            (place / name / file).write_bytes(b"x")
    return place


@pytest.mark.parametrize("name", FILES)
def test_what_is_there_is_known_by_its_files(root, name):
    for path in (root / name, str(root / name)):
        found = resolve(path)
        assert list(found.kinds) == [kind for kind in [KINDS.get(name, name)] if kind]
        assert (found.given, found.place) == (
            str(path),
            root / name / "finetuned" if name in ("finetuned", "sweep") else root / name,
        )


def test_a_file_and_nothing(root):
    assert list(resolve(root / "tables" / "dev.tsv").kinds) == ["file"]
    assert list(resolve(root / "nowhere").kinds) == ["nothing"]


def test_a_revision_is_a_directory_of_its_work_directory(root):
    revisions = root / "run" / "revisions"
    for step in ("00000009", "00000012"):
        for name in ("params/x", "config.json", "tokenizer/vocab.txt"):
            path = revisions / step / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x")
    found = resolve(f"{root}/run@12")
    assert (list(found.kinds), found.place, found.averaged) == (["model"], revisions / "00000012", ())
    several = resolve(f"{root}/run@12,9,12")
    assert (list(several.kinds), several.place) == (["model"], revisions / "00000012")
    assert [(list(each.kinds), each.place) for each in several.averaged] == [(["model"], revisions / "00000009")]
    assert "has no revision of step 7; it has those of steps 9, 12" in message(resolve, f"{root}/run@9,7")
    assert "run has no revision of step 7; it has those of steps 9, 12" in message(resolve, f"{root}/run@7")
    for name in ("elsewhere@7", "run@last", "run@", f"run@{10**18}", "run@9,", "run@9,last"):
        assert list(resolve(f"{root}/{name}").kinds) == ["nothing"]


def test_a_directory_is_read_where_it_is_or_as_a_copy(root):
    assert set(resolve(root / "hf").folder().names) >= set(FILES["hf"])


def test_a_server_without_directories_is_asked_for_a_manifest(monkeypatch):
    there = ("https://host/data/manifest.json", "https://host/a.tsv")
    monkeypatch.setattr(RemotePath, "exists", lambda path: str(path) in there)
    for name, kind in [("data", "data"), ("a.tsv", "file"), ("other", "nothing")]:
        assert list(resolve(f"https://host/{name}").kinds) == [kind]


def test_the_hub_is_not_asked(monkeypatch):
    monkeypatch.setattr(fsspec.core, "url_to_fs", None)
    for url in ("hf://org/name", "hf://org/name@7", "hf://name"):
        assert (resolve(url).format, str(resolve(url).place)) == ("hf", url)


@pytest.mark.parametrize("url", ["hf://a/b?token=SECRET", "hf://user:SECRET@a/b", "hf://a/b#x=SECRET"])
def test_what_may_be_a_password_reaches_no_hub_and_no_message(url):
    with pytest.raises(InputError, match="has more than a name; write hf://ORG/NAME") as told:
        resolve(url)
    assert "SECRET" not in str(told.value)


def test_a_checkpoint_of_google_is_known_by_prefix_and_file(tmp_path, monkeypatch):
    for suffix in ("index", "data-00000-of-00001", "meta"):
        (tmp_path / f"bert_model.ckpt.{suffix}").write_bytes(b"x")
    prefix = tmp_path / "bert_model.ckpt"
    for path in (prefix, str(prefix), *tmp_path.iterdir()):
        assert (resolve(path).format, resolve(path).place) == ("tf1", prefix)
    monkeypatch.chdir(tmp_path)
    assert str(resolve("bert_model.ckpt.meta").place) == "bert_model.ckpt"


@pytest.mark.parametrize(
    ("name", "needed", "expected"),
    [
        (
            "nowhere",
            "model",
            "does not exist; give a work directory of train or finetune, the directory of a model, or hf://ORG/NAME",
        ),
        ("tables/dev.tsv", "model", "dev.tsv is a file; give a work directory"),
        ("data", "model", "data is a data set; give a work directory"),
        ("tables", "model", "tables holds no model: no params/ or checkpoints/ as written here, no model.safetensors"),
        (
            "unfinished",
            "model",
            "unfinished has no config.json or no tokenizer/; it is not a work directory with a model",
        ),
        ("nowhere", "data", "nowhere does not exist; give a data set, as bert_jax prepare_corpus makes it"),
        ("run", "data", "run is a work directory; give a data set, as bert_jax prepare_corpus makes it"),
        ("hf", "data", "hf is a model; give a data set"),
        ("tables", "data", "tables holds no manifest.json, so no finished data set; give"),
    ],
)
def test_what_is_not_usable_is_one_line_with_what_is_there(root, name, needed, expected):
    with pytest.raises(InputError) as caught:
        resolve(root / name).expect(needed)
    assert str(caught.value).startswith(str(root)) and expected in str(caught.value)


def test_a_directory_of_two_formats_is_refused_and_named(root):
    (root / "run" / "model.safetensors").write_bytes(b"x")
    assert "run holds models in two formats: checkpoints (bert_jax) and model.safe" in message(
        resolve(root / "run").expect, "model"
    )
    (root / "run" / "params").mkdir()
    (root / "run" / "params" / "x").write_bytes(b"x")
    (root / "run" / "model.safetensors").unlink()
    assert resolve(root / "run").expect("model") == "model"  # and not its checkpoints
    (root / "run" / "manifest.json").write_bytes(b"x")
    assert (resolve(root / "run").expect("model"), resolve(root / "run").expect("data")) == ("model", "data")


def test_a_format_that_is_not_read_is_named(root):
    (root / "tables" / "tf_model.h5").write_bytes(b"x")
    with pytest.raises(InputError, match=r"holds no model: .*; tf_model.h5 is not read: save it as model.safetensors"):
        resolve(root / "tables").expect("model")
