# SPDX-License-Identifier: Apache-2.0
"""Learns a vocabulary from text: the same text and flags give the same bytes, on every run.

    bert_jax build_vocab --input='wiki/*.txt.gz' --output=vocab --vocab_size=30522
    bert_jax build_vocab --input=text.txt --output=vocab --vocab_size=8000 --cased
    bert_jax build_vocab --input=ja.txt.gz --output=ja --vocab_size=8000 --kind=sentencepiece --cased
    bert_jax build_vocab --input='wiki/*.txt.gz' --output=bytes --vocab_size=32768 --kind=bytes --cased

Writes vocab.txt (WordPiece), spiece.model (SentencePiece) or tokenizer.json (bytes) and tokenizer_config.json into the
output directory. It needs about 1 GB of memory, however long the text is. SentencePiece and bytes learn from a random
sample of the lines, at most --sample_megabytes; SentencePiece needs about 20 times that much memory.

WordPiece is BERT's algorithm and suits text with spaces between words; in Japanese or Thai, a "word" would be all the
text between two spaces. SentencePiece does not need spaces. --character_coverage=0.9995 maps the rarest characters of
a large script to [UNK]; 1 is better for an alphabet. --kind=bytes is a byte-level BPE, as RoBERTa and ModernBERT have:
any text has tokens, and none is [UNK].
"""

import time
from collections.abc import Callable

from absl import flags

from bert_jax.data.sources.corpus import iterate_documents
from bert_jax.errors import InputError
from bert_jax.storage.locks import writing
from bert_jax.storage.places import Place, to_place
from bert_jax.text.normalize import Normalizer
from bert_jax.text.sentencepieces import LineSample, SentencePieces, learn_sentencepieces
from bert_jax.text.tokenizer import Tokenizer, wordpiece_tokenizer
from bert_jax.text.tokenizer_json import DescribedPieces, learn_bytes
from bert_jax.text.vocab import WordCounts, learn_vocab
from bert_jax.text.wordpiece import WordPiece
from bert_jax.tokenizing import load_tokenizer
from bert_jax.tools import cli
from bert_jax.tools.shared_flags import define_text_column

_INPUT = flags.DEFINE_string(
    "input", "", "Files, quoted globs, URLs or tfds:NAME, separated by commas; see prepare_corpus."
)
_TEXT_COLUMN = define_text_column()
_OUTPUT = flags.DEFINE_string(
    "output", "", "Directory to write the vocabulary and tokenizer_config.json into."
)
_BYTES = "bytes"
_KINDS = [WordPiece.kind, SentencePieces.kind, _BYTES]
_KIND = flags.DEFINE_enum("kind", WordPiece.kind, _KINDS, "Kind of vocabulary to learn.")
_VOCAB_SIZE = flags.DEFINE_integer(
    "vocab_size", 30522, "Tokens in the vocabulary, including special and unused ones."
)
_CASED = flags.DEFINE_boolean(
    "cased", False, "Keep capital letters and accents; otherwise text is lower-cased."
)
_STRIP_ACCENTS = flags.DEFINE_boolean(
    "strip_accents",
    None,
    "Whether to strip accents; by default, only WordPiece without --cased strips them.",
)
_UNUSED = flags.DEFINE_integer(
    "unused", 0, "[unused0].. tokens to reserve; 994 gives Google's layout.", lower_bound=0
)
_ALPHABET_SIZE = flags.DEFINE_integer(
    "alphabet_size",
    1000,
    "WordPiece: maximum characters in the alphabet; words with others are [UNK].",
    lower_bound=1,
)
_MODEL_TYPE = flags.DEFINE_enum(
    "model_type", "unigram", ["unigram", "bpe"], "SentencePiece: type of the model."
)
_COVERAGE = flags.DEFINE_float(
    "character_coverage",
    0.9995,
    "SentencePiece: share of the text's characters that the vocabulary covers.",
    0.98,
    1.0,
)
_SAMPLE = flags.DEFINE_integer(
    "sample_megabytes",
    40,
    "SentencePiece, bytes: maximum megabytes of text to learn from, in randomly chosen lines.",
    1,
    2000,
)
_OVERWRITE = flags.DEFINE_boolean(
    "overwrite", False, "Replace a different vocabulary in the output directory."
)

_ONLY = (  # flags that not every kind has
    (_ALPHABET_SIZE, (WordPiece.kind,)),
    (_MODEL_TYPE, (SentencePieces.kind,)),
    (_COVERAGE, (SentencePieces.kind,)),
    (_SAMPLE, (SentencePieces.kind, _BYTES)),
)


