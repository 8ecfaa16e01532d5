# SPDX-License-Identifier: Apache-2.0
"""What every test can rely on: eight CPU devices, the repository's root and, where there is one, a folder of data."""

import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from buckets import Server
    from fsspec.implementations.memory import MemoryFileSystem

    from bert_jax.checkpoints.pretrained import Pretrained
    from bert_jax.text.tokenizer import Tokenizer
    from bert_jax.training.loop import LoopResult

# A shell starts the background jobs of a script with SIGINT ignored, and nohup ignores SIGHUP; children inherit both.
# Tests send them.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Before any test imports jax: it reads them once. What the caller has set stays.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs run for a few steps only, so the compiler should not try hard, nor compile the same program twice.
_FLAGS = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
_FLAGS.append("--xla_cpu_parallel_codegen_split_count=1")  # programs are small: parts of their own cost a fifth more
if metadata.version("jax").startswith("0.10."):
    _FLAGS.append(
        "--xla_cpu_use_fusion_emitters=false"
    )  # halves the time to compile; later compilers have no such flag
for flag in _FLAGS:
    if flag.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
# Kept from run to run, and shared by pytest's workers and the commands that tests start.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
os.environ.setdefault("BERT_JAX_KEEP", "0")  # of the memory that one test frees, no other is to profit

ROOT = Path(__file__).resolve().parents[1]
MAX_PROGRAMS = 2**30  # bytes
MOST_HELD = 2**31  # bytes that compiled programs may take in a process
_limit = [2 * MOST_HELD]


def pytest_configure(config: pytest.Config) -> None:
    """Empties the kept programs where they have become many; JAX's own limit looks at all of them at every write."""
    programs = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    is_worker = hasattr(config, "workerinput")
    if not is_worker and sum(path.stat().st_size for path in programs.glob("*-cache")) > MAX_PROGRAMS:
        shutil.rmtree(programs, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts tests of processes first: these wait for each other, and at the end nothing else would run meanwhile."""
    items.sort(key=lambda item: "end_to_end" not in item.path.parts)


def pytest_collection_finish() -> None:
    """Leaves what is imported and collected out of every later garbage collection: tracing sets off hundreds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


def held_bytes() -> int:
    """Returns the memory of this process, or 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def pytest_runtest_teardown() -> None:
    """Forgets what JAX has compiled where it takes gigabytes; what is asked for again is read from a file."""
    if "jax" in sys.modules and held_bytes() > _limit[0]:
        sys.modules["jax"].clear_caches()
        gc.collect()
        _limit[0] = held_bytes() + MOST_HELD


def pytest_sessionfinish() -> None:
    """Ends the process that commands were forked from."""
    if commands := sys.modules.get("commands"):
        commands.end()


@pytest.fixture(scope="session")
def tokenizer(repository) -> "Tokenizer":
    """The WordPiece tokenizer of the fixtures, for tests that make none."""
    from bert_jax.tokenizing import load_tokenizer

    return load_tokenizer(repository / "tests" / "fixtures" / "tokenizer")


@pytest.fixture(scope="session")
def repository() -> Path:
    """Returns the root of the checkout."""
    return ROOT


@pytest.fixture(autouse=True)
def same_ctrl_c() -> Iterator[None]:
    """Gives the next test the handler of SIGINT that this one found: commands and stopped runs install others."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(scope="session", autouse=True)
def blank_figures() -> Iterator[None]:
    """Leaves the figures of runs blank (tests/blank_figures.py), and lets them share programs (shared_programs.py)."""
    if not {"bert_jax.training.curves", "bert_jax.inference.predict"} & set(sys.modules):
        yield
        return
    from blank_figures import blank
    from shared_programs import shared

    with blank(), shared():
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Returns the folder of real corpora and data sets; skips the test where there is none."""
    path = Path(os.environ.get("BERT_JAX_DATA") or ROOT.parent / "shared" / "data")
    if not path.is_dir():
        pytest.skip(f"no data at {path}; set BERT_JAX_DATA to a folder that has it")
    return path


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a small data set prepared from a toy language; shared, so not to be changed."""
    from builders import make_dataset

    return make_dataset(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of an untrained model that knows the toy language; shared, so not to be changed."""
    from builders import make_pretrained

    return make_pretrained(tmp_path_factory.mktemp("pretrained"))


@pytest.fixture(scope="session")
def bert(pretrained: Path) -> "Pretrained":
    """Returns the model of that directory; what tests compute with it, they compute in the same programs."""
    from bert_jax.inference.pretrained import load_pretrained

    return load_pretrained(pretrained)


@pytest.fixture(scope="session")
def finished(toy_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, "LoopResult"]:
    """Returns the work directory and the result of `tiny_run` on one device; shared, so not to be changed."""
    from blank_figures import drawn
    from builders import tiny_run
    from whole_runs import ONE_DEVICE, train

    workdir = tmp_path_factory.mktemp("whole") / "run"
    with drawn():
        return workdir, train(tiny_run(toy_data, mesh=ONE_DEVICE), workdir)


@pytest.fixture(scope="session")
def bucket_server() -> Iterator["Server"]:
    """Returns an object store on a loopback port. This process and its children take it for Google's."""
    from buckets import serving, variables

    with serving() as server, variables(server.environment):
        yield server


@pytest.fixture
def bucket(bucket_server: "Server", request: pytest.FixtureRequest) -> str:
    """Returns the URL of an empty bucket of this test's own."""
    return bucket_server.make_bucket(f"test-{abs(hash(request.node.nodeid)):x}")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder of this test for copies of what is elsewhere."""
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def memory(cache: Path) -> Iterator["MemoryFileSystem"]:
    """Returns fsspec's file system in memory, which stands for an object store; it is empty."""
    import fsspec

    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]
