"""One file of tensors: whole or not there, and it knows when it was altered."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kanerva.errors import UserError
from kanerva.files import read_tensors, write_tensors

TENSORS = {
    "a": torch.randn(3, 4),
    "half": torch.randn(5).bfloat16(),
    "count": torch.tensor(7),
    "none": torch.zeros(0, 2),
}


def test_what_is_written_is_read(tmp_path: Path):
    write_tensors(tmp_path / "t", TENSORS, {"format": "pt", "of": "test"})
    tensors, about = read_tensors(tmp_path / "t")
    assert about == {"format": "pt", "of": "test"} and tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="no regular file"):
        write_tensors(tmp_path / "pipe", TENSORS, {})
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("place", [0.0, 0.5, 0.99])
def test_one_flipped_bit_is_noticed(tmp_path: Path, place: float):
    """In the values, where safetensors itself does not look."""
    write_tensors(tmp_path / "t", TENSORS, {})
    content = bytearray((tmp_path / "t").read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start + int(place * (len(content) - start))] ^= 16
    (tmp_path / "t").write_bytes(bytes(content))
    with pytest.raises(UserError, match="was altered"):
        read_tensors(tmp_path / "t")


def test_files_from_elsewhere_need_no_digest(tmp_path: Path):
    save_file({"x": torch.ones(2)}, tmp_path / "t")
    assert torch.equal(read_tensors(tmp_path / "t")[0]["x"], torch.ones(2))


def test_no_file_and_no_folder_are_one_line(tmp_path: Path):
    with pytest.raises(UserError, match="no such file"):
        read_tensors(tmp_path / "t")
    with pytest.raises(UserError, match="cannot write"):
        write_tensors(tmp_path / "nowhere" / "t", TENSORS, {})
