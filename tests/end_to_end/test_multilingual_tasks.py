# SPDX-License-Identifier: Apache-2.0
"""Tasks in other scripts and languages: questions in the twelve of XQuAD, names in German."""

import dataclasses
import functools
import gzip
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from builders import tiny_model, topics_run

import bert_jax
from bert_jax.checkpoints.pretrained import Pretrained, save_pretrained
from bert_jax.finetuning import finetune
from bert_jax.model.objective import init_params
from bert_jax.settings.finetuning import FinetuneDataConfig, FinetuneTrainConfig, TaskConfig
from bert_jax.settings.pretraining import OptimizerConfig
from bert_jax.tasks.squad.read import read_squad
from bert_jax.tasks.squad.score import score_files
from bert_jax.tasks.squad.task import SquadTask
from bert_jax.tasks.tagging import entities, read_conll
from bert_jax.tasks.tagging import score_files as score_tags
from bert_jax.text.normalize import Normalizer
from bert_jax.text.sentencepieces import learn_sentencepieces
from bert_jax.text.tokenizer import Tokenizer, wordpiece_tokenizer
from bert_jax.text.vocab import WordCounts, learn_vocab

LANGUAGES = "ar de el en es hi ro ru th tr vi zh".split()
WITHOUT_BLANKS = ("th", "zh")


def learn_wordpiece(lines, vocab_size: int) -> Tokenizer:
    """Returns a cased tokenizer that knows the 1,000 commonest characters of the lines."""
    normalizer = Normalizer(lowercase=False)
    words = WordCounts(normalizer)
    for line in lines:
        words.add(line)
    learnt = learn_vocab(words.result(), normalizer, vocab_size, alphabet_size=min(1000, vocab_size))
    return wordpiece_tokenizer(learnt.vocab, False, normalizer.strip_accents)


def learn_unigram(lines, vocab_size: int) -> Tokenizer:
    """Returns a cased SentencePiece tokenizer that knows every character of the lines."""
    return Tokenizer(learn_sentencepieces(lines, vocab_size, "unigram", lowercase=False, character_coverage=1.0))


def text_of(examples) -> list[str]:
    return [*dict.fromkeys(example.context for example in examples), *(example.question for example in examples)]


def make_start(directory: Path, tokenizer: Tokenizer, **changes) -> Path:
    """Returns a directory with an untrained model for the tokenizer."""
    model = tiny_model(vocab_size=tokenizer.vocab_size, initializer_stddev=0.08, **changes)
    params = jax.jit(functools.partial(init_params, model))(jax.random.key(0))
    save_pretrained(Pretrained(model, params, tokenizer), directory)
    return directory


# Answers, of 970, that begin or end inside a token of WordPiece.
CUT_SHORT = {"ar": 5, "de": 1, "en": 1, "hi": 2, "tr": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("language", "learn"),
    [*((language, learn_wordpiece) for language in LANGUAGES), ("vi", learn_unigram), ("zh", learn_unigram)],
)
def test_gold_spans_come_back_in_every_script(shared_data, language, learn):
    examples = read_squad(str(shared_data / "xquad" / f"xquad.{language}.json.gz"), "dev", "1.1")
    assert len(examples) == 970
    for example in examples:
        (answer,) = example.answers
        assert example.context.startswith(answer.text, answer.start)  # code points, not bytes
    tokenizer = learn(text_of(examples), (1400 if language == "zh" else 2500) if learn is learn_wordpiece else 3000)
    task = SquadTask(TaskConfig(name="squad1", max_seq_length=384, max_answer_length=400, num_best=5))
    made = task.make_rows(examples, tokenizer, True)
    assert not [reason for reason in made.counts if reason.startswith("skipped")]
    assert {row.example for row in made.rows} == set(range(970))  # windows, of some questions several
    assert max(len(row.token_ids) for row in made.rows) == 384 and len(made.rows) > 1000
    outputs = []
    for row in made.rows:
        outputs.append(np.zeros((len(row.token_ids), 2), np.float32))
        if row.label != (0, 0):  # the answer is in this window
            outputs[-1][row.label[0], 0] = outputs[-1][row.label[1], 1] = 10
    predictions = task.decode(examples, made.rows, outputs)

    # A token may reach over the end of an answer: "(118" of the answer "118". Such an answer comes back with it.
    num_equal = num_apart = num_right = 0
    for example, prediction in zip(examples, predictions, strict=True):
        text = example.answers[0].text
        start = example.answers[0].start + len(text) - len(text.lstrip())
        end = start + len(text.strip())
        _, offsets = tokenizer.encode_with_offsets(example.context)
        touched = offsets[(offsets[:, 1] > start) & (offsets[:, 0] < end)]
        wider = (int(touched[0, 0]), int(touched[-1, 1]))
        assert prediction.text == example.context[prediction.start : prediction.end]
        num_equal += prediction.text == text.strip()
        num_apart += wider == (start, end)
        num_right += (prediction.start, prediction.end) == wider
    assert num_right >= 0.999 * len(examples)
    assert num_equal >= num_apart  # every answer that tokens can say
    # The rest begin or end inside a token. WordPiece parts words at punctuation, so only writing without blanks has
    # many such, and words cut short a few: as many as were counted, and no more.
    if learn is learn_wordpiece and language not in WITHOUT_BLANKS:
        floor = 1 - CUT_SHORT.get(language, 0) / len(examples)
    else:
        floor = 924 / 970 if language == "vi" else 0.96  # vi: as counted
    assert num_equal >= round(floor * len(examples), 6)


