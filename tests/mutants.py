# SPDX-License-Identifier: Apache-2.0
"""Mutants: small faults, put one at a time into the modules that hold results and data. Which do their tests miss?

    python tests/mutants.py [MODULE ...] [--most=40] [--seed=1] [--cases] [--tests=FILE,...]

A mutant has one operator, number, guard or result changed. It is killed if one of the module's own fast cases fails,
dies or takes too long; else it survives, and a case is missing. `KNOWN` says why a survivor is none: the code means the
same, or the number is free. The exit status is 1 if one survives that is not there. `--most=0` takes every mutant, and
`--cases` runs all cases of each, and names those that kill nothing that others do not. `--tests` names the files, below
tests/, whose cases run; so any module can be asked about.

Every mutant runs in a fork of a process that has collected the cases, in its own temporary folder. A fault outside of
functions needs the package imported anew, so it runs in a fork of one that has imported libraries only.
"""

import argparse
import ast
import collections
import contextlib
import gc
import importlib.abc
import importlib.util
import itertools
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("jax", "flax.linen", "optax", "orbax.checkpoint", "fsspec", "msgspec", "hypothesis", "matplotlib.figure")
FAST = "not slow and not reference and not network and not gpu and not tpu and not tpu_aot and not gpu_aot"
MEMORY = 12 * 2**30  # bytes; a mutant may ask for any number of them

# What holds results, then what holds data, with the test files below tests/.
MODULES: dict[str, tuple[str, ...]] = {
    "model.masking": ("model/test_masking.py",),
    "model.losses": ("model/test_losses.py",),
    "data.order": ("data/test_order.py",),
    "data.packing": ("data/test_packing.py",),
    "data.instances": ("data/test_instances.py",),
    "text.wordpiece": ("text/test_tokenizer.py", "text/test_offsets.py"),
    "tasks.scores": ("tasks/test_scores.py",),
    "tasks.squad.decode": ("tasks/squad/test_decode.py",),
    "training.optim": ("training/test_optim.py", "training/test_lamb.py"),
    "training.accumulate": ("training/test_accumulate.py",),
    "storage.resolve": ("storage/test_resolve.py", "storage/test_places.py"),
    "checkpoints.sealed": ("checkpoints/test_states.py",),
    "checkpoints.states": ("checkpoints/test_states.py",),
    "data.records": ("data/test_records.py",),
    "storage.locks": ("storage/test_locks.py",),
    "storage.leases": ("storage/test_places.py",),
    "storage.writing": ("storage/test_storage.py", "storage/test_locks.py", "storage/test_places.py"),
    "checkpoints.families": ("checkpoints/test_families.py",),
    "checkpoints.names": ("checkpoints/test_names.py", "checkpoints/test_families.py"),
    "tasks.readers": ("tasks/test_readers.py", "tasks/test_columnar.py"),
}

