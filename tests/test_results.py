# SPDX-License-Identifier: Apache-2.0
"""Records of work directories, the statistics of paired seeds, and the pages that are drawn of them."""

import gzip
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks import collecting, pages, paired, tables
from bert_jax.errors import InputError

PAPER = """
[table5]
source = "A paper, Table 5"
[table5.bert]
sst2 = 92.7
[table5.no_nsp]
sst2 = 92.6
"""
NAMES = ("ellipsis", "islands")


# Statistics


def test_mean_and_deviation():
    assert paired.summarise({0: 1.0, 1: 2.0, 2: 6.0}) == pytest.approx((3.0, np.std([1, 2, 6], ddof=1), 3))
    assert paired.summarise({4: 0.5}) == (0.5, None, 1)
    assert paired.summarise({}) is None


def test_the_interval_is_that_of_all_resamples():
    one, other = {0: 0.9, 1: 0.7, 2: 0.8}, {0: 0.5, 1: 0.6, 2: 0.7}
    means = [np.mean(draw) for draw in itertools.product([0.4, 0.1, 0.1], repeat=3)]
    found = paired.difference(one, other)
    assert found is not None and len(means) == 27
    assert (found.mean, found.seeds) == (pytest.approx(0.2), 3)
    assert found.bootstrap == pytest.approx((min(means), max(means)))


def test_the_interval_is_scipys():
    rng = np.random.default_rng(5)
    apart = rng.normal(0.3, 1.0, 20)
    found = paired.difference(dict(enumerate(apart)), dict.fromkeys(range(20), 0.0))
    theirs = stats.bootstrap((apart,), np.mean, n_resamples=100_000, method="percentile", rng=1).confidence_interval
    assert found is not None and found.seeds == 20
    assert found.bootstrap == pytest.approx(tuple(theirs), abs=0.02)
    assert found.student == pytest.approx(tuple(stats.ttest_1samp(apart, 0.0).confidence_interval(0.95)))


def test_students_interval_decides_because_percentiles_of_few_seeds_are_too_narrow():
    apart = np.random.default_rng(7).normal(size=(500, 3))  # without a difference
    found = [paired.difference(dict(enumerate(row)), dict.fromkeys(range(3), 0.0)) for row in apart]
    assert np.mean([each.sign != 0 for each in found]) < 0.08
    assert np.mean([each.bootstrap[0] > 0 or each.bootstrap[1] < 0 for each in found]) > 0.2
    one = paired.difference({0: 0.9, 1: 0.7, 2: 0.8}, {0: 0.5, 1: 0.6, 2: 0.7})
    assert one is not None and one.bootstrap[0] > 0 > one.student[0]
    assert paired.agreement(one, 1.0) == "not told apart"


def test_only_seeds_of_both_are_paired():
    one, other = {0: 0.9, 1: 0.7, 5: 99.0}, {0: 0.5, 1: 0.6, 7: -99.0}
    found = paired.difference(one, other)
    assert found is not None and (found.mean, found.seeds) == (pytest.approx(0.25), 2)
    assert paired.difference({0: 1.0}, {1: 1.0}) is None


def test_one_seed_has_no_interval():
    found = paired.difference({3: 0.9}, {3: 0.5, 4: 0.1})
    assert found == (pytest.approx(0.4), None, None, 1) and found is not None and found.sign == 0
    assert paired.agreement(found, 1.0) == "one seed"


def test_examples_make_the_interval_of_one_seed():
    rng = np.random.default_rng(0)
    one, other = rng.random(400) < 0.8, rng.random(400) < 0.6
    found = paired.difference_by_examples({0: one}, {0: other, 1: other})
    apart = one.astype(float) - other
    half = 1.96 * apart.std(ddof=1) / np.sqrt(400)
    assert found is not None and (found.mean, found.student, found.seeds) == (pytest.approx(apart.mean()), None, 1)
    assert found.bootstrap == pytest.approx((apart.mean() - half, apart.mean() + half), abs=0.008)
    assert found.sign == 1 and paired.agreement(found, 1.0) == "agrees, one seed"
    two = paired.difference_by_examples({0: one, 1: one[::-1] * 0.5}, {0: other, 1: other})
    assert two is not None and two.seeds == 2 and np.ptp(two.bootstrap) > np.ptp(found.bootstrap)
    of_seeds = paired.difference({0: one.mean(), 1: one.mean() / 2}, dict.fromkeys((0, 1), other.mean()))
    assert of_seeds is not None and two.student == pytest.approx(of_seeds.student)
    with pytest.raises(InputError, match="different numbers of examples"):
        paired.difference_by_examples({0: one}, {0: other[:-1]})


