# SPDX-License-Identifier: Apache-2.0
"""Documents to training instances to rows: which spans of text become sentence A and sentence B.

Source: create_pretraining_data.py of google-research/bert (nsp) and google-research/albert (sop). Random numbers
are drawn in the same order from the same kind of generator, so that with masking left out (it happens during
training, see `masking`) the instances are the references' own, one by one, as tests/data/test_instances.py shows.

A sentence is a span of one flat array of token ids, a document the list of the positions where its sentences
start and the last one ends, an instance the bounds of its two spans. No token is touched before `make_rows`.
"""

import random
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import numpy as np

from bert_jax.data.records import NO_LABEL, pack_word_starts
from bert_jax.text.tokenizer import Tokenizer

Document = list[int]  # positions in the flat array: each sentence's start, then the end of the last

INSTANCE = np.dtype(
    [
        (name, "<i8")
        for name in ("first_start", "first_stop", "second_start", "second_stop", "label")
    ]
)
IS_NEXT, IS_RANDOM = 0, 1  # with sop: in order, and swapped


def create_instances(
    documents: Iterable[Document],
    max_seq_length: int,
    short_seq_rate: float,
    duplicates: int,
    rng: random.Random,
    next_sentence: str = "nsp",
    separators: int = 1,
) -> np.ndarray:
    """Returns the shuffled instances of `duplicates` passes over the documents, as records of `INSTANCE`.

    Every pass cuts the documents anew. With [CLS] and [SEP]s, an instance fits in `max_seq_length`; `separators` is
    the number of [SEP] between A and B. Documents and sentences must not be empty. `next_sentence` is the task of the
    pair of sentences:

      nsp: whether B follows A, or is of another document.
      sop: whether B follows A, or A follows B. A chunk of one sentence has no order: a random sentence of another
        document follows, with label 1, as in the reference.
      none: no pair, no label: one span of whole sentences, B is empty, and no text is lost.
    """
    documents = list(documents)
    rng.shuffle(documents)
    bounds = array("q")
    for _ in range(duplicates):
        for index in range(len(documents)):
            if next_sentence == "none":
                _add_spans(bounds, documents[index], max_seq_length - 2, short_seq_rate, rng)
            else:
                _add_pairs(
                    bounds,
                    documents,
                    index,
                    max_seq_length - 2 - separators,
                    short_seq_rate,
                    rng,
                    next_sentence,
                )
    instances = np.frombuffer(bounds, dtype=INSTANCE)
    order = list(range(len(instances)))
    # the reference shuffles its list of instances; the same draws, of numbers, give the same order
    rng.shuffle(order)
    return instances[order]


def _add_pairs(
    bounds: array,
    documents: list[Document],
    index: int,
    max_num_tokens: int,
    short_seq_rate: float,
    rng: random.Random,
    next_sentence: str,
) -> None:
    """Appends the instances of one document to `bounds`, five numbers each.

    The reference differs from what the paper suggests, and this follows the reference: the target length is drawn once
    per document, and is not a limit; a chunk of a single sentence is always followed by a random one, so more than
    half of the instances are random; at least one whole sentence B is taken even if A has reached the target length.
    """
    document = documents[index]
    num_sentences = len(document) - 1
    target_length = max_num_tokens
    if rng.random() < short_seq_rate:
        target_length = _draw(2, max_num_tokens, rng)
    begin = 0
    while begin < num_sentences:
        # The chunk: as many sentences as reach the target, or all that are left.
        end = bisect_left(document, document[begin] + target_length, begin + 1, num_sentences)
        middle = begin + 1
        if end - begin >= 2:
            middle = begin + _draw(1, end - begin - 1, rng)
        first_start = document[begin]
        first_stop = document[middle]
        if end - begin == 1 or (next_sentence == "nsp" and rng.random() < 0.5):
            label = IS_RANDOM
            other = _other_document(documents, index, rng)
            start = _draw(0, len(other) - 2, rng)
            wanted = target_length - (first_stop - first_start)
            stop = bisect_left(other, other[start] + wanted, start + 1, len(other) - 1)
            second_start = other[start]
            second_stop = other[stop]
            begin = middle  # the sentences that a random B replaced are used again, not lost
        elif next_sentence == "sop" and rng.random() < 0.5:
            label = IS_RANDOM
            second_start = first_start
            second_stop = first_stop
            first_start = document[middle]
            first_stop = document[end]
            begin = end
        else:
            label = IS_NEXT
            second_start = document[middle]
            second_stop = document[end]
            begin = end

        # Too long a pair loses tokens of its longer side (B on a tie), at either end by chance.
        first_length = first_stop - first_start
        second_length = second_stop - second_start
        for _ in range(first_length + second_length - max_num_tokens):
            from_front = rng.random() < 0.5
            if first_length > second_length:
                first_length -= 1
                first_start += from_front
            else:
                second_length -= 1
                second_start += from_front
        bounds.extend(
            (
                first_start,
                first_start + first_length,
                second_start,
                second_start + second_length,
                label,
            )
        )


