# SPDX-License-Identifier: Apache-2.0
"""Vocabularies are read with care and learnt the same way every time."""

import collections
import itertools
import random

import pytest
from builders import message

from bert_jax import InputError
from bert_jax.text.normalize import Normalizer
from bert_jax.text.vocab import SPECIAL_TOKENS, WordCounts, learn_vocab, parse_vocab, reserved_tokens, vocab_bytes

NORMALIZER = Normalizer(lowercase=True)


def random_counts(seed: int) -> dict[str, int]:
    generator = random.Random(seed)
    words = ["".join(generator.choices("abcé", k=generator.randint(1, 8))) for _ in range(300)]
    return {word: generator.randint(1, 9) for word in sorted(set(words))}


def learn_slowly(counts: dict[str, int], vocab: list[str], size: int) -> list[str]:
    """Learns like `learn_vocab`, but counts all pairs anew each time."""
    vocab = list(vocab)
    words = [([word[0], *("##" + char for char in word[1:])], count) for word, count in counts.items()]
    while len(vocab) < size:
        pairs: collections.Counter[tuple[str, str]] = collections.Counter()
        for word, count in words:
            for pair in itertools.pairwise(word):
                pairs[pair] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], *map(vocab.index, pair)))
        token = best[0] + best[1].removeprefix("##")
        if token not in vocab:
            vocab.append(token)
        for word, _ in words:
            for position in range(len(word) - 1):
                if tuple(word[position : position + 2]) == best:
                    word[position : position + 2] = [token]
    return vocab


@pytest.mark.parametrize("seed", range(3))
def test_learning_agrees_with_counting_anew(seed):
    counts = random_counts(seed)
    learnt = learn_vocab(counts, NORMALIZER, 150)
    assert learnt.vocab == learn_slowly(counts, [*SPECIAL_TOKENS, *"abcé", "##a", "##b", "##c", "##é"], 150)
    assert len(set(learnt.vocab)) == 150
    assert learnt.num_words == sum(counts.values())


def test_frequent_pieces_come_first():
    learnt = learn_vocab({"low": 5, "lower": 2, "newest": 6, "widest": 3}, NORMALIZER, 29)
    assert learnt.vocab[-4:] == ["##es", "##est", "lo", "low"]  # 9, 9, 7 and 7 times


def test_characters_that_stand_alone_get_no_inner_form():
    vocab = learn_vocab({"ab": 3, "!": 2, "北": 2}, NORMALIZER, 11).vocab
    assert vocab == [*SPECIAL_TOKENS, "!", "a", "b", "北", "##a", "##b"]


def test_rare_characters_are_unknown():
    learnt = learn_vocab({"aab": 3, "aqb": 1, "x" * 201: 2, "aa": 5}, NORMALIZER, 11, alphabet_size=3)
    assert "q" not in learnt.vocab
    assert (learnt.num_words, learnt.unknown_words, learnt.num_characters) == (11, 3, 3 * 3 + 5 * 2)


def test_layout_is_that_of_the_released_vocabularies(shared_data):
    released = parse_vocab((shared_data / "vocab" / "bert-base-uncased-vocab.txt").read_bytes(), "")
    assert reserved_tokens(994) == released[:999]


def test_a_vocabulary_too_small_for_the_characters_is_refused():
    with pytest.raises(InputError, match=r"vocab_size 10 is too small .* use --vocab_size=13"):
        learn_vocab(random_counts(0), NORMALIZER, 10)
    assert len(learn_vocab(random_counts(0), NORMALIZER, 13).vocab) == 13


def test_a_vocabulary_too_large_for_the_text_is_refused():
    assert "use --vocab_size=12 or less" in message(learn_vocab, {"ab": 2, "ac": 1}, NORMALIZER, 50)
    assert learn_vocab({"ab": 2, "ac": 1}, NORMALIZER, 12).vocab[-1] == "ab"
    assert "no words" in message(learn_vocab, {}, NORMALIZER, 50)


def test_counting_forgets_the_rarest_words_when_full():
    counts = WordCounts(NORMALIZER, max_words=100)
    for number in range(5000):
        counts.add(f"Often word{number}")
    found = counts.result()
    assert len(found) <= 101 and found["often"] == 5000 and list(found) == sorted(found)


def test_parse_vocab_is_the_inverse_of_vocab_bytes():
    vocab = [*SPECIAL_TOKENS, "a", "", "é", "##북", "a"]
    assert parse_vocab(vocab_bytes(vocab), "vocab.txt") == vocab


@pytest.mark.parametrize("content", [b"", b"\n\n", b" \n"])
def test_an_empty_vocabulary_is_refused(content):
    assert "vocab.txt is empty" in message(parse_vocab, content, "vocab.txt")


def test_a_vocabulary_in_another_encoding_is_refused():
    assert "vocab.txt, line 3" in message(parse_vocab, "[PAD]\n[UNK]\ncafé\n".encode("latin-1"), "vocab.txt")
