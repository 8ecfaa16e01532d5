# SPDX-License-Identifier: Apache-2.0
"""Minimal pairs, in which a model should prefer the good sentence to the bad one: files, accuracies, tables.

Source: Warstadt et al. 2020 (BLiMP); Huebner et al. 2021 (Zorro).
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert_jax.errors import InputError
from bert_jax.tasks.json_values import parse_json
from bert_jax.tasks.readers import read_lines

_Z = 1.959963984540054  # of the normal distribution, for 95 %
INTERVALS = (
    "95 %: of a paradigm Wilson's; of a mean of paradigms Wilson's of each put together (MOVER)"
)
_JSON_NAMES = ("UID", "linguistics_term", "sentence_good", "sentence_bad")
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
    files = (
        sorted(file for file in root.glob("*.txt*") if file.name.endswith(_NAMES))
        if root.is_dir()
        else [root]
    )
    if not files:
        raise InputError(f"{path} has no .txt file; give Zorro's directory, or a file of pairs")
    if twice := [file for file in files if sum(_stem(file) == _stem(other) for other in files) > 1]:
        raise InputError(
            f"{path} has {twice[0].name} and {twice[1].name}, the same paradigm twice; remove one of them"
        )
    if limit < 0:
        raise InputError(f"limit {limit} is negative; 0 takes all pairs")
    pairs, seen = [], {}
    for file in files:
        for pair in _read_file(file):
            seen[pair.paradigm] = seen.get(pair.paradigm, 0) + 1
            if not limit or seen[pair.paradigm] <= limit:
                pairs.append(pair)
    if not pairs:
        raise InputError(
            f"{path} holds no pair of sentences; give BLiMP's JSON lines, Zorro's files or two columns"
        )
    return pairs


def _read_file(file: Path) -> Iterator[Pair]:
    lines = _read_lines(file)
    first = next((line for _, line in lines if line.strip()), "")
    if first.lstrip().startswith("{"):
        return _json_pairs(lines)
    return _column_pairs(file, lines) if "\t" in first else _zorro_pairs(file, lines)


def _read_lines(file: Path) -> list[tuple[str, str]]:
    """Returns the position and the text of each line, without blank lines at the end."""
    lines = [(f"{file}:{number}", line) for number, line in enumerate(read_lines(str(file)), 1)]
    while lines and not lines[-1][1].strip():
        lines.pop()
    return lines


def _json_pairs(lines: list[tuple[str, str]]) -> Iterator[Pair]:
    for where, line in lines:
        if not line.strip():
            continue
        value = parse_json(line, where)
        if not isinstance(value, dict):
            raise InputError(f"{where} is not a JSON object; write one a line, as BLiMP has them")
        for name in _JSON_NAMES:
            if not isinstance(value.get(name), str):
                raise InputError(
                    f"{where} has no text named {name!r}; a line of BLiMP has {', '.join(_JSON_NAMES)}"
                )
        phenomenon: str = value["linguistics_term"]
        phenomenon = _COUNTED_TO.get(phenomenon, phenomenon)
        yield _checked(
            Pair(value["sentence_good"], value["sentence_bad"], value["UID"], phenomenon, where)
        )


def _column_pairs(file: Path, lines: list[tuple[str, str]]) -> Iterator[Pair]:
    name = _stem(file)
    for number, (where, line) in enumerate((where, line) for where, line in lines if line.strip()):
        columns = line.split("\t")
        if number == 0 and [column.strip().lower() for column in columns] in _HEADERS:
            continue
        if len(columns) != 2:
            raise InputError(
                f"{where} has {len(columns)} columns; write the good sentence, a tab and the bad one"
            )
        yield _checked(Pair(columns[0], columns[1], name, name, where))


def _zorro_pairs(file: Path, lines: list[tuple[str, str]]) -> Iterator[Pair]:
    name = _stem(file)
    phenomenon = name.rpartition("-")[0] or name
    if len(lines) % 2:
        raise InputError(
            f"{lines[-1][0]} is a sentence without a partner, as the file has {len(lines)} lines; odd lines are bad "
            "sentences, and the line after each is the good one"
        )
    for (where, bad), (_, good) in zip(lines[::2], lines[1::2], strict=True):
        yield _checked(Pair(good, bad, name, phenomenon, where))


def _stem(file: Path) -> str:
    """Returns the name of a file without .txt, .tsv, .gz and the like."""
    name = file.name
    for suffix in (".gz", ".zst", ".txt", ".tsv"):
        name = name.removesuffix(suffix)
    return name


def _checked(pair: Pair) -> Pair:
    for text in (pair.good, pair.bad):
        if not text.strip():
            raise InputError(
                f"{pair.where}: a sentence of the pair is empty; write it, or remove the pair"
            )
    return pair._replace(good=pair.good.strip(), bad=pair.bad.strip())


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

    Raises: InputError if a paradigm is of two phenomena, or a score is not finite.
    """
    good, bad = np.asarray(good, np.float64), np.asarray(bad, np.float64)
    outcomes: dict[str, list[int]] = {}
    phenomenon_of: dict[str, str] = {}
    for index, pair in enumerate(pairs):
        if not (math.isfinite(good[index]) and math.isfinite(bad[index])):
            raise InputError(
                f"{pair.where}: a score is not finite; the model's parameters are not those of a trained one"
            )
        if phenomenon_of.setdefault(pair.paradigm, pair.phenomenon) != pair.phenomenon:
            raise InputError(
                f"{pair.where}: paradigm {pair.paradigm!r} is of phenomenon {pair.phenomenon!r}, and before it was of "
                f"{phenomenon_of[pair.paradigm]!r}; give paradigms different names"
            )
        outcomes.setdefault(pair.paradigm, []).append(int(np.sign(good[index] - bad[index])))
    paradigms = []
    for name in sorted(outcomes, key=lambda name: (phenomenon_of[name], name)):
        total, right = len(outcomes[name]), outcomes[name].count(1)
        counts = total, right, outcomes[name].count(0), right / total, wilson(right, total)
        paradigms.append(Accuracy(name, phenomenon_of[name], *counts))
    by_phenomenon: dict[str, list[Accuracy]] = {}
    for paradigm in paradigms:
        by_phenomenon.setdefault(paradigm.phenomenon, []).append(paradigm)
    phenomena = [_mean(name, name, members) for name, members in by_phenomenon.items()]
    return AccuracyTable(paradigms, phenomena, _mean(_OVERALL, _OVERALL, paradigms))


def wilson(right: int, total: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of a share. Source: Wilson 1927."""
    share, spread = right / total, _Z * _Z / total
    middle = (share + spread / 2) / (1 + spread)
    half = _Z / (1 + spread) * math.sqrt(share * (1 - share) / total + spread / (4 * total))
    return max(0.0, middle - half), min(1.0, middle + half)


def _mean(name: str, phenomenon: str, members: Sequence[Accuracy]) -> Accuracy:
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
        name,
        phenomenon,
        sum(member.pairs for member in members),
        sum(member.right for member in members),
        sum(member.ties for member in members),
        mean,
        (mean - float(below), mean + float(above)),
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
