# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/tokenizer.json: hashes of what Google's tokenizer makes of every character and much text.

    python3.11 tests/reference/make_tokenizer_goldens.py --reference=bert/tokenization.py --data=data \
        --vocab=tests/fixtures --output=tests/golden/tokenizer.json

`--reference` is tokenization.py of google-research/bert, `--data` holds wikipedia_en/, udhr/ and vocab/ with the
released vocabularies. It must run under Python 3.11: the reference asks the interpreter what a letter is.
`tests/text/test_tokenizer.py` makes the same texts with the functions below.
"""

import argparse
import gzip
import hashlib
import importlib.util
import json
import random
import sys
import types
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

LINES_PER_HASH = 500
CORPORA = ("wikipedia_en/*.txt.gz", "udhr/*.txt")

# Where fuzzed text takes its characters from: one pool for each thing that normalisation treats in its own way.
_POOLS = [
    range(0x20, 0x7F),  # ASCII
    range(0x20),  # control characters, blanks among them
    range(0x80, 0x250),  # Latin
    range(0x300, 0x370),  # accents
    range(0x370, 0x600),  # Greek, Cyrillic, Armenian, Hebrew
    [0x3A3, 0x3A3, 0x3C3, 0x41, 0x61, 0x27, 0x2E, 0xAD, 0xB7, 0x345, 0x20],  # a sigma and what decides about it
    range(0x600, 0x1000),  # Arabic and the scripts of India
    range(0x1700, 0x1800),
    range(0x1E00, 0x2070),  # more Latin and Greek; punctuation, blanks and invisible characters
    [0x1715, 0x1734, 0x302E, 0x302F, 0x1D15F, 0x1D165, 0x1D16D, 0x1D16E, 0x16FF0, 0x16FF1, 0x301, 0x327],  # reordered
    range(0x2E80, 0x3400),  # kana and the like
    range(0x4E00, 0x4E80),  # Chinese
    range(0xAC00, 0xAC80),  # Hangul syllables
    range(0xF900, 0xFB50),  # compatibility forms
    range(0xFE00, 0x10000),
    range(0x10000, 0x1F700),
    range(0x2B800, 0x2B940),  # where ranges of Chinese characters meet
    range(0xE0000, 0xE0200),
    range(0xD800, 0xE000),  # half characters, which Python lets into a string
]


def character_texts() -> Iterator[str]:
    """Yields texts that hold all 1,112,064 characters between them, 64 in each."""
    for start in range(0, 0x110000, 64):
        if not 0xD800 <= start < 0xE000:
            yield " ".join(f"{chr(code)} a{chr(code)}b" for code in range(start, start + 64))


def sigma_texts() -> Iterator[str]:
    """Yields texts with a capital sigma before and after each character that may decide about its form."""
    for start in (*range(0, 0x3400, 64), *range(0xA000, 0xAC00, 64), *range(0xF900, 0x1FC00, 64), 0xE0000, 0xE0100):
        chars = map(chr, range(start, start + 64))
        yield " ".join(f"aΣ{char} {char}Σ aΣ{char}b" for char in chars)


def fuzz_texts(number: int = 20_000) -> Iterator[str]:
    """Yields random texts of 1 to 40 characters from one to four pools, the same ones on every Python."""
    generator = random.Random(20181011)
    for _ in range(number):
        pools = [_POOLS[int(generator.random() * len(_POOLS))] for _ in range(1 + int(generator.random() * 4))]
        chars = []
        for _ in range(1 + int(generator.random() * 40)):
            pool = pools[int(generator.random() * len(pools))]
            chars.append(chr(pool[int(generator.random() * len(pool))]))
        yield "".join(chars)


def corpus_lines(path: Path) -> list[str]:
    """Returns the lines of a text file, compressed or not, cut at line feeds alone."""
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8").split("\n")


def hashes(results: Iterable[list[str]], per_hash: int = LINES_PER_HASH) -> list[str]:
    """Returns the first 12 digits of the sha256 of each `per_hash` lists of words or tokens."""
    digests, pending = [], []
    for result in results:
        pending.append("\n".join([str(len(result)), *result]))
        if len(pending) == per_hash:
            digests.append(pending)
            pending = []
    digests.append(pending)
    return [hashlib.sha256("\n".join(part).encode("utf-8", "surrogatepass")).hexdigest()[:12] for part in digests]


def load_reference(path: Path) -> Any:
    """Returns Google's module; of TensorFlow and six it needs but a way to open files and one constant."""
    tensorflow, six = types.ModuleType("tensorflow"), types.ModuleType("six")
    tensorflow.gfile = types.SimpleNamespace(  # type: ignore[attr-defined]
        GFile=lambda name, mode: open(name, mode, encoding="utf-8", newline="\n")
    )
    six.PY3, six.PY2 = True, False  # type: ignore[attr-defined]
    sys.modules.update(tensorflow=tensorflow, six=six)
    spec = importlib.util.spec_from_file_location("reference_tokenization", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def goldens_of(reference: Any, lowercase: bool, fixture_vocab: Path, released_vocab: Path, data: Path) -> dict:
    """Returns the hashes for one casing."""
    words = reference.BasicTokenizer(lowercase).tokenize
    own = reference.FullTokenizer(str(fixture_vocab), lowercase).tokenize
    released = reference.FullTokenizer(str(released_vocab), lowercase).tokenize
    result: dict[str, Any] = {
        "characters": hashes(map(words, character_texts())),
        "sigmas": hashes(map(words, sigma_texts())),
        "fuzz_words": hashes(map(words, fuzz_texts())),
        "fuzz_tokens": hashes(map(own, fuzz_texts())),
        "corpora": {},
    }
    for path in sorted(path for pattern in CORPORA for path in data.glob(pattern)):
        lines = corpus_lines(path)
        tokens = [released(line) for line in lines]
        result["corpora"][str(path.relative_to(data))] = {
            "lines": len(lines),
            "tokens": sum(map(len, tokens)),
            "words": hashes(map(words, lines)),
            "pieces": hashes(tokens),
        }
    return result


def main() -> None:
    """Runs the reference over all texts, which takes ten minutes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, required=True, help="tokenization.py of google-research/bert")
    parser.add_argument("--data", type=Path, required=True, help="folder of wikipedia_en/, udhr/ and vocab/")
    parser.add_argument("--vocab", type=Path, required=True, help="folder of tokenizer/ and tokenizer_cased/")
    parser.add_argument("--output", type=Path, required=True)
    flags = parser.parse_args()
    assert unicodedata.unidata_version == "14.0.0", "run this with Python 3.11"
    reference = load_reference(flags.reference)
    goldens: dict[str, Any] = {
        "made_by": {
            "reference": "google-research/bert tokenization.py",
            "sha256": hashlib.sha256(flags.reference.read_bytes()).hexdigest(),
            "python": sys.version.split()[0],
            "unicode": unicodedata.unidata_version,
        }
    }
    for name, lowercase, fixture in (("uncased", True, "tokenizer"), ("cased", False, "tokenizer_cased")):
        released = flags.data / "vocab" / f"bert-base-{name}-vocab.txt"
        goldens[name] = goldens_of(reference, lowercase, flags.vocab / fixture / "vocab.txt", released, flags.data)
    flags.output.write_text(json.dumps(goldens, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
