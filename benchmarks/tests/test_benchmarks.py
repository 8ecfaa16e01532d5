# SPDX-License-Identifier: Apache-2.0
"""What measures: turns, medians and ratios by arithmetic, the talk with peers, and every kind once."""

import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from builders import make_pretrained, make_topics, tiny_model, write_corpus, write_topics, write_vocab

from benchmarks import contenders as bench
from benchmarks import embeddings, timing
from benchmarks import peer_workers as peers
from benchmarks.bm25 import bm25
from benchmarks.timing import Contender, Round
from bert_jax.data.prepare import PrepareOptions
from bert_jax.errors import InputError
from bert_jax.finetuning import finetune
from bert_jax.settings.finetuning import FinetuneConfig, FinetuneDataConfig, FinetuneTrainConfig, TaskConfig
from bert_jax.settings.pretraining import DataConfig, OptimizerConfig, PretrainConfig

SMALL = dataclasses.replace(
    PretrainConfig(model=tiny_model(hidden_dropout_rate=0.1)), data=DataConfig(batch_size=8)
)  # a vocabulary of 203


def contender(name: str, seconds, log=None, **facts) -> Contender:
    values = iter(seconds)

    def run() -> Round:
        if log is not None:
            log.append(name)
        return Round(next(values), 1.0, {"steps": 2, "tokens": 100, "useful_flops": 1e9, "padded_flops": 2e9})

    return Contender(name, run, facts)


def test_contenders_take_turns():
    log = []
    found = timing.alternate([contender("a", range(9), log), contender("b", range(9), log)], rounds=3, warmup=1)
    assert "".join(log) == "ab" + "ab" + "ba" + "ab"
    assert [one.seconds for one in found["a"]] == [1, 2, 3]  # the first did not count


def test_figures_and_comparisons():
    ours = contender("ours", [], side="ours", precision="float32", peak_memory_bytes=2**30, compiled_flops=1.1e9)
    theirs = contender("torch", [], side="peer", precision="float32", first_round_seconds=9.0)
    counts = {"steps": 2, "tokens": 100, "useful_flops": 1e9, "padded_flops": 2e9}
    rounds = {
        "ours": [Round(seconds, 3.0, counts) for seconds in (1.0, 2.0, 4.0)],
        "torch": [Round(seconds, 6.0, counts) for seconds in (2.0, 2.0, 16.0)],
    }
    figures = timing.figures(ours, rounds["ours"], peak=1e9)
    assert figures["step_seconds"] == {"median": 1.0, "low": 0.5, "high": 2.0}
    assert figures["tokens_per_second"]["median"] == 50
    assert (figures["useful_mfu"]["median"], figures["padded_mfu"]["high"]) == (0.5, 2.0)
    assert figures["compiled_flops_of_padded"] == pytest.approx(1.1)
    other = timing.figures(theirs, rounds["torch"])
    assert (other["compile_seconds"], "useful_mfu" in other) == (7.0, False)
    same, best = timing.comparisons([ours, theirs], rounds)
    assert same["times_as_fast"] == {"median": 2.0, "low": 1.0, "high": 4.0}  # of rounds, not of medians
    assert (same["times_by_cpu_seconds"]["median"], best["kind"]) == (2.0, "best precision")
    lines = timing.figures_table([figures]) + timing.comparison_lines([same])
    assert "1.00 GiB" in lines[1] and "2.00 (1.00 to 4.00) times as fast as torch" in lines[2]
    assert timing.comparisons([ours], rounds) == []