@pytest.mark.parametrize(
    ("examples", "seeds", "paper", "word"),
    [
        ((0.1, 0.3), (0.1, 0.3), 1.5, "agrees"),
        ((-0.3, -0.1), (-0.4, -0.1), -1.5, "agrees"),
        ((-0.3, -0.1), (-0.3, -0.1), 1.5, "disagrees"),
        ((0.1, 0.3), (-0.1, 0.3), 1.5, "not told apart"),
        ((-0.1, 0.3), (0.1, 0.3), 1.5, "not told apart"),
        ((0.1, 0.3), None, 1.5, "agrees"),
        ((0.1, 0.3), (0.1, 0.3), 0.0, "the paper has none"),
        ((0.1, 0.3), (0.1, 0.3), None, ""),
    ],
)
def test_whether_the_sign_is_the_papers(examples, seeds, paper, word):
    assert paired.agreement(paired.Difference(0.0, examples, seeds, 3), paper) == word


# Records


def pairs_score(accuracy: float, step: int = 8) -> dict:
    def line(name, right):
        found = {"name": name, "phenomenon": name, "pairs": 100, "right": right, "ties": 0, "accuracy": right / 100}
        return found | {"interval": [right / 100 - 0.1, right / 100 + 0.1], "baselines": {"ngram": 0.612}}

    right = round(100 * accuracy)
    phenomena = [line(name, right + place) for place, name in enumerate(NAMES)]
    about = {"trained": {"step": step, "tokens": 1000 * step}}
    return about | {"overall": line("overall", right), "phenomena": phenomena, "paradigms": []}


