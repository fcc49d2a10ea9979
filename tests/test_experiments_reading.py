"""Fig. 6 and recall: the rivals against their formulas, and what each experiment finds in a tiny
version."""

import copy
import math
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from kanerva.lab.experiments import (
    Lab,
    baselines,
    denoise,
    experiment,
    iterative,
    measures,
    recall,
)
from kanerva.lab.harness import Finding
from kanerva.models.kpp import Kpp
from tiny_lab import TinyLab

STEPS = 3


class Tiny(TinyLab):
    """Fewer images and steps than the quick version has."""

    def pick(self, quick: Any, full: Any) -> Any:
        return {128: 64, 5: 2, (4, 8, 16, 32): (8, 32)}[quick]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Models of two steps, kept for all tests of this file."""
    return Tiny(quick=True, runs=tmp_path_factory.mktemp("runs"), steps=2)


@pytest.fixture(scope="module")
def found(lab: Lab) -> dict[str, Finding]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(denoise, "STEPS", STEPS)
        patch.setattr(iterative, "STEPS", STEPS)
        return {name: experiment(name).run(lab) for name in ("denoise", "iterative", "recall")}


# Rivals and scores against their definitions


def test_the_median_filter_is_the_middle_of_nine():
    images = torch.rand(2, 3, 5, 4)
    filtered = baselines.median_filter(images)
    for n, c, y, x in ((0, 0, 0, 0), (1, 2, 4, 3), (0, 1, 2, 1), (1, 0, 0, 2)):
        rows = [min(max(y + d, 0), 4) for d in (-1, 0, 1)]
        columns = [min(max(x + d, 0), 3) for d in (-1, 0, 1)]
        window = sorted(images[n, c, row, column].item() for row in rows for column in columns)
        assert filtered[n, c, y, x].item() == window[4]
    lonely = torch.zeros(1, 1, 7, 7)
    lonely[..., 3, 3] = 1
    assert baselines.median_filter(lonely).sum() == 0


def test_distances_are_over_visible_pixels_only():
    pictures, written = torch.rand(2, 3, 1, 4, 5), torch.rand(2, 6, 1, 4, 5)
    squares = (pictures[:, :, None] - written[:, None]).square()
    torch.testing.assert_close(
        baselines.squared_distances(pictures, written), squares.mean(dim=(3, 4, 5))
    )
    seen = torch.ones(2, 3, 4, 5)
    seen[..., 2:, :] = 0
    upper = baselines.squared_distances(pictures, written, seen)
    torch.testing.assert_close(upper, squares[..., :2, :].mean(dim=(3, 4, 5)))
    colour = torch.rand(1, 2, 3, 4, 5)
    wide = baselines.squared_distances(colour, colour.flip(1), seen[:1, :2])
    expected = (colour - colour.flip(1)).square()[..., :2, :].mean(dim=(2, 3, 4))
    torch.testing.assert_close(wide.diagonal(dim1=1, dim2=2), expected)


def test_the_nearest_image_is_found_from_what_is_visible():
    written = torch.rand(2, 8, 1, 6, 6).round()
    cue = written.clone()
    cue[..., 3:, :] = 0.7
    seen = torch.ones(2, 8, 6, 6)
    seen[..., 3:, :] = 0
    assert torch.equal(baselines.nearest(written, cue, seen), written)


def test_a_hopfield_update_is_its_formula():
    written, cue = torch.rand(1, 5, 1, 3, 4).round(), torch.rand(1, 2, 1, 3, 4)
    stored, state = written.flatten(2)[0].T, cue.flatten(2)[0].T  # columns, as in the paper
    stored, state = 2 * stored - 1, 2 * state - 1
    for _ in range(2):
        energy = 0.3 * stored.T @ state
        state = stored @ (energy.exp() / energy.exp().sum(dim=0))
    made = baselines.hopfield(written, cue, beta=0.3, steps=2)
    torch.testing.assert_close(made[0].flatten(1).T, (state + 1) / 2)


def test_hidden_pixels_have_no_say_in_hopfields_update():
    written, cue = torch.rand(1, 5, 1, 4, 4).round(), torch.rand(1, 2, 1, 4, 4)
    seen = torch.ones(1, 2, 4, 4)
    seen[..., 2:, :] = 0
    other = torch.where(seen[:, :, None] == 1, cue, 1 - cue)
    pair = [baselines.hopfield(written, each, beta=1.0, observed=seen) for each in (cue, other)]
    torch.testing.assert_close(*pair)


def test_equal_images_count_as_found():
    written = torch.rand(1, 4, 1, 5, 5)
    written[:, 3] = written[:, 0]
    assert baselines.nearest_is_own(written, written).all()
    assert baselines.nearest_is_own(written.roll(1, dims=1), written).tolist() == [
        [True, False, False, False]
    ]


def test_a_mean_has_its_standard_error():
    values = torch.tensor([1.0, 2.0, 3.0, 6.0])
    made = measures.estimate(values)
    assert made["mean"] == 3 and made["se"] == pytest.approx(math.sqrt(14 / 3 / 4))
    assert measures.clearly_lower({"mean": 2.0, "se": 1.0})
    assert not measures.clearly_lower({"mean": 1.9, "se": 1.0})
    assert not measures.clearly_lower({"mean": -5.0, "se": 1.0})


def test_shifts_go_four_ways_and_lose_what_leaves():
    image = torch.zeros(200, 1, 9, 9)
    image[..., 4, 4] = 1
    moved = recall.shift(image, torch.Generator().manual_seed(0))
    places = {tuple(each.nonzero()[0, 1:].tolist()) for each in moved}
    assert places == {(4, 6), (4, 2), (6, 4), (2, 4)}
    corner = torch.ones(40, 1, 2, 2)
    assert recall.shift(corner, torch.Generator().manual_seed(0)).sum() == 0


def test_recalling_from_another_episode_reads_the_next_episodes_memory(lab: Lab):
    model, images = lab.trained("kpp"), lab.images(8)
    made = [
        baselines.recall_every_step(
            model, images, images, 4, steps=2, noise=lab.noise("test"), other_episode=other
        )
        for other in (False, True)
    ]
    written = images.unflatten(0, (2, 4)).roll(1, dims=0)
    memory = model.write(written, generator=lab.noise("test"))
    expected = model.recall(memory, images.unflatten(0, (2, 4)), steps=2).flatten(1, 2)
    assert made[0].shape == (2, 8, 1, 28, 28)
    torch.testing.assert_close(made[1], expected)
    assert not torch.equal(*made)


# Weights in a memory with more room


def test_more_room_is_made_of_the_same_cells(lab: Lab):
    plain: dict[str, Any] = {}
    small: dict[str, Any] = {"memory": {"size": recall.SMALL}}
    for options, block in ((plain, (3, 10, 10)), (small, (3, 4, 4))):
        model = lab.trained("kpp", **options)
        assert recall.with_room(lab, model, 36, **options) is model
        moved = recall.with_room(lab, model, 256, **options)
        assert isinstance(moved, Kpp) and moved.writer.shape == block
        assert moved.memory_shape(256) == (3, 16 * block[1], 16 * block[1])
    images = lab.images(40)
    memory = moved.write(images, generator=lab.noise("room"))
    assert (len(memory), memory.capacity) == (40, 256)
    few, same = images[:6], lab.noise("room")
    in_both = [
        each.recall(each.write(few, generator=same), few, steps=1) for each in (model, moved)
    ]
    torch.testing.assert_close(*in_both)  # where a block lies does not matter


# The experiments


@pytest.mark.parametrize("name", ["denoise", "iterative", "recall"])
def test_a_finding_is_a_record(name: str, found: dict[str, Finding]):
    finding = found[name]
    assert max(map(len, finding.lines)) <= 110
    assert not any(math.isnan(value) for value in numbers(finding.figures))
    assert isinstance(finding.picture, Figure) and len(finding.picture.axes) >= 5


def numbers(entry: object) -> list[float]:
    """Every number of a record; anything that is not JSON fails."""
    if isinstance(entry, dict):
        assert all(isinstance(key, str) for key in entry)
        return [number for value in entry.values() for number in numbers(value)]
    if isinstance(entry, list):
        return [number for value in entry for number in numbers(value)]
    assert entry is None or type(entry) in (int, float, bool, str)
    return [float(entry)] if isinstance(entry, int | float) else []


def test_denoising_errors_are_those_of_the_cue_and_the_filter(lab: Lab, found: dict[str, Finding]):
    figures = found["denoise"].figures
    images = lab.images(figures["images"])
    for noise in denoise.NOISES:
        errors = figures["error"][noise]
        assert {name: len(steps) for name, steps in errors.items()} == {
            "cue": 1, "vae": 1, "median 3x3": 1, "kpp": STEPS, "kpp-paper": STEPS, "dkm": STEPS
        }  # fmt: skip
        cue = denoise.make_cue(noise, images, lab.noise("denoise", noise))
        assert errors["cue"][0]["mean"] == pytest.approx((cue - images).square().mean().item())
        blurred = (baselines.median_filter(cue) - images).square().mean().item()
        assert errors["median 3x3"][0]["mean"] == pytest.approx(blurred)
        gain = errors["vae"][-1]["mean"] - errors["kpp"][-1]["mean"]
        assert figures["lower"][noise]["vae"]["mean"] == pytest.approx(gain, abs=1e-6)
    assert figures["error"]["clean"]["cue"][0]["mean"] == 0
    assert figures["binary"] and "change ink only" in found["denoise"].lines[-1]


def test_the_denoising_verdict_goes_by_the_figures(found: dict[str, Finding]):
    good = copy.deepcopy(found["denoise"].figures)
    for noise in denoise.NOISES:
        good["lower"][noise] = {name: {"mean": 1.0, "se": 0.1} for name in good["lower"][noise]}
    assert "is reached" in denoise.verdict(good) and "3 of 3 noises" in denoise.verdict(good)
    beaten = copy.deepcopy(good)
    beaten["lower"]["poisson"]["vae"]["mean"] = -1.0  # two of three are enough here
    assert "is reached" in denoise.verdict(beaten) and "poisson: lowest is" in denoise.verdict(
        beaten
    )
    worse = copy.deepcopy(good)
    worse["lower"]["speckle"]["cue"]["mean"] = 0.1  # within chance
    assert "is NOT reached" in denoise.verdict(worse)


def test_iterative_measures_are_those_of_its_pictures(lab: Lab, found: dict[str, Finding]):
    figures = found["iterative"].figures
    for name in ("kpp-bits", "kpp-paper"):
        model = figures["models"][name]
        assert all(len(model[measure]) == STEPS + 1 for measure in iterative.MEASURES)
        assert len(model["spread"]) == STEPS + 1 and 0 <= model["copies"] <= 1
        assert all(0 <= step["mean"] <= 1 for step in model["grey"])
        gain = model["bound"][0]["mean"] - model["bound"][-1]["mean"]
        assert model["gain"]["bound"]["mean"] == pytest.approx(gain, abs=1e-3)
    images = lab.images(6).unflatten(0, (2, 3))
    assert iterative.copies(images, images.flip(1)) == 1
    assert iterative.copies(images, torch.full_like(images, 0.5)) == 0
    assert iterative.spread(images[:, :1].expand(-1, 3, -1, -1, -1)) == pytest.approx(0, abs=1e-6)
    pair = torch.stack([torch.zeros(1, 4, 4), torch.full((1, 4, 4), 0.5)])[None]
    assert iterative.spread(pair) == pytest.approx(0.5)


def test_pictures_of_one_memory_count_once_in_an_iterative_error(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
):
    def measure(
        model: object, memory: object, written: torch.Tensor, steps: torch.Tensor, lab: Lab
    ) -> dict[str, torch.Tensor]:
        memories, length = written.shape[:2]
        level = torch.arange(float(memories)).repeat_interleave(length)
        level = level * torch.arange(len(steps), 0.0, -1)[:, None]
        return dict.fromkeys(iterative.MEASURES, level)

    monkeypatch.setattr(iterative, "measure", measure)
    monkeypatch.setattr(iterative, "STEPS", STEPS)
    finding = experiment("iterative").run(lab)
    assert "± standard error over memories" in finding.lines[0]
    for found in finding.figures["models"].values():
        memories = torch.arange(found["images"] / found["length"])
        assert found["bound"][-1] == measures.estimate(memories)
        assert found["gain"]["grey"] == measures.estimate(STEPS * memories)
        assert found["written"]["nearest"] == measures.estimate(memories)


def test_the_iterative_bound_is_the_models_own(lab: Lab):
    model, written = lab.trained("kpp-bits"), lab.images(8).unflatten(0, (2, 4))
    memory = model.write(written, generator=lab.noise("test"))
    with torch.no_grad():
        found = iterative.measure(model, memory, written, written[None] * 0.9, lab)
        bound = model.elbo(written, memory, generator=lab.noise("iterative", "bound")).nll_nats
    torch.testing.assert_close(found["bound"][0], bound.flatten())
    torch.testing.assert_close(
        found["nearest"][0], 0.1 * written.flatten(2).mean(-1).sqrt().flatten()
    )


def test_the_iterative_verdict_goes_by_the_figures(found: dict[str, Finding]):
    good = copy.deepcopy(found["iterative"].figures)
    for model in good["models"].values():
        model["gain"] = {measure: {"mean": 1.0, "se": 0.1} for measure in iterative.MEASURES}
        model["bound"][1]["mean"] = model["bound"][-1]["mean"] + 0.5
        model["spread"] = [0.3] * (STEPS + 1)
    words = iterative.verdict(good)
    assert "NOT" not in words and words.count("50% of the gain") == 2 and "slowly" not in words
    same = copy.deepcopy(good)
    same["models"]["kpp-bits"]["spread"][-1] = 0.01
    assert "kpp-bits does NOT improve" in iterative.verdict(same)
    same["models"]["kpp"] = same["models"].pop("kpp-bits") | {"variant": "generate"}  # older
    assert "kpp (generate) does NOT improve" in iterative.verdict(same)
    costly = copy.deepcopy(good)
    costly["models"]["kpp-paper"]["gain"]["bound"]["mean"] = -1.0
    assert "kpp-paper does NOT improve" in iterative.verdict(costly)


def test_recall_counts_what_is_found(lab: Lab, found: dict[str, Finding]):
    figures = found["recall"].figures
    for shares in figures["share"].values():
        assert set(shares) == set(recall.SYSTEMS)
        assert all(len(each) == 2 and 0 <= min(each) <= max(each) <= 1 for each in shares.values())
    assert figures["share"]["salt_pepper"]["nearest"] == [1.0] * 2
    assert figures["memory"]["kpp"] == [3, 64, 64] and figures["memory"]["kpp-small"] == [3, 24, 24]
    images = lab.images(figures["images"])
    cues = recall.make_cue("shifted", images, lab.noise("recall", "shifted"))
    right = [
        int((cue - images[start : start + 32]).square().mean(dim=(1, 2, 3)).argmin()) == at
        for start in range(0, len(images), 32)
        for at, cue in enumerate(cues[start : start + 32])
    ]
    share = figures["share"]["shifted"]["nearest"][-1]
    assert share == pytest.approx(sum(right) / len(right), abs=0.02)


def test_the_recall_verdict_goes_by_the_figures(found: dict[str, Finding]):
    figures = copy.deepcopy(found["recall"].figures)
    figures["share"]["lower_half_hidden"]["kpp"][-1] = 0.95
    assert "95% is reached" in recall.verdict(figures)
    figures["share"]["lower_half_hidden"]["kpp"][-1] = 0.94
    words = recall.verdict(figures)
    assert "NOT reached" in words and "(kpp 94.0%)" in words
