"""`reproduce gist` and `reproduce files`, on a model small enough to code in milliseconds."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kanerva.lab.experiments import classify, files, gist
from kanerva.lab.harness import Lab
from kanerva.memory.container import SIZE
from kanerva.models.kpp_bits import KppBits
from kanerva.models.terms import ElboTerms
from test_bits import CONFIG, shake


@pytest.fixture
def model() -> KppBits:
    model = KppBits(CONFIG).eval()
    shake(model.pixel_code, 0.2)
    return model


@pytest.fixture
def images() -> Tensor:
    noise = torch.Generator().manual_seed(1)
    return torch.bernoulli(torch.full((16, 1, 10, 7), 0.3), generator=noise)


@torch.no_grad()
def test_both_codes_stay_near_their_caps_and_store_more_with_more_bits(
    model: KppBits, images: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gist, "COMPLETIONS", 2)
    monkeypatch.setattr(gist, "AT_ONCE", 20)  # more than one part
    found = gist.measure(Lab(quick=True, runs=tmp_path), model, images)
    rows = found.figures["rows"]
    assert [row["cap"] for row in rows] == list(gist.CAPS)
    for code in ("gist", "prefix"):
        for row in rows:  # a block ends with the pixel that passes its cap
            assert row[code]["bits"]["mean"] <= row["cap"] + 16
        nats = [row[code]["nats"]["mean"] for row in rows]
        assert all(a >= b - 1e-6 for a, b in zip(nats, nats[1:], strict=False)) or code == "gist"
    assert rows[-1]["prefix"]["rmse"] < rows[0]["prefix"]["rmse"]
    assert all(row["prefix"]["rmse"] <= row["prefix"]["rmse_one"] + 1e-6 for row in rows)
    assert set(found.figures["found"]) == {"top", "bottom", "left", "right", "random"}
    assert all(0 <= share <= 1 for share in found.figures["found"].values())
    assert max(map(len, found.lines)) <= 115 and found.picture is not None
    assert "of the mean picture" in gist.verdict(found.figures)


@torch.no_grad()
def test_stored_pixels_are_kept_and_the_rest_completed(model: KppBits, images: Tensor):
    detail = gist.cap_prefix(model, images, 20)
    means, one = gist.complete(model, detail, torch.Generator().manual_seed(0))
    known = detail.is_stored
    assert 0 < int(known.sum()) < known.numel()
    for pictures in (means, one):
        assert torch.equal(pictures[known], images.flatten(1)[known])
    assert bool(((one == 0) | (one == 1)).all())


@torch.no_grad()
def test_files_are_as_large_as_they_claim_and_give_back_what_went_in(
    model: KppBits, images: Tensor, tmp_path: Path
):
    large = model.with_capacity(16)
    assert isinstance(large, KppBits)
    memory = files.write_all(large, images)
    row = files.measure(large, memory, tmp_path, [])
    assert row["images"] == 16 and sum(row["differences"].values()) == 0
    assert row["bytes"] == (tmp_path / "memory").stat().st_size
    assert row["claim"] <= row["bytes"] - SIZE - row["handles"] + 1 <= row["claim"] + 12
    lines = files.table({"rows": [{"cap": None} | row]})
    assert max(map(len, lines)) <= 115 and "1 thread" in lines[-1]
    assert files.verdict({"rows": [row]}).startswith("0 blocks")


@torch.no_grad()
def test_another_block_is_counted(model: KppBits, images: Tensor):
    memory = model.write(images[:6])
    assert files.count_differences(memory, memory.shrink(5, 0, 3)) == 2


@torch.no_grad()
def test_drawings_go_to_the_memory_that_makes_them_cheap(
    model: KppBits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Characters that are one image each: the nearest pixels tell them apart, and so does a model
    whose kin say what they look like."""
    noise = torch.Generator().manual_seed(2)
    kinds = torch.bernoulli(torch.full((5, 1, 1, 10, 7), 0.4), generator=noise)
    drawings = kinds.expand(-1, 4, -1, -1, -1).contiguous()
    lab = Lab(quick=True, runs=tmp_path)
    (row,) = classify.measure(lab, model, drawings, 3, ((5, 2),))
    assert row["nearest"]["mean"] == 1.0 and 0 <= row["kpp-bits"]["mean"] <= 1

    def copy(blocks: Tensor, features: Tensor, whole: Tensor, held: Tensor) -> Tensor:
        return blocks.new_zeros(len(blocks), 16, 3, 2) + torch.arange(5.0)[:, None, None, None]

    def exact(kin: Tensor, count: Tensor, episode: Tensor) -> ElboTerms:
        own = kin[:, 0, 0, 0].long()[:, None] == torch.arange(5)
        return ElboTerms(own.double(), torch.zeros(5, 5), torch.zeros(5, 5))

    monkeypatch.setattr(model, "_ask_kin", copy)
    monkeypatch.setattr(model, "_terms_beside", exact)
    (row,) = classify.measure(lab, model, drawings, 3, ((5, 2),))
    assert row["kpp-bits"]["mean"] == 1.0  # rows are memories, columns targets
    figures = {"characters": 5, "rows": [row | {"shots": 1}]}
    assert "100.0%" in classify.table(figures)[1] and "as hoped" in classify.verdict(figures)


def test_tasks_never_ask_for_a_drawing_that_is_written():
    noise = torch.Generator().manual_seed(3)
    for _ in range(20):
        written, targets = classify.deal(30, 6, 5, 3, noise)
        assert written.shape == (5, 3, 2) and targets.shape == (5, 2)
        assert len(set(targets[:, 0].tolist())) == 5
        assert bool((written[..., 0] == targets[:, :1]).all())
        assert not bool((written[..., 1] == targets[:, 1:]).any())