def make_unit(root: Path, group: str, seed: int, score: float, finetunings: int = 1) -> Path:
    """Writes what a unit's directory holds after training, as `benchmarks.ablations` leaves it."""
    unit = root / group / f"seed{seed}"
    (unit / "pretrain" / "pretrained").mkdir(parents=True)
    metrics = [{"step": 4, "kind": "train", "time": 1.0, "loss": 5.0}]
    metrics += [{"step": 8, "kind": "goodput", "steps": 5400.4, "wall": 6000.0}]
    metrics += [{"step": step, "kind": "eval", "time": 2.0, "mlm_loss": 9.0 / step} for step in (0 + 1, 4, 8)]
    (unit / "pretrain" / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in metrics))
    write(
        unit / "pretrain" / "config.json",
        {"model": {"num_layers": 2, "hidden_size": 64}, "run": {"train": {"seed": 1}}},
    )
    write(unit / "pretrain" / "pretrained" / "config.json", {"trained": {"step": 8, "tokens": 8000}})
    starts = [{"commit": f"0123456789abcdef{changed}", "machine": "a CPU"} for changed in ("", "+")]
    starts += [{"job": "blimp"}, {"job": "tasks/sst2", "machine": "another"}]
    (unit / "starts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in starts) + '{"commit": "01')
    for number in range(finetunings):
        for rate, less in ((1e-5, 0.3), (5e-5, 0.0)):
            run = unit / "tasks" / "sst2" / "runs" / f"rate{rate:g}_seed{number}"
            accuracy = score - less + 0.01 * number
            result = {"metrics": {"accuracy": accuracy}, "metric": "accuracy", "constant": {"accuracy": 0.5}}
            write(run / "results.json", result | {"task": "sst2", "step": 3, "signal": 0, "seconds": 1.5})
            settings = {"optimizer": {"learning_rate": rate}, "train": {"seed": number}, "task": {"name": "sst2"}}
            settings["data"] = {"source": str(root / "SST-2")}
            write_predictions(root / "SST-2", run, accuracy)
            write(run / "config.json", {"run": settings, "task_settings": {}})
    for step in (2, 8):
        write(unit / "pairs" / f"blimp@{step}.json", pairs_score(score - 0.1, step))
        scores = {"metrics": {"mlm_accuracy": score / 3}, "trained": {"step": step, "tokens": 1000 * step}}
        write(unit / "evaluations" / f"heldout@{step}.json", scores)
    write(unit / "pairs" / "blimp.json", pairs_score(score - 0.1))
    return unit


def write_predictions(data: Path, run: Path, accuracy: float) -> None:
    """Writes a development set of 100 examples, and predictions that are right for so many of the first."""
    data.mkdir(exist_ok=True)
    lines = "".join(f"a film {number}\t{number % 2}\n" for number in range(100))
    (data / "dev.tsv").write_text(f"sentence\tlabel\n{lines}")
    said = [number % 2 if number < round(100 * accuracy) else 1 - number % 2 for number in range(100)]
    (run / "predictions").mkdir()
    lines = "".join(f"{number}\t{label}\n" for number, label in enumerate(said))
    (run / "predictions" / "SST-2-dev.tsv").write_text(f"index\tprediction\n{lines}")


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


@pytest.fixture
def record(tmp_path):
    for group, scores in {"bert": (0.90, 0.88, 0.91), "no_nsp": (0.80, 0.82)}.items():
        for seed, score in enumerate(scores):
            make_unit(tmp_path / "runs", group, seed, score)
    found = collecting.collect(sorted((tmp_path / "runs").glob("*/seed*")))
    collecting.write_record(found, tmp_path / "records" / "table5.json.gz")
    return found


@pytest.fixture
def sources(record, tmp_path):
    (tmp_path / "paper.toml").write_text(PAPER)
    return pages.Sources(tmp_path / "records", tmp_path / "paper.toml")


def test_a_record_has_what_the_runs_left(record, tmp_path):
    assert [(unit["group"], unit["seed"]) for unit in record["units"]] == [
        ("bert", 0), ("bert", 1), ("bert", 2), ("no_nsp", 0), ("no_nsp", 1),
    ]  # fmt: skip
    unit = record["units"][0]
    assert unit["heldout"] == {"step": [1, 4, 8], "mlm_loss": [9.0, 2.25, 1.125]}
    assert unit["trained"] == {"step": 8, "tokens": 8000} and len(unit["starts"]) == 2
    task = unit["tasks"]["sst2"]
    assert (task["learning_rate"], task["rates_tried"], task["seconds"]) == (5e-5, [1e-5, 5e-5], 3.0)
    assert task["runs"] == {"0": {"accuracy": 0.9}} and task["right"] == {"0": "1" * 90 + "0" * 10}
    assert unit["evaluations"]["heldout@2"]["metrics"]["mlm_accuracy"] == 0.3
    path = tmp_path / "records" / "table5.json.gz"
    assert collecting.read_record(path) == record
    before = path.read_bytes()
    collecting.write_record(record, path)
    assert path.read_bytes() == before


def test_a_record_says_not_where_things_lay(tmp_path):
    unit = make_unit(tmp_path, "bert", 0, 0.9)
    start = {
        "command": ["/a/b/python", "--workdir=/c/d/e", "--input='train=/f/g.json[:2],dev=/f/h.json'", "runs/x", "1/2"]
    }
    (unit / "starts.jsonl").write_text(json.dumps(start | {"machine": "2 x A/B"}) + "\n")
    score = {"overall": {"accuracy": 0.5}, "checkpoint": str(unit / "pretrain@4"), "data": "gs://a/b"}
    write(unit / "pairs" / "zorro.json", score)
    found = collecting.collect_unit(unit)
    command = ["python", "--workdir=e", "--input='train=g.json[:2],dev=h.json'", "runs/x", "1/2"]
    assert found["starts"] == [{"command": command, "machine": "2 x A/B"}]
    assert found["pairs"]["zorro"] == {"overall": {"accuracy": 0.5}, "checkpoint": "pretrain@4", "data": "gs://a/b"}
    assert str(tmp_path) not in json.dumps(found)


def test_scores_are_found_by_their_names(record):
    assert tables.scores(record, "no_nsp", "task:sst2") == {0: 0.8, 1: 0.82}
    assert tables.scores(record, "no_nsp", "task:sst2.f1") == tables.scores(record, "bert", "task:cola") == {}
    assert tables.scores(record, "bert", "heldout:mlm_loss") == {0: 1.125, 1: 1.125, 2: 1.125}
    diverged = {"group": "x", "seed": 0, "heldout": {"step": [1, 2], "mlm_loss": [1.5, None]}}  # NaN in the end
    assert tables.scores({"units": [diverged]}, "x", "heldout:mlm_loss") == {}
    assert tables.scores(record, "bert", "evaluation:heldout@8.mlm_accuracy")[0] == 0.3
    assert tables.scores(record, "bert", "pairs:blimp")[0] == 0.8
    assert tables.scores(record, "bert", "pairs:blimp.islands")[0] == 0.81
    with pytest.raises(InputError, match="of no kind there is"):
        tables.scores(record, "bert", "tasks:sst2")


def test_fine_tunings_of_one_model_are_paired_by_their_seeds(tmp_path):
    directories = [make_unit(tmp_path, group, 0, score, 3) for group, score in (("trained", 0.9), ("random", 0.6))]
    found = collecting.collect(directories)
    assert tables.scores(found, "trained", "task:sst2") == pytest.approx({0: 0.91})
    by_seed = tables.scores(found, "trained", "task:sst2", "finetuning")
    assert by_seed == pytest.approx({(0, 0): 0.9, (0, 1): 0.91, (0, 2): 0.92})
    apart = tables.apart(found, "trained", "random", "task:sst2", "finetuning")
    assert apart is not None and (apart.mean, apart.seeds) == (pytest.approx(0.3), 3)


def test_fine_tunings_of_several_models_are_averaged_first(tmp_path):
    for group, scores in {"trained": (0.9, 0.8), "random": (0.6, 0.6)}.items():
        for seed, score in enumerate(scores):
            make_unit(tmp_path, group, seed, score, 3)
    for path in (tmp_path / "random" / "seed1").glob("tasks/sst2/runs/*_seed2/results.json"):
        path.unlink()
    found = collecting.collect(sorted(tmp_path.glob("*/seed*")))
    apart = tables.apart(found, "trained", "random", "task:sst2", "finetuning")
    assert apart is not None and (apart.mean, apart.seeds) == (pytest.approx(0.25), 2)
    assert apart.bootstrap == pytest.approx((0.2, 0.3))
    column = tables.Column("task:sst2", "SST-2")
    lines = tables.score_table(found, [tables.row_of(["trained"])], [column], {}, "finetuning")
    assert lines[-1] == "| trained | 86.0 ± 7.1 (2) |"


def test_groups_that_share_no_seed_are_told(tmp_path, capsys):
    found = collecting.collect([make_unit(tmp_path, "bert", 0, 0.9), make_unit(tmp_path, "no_nsp", 1, 0.9)])
    rows = [tables.row_of([group]) for group in ("bert", "no_nsp")]
    tables.difference_table(found, rows, "bert", [tables.Column("task:sst2", "SST-2")], {}, "pretraining")
    assert "no_nsp and bert share no seed of task:sst2; no row is drawn" in capsys.readouterr().err


def test_rates_are_compared_over_the_seeds_that_most_have_and_missing_ones_are_told(tmp_path):
    unit = make_unit(tmp_path / "runs", "bert", 0, 0.9, 3)
    runs = unit / "tasks" / "sst2" / "runs"
    (runs / "rate5e-05_seed1" / "results.json").unlink()  # as of a run that diverged or has not finished
    task = collecting.collect_unit(unit)["tasks"]["sst2"]
    assert (task["learning_rate"], sorted(task["runs"]), task["missing"]) == (1e-5, ["0", "1", "2"], 0)
    result = json.loads((runs / "rate1e-05_seed1" / "results.json").read_text())
    write(runs / "rate1e-05_seed1" / "results.json", result | {"metrics": {"accuracy": float("nan")}})
    write(unit / "tasks" / "sst2" / "sweep.json", {"runs": [{"seed": seed} for seed in range(5)]})
    found = collecting.collect([unit])
    task = found["units"][0]["tasks"]["sst2"]
    assert (task["learning_rate"], sorted(task["runs"]), task["missing"]) == (5e-5, ["0", "2"], 3)
    found["units"].append({"group": "bert", "seed": 1, "tasks": {}})
    rows, columns = [tables.row_of(["bert"])], [tables.Column("task:sst2", "SST-2")]
    assert tables.score_table(found, rows, columns, {}, "finetuning")[-1] == "| bert | 91.0 ± 1.4 (2, 4 missing) |"
    assert tables.score_table(found, rows, columns, {}, "pretraining")[-1] == "| bert | 91.0 (4 missing) |"


def test_work_directories_alone_are_units_too(tmp_path):
    unit = make_unit(tmp_path, "bert", 0, 0.9)
    trained = collecting.collect_unit(unit / "pretrain")
    assert (trained["group"], trained["seed"], "tasks" in trained) == ("pretrain", 1, False)  # of its config.json
    finetuned = collecting.collect_unit(unit / "tasks" / "sst2")
    assert finetuned["group"] == "sst2" and set(finetuned["tasks"]) == {"sst2"}
    assert finetuned["seed"] == 0  # the 2 is no seed
    (unit / "pretrain").rename(tmp_path / "lr1e-3_seed12")
    assert collecting.collect_unit(tmp_path / "lr1e-3_seed12")["seed"] == 12


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("pretrain/config.json", "{", "config.json is damaged"),
        ("pretrain/metrics.jsonl", "nothing\n{}\n", "metrics.jsonl is damaged at line 1"),
        ("tasks/sst2/runs/rate5e-05_seed0/results.json", '{"metrics": 1}', "results.json"),
        ("pairs/blimp.json", "[1]", "blimp.json does not hold an object"),
        ("starts.jsonl", "x\ny\n", "starts.jsonl:1 is damaged"),
        ("unit.json", '{"group": ""', "unit.json is damaged"),
        ("unit.json", '{"seed": "x"}', 'unit.json is {"seed": "x"}; it has a name and a whole number'),
        ("pretrain/config.json", "[]", "a file in .* is damaged .AttributeError"),
        ("pretrain/config.json", "null", "a file in .* is damaged"),
        ("tasks/sst2/sweep.json", "{}", "a file in .* is damaged .KeyError: 'runs'"),
        ("tasks/sst2/sweep.json", "[]", "a file in .* is damaged"),
        ("tasks/sst2/runs/rate5e-05_seed0/config.json", "{}", "a file in .* is damaged"),
        ("unit.json", "[]", "unit.json is .*; it has a name and a whole number"),
    ],
)
def test_damage_is_one_line(file, content, problem, tmp_path):
    unit = make_unit(tmp_path, "bert", 0, 0.9)
    (unit / file).write_text(content)
    with pytest.raises(InputError, match=problem) as error:
        collecting.collect([unit])
    assert "\n" not in str(error.value)


