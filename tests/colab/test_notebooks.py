# SPDX-License-Identifier: Apache-2.0
"""The notebooks equal their text pairs, hold no outputs, and run at tiny size."""

import os
import sys
from pathlib import Path

import jupytext
import nbclient
import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "colab"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# A text of 256 bytes is decoded instead of 1,024, which `.ci/run` does besides.
FEW_LIVE_TOKENS = """
import dataclasses
from jaxkv.cli.variants import SIZES
SIZES["tiny"] = dataclasses.replace(SIZES["tiny"], live=256)
"""


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_the_notebook_equals_its_text_pair_and_holds_no_outputs(path: Path) -> None:
    notebook, text = read(path), jupytext.read(path.with_suffix(".py"))
    cells = [(c.cell_type, c.source) for c in notebook.cells]
    assert cells == [(c.cell_type, c.source) for c in text.cells]
    assert not any(c.get("outputs") or c.get("execution_count") for c in notebook.cells)


def test_the_first_cells_have_the_badge_and_the_repository() -> None:
    notebook = read(FOLDER / "01_quickstart.ipynb")
    assert "colab-badge.svg" in notebook.cells[0].source
    assert 'REPOSITORY = "' in notebook.cells[1].source


@pytest.mark.notebook
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_the_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(FOLDER.parent)
    monkeypatch.setenv("JAXKV_NOTEBOOK_SIZE", "tiny")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, *sys.path]))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
    notebook = read(path)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(FEW_LIVE_TOKENS))
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    printed = "".join(
        output.get("text", "") for cell in client.nb.cells for output in cell.get("outputs", [])
    )
    assert "tokens held: [16 16] - bytes per token: 1024" in printed
    assert (tmp_path / "jaxkv-compare" / "compare.json").is_file()
