# SPDX-License-Identifier: Apache-2.0
"""Makes rows of questions: [CLS] question [SEP] window of the context [SEP], labelled with the positions of answers.

Source: google-research/bert run_squad.py, read_squad_examples and convert_examples_to_features. Answers are located
by character positions, not by words between blanks, so the result does not depend on the script. See
docs/differences.md.
"""

import collections
import re
from collections.abc import Iterator, Sequence

import numpy as np

from bert_jax.batch import Row
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks.base import CUT_QUESTIONS, Rows, single_row, without_zeros
from bert_jax.tasks.squad.decode import Window
from bert_jax.tasks.squad.read import SquadExample
from bert_jax.text.tokenizer import Tokenizer


def make_squad_rows(
    examples: Sequence[SquadExample],
    tokenizer: Tokenizer,
    training: bool,
    config: TaskConfig,
) -> Rows:
    """Returns a row for each window of each example's context, with a `Window` as its detail.

    Labels: in training the positions of the answer's first and last token in the row; (0, 0), that is [CLS], in a
    window that does not hold all of it, and where there is no answer (squad2). In evaluation None.
    Contexts without tokens are skipped and counted and, in training, so are questions without an answer (except in
    squad2) and questions whose answer is not in the context.
    """
    counts: collections.Counter[str] = collections.Counter()
    rows: list[Row] = []
    context: str | None = None
    context_ids = []
    offsets = np.zeros((0, 2), np.int32)
    for index, example in enumerate(examples):
        if example.context != context:  # questions about one paragraph follow each other
            context = example.context
            context_ids, offsets = tokenizer.encode_with_offsets(context)
        if not len(context_ids):
            counts["skipped: context without tokens"] += 1
            continue
        answer = _answer_tokens(example, offsets, config.name, counts) if training else None
        if training and answer is None:
            continue
        question = tokenizer.encode(example.question)
        counts["questions without tokens"] += not question
        counts[CUT_QUESTIONS] += len(question) > config.max_query_length
        head = [tokenizer.cls_id, *question[: config.max_query_length], *tokenizer.between]
        num_rows = len(rows)
        room = config.max_seq_length - len(head) - 1
        for start, end, is_max_context in _windows(len(context_ids), room, config):
            token_ids = np.array([*head, *context_ids[start:end], tokenizer.sep_id], np.int32)
            type_ids = np.full(len(token_ids), tokenizer.template.second_type, np.uint8)
            type_ids[: len(head)] = 0
            label = None
            if answer is not None:
                first, last = answer
                inside = start <= first and last < end
                label = (first - start + len(head), last - start + len(head)) if inside else (0, 0)
                counts["windows without the answer"] += not inside and first >= 0
            detail = Window(
                first=len(head),
                offsets=offsets[start:end],
                is_max_context=is_max_context,
            )
            rows.append(single_row(index, token_ids, label, detail, type_ids))
        counts["questions of several windows"] += len(rows) > num_rows + 1
    return Rows(rows, without_zeros(counts))


def _windows(
    num_tokens: int, room: int, config: TaskConfig
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yields start and end of each window, and for each of its tokens whether this is the window with its most context.

    A token in several windows belongs to the one where the smaller side of its context is largest; a longer window
    is a little better, and a tie goes to the earlier.
    """
    step = min(room, config.doc_stride)
    starts = range(0, step * max(0, -(-(num_tokens - room) // step)) + 1, step)
    # Window by window, so that a long context takes memory for its tokens, not for every token in every window.
    owners = np.zeros(num_tokens, np.int64)
    highest = np.full(num_tokens, -np.inf)
    for number, start in enumerate(starts):
        positions = np.arange(min(room, num_tokens - start))
        context = slice(start, start + len(positions))
        scores = np.minimum(positions, positions[::-1]) + 0.01 * len(positions)
        better = scores > highest[context]  # so the first of equals stays
        owners[context][better] = number
        highest[context][better] = scores[better]
    for number, start in enumerate(starts):
        end = min(start + room, num_tokens)
        yield start, end, owners[start:end] == number


def _answer_tokens(
    example: SquadExample,
    offsets: np.ndarray,
    name: str,
    counts: collections.Counter[str],
) -> tuple[int, int] | None:
    """Returns the first and last token of the answer, (-1, -1) without an answer; None, with a count, to skip it."""
    if example.impossible and name == "squad2":
        return -1, -1
    span = find_answer(example) if example.answers and not example.impossible else None
    inside = np.zeros(0, np.int64)
    if span:
        inside = np.flatnonzero((offsets[:, 1] > span[0]) & (offsets[:, 0] < span[1]))
        counts["answers found elsewhere than given"] += span[0] != example.answers[0].start
    counts["questions of several answers, the first taken"] += len(example.answers) > 1
    if len(inside):
        return int(inside[0]), int(inside[-1])
    reason = "answer without tokens" if span else "answer not in the context"
    if example.impossible or not example.answers:
        learns = " (task squad2 learns from these)" if example.impossible else ""
        reason = f"no answer{learns}"
    counts[f"skipped: {reason}"] += 1
    return None


def find_answer(example: SquadExample) -> tuple[int, int] | None:
    """Returns the start and end of the first answer in the context; None if it is missing or ambiguous.

    It is at the annotated position, or else at its only occurrence. All blanks compare equal.
    """
    text, start = example.answers[0]
    words = text.split()
    if not words:
        return None
    if start >= 0 and example.context.startswith(text, start):
        skipped = len(text) - len(text.lstrip())
        return start + skipped, start + len(text.rstrip())
    # Blanks of another kind, or more of them, as data sets have that were cleaned after they were
    # annotated.
    matches = list(re.finditer(r"\s+".join(map(re.escape, words)), example.context))
    if len(matches) > 1:
        matches = [match for match in matches if match.start() == start]
    return matches[0].span() if matches else None