def test_memory_is_that_of_the_process_and_not_of_its_parent(repository):
    """On Linux the latter counts in ru_maxrss."""
    held = np.ones(1 << 27, np.uint8)
    code = "from benchmarks.peers.memory import most_memory as most; print(most()); x = b'x' * (1 << 26); print(most())"
    done = subprocess.run([sys.executable, "-c", code], cwd=repository, text=True, capture_output=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before < held.nbytes // 2 < after - before + (1 << 20) < held.nbytes and timing.most_memory() > held.nbytes


def test_names_of_peers():
    assert peers.parse_modes("", "train") == ()
    assert peers.parse_modes("onnx, eager", "infer") == ("onnx:float32", "eager:float32")
    assert len(peers.parse_modes("transformers,eager", "train")) == 4
    with pytest.raises(InputError, match="compare 'onnx' is not a peer for train; use transformers, or some of eager"):
        peers.parse_modes("onnx", "train")
    assert peers.parse_modes("eager:bfloat16:unpadded", "infer") == ("eager:bfloat16:unpadded",)
    for what, mode in (("train", "eager:float32:unpadded"), ("infer", "compile:float32:unpadded")):
        with pytest.raises(InputError, match=r"no attention of torch after .*; use cudnn, flash, efficient, math,"):
            peers.parse_modes(mode, what)


WORKER = """
import json, sys
import numpy as np
work = json.load(open(sys.argv[1]))
rows = [len(array) for array in np.load(sys.argv[2]).values()]
print(json.dumps({"versions": {"torch": str(rows), "seed": work["seed"]}}), flush=True)
for line in sys.stdin:
    mode = json.loads(line)["run"]
    if mode == "eager:bfloat16":
        print("no such thing", file=sys.stderr); sys.exit(3)
    done = {"seconds": 2.0, "cpu_seconds": 1.0, "peak_memory_bytes": 5, "peak_memory_of": "device"}
    print(json.dumps({"error": "no compiler"} if mode.startswith("compile") else done), flush=True)
"""


def test_a_process_of_peers(tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(peers, "WORKER", tmp_path / "worker.py")
    work = peers.describe_work("infer", tiny_model(), OptimizerConfig(), 7, "cpu")
    with peers.Peers(sys.executable, work, [{"input_ids": np.zeros((3, 2))}, {"input_ids": np.zeros((1, 2))}]) as other:
        eager = other.contender("eager:float32", {"steps": 2})
        assert eager.run() == Round(2.0, 1.0, {"steps": 2})
        assert eager.facts["versions"] == {"torch": "[3, 1]", "seed": 7}
        with pytest.raises(InputError, match="peer compile:float32 has failed: no compiler"):
            other.contender("compile:float32", {}).run()
        with pytest.raises(InputError, match=r"ended with status 3: no such thing; --peer_python must have"):
            other.contender("eager:bfloat16", {}).run()
    with pytest.raises(InputError, match="peer_python /no/python does not start"):
        peers.Peers("/no/python", work, [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: --what is needed: one of train"),
        (["--what=loader"], "error: --what=loader needs --data"),
        (["--what=train", "--compare=eager"], "error: --compare needs --peer_python=PATH"),
    ],
)
def test_flags_that_cannot_be_used(repository, arguments, message):
    command = [sys.executable, "-m", "benchmarks.bench", *arguments]
    done = subprocess.run(command, cwd=repository, text=True, capture_output=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1


def test_loading(toy_data):
    measured = bench.load(str(toy_data), batch_size=8, steps=2)
    for one in measured.contenders:
        counts = one.run().counts
        assert counts["rows"] == 16 and 16 * 5 < counts["tokens"] <= 16 * 32


def test_text(tmp_path):
    write_corpus(tmp_path / "text.txt", num_documents=8)
    write_vocab(tmp_path / "vocab.txt")
    text, vocab = str(tmp_path / "text.txt"), str(tmp_path / "vocab.txt")
    (one,) = bench.tokenize(text, vocab, 10**6).contenders
    size = (tmp_path / "text.txt").stat().st_size
    assert 0.95 * size < one.run().counts["bytes"] <= size  # without blank lines
    (one,) = bench.prepare_text(text, vocab, PrepareOptions(max_seq_length=32, duplicates=1), 1).contenders
    assert 0.9 * size < one.run().counts["bytes"] <= size
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(InputError, match="has no text in it"):
        bench.tokenize(str(tmp_path / "empty.txt"), vocab, 10**6)


def test_batches_for_peers():
    """They hold what ours hold: the same tokens to predict at the same places, and no padding that is real."""
    from builders import random_batch

    batch = random_batch(num_rows=2)
    batch = batch._replace(
        mlm_positions=np.array([[3, 0], [1, 4]]), mlm_labels=np.array([[9, 0], [8, 7]]),
        mlm_weights=np.array([[1.0, 0.0], [1.0, 1.0]]),
    )  # fmt: skip
    inputs = bench._pretraining_inputs(batch)
    assert inputs["labels"][0, 3] == 9 and list(inputs["labels"][1, [1, 4]]) == [8, 7]
    assert (inputs["labels"] != bench.NO_LABEL).sum() == 3
    assert (inputs["attention_mask"].sum(axis=1) == (batch.sequence_ids > 0).sum(axis=1)).all()
    assert inputs["next_sentence_label"].shape == (2,)


def test_rows_of_a_task(tmp_path):
    write_vocab(tmp_path / "vocab.txt")
    tokenizer = bench.load_tokenizer(tmp_path / "vocab.txt")
    lines = "".join(f"the ban {'bas ' * number}.\t{number % 2}\n" for number in range(9))
    (tmp_path / "train.tsv").write_text(f"sentence\tlabel\n{lines}")
    rows = bench.task_rows(bench.make_classifier(32, "sst2"), str(tmp_path), tokenizer, True, 4)
    assert len(rows) == 4 and rows == sorted(rows, key=lambda row: len(row.token_ids))
    with pytest.raises(InputError, match="--task=stsb has no two classes"):
        bench.make_classifier(32, "stsb")


@pytest.mark.slow
def test_models():
    made = bench.train(SMALL, length=16, steps=2, precisions=["float32"])
    rounds = [made.contenders[0].run() for _ in range(2)]
    assert rounds[0].counts["sequences"] == 16 and rounds[0].counts["tokens"] == 16 * 16
    assert {"compile_seconds", "compiled_flops", "peak_memory_bytes"} <= made.contenders[0].facts.keys()
    assert [batch["input_ids"].shape for batch in made.batches] == [(8, 16)] * 2

    task = bench.make_classifier(32)
    lengths = (5, 9, 7, 32, 8, 6) * 4
    rows = [
        row._replace(token_ids=row.token_ids[:length], type_ids=row.type_ids[:length], lengths=(length,))
        for row, length in zip(bench.random_rows(24, 32, 203), lengths)
    ]
    wide = dataclasses.replace(SMALL, data=dataclasses.replace(SMALL.data, batch_size=24))
    for made in (
        bench.finetune(wide, rows, task, 1, ["float32"]),
        bench.infer(wide, rows, task, 24, ["float32", "bfloat16"]),
    ):
        counts = made.contenders[0].run().counts
        assert counts["sequences"] == made.counts["sequences"] == 24 and counts["steps"] == made.counts["steps"] == 1
        assert counts["useful_flops"] == pytest.approx(made.counts["useful_flops"])
        assert counts["useful_flops"] < counts["padded_flops"] < made.counts["padded_flops"]  # ours are packed
        assert [batch["input_ids"].shape for batch in made.batches] == [(24, 32)]
        assert sum(batch["attention_mask"].sum() for batch in made.batches) == counts["tokens"] == 4 * 67


def test_embeddings_beside_a_peer_are_measured_once(tmp_path, monkeypatch, capsys):
    """Both sides have vectors of their own here; a second call makes none, and says the same."""
    columns = "index\tsentence1\tsentence2\tscore\n"
    for split in ("train", "dev"):
        rows = [f"{number}\tone {split} {number}\ttwo {number}\t{number % 6}\n" for number in range(12)]
        (tmp_path / f"{split}.tsv").write_text(columns + "".join(rows))
    given = {"START": "model", "STSB": str(tmp_path), "SICK": "", "SQUAD": "", "OUTPUT": str(tmp_path / "measured")}
    for name, value in (given | {"PEER": "python", "SEEDS": 2, "LIMIT": 10, "ROUNDS": 1, "RATE": 2e-5}).items():
        monkeypatch.setattr(embeddings, name, SimpleNamespace(value=value))
    made = []

    def side(name, speed):
        def train(work, folder):
            made.append((name, work["seed"], len(work["pairs"]["score"]), max(work["pairs"]["score"])))
            return speed, np.random.default_rng(len(made)).normal(size=(len(work["texts"]), 4))

        monkeypatch.setattr(embeddings, name, train)

    side("start", {})
    side("ours", {"pairs_per_second": 3.0})
    side("theirs", {"pairs_per_second": 2.0})
    monkeypatch.setattr(embeddings, "embed", lambda task, work: None)
    embeddings.main()
    told = capsys.readouterr().out
    orders = [("start", 0), ("ours", 0), ("theirs", 0), ("theirs", 1), ("ours", 1)]
    assert made == [(*each, 6, 0.8) for each in orders]  # every second pair; 4 of 5
    assert next(line for line in told.splitlines() if "pairs_per_second" in line).split()[-2:] == ["higher", "1.50"]
    assert "stsb.spearman" in told and "not told apart" in told
    embeddings.main()
    assert len(made) == 5 and capsys.readouterr().out == told


def test_bm25_has_lucenes_weights():
    passages = ["The cat sat. The cat!", "a dog", "the dog and the other dog ran"]
    found = bm25(["Cat, dog?", "fish"], passages)
    lengths, mean = [5, 2, 7], 14 / 3

    def weight(count, length, holding):  # of three passages
        rarity = np.log(1 + (3 - holding + 0.5) / (holding + 0.5))
        return rarity * count / (count + 1.2 * (1 - 0.75 + 0.75 * length / mean))

    expected = [weight(2, lengths[0], 1), weight(1, lengths[1], 2), weight(2, lengths[2], 2)]
    np.testing.assert_allclose(found, [expected, [0, 0, 0]])


PEER = """#!{python}
import json, sys
side = sys.argv[2]  # after the path of the worker
for line in sys.stdin if side not in ("export", "train") else ():
    request = json.loads(line)
    texts = request["texts"]
    assert all(texts), texts
    reply = {{"seconds": len(texts) / 8, "cpu_seconds": 0.5, "memory": 7_000_000}}
    if request["show"]:
        sys.path.insert(0, "benchmarks/peers")
        from answers import ours
        found = ours(*sys.argv[3:])[request["work"]]()(texts)
        reply["answers"] = [[float(value) + {error} for value in one] for one in found]
    print(json.dumps(reply), flush=True)
"""


@pytest.mark.slow
def test_answers_beside_peers_that_answer_too(repository, tmp_path):
    """Ours are computed; the peers need an eighth of a second for each text."""
    model, text, peer = make_pretrained(tmp_path, max_positions=128), tmp_path / "texts.txt", tmp_path / "peer"
    classifier, topics = tmp_path / "run", make_topics(tmp_path / "topics", num_train=16, num_dev=4)
    finetune(
        FinetuneConfig(
            task=TaskConfig(name="classification", max_seq_length=32),
            data=FinetuneDataConfig(source=str(topics), batch_size=8),
            train=FinetuneTrainConfig(num_epochs=1), init_checkpoint=str(model),
        ),
        classifier, jax.devices()[:1],
    )  # fmt: skip
    write_topics(text, 2000, seed=0, labels=False)
    write_topics(tmp_path / "table.tsv", 1200, seed=1)
    peer.write_text(PEER.format(python=sys.executable, error=0.01))
    peer.chmod(0o755)
    places = [f"--model={model}", f"--classifier={classifier}", f"--input={text}", f"--output={tmp_path}/out.json"]
    command = [sys.executable, "-m", "benchmarks.answers", *places, f"--peer_python={peer}", "--rounds=8"]
    command += [f"--table={tmp_path}/table.tsv", "--in_a_row=3", "--before=."]  # stands for an earlier one
    done = subprocess.run(command, cwd=repository, text=True, capture_output=True)
    assert done.returncode == 1 and "torch does not answer as bert_jax does: embed differs by 0.01" in done.stderr
    peer.write_text(PEER.format(python=sys.executable, error=0))
    done = subprocess.run(command, cwd=repository, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    rows = {line.split("  ")[0]: line.split() for line in done.stdout.splitlines() if line}
    assert rows["embed, 256 short texts"][-6] == rows["classify, 256 short texts"][-6] == "32,000.0"
    record = json.loads((tmp_path / "out.json").read_text())
    of = {(one["work"], one["request"]): one for one in record["requests"] if one["side"] == "bert_jax"}
    assert len(of) == 10 and len(record["requests"]) == 50 and len(record["first"]) == 20
    for one in of.values():
        assert len(one["seconds"]) == (8 if one["texts"] == 1 else 1) and 0 < one["p50"] <= one["p95"]
    ours, before, theirs = record["trained"][:3]
    assert [ours["side"], before["side"], theirs["side"]] == ["bert_jax, cold", "before, cold", "transformers"]
    assert min(ours["cpu_seconds"], before["cpu_seconds"]) > theirs["cpu_seconds"] > 0  # which starts, and ends
    onnx = next(one for one in record["requests"] if one["side"] == "onnx" and one["texts"] == 24)
    assert (onnx["p50"], onnx["p95"], onnx["memory"]) == (3.0, 3.0, 7_000_000)
