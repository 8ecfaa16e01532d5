# SPDX-License-Identifier: Apache-2.0
"""Masking for the masked language model: which tokens to predict, and what replaces them in the input.

A mask is a pure function of (seed, sequence number, epoch). Keys, budgets and random bits follow from the sequence and
from a token's position in it, so neither packing nor the number of devices changes a mask. Masking runs on the device,
inside the step.
"""

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch
from bert_jax.model.inputs import check_fields
from bert_jax.model.keys import root_key
from bert_jax.model.sequences import in_sequences
from bert_jax.settings.pretraining import MaskingConfig
from bert_jax.text.tokenizer import Tokenizer

MASKING = MaskingConfig()  # the paper's


def prediction_budgets(config: MaskingConfig, max_length: int) -> np.ndarray:
    """Returns how many tokens to predict in a sequence of 0..max_length tokens, [max_length + 1] int32.

    Source: google-research/bert create_pretraining_data.py: min(most, max(1, round(length x rate))), with
    [CLS] and [SEP] counted in and Python 3's rounding of halves to even.
    """
    most = config.most(max_length)
    budgets = [min(most, max(1, round(length * config.rate))) for length in range(max_length + 1)]
    return np.array([0, *budgets[1:]], np.int32) * (config.rate > 0)


def rate_at(config: MaskingConfig, step: jax.Array, num_steps: int) -> jax.Array:
    """Returns the rate of masks after so many steps of a run of `num_steps`. Source: Ankner et al. 2023, linear."""
    return config.rate + (config.end_rate - config.rate) * step / num_steps


def predictions_per_row(config: MaskingConfig, row_length: int, num_sequences: int) -> int:
    """Returns P, the largest number of predictions in a row of M sequences."""
    if num_sequences == 1:
        return max(1, int(prediction_budgets(config, row_length)[-1]))
    most = min(
        int(config.rate * row_length) + num_sequences, num_sequences * config.limit(row_length)
    )
    return max(1, most)


def mask_tokens(
    tokenizer: Tokenizer,
    batch: Batch,
    key: jax.Array,
    masking: MaskingConfig = MASKING,
) -> Batch:
    """Returns the batch with tokens hidden, and `mlm_positions`, `mlm_labels`, `mlm_weights` [B, P]: what they were.

    A pure function, for a loss of your own: the same key gives the same masks, whatever devices there are.

    Args:
      tokenizer: of the batch. [CLS] and [SEP] are never hidden.
      batch: of NumPy or JAX arrays, as `make_batch` makes it.
      key: a random key.
      masking: how many tokens are hidden, and what replaces them; its `seed`, `static` and `end_rate` have no meaning
        here.

    Examples:
      >>> bert = bert_jax.load_pretrained("models/bert-mini-en")
      >>> batch = bert_jax.make_batch(bert, ["the king opened the door"])
      >>> masked = bert_jax.mask_tokens(bert.tokenizer, batch, jax.random.key(0))
      >>> bool(masked.mlm_labels[0, 0] == batch.token_ids[0, masked.mlm_positions[0, 0]])
      True
    """
    check_fields(batch)
    rows, places = batch.cls_positions.shape
    numbered = batch._replace(
        sequence_numbers=jax.random.bits(key, (rows, places), jnp.uint32),
        epochs=jnp.zeros(rows, jnp.int32),
        word_starts=jnp.asarray(tokenizer.word_starts)[jnp.asarray(batch.token_ids, jnp.int32)],
    )
    special = tokenizer.mask_id, (tokenizer.cls_id, tokenizer.sep_id)
    masked = _mask_rows(numbered, masking, tokenizer.vocab_size, *special)
    return leave_causal(masked, numbered, masking) if masking.causal_rate else masked


