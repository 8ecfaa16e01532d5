# SPDX-License-Identifier: Apache-2.0
"""Questions in the twelve languages of XQuAD: gold spans come back in every script."""

import numpy as np
import pytest

from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks.squad.read import read_squad
from bert_jax.tasks.squad.task import SquadTask
from bert_jax.text.normalize import Normalizer
from bert_jax.text.sentencepieces import learn_sentencepieces
from bert_jax.text.tokenizer import Tokenizer, wordpiece_tokenizer
from bert_jax.text.vocab import WordCounts, learn_vocab

LANGUAGES = "ar de el en es hi ro ru th tr vi zh".split()


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
