# SPDX-License-Identifier: Apache-2.0
"""Minimal pairs, in which a model should prefer the good sentence to the bad one: files, accuracies, tables.

Source: Warstadt et al. 2020 (BLiMP); Huebner et al. 2021 (Zorro).
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert_jax.errors import InputError
from bert_jax.tasks.readers import numbered_lines, read_json_lines, read_lines

_Z = 1.959963984540054  # of the normal distribution, for 95 %
INTERVALS = (
    "95 %: of a paradigm Wilson's; of a mean of paradigms Wilson's of each put together (MOVER)"
)
_JSON_NAMES = ("sentence_good", "sentence_bad", "UID", "linguistics_term")
# as the paper's table has it, and BLiMP's files do not
_COUNTED_TO = {"s-selection": "argument_structure"}
_HEADERS = (["good", "bad"], ["sentence_good", "sentence_bad"])  # in any case
_NAMES = (".txt", ".txt.gz", ".txt.zst")  # of the files of a directory
_OVERALL = "overall"


class Pair(NamedTuple):
    """Two sentences that differ only in the part that makes one of them ungrammatical."""

    good: str
    bad: str
    paradigm: str  # the contrast that the pair tests
    phenomenon: str  # the topic of several paradigms
    where: str  # its file and line, for messages


def read_pairs(path: str, limit: int = 0) -> list[Pair]:
    """Returns the pairs of a file, or of all .txt files of a directory; of each paradigm the first `limit`, if not 0.

    Files are told apart by their first line, and may be compressed. A line of JSON is an object as BLiMP has them; tabs
    part a good from a bad sentence. Else odd lines are bad sentences, and the line after each is the good one, as in
    Zorro, where the name of the file is phenomenon-paradigm.

    Raises: InputError if there is no pair, or with the line of one that cannot be read.
    """
    root = Path(path)
    files = [root]
    if root.is_dir():
        files = sorted(file for file in root.glob("*.txt*") if file.name.endswith(_NAMES))
    stems = [_stem(file) for file in files]
    for stem in stems:
        if stems.count(stem) > 1:
            raise InputError(f"{path} has two files of the paradigm {stem}; remove one of them")
    pairs: list[Pair] = []
    counts: Counter[str] = Counter()
    for pair in (pair for file in files for pair in _read_file(file)):
        pair = pair._replace(good=pair.good.strip(), bad=pair.bad.strip())
        if not pair.good or not pair.bad:
            raise InputError(
                f"{pair.where}: a sentence of the pair is empty; write it, or remove the pair"
            )
        counts[pair.paradigm] += 1
        if not limit or counts[pair.paradigm] <= limit:
            pairs.append(pair)
    if not pairs:
        raise InputError(
            f"{path} holds no pair of sentences; give BLiMP's JSON lines, Zorro's .txt files or two columns"
        )
    return pairs


def _read_file(file: Path) -> Iterator[Pair]:
    place = str(file)
    name = _stem(file)
    lines = numbered_lines(place)
    first = lines[0][1] if lines else ""
    if first.lstrip().startswith("{"):
        for record in read_json_lines(place):
            good, bad, paradigm, term = (record.get_as(key, str) for key in _JSON_NAMES)
            yield Pair(
                good=good,
                bad=bad,
                paradigm=paradigm,
                phenomenon=_COUNTED_TO.get(term, term),
                where=record.where,
            )
    elif "\t" in first:
        header = [column.strip().lower() for column in first.split("\t")] in _HEADERS
        for where, line in lines[header:]:
            good, tab, bad = line.partition("\t")
            if not tab or "\t" in bad:
                raise InputError(
                    f"{where} is not two columns; write the good sentence, a tab and the bad one"
                )
            yield Pair(
                good=good,
                bad=bad,
                paradigm=name,
                phenomenon=name,
                where=where,
            )
    else:
        sentences = read_lines(place)
        while sentences and not sentences[-1].strip():
            sentences.pop()
        if len(sentences) % 2:
            raise InputError(
                f"{place}:{len(sentences)} is a sentence without a partner; odd lines are bad sentences, and the line "
                "after each is the good one"
            )
        for at in range(0, len(sentences), 2):
            bad, good = sentences[at : at + 2]
            yield Pair(
                good=good,
                bad=bad,
                paradigm=name,
                phenomenon=name.rpartition("-")[0] or name,
                where=f"{place}:{at + 1}",
            )


def _stem(file: Path) -> str:
    """Returns the name of a file without .txt, .tsv, .gz and the like."""
    return re.sub(r"(\.(txt|tsv|gz|zst))+$", "", file.name)


# Accuracies


class Accuracy(NamedTuple):
    """How often the good sentence was the likelier one."""

    name: str  # of a paradigm, a phenomenon, or "overall"
    phenomenon: str
    pairs: int
    right: int
    ties: int  # pairs with equal scores, which are wrong
    accuracy: float
    interval: tuple[float, float]  # see `INTERVALS`


class AccuracyTable(NamedTuple):
    """Accuracies by paradigm and by phenomenon; those of several paradigms are the means of theirs."""

    paradigms: list[Accuracy]
    phenomena: list[Accuracy]
    overall: Accuracy

    def as_json(self) -> dict[str, object]:
        """Returns the table as JSON values."""
        paradigms = [accuracy._asdict() for accuracy in self.paradigms]
        phenomena = [accuracy._asdict() for accuracy in self.phenomena]
        return {"overall": self.overall._asdict(), "phenomena": phenomena, "paradigms": paradigms}


def accuracies(
    pairs: Sequence[Pair],
    good: Sequence[float] | np.ndarray,
    bad: Sequence[float] | np.ndarray,
) -> AccuracyTable:
    """Returns how often the score of the good sentence is above that of the bad one; a tie is wrong.

    `good` and `bad` are the scores of the sentences of each pair.
    """
    outcomes: dict[tuple[str, str], list[int]] = {}  # of each phenomenon and paradigm
    for pair, difference in zip(pairs, np.subtract(good, bad), strict=True):
        outcome = outcomes.setdefault((pair.phenomenon, pair.paradigm), [])
        outcome.append(int(np.sign(difference)))
    paradigms = []
    by_phenomenon: dict[str, list[Accuracy]] = {}
    for (phenomenon, name), found in sorted(outcomes.items()):
        right = found.count(1)
        paradigm = Accuracy(
            name=name,
            phenomenon=phenomenon,
            pairs=len(found),
            right=right,
            ties=found.count(0),
            accuracy=right / len(found),
            interval=wilson(right, len(found)),
        )
        paradigms.append(paradigm)
        by_phenomenon.setdefault(phenomenon, []).append(paradigm)
    phenomena = [_mean(name, members) for name, members in by_phenomenon.items()]
    return AccuracyTable(
        paradigms=paradigms,
        phenomena=phenomena,
        overall=_mean(_OVERALL, paradigms),
    )


def wilson(right: int, total: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of a share. Source: Wilson 1927."""
    share = right / total
    spread = _Z * _Z / total
    middle = (share + spread / 2) / (1 + spread)
    half = _Z / (1 + spread) * math.sqrt(share * (1 - share) / total + spread / (4 * total))
    return max(0.0, middle - half), min(1.0, middle + half)


