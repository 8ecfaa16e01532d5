# SPDX-License-Identifier: Apache-2.0
"""Accuracies on minimal pairs beside published ones: of both kinds of tables, and with published means."""

import pytest

from benchmarks.minimal_pairs import read_baselines, table_lines


def row(name, phenomenon):
    return {"name": name, "phenomenon": phenomenon, "pairs": 2, "accuracy": 0.5, "interval": [0.1, 0.9]}


def test_a_mean_is_of_all_paradigms_or_left_out(tmp_path):
    (tmp_path / "a.tsv").write_text("UID\tterm\tngram\tgpt2\np\tone\t0.4\t1\nq\tone\t0.6\t0.5\noverall\tone\t0.4\t1\n")
    known = read_baselines(tmp_path / "a.tsv")
    assert known == {"p": {"ngram": 0.4, "gpt2": 1.0}, "q": {"ngram": 0.6, "gpt2": 0.5}}
    (tmp_path / "b.tsv").write_text("paradigm\troberta_base_accuracy\np\t0.9\n")
    known["p"] |= read_baselines(tmp_path / "b.tsv")["p"]
    scores = {"paradigms": [row("p", "one"), row("q", "one")], "phenomena": [row("one", "one")]}
    header, first, second, mean, overall = table_lines(scores | {"overall": row("overall", "overall")}, known)
    assert header.split()[-3:] == ["ngram", "gpt2", "roberta_base"]
    assert first.split()[-3:] == ["40.0", "100.0", "90.0"] and second.split()[-2:] == ["60.0", "50.0"]
    assert mean.split()[0] == "ONE" and mean.split()[-2:] == overall.split()[-2:] == ["50.0", "75.0"]


def test_published_means(shared_data):
    if not (shared_data / "blimp").is_dir():
        pytest.skip("no BLiMP there")
    known = read_baselines(shared_data / "blimp" / "baselines.tsv")
    gpt2 = [models["gpt2"] for models in known.values()]
    assert len(gpt2) == 67 and sum(gpt2) / 67 == pytest.approx(0.830238806, abs=1e-9)
