# SPDX-License-Identifier: Apache-2.0
"""The record of prepared text in a manifest, and its summary for people: counts, and warnings with their figures."""

from collections.abc import Iterator, Sequence

import numpy as np

from bert_jax.data import pieces
from bert_jax.data.processes import say
from bert_jax.storage.files import JsonObject

MANY_COPIES = 0.1  # share of copied documents above which a warning is printed
MANY_UNKNOWN = 0.1  # share of tokens that are [UNK]
MANY_RANDOM = 0.9  # share of next sentences that are random
# share of tokens that are in no row; of English in rows of 128 it is 9 % after one pass
MANY_DROPPED = 0.15


def describe_splits(
    row_length: int, homes: Sequence[str], made: list[JsonObject]
) -> dict[str, JsonObject]:
    """Returns the manifest's record of each split: the sums over its shards, and the shards.

    `homes` are the splits of the shards that `made` describes.
    """
    splits = {}
    for split in ("train", "heldout"):
        own = [result for home, result in zip(homes, made, strict=True) if home == split]
        totals = {
            name: sum(result[name] for result in own)
            for name in ("documents", *pieces.COUNTED, "sequences")
        }
        random_next, filled, unknown, dropped = (
            sum(result[name] for result in own)
            for name in ("random_next", "filled", "unknown", "dropped")
        )
        num_rows = sum(result["file"]["rows"] for result in own)
        splits[split] = {
            **totals,
            "rows": num_rows,
            "fill": _share(filled, num_rows * row_length),  # of positions with a token
            "random_next_share": _share(random_next, totals["sequences"]),
            "unknown_share": _share(unknown, totals["tokens"]),
            "dropped_share": _share(dropped, totals["tokens"]),
            "shards": [result["file"] for result in own],
        }
    return splits


def describe_text(
    parts: np.ndarray, num_lines: int, num_different_lines: int, passage: int
) -> JsonObject:
    """Returns the manifest's record of all text.

    It has the numbers and shares of copied documents and lines; the number of lines at which the splitter failed, if
    any; and the approximate tokens of passages, if documents were cut. `parts` [D] are records of `pieces.DOCUMENT`.
    """
    documents = pieces.unite(parts, 0)
    num_documents = len(documents) - len(np.unique(documents["key"]))
    num_copies = num_lines - num_different_lines
    record: JsonObject = {
        "exact_copies": {
            "documents": num_documents,
            "documents_share": _share(num_documents, len(documents)),
            "lines": num_copies,
            "lines_share": _share(num_copies, num_lines),
        }
    }
    if num_failed := int(documents["failed"].sum()):
        record["lines_not_split"] = num_failed
    if passage:
        record["passage_tokens"] = passage * pieces.PART_TOKENS
    return record


def _share(part: float, whole: float) -> float:
    return round(part / max(1, whole), 4)


def say_summary(manifest: JsonObject, seconds: float) -> None:
    """Prints the contents of a data set, the time that preparing it took, and warnings."""
    splits = manifest["splits"]
    megabytes = sum(split["text_bytes"] for split in splits.values()) / 1e6
    if "passage_tokens" in manifest:
        say(
            f"long documents were cut where sentences end, into passages of about {manifest['passage_tokens']:,} "
            "tokens, which count as documents: whole ones are too few, or too long to hold out some of them"
        )
    for name, split in splits.items():
        say(
            f"{name}: {split['documents']:,} documents, {split['sentences']:,} sentences, {split['tokens']:,} tokens "
            f"-> {split['sequences']:,} sequences ({split['random_next_share']:.1%} with a random next sentence) in "
            f"{split['rows']:,} rows ({split['fill']:.1%} full), {len(split['shards'])} shards; "
            f"{split['dropped_share']:.1%} of the tokens are in no row"
        )
    copies = manifest["exact_copies"]
    say(
        f"exact copies: {copies['documents']:,} documents ({copies['documents_share']:.1%}) and {copies['lines']:,} "
        f"lines ({copies['lines_share']:.1%})"
    )
    for warning in _warnings(manifest):
        say(f"warning: {warning}")
    say(
        f"{megabytes:.1f} MB of text in {seconds:.0f} s ({megabytes / max(seconds, 1e-9):.1f} MB/s)"
    )


def _warnings(manifest: JsonObject) -> Iterator[str]:
    """Yields a warning for each figure that is probably not intended."""
    options = manifest["identity"]["options"]
    train = manifest["splits"]["train"]
    if (share := manifest["exact_copies"]["documents_share"]) > MANY_COPIES:
        yield (
            f"{share:.0%} of the documents are exact copies of others, more than {MANY_COPIES:.0%}: the model learns "
            "them by heart and its loss sticks; is a text among the inputs twice? Remove the copies and prepare again"
        )
    heldout = manifest["splits"]["heldout"]["tokens"]
    if (share := _share(heldout, heldout + train["tokens"])) > 2 * options["holdout_rate"]:
        yield (
            f"{share:.1%} of tokens are held out, more than twice --holdout_rate={options['holdout_rate']}: "
            "documents are few, or some are far longer; add text, or hold out none (--holdout_rate=0)"
        )
    if (share := train["unknown_share"]) > MANY_UNKNOWN:
        yield (
            f"{share:.1%} of the tokens are [UNK], more than {MANY_UNKNOWN:.0%}: the vocabulary does not fit the text; "
            "make one with build_vocab, or choose another --tokenizer"
        )
    if (share := train["random_next_share"]) > MANY_RANDOM:
        yield (
            f"{share:.1%} of the next sentences are random, more than {MANY_RANDOM:.0%}, since most documents have one "
            "sentence: nothing is learnt from them; put blank lines between documents only, or use --next_sentence=none"
        )
    if (share := train["dropped_share"]) > MANY_DROPPED:
        yield (
            f"{share:.1%} of the tokens are in no row, more than {MANY_DROPPED:.0%}, since sentences are cut to the "
            f"length of a row: use more than --max_seq_length={options['max_seq_length']}, more --duplicates, or "
            "--next_sentence=none, which drops nothing"
        )
    if count := manifest.get("lines_not_split", 0):
        yield f"the sentence splitter failed at {count:,} lines; each of them is one sentence"
