# SPDX-License-Identifier: Apache-2.0
"""The notebooks, run as Jupyter runs them, with a shorter training."""

import json
import random
from pathlib import Path

import nbformat
import pytest
from builders import make_pretrained, write_corpus
from nbclient import NotebookClient


def read_without_outputs(path: Path) -> nbformat.NotebookNode:
    """Returns a notebook as it is before it runs; those of the repository have outputs, for the documentation."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    return notebook


SHORTER = """
TEXT, WORKDIR = "text.txt", "work"
SIZE, VOCAB_SIZE, ROW_LENGTH, NUM_STEPS, BATCH_SIZE = "tiny", 150, 32, 16, 16
BLANKS = ["the ban [MASK] .", "the [MASK] dar [MASK] ."]
"""


@pytest.mark.slow
def test_the_notebook_trains_on_a_text_and_shows_its_curves(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(repository))
    write_corpus(tmp_path / "text.txt")
    notebook = read_without_outputs(repository / "notebooks" / "pretrain_tiny.ipynb")
    (place,) = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(SHORTER))
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    text = "".join(output.get("text", "") for output in outputs)
    assert "trained to step 16" in text and "the ban [MASK] ." in text and "%" in text
    assert (tmp_path / "work" / "run" / "pretrained" / "config.json").is_file()
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # a second run continues: nothing is made twice
    text = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "it was there already" in text and "already complete" in text and "resume from step 16" in text


ON_MRPC = """
MODEL, DATA, WORKDIR = "pretrained", "data", "work"
LEARNING_RATE, NUM_EPOCHS, BATCH_SIZE, MAX_SEQ_LENGTH = 5e-3, 2.0, 16, 32
PAIR = ("the ban ber .", "ban the ber .")
"""


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


@pytest.mark.slow
def test_the_notebook_of_mrpc_learns_draws_answers_and_scores(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(repository))
    make_pretrained(tmp_path)
    (tmp_path / "data").mkdir()
    write_pairs(tmp_path / "data" / "train.tsv", 128, seed=0)
    write_pairs(tmp_path / "data" / "dev.tsv", 40, seed=1)
    notebook = read_without_outputs(repository / "notebooks" / "finetune_mrpc.ipynb")
    (place,) = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(ON_MRPC))
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    text = "".join(output.get("text", "") for output in outputs)
    for part in ("the best by f1", "a constant answer", "the ban ber .\nban the ber .", "equivalent", "MRPC-dev.tsv"):
        assert part in text
    metrics = json.loads((tmp_path / "work" / "results.json").read_text())["metrics"]
    assert f"'f1': {metrics['f1']}" in text  # the official score is the run's
    assert (tmp_path / "work" / "finetuned" / "config.json").is_file()


OF_NAMES = """
MODEL, MODULES, NUM_EPOCHS = "box", "os shutil csv statistics json random calendar", 3.0
"""


@pytest.mark.slow
def test_the_notebook_of_embeddings_learns_searches_and_exports(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(repository))
    (tmp_path / "box").symlink_to(repository / "models" / "bert-mini-en")
    notebook = read_without_outputs(repository / "notebooks" / "embeddings.ipynb")
    (place,) = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(OF_NAMES))
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    text = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    metrics = json.loads((tmp_path / "embeddings" / "run" / "results.json").read_text())["metrics"]
    assert metrics["recall@1"] > 0.2 and f"ndcg@10 {metrics['ndcg@10']:.3f}" in text
    answer = text.partition("make a copy of a whole directory\n")[2].splitlines()[0]
    assert "copy a directory tree" in answer
    assert (tmp_path / "embeddings" / "st" / "1_Pooling" / "config.json").is_file()