def test_what_cannot_be_collected_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has nothing to collect"):
        collecting.collect([tmp_path / "empty"])
    twice = [make_unit(tmp_path / place, "bert", 0, 0.9) for place in ("one", "two")]
    with pytest.raises(InputError, match="are both group 'bert', seed 0"):
        collecting.collect(twice)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "is damaged"),
        (gzip.compress(b'{"format": 1, "units": []}', mtime=0)[:-9], "is damaged"),
        (gzip.compress(b"{}", mtime=0)[:10] + b"\xff" * 20, "is damaged"),
        (b'{"format": 2, "units": []}', "no record of format 1"),
        (b"[]", "no record of format 1"),
        (b'{"format": 1, "units": [{"group": 3}]}', "unit 0 has no group or seed"),
    ],
)
def test_a_damaged_record_is_one_line(content, problem, tmp_path):
    path = tmp_path / ("record.json.gz" if content[:1] == b"\x1f" else "record.json")
    path.write_bytes(content)
    with pytest.raises(InputError, match=problem) as error:
        collecting.read_record(path)
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="there is no record"):
        collecting.read_record(tmp_path / "other.json")


# Pages

SCORES = """columns = [{metric = "task:sst2", label = "SST-2", paper = "sst2"}]
rows = [["bert", "NSP + MLM"], ["no_nsp", "No NSP"]]
record = "table5"
paper = "table5"
"""


