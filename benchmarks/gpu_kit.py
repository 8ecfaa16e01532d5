# SPDX-License-Identifier: Apache-2.0
r"""Packs one folder with everything that an offline machine with a GPU lacks to run `benchmarks/gpu.sh`.

    python -m benchmarks.gpu_kit --output=gpu_kit                 # or `make gpu-kit`: text of Python's documentation
    python -m benchmarks.gpu_kit --output=gpu_kit --data=DIR      # or `make gpu-kit DATA=DIR`
    python -m benchmarks.gpu_kit --output=gpu_kit --data=DIR --pretrain=DIR128

The folder has wheels of the libraries that the machine lacks, and archives of data: a prepared data set with its
vocabulary, minimal pairs, fine-tuning data; `benchmarks.gpu_packing` names them all. --data is a folder with the files
of its `ITEMS`; the text of `TEXTS` below it is prepared, unless --pretrain names a data set of prepare_corpus. The code
is not packed: the machine has the repository's tree, which counts towards --limit_mib. Data that do not fit are left
out, the last of the items first, and named; wheels and the data set must fit. Without --data all data are made from the
documentation inside Python, so that the commands can be tried anywhere.
"""

import glob
import gzip
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks.gpu_packing import MIB, PRETRAIN, ROOT, describe, get_wheels, pack, tree_bytes
from benchmarks.gpu_stages import MAX_PER_ROW, REAL
from bert_jax.data.packed_dataset import check_source
from bert_jax.data.records import open_dataset
from bert_jax.errors import InputError
from bert_jax.storage.writing import new_directory, write_json
from bert_jax.tools import cli

TEXTS = ("wikipedia_en/wiki_en-*.txt.gz", "books_en/*.txt.gz")  # below --data

OUTPUT = flags.DEFINE_string("output", "gpu_kit", "the folder to make; one that was made before is replaced")
DATA = flags.DEFINE_string("data", "", "a folder of data (see ITEMS); without it, Python's documentation is used")
PREPARED = flags.DEFINE_string(
    "pretrain", "", "a data set of prepare_corpus with a held-out split, not packed; made if not given"
)
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
    if PREPARED.value:  # stage 1 packs it, far from here
        check_source(open_dataset(PREPARED.value), PREPARED.value, REAL.packed_length, MAX_PER_ROW)
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


if __name__ == "__main__":
    cli.run(main)