# Module: {"function: kind: text": why it may survive}.
KNOWN: dict[str, dict[str, str]] = {
    "model.masking": {
        "mask_rows: number: 5 if config.max_ngram > 1 else 3": "of more bits the last are not used",
        "mask_rows: number: (..., 4)": "JAX takes the last place for one beyond it",
        "mask_rows: and/or: batch.sequence_numbers is not None or batch.epochs is not None": "for the type checker",
        "leave_causal: and/or: batch.sequence_numbers is not None or batch.epochs is not None": "for the type checker",
        "mask_rows: compare: share <= config.mask_rate": "one share in 16 million is exactly that",
        "leave_causal: compare: _unit(jax.vmap(lambda key: jax.random.bits(key, (), jnp.uint32))(keys)) <= "
        "config.causal_rate": "one share in 16 million is exactly that",
        "import: number: (1, 3, 3, 4)": "a number of words that the program does not know gives the same words",
        "choose_words: number: -2": "no sequence has that number either",
        "_ngram_lengths: compare: _unit(bits)[..., None] > bounds": "one share in 16 million is exactly that",
        "_ngram_lengths: number: 2 / np.arange(1, max_ngram + 1)": "their shares of the sum are the same",
        "import: number: scores: jax.Array, num_words: jax.Array, candidates: jax.Array, starts: jax.Array, "
        "place: jax.Array, budgets: jax.Array, max_ngram: int=2": "of one word the second is not taken",
    },
    "data.instances": {
        "_add_pairs: compare: rng.random() <= short_seq_rate": "no random number is exactly that",
        "_add_pairs: compare: rng.random() <= 0.5": "no random number is exactly that",
        "_add_spans: compare: rng.random() <= short_seq_rate": "no random number is exactly that",
        "make_rows: compare: positions <= middle": "[SEP] is written over it",
    },
    "data.packing": {
        "_merged: number: -2": "NumPy takes any negative size for the one to be found",
        "_pairs: number: total + 2": "of full rows none is left by then",
        "assign: number: -2": "NumPy takes any negative size for the one to be found",
        "_share_out: arithmetic: ways * (2.0 ** 40 / max(1.0, ways.max())) - 1": "shares are cut to whole numbers, "
        "and their order is the same",
    },
    "text.wordpiece": {
        "import: number: _CACHED_WORDS = 500001": "free",
        "import: number: _FIRST_LETTERS = 5": "free: how fast a token is found",
        "import: arithmetic: _FIRST_LETTERS + 1": "more sizes are tried, and fit nothing",
        "_Memo.__missing__: compare: len(self) > _CACHED_WORDS": "free",
        "_Memo.__missing__: compare: len(word) < MAX_WORD_LENGTH": "free: which words are remembered",
    },
    "tasks.scores": {
        "spearman: arithmetic: counts + 1": "all ranks are one less, so they correlate as much",
        "spearman: number: counts - 2": "all ranks are half of one more, so they correlate as much",
        "_correlation: number: values[1]": "any of equal numbers",
    },
    "tasks.squad.decode": {
        "decode_spans: number: (1, 4)": "a span of nothing is left out",
        "decode_spans: number: (0, 5)": "without rows, columns are not read",
    },
    "training.optim": {
        "learning_rate_at: number: max(2, warmup_steps)": "with one step of warm-up, step 0 alone, whose rate is 0",
        "scale_by_layer_trust_ratio: number: jnp.where(known, change, 2)": "not taken, whatever it is",
        "scale_by_muon: number: 2 - _MOMENTUM": "a momentum that is longer everywhere has the same direction",
    },
    "training.accumulate": {
        "sum_over_microbatches: number: leaf[1]": "of any microbatch the shape is the same",
        "sum_over_microbatches: number: jax.tree.leaves(batch)[1]": "any field has as many rows",
        "_own_part: compare: size >= 32": "32 is a multiple of 32",
    },
    "storage.resolve": {
        "_revisions: result: return []": "None is no revision either",
        "_kinds_of: compare: {'config.json', 'tokenizer'} < set(names)": "what shows a model is one name more",
    },
    "checkpoints.states": {
        "_Manager._finalize_checkpoint: result: return super()._finalize_checkpoint(step)": "Orbax returns nothing",
        "Checkpoints.__init__: number: self._bytes = 1": "free: what a watchdog hears before the first save",
    },
    "storage.locks": {
        "_lock: number: os.pread(descriptor, 1001, 0)": "free",
        "_lock: number: os.ftruncate(descriptor, 1)": "a longer line is written over it",
    },
    "storage.leases": {
        "Lease.__init__: number: self._renewals = 1": "free",
        "Lease._content: arithmetic: self._renewals -= 1": "any other number makes another version",
        "Lease._content: number: self._renewals += 2": "any other number makes another version",
        "Lease.take: compare: wait >= RENEW_SECONDS / 2": "free: how long a wait is told of",
        "Lease.take: number: RENEW_SECONDS / 3": "free: how long a wait is told of",
        "Lease.take: compare: _now() - began > wait": "it is asked again a moment later",
    },
    "checkpoints.families": {
        "ModernBert.read: number: settings.get('local_attention', 129)": "half of it, rounded down, is the same",
        "_rotary_modules: arithmetic: layer - 'post_attention_layernorm'": "it is called at the import alone",
    },
    "checkpoints.names": {
        "to_params: compare: config.num_stacked >= len(names)": "a layer has more than one tensor",
        "to_params: number: next((row for row in TABLE if row.ours == 'classifier/bias'))"
        ".names(form, 1)": "it is in no layer",
        "from_params: number: (1, 0)": "what has no row is refused in any order",
        "from_params: number: (0, 1)": "what has no row is refused in any order",
        "from_params: compare: len(of) >= 1": "one part, joined, is itself",
    },
    "tasks.readers": {
        "import: arithmetic: 2 ** 31 + 1": "free",
        "import: number: 3 ** 31": "free",
        "import: number: 2 ** 32": "free",
        "import: number: 2 ** 31 - 2": "free",
        "find_split_file: number: :2": "TFDS has one name for a split",
        "find_split_file: compare: len(found) >= 1": "one file makes one pattern",
        "_csv_rows: number: maxsplit=2": "the first part is the same",
        "_rows_records: compare: len(row) >= len(columns)": "equal numbers were asked for before",
    },
}