def page(kind: str, spec: str) -> str:
    return f"By hand.\n\n<!-- draw {kind}\n{spec}-->\nold\n<!-- end -->\nBy hand too.\n"


def draw(tmp_path: Path, sources: pages.Sources, text: str) -> str:
    (tmp_path / "page.md").write_text(text)
    return pages.draw_page(tmp_path / "page.md", sources)


def test_a_table_has_means_deviations_and_the_papers(sources, tmp_path):
    drawn = draw(tmp_path, sources, page("table", SCORES))
    assert "old" not in drawn and drawn.startswith("By hand.\n") and drawn.endswith("By hand too.\n")
    assert "|  | SST-2 | paper |\n| --- | --- | --- |\n" in drawn
    assert "| NSP + MLM | 89.7 ± 1.5 (3) | 92.7 |\n| No NSP | 81.0 ± 1.4 (2) | 92.6 |\n" in drawn
    assert "Paper: A paper, Table 5." in drawn
    assert draw(tmp_path, sources, drawn) == drawn


def test_a_column_without_scores_is_told(sources, tmp_path, capsys):
    draw(tmp_path, sources, page("table", SCORES.replace("task:sst2", "evaluation:heldout@8.perplexity")))
    assert capsys.readouterr().err.count("no group of the table has evaluation:heldout@8.perplexity") == 1


