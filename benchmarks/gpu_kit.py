# SPDX-License-Identifier: Apache-2.0
r"""Packs one folder with everything that an offline machine with a GPU lacks to run `benchmarks/gpu.sh`.

    python -m benchmarks.gpu_kit --output=gpu_kit                 # or `make gpu-kit`: text of Python's documentation
    python -m benchmarks.gpu_kit --output=gpu_kit --data=DIR      # or `make gpu-kit DATA=DIR`
    python -m benchmarks.gpu_kit --output=gpu_kit --data=DIR --pretrain=DIR128

The folder has wheels of the libraries that `MACHINE` does not name, and archives of data: a prepared data set with its
vocabulary, minimal pairs, fine-tuning data. --data is a folder with these under the names of `ITEMS`; text of its
`TEXTS` is prepared, unless --pretrain names a data set of prepare_corpus. The code is not packed: the machine has the
repository's tree, which counts towards --limit_mib. Data that do not fit are left out, the last of `ITEMS` first, and
named; wheels and the data set must fit. Without --data all data are made from the documentation inside Python.
"""

import glob
import gzip
import hashlib
import io
import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from benchmarks.jobs import commit
from bert_jax.errors import InputError
from bert_jax.storage.writing import new_directory, write_json
from bert_jax.tools import cli

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
TEXTS = ("wikipedia_en/wiki_en-*.txt.gz", "books_en/*.txt.gz")  # below --data
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

OUTPUT = flags.DEFINE_string("output", "gpu_kit", "the folder to make; one that was made before is replaced")
DATA = flags.DEFINE_string("data", "", "a folder of data (see ITEMS); without it, Python's documentation is used")
PREPARED = flags.DEFINE_string("pretrain", "", "a data set of prepare_corpus with a held-out split; made if not given")
VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 8192, "tokens of the vocabulary that is made", lower_bound=100)
LENGTH = flags.DEFINE_integer("length", 128, "tokens of the rows that are made", lower_bound=8)
LIMIT = flags.DEFINE_float("limit_mib", 64.0, "largest size of kit and repository together, in MiB")
WHEEL_FOLDER = flags.DEFINE_string("wheels", "", "a folder of wheels to take; downloaded if not given")


def main() -> None:
    """Makes the kit and prints what is in it."""
    if PREPARED.value and not DATA.value:
        raise InputError("--pretrain needs --data, the folder of minimal pairs and fine-tuning data beside it")
    if DATA.value and not Path(DATA.value).is_dir():
        raise InputError(f"--data={DATA.value} is no directory; give the folder that has the data")
    with tempfile.TemporaryDirectory(prefix="bert_jax_kit_") as name, new_directory(Path(OUTPUT.value), is_kit) as kit:
        scratch = Path(name)
        get_wheels(kit / "wheels", Path(WHEEL_FOLDER.value) if WHEEL_FOLDER.value else None)
        if DATA.value:
            data, prepared = Path(DATA.value), Path(PREPARED.value) if PREPARED.value else scratch / PRETRAIN
            if not PREPARED.value:
                prepare(find_texts(data), prepared, VOCAB_SIZE.value, ("--duplicates=1",))
        else:
            data, prepared = scratch / "demo", scratch / PRETRAIN
            prepare("python-docs", prepared, 4096, ("--duplicates=2", "--holdout_rate=0.05"))
            write_demo(data)
        manifest = pack(kit, data, prepared, int(LIMIT.value * MIB) - tree_bytes())
        write_json(kit / "kit.json", manifest | {"data": "given" if DATA.value else "python-docs"})
    print("\n".join(describe(Path(OUTPUT.value), LIMIT.value)))


def is_kit(path: Any) -> bool:
    """Returns whether a directory is a kit, which may be replaced."""
    return (path / "kit.json").is_file()


# What is packed


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
    there = {_normal(wheel.name.partition("-")[0]) for wheel in folder.glob("*.whl")}
    if lacking := [name for name in WHEELS if name not in there]:
        raise InputError(f"{source or 'the package index'} has no wheel of {', '.join(lacking)}; add it")