def _draw(first: int, last: int, rng: random.Random) -> int:
    """Returns the same number as `rng.randint(first, last)`, with fewer calls."""
    count = last - first + 1
    bits = count.bit_length()
    number = rng.getrandbits(bits)
    while number >= count:
        number = rng.getrandbits(bits)
    return first + number


def _add_spans(
    bounds: array,
    document: Document,
    max_num_tokens: int,
    short_seq_rate: float,
    rng: random.Random,
) -> None:
    """Appends a document as spans of as many whole sentences as fit; a longer sentence is cut, none is dropped."""
    length = max_num_tokens
    if rng.random() < short_seq_rate:
        length = _draw(2, max_num_tokens, rng)
    start = document[0]
    while start < document[-1]:
        # The last end of a sentence within reach, or else as much of the sentence as fits.
        stop = document[bisect_right(document, start + length) - 1]
        if stop <= start:
            stop = start + length
        bounds.extend((start, stop, stop, stop, NO_LABEL))
        start = stop


def _other_document(documents: list[Document], index: int, rng: random.Random) -> Document:
    """Returns a random document, in all likelihood not number `index`.

    After ten draws of `index` itself it is taken, and its text still counts as random, as in the reference
    (others count it as the next sentence). With two documents that is once in a thousand.
    """
    other = index
    for _ in range(10):
        other = _draw(0, len(documents) - 1, rng)
        if other != index:
            break
    return documents[other]


def sequence_lengths(made: np.ndarray, separators: int = 1) -> np.ndarray:
    """Returns the lengths in tokens, int64 [n], of the sequences of instances, with [CLS] and [SEP]s."""
    first, second = (made[f"{side}_stop"] - made[f"{side}_start"] for side in ("first", "second"))
    return 2 + first + second + separators * (second > 0)


def count_dropped(made: np.ndarray, num_tokens: int) -> int:
    """Returns the number of flat tokens in no instance: sentences and pairs that are too long are cut."""
    starts, stops = (
        np.concatenate([made[f"{side}_{end}"] for side in ("first", "second")])
        for end in ("start", "stop")
    )
    order = np.argsort(starts)
    starts, stops = starts[order], stops[order]
    before = np.append(0, np.maximum.accumulate(stops))[:-1]  # the end of the earlier spans
    return num_tokens - int(np.maximum(stops - np.maximum(starts, before), 0).sum())


def make_rows(
    made: np.ndarray, numbers: np.ndarray, tokens: np.ndarray, tokenizer: Tokenizer, dtype: np.dtype
) -> np.ndarray:
    """Returns rows [n] (records of `dtype`) of one sequence each: [CLS] A [SEP] B [SEP], then [PAD].

    Without a B it is [CLS] A [SEP]. `made` [n] are instances in the flat ids `tokens`, and `numbers` [n] the
    numbers of their sequences.
    """
    rows = np.zeros(len(made), dtype)
    row_length = dtype["token_ids"].shape[0]
    positions = np.arange(row_length)
    # where the [SEP] after A stands
    middle = (made["first_stop"] - made["first_start"] + 1)[:, None]
    second_length = (made["second_stop"] - made["second_start"])[:, None]
    begin = middle + len(tokenizer.between)  # where B does
    last = np.where(second_length, begin + second_length, middle)  # where the last [SEP] stands
    in_first = made["first_start"][:, None] + positions - 1
    in_second = made["second_start"][:, None] + positions - begin
    # Clipped, so that what is outside of a sequence can be read; the lines below overwrite it, the
    # later ones what the earlier wrote.
    ids = tokens[np.where(positions < middle, in_first, in_second).clip(0, len(tokens) - 1)]
    ids[:, 0] = tokenizer.cls_id
    ids[(positions >= middle) & (positions < begin) | (positions == last)] = tokenizer.sep_id
    ids[positions > last] = tokenizer.pad_id
    rows["token_ids"] = ids
    rows["word_starts"] = pack_word_starts(tokenizer.word_starts[ids] & (positions <= last))
    rows["lengths"] = last + 1
    rows["first_lengths"] = (
        np.minimum(begin, last + 1) if tokenizer.template.second_type else last + 1
    )
    rows["labels"][:, 0] = made["label"]
    rows["numbers"][:, 0] = numbers
    return rows