def test_differences_are_over_seeds_that_both_have(sources, tmp_path):
    drawn = draw(tmp_path, sources, page("differences", SCORES + 'baseline = "bert"\n'))
    assert "|  | ours | 95 %, bootstrap of seeds | 95 %, Student's t | seeds | paper | sign |" in drawn
    assert "| No NSP | SST-2 | -8.0 | -10.0 to -6.0 | -33.4 to +17.4 | 2 | -0.1 | not told apart |" in drawn


def test_differences_by_examples_resample_those_too(sources, record, tmp_path):
    assert tables.right_answers(record, "no_nsp", "task:sst2")[1] == [1.0] * 82 + [0.0] * 18
    found = tables.apart(record, "no_nsp", "bert", "task:sst2", "examples")
    seeds = tables.apart(record, "no_nsp", "bert", "task:sst2", "pretraining")
    assert found and seeds and found.mean == pytest.approx(seeds.mean) and (found.seeds, seeds.seeds) == (2, 2)
    assert found.bootstrap[0] < seeds.bootstrap[0] < seeds.bootstrap[1] < found.bootstrap[1] < 0
    assert found.student == pytest.approx(seeds.student)
    drawn = draw(tmp_path, sources, page("differences", SCORES + 'baseline = "bert"\nby = "examples"\n'))
    assert "| No NSP | SST-2 | -8.0 | -1" in drawn
    assert tables.right_answers(record, "no_nsp", "task:sst2.accuracy")[1] == [1.0] * 82 + [0.0] * 18
    record["units"][0]["tasks"]["sst2"]["metric"] = "f1"
    for metric in ("pairs:blimp", "task:sst2", "task:sst2.f1"):
        with pytest.raises(InputError, match=f"right answers, which {metric} is not; give task:NAME.accuracy"):
            tables.right_answers(record, "bert", metric)


@pytest.mark.parametrize("change", ["predictions", "data", "name"])
def test_answers_that_are_not_there_are_left_out(change, tmp_path):
    unit = make_unit(tmp_path, "bert", 0, 0.9)
    if change == "data":
        (tmp_path / "SST-2" / "dev.tsv").unlink()
        (tmp_path / "SST-2").rmdir()
    for run in (unit / "tasks" / "sst2" / "runs").iterdir():
        if change == "predictions":
            (run / "predictions" / "SST-2-dev.tsv").unlink()
        if change == "name":
            config = json.loads((run / "config.json").read_text())
            config["run"]["task"]["name"] = "ner"
            write(run / "config.json", config)
    assert collecting.collect_unit(unit)["tasks"]["sst2"]["right"] == {}


def test_predictions_of_other_data_are_refused(tmp_path):
    unit = make_unit(tmp_path, "bert", 0, 0.9)
    with open(tmp_path / "SST-2" / "dev.tsv", "a") as file:
        file.write("one more\t1\n")
    with pytest.raises(InputError, match="has no prediction for index 100"):
        collecting.collect_unit(unit)


def test_minimal_pairs_stand_beside_baselines(sources, tmp_path):
    spec = 'record = "table5"\nrows = [["bert", "ours"]]\npairs = "blimp"\n'
    drawn = draw(tmp_path, sources, page("pairs", spec))
    assert "|  | pairs | ours | ngram |" in drawn and "| overall | 100 | 79.7 ± 1.5 (3) | 61.2 |" in drawn
    assert "| islands | 100 | 80.7 ± 1.5 (3) | 61.2 |" in drawn


