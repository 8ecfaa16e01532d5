# SPDX-License-Identifier: Apache-2.0
"""Learns a WordPiece vocabulary from text: the same text and flags give the same bytes, everywhere.

    python -m bert_jax.tools.build_vocab --input='wiki/*.txt.gz' --output=vocab --vocab_size=30522
    python -m bert_jax.tools.build_vocab --input=python-docs --output=/tmp/vocab --vocab_size=8000 --cased

Writes vocab.txt and tokenizer_config.json into the output directory. It takes under 1 GB of memory,
however long the text.
"""

import time
from pathlib import Path

from absl import flags

from bert_jax.data.corpus import iterate_documents
from bert_jax.errors import InputError
from bert_jax.text.normalize import Normalizer
from bert_jax.text.tokenizer import Tokenizer, load_tokenizer, wordpiece_tokenizer
from bert_jax.text.vocab import WordCounts, learn_vocab
from bert_jax.tools import cli

_INPUT = flags.DEFINE_string(
    "input", "", "Text files as globs separated by commas, or python-docs: the documentation inside Python."
)
_OUTPUT = flags.DEFINE_string("output", "", "Directory to write vocab.txt and tokenizer_config.json into.")
_VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 30522, "Tokens in the vocabulary, special and unused ones included.")
_CASED = flags.DEFINE_boolean("cased", False, "Keep capital letters and accents; otherwise text is lower-cased.")
_STRIP_ACCENTS = flags.DEFINE_boolean("strip_accents", None, "Whether to drop accents; default: unless --cased.")
_UNUSED = flags.DEFINE_integer("unused", 0, "Places [unused0].. to reserve; 994 gives Google's layout.", lower_bound=0)
_ALPHABET_SIZE = flags.DEFINE_integer(
    "alphabet_size", 1000, "The most characters that get tokens; words with rarer ones are [UNK].", lower_bound=1
)
_OVERWRITE = flags.DEFINE_boolean("overwrite", False, "Replace a different vocabulary in the output directory.")


def main() -> None:
    """Reads the input, learns the vocabulary and writes it."""
    output = Path(_OUTPUT.value)
    if not _OUTPUT.value or output.is_file():
        raise InputError(f"output {_OUTPUT.value!r} is no directory; give --output=DIRECTORY, which may not exist yet")
    start = time.perf_counter()
    normalizer = Normalizer(lowercase=not _CASED.value, strip_accents=_STRIP_ACCENTS.value)
    words, num_documents = WordCounts(normalizer), 0
    for document in iterate_documents(_INPUT.value):
        num_documents += 1
        for line in document:
            words.add(line)
    learnt = learn_vocab(words.result(), normalizer, _VOCAB_SIZE.value, _ALPHABET_SIZE.value, _UNUSED.value)
    tokenizer = wordpiece_tokenizer(learnt.vocab, normalizer.lowercase, normalizer.strip_accents)
    written = _save(tokenizer, output)
    known_words = learnt.num_words - learnt.unknown_words
    print(
        f"{output / 'vocab.txt'}: {tokenizer.vocab_size:,} tokens"
        f" from {learnt.num_words:,} words in {num_documents:,} documents"
        f" ({time.perf_counter() - start:.1f} s){'' if written else '; it was there already'}\n"
        f"{learnt.num_tokens / max(known_words, 1):.2f} tokens per word;"
        f" {learnt.unknown_words / learnt.num_words:.3%} of the words are [UNK]"
    )


def _save(tokenizer: Tokenizer, output: Path) -> bool:
    """Writes the tokenizer. Returns False if the directory holds the same one.

    Raises: InputError if it holds another one, unless --overwrite.
    """
    if (output / "vocab.txt").exists() and not _OVERWRITE.value:
        if load_tokenizer(output).fingerprint == tokenizer.fingerprint:
            return False
        raise InputError(f"{output} holds a different vocabulary; choose another --output, or give --overwrite")
    tokenizer.save(output)
    return True


if __name__ == "__main__":
    cli.run(main)