def mask_rows(
    batch: Batch,
    config: MaskingConfig,
    vocab_size: int,
    mask_id: int,
    never_predicted: tuple[int, ...],
    rate: jax.Array | None = None,
) -> Batch:
    """Returns the batch with tokens hidden and `mlm_positions`, `mlm_labels`, `mlm_weights` [B, P] set.

    In each sequence an exact number of tokens is chosen at random (`prediction_budgets`), none of them in
    `never_predicted` ([CLS] and [SEP]). With whole words the number is a maximum (`choose_words`). Each chosen token is
    replaced by [MASK] or by a random token of the unpadded vocabulary, or is kept, independently of other tokens of
    its word. `rate` is a share of the tokens to predict that a step has computed, at most `config.rate`, in its place.
    Source: paper, section 3.1; google-research/bert create_pretraining_data.py.
    """
    assert batch.sequence_numbers is not None and batch.epochs is not None
    num_rows, row_length = batch.token_ids.shape
    num_sequences = batch.cls_positions.shape[1]
    token_ids = batch.token_ids.astype(jnp.int32)
    sequence_ids = batch.sequence_ids.astype(jnp.int32)
    real = sequence_ids > 0
    place, offsets = _places(batch)

    def of_token(per_sequence: jax.Array) -> jax.Array:
        return jnp.take_along_axis(per_sequence, place, axis=1)

    positions = jnp.arange(row_length)[None]
    epochs = jnp.zeros_like(batch.epochs) if config.static else batch.epochs
    numbers = batch.sequence_numbers.astype(jnp.uint32)
    # [B, L, 3 or 4]
    bits = _token_bits(
        config.seed, epochs, numbers, place, offsets, 4 if config.max_ngram > 1 else 3
    )

    lengths = jnp.sum(in_sequences(sequence_ids, num_sequences), axis=-1)  # [B, M]
    if rate is None:
        budgets = jnp.asarray(prediction_budgets(config, row_length))[lengths]
    else:
        wanted = jnp.round(lengths * rate).astype(jnp.int32)
        budgets = jnp.clip(wanted, 1, config.most(row_length))
    candidates = real & ~jnp.isin(token_ids, jnp.array(never_predicted))
    if config.whole_word:
        assert batch.word_starts is not None
        starts = first_tokens_of_words(candidates, batch.word_starts, sequence_ids)
        words = (
            _ngram_lengths(bits[..., 3], config.max_ngram)
            if config.max_ngram > 1
            else jnp.ones_like(place)
        )
        chosen = choose_words(
            bits[..., 0], words, candidates, starts, place, budgets, config.max_ngram
        )
    else:
        chosen = candidates & (
            _rank_in_sequence(bits[..., 0], candidates, sequence_ids) < of_token(budgets)
        )

    num_predictions = predictions_per_row(config, row_length, num_sequences)
    ordered = jnp.sort(jnp.where(chosen, positions, row_length), axis=1)[:, :num_predictions]
    weights = ordered < row_length
    mlm_positions = jnp.where(weights, ordered, 0)
    mlm_labels = jnp.where(weights, jnp.take_along_axis(token_ids, mlm_positions, axis=1), 0)

    share = _unit(bits[..., 1])
    # the bias, vocab_size / 2**32, is below 1e-4
    random_ids = (bits[..., 2] % vocab_size).astype(jnp.int32)
    hidden = jnp.where(share < config.mask_rate + config.random_rate, random_ids, token_ids)
    hidden = jnp.where(share < config.mask_rate, mask_id, hidden)
    return batch._replace(
        token_ids=jnp.where(chosen, hidden, token_ids),
        mlm_positions=mlm_positions,
        mlm_labels=mlm_labels,
        mlm_weights=weights.astype(jnp.float32),
    )


# for callers whose own function is not compiled
_mask_rows = jax.jit(mask_rows, static_argnums=(1, 2, 3, 4))


def leave_causal(masked: Batch, batch: Batch, config: MaskingConfig) -> Batch:
    """Returns the masked batch with `config.causal_rate` of its rows as they are in `batch`, to be read causally.

    Their labels are the masks' labels, each at the position before, which exists since [CLS] is never predicted.
    A row is known by its first sequence. Source: Charpentier & Samuel 2024; it differs (decision 0006).
    """
    assert batch.sequence_numbers is not None and batch.epochs is not None
    root = root_key(config.seed, "causal_rows")
    epochs = jnp.zeros_like(batch.epochs) if config.static else batch.epochs
    numbers = batch.sequence_numbers[:, 0].astype(jnp.uint32)
    keys = jax.vmap(
        lambda epoch, number: jax.random.fold_in(jax.random.fold_in(root, epoch), number)
    )(epochs, numbers)
    causal = (
        _unit(jax.vmap(lambda key: jax.random.bits(key, (), jnp.uint32))(keys)) < config.causal_rate
    )
    here = causal[:, None]
    return masked._replace(
        causal=causal,
        token_ids=jnp.where(here, batch.token_ids, masked.token_ids),
        mlm_positions=jnp.where(
            here & (masked.mlm_weights > 0), masked.mlm_positions - 1, masked.mlm_positions
        ),
    )


