# SPDX-License-Identifier: Apache-2.0
"""Parameters that are kept for good, every so many steps, with what they were trained on."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from builders import message, tiny_run
from whole_runs import ONE_DEVICE, assert_same_state, stop_at, train

import bert_jax
from bert_jax.batches.load import rows_to_batch
from bert_jax.batches.order import train_rows
from bert_jax.checkpoints.pretrained import keep_revision
from bert_jax.checkpoints.states import checkpoint_steps
from bert_jax.data.records import open_dataset
from bert_jax.errors import InputError
from bert_jax.settings.pretraining import CheckpointConfig
from bert_jax.storage.places import to_place
from bert_jax.storage.resolve import resolve
from bert_jax.tokenizing import load_tokenizer

EVERY_FIVE = CheckpointConfig(every_steps=4, keep_every=5, keep_last=9)


@pytest.fixture(scope="module")
def kept(toy_data, tmp_path_factory):
    """Returns the work directory and the result of a run of 12 steps that keeps every fifth."""
    workdir = tmp_path_factory.mktemp("kept") / "run"
    return workdir, train(tiny_run(toy_data, mesh=ONE_DEVICE, checkpoint=EVERY_FIVE), workdir)


def trained(directory):
    return json.loads((directory / "config.json").read_text())["trained"]


def counts_by_hand(data, config, steps):
    """Returns the sequences, tokens and words of the rows of the first steps, counted one by one."""
    dataset = open_dataset(data)
    tokenizer = load_tokenizer(dataset.tokenizer_path)
    sequences = tokens = words = 0
    for step in range(steps):
        places = np.arange(config.data.batch_size)
        numbers, epochs = train_rows(step, places, len(places), dataset.train.num_rows, config.data.seed)
        batch = rows_to_batch(dataset.train.gather(numbers), epochs)
        real = batch.token_ids[batch.sequence_ids > 0]
        sequences += len(numbers)
        tokens += len(real)
        words += sum(not tokenizer.vocab[i].startswith(("[CLS]", "[SEP]", "##")) for i in real)
    return {"sequences": sequences, "tokens": tokens, "words": words}


def test_revisions_are_kept_with_what_they_were_trained_on(kept, toy_data):
    workdir, _ = kept
    assert sorted(path.name for path in (workdir / "revisions").iterdir()) == ["00000000", "00000005", "00000010"]
    config = tiny_run(toy_data)
    for step in (5, 10):
        found = trained(workdir / "revisions" / f"{step:08d}")
        assert found == {"step": step, **counts_by_hand(toy_data, config, step)}
    assert trained(workdir / "revisions" / "00000000") == {"step": 0}
    assert trained(workdir / "pretrained") == {"step": 12, **counts_by_hand(toy_data, config, 12)}


def test_a_revision_is_named_by_its_step(kept):
    workdir, result = kept
    ten, start = (bert_jax.load_pretrained(f"{workdir}@{step}").params for step in (10, 0))
    assert resolve(f"{workdir}@10").place == workdir / "revisions" / "00000010"
    for other in (start, result.state.params):
        with pytest.raises(AssertionError):
            assert_same_state(ten, other)
    assert "no revision of step 7; it has those of steps 0, 5, 10" in message(bert_jax.load_pretrained, f"{workdir}@7")
    assert "does not exist" in message(bert_jax.load_pretrained, f"{workdir}-not-there@7")


def test_several_steps_are_the_mean_of_their_parameters(kept, tmp_path):
    workdir, _ = kept
    mean = bert_jax.load_pretrained(f"{workdir}@10,0,5,10")
    apart = [bert_jax.load_pretrained(f"{workdir}@{step}").params for step in (0, 5, 10)]
    for found, *leaves in zip(*map(jax.tree.leaves, (mean.params, *apart)), strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, np.mean(np.float64(leaves), axis=0), rtol=1e-6, atol=1e-8)
    assert (mean.trained["step"], mean.trained["averaged"]) == (10, 3) and "the mean of 3 models" in mean.notes[-1]
    bert_jax.save_pretrained(mean, tmp_path / "mean")
    again = bert_jax.load_pretrained(tmp_path / "mean")
    assert_same_state(again.params, mean.params)
    assert again.trained == mean.trained
    assert "no revision of step 7; it has those of steps 0, 5, 10" in message(
        bert_jax.load_pretrained, f"{workdir}@5,7"
    )
    assert "does not exist" in message(bert_jax.load_pretrained, f"{workdir}@5,")


def test_a_mean_is_of_models_of_one_shape_and_one_vocabulary(kept, tmp_path):
    run = shutil.copytree(kept[0], tmp_path / "run")
    five = run / "revisions" / "00000005"
    shutil.rmtree(five)
    bert = bert_jax.load_pretrained(f"{run}@10")
    other_words = load_tokenizer(run / "tokenizer", lowercase=not bert.tokenizer.lowercase)
    for changes in (
        {"config": dataclasses.replace(bert.config, activation="relu")},
        {"params": {"encoder": bert.params["encoder"]}},
        {"tokenizer": other_words},
    ):
        bert_jax.save_pretrained(dataclasses.replace(bert, **changes), five)
        said = message(bert_jax.load_pretrained, f"{run}@5,10")
        assert "00000005 has another shape or vocabulary than " in said and "average models of one run" in said


def test_a_directory_with_an_at_sign_in_its_name_is_itself(kept, tmp_path):
    shutil.copytree(kept[0] / "pretrained", tmp_path / "model@10")
    assert resolve(tmp_path / "model@10").place == tmp_path / "model@10"
    assert "no revision of step 3; it has none" in message(bert_jax.load_pretrained, f"{tmp_path / 'model@10'}@3")


def test_a_stopped_run_keeps_the_same_revisions(kept, toy_data, tmp_path, monkeypatch):
    config, run = tiny_run(toy_data, mesh=ONE_DEVICE, checkpoint=EVERY_FIVE), tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        assert train(config, run).signal
    # What a crash has lost is made again, with the same counts, and what came after the checkpoint is replaced;
    # revisions before it stay as they are.
    remove_checkpoints_but_the_first(run)
    first, fifth = run / "revisions" / "00000000", run / "revisions" / "00000005"
    shutil.rmtree(fifth)
    shutil.copytree(first, fifth)
    before = (first / "checksums.json").stat().st_mtime_ns
    train(config, run)
    for step in (0, 5, 10):
        ours, theirs = (bert_jax.load_pretrained(f"{workdir}@{step}") for workdir in (run, kept[0]))
        assert_same_state(ours.params, theirs.params)
        assert ours.trained == theirs.trained
    assert (first / "checksums.json").stat().st_mtime_ns == before


def test_a_directory_that_is_no_revision_is_left_alone(kept, tmp_path):
    (tmp_path / "revisions" / "00000010").mkdir(parents=True)
    keep_revision(bert_jax.load_pretrained(f"{kept[0]}@10"), to_place(tmp_path))
    assert list((tmp_path / "revisions" / "00000010").iterdir()) == []


def remove_checkpoints_but_the_first(run):
    for newer in checkpoint_steps(run / "checkpoints")[1:]:
        shutil.rmtree(run / "checkpoints" / f"{newer:08d}")


@pytest.mark.slow
def test_a_run_that_goes_on_otherwise_from_an_older_checkpoint_replaces_what_came_after_it(kept, toy_data, tmp_path):
    config = tiny_run(toy_data, mesh=ONE_DEVICE, checkpoint=EVERY_FIVE)
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, num_steps=18))
    run = shutil.copytree(kept[0], tmp_path / "run")
    remove_checkpoints_but_the_first(run)
    fresh = shutil.copytree(run, tmp_path / "fresh", ignore=shutil.ignore_patterns("0000001*"))
    (other := run / "revisions" / "00000015").mkdir()
    found = []
    for workdir in (run, fresh):
        train(longer, workdir)
        found.append(bert_jax.load_pretrained(f"{workdir}@10").params)
    assert_same_state(*found)
    assert list(other.iterdir()) == []  # no model, so it is not ours


@pytest.mark.parametrize("stops", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_revisions_after_so_many_words_are_of_the_steps_that_have_read_them(toy_data, tmp_path, monkeypatch, stops):
    config = tiny_run(toy_data, mesh=ONE_DEVICE)
    of_step = open_dataset(toy_data).words_of_row * config.data.batch_size
    marks = ",".join(f"{of_step * steps:.3f}" for steps in (11.4, 0.2, 3, 6.6))
    config = dataclasses.replace(config, checkpoint=CheckpointConfig(every_steps=4, keep_words=marks))
    if stops:
        with monkeypatch.context() as patch:
            stop_at(patch, 6)
            train(config, tmp_path / "run")
    train(config, tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run" / "revisions").iterdir()) == [
        f"{step:08d}" for step in (1, 3, 7, 11)
    ]


@pytest.mark.parametrize(
    ("words", "fix"), [("1e9", r"beyond the [\d,]+ words that the run reads; leave it out, or take [\d,]+ steps more")]
    + [(wrong, "is not numbers from 1e-37 up to 1e[+]38, with") for wrong in ("1M", "0", "inf")],
)  # fmt: skip
def test_words_that_no_run_reads_are_refused(toy_data, tmp_path, words, fix):
    checkpoint = CheckpointConfig(keep_words=words)
    with pytest.raises(InputError, match=fix):
        train(tiny_run(toy_data, mesh=ONE_DEVICE, checkpoint=checkpoint), tmp_path / "run")
    assert not (tmp_path / "run").exists()
