# SPDX-License-Identifier: Apache-2.0
"""The notebooks on little data: lines that change their parameters, and the files that these name."""

import random
from pathlib import Path

from builders import make_learner, write_corpus

SHORTER = {
    "pretrain_tiny": """
TEXT, WORKDIR = "text.txt", "work"
SIZE, VOCAB_SIZE, ROW_LENGTH, NUM_STEPS, BATCH_SIZE = "tiny", 150, 32, 16, 16
BLANKS = ["the ban [MASK] .", "the [MASK] dar [MASK] ."]
""",
    "finetune_mrpc": """
MODEL, DATA, WORKDIR = "pretrained", "data", "work"
LEARNING_RATE, NUM_EPOCHS, BATCH_SIZE, MAX_SEQ_LENGTH = 5e-3, 2.0, 16, 32
PAIR = ("the ban ber .", "ban the ber .")
""",
    "embeddings": """
MODEL, MODULES, NUM_EPOCHS = "box", "os shutil csv statistics json random calendar", 3.0
""",
}


def write_inputs(folder: Path, repository: Path) -> list[Path]:
    """Writes what the parameters of all notebooks name, and returns the paths."""
    write_corpus(folder / "text.txt")
    make_learner(folder)
    (folder / "data").mkdir()
    write_pairs(folder / "data" / "train.tsv", 128, seed=0)
    write_pairs(folder / "data" / "dev.tsv", 40, seed=1)
    (folder / "box").symlink_to(repository / "models" / "bert-mini-en")
    return [folder / name for name in ("text.txt", "pretrained", "data", "box")]


def write_pairs(path: Path, num_rows: int, seed: int) -> None:
    """Writes pairs of sentences in the columns of MRPC: the same words in another order, or others."""
    rng = random.Random(seed)
    words = [f"{letter}{vowel}{ending}" for letter in "bdfg" for vowel in "aeiou" for ending in "nrst"]
    lines = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
    for number in range(num_rows):
        first, same = rng.sample(words, 6), rng.random() < 0.6
        second = rng.sample(first if same else words, 6)
        lines.append(f'{int(same)}\t{2 * number}\t{2 * number + 1}\t{" ".join(first)} .\t"{" ".join(second)} .')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