def test_baselines_are_those_of_all_and_other_pairs_are_refused(record):
    rows = [tables.row_of([group]) for group in ("bert", "no_nsp")]
    first, last = record["units"][0]["pairs"]["blimp"], record["units"][-1]["pairs"]["blimp"]
    last["phenomena"][0]["baselines"]["lstm"] = 0.5
    first["phenomena"][1]["baselines"].clear()
    drawn = tables.pairs_table(record, rows, "blimp")
    assert drawn[0] == "|  | pairs | bert | no_nsp | ngram | lstm |"
    assert drawn[3].endswith("| 61.2 | 50.0 |") and drawn[4].endswith("| 61.2 |  |")
    last["phenomena"][1]["pairs"] = 50
    problem = "bert seed 0 has 100 pairs of blimp islands and no_nsp seed 1 has 50 pairs of blimp islands"
    with pytest.raises(InputError, match=problem):
        tables.pairs_table(record, rows, "blimp")


def test_one_seed_has_the_interval_over_pairs(sources, tmp_path):
    collecting.write_record(collecting.collect([tmp_path / "runs" / "bert" / "seed0"]), tmp_path / "records" / "a.json")
    drawn = draw(tmp_path, sources, page("pairs", 'record = "a"\nrows = [["bert", "ours"]]\npairs = "blimp"\n'))
    assert "| overall | 100 | 80.0 [70.0, 90.0] | 61.2 |" in drawn


def test_runs_say_where_and_how_often_they_were_started(sources, tmp_path):
    drawn = draw(tmp_path, sources, page("runs", 'record = "table5"\nrows = [["no_nsp", "No NSP"]]\n'))
    assert "| No NSP | 1 | 2 x 64 | 8 | 0.01 | 1.5 | 1 | 01234567, 01234567+ | a CPU |" in drawn


def test_values_stand_within_a_line(sources, tmp_path):
    write(tmp_path / "records" / "run.json", {"a": {"b": 1.23e-5}, "name": "x"})
    text = "It is <!-- value run a.b .1e -->?<!-- end --> of <!-- value run name s --><!-- end -->.\n"
    drawn = draw(tmp_path, sources, text)
    assert ">1.2e-05<!-- end --> of " in drawn and ">x<!-- end -->." in drawn
    (tmp_path / "records" / "other.json").write_text("{")
    for wrong, problem in (
        ("run a.c .1e", "has no a.c"),
        ("run name .1e", "cannot format"),
        ("ran name s", "there is no record 'ran'"),
        ("other name s", "other.json is damaged"),
    ):
        above = page("table", SCORES)
        with pytest.raises(InputError, match=rf"page\.md:{above.count(chr(10)) + 1}: .*{problem}"):
            draw(tmp_path, sources, f"{above}<!-- value {wrong} --><!-- end -->\n")
    collecting.write_record({"a": 3}, tmp_path / "records" / "packed.json.gz")
    assert ">3<!-- end -->" in draw(tmp_path, sources, "<!-- value packed a d --><!-- end -->\n")


