# SPDX-License-Identifier: Apache-2.0
"""The notebook, run as Jupyter runs it, with a shorter training."""

import nbformat
import pytest
from builders import write_corpus
from nbclient import NotebookClient

SHORTER = """
TEXT, WORKDIR = "text.txt", "work"
SIZE, VOCAB_SIZE, ROW_LENGTH, NUM_STEPS, BATCH_SIZE = "tiny", 150, 32, 16, 16
BLANKS = ["the ban [MASK] .", "the [MASK] dar [MASK] ."]
"""


@pytest.mark.slow
def test_the_notebook_trains_on_a_text_and_shows_its_curves(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(repository))
    write_corpus(tmp_path / "text.txt")
    notebook = nbformat.read(repository / "notebooks" / "pretrain_tiny.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # committed without outputs
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