SWAPPED: dict[type, type] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv,
}  # fmt: skip


# Making mutants


class Site(NamedTuple):
    """A place where a module can be changed. `function` is the outermost one around it, "" if it runs at the import."""

    function: str
    node: Any
    around: ast.AST
    kind: str


def sites(node: ast.AST, function: str = "", inside: bool = False) -> Iterator[Site]:
    """Yields the places of a module's syntax in a fixed order. What messages show is none."""
    for field, value in ast.iter_fields(node):
        name, within = function, inside
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not inside:
            name = f"{function}.{node.name}".strip(".")
            # defaults, decorators and annotations run at the import
            within = field == "body" and isinstance(node, ast.FunctionDef)
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                if kind := kind_of(child):
                    yield Site(name if within else "", child, node, kind)
                yield from sites(child, name, within)


def kind_of(node: Any) -> str:
    """Returns what can be changed at a node, "" if nothing."""
    if isinstance(node, ast.Compare):
        return "compare"
    if isinstance(node, ast.BoolOp):
        return "and/or"
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        return "arithmetic" if type(node.op) in SWAPPED else ""
    if isinstance(node, ast.UnaryOp):
        return "not" if isinstance(node.op, ast.Not) else ""
    if isinstance(node, ast.If):
        return "guard" if len(node.body) == 1 and isinstance(node.body[0], ast.Raise) else ""
    if isinstance(node, ast.IfExp):
        return "if/else"
    if isinstance(node, ast.Constant):
        return "number" if type(node.value) is int else ""
    if isinstance(node, ast.Return) and node.value is not None:  # nobody asks whether it is None or False
        return "" if isinstance(node.value, ast.Constant) and not node.value.value else "result"
    return ""


def change(site: Site) -> str:
    """Makes the fault: another operator, one more, no refusal, the other way round, or None. Returns the new text."""
    _, node, around, kind = site
    text = ast.unparse(node.test if kind == "guard" else node)
    if kind == "compare":
        node.ops[0] = SWAPPED[type(node.ops[0])]()
    elif kind in ("and/or", "arithmetic"):
        node.op = SWAPPED[type(node.op)]()
    elif kind == "not":
        node.operand = ast.UnaryOp(ast.Not(), node.operand)
    elif kind == "guard":
        node.body = [ast.Pass()]
    elif kind == "if/else":
        node.body, node.orelse = node.orelse, node.body
    elif kind == "number":
        node.value += 1
    elif kind == "result":
        node.value = ast.Constant(None)
    if kind not in ("guard", "result"):
        text = ast.unparse(around if kind == "number" else node)
    return " ".join(text.split())


class Mutant(NamedTuple):
    """A changed module. `about` is "function: kind: text", which does not depend on the lines before it."""

    about: str
    function: str
    line: int
    code: types.CodeType