def pinned_wheels() -> list[str]:
    """Returns NAME==VERSION of each of `WHEELS`, from constraints.txt."""
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if match := re.match(r"([\w.-]+)==([\w.]+)", line):
            pinned[_normal(match[1])] = match[2]
    return [f"{name}=={pinned[name]}" for name in WHEELS]


def find_pip() -> list[str]:
    """Returns the command of a pip. Raises: InputError if there is none."""
    for python in dict.fromkeys((sys.executable, getattr(sys, "_base_executable", sys.executable), "python3")):
        with_pip = [python, "-m", "pip"]
        if subprocess.run([*with_pip, "--version"], capture_output=True).returncode == 0:
            return with_pip
    raise InputError("there is no pip to download wheels with; python -m ensurepip makes one, or give --wheels=DIR")


def find_texts(data: Path) -> str:
    """Returns the texts of a folder of data as --input takes them. Raises: InputError if there are none."""
    found = [str(data / pattern) for pattern in TEXTS if glob.glob(pattern, root_dir=data)]
    if not found:
        raise InputError(f"{data} has none of {', '.join(TEXTS)}; give a prepared data set with --pretrain")
    return ",".join(found)


def prepare(texts: str, output: Path, vocab_size: int, options: Sequence[str]) -> None:
    """Learns a vocabulary of some texts and makes a data set of them. Raises: InputError if that fails."""
    tokenizer = output.with_name("tokenizer")
    tools = [sys.executable, "-m"]
    run(
        [
            *tools,
            "bert_jax.tools.build_vocab",
            f"--input={texts}",
            f"--output={tokenizer}",
            f"--vocab_size={vocab_size}",
        ]
    )
    run([*tools, "bert_jax.tools.prepare_corpus", f"--input={texts}", f"--tokenizer={tokenizer}", f"--output={output}",
         f"--max_seq_length={LENGTH.value}", *options])  # fmt: skip


def run(command: Sequence[str]) -> None:
    """Runs a command. Raises: InputError with its last line if it fails."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        raise InputError(f"{command[2]} failed with exit status {done.returncode}: {lines[-1][:300]}")


def write_demo(data: Path) -> None:
    """Writes stand-ins for BLiMP and SST-2, made of Python's documentation, so that a rehearsal needs no data.

    A bad sentence has two neighbouring words of the good one swapped. The label of a docstring tells whether the area
    of its module is in the first half of all areas.
    """
    from bert_jax.tasks.docs_task import AREAS, read_described, split_by_module

    sizes = {"train": 24, "dev": 8, "test": 4}
    splits = split_by_module(read_described(), sizes)
    first = sorted(AREAS)[: len(AREAS) // 2]
    task, pairs = data / "glue" / "SST-2", data / "blimp"
    task.mkdir(parents=True)
    pairs.mkdir()
    for split in ("train", "dev"):
        lines = ["sentence\tlabel", *(f"{one.text}\t{int(one.area in first)}" for one in splits[split])]
        (task / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (pairs / "blimp.jsonl.gz").write_bytes(_demo_pairs([one.text for one in splits["train"]]))
    (pairs / "baselines.tsv").write_text("UID\tlinguistics_term\tchance\nswapped_words\tword_order\t0.5\n")


def _demo_pairs(texts: Sequence[str]) -> bytes:
    """Returns the minimal pairs of `write_demo`, as compressed JSON lines."""
    lines = []
    for text in texts:
        words = text.split()
        place = 1 + int(hashlib.sha256(text.encode()).hexdigest(), 16) % (len(words) - 2)
        if words[place] == words[place + 1]:
            continue
        bad = [*words[:place], words[place + 1], words[place], *words[place + 2 :]]
        names = {"UID": "swapped_words", "linguistics_term": "word_order"}
        lines.append(json.dumps(names | {"sentence_good": " ".join(words), "sentence_bad": " ".join(bad)}))
    return gzip.compress("\n".join(lines).encode() + b"\n", mtime=0)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    cli.run(main)
