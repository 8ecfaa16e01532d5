# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json

import pytest
from builders import tiny_run, write

from bert_jax.checkpoints.model_card import ABOUT, Records, gather_records, model_card
from bert_jax.settings.pretraining import MaskingConfig, Phase2Config
from bert_jax.settings.rules import to_dict
from bert_jax.storage.resolve import resolve
from bert_jax.training.about import record_of_run

MODEL = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 203, "activation": "gelu_tanh"}
MANIFEST = {
    "identity": {"input": "abc", "options": {"language": "de", "duplicates": 2}},
    "row": {"length": 32, "max_sequences": 3},
    "splits": {
        "train": {"documents": 36, "tokens": 3664, "sequences": 368, "rows": 124, "shards": [{"name": "x"}]},
        "heldout": {"documents": 4, "tokens": 372},
    },
    "tokenizer": {"vocab_size": 167},
}


def rows(card):
    """Returns the cells of all tables of a card, by their labels."""
    found = [line.strip("| ").split(" | ") for line in card.splitlines() if line.startswith("| ") and line != "| | |"]
    return dict(found)


def test_a_card_says_what_the_records_say(tmp_path):
    run = to_dict(tiny_run(tmp_path, masking=MaskingConfig(max_predictions=5, whole_word=True)))
    about = record_of_run([("wiki", MANIFEST)], "8 x TPU v5 lite")
    heldout = {"step": 12, "mlm_loss": 2.5, "nsp_accuracy": 0.75}
    records = Records(MODEL, "pretraining", 12345, (), {"step": 12, "tokens": 4321}, run, about, heldout)
    card = model_card(records, "bert")
    assert card.split("---\n")[1] == (
        "# license: choose one, and remove the # before it\nlibrary_name: transformers\npipeline_tag: fill-mask\n"
        'language:\n- "de"\ntags:\n- bert\n- bert_jax\n- fill-mask\n'
    )
    title = "# bert\n\nA BERT of 2 layers, hidden size 32, 12,345 parameters, pre-trained by bert_jax for 12 steps"
    assert title in card and "shards" not in json.dumps(about)
    found, expected = rows(card), {
        "objective": "masked language model and next sentence prediction", "masking.max_predictions": "5",
        "masking.whole_word": "True", "train.num_steps": "12", "tokens so far": "4,321", "name": "wiki",
        "splits.train.documents": "36", "splits.heldout.tokens": "372", "row.length": "32", "mlm_loss": "2.5",
        "nsp_accuracy": "0.75", "step": "12", "devices": "8 x TPU v5 lite",
    }  # fmt: skip
    assert found.items() >= expected.items() and not {"masking.static", "data.path"} & found.keys()
    assert {f"software.{name}" for name in ("python", "bert_jax", "jax", "jaxlib", "flax")} <= found.keys()


def test_a_card_names_what_the_data_were_made_from():
    def named(**manifest):
        about = record_of_run([("a|b\n# c <script>", MANIFEST | manifest)], "1")
        return rows(model_card(Records(MODEL, "pretraining", 1, about=about)))

    many = named(inputs={"names": [f"{number}|*.gz" for number in range(23)], "files": 40, "bytes": 12345})
    assert many["made from"].startswith("0\\|*.gz, 1\\|*.gz, ") and many["made from"].endswith("19\\|*.gz and 3 more")
    assert (many["inputs.files"], many["inputs.bytes"]) == ("40", "12,345")
    assert named(inputs={"names": ["tfds:name"], "files": 0, "bytes": 0})["made from"] == "tfds:name"
    old = named()  # data of an earlier version
    assert "made from" not in old and old["name"] == "a\\|b # c &lt;script>"  # which would break the table


def test_two_phases_and_their_data(tmp_path):
    phase2 = Phase2Config(num_steps=6, path=str(tmp_path), batch_size=8, max_predictions=20)
    run = to_dict(tiny_run(tmp_path, phase2=phase2))
    about = record_of_run([("a", MANIFEST), ("b", MANIFEST)], "1")
    card = model_card(Records(MODEL, "pretraining", 1, run=run, about=about))
    assert rows(card)["phase2.num_steps"] == "6" and "## Data 1" in card and "## Data 2" in card


