# SPDX-License-Identifier: Apache-2.0
"""The notebooks, run as Jupyter runs them, with a shorter training."""

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from short_notebooks import SHORTER, write_inputs

pytestmark = pytest.mark.slow


def read_short(path: Path) -> nbformat.NotebookNode:
    """Returns a notebook as it is before it runs, on little data; those of the repository have outputs."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    (place,) = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(SHORTER[path.stem]))
    return notebook


def run(notebook: nbformat.NotebookNode, folder: Path) -> str:
    """Runs a notebook in a folder; returns what its cells print."""
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    return "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))


@pytest.fixture
def folder(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder with what the parameters of all notebooks name."""
    monkeypatch.setenv("PYTHONPATH", str(repository))
    write_inputs(tmp_path, repository)
    return tmp_path


def test_the_notebook_trains_on_a_text_and_shows_its_curves(repository, folder):
    notebook = read_short(repository / "notebooks" / "pretrain_tiny.ipynb")
    text = run(notebook, folder)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert "trained to step 16" in text and "the ban [MASK] ." in text and "%" in text
    assert (folder / "work" / "run" / "pretrained" / "config.json").is_file()
    text = run(notebook, folder)  # a second run continues: nothing is made twice
    assert "it was there already" in text and "already complete" in text and "resume from step 16" in text


def test_the_notebook_of_mrpc_learns_draws_answers_and_scores(repository, folder):
    text = run(read_short(repository / "notebooks" / "finetune_mrpc.ipynb"), folder)
    for part in ("the best by f1", "a constant answer", "the ban ber .\nban the ber .", "equivalent", "MRPC-dev.tsv"):
        assert part in text
    metrics = json.loads((folder / "work" / "results.json").read_text())["metrics"]
    assert f"'f1': {metrics['f1']}" in text  # the official score is the run's


def test_the_notebook_of_embeddings_learns_searches_and_exports(repository, folder):
    text = run(read_short(repository / "notebooks" / "embeddings.ipynb"), folder)
    metrics = json.loads((folder / "embeddings" / "run" / "results.json").read_text())["metrics"]
    assert metrics["recall@1"] > 0.2 and f"ndcg@10 {metrics['ndcg@10']:.3f}" in text
    answer = text.partition("make a copy of a whole directory\n")[2].splitlines()[0]
    assert "copy a directory tree" in answer
    assert (folder / "embeddings" / "st" / "1_Pooling" / "config.json").is_file()