def make(path: Path, index: int) -> Mutant:
    """Returns the mutant with the fault at one of the `sites` of a module."""
    tree = ast.parse(path.read_text("utf-8"))
    site = next(itertools.islice(sites(tree), index, None))
    about = f"{site.function or 'import'}: {site.kind}: {change(site)}"
    code = compile(ast.fix_missing_locations(tree), str(path), "exec")
    return Mutant(about, site.function, site.node.lineno, code)


# Running cases


def in_fork(function: Callable[[], Any], seconds: float | None = None) -> Any:
    """Returns what a function returns, as JSON, in a fork with a temporary folder; None if it dies or is late."""
    folder = tempfile.mkdtemp(prefix="mutant_")
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        os.environ["TMPDIR"] = os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.tempdir = folder
        try:
            answer = json.dumps(function()).encode()
            while answer:
                answer = answer[os.write(sending, answer) :]
        finally:
            os._exit(0)
    os.close(sending)
    answer, ends = b"", time.monotonic() + (seconds or 1e6)
    try:
        while select.select([receiving], [], [], max(0.0, ends - time.monotonic()))[0]:
            if not (part := os.read(receiving, 2**16)):
                break
            answer += part
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # and what it started
        os.waitpid(child, 0)
        os.close(receiving)
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(json.JSONDecodeError):
        return json.loads(answer)


class Outcome(NamedTuple):
    """What became of a case: whether it passed, its seconds, and the functions of the module that it entered."""

    passed: bool
    seconds: float
    entered: list[str]


class Cases:
    """A plugin of pytest: gives the cases that it collects to `then`, and runs them one by one."""

    def __init__(self, then: Callable[["Cases"], object]) -> None:
        self._then = then
        self._passed = True
        self._entered: set[str] = set()
        self._shared: set[str] = set()  # entered by fixtures, which later cases may have too
        self.items: dict[str, pytest.Item] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self._then(self)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._passed &= not report.failed

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self) -> None:
        self._shared |= self._entered

    def run(self, names: Sequence[str], seconds: Mapping[str, float] | None = None) -> Iterator[tuple[str, bool]]:
        """Yields each of these cases, and whether it passed. One that computes for much longer than it did ends all."""
        for name, after in itertools.zip_longest(names, names[1:]):
            self._passed = True
            if seconds:
                signal.setitimer(signal.ITIMER_PROF, 3 + 5 * seconds[name])
            item = self.items[name]
            item.ihook.pytest_runtest_protocol(item=item, nextitem=self.items.get(after))
            yield name, self._passed

    def failed(self, seconds: Mapping[str, float], all_cases: bool) -> list[str]:
        """Returns which of some cases fail, or the first of them, given what each took without a fault."""
        names = sorted(seconds, key=lambda name: seconds[name])
        failing = (name for name, passed in self.run(names, seconds) if not passed)
        return list(failing if all_cases else itertools.islice(failing, 1))

    def outcomes(self, path: Path) -> dict[str, Outcome]:
        """Returns what becomes of each case without a fault."""

        def trace(frame: types.FrameType, event: str, argument: object) -> None:
            if frame.f_code.co_filename == str(path):
                self._entered.add(outermost(frame.f_code))

        threading.settrace(trace)
        sys.settrace(trace)
        found = {}
        began = time.monotonic()
        for name, passed in self.run(list(self.items)):
            found[name] = Outcome(passed, time.monotonic() - began, sorted(self._entered | self._shared))
            self._entered.clear()
            if jax := sys.modules.get("jax"):
                jax.clear_caches()  # or a case that shares a compiled program would not enter what it is traced from
            began = time.monotonic()
        return found


def collect(files: Sequence[str], then: Callable[[Cases], object]) -> None:
    """Collects the fast cases of test files, below tests/, and calls `then` with them."""
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", FAST, f"--rootdir={ROOT}"]
    pytest.main([*options, *(f"tests/{name}" for name in files)], plugins=[Cases(then)])