def test_pictures_are_drawn_the_same_each_time(sources, tmp_path):
    spec = 'record = "table5"\ngroup = "bert"\nfile = "l.png"\npairs = "blimp"\nevaluation = "heldout"\n'
    spec += 'metric = "mlm_accuracy"\n'
    drawn = draw(tmp_path, sources, page("learning", spec))
    assert "![learning](l.png)" in drawn
    assert "| tokens read | 0.002 M | 0.008 M |" in drawn
    assert "| masked words | 30.0 | 30.0 |" in drawn and "| blimp | 80.0 | 80.0 |" in drawn
    with pytest.raises(InputError, match=r"labels has 1 names; give 2, for masked words"):
        draw(tmp_path, sources, page("learning", spec + 'labels = ["words"]\n'))
    first = (tmp_path / "l.png").read_bytes()
    draw(tmp_path, sources, drawn)
    assert first[:4] == b"\x89PNG" and (tmp_path / "l.png").read_bytes() == first
    spec = 'record = "table5"\nrows = [["bert", "BERT"], ["no_nsp"]]\nfile = "c.png"\nmetric = "mlm_loss"\n'
    draw(tmp_path, sources, page("curves", spec))
    assert (tmp_path / "c.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (page("tabel", SCORES), "there is no block 'tabel' .did you mean"),
        (page("table", SCORES + "by"), "is no TOML"),
        (page("table", SCORES + "bye = 1\n"), "table has no 'bye'"),
        (page("table", 'record = "table5"\n'), "table needs columns, rows"),
        (page("table", SCORES.replace('"table5"', '"table6"', 1)), "there is no record 'table6'"),
        (page("table", SCORES.replace('paper = "table5"', 'paper = "table9"')), "no table 'table9' of the paper"),
        (page("table", SCORES.replace('"no_nsp"', '"no_nps"')), "no group 'no_nps' .did you mean"),
        (page("table", SCORES.replace("label", "name")), "a column is"),
        (page("table", SCORES.replace('paper = "sst2"', 'paper = "sst3"')), "has no 'sst3' .did you mean 'sst2'"),
        (page("table", SCORES.replace('paper = "table5"', "")), "has no 'sst2'; name the paper's table"),
        (page("table", SCORES + 'by = "example"\n'), 'by = "example": a block table goes by pretraining or finetuning'),
        (page("table", SCORES + 'by = "examples"\n'), 'by = "examples": a block table goes by'),
        (page("differences", SCORES + 'baseline = "bert"\nby = "seeds"\n'), "goes by pretraining or .* or examples"),
        (page("table", SCORES.replace("label =", "digits = 1.5, label =")), "digits = 1.5; give a whole number"),
        (page("table", SCORES.replace("label =", "digits = -1, label =")), "digits = -1; give a whole number"),
        (page("table", SCORES.replace("label =", 'scale = "a", label =')), 'scale = "a"; give a number'),
        (page("table", 'record = "table5"\nrows = [["bert"]]\ncolumns = ["x"]\n'), 'a column is "x"'),
        (page("runs", 'record = "table5"\nrows = [[]]\n'), "rows = .*: .. is no list of 1 to 3 strings"),
        (page("runs", 'record = "table5"\nrows = ["x"]\n'), 'rows = .*: "x" is no list of 1 to 3 strings'),
        (page("runs", 'record = "table5"\nrows = "x"\n'), 'rows = "x": it is a str; use a list'),
        (page("runs", 'record = 5\nrows = [["bert"]]\n'), "record = 5: it is a int; use a str"),
        (page("plans", 'record = "table5"\nrows = [["bert"]]\n'), "is no list of 2 strings"),
        (page("curves", 'record = "table5"\nrows = [["bert"]]\nfile = "c.png"\nmetric = "x"\n'), "no held-out x"),
        (page("table", SCORES).replace("<!-- end -->", ""), "0 of them are whole"),
        # The end of the value is not the table's, and what is written between them stays.
        (page("table", SCORES).replace("<!-- end -->", "") + "<!-- value paper a s --><!-- end -->\n", "1 of them are"),
        (page("table", SCORES).replace("<!-- end -->", "") + page("table", SCORES), "1 of them are whole"),
    ],
)
def test_what_a_page_gets_wrong_is_one_line(text, problem, sources, tmp_path):
    with pytest.raises(InputError, match=problem) as error:
        draw(tmp_path, sources, text)
    assert "page.md" in str(error.value) and "\n" not in str(error.value)
    assert (tmp_path / "page.md").read_text() == text


# Commands


def run(repository: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "benchmarks.results", *arguments]
    return subprocess.run(command, cwd=repository, text=True, capture_output=True)


def test_pages_of_the_repository_are_as_their_records(repository):
    done = run(repository, "check")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


@pytest.mark.slow
def test_the_commands_collect_draw_and_check(repository, record, sources, tmp_path):
    output = tmp_path / "records" / "mine.json"
    runs = tmp_path / "runs"
    first = run(repository, "collect", f"--workdirs={runs}/bert/*", f"--output={output}")
    assert first.returncode == 0 and "3 units of bert" in first.stdout, first.stderr
    run(repository, "collect", "--merge", f"--workdirs={runs}/no_nsp/*", f"--output={output}")
    assert collecting.read_record(output) == record
    (tmp_path / "page.md").write_text(page("table", SCORES.replace('"table5"', '"mine"', 1)))
    places = (f"--pages={tmp_path}/page.md", f"--records={output.parent}", f"--paper={tmp_path}/paper.toml")
    assert run(repository, "check", *places).returncode == 1
    assert run(repository, "draw", *places).returncode == 0
    assert "89.7 ± 1.5 (3)" in (tmp_path / "page.md").read_text()
    assert run(repository, "check", *places).returncode == 0
    for arguments in (["colect"], ["collect"], ["collect", f"--workdirs={runs}/x*", f"--output={output}"]):
        done = run(repository, *arguments)
        assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
