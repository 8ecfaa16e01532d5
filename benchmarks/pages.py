# SPDX-License-Identifier: Apache-2.0
"""Pages whose figures come from records: Markdown with blocks that say what stands in them.

    <!-- draw table                         a block: its kind, and TOML that says what it shows
    record = "table5"
    rows = [["bert", "NSP + MLM"], ["no_nsp", "No NSP"]]
    columns = [{metric = "task:sst2", label = "SST-2", paper = "sst2"}]
    -->
    | what is drawn |                       everything up to the next line is drawn anew each time
    <!-- end -->

and within a line `<!-- value RECORD PATH FORMAT -->1.7e-05<!-- end -->`, a number of a JSON file, such as
`google_run pretraining.last_loss .3f`, or of `paper.toml` by the name `paper`. Kinds of blocks: `table`, `differences`,
`pairs`, `runs` (see `tables`), `learning` (see `learning`), `curves` (see `pictures`), `steps` and `peers` (see
`gpu_records`), `plans` and `speed` (see `speed_tables`). A page is its own template: what is around the blocks is
written by hand. `templates/gpu.md` is one to begin with.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

from benchmarks import gpu_records, tables
from benchmarks.collecting import read_json, read_record
from benchmarks.learning import learning_of, learning_table
from benchmarks.speed_tables import plans_table, speed_table
from bert_jax.errors import InputError, shown
from bert_jax.settings.rules import suggest

# What is drawn has no opening in it: a block without its end does not reach to the end of another.
_BLOCK = re.compile(
    r"(<!-- draw (\w+)\n((?:(?!<!--).)*?)-->\n)((?:(?!<!-- (?:draw|value)\b).)*?)(<!-- end -->)", re.DOTALL
)
_VALUE = re.compile(r"(<!-- value (\S+) (\S+) (\S+) -->)([^\n]*?)(<!-- end -->)")
_OPENING = re.compile(r"<!-- (draw|value)\b")
_KEYS = {
    "table": "record rows columns paper by",
    "differences": "record rows columns paper by baseline",
    "pairs": "record rows pairs paradigms",
    "runs": "record rows",
    "learning": "record group seed file pairs evaluation metric task title labels",
    "curves": "record rows file metric title",
    "steps": "record rows",
    "peers": "record rows",
    "plans": "record rows",
    "speed": "record rows contenders against metric",
}
_OPTIONAL = {"paper", "by", "paradigms", "title", "task", "seed", "labels"}
_TYPES: dict[str, type] = {"paradigms": bool, "seed": int} | dict.fromkeys(
    ("rows", "columns", "labels", "contenders", "against"), list
)  # of other keys str
_BY = {"table": ("pretraining", "finetuning"), "differences": ("pretraining", "finetuning", "examples")}


class Sources:
    """Where records, and the paper's figures, are."""

    def __init__(self, records: Path, paper: Path) -> None:
        self.records = records
        self._paper = tomllib.loads(paper.read_text(encoding="utf-8"))

    def path(self, name: str) -> Path:
        """Returns the file of a record, NAME.json or NAME.json.gz. Raises: InputError if there is none."""
        for path in (self.records / f"{name}.json", self.records / f"{name}.json.gz"):
            if path.is_file():
                return path
        known = [path.name.partition(".")[0] for path in self.records.glob("*.json*")]
        raise InputError(f"there is no record {name!r} in {self.records}{suggest(name, known)}; collect it first")

    def paper(self, name: str) -> dict[str, Any]:
        """Returns a table of the paper, {row: {column: figure}}; of "" an empty one."""
        if name and name not in self._paper:
            raise InputError(f"there is no table {name!r} of the paper; there are {', '.join(self._paper)}")
        return self._paper.get(name, {})

    def value(self, name: str, path: str) -> Any:
        """Returns what a record has at a path of keys with points between; "paper" is the file of the paper's figures.

        Raises: InputError if it has nothing there.
        """
        value: Any = self._paper if name == "paper" else read_json(self.path(name))
        for key in path.split("."):
            if not isinstance(value, dict) or key not in value:
                raise InputError(f"record {name} has no {path}: there is no {key!r}")
            value = value[key]
        return value


def draw_page(path: Path, sources: Sources, pictures: bool = True) -> str:
    """Returns a page with its blocks drawn anew, and with `pictures` writes those of its blocks beside it.

    Raises: InputError, with the page and the line, if a block asks for what there is not.
    """
    text = path.read_text(encoding="utf-8")
    asked, found = len(_OPENING.findall(text)), len(_BLOCK.findall(text)) + len(_VALUE.findall(text))
    if asked != found:
        raise InputError(f"{path} has {asked} blocks, and {found} of them are whole; end each with <!-- end -->")

    def where_is(match: re.Match[str]) -> str:
        return f"{path}:{match.string[: match.start()].count(chr(10)) + 1}"

    def block(match: re.Match[str]) -> str:
        opening, kind, spec, _, closing = match.groups()
        where = where_is(match)
        lines = _draw_block(kind, _read_spec(kind, spec, where), sources, path.parent if pictures else None, where)
        return opening + "\n".join(["", *lines, "", ""]) + closing

    def value(match: re.Match[str]) -> str:
        opening, name, place, form, _, closing = match.groups()
        try:
            number = sources.value(name, place)
        except InputError as error:
            raise InputError(f"{where_is(match)}: {error}") from None
        try:
            return opening + format(number, "" if form == "s" else form) + closing
        except (ValueError, TypeError):
            problem = f"{name} {place} is {shown(number)}, which {form!r} cannot format"
            raise InputError(f"{where_is(match)}: {problem}; change the format") from None

    return _BLOCK.sub(block, _VALUE.sub(value, text))  # values first: they keep the lines where they are


