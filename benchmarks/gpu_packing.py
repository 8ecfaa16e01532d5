# SPDX-License-Identifier: Apache-2.0
"""The kit for an offline machine with a GPU: what it holds, how it is packed, checked and unpacked.

`kit.json` names every file with its size and sha256; data are archives below `data/`, wheels are in `wheels/`. The same
files make the same archives, and nothing in them says where they were made.
"""

import glob
import hashlib
import io
import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.jobs import commit
from bert_jax.errors import InputError
from bert_jax.storage.writing import new_directory

ROOT = Path(__file__).resolve().parents[1]
FORMAT = 1
MIB = 2**20
PYTHON_VERSION = "3.12"
# Libraries of `setup.cfg` that the machine has, with all that they need in turn.
MACHINE = """
    absl-py flatbuffers flax fsspec jax matplotlib numpy optax orbax-checkpoint packaging protobuf pyarrow pytest pyyaml
    safetensors sentencepiece torch tqdm transformers
""".split()
# Those that it lacks, as constraints.txt pins them. They need nothing beyond `MACHINE`.
WHEELS = ("google-crc32c", "ml-collections", "sentencex", "tensorboardx", "zstandard")
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
PRETRAIN = "pretrain"  # the archive of the prepared data set
SOURCES = ("bert_jax/**/*.py", "benchmarks/**/*.py", "configs/*.py", "train.py", "finetune.py")


class Item(NamedTuple):
    """Files that travel together: where they are in the kit's data, and a pattern for them below --data."""

    name: str
    files: tuple[tuple[str, str], ...]


def _glue(task: str) -> Item:
    return Item(task.lower(), tuple((f"tasks/glue/{task}", f"glue/{task}/{split}.tsv") for split in ("train", "dev")))


# In the order in which they are packed while there is room. The names below tasks/ are those of `ablations.TASKS`.
ITEMS = (
    Item("blimp", (("pairs", "blimp/blimp.jsonl.gz"), ("pairs/baselines/blimp", "blimp/baselines.tsv"))),
    Item("zorro", (("pairs/zorro", "zorro/*.txt"), ("pairs/baselines/zorro", "zorro/roberta_base.tsv"))),
    _glue("SST-2"), _glue("MRPC"), _glue("CoLA"), _glue("RTE"), _glue("STS-B"),
    Item("ner", (("tasks/wnut17", "wnut17/wnut17train.conll"), ("tasks/wnut17", "wnut17/emerging.dev.conll"))),
    Item("squad", (("tasks/squad", "squad/dev-v1.1.json"),)),
)  # fmt: skip


def pack(kit: Path, data: Path, prepared: Path, room: int) -> dict[str, Any]:
    """Writes the archives of a kit that has its wheels, and returns its manifest: sizes, hashes and what was left out.

    Raises: InputError if wheels and pre-training data take more than `room` bytes.
    """
    manifest = json.loads((prepared / "manifest.json").read_text(encoding="utf-8"))
    archives = kit / "data"
    archives.mkdir()
    write_archive(archives / f"{PRETRAIN}.tar.xz", [(f"{PRETRAIN}/{name}", path) for name, path in _files_of(prepared)])
    needed, of_data = folder_bytes(kit), folder_bytes(archives)
    if needed > room:
        raise InputError(
            f"the kit needs {needed / MIB:.1f} MiB, {of_data / MIB:.1f} of them for pre-training data, and "
            f"{room / MIB:.1f} are left beside the repository; give less text, or a larger --limit_mib"
        )
    left_out, missing = {}, []
    for item in ITEMS:
        files = list(item_files(item, data))
        if not files:
            missing.append(item.name)
            continue
        archive = archives / f"{item.name}.tar.xz"
        write_archive(archive, files)
        if folder_bytes(kit) > room - MIB // 16:  # for kit.json
            left_out[item.name] = archive.stat().st_size
            archive.unlink()
    return {
        "format": FORMAT,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "sources": source_digest(),
        "pretraining": {
            "train_tokens": manifest["splits"]["train"]["tokens"],
            "row_length": manifest["row"]["length"],
        },
        "files": {name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for name, path in _files_of(kit)},
        "left_out": left_out,
        "not_in_data": missing,
    }


def item_files(item: Item, data: Path) -> Iterator[tuple[str, Path]]:
    """Yields the name in the kit's data and the path of each file of an item; nothing if a pattern finds none."""
    found = [(place, sorted(glob.glob(pattern, root_dir=data))) for place, pattern in item.files]
    if all(names for _, names in found):
        for place, names in found:
            for name in names:
                yield f"{place}/{Path(name).name}", data / name


def write_archive(archive: Path, files: Sequence[tuple[str, Path]]) -> None:
    """Writes files under the given names as .tar.xz, the same bytes for the same files."""
    with lzma.open(archive, "wb") as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        for name, path in sorted(files):
            entry = tarfile.TarInfo(name)
            content = path.read_bytes()
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))