@pytest.mark.slow
def test_questions_are_learnt_and_scored_end_to_end(shared_data, tmp_path):
    path = str(shared_data / "xquad" / "xquad.zh.json.gz")
    examples = read_squad(path, "dev", "1.1")
    tokenizer = learn_unigram(text_of(examples), 3000)
    start = make_start(tmp_path / "start", tokenizer, max_positions=256)
    config = topics_run(
        tmp_path,
        start,
        task=TaskConfig(name="squad1", max_seq_length=256, doc_stride=96, max_query_length=48),
        data=FinetuneDataConfig(source=f"train={path}[:4],dev={path}[4:6]", batch_size=16),
        train=FinetuneTrainConfig(num_epochs=2.0),
    )
    result = finetune(config, tmp_path / "run", jax.devices()[:1])
    assert result.metric == "f1" and 0 <= result.metrics["exact_match"] <= result.metrics["f1"] <= 100
    assert result.metrics["f1"] > 0 and "num_without_span" not in result.metrics
    written = tmp_path / "run" / "predictions" / "predictions.json"
    scores, missing = score_files("squad1", f"{path}[4:6]", str(written))
    assert not missing and scores["f1"] == pytest.approx(result.metrics["f1"])
    dev = read_squad(f"{path}[4:6]", "dev", "1.1")
    said = json.loads(written.read_text(encoding="utf-8"))
    assert list(said) == [example.id for example in dev]
    assert all(said[example.id] in example.context for example in dev)
    predictor = bert_jax.load_predictor(tmp_path / "run")
    for example, answer in zip(dev[:5], predictor([(each.question, each.context) for each in dev[:5]])):
        assert answer.text == example.context[answer.start : answer.end] == said[example.id]


GERMAN = "Käthe Müller-Lüdenscheidt fuhr 1998 von Köln über Österreich nach São Paulo; die „Grüßgöttin“ blieb zurück."


@pytest.mark.slow
def test_names_in_german_are_learnt_and_found_in_raw_text(shared_data, tmp_path):
    folder = shared_data / "wikiann_de"
    for split, count in (("train", 3000), ("dev", 500)):
        with gzip.open(folder / f"{split}.conll.gz", "rt", encoding="utf-8") as stream:
            sentences = stream.read().split("\n\n")[:count]
        (tmp_path / f"{split}.conll").write_text("\n\n".join(sentences) + "\n", encoding="utf-8")
    read = read_conll(str(tmp_path / "train.conll"))
    assert len(read) == 3000 and not any(word.startswith("de:") for each in read for word in each.words)
    tokenizer = learn_wordpiece([" ".join(each.words) for each in read], 4000)
    start = make_start(tmp_path / "start", tokenizer, hidden_size=64, intermediate_size=128)
    config = topics_run(
        tmp_path,
        start,
        task=TaskConfig(name="ner", max_seq_length=48),
        data=FinetuneDataConfig(source=str(tmp_path), batch_size=32),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=0, warmup_rate=0.1, bias_correction=True),
        train=FinetuneTrainConfig(num_epochs=3.0),
    )
    config = dataclasses.replace(config, report=dataclasses.replace(config.report, every_steps=50))
    result = finetune(config, tmp_path / "run", jax.devices()[:1])
    assert {"f1", "precision", "recall", "f1_PER", "f1_LOC", "f1_ORG"} <= set(result.metrics)
    print({name: round(value, 3) for name, value in result.metrics.items()})
    assert result.metrics["f1"] > 0.3 > result.constant["f1"]
    scores = score_tags(str(tmp_path / "dev.conll"), str(tmp_path / "run" / "predictions" / "dev.conll"))
    assert scores["f1"] == pytest.approx(result.metrics["f1"])

    predictor = bert_jax.load_predictor(tmp_path / "run")
    texts = [GERMAN, *(" ".join(each.words) for each in read_conll(str(tmp_path / "dev.conll"))[:100])]
    predictions = predictor(texts)
    assert sum(len(each.entities) for each in predictions) > 50
    for text, tagged in zip(texts, predictions):
        assert "".join(tagged.words) == "".join(text.split())  # no letter is lost, ß and umlauts stay
        assert len(tagged.tags) == len(tagged.words)
        assert [each.type for each in tagged.entities] == [each.type for each in entities(tagged.tags)]
        for entity, span in zip(tagged.entities, entities(tagged.tags)):
            assert text[entity.start : entity.end] == entity.text
            assert "".join(entity.text.split()) == "".join(tagged.words[span.start : span.end])
