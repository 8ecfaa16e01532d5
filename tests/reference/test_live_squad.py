# SPDX-License-Identifier: Apache-2.0
"""Google's run_squad.py and ours on the real dev sets: windows, labels, and answers of random and of good logits.

BERT_REFERENCE is a folder with run_squad.py and tokenization.py of google-research/bert; BERT_JAX_DATA has the data.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from bert_jax import load_tokenizer
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks.squad.decode import decode_spans
from bert_jax.tasks.squad.read import read_squad_file
from bert_jax.tasks.squad.score import normalize_answer
from bert_jax.tasks.squad.windows import make_squad_rows
from tests.reference.make_squad_golden import (
    Settings,
    alignment_failures,
    import_reference,
    make_logits,
    reference_features,
    reference_predictions,
)

FOLDER = os.environ.get("BERT_REFERENCE", "")

pytestmark = [
    pytest.mark.reference,
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="BERT_REFERENCE names no folder with Google's run_squad.py"),
]

# Of how many articles; "" is all.
ARTICLES = os.environ.get("BERT_REFERENCE_ARTICLES", ":4")


def with_one_answer(source: Path, target: Path) -> Path:
    """Writes some articles without second answers, which the reference refuses to learn from. Returns `target`."""
    content = json.loads(source.read_text())
    start, _, stop = ARTICLES.partition(":")
    content["data"] = content["data"][int(start or 0) : int(stop or len(content["data"]))]
    for paragraph in (paragraph for article in content["data"] for paragraph in article["paragraphs"]):
        for question in paragraph["qas"]:
            question["answers"] = question["answers"][:1]
    target.write_text(json.dumps(content))
    return target


@pytest.mark.parametrize("casing", ["uncased", "cased"])
@pytest.mark.parametrize("name", ["squad1", "squad2"])
@pytest.mark.parametrize("max_seq_length", [384, 128])
def test_windows_labels_and_answers(shared_data, tmp_path, name, casing, max_seq_length):
    reference, lower = import_reference(FOLDER), casing == "uncased"
    vocab = shared_data / "vocab" / f"bert-base-{casing}-vocab.txt"
    data = with_one_answer(
        shared_data / "squad" / f"dev-v{name[-1]}.{'10'[name == 'squad2']}.json", tmp_path / "d.json"
    )
    stride = max_seq_length // 3
    settings = Settings(max_seq_length, stride, 24, no_answers=name == "squad2")
    config = TaskConfig(name=name, max_seq_length=max_seq_length, doc_stride=stride, max_query_length=24)
    tokenizer = load_tokenizer(vocab)
    examples = read_squad_file(str(data))
    ours = make_squad_rows(examples, tokenizer, True, config)
    evaluated = make_squad_rows(examples, tokenizer, False, config).rows

    # Labels.
    read, theirs = reference_features(reference, data, vocab, lower, settings, True)
    learnt = {example.qas_id for example in read}
    labels = {(read[each.example_index].qas_id, each.doc_span_index): each for each in theirs}
    same_labels, covered, windows, seen = 0, 0, 0, {}
    for row in ours.rows:
        id = examples[row.example].id
        seen[id] = seen.get(id, -1) + 1
        if id not in learnt:
            continue
        label = labels[id, seen[id]].start_position, labels[id, seen[id]].end_position
        windows += 1
        same_labels += label == row.label
        covered += label[0] <= row.label[0] and row.label[1] <= label[1]
        if label != row.label and windows - same_labels <= 10:
            tokens = tokenizer.tokens(row.token_ids)
            spans = [tokens[first : last + 1] for first, last in (label, row.label)]
            print(examples[row.example].answers[0].text, "| theirs", *spans[0], "| ours", *spans[1])
    print(f"\n{name} {casing} {max_seq_length}: {len(examples)} questions, {ours.counts}")
    print(f"labels: {windows} windows, {windows - same_labels} other, {windows - covered} of these not inside theirs")
    skipped = {example.id for example in examples} - {examples[row.example].id for row in ours.rows}
    print(f"skipped: theirs {len(examples) - len(learnt)}, ours {len(skipped)}")

    # Windows.
    read, theirs = reference_features(reference, data, vocab, lower, settings, False)
    assert len(evaluated) == len(theirs)
    for row, feature in zip(evaluated, theirs):
        assert row.example == feature.example_index
        assert row.token_ids.tolist() == feature.input_ids[: len(feature.tokens)]
        assert row.type_ids.tolist() == feature.segment_ids[: len(feature.tokens)]
        assert row.detail.is_max_context.tolist() == list(feature.token_is_max_context.values())

    # Answers.
    peaks = iter_labels(ours.rows, evaluated, examples)
    for kind in ("random", "good"):
        logits = [
            make_logits(number, len(row.token_ids), peak if kind == "good" else None)
            for number, (row, peak) in enumerate(zip(evaluated, peaks))
        ]
        unaligned = alignment_failures(reference)
        texts, n_best, odds = reference_predictions(reference, read, theirs, logits, settings, lower)
        predictions = decode_spans(examples, evaluated, logits, config)
        pairs = [(each.text, texts[each.id]) for each in predictions]
        aligned = [pair for pair in pairs if pair[1] not in unaligned and pair[1] != "empty"]
        equal = [normalize_answer(mine) == normalize_answer(other) for mine, other in aligned]
        same = sum(" ".join(mine.split()) == other for mine, other in pairs)
        print(
            f"{kind}: {len(pairs)} answers, {same} the same, {len(pairs) - len(aligned)} not aligned by the reference"
        )
        print("  other:", [pair for pair, good in zip(aligned, equal) if not good][:8])
        print("  not aligned:", [pair for pair in pairs if pair[1] in unaligned and pair[0] != pair[1]][:8])
        assert np.mean(equal) >= 0.999
        for each in predictions:
            if each.null_odds is not None and each.found:
                np.testing.assert_allclose(each.null_odds, odds[each.id], atol=1e-6)
            best = n_best[each.id][0]
            if each.n_best:
                assert each.n_best[0].score == best["start_logit"] + best["end_logit"]


def iter_labels(training, evaluated, examples):
    """Returns for each window the label that it has in training; None if its question is not learnt from."""
    labels = {}
    for row in training:
        labels.setdefault(row.example, []).append(row.label)
    counts: dict[int, int] = {}
    peaks = []
    for row in evaluated:
        place = counts[row.example] = counts.get(row.example, -1) + 1
        peaks.append(labels[row.example][place] if row.example in labels else None)
    return peaks