def unpack(kit: Path, target: Path) -> dict[str, Any]:
    """Unpacks the data of a kit unless that is done, and returns its manifest.

    Raises: InputError if there is no kit, or a file of it is damaged.
    """
    manifest = read_kit(kit)
    for name, about in manifest["files"].items():
        if not (kit / name).is_file() or _sha256(kit / name) != about["sha256"]:
            raise InputError(f"{kit / name} is missing or damaged; copy the kit again")
    stamp = hashlib.sha256(json.dumps(manifest["files"], sort_keys=True).encode()).hexdigest()
    if (target / "unpacked").is_file() and (target / "unpacked").read_text(encoding="utf-8") == stamp:
        return manifest
    shutil.rmtree(target, ignore_errors=True)
    with new_directory(target) as temporary:
        for archive in sorted((kit / "data").glob("*.tar.xz")):
            with tarfile.open(archive) as tar:
                tar.extractall(temporary, filter="data")
        (temporary / "unpacked").write_text(stamp, encoding="utf-8")
    return manifest


def read_kit(kit: Path) -> dict[str, Any]:
    """Returns the manifest of a kit. Raises: InputError if there is none."""
    try:
        manifest = json.loads((kit / "kit.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(f"{kit} is no kit; make one with make gpu-kit, where there is a package index") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise InputError(f"{kit} is no kit of format {FORMAT}; make it again with make gpu-kit")
    return manifest


def source_digest(root: Path = ROOT) -> str:
    """Returns a sha256 of all code that a benchmark runs, so that a tree without git can be told from another."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in SOURCES for path in root.glob(pattern)}):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def tree_bytes() -> int:
    """Returns the size of the files of the repository; 0 where there is no git."""
    done = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True)
    names = done.stdout.split("\0") if done.returncode == 0 else []
    return sum((ROOT / name).lstat().st_size for name in names if name and (ROOT / name).exists())


def folder_bytes(folder: Path) -> int:
    """Returns the size of all files of a folder."""
    return sum(path.stat().st_size for _, path in _files_of(folder))


def describe(kit: Path, limit: float) -> list[str]:
    """Returns the contents of a kit as lines for people."""
    manifest = read_kit(kit)
    lines = [f"{about['bytes'] / MIB:8.2f} MiB  {name}" for name, about in manifest["files"].items()]
    lines += [f"    left out   {name}, {size / MIB:.2f} MiB" for name, size in manifest["left_out"].items()]
    lines += [f" not in data   {name}" for name in manifest["not_in_data"]]
    size, tree = folder_bytes(kit) / MIB, tree_bytes() / MIB
    tokens = manifest["pretraining"]["train_tokens"]
    in_all = f"with the repository's {tree:.1f} MiB {size + tree:.1f} of {limit:g}"
    return [*lines, f"{kit}: {size:.1f} MiB, {in_all}; {tokens:,} tokens of pre-training"]


def _files_of(folder: Path) -> list[tuple[str, Path]]:
    return [(path.relative_to(folder).as_posix(), path) for path in sorted(folder.rglob("*")) if path.is_file()]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# Where it comes from


def get_wheels(folder: Path, source: Path | None) -> None:
    """Fills a folder with the wheels of `WHEELS`, from another folder or from the package index.

    Raises: InputError if one cannot be had.
    """
    folder.mkdir(parents=True)
    if source is None:
        platforms = [f"--platform={platform}" for platform in _PLATFORMS]
        command = [*find_pip(), "download", "--quiet", "--no-deps", "--only-binary=:all:", f"--dest={folder}"]
        command += [f"--python-version={PYTHON_VERSION}", "--implementation=cp", *platforms, *pinned_wheels()]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            problem = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip said nothing"]
            raise InputError(f"wheels cannot be downloaded: {problem[0][:300]}; give a folder of them with --wheels")
    else:
        for wheel in source.glob("*.whl"):
            shutil.copy(wheel, folder)
    there = {normal(wheel.name.partition("-")[0]) for wheel in folder.glob("*.whl")}
    if lacking := [name for name in WHEELS if name not in there]:
        raise InputError(f"{source or 'the package index'} has no wheel of {', '.join(lacking)}; add it")


def pinned_wheels() -> list[str]:
    """Returns NAME==VERSION of each of `WHEELS`, from constraints.txt."""
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if match := re.match(r"([\w.-]+)==([\w.]+)", line):
            pinned[normal(match[1])] = match[2]
    return [f"{name}=={pinned[name]}" for name in WHEELS]


def find_pip() -> list[str]:
    """Returns the command of a pip. Raises: InputError if there is none."""
    for python in dict.fromkeys((sys.executable, getattr(sys, "_base_executable", sys.executable), "python3")):
        with_pip = [python, "-m", "pip"]
        if subprocess.run([*with_pip, "--version"], capture_output=True).returncode == 0:
            return with_pip
    raise InputError("there is no pip to download wheels with; python -m ensurepip makes one, or give --wheels=DIR")


def normal(name: str) -> str:
    """Returns the name of a library as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()
