# SPDX-License-Identifier: Apache-2.0
"""Predictions of a trained model on new text."""

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from bert_jax.batch import Batch, pad_rows
from bert_jax.batches.infer import computed, inference_layouts
from bert_jax.batches.pack import Layout, Sizes
from bert_jax.checkpoints.pretrained import Prepared, Pretrained, read_pretrained
from bert_jax.devices.cores import on_all_cores
from bert_jax.devices.sharding import in_no_mesh, make_mesh
from bert_jax.errors import InputError
from bert_jax.inference.pretrained import computing_in
from bert_jax.model.heads.base import Head
from bert_jax.model.heads.pretraining import MASKED_LM
from bert_jax.model.heads.table import HEADS
from bert_jax.model.inputs import check_batch, check_rows
from bert_jax.model.objective import Params, forward
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.pretraining import MeshConfig
from bert_jax.settings.rules import from_dict
from bert_jax.storage.resolve import resolve
from bert_jax.tasks.base import Example, Prediction, Rows, Task
from bert_jax.tasks.catalog import NAMES, USUAL, MakeTask, Own, make_task
from bert_jax.tasks.evaluation import make_inference, make_split, predict_split
from bert_jax.tasks.hooks import told
from bert_jax.text.fitting import check_long_texts, listed, tell_cut, too_long


def load_predictor(
    path: str | Path,
    long_texts: str = "cut",
    task: MakeTask | None = None,
    head: Head | None = None,
    null_threshold: float | None = None,
    dtype: str = "",
) -> "Predictor":
    """Returns a predictor for the model at `path`, in any format that `load_pretrained` knows.

    An input with more tokens than the model was fine-tuned with is cut, with a warning, or with `long_texts` "refuse"
    an error. A model of one's own task or head needs them again, as `finetune` took them: a directory runs no code.
    With `null_threshold` a model of questions may answer "", if the score of no answer is above the best span's by
    more: 0 for models of Hugging Face that learnt SQuAD 2, which do not say so. `dtype` is as in `load_pretrained`.
    Raises: InputError as `load_pretrained`, or if the model has no head to predict with.
    """
    bert = computing_in(read_pretrained(resolve(path)), dtype)
    return Predictor(bert, long_texts, Own(task, head), null_threshold)


class Predictor:
    """A loaded model that predicts on any number of inputs.

    A fine-tuned model does its task; a pre-trained one fills in [MASK]. A model with a head but without task settings,
    such as one from Hugging Face, uses the default settings of its head's task.
    """

    def __init__(
        self,
        bert: Pretrained,
        long_texts: str = "cut",
        own: Own = USUAL,
        null_threshold: float | None = None,
    ) -> None:
        check_long_texts(long_texts)
        self.bert = bert
        self.long_texts = long_texts
        self.task = task_of(bert, own)
        if null_threshold is not None:
            self.task = _with_no_answer(self.task, null_threshold)
        if self.task is None:
            check_fills_masks(bert)
            return
        self._mesh = make_mesh(MeshConfig(), jax.devices()[:1])
        self._infer = make_inference(bert.config, self.task, self._mesh, bert.params)
        self._prepared = Prepared(self._infer.ready)
        self._prepared.of(bert.params)

    def __call__(self, inputs: Iterable[Any]) -> list[Prediction]:
        """Returns a prediction for each input, in the order of the inputs.

        An input is a text, a pair of texts, or a dict with the task's names: question and context, for one. The
        prediction is the task's own type, a named tuple; without a task, it is that of `fill_masks`.

        Raises: InputError if the task cannot read an input; its message counts them from 1.
        """
        inputs = listed(inputs)
        if self.task is None:
            return list(fill_masks(self.bert, inputs, long_texts=self.long_texts))
        numbered = enumerate(inputs, 1)
        return self.predict([self.parse(value, f"input {number}") for number, value in numbered])

    @told()
    def parse(self, value: object, where: str) -> Example:
        """Returns the task's example of an input. Raises: InputError if it is wrong, or too long and not to be cut."""
        assert self.task is not None
        example = self.task.parse(value, where)
        if (
            self.long_texts == "refuse"
            and self.task.make_rows([example], self.bert.tokenizer, False).num_cut()
        ):
            raise too_long(where, self._most)
        return example

    @told()
    @in_no_mesh()
    @on_all_cores()
    def predict(self, examples: Sequence[Example]) -> list[Prediction]:
        """Returns a prediction for each of the task's examples."""
        assert self.task is not None
        split = make_split(self.task, self.bert.tokenizer, "input", list(examples))
        tell_cut(Rows(split.rows, split.counts).num_cut(), self._most)
        check_rows(self.bert.config, split.rows, "the input")
        ready = self._prepared.of(self.bert.params)
        return predict_split(self.task, split, self._infer, ready, 0, self._mesh)

    @property
    def _most(self) -> int:
        """The most tokens of an input: of a question where long contexts have several windows."""
        assert self.task is not None
        return getattr(self.task.config, self.task.head.most_tokens)