def main() -> None:
    """Reads the input, learns the vocabulary and writes it."""
    cli.check_given(_INPUT, _OUTPUT)
    output = to_place(_OUTPUT.value)
    if output.is_file():
        raise InputError(
            f"output {_OUTPUT.value!r} is not a directory; give --output=DIRECTORY, a new one"
        )
    for flag, kinds in _ONLY:
        if _KIND.value not in kinds and flag.present:
            raise InputError(
                f"--{flag.name} is for --kind={kinds[0]}, not for {_KIND.value}; leave it out"
            )
    start = time.perf_counter()
    tokenizer, source, fit = (
        _learn_wordpiece() if _KIND.value == WordPiece.kind else _learn_from_sample()
    )
    written = _save(tokenizer, output)
    print(
        f"{output / tokenizer.pieces.file_name}: {tokenizer.vocab_size:,} tokens from {source}"
        f" ({time.perf_counter() - start:.1f} s){'' if written else '; it was there already'}\n{fit}"
    )


def _add_lines(add: Callable[[str], None]) -> int:
    """Adds every line of the input, and returns the number of its documents."""
    num_documents = 0
    for document in iterate_documents(_INPUT.value, _TEXT_COLUMN.value):
        num_documents += 1
        for line in document:
            add(line)
    return num_documents


def _learn_wordpiece() -> tuple[Tokenizer, str, str]:
    """Returns the tokenizer, a description of its text, and how well it fits the text."""
    normalizer = Normalizer(lowercase=not _CASED.value, strip_accents=_STRIP_ACCENTS.value)
    words = WordCounts(normalizer)
    num_documents = _add_lines(words.add)
    learnt = learn_vocab(
        words.result(), normalizer, _VOCAB_SIZE.value, _ALPHABET_SIZE.value, _UNUSED.value
    )
    known_words = learnt.num_words - learnt.unknown_words
    return (
        wordpiece_tokenizer(learnt.vocab, normalizer.lowercase, normalizer.strip_accents),
        f"{learnt.num_words:,} words in {num_documents:,} documents",
        f"{learnt.num_tokens / max(known_words, 1):.2f} tokens per word,"
        f" {learnt.num_characters / max(learnt.num_tokens, 1):.2f} characters per token;"
        f" {learnt.unknown_words / learnt.num_words:.3%} of the words are [UNK]",
    )


def _learn_from_sample() -> tuple[Tokenizer, str, str]:
    """Returns the tokenizer, a description of its text, and how well it fits the text."""
    sample = LineSample(_SAMPLE.value * 1_000_000)
    num_documents = _add_lines(sample.add)
    lines = sample.lines()
    options = {
        "lowercase": not _CASED.value,
        "strip_accents": bool(_STRIP_ACCENTS.value),
        "num_unused": _UNUSED.value,
    }
    if _KIND.value == _BYTES:
        pieces = learn_bytes(lines, _VOCAB_SIZE.value, **options)
    else:
        options["character_coverage"] = _COVERAGE.value
        pieces = learn_sentencepieces(lines, _VOCAB_SIZE.value, _MODEL_TYPE.value, **options)
    tokenizer = Tokenizer(pieces)
    num_characters = num_tokens = num_unknown = 0
    for line in lines:
        ids = tokenizer.encode(line)
        num_characters += sum(map(len, line.split()))
        num_tokens += len(ids)
        num_unknown += ids.count(tokenizer.unk_id)
    return (
        tokenizer,
        f"{len(lines):,} of {sample.num_lines:,} lines in {num_documents:,} documents",
        f"{num_characters / max(num_tokens, 1):.2f} characters per token;"
        f" {num_unknown / max(num_tokens, 1):.3%} of the tokens are [UNK]",
    )


def _save(tokenizer: Tokenizer, output: Place) -> bool:
    """Writes the tokenizer. Returns False if the directory holds the same one.

    Raises: InputError if it holds another one, unless --overwrite, and if another command is writing there.
    """
    with writing(output, inside=True):
        existing = [
            path
            for kind in (WordPiece, SentencePieces, DescribedPieces)
            if (path := output / kind.file_name).exists()
        ]
        if existing and not _OVERWRITE.value:
            if load_tokenizer(output).fingerprint == tokenizer.fingerprint:
                return False
            raise InputError(
                f"{output} holds a different vocabulary; choose another --output, or give --overwrite"
            )
        # First: a kill in between leaves two vocabularies, and not none.
        tokenizer.save(output)
        for path in existing:
            if path.name != tokenizer.pieces.file_name:
                path.unlink()  # of another kind
        return True


if __name__ == "__main__":
    cli.run(main)