def next_tokens(batch: Batch) -> Batch:
    """Returns the batch with the next token of each position as its label, for causal models.

    No token is masked: the model must not attend to later ones (`ModelConfig.causal`). P is L - 1.
    """
    sequence_ids = batch.sequence_ids
    followed = (sequence_ids[:, 1:] == sequence_ids[:, :-1]) & (sequence_ids[:, 1:] > 0)
    positions = jnp.broadcast_to(jnp.arange(followed.shape[1]), followed.shape)
    return batch._replace(
        mlm_positions=jnp.where(followed, positions, 0),
        mlm_labels=jnp.where(followed, batch.token_ids[:, 1:].astype(jnp.int32), 0),
        mlm_weights=followed.astype(jnp.float32),
    )


def first_tokens_of_words(
    candidates: jax.Array, word_starts: jax.Array, sequence_ids: jax.Array
) -> jax.Array:
    """Returns [B, L] bool: whether the candidate begins a word, or is the first candidate of its sequence.

    If truncation cut into the first word of sentence B, its rest counts as part of the last word of A, as in the
    reference.
    """
    count = jnp.cumsum(candidates, axis=1)
    earlier = jnp.where(
        sequence_ids[:, :, None] > sequence_ids[:, None, :], candidates[:, None, :], False
    )
    is_first = count - jnp.sum(earlier, axis=-1) == 1
    return candidates & (word_starts | is_first)