def test_a_fine_tuned_model_has_its_scores():
    results = {"task": "sst2", "metrics": {"accuracy": 0.912345}, "step": 40}
    found = rows(model_card(Records(MODEL, "sequence_classification", 7, ("no", "yes"), results=results)))
    assert found["objective"] == "sequence classification, task sst2" and found["labels"] == "no, yes"
    assert (found["accuracy"], found["step"]) == ("0.9123", "40")


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("/mnt/a client/runs/base@1200", "base@1200"),
        ("../base/", "base"),
        ("random:/content/runs/base", "random:base"),
        ("gs://a-bucket/of/ours/base", "base"),
        ("hf://google-bert/bert-base-uncased", "hf://google-bert/bert-base-uncased"),
        ("base", "base"),
    ],
)
def test_no_folder_of_the_user_s_is_published(start, said):
    card = model_card(Records(MODEL, "encoder", 7, run={"init_checkpoint": start, "data": {"path": start}}))
    assert rows(card)["started from"] == said
    assert said == start or start not in card
    assert "None" not in card and "## Data" not in card and "pipeline_tag: feature-extraction" in card


METRICS = """{"step": 0, "kind": "eval", "time": 1.0, "mlm_loss": 9.0}
{"step": 4, "kind": "eval", "time": 1.0, "mlm_loss": 5.0}
{"step": 4, "kind": "train", "loss": 1.0}
{"step": 8, "kind": "eval", "time": 1.0, "mlm_loss": 1.0}
{"step": 12, "k"""


@pytest.mark.parametrize("inside", ["", "@5", "/pretrained", "/revisions/00000005"])
def test_records_are_found_from_a_work_directory_and_what_is_in_it(tmp_path, inside):
    workdir = tmp_path / "run"
    for name, content in (
        ("pretrained/config.json", '{"model": {}}'),
        ("revisions/00000005/config.json", '{"model": {}}'),
        ("config.json", '{"run": {"train": {"seed": 3}}}'),
        (ABOUT, '{"devices": "2 x cpu"}'),
        ("metrics.jsonl", METRICS),
    ):
        write(workdir / name, content)
    place = resolve(f"{workdir}{inside}")
    found = gather_records(place, MODEL, "pretraining", 1, (), {"step": 5})
    assert found.heldout == {"step": 4, "mlm_loss": 5.0}  # not what came after the revision
    assert found.run == {"train": {"seed": 3}} and found.about == {"devices": "2 x cpu"}
    assert gather_records(place, MODEL, "pretraining", 1, (), {}).heldout["step"] == 8
    mean = gather_records(place, MODEL, "pretraining", 1, (), {"step": 5, "averaged": 3})
    assert (mean.heldout, mean.run) == ({}, found.run)  # the scores are of other parameters
    said = rows(model_card(mean))
    assert (said["mean of the parameters of"], said["step so far"]) == ("3 checkpoints", "5")


def test_other_models_have_no_records(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    found = gather_records(resolve(tmp_path), MODEL, "encoder", 1, (), {})
    assert found == Records(MODEL, "encoder", 1)
    assert dataclasses.replace(found, parameters=2) == gather_records(
        resolve("hf://me/bert"), MODEL, "encoder", 2, (), {}
    )


@pytest.mark.parametrize(
    "records",
    [
        {"about": {"data": 5, "software": []}},
        {"about": {"data": [3, {"inputs": 7}]}},
        {"run": {"optimizer": {"learning_rate": "x"}, "phase2": None}},
        {"results": {"metrics": {"f1": "x"}}},
    ],
)
def test_a_record_of_another_shape_breaks_no_card(records):
    assert "hidden size 32" in model_card(Records(MODEL, "encoder", 1, **records))