def task_of(bert: Pretrained, own: Own = USUAL) -> Task | None:
    """Returns the task that a model was fine-tuned for, or the usual task of its head; None without a task head."""
    if bert.task_settings:
        settings = from_dict(TaskConfig, bert.task_settings, "task_settings")
        settings.validate()
        if own.task is None and settings.name not in NAMES:
            raise _named_again("task", settings.name, "task=get_task")
        task = make_task(settings, bert.labels, own)
        if task.head.name != bert.task:
            raise _named_again("head", bert.task, "head=get_head()")
        return task
    if bert.task not in HEADS:
        raise _named_again("head", bert.task, "head=get_head()")
    head = HEADS[bert.task]
    labels = ()
    num_classes = bert.params["classifier"]["bias"].shape[0] if head.has_labels else 0
    name = head.usual_task(num_classes)
    if not name:
        return None
    if bert.problem:
        raise InputError(
            f"this model's problem_type is {bert.problem}, and what is predicted here is one class of several, or a "
            "single number; use it in transformers (convert_checkpoint --to=hf keeps it), or bert.encode for vectors"
        )
    if head.has_labels:
        labels = bert.labels or tuple(f"LABEL_{index}" for index in range(num_classes))
    most = bert.config.max_positions
    length = min(384, most) if head.has_windows else most
    of_question = max(1, min(64, length // 2))
    config = TaskConfig(name=name, max_seq_length=length, max_query_length=of_question)
    return make_task(config, labels)


def _with_no_answer(task: Task | None, threshold: float) -> Task:
    """Returns a task of questions that may have no answer. Raises: InputError for another task, or if it is NaN."""
    name = task.config.name if task is not None else "no task"
    if task is None or name not in ("squad1", "squad2") or not abs(threshold) < float("inf"):
        raise InputError(
            f"null_threshold {threshold} must be a number, for a model that finds answers (squad1, squad2), and this "
            f"one has {name}; leave it out"
        )
    return make_task(dataclasses.replace(task.config, name="squad2", null_threshold=threshold))


def _named_again(kind: str, name: str, argument: str) -> InputError:
    """Returns the error for a model whose task or head has no known code."""
    return InputError(
        f"this model has the {kind} {name!r} of a recipe, and a model directory runs no code; name the recipe again, "
        f"with --recipe=PATH.py, or load_predictor(path, {argument})"
    )


class Filled(NamedTuple):
    """A guess for one [MASK] of a text."""

    token: str
    probability: float


class Blanks(NamedTuple):
    """A text with [MASK] in it, in tokens."""

    text: str
    token_ids: list[int]  # with [CLS] and [SEP]
    places: list[int]  # of [MASK]
    was_cut: bool = False


def fill_masks(
    bert: Pretrained,
    texts: Iterable[str],
    num_guesses: int = 5,
    long_texts: str = "cut",
) -> list[list[list[Filled]]]:
    """Returns the likeliest tokens, best first: for every text, for every [MASK] in it, `num_guesses` of them.

    A text with more tokens than the model has positions is cut, with a warning, or with `long_texts` "refuse" an error.
    Raises: InputError if a text has no [MASK] in what is left, or if the model is causal or has no masked language
    model.

    Examples:
      >>> bert = bert_jax.load_pretrained("models/bert-mini-en")
      >>> [[guesses]] = bert_jax.fill_masks(bert, ["the king [MASK] the door."], num_guesses=2)
      >>> [(guess.token, round(guess.probability, 2)) for guess in guesses]
      [('opened', 0.53), ('closed', 0.13)]
    """
    check_fills_masks(bert)
    check_long_texts(long_texts)
    texts = listed(texts)
    blanks = [
        read_blanks(bert, text, f"text {number}", long_texts)
        for number, text in enumerate(texts, 1)
    ]
    return fill_blanks(bert, blanks, num_guesses)


def read_blanks(
    bert: Pretrained,
    text: str,
    where: str,
    long_texts: str = "cut",
    needed: bool = True,
) -> Blanks:
    """Returns the tokens of a text, and the positions of [MASK] in it.

    Raises: InputError if it has none and one is `needed`, or if it is too long and not to be cut.
    """
    tokenizer = bert.tokenizer
    most = bert.config.max_positions
    pieces = tokenizer.encode(text, allow_special=True)
    was_cut = len(pieces) + 2 > most
    if was_cut and long_texts == "refuse":
        raise too_long(where, most, len(pieces) + 2)
    token_ids = [tokenizer.cls_id, *pieces[: most - 2], tokenizer.sep_id]
    places = [position for position, token in enumerate(token_ids) if token == tokenizer.mask_id]
    if needed and not places:
        cut = f" in its first {most} tokens, all that the model has positions for"
        raise InputError(
            f"{where} has no {tokenizer.vocab[tokenizer.mask_id]}{cut if was_cut else ''}: {text!r:.200}; write it "
            "where a word is missing"
        )
    return Blanks(
        text=text,
        token_ids=token_ids,
        places=places,
        was_cut=was_cut,
    )


@in_no_mesh()
@on_all_cores()
def fill_blanks(
    bert: Pretrained, texts: Sequence[Blanks], num_guesses: int
) -> list[list[list[Filled]]]:
    """Returns the guesses for every blank of every text, in their order; texts of like lengths share a batch."""
    tell_cut(sum(text.was_cut for text in texts), bert.config.max_positions)
    guesses: list[list[list[Filled]]] = [[] for _ in texts]
    blank = [index for index, text in enumerate(texts) if text.places]
    lengths = np.array([len(texts[index].token_ids) for index in blank], np.int64)
    vocab = bert.tokenizer.vocab

    def compute(layout: Layout) -> jax.Array:
        chosen = [texts[blank[number]] for (number,) in layout.bins]
        # of few numbers of blanks: each is a program to compile
        most = 1 << (max(len(text.places) for text in chosen) - 1).bit_length()
        positions = np.zeros((layout.num_rows, min(layout.length, most)), np.int32)
        for row, text in enumerate(chosen):
            positions[row, : len(text.places)] = text.places
        batch = padded_batch(bert, layout, [text.token_ids for text in chosen])
        batch = batch._replace(mlm_positions=positions)
        return _mask_probabilities(bert.config, bert.prepared, batch)

    sizes = Sizes(lengths, np.ones_like(lengths))
    for layout, probabilities in computed(inference_layouts(sizes, bert.config), compute):
        for (number,), of_text in zip(layout.bins, probabilities):
            index = blank[number]
            for shares in of_text[: len(texts[index].places)]:
                # Rows of the word table beyond the vocabulary belong to no token.
                best = np.argsort(-shares[: len(vocab)], kind="stable")[:num_guesses]
                guesses[index].append(
                    [Filled(str(vocab[token]), float(shares[token])) for token in best]
                )
    return guesses


def padded_batch(bert: Pretrained, layout: Layout, rows: Sequence[Sequence[int]]) -> Batch:
    """Returns the batch of a layout with these rows, the others empty."""
    empty = [[]] * (layout.num_rows - len(rows))
    batch = pad_rows([*rows, *empty], layout.length, pad_id=bert.tokenizer.pad_id)
    check_batch(bert.config, batch)
    return batch


def check_fills_masks(bert: Pretrained) -> None:
    """Raises: InputError if the model cannot fill in blanks."""
    if bert.config.causal:
        raise InputError(
            "this model reads from left to right and predicts what comes next; a blank needs one that sees both sides"
        )
    check_predicts_words(bert)


def check_predicts_words(bert: Pretrained) -> None:
    """Raises: InputError if the model has no head that predicts words."""
    if "mlm" not in bert.params:
        raise InputError(
            f"this model has no head that predicts words, its task being {bert.task}; give another"
        )


@partial(jax.jit, static_argnums=0)
def _mask_probabilities(config: ModelConfig, params: Params, batch: Batch) -> jax.Array:
    logits = forward(config, params, batch, MASKED_LM)
    return jax.nn.softmax(logits, axis=-1)
