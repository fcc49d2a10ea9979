"""What enters a memory, a file of tensors, and comes back from it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from kanerva.config import (
    KppConfig,
    KppDecoderConfig,
    KppEncoderConfig,
    KppMemoryConfig,
    KppReadoutConfig,
)
from kanerva.errors import UserError
from kanerva.files import digest, write_tensors
from kanerva.memory.heap import Memory
from kanerva.models.kpp import Kpp


@pytest.fixture
def model() -> Kpp:
    return Kpp(
        KppConfig(
            image=(1, 8, 8),
            encoder=KppEncoderConfig(width=4, depth=1),
            memory=KppMemoryConfig(channels=2, size=8, capacity=4),
            readout=KppReadoutConfig(size=2, channels=1, prior_width=4),
            decoder=KppDecoderConfig(base=4, depth=1),
        )
    ).eval()


def images(count: int) -> Tensor:
    return torch.rand(count, 1, 8, 8).round()


# 4: numbers that are not finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_4_an_image_that_is_not_finite_enters_no_memory(model: Kpp, bad: float):
    spoilt = images(1)
    spoilt[0, 0, 3, 3] = bad
    memory = model.write(images(2))
    for use in (model.write, lambda i: model.append(memory, i), lambda i: model.recall(memory, i)):
        with pytest.raises(UserError, match="not finite"):
            use(spoilt)
    with pytest.raises(UserError, match="not finite"):
        model.train().append(memory, spoilt)


def test_4_a_memory_that_is_not_finite_replaces_no_file(tmp_path: Path):
    Memory(torch.ones(1, 2, 2)).save(tmp_path / "m")
    for dtype in ("float32", "bfloat16", "int8", "int4"):
        with pytest.raises(UserError, match="not finite"):
            Memory(torch.full((1, 2, 2), torch.nan)).save(tmp_path / "m", dtype)
    assert (Memory.load(tmp_path / "m").map == 1).all()


def test_4_weights_that_are_not_finite_replace_no_checkpoint(tmp_path: Path, model: Kpp):
    model.save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with torch.no_grad():
        next(model.parameters()).fill_(torch.inf)
    with pytest.raises(UserError, match="not finite"):
        model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before


# 10: seals and contents


def parts(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, "pt") as file:
        return load_file(path), dict(file.metadata())


@pytest.mark.parametrize("format", ["kanerva-memory-2", "kanerva-memory-3"])
def test_10_a_memory_without_its_seal_is_refused(tmp_path: Path, model: Kpp, format: str):
    model.write(images(3)).save(tmp_path / "m")
    tensors, about = parts(tmp_path / "m")
    del about["sha256"]
    save_file(tensors, tmp_path / "m", metadata=about | {"format": format})
    with pytest.raises(UserError, match="lacks the digest"):
        Memory.load(tmp_path / "m")


def forged(change: str, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    """One thing that `save` would never write."""
    owners = tensors["owners"]
    if change == "twice":
        owners[:] = owners.max()
    elif change == "beyond":
        owners[0] = 7
    elif change == "below":
        owners[0] = -2
    elif change == "reused":
        about["issued"] = "0"
    elif change == "owners as floats":
        tensors["owners"] = owners.float()
    elif change == "owners of another shape":
        tensors["owners"] = owners[None]
    elif change in ("nan", "bool", "complex", "int64"):
        kinds = {"nan": torch.float32, "bool": torch.bool, "complex": torch.complex64}
        tensors["map"] = tensors["map"].to(kinds.get(change, torch.int64))
        if change == "nan":
            tensors["map"].flatten()[0] = torch.nan
    else:
        key, _, value = change.partition("=")
        about[key] = value


FORGED = ["twice", "beyond", "below", "reused", "owners as floats", "owners of another shape"]
FORGED += ["nan", "bool", "complex", "int64", "issued=[]", "issued=-1", "issued=true", "issued=1.5"]
FORGED += ["shape=5", "shape=[2, 8]", "shape=[2, 8, 9]", 'shape="a"', "dtype=int8", "dtype=x"]
FORGED += ["shape=" + "[" * 5000, "issued=" + "9" * 5000, "disjoint=false"]


@pytest.mark.parametrize("change", FORGED, ids=lambda change: change[:24])
def test_10_a_memory_that_no_save_wrote_is_refused(tmp_path: Path, model: Kpp, change: str):
    """Though its seal is in order."""
    model.write(images(3)).save(tmp_path / "m")
    tensors, about = parts(tmp_path / "m")
    del about["sha256"]
    forged(change, tensors, about)
    write_tensors(tmp_path / "m", tensors, about)
    with pytest.raises(UserError) as error:
        Memory.load(tmp_path / "m")
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("kind", ["nan", "bool", "complex", "int"])
def test_10_weights_of_other_types_or_not_finite_are_refused(tmp_path: Path, model: Kpp, kind: str):
    """As they might come from elsewhere: without a seal."""
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name, value in weights.items() if value.ndim == 4)
    kinds = {"bool": torch.bool, "complex": torch.complex64, "int": torch.int32}
    weights[name] = weights[name].to(kinds.get(kind, torch.float32))
    if kind == "nan":
        weights[name][0] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=name):
        Kpp.from_pretrained(tmp_path)


def test_10_weights_that_name_their_config_have_a_seal(tmp_path: Path, model: Kpp):
    model.save_pretrained(tmp_path)
    weights, about = parts(tmp_path / "model.safetensors")
    del about["sha256"]
    save_file(weights, tmp_path / "model.safetensors", metadata=about)
    with pytest.raises(UserError, match="lacks the digest"):
        Kpp.from_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    Kpp.from_pretrained(tmp_path)  # of someone who wrote it otherwise
    best = tmp_path / "checkpoints" / "best"
    best.mkdir(parents=True)
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).rename(best / name)
    with pytest.raises(UserError, match="lacks the digest"):
        Kpp.from_pretrained(best)


# 12 and 13


def test_12_handles_and_episodes_that_cannot_be_are_one_line(model: Kpp):
    memory = model.write(images(2))
    for handle in (2**70, -(2**70)):
        with pytest.raises(UserError, match="not held"):
            memory.free(handle)
    with pytest.raises(UserError, match="at least one image"):
        model.write(torch.zeros(0, 3, 1, 8, 8))


def test_13_equal_tensors_are_equal_bytes(tmp_path: Path):
    tensors = {"b": torch.randn(3), "a": torch.arange(3), "c": torch.ones(5, dtype=torch.uint8)}
    about = {f"key{number}": "x" for number in range(8)}
    written = set()
    for number in range(8):
        write_tensors(
            tmp_path / "t", tensors, about if number % 2 else dict(reversed(about.items()))
        )
        written.add((tmp_path / "t").read_bytes())
    assert len(written) == 1
    back = load_file(tmp_path / "t")
    assert digest(back, about) == digest(tensors, about)
    header = written.pop()
    assert json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["a"]["shape"] == [3]


def test_13_more_samples_than_fit_are_refused(model: Kpp):
    with pytest.raises(UserError, match="too many at once"):
        model.generate(model.write(images(2)), 10**9)
