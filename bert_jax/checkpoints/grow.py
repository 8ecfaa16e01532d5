# SPDX-License-Identifier: Apache-2.0
"""Growing a trained model: more words, more positions, for further pre-training."""

import dataclasses
import json
import re
from collections.abc import Sequence

import jax
import numpy as np

from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.errors import InputError
from bert_jax.text.hf_tokenizer import make_backend
from bert_jax.text.sentencepieces import SentencePieces
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.text.tokenizer_json import DescribedPieces
from bert_jax.text.vocab import CONTINUATION
from bert_jax.text.wordpiece import WordPiece

_UNUSED = re.compile(r"\[unused\d+\]")


def grow(
    bert: Pretrained,
    words: Sequence[str] = (),
    use_unused: bool = False,
    max_positions: int = 0,
    special: Sequence[str] = (),
) -> Pretrained:
    """Returns the model with tokens for `words` and with `max_positions` positions.

    Text without the new words keeps its ids and hidden states, bit for bit. Words that begin with a new word are split
    differently, since WordPiece takes the longest match: with "corona", "coronavirus" becomes "corona", "##virus".

    A new token's embedding is the mean of the embeddings of the pieces that the word was split into before, and so is
    its output bias; its logit is therefore the mean of theirs. A word that was [UNK] starts with the values of [UNK].
    New position embeddings repeat the old ones from the first. Rotary positions have no table: the longest wavelength
    of global layers grows as the number of positions does, and the shortest stays, so old text has other hidden states.
    Nothing is random.

    Args:
      bert: the model; for words its tokenizer must be WordPiece.
      words: as the tokenizer normalises them; appended to the vocabulary in this order.
      use_unused: whether they replace [unused..] tokens, in order; ids and shapes then stay the same.
      max_positions: the new number of positions; 0 keeps it.
      special: tokens that are matched literally in text, such as the marks of entities [E1] and [/E1]; the tokenizer
        becomes one of tokenizer.json, which transformers reads too.
    Raises: InputError if a word or a number cannot be used.

    Source: for words, Mosin et al. 2021, "Fine-Tuning Transformers: Vocabulary Transfer", and google-research/bert
    issue 9; for positions, Beltagy et al. 2020, "Longformer", section 5; for rotary ones "NTK-aware" scaling, Peng et
    al. 2023, "YaRN", section 3.1.
    """
    if words and special:
        raise InputError(
            "words and special tokens are added one after the other; grow the model twice"
        )
    tokenizer = bert.tokenizer
    places = np.zeros(0, np.int64)
    if words:
        tokenizer, places = _grow_vocab(bert.tokenizer, words, use_unused)
    if special:
        words, (tokenizer, places) = special, _add_special(bert.tokenizer, special)
    vocab_size = max(bert.config.vocab_size, tokenizer.vocab_size)
    if max_positions and max_positions < bert.config.max_positions:
        raise InputError(
            f"max_positions {max_positions} is below the {bert.config.max_positions} it has; give more"
        )
    config = dataclasses.replace(
        bert.config, vocab_size=vocab_size, max_positions=max_positions or bert.config.max_positions
    )
    if config.positions == "rotary" and config.head_size > 2:
        ratio = config.max_positions / bert.config.max_positions
        theta = config.rotary_theta * ratio ** (config.head_size / (config.head_size - 2))
        config = dataclasses.replace(config, rotary_theta=theta)
    config.validate()  # so that the written model can be read again
    # by the old tokenizer, to which a new word is several pieces
    pieces = [bert.tokenizer.encode(word) or [bert.tokenizer.unk_id] for word in words]

    def with_words(table: np.ndarray) -> np.ndarray:
        grown = np.zeros((config.padded_vocab_size, *table.shape[1:]), table.dtype)
        grown[: bert.config.vocab_size] = table[: bert.config.vocab_size]
        for token_id, ids in zip(places, pieces, strict=True):
            grown[token_id] = table[ids].mean(axis=0)
        return grown

    params = jax.device_get(bert.params)
    embeddings = params["encoder"]["embeddings"]
    head = params.get("mlm", {})
    for holder in (embeddings["word"], head, head.get("words", {})):
        for name in {"embedding", "output_bias"} & holder.keys():
            holder[name] = with_words(holder[name])
    if config.positions == "learned":
        table = embeddings["position"]["embedding"]
        offset = config.position_offset
        places = np.arange(config.max_positions) % bert.config.max_positions
        embeddings["position"]["embedding"] = np.concatenate(
            [table[:offset], table[offset:][places]]
        )
    return dataclasses.replace(bert, config=config, params=params, tokenizer=tokenizer)


def _add_special(tokenizer: Tokenizer, special: Sequence[str]) -> tuple[Tokenizer, np.ndarray]:
    """Returns the tokenizer that finds the tokens in text, and their ids."""
    if tokenizer.kind == SentencePieces.kind:
        raise InputError(
            "a SentencePiece model finds no tokens in text; use one with vocab.txt or tokenizer.json"
        )
    taken = set(tokenizer.vocab)
    for token in special:
        if not token or token != token.strip() or not token.isprintable() or token in taken:
            raise InputError(
                f"special token {token!r:.60} is empty, has blanks around it, or is there already"
            )
        taken.add(token)
    if tokenizer.kind == DescribedPieces.kind:
        described = json.loads(tokenizer.pieces.content)
    else:
        described = make_backend(tokenizer)
    ids = list(range(tokenizer.vocab_size, tokenizer.vocab_size + len(special)))
    marks = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    described["added_tokens"] += [
        {"id": index, "content": token, **marks} for index, token in zip(ids, special)
    ]
    return Tokenizer(DescribedPieces(json.dumps(described).encode(), tokenizer.config)), np.array(
        ids
    )


def _grow_vocab(
    tokenizer: Tokenizer, words: Sequence[str], use_unused: bool
) -> tuple[Tokenizer, np.ndarray]:
    """Returns the tokenizer with the new words, and their ids."""
    pieces = tokenizer.pieces
    if not isinstance(pieces, WordPiece):
        raise InputError(
            f"a vocabulary of {tokenizer.kind} cannot grow, as words would be cut anew; train another"
        )
    for place, word in enumerate(words):
        problem = ""
        if word in pieces.ids or word in words[:place]:
            problem = "is there already; leave it out"
        elif word.startswith(CONTINUATION):
            problem = "is a piece of a word; give whole words"
        elif (normal := pieces.normalizer(word)) != [word]:
            problem = f"is {normal} to this tokenizer, so text would never give it; write it so"
        elif len(word) > pieces.longest:
            problem = f"has {len(word)} characters; longer than {pieces.longest} is [UNK]"
        if problem:
            raise InputError(f"token {word!r:.60} {problem}")
    vocab = list(tokenizer.vocab)
    places = list(range(len(vocab), len(vocab) + len(words)))
    if use_unused:
        places = [index for index, token in enumerate(vocab) if _UNUSED.fullmatch(token)][
            : len(words)
        ]
        if len(places) < len(words):
            raise InputError(
                f"the vocabulary has {len(places)} [unused..] tokens for {len(words)} new ones"
            )
    vocab += [""] * (max(places) + 1 - len(vocab))
    for token_id, word in zip(places, words, strict=True):
        vocab[token_id] = word
    return Tokenizer(WordPiece(vocab, pieces.normalizer, pieces.longest)), np.array(places)
