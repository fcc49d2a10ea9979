"""The notebooks run from top to bottom, and are committed without outputs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "examples"


def read_cells(name: str) -> list[dict[str, Any]]:
    return json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]


def run_cells(name: str) -> dict[str, Any]:
    """Run the code cells in order, as a fresh kernel would; the names they leave."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(read_cells(name)):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{name}.ipynb, cell {number}", "exec"), names)
    return names


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_first_hour(capsys: pytest.CaptureFixture[str]):
    names = run_cells("first_hour")
    said = capsys.readouterr().out
    found = re.findall(r"handle (\d+), probability (1\.000|0\.9\d+); not held 0\.0", said)
    assert [handle for handle, _ in found] == ["7", "3", "5"]
    assert max(names["held"]) < 0.5 < min(names["new"])
    assert names["known"].min() > 0 > names["unknown"].max()
    assert "24 written, 28 after append, 25 after free" in said and names["unchanged"]
    assert names["gone"].none > 0.5
    assert len(names["loaded"]) == 25 and names["samples"].shape == (12, 1, 28, 28)
    # a block may exceed its cap, 24 bits, only by its last integer
    assert names["shrunk"].bits.mean() < 27 and "cap 56" in said
    assert names["written"].nll_nats.mean() < names["left_out"].nll_nats.mean()
    assert names["hits"][0].id == names["ids"][7]
    assert names["receipt"].found == 0 and names["again"].none > 0.5


def test_own_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_cells("own_images")
    said = capsys.readouterr().out
    assert "8 of 8 cues found, 0 not held" in said
    assert {"recall.png", "memory.png"} <= {
        path.name for path in (tmp_path / "runs/mine").iterdir()
    }


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_has_no_outputs_and_a_test(path: Path):
    for cell in read_cells(path.stem):
        assert not cell.get("outputs") and cell.get("execution_count") is None
    assert f'run_cells("{path.stem}")' in Path(__file__).read_text()
