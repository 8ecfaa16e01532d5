# SPDX-License-Identifier: Apache-2.0
"""Runs a notebook in an empty directory and keeps its outputs in it, as they are committed.

    python docs/_site/execute.py notebooks/pretrain_tiny.ipynb
    python docs/_site/execute.py notebooks/finetune_mrpc.ipynb 'MODEL, DATA = "model", "MRPC"' some/model glue/MRPC

After the notebook: lines that change its parameters, and directories that it finds under their own names.
"""

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode


def execute(path: Path, parameters: str, directories: list[Path]) -> None:
    """Runs the notebook at `path` and writes it back with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    (place,) = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(parameters))
    with tempfile.TemporaryDirectory() as work:
        for directory in directories:
            (Path(work) / directory.name).symlink_to(directory.resolve())
        NotebookClient(notebook, timeout=None, resources={"metadata": {"path": work}}).execute()
    del notebook.cells[place + 1]
    tidy(notebook)
    nbformat.write(notebook, path)


def tidy(notebook: NotebookNode) -> None:
    """Removes times and versions, which change with every run, and joins what one stream has printed."""
    notebook.metadata["language_info"] = {"name": "python"}
    count = 0
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        outputs: list[NotebookNode] = []
        for output in cell.outputs:
            last = outputs[-1] if outputs else None
            if last is not None and output.output_type == "stream" and last.get("name") == output.name:
                last.text += output.text
            else:
                outputs.append(output)
        cell.outputs = outputs


if __name__ == "__main__":
    execute(Path(sys.argv[1]), "".join(sys.argv[2:3]), [Path(directory) for directory in sys.argv[3:]])
