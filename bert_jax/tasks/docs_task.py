# SPDX-License-Identifier: Apache-2.0
"""A task made of the documentation inside Python: which area of the library does a docstring describe?

It needs no files and no annotators: the label of a docstring is the area of its module.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from bert_jax.data.sources import python_docs
from bert_jax.errors import InputError
from bert_jax.storage.places import Place
from bert_jax.storage.writing import new_directory

# The modules and packages of each area. Python has more, which belong to no area or to several.
AREAS: dict[str, str] = {
    "concurrency": """asyncio multiprocessing threading concurrent queue subprocess sched signal _threading_local
        contextvars selectors""",
    "files": """tarfile zipfile shutil pathlib gzip bz2 lzma io _pyio tempfile fileinput filecmp glob fnmatch
        genericpath posixpath ntpath os stat linecache zipapp shelve dbm _compression wave sunau aifc chunk compression
        netrc""",
    "graphics": "tkinter turtle curses colorsys",
    "mail": "email mailbox mailcap smtplib smtpd imaplib poplib nntplib quopri",
    "network": """http urllib xmlrpc wsgiref socketserver socket ssl ftplib telnetlib ipaddress webbrowser cgi asyncore
        asynchat nturl2path""",
    "numbers": """_pydecimal decimal fractions statistics random numbers datetime _pydatetime calendar zoneinfo heapq
        bisect _strptime _pylong secrets""",
    "testing": "unittest doctest pdb bdb trace traceback tracemalloc timeit profile cProfile pstats cgitb profiling",
    "text": """xml html json csv configparser plistlib tomllib difflib textwrap re string codecs encodings shlex gettext
        stringprep locale pprint reprlib""",
}
SPLITS = {"dev": 36, "test": 16, "train": 48}  # examples of each area, at most
_MOST_OF_A_MODULE = 15  # examples, so that no long one is an area by itself
_FEWEST_WORDS, _MOST_WORDS = 8, 40


class Described(NamedTuple):
    """A docstring, the area of the library it belongs to, and its module."""

    text: str
    area: str
    module: str


def make_docs_task(directory: Place, sizes: dict[str, int] | None = None) -> dict[str, list[Described]]:
    """Writes train.tsv, dev.tsv and test.tsv with columns text and area, and returns the examples of each split.

    Args:
      directory: must not exist.
      sizes: the maximum number of examples of each area in a split; `SPLITS` if None.
    Raises: InputError if the directory exists or this Python has no documentation.
    """
    splits = split_by_module(read_described(), sizes or SPLITS)
    if not all(splits.values()):
        raise InputError("this Python comes without the docstrings of its library; use one that has its .py files")
    with new_directory(directory) as temporary:
        for name, examples in splits.items():
            lines = ["text\tarea", *(f"{example.text}\t{example.area}" for example in examples)]
            (temporary / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return splits


def read_described() -> Iterator[Described]:
    """Yields docstrings of modules with an area, without duplicates and without very short ones."""
    area_of = {module: area for area, modules in AREAS.items() for module in modules.split()}
    seen = set()
    for module, docstrings in python_docs.read_modules():
        area = area_of.get(module.partition(".")[0])
        for paragraphs in docstrings if area else ():
            words = " ".join(paragraphs).split()[:_MOST_WORDS]
            text = " ".join(words)
            if area and len(words) >= _FEWEST_WORDS and text not in seen:
                seen.add(text)
                yield Described(text, area, module)


def split_by_module(examples: Iterable[Described], sizes: dict[str, int]) -> dict[str, list[Described]]:
    """Returns the examples of each split; every module is in exactly one split, determined by its name.

    Within each area, modules are ordered by a hash of their names. They fill the splits in the order of `sizes`, whole
    modules at a time; leftover modules go to no split.
    """
    modules: dict[str, dict[str, list[Described]]] = {}
    for example in examples:
        modules.setdefault(example.area, {}).setdefault(example.module, []).append(example)
    splits: dict[str, list[Described]] = {name: [] for name in sizes}
    for members in modules.values():
        remaining = iter(sorted(members, key=_order))
        for name, size in sizes.items():
            chosen: list[Described] = []
            while len(chosen) < size and (module := next(remaining, "")):
                chosen += sorted(members[module], key=lambda example: _order(example.text))[:_MOST_OF_A_MODULE]
            splits[name] += chosen[:size]
    return {name: sorted(chosen, key=lambda example: _order(example.text)) for name, chosen in splits.items()}


def _order(text: str) -> str:
    """Returns a hash of the text as a sort key, for an order that looks random and is the same everywhere."""
    return hashlib.sha256(text.encode()).hexdigest()