def choose_words(
    scores: jax.Array,
    num_words: jax.Array,
    candidates: jax.Array,
    starts: jax.Array,
    place: jax.Array,
    budgets: jax.Array,
    max_ngram: int = 1,
) -> jax.Array:
    """Returns [B, L] bool: the tokens of words, chosen word by word until the budget of their sequence is spent.

    Words are visited in the order of their scores. A word with more tokens than the rest of the budget is skipped, not
    cut, so a sequence may end below its budget, even with no prediction. From each word on, `num_words` words are taken
    together: fewer at the end of the sequence or where the budget does not suffice, and none if one of them is taken
    already. Source: create_pretraining_data.py of google-research/bert, and of google-research/albert
    for runs of words.

    Args:
      scores: [B, L] uint32; a word has the score of its first token.
      num_words: [B, L] int: 1 to `max_ngram`, at the first token of each word.
      candidates: [B, L] bool: tokens that may be chosen.
      starts: [B, L] bool: candidates that begin a word; the first of every sequence does.
      place: [B, L] int: which of the M sequences of the row a token is in.
      budgets: [B, M] int.
      max_ngram: the most words that are taken together.
    """
    num_rows, row_length = candidates.shape
    index = jnp.arange(row_length)[None]
    rows = jnp.arange(num_rows)

    # Where the run of 1, 2, ... words from each start on ends, and how many candidates are in it.
    from_here = jax.lax.cummin(jnp.where(starts, index, row_length), axis=1, reverse=True)
    # [B, L + 1]
    next_start = jnp.pad(from_here[:, 1:], ((0, 0), (0, 2)), constant_values=row_length)
    before = jnp.pad(jnp.cumsum(candidates, axis=1), ((0, 0), (1, 0)))  # [B, L + 1]
    place_at = jnp.pad(place, ((0, 0), (0, 1)), constant_values=-1)
    ends = [next_start[:, :-1]]
    for _ in range(max_ngram - 1):
        goes_on = jnp.take_along_axis(place_at, ends[-1], axis=1) == place
        ends.append(jnp.where(goes_on, jnp.take_along_axis(next_start, ends[-1], axis=1), ends[-1]))
    stops = jnp.stack(ends, axis=-1)  # [B, L, max_ngram]
    sizes = (
        jnp.stack([jnp.take_along_axis(before, end, axis=1) for end in ends], axis=-1)
        - before[:, :-1, None]
    )

    def visit(
        carry: tuple[jax.Array, jax.Array], first: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        chosen, left = carry  # [B, L] bool, [B, M] int
        room = left[rows, place[rows, first]]
        fits = sizes[rows, first] <= room[:, None]  # [B, max_ngram]: the first ones, as runs grow
        taken = jnp.clip(jnp.minimum(jnp.sum(fits, axis=1), num_words[rows, first]) - 1, 0)
        inside = (
            candidates & (index >= first[:, None]) & (index < stops[rows, first, taken][:, None])
        )
        accepted = starts[rows, first] & fits[:, 0] & ~jnp.any(inside & chosen, axis=1)
        spent = jnp.where(accepted, sizes[rows, first, taken], 0)
        return (
            chosen | (inside & accepted[:, None]),
            left.at[rows, place[rows, first]].add(-spent.astype(left.dtype)),
        ), None

    # words before all else
    order = jnp.argsort(jnp.where(starts, scores >> 1, jnp.uint32(2**32 - 1)), axis=1)
    (chosen, _), _ = jax.lax.scan(visit, (jnp.zeros_like(candidates), budgets), order.T)
    return chosen


def _ngram_lengths(bits: jax.Array, max_ngram: int) -> jax.Array:
    """Returns lengths n from 1 to `max_ngram`, with probability proportional to 1 / n. Source: Lan et al. 2019."""
    chances = 1 / np.arange(1, max_ngram + 1)
    bounds = (np.cumsum(chances) / np.sum(chances))[:-1].astype(np.float32)
    bounds = np.expand_dims(bounds, tuple(range(bits.ndim)))
    return 1 + jnp.sum(_unit(bits)[..., None] >= bounds, axis=-1)


def bits_of_predictions(batch: Batch, seed: int) -> jax.Array:
    """Returns random bits, uint32 [B, P], for each prediction of a masked batch, other ones than those of its mask."""
    assert batch.sequence_numbers is not None and batch.epochs is not None
    numbers = batch.sequence_numbers.astype(jnp.uint32)
    bits = _token_bits(seed, batch.epochs, numbers, *_places(batch), 1, "replacing")
    return jnp.take_along_axis(bits[..., 0], batch.mlm_positions.astype(jnp.int32), axis=1)


def _places(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns [B, L]: which of the row's M sequences a token is in, and which token of it."""
    place = jnp.maximum(batch.sequence_ids.astype(jnp.int32) - 1, 0)
    first = jnp.take_along_axis(batch.cls_positions.astype(jnp.int32), place, axis=1)
    return place, jnp.arange(place.shape[1])[None] - first


def _token_bits(
    seed: int,
    epochs: jax.Array,
    numbers: jax.Array,
    place: jax.Array,
    offsets: jax.Array,
    count: int,
    purpose: str = "masking",
) -> jax.Array:
    """Returns `count` 32-bit words [B, L, count] for each token, from its sequence, its offset in it and the epoch."""
    root = root_key(seed, purpose)

    def row_bits(
        epoch: jax.Array, numbers: jax.Array, place: jax.Array, offsets: jax.Array
    ) -> jax.Array:
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(
            jax.random.fold_in(root, epoch), numbers
        )
        return jax.vmap(
            lambda key, offset: jax.random.bits(
                jax.random.fold_in(key, offset), (count,), jnp.uint32
            )
        )(keys[place], offsets)

    return jax.vmap(row_bits)(epochs, numbers, place, offsets)


def _rank_in_sequence(
    scores: jax.Array, candidates: jax.Array, sequence_ids: jax.Array
) -> jax.Array:
    """Returns the number of candidates in each token's sequence with a lower score, [B, L].

    Ties go to the earlier token. All pairs are compared: L is small, and a fused reduction is faster than a sort.
    """
    index = jnp.arange(scores.shape[1])
    mine = scores[:, :, None]
    other = scores[:, None, :]
    before = (other < mine) | ((other == mine) & (index[None, None, :] < index[None, :, None]))
    same = sequence_ids[:, :, None] == sequence_ids[:, None, :]
    return jnp.sum(before & same & candidates[:, None, :], axis=-1)


def _unit(bits: jax.Array) -> jax.Array:
    """Returns 32-bit words as float32 in [0, 1), by their 24 high bits."""
    return (bits >> 8).astype(jnp.float32) * np.float32(2**-24)
