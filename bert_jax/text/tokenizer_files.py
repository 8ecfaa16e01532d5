# SPDX-License-Identifier: Apache-2.0
"""What the files of a tokenizer hold, read once; all that is made of them is a function of this value."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bert_jax.text.vocab import JsonObject, parse_vocab

# the files with a vocabulary
VOCAB = "vocab.txt"
SPIECE = "spiece.model"
DESCRIBED = "tokenizer.json"
SPM, FAIRSEQ = "spm.model", "sentencepiece.bpe.model"  # other names of SentencePiece's
VOCABULARIES = (VOCAB, SPIECE, SPM, FAIRSEQ)
SETTINGS = "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"
ADDED = "added_tokens.json"


@dataclass(frozen=True)
class TokenizerFiles:
    """The contents of a directory's files.

    Attributes:
      where: the directory, for messages.
      contents: of `VOCABULARIES`, those that are there.
      described: tokenizer.json, None if it is not there.
      settings: tokenizer_config.json; this and the next two are {} where there is no file.
      special_tokens: special_tokens_map.json.
      added_tokens: added_tokens.json.
      model: config.json, that of a model; None if it is not there.
    """

    where: Path
    contents: Mapping[str, bytes]
    described: JsonObject | None = None
    settings: JsonObject = field(default_factory=dict)
    special_tokens: JsonObject = field(default_factory=dict)
    added_tokens: JsonObject = field(default_factory=dict)
    model: JsonObject | None = None

    @functools.cached_property
    def vocab(self) -> list[str]:
        """The tokens of vocab.txt. Raises: InputError if they are not a vocabulary."""
        return parse_vocab(self.contents[VOCAB], self.where / VOCAB)
