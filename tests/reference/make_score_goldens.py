# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/scores.json: metrics of scikit-learn, scipy and seqeval on random and on degenerate predictions.

    python -m pip install scikit-learn==1.9.1 scipy==1.17.1 seqeval==1.2.2
    python tests/reference/make_score_goldens.py --output=tests/golden

Where they give nan, warn or refuse, the golden says 0.0, which is what `bert_jax.tasks.scores` promises.
"""

import argparse
import json
import math
import warnings
from importlib import metadata
from pathlib import Path

import numpy as np

TAGS = ["O", "O", "O", "B-PER", "I-PER", "B-LOC", "I-LOC", "I-creative-work"]
BIOES = ["O", "O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in ("PER", "LOC"))]


def class_cases(seed: int, size: int = 30) -> list[tuple[list[int], list[int]]]:
    """Returns labels and predictions: none, one, one class alone, noise, and what models do."""
    rng = np.random.default_rng(seed)
    cases = [([], []), ([1], [1]), ([0], [0]), ([0], [1]), ([0] * 5, [0] * 5), ([1] * 5, [1] * 5), ([0] * 4, [1] * 4)]
    cases += [([0, 1, 0, 1], [0] * 4), ([0, 1, 1, 1], [1] * 4), ([1] * 4, [0, 1, 1, 0]), ([0, 2, 1], [2, 2, 2])]
    for num_classes in (2, 2, 3, 5):
        labels = rng.integers(0, num_classes, size)
        noise = rng.integers(0, num_classes, size)
        for rate in (0.0, 0.2, 1.0):
            cases.append((labels.tolist(), np.where(rng.random(size) < rate, noise, labels).tolist()))
        cases.append((labels.tolist(), (num_classes - 1 - labels).tolist()))
    return cases


def number_cases(seed: int, size: int = 25) -> list[tuple[list[float], list[float]]]:
    """Returns labels and predictions: none, one, all the same, ties, outliers, large and small numbers."""
    rng = np.random.default_rng(seed)
    cases = [([], []), ([1.0], [2.0]), ([1.0, 2.0], [5.0, 3.0]), ([1.0, 1.0], [1.0, 2.0]), ([0.1] * 5, [0.1] * 5)]
    cases += [([1.0, 2.0, 3.0], [0.1] * 3), ([0.0] * 3, [0.0, 1.0, 2.0]), ([1.0, math.nan, 2.0], [1.0, 2.0, 3.0])]
    cases.append(([1.0, 2.0, 3.0], [1.0, math.inf, 2.0]))
    labels = np.round(rng.random(size) * 5, 1)
    for noise, scale in ((0.0, 1.0), (0.5, 1.0), (5.0, 1.0), (0.5, 1e150), (0.5, 1e-150), (0.5, -1.0)):
        cases.append((labels.tolist(), ((labels + noise * rng.standard_normal(size)) * scale).tolist()))
    cases.append((np.round(labels).tolist(), np.round(labels + rng.standard_normal(size)).tolist()))  # many ties
    return cases


def tag_cases(seed: int, size: int = 8) -> list[tuple[list[list[str]], list[list[str]]]]:
    """Returns true and predicted tags: none, no entity, malformed, of several schemes."""
    rng = np.random.default_rng(seed)
    cases: list = [([["O", "O"]], [["O", "O"]]), ([["B-PER", "O"]], [["O", "O"]]), ([["O", "O"]], [["I-PER", "O"]])]
    cases.append(([["B-PER", "I-PER", "O", "B-LOC"]], [["I-PER", "I-PER", "O", "I-LOC"]]))
    cases.append(([["I-PER", "B-PER", "I-LOC"]], [["B-PER", "I-LOC", "I-LOC"]]))
    cases.append(([["B-PER", "E-PER", "S-LOC"]], [["B-PER", "I-PER", "E-LOC"]]))
    for tags in (TAGS, BIOES, TAGS, BIOES):
        lengths = rng.integers(1, 9, size)
        truth = [[str(tag) for tag in rng.choice(tags, length)] for length in lengths]
        said = [[tag if rng.random() < 0.6 else str(rng.choice(tags)) for tag in sentence] for sentence in truth]
        cases.append((truth, said))
    return cases


def finite(function, *arguments, **options) -> float:
    """Returns what a metric gives, and 0.0 where it is nan, or the function refuses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = float(function(*arguments, **options))
        except ValueError:
            return 0.0
    return value if math.isfinite(value) else 0.0


def class_metrics(labels: list[int], said: list[int]) -> dict[str, float]:
    """Returns scikit-learn's metrics."""
    from sklearn import metrics

    found = {
        "accuracy": finite(metrics.accuracy_score, labels, said),
        "macro_f1": finite(metrics.f1_score, labels, said, average="macro", zero_division=0),
        "mcc": finite(metrics.matthews_corrcoef, labels, said),
    }
    if max([*labels, *said], default=0) < 2:
        found["f1"] = finite(metrics.f1_score, labels, said, zero_division=0)
    return found


def number_metrics(labels: list[float], said: list[float]) -> dict[str, float]:
    """Returns scipy's correlations."""
    from scipy import stats

    return {
        "pearson": finite(lambda: stats.pearsonr(labels, said).statistic),
        "spearman": finite(lambda: stats.spearmanr(labels, said).statistic),
    }


def tag_metrics(truth: list[list[str]], said: list[list[str]]) -> dict[str, float]:
    """Returns seqeval's figures over all types, and the F1 of each."""
    from seqeval.metrics import classification_report, f1_score, precision_score, recall_score

    found = {"f1": f1_score, "precision": precision_score, "recall": recall_score}
    metrics = {name: finite(function, truth, said) for name, function in found.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            report = classification_report(truth, said, output_dict=True)
        except ValueError:  # seqeval makes no report without an entity
            report = {}
    kinds = {kind: figures for kind, figures in report.items() if not kind.endswith(" avg")}
    return metrics | {f"f1_{kind}": float(figures["f1-score"]) for kind, figures in kinds.items()}


GROUPS = {
    "classes": (class_cases, class_metrics),
    "numbers": (number_cases, number_metrics),
    "tags": (tag_cases, tag_metrics),
}


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True)
    packages = ("scikit-learn", "scipy", "seqeval", "numpy")
    golden: dict = {"made_with": ", ".join(f"{name} {metadata.version(name)}" for name in packages)}
    for name, (cases, metrics) in GROUPS.items():
        golden[name] = [[first, second, metrics(first, second)] for first, second in cases(seed=7)]
    path = Path(parser.parse_args().output) / "scores.json"
    path.write_text(json.dumps(golden, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