def outermost(code: types.CodeType) -> str:
    """Returns the name of the function around a code, which is that of a `Site`."""
    return code.co_qualname.partition(".<locals>")[0]


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a code and all that are in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def functions_of(path: Path) -> list[types.FunctionType]:
    """Returns the functions of a module that this process has."""
    gc.unfreeze()  # tests/conftest.py froze them
    every = [each for each in gc.get_objects() if isinstance(each, types.FunctionType)]
    gc.freeze()
    return [each for each in every if each.__code__.co_filename == str(path)]


def exchange(functions: Iterable[types.FunctionType], mutant: Mutant, really: bool = True) -> bool:
    """Gives functions the code of a mutant. Returns False if it is outside of them or changes a closure."""
    new = {(each.co_qualname, each.co_firstlineno): each for each in codes(mutant.code)}
    changed = [each for each in functions if outermost(each.__code__) == mutant.function]
    for function in changed:
        code = function.__code__
        other = new[code.co_qualname, code.co_firstlineno]
        if len(other.co_freevars) != len(code.co_freevars):
            return False
        if really:
            function.__code__ = other
    return bool(changed)


class Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a mutant in the place of its module."""

    def __init__(self, name: str, path: Path, code: types.CodeType) -> None:
        self._name, self._path, self._code = name, path, code

    def find_spec(self, fullname: str, path: object, target: object = None) -> Any:
        if fullname == self._name:
            return importlib.util.spec_from_loader(fullname, self, origin=str(self._path))

    def exec_module(self, module: types.ModuleType) -> None:
        module.__file__ = str(self._path)
        exec(self._code, module.__dict__)


def verdicts(name: str, files: Sequence[str], mutants: Sequence[Mutant], all_cases: bool) -> tuple[dict, list]:
    """Returns the outcome of each case without a fault, and the cases that each mutant fails; None if it dies."""
    path = ROOT / "bert_jax" / f"{name.replace('.', '/')}.py"
    found: dict[str, Any] = {"outcomes": {}, "failed": {}}

    def seconds(mutant: Mutant) -> dict[str, float]:
        """Returns what the cases that may see the fault took without it."""
        outcomes = found["outcomes"].items()
        return {case: out.seconds for case, out in outcomes if not mutant.function or mutant.function in out.entered}

    def failed(mutant: Mutant, run: Callable[[dict[str, float]], Any]) -> list[str] | None:
        """Returns what `run` does in a fork, which has as long as cases may compute, and as long again to wait."""
        taken = seconds(mutant)
        return in_fork(lambda: run(taken), 20 + 20 * sum(taken.values()))

    def in_functions(cases: Cases) -> None:
        if sys.modules["jax._src.xla_bridge"].backends_are_initialized() or threading.active_count() > 1:
            raise SystemExit(f"{files} compute with JAX, or start threads, at their import: no fork is safe then")
        given = in_fork(lambda: cases.outcomes(path))
        found["outcomes"] = {case: Outcome(*outcome) for case, outcome in given.items()}
        functions = functions_of(path)
        for index, mutant in enumerate(mutants):

            def run(taken: dict[str, float], mutant: Mutant = mutant) -> list[str]:
                exchange(functions, mutant)
                return cases.failed(taken, all_cases)

            if exchange(functions, mutant, really=False):
                found["failed"][index] = failed(mutant, run)

    def collected() -> dict[str, Any]:
        collect(files, in_functions)
        return found

    found = in_fork(collected)
    found["outcomes"] = {case: Outcome(*outcome) for case, outcome in found["outcomes"].items()}
    for index, mutant in enumerate(mutants):

        def run(taken: dict[str, float], mutant: Mutant = mutant) -> list[str] | None:
            sys.meta_path.insert(0, Instead(f"bert_jax.{name}", path, mutant.code))
            told: list[list[str]] = []
            collect(files, lambda cases: told.append(cases.failed(taken, all_cases)))
            return told[0] if told else None

        if str(index) not in found["failed"]:
            found["failed"][str(index)] = failed(mutant, run)
    return found["outcomes"], [found["failed"][str(index)] for index in range(len(mutants))]


# Telling


def import_libraries(programs: str) -> None:
    """Imports what no mutant changes. Compiled programs are kept in a folder."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = programs
    sys.dont_write_bytecode = True
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    for name in ("conftest", *LIBRARIES):  # the first sets variables that JAX reads
        importlib.import_module(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("modules", nargs="*", default=list(MODULES), metavar="MODULE", help="such as data.order")
    parser.add_argument("--most", type=int, default=40, help="the mutants of a module; 0 is all of them")
    parser.add_argument("--seed", type=int, default=1, help="of the choice among them")
    parser.add_argument("--cases", action="store_true", help="runs all cases of each, and tells which kill nothing")
    parser.add_argument("--tests", default="", help="files below tests/ with commas between, for modules of any name")
    given = parser.parse_args()
    files = MODULES if not given.tests else dict.fromkeys(given.modules, given.tests.split(","))
    if unknown := set(given.modules).difference(files):
        parser.error(f"{', '.join(sorted(unknown))}: name the files of its cases with --tests")
    with tempfile.TemporaryDirectory(prefix="mutants_") as programs:
        import_libraries(programs)
        sys.exit(min(1, run({name: files[name] for name in given.modules}, given.most, given.seed, given.cases)))


def cpu_seconds() -> float:
    """Returns what the forks that have ended have computed for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(modules: Mapping[str, Sequence[str]], most: int, seed: int, all_cases: bool) -> int:
    """Prints a row for each module, and returns how many mutants survive without a reason."""
    unexplained = 0
    kills: dict[str, set[str]] = collections.defaultdict(set)
    columns = ("places", "mutants", "killed", "known", "missed", "cases", "seconds")
    print(f"{'module':20}", *(f"{name:>7}" for name in columns))
    for name, files in modules.items():
        used = cpu_seconds()
        path = ROOT / "bert_jax" / f"{name.replace('.', '/')}.py"
        total = sum(1 for _ in sites(ast.parse(path.read_text("utf-8"))))
        chosen = random.Random(f"{name} {seed}").sample(range(total), min(most or total, total))
        mutants = [make(path, index) for index in sorted(chosen)]
        outcomes, failed = verdicts(name, files, mutants, all_cases)
        if broken := [case for case, outcome in outcomes.items() if not outcome.passed]:
            raise SystemExit(f"without a fault: {broken[0]} fails")
        alive = [mutant for mutant, cases in zip(mutants, failed) if cases == []]
        missed = [mutant for mutant in alive if mutant.about not in KNOWN.get(name, {})]
        unexplained += len(missed)
        numbers = [total, len(mutants), len(mutants) - len(alive), len(alive) - len(missed), len(missed), len(outcomes)]
        print(f"{name:20}", *(f"{number:7}" for number in [*numbers, round(cpu_seconds() - used)]))
        for mutant in missed:
            print(f"    {mutant.line:4} {mutant.about}")
        sys.stdout.flush()
        for case in outcomes:
            kills[case] |= {f"{name} {mutant.about}" for mutant, cases in zip(mutants, failed) if case in (cases or ())}
    if all_cases:
        tell_cases(kills)
    return unexplained


def tell_cases(kills: dict[str, set[str]]) -> None:
    """Prints the cases that kill nothing, and a choice of few that kill all that any does."""
    idle = [case for case, killed in kills.items() if not killed]
    left, few = set().union(*kills.values()), []
    while left:
        few.append(max(kills, key=lambda case: len(kills[case] & left)))
        left -= kills[few[-1]]
    print(f"{len(idle)} of {len(kills)} cases kill nothing:", *idle, sep="\n    ")
    print(f"{len(few)} kill all that any kills:", *(f"{len(kills[case])} {case}" for case in few), sep="\n    ")


if __name__ == "__main__":
    main()