def _mean(name: str, members: Sequence[Accuracy]) -> Accuracy:
    """Returns the mean of the accuracies of paradigms, all with equal weight, however many pairs they have.

    Source of the interval: Zou and Donner 2008, of a sum of independent estimates.
    """
    shares = np.array([member.accuracy for member in members])
    bounds = np.array([member.interval for member in members])
    # As far from the mean as Wilson's bounds together, their distances being independent; it does not shrink to nothing
    # where every paradigm is all right or all wrong, as a bootstrap does.
    below, above = np.sqrt(np.sum((bounds - shares[:, None]) ** 2, axis=0)) / len(members)
    mean = float(shares.mean())
    return Accuracy(
        name=name,
        phenomenon=name,
        pairs=sum(member.pairs for member in members),
        right=sum(member.right for member in members),
        ties=sum(member.ties for member in members),
        accuracy=mean,
        interval=(mean - float(below), mean + float(above)),
    )


def format_table(table: AccuracyTable) -> list[str]:
    """Returns lines for people: the mean of each phenomenon, then that of all paradigms, in per cent."""
    width = max(len("phenomenon"), *(len(row.name) for row in table.phenomena))
    lines = [
        f"{'phenomenon':{width}}  {'pairs':>7}  {'ties':>5}  {'right %':>7}  {'95 % interval':>13}"
    ]
    for row in (*table.phenomena, table.overall):
        low, high = (100 * bound for bound in row.interval)
        counts = f"{row.pairs:7,}  {row.ties:5,}  {100 * row.accuracy:7.1f}"
        lines.append(f"{row.name:{width}}  {counts}  {low:5.1f} - {high:5.1f}")
    return lines
