"""`reproduce gist` and `reproduce files`, on a model small enough to code in milliseconds."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kanerva import Memory
from kanerva.errors import UserError
from kanerva.evaluation.frechet import train_feature_extractor
from kanerva.lab.experiments import (
    characters,
    classify,
    files,
    gist,
    mixed_memories,
    new_drawings,
)
from kanerva.lab.harness import Lab
from kanerva.memory.container import SIZE
from kanerva.models import reads_kin
from kanerva.models.kpp_bits import KppBits
from test_bits import CONFIG, shake


@pytest.fixture
def model() -> KppBits:
    model = KppBits(CONFIG).eval()
    shake(model.pixel_code, 0.2)
    return model


CODES = ("gist", "prefix")


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
    grey = 0.8 * images + 0.1
    found = gist.measure(Lab(quick=True, runs=tmp_path), model, images, grey)
    rows = found.figures["rows"]
    assert [row["cap"] for row in rows] == list(gist.CAPS)
    for code in CODES:
        for row in rows:  # a block ends with the pixel that passes its cap
            assert row[code]["bits"]["mean"] <= row["cap"] + 16
        bits, nats = ([row[code][what]["mean"] for row in rows] for what in ("bits", "nats"))
        assert all(a < b for a, b in zip(bits, bits[1:], strict=False)), code
        assert all(a >= b - 1e-6 for a, b in zip(nats, nats[1:], strict=False)), code
    assert rows[-1]["prefix"]["rmse"] < rows[0]["prefix"]["rmse"]
    assert all(row["prefix"]["rmse"] <= row["prefix"]["rmse_one"] + 1e-6 for row in rows)
    assert set(found.figures["found"]) == {"top", "bottom", "left", "right", "random"}
    assert all(0 <= share <= 1 for share in found.figures["found"].values())
    assert max(map(len, found.lines)) <= 115 and found.picture is not None
    # a pixel of the grey image is 0.1 off; one that is stored as it was written is off by as much
    assert found.figures["noise"] == pytest.approx(0.1)
    assert all(abs(row[c]["rmse_grey"] - row[c]["rmse"]) <= 0.1 for row in rows for c in CODES)
    assert "of the mean picture" in gist.verdict(found.figures)
    alone = found.figures["alone"]
    assert alone["prefix"]["bits"] >= alone["gist"]["bits"] > 0
    assert "without any pixel" in gist.verdict(found.figures)
    memory = model.with_capacity(16).write(images)
    assert alone["gist"]["rmse"] == pytest.approx(picture_of_gists(model, memory, images), abs=1e-5)


def picture_of_gists(model: KppBits, memory: Memory, images: Tensor) -> float:
    """RMSE of what p(z | M, y) shows at its mean, of each image at its handle."""
    large = model.with_capacity(16)
    shown = large.likelihood.mean(large.decoder(large.read(memory, handles=range(16)).mean))[0]
    return float((shown - images).square().mean().sqrt())


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
    coding = {"images": 16} | files.time_coding(memory)  # fails where other symbols come back
    assert min(coding.values()) > 0
    lines = files.table({"rows": [{"cap": None} | row], "coding": coding})
    assert max(map(len, lines)) <= 115 and "1 thread" in lines[-2]
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
    lab, groups = Lab(quick=True, runs=tmp_path), {classify.ALL: torch.zeros(5, dtype=torch.long)}
    monkeypatch.setattr(classify, "AT_ONCE_SCORED", 50)  # two tasks of three, then one
    (row,) = classify.measure(lab, model, drawings, 3, ((5, 2),), groups)
    assert row["nearest"]["mean"] == 1.0 and 0 <= row["kpp-bits"]["mean"] <= 1

    def show(blocks: Tensor, features: Tensor, whole: Tensor, held: Tensor) -> Tensor:
        return features[:, 0]

    def exact(kin: Tensor, episode: Tensor) -> Tensor:
        return -(kin[:, None] - model.encoder(episode)).square().sum(dim=(2, 3, 4))

    monkeypatch.setattr(model, "ask_kin", show)
    monkeypatch.setattr(model, "log_like", exact)
    (row,) = classify.measure(lab, model, drawings, 3, ((5, 2),), groups)
    assert row["kpp-bits"]["mean"] == 1.0  # rows are memories, columns targets
    figures = {"characters": 5, "rows": [row | {"shots": 1}]}
    assert "100.0%" in classify.table(figures)[1] and "as hoped" in classify.verdict(figures)


@torch.no_grad()
def test_tasks_together_score_as_memories_do_one_by_one(model: KppBits):
    """The cheapest memory by the bound itself is the one that is chosen."""
    shake(model.kin, 0.2)
    noise = torch.Generator().manual_seed(4)
    drawings = torch.bernoulli(torch.full((6, 4, 1, 10, 7), 0.3), generator=noise)
    groups = torch.zeros(6, dtype=torch.long)
    written, targets = classify.deal(groups, 4, (3, 2), 2, noise)
    found = classify.score(characters.Written(model, drawings), written, targets)
    scores = found[classify.ONE_WAY]
    for task in range(2):
        asked = drawings[targets[task].unbind(-1)]
        bounds = torch.stack(
            [
                model._terms_new(
                    model.write(drawings[pairs.unbind(-1)]).as_batch(), asked[None]
                ).elbo[0]
                for pairs in written[task]
            ]
        )
        assert torch.equal(scores[task].argmax(dim=0), bounds.argmax(dim=0))
        assert float((bounds[0] - bounds[1]).abs().max()) > 1e-3
        back = found[classify.BOTH_WAYS][task] - scores[task]
        for row, column in ((0, 1), (2, 2)):
            known = drawings[written[task, row].unbind(-1)][None]
            memory = model.write(asked[column : column + 1]).as_batch()
            gain = model.log_like(model._read_kin(memory), known) - model.log_alone(known)
            assert float(back[row, column]) == pytest.approx(float(gain.mean()), abs=1e-3)


def test_tasks_never_ask_for_a_drawing_that_is_written_nor_leave_their_alphabet():
    noise = torch.Generator().manual_seed(3)
    groups = torch.arange(30) % 4
    groups[groups == 3] = 2 * (torch.arange(7) % 2)  # one group has none
    written, targets = classify.deal(groups, 6, (5, 3), 40, noise)
    assert written.shape == (40, 5, 3, 2) and targets.shape == (40, 5, 2)
    assert all(len(set(row)) == 5 for row in targets[..., 0].tolist())
    assert bool((written[..., 0] == targets[:, :, :1]).all())
    assert not bool((written[..., 1] == targets[:, :, 1:]).any())
    assert all(len(row.unique()) == 3 for row in written[..., 1].flatten(0, 1))
    found = groups[targets[..., 0]]
    assert bool((found == found[:, :1]).all()) and set(found[:, 0].tolist()) == {0, 1, 2}


# new-drawings


@pytest.fixture
def drawings() -> Tensor:
    """Four characters of eight drawings: a picture each, a tenth of its pixels changed."""
    noise = torch.Generator().manual_seed(3)
    base = torch.bernoulli(torch.full((4, 1, 1, 10, 7), 0.4), generator=noise)
    changed = torch.rand(4, 8, 1, 10, 7, generator=noise) < 0.1
    return torch.where(changed, 1 - base, base)


def test_distances_are_those_after_the_best_shift():
    one = torch.zeros(1, 1, 1, 10, 7)
    one[..., 4:7, 2:5] = 1
    moved, far = one.roll((2, -1), (-2, -1)), one.roll(5, -2)
    found = new_drawings.shifted_distances(one, torch.cat([moved, far, 1 - one], dim=1))[0, 0]
    assert found[0].item() == 0 and found[1] > 0 and found[2] > 10
    pairs = torch.cat([one, moved, 1 - one], dim=1)
    assert new_drawings.closest_pairs(pairs).tolist() == [0.0]


def test_rivals_begin_with_the_character_itself():
    rivals = new_drawings.draw_rivals(30, torch.Generator().manual_seed(0))
    assert rivals.shape == (30, 20) and torch.equal(rivals[:, 0], torch.arange(30))
    assert all(len(row.unique()) == 20 for row in rivals)


@pytest.mark.parametrize("copied", [True, False])
def test_copies_and_characters_are_counted(
    model: KppBits,
    drawings: Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    copied: bool,
):
    lab = Lab(quick=True, runs=tmp_path)
    labels = torch.arange(4).repeat_interleave(8)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    noise = torch.Generator().manual_seed(0)
    extractor = train_feature_extractor(
        drawings.flatten(0, 1)[order], labels[order], steps=80, generator=noise
    )
    if copied:

        def give_back(lab: Lab, model: KppBits, written: Tensor) -> tuple[Tensor, Tensor]:
            return written.roll(1, -1), written[:, :1]

        monkeypatch.setattr(new_drawings, "sample", give_back)
        drawings[:2, 5] = drawings[:2, 0]  # real ones that might pass for copies: half of four
    found = new_drawings.measure(lab, model, drawings, extractor)
    shares = found.figures["recognised"]
    assert shares["real"]["mean"] > 0.9  # the classifier has seen these
    if copied:
        assert found.figures["copies"] == 0.5 and "copies" in new_drawings.verdict(found.figures)
        assert found.figures["copies_of_real"] >= 0.5
    else:  # nothing is trained: neither copies nor characters
        assert found.figures["copies"] < 0.1 and shares["samples"]["mean"] < 0.7
    assert max(map(len, found.lines)) <= 120 and found.picture is not None


def test_the_classifier_learns_from_what_is_not_written(drawings: Tensor, tmp_path: Path):
    extractor = new_drawings.train_classifier(Lab(quick=True, runs=tmp_path), drawings[:, 5:])
    rivals = torch.arange(4)[:, None].repeat(1, 4)
    rivals = (rivals + torch.arange(4)) % 4
    assert extractor.classes == 4 and extractor.accuracy is not None
    share = new_drawings.recognise(extractor, drawings[:, :5], rivals)
    assert share.shape == (4,) and share.mean() > 0.5  # chance: a quarter


# mixed-memories


@torch.no_grad()
def test_mixed_memories_are_scored_as_written_memories_are(
    model: KppBits, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mixed_memories, "LATEST", 4)
    for module in (reads_kin, characters):
        monkeypatch.setattr(module, "GROUP", 2)
    drawings = torch.bernoulli(torch.full((6, 3, 1, 10, 7), 0.3))
    held = characters.Written(model, drawings)
    noise = torch.Generator().manual_seed(0)
    own, others = mixed_memories.deal(held, (3, 2), noise)
    assert own.shape == (3, 3, 2) and others.shape == (3, 1, 2)
    chosen = own[:, 0, 0].tolist() + others[:, 0, 0].tolist()
    assert sorted(chosen) == list(range(6))  # the others' characters are not in the memory
    assert all(sorted(row) == [0, 1, 2] for row in own[..., 1].tolist())
    found = mixed_memories.score(held, own, others, noise)
    memory = model.write(drawings[own[:, :2].flatten(0, 1).unbind(-1)]).as_batch()
    for name, pairs in (("groups", own[:, 2]), ("unrelated", others[:, 0])):
        images = drawings[pairs.unbind(-1)]
        expected = model._terms_new(memory, images[None]).nll_nats[0]
        torch.testing.assert_close(found[name], expected, atol=1e-4, rtol=0)
        empty = model.elbo(images[None], model.empty(1)).nll_nats[0]
        torch.testing.assert_close(found[f"{name} empty"], empty.double(), atol=1e-4, rtol=0)
    one = model.write(drawings[own[1, :2].unbind(-1)]).as_batch()
    alone = model._terms_new(one, drawings[own[1, 2].unbind(-1)][None, None]).nll_nats[0, 0]
    assert float(found["own"][1]) == pytest.approx(float(alone), abs=1e-4)
    with pytest.raises(UserError, match="too few for 4 x 2"):
        mixed_memories.deal(held, (4, 2), noise)


def test_the_verdict_on_mixed_memories_is_that_of_the_figures():
    def found(mean: float) -> dict[str, float]:
        return {"mean": mean, "error": 0.2}

    names = {"empty": 110.0, "together": 0.3, "own": -6.0, "unrelated": 0.9}
    row = {"characters": 20, "each": 5, "memories": 7} | {n: found(v) for n, v in names.items()}
    for mean, words in ((-3.0, "helps (-3.00"), (3.0, "costs (+3.00"), (0.3, "no difference")):
        figures = {"characters": 40, "rows": [row | {"groups": found(mean)}]}
        assert words in mixed_memories.verdict(figures)
        assert f"{mean:+.2f} ± 0.20" in mixed_memories.table(figures)[1]