def _read_spec(kind: str, text: str, where: str) -> dict[str, Any]:
    if kind not in _KEYS:
        raise InputError(f"{where}: there is no block {kind!r}{suggest(kind, _KEYS)}; blocks: {', '.join(_KEYS)}")
    try:
        spec = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{where}: the block is no TOML: {error}") from None
    keys = set(_KEYS[kind].split())
    if wrong := [key for key in spec if key not in keys]:
        raise InputError(
            f"{where}: {kind} has no {wrong[0]!r}{suggest(wrong[0], keys)}; it has {', '.join(sorted(keys))}"
        )
    if missing := sorted(keys - _OPTIONAL - set(spec)):
        raise InputError(f"{where}: {kind} needs {', '.join(missing)}; add it to the block")
    for key, value in spec.items():
        if problem := _wrong_value(kind, key, value):
            raise InputError(f"{where}: {key} = {shown(value)}: {problem}")
    return spec


def _wrong_value(kind: str, key: str, value: Any) -> str:
    """Returns what is wrong with what a block says, and "" if nothing is."""
    expected = _TYPES.get(key, str)
    if type(value) is not expected:
        return f"it is a {type(value).__name__}; use a {expected.__name__}"
    if key == "by" and value not in _BY[kind]:
        return f"a block {kind} goes by {' or '.join(_BY[kind])}{suggest(value, _BY[kind])}"
    if key == "labels" and not all(isinstance(each, str) for each in value):
        return "give strings"
    named = kind in ("steps", "peers", "plans", "speed")
    counts = {"rows": (2, 2) if named else (1, 3), "contenders": (2, 2), "against": (3, 3)}
    low, high = counts.get(key, (0, 0))
    for each in value if high else ():
        if not isinstance(each, list) or not low <= len(each) <= high or not all(isinstance(one, str) for one in each):
            return f"{shown(each)} is no list of {low if low == high else f'{low} to {high}'} strings"
    return ""


def _draw_block(kind: str, spec: dict[str, Any], sources: Sources, folder: Path | None, where: str) -> list[str]:
    try:
        if kind in ("plans", "speed"):
            found = read_json(sources.path(spec["record"]))
            if kind == "plans":
                return plans_table(found, spec["rows"])
            return speed_table(found, spec["rows"], spec["contenders"], spec["against"], spec["metric"])
        if kind in ("steps", "peers"):
            draw_rows = gpu_records.step_table if kind == "steps" else gpu_records.peers_table
            return draw_rows(gpu_records.load(sources.path(spec["record"])), spec["rows"])
        rows = [tables.row_of(row) for row in spec.get("rows", [[spec.get("group", "")]])]
        groups = [row.group for row in rows]
        record = read_record(sources.path(spec["record"]))
        tables.check_groups(record, [*groups, *([spec["baseline"]] if "baseline" in spec else [])], where)
        if kind == "learning":
            found = learning_of(record, spec)
            if folder is not None:
                from benchmarks import pictures

                pictures.draw_learning(found, spec, folder / spec["file"])
            labels = spec.get("labels", ["masked words", spec["pairs"], f"{spec.get('task', '')}, fine-tuned"])
            return [*learning_table(found, labels), "", f"![{spec.get('title', kind)}]({spec['file']})"]
        if kind == "curves":
            if folder is not None:
                from benchmarks import pictures

                pictures.draw_curves(record, spec, folder / spec["file"])
            return [f"![{spec.get('title', kind)}]({spec['file']})"]
        if kind == "runs":
            return tables.runs_table(record, rows)
        if kind == "pairs":
            return tables.pairs_table(record, rows, spec["pairs"], spec.get("paradigms", False))
        paper, by = sources.paper(spec.get("paper", "")), spec.get("by", "pretraining")
        columns = [tables.column_of(column, paper) for column in spec["columns"]]
        if kind == "table":
            return tables.score_table(record, rows, columns, paper, by)
        return tables.difference_table(record, rows, spec["baseline"], columns, paper, by)
    except InputError as error:
        raise InputError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise InputError(
            f"{where}: record {spec['record']} has not what the block asks for ({type(error).__name__}: {error}); "
            "collect it again"
        ) from None
