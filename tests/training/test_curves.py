# SPDX-License-Identifier: Apache-2.0
"""The curves of a run: which lines are drawn, through which points."""

import math

import numpy as np
import pytest
from blank_figures import drawn
from matplotlib.figure import Figure

from bert_jax.training.curves import draw_curves
from bert_jax.training.report import METRICS_FILE, Reporter


@pytest.fixture
def figures(monkeypatch):
    """Returns the list of the figures that are saved from now on."""
    saved = []

    def note(figure, *args, **kwargs):
        saved.append(figure)
        return save(figure, *args, **kwargs)

    with drawn():
        save = Figure.savefig
        monkeypatch.setattr(Figure, "savefig", note)
        yield saved


def lines_of(axes):
    """Returns the points of each line, by its label."""
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


def write_metrics(directory):
    with Reporter(directory, 20, tensorboard=False) as reporter:
        for step, loss, accuracy in ((0, 5.0, 0.25), (20, 4.0, 0.5)):
            scores = {"mlm_loss": loss, "mlm_accuracy": accuracy, "nsp_accuracy": 0.6}
            reporter.log(step, "eval", scores | {"unigram_loss": 6.5, "unigram_accuracy": 0.0625, "nsp_base_rate": 0.5})
            if step == 0:
                reporter.log(10, "train", {"mlm_loss": 4.5, "learning_rate": 1e-4, "tokens_per_second": 5000.0})
                reporter.log(20, "train", {"mlm_loss": math.nan, "learning_rate": 5e-5, "tokens_per_second": 6000.0})


def test_curves_are_drawn(tmp_path, figures):
    write_metrics(tmp_path)
    draw_curves(tmp_path / METRICS_FILE, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert list(panels) == [
        "Masked language model: loss (nats per prediction)",
        "Masked language model: accuracy (%)",
        "Next sentence: accuracy (%)",
        "Learning rate",
        "Thousands of tokens per second",
    ]
    assert all(axes.get_xlabel() == "step" for axes in figure.axes)
    loss, accuracy, next_sentence, rate, speed = map(lines_of, figure.axes)
    assert sorted(loss) == ["held out", "token frequencies alone", "training"]
    assert loss["training"][0] == [10, 20]
    np.testing.assert_array_equal(loss["training"][1], [4.5, math.nan])
    assert loss["held out"] == ([0, 20], [5, 4])
    assert loss["token frequencies alone"][1] == [6.5, 6.5]
    assert accuracy == {"held out": ([0, 20], [25, 50]), "token frequencies alone": ([0, 1], [6.25, 6.25])}
    assert next_sentence == {"held out": ([0, 20], [60, 60]), "the more frequent answer": ([0, 1], [50, 50])}
    assert rate == {"training": ([10, 20], [1e-4, 5e-5])}
    assert speed == {"training": ([10, 20], [5, 6])}
    (baseline,) = [line for line in figure.axes[0].lines if line.get_label() == "token frequencies alone"]
    assert baseline.get_linestyle() == "--"
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend == ["training", "held out", "token frequencies alone"]
    heading = figure.get_suptitle()
    assert heading.startswith("Step 20, held out: mlm 4.000 (baseline 6.500)")


def test_the_scores_of_a_task_take_the_place_of_those_of_pretraining(tmp_path, figures):
    with Reporter(tmp_path, 20, tensorboard=False) as reporter:
        reporter.log(20, "eval", {"accuracy": 0.75})
    panels = [("accuracy", "Accuracy (%)", 100), ("f1_score", "F1", 1)]
    draw_curves(tmp_path / METRICS_FILE, tmp_path / "curves.png", panels)
    ((axes,),) = [figure.axes for figure in figures]
    assert axes.get_title(loc="left") == "Accuracy (%)" and lines_of(axes) == {"held out": ([20], [75])}


def test_no_curves_without_metrics(tmp_path, figures):
    draw_curves(tmp_path / METRICS_FILE, tmp_path / "curves.png")
    assert list(tmp_path.iterdir()) == [] and figures == []
