"""Perturbed and random keys, and samples beside a VAE's: measures and verdicts."""

import json
import math
from pathlib import Path

import pytest
import torch

from kanerva.evaluation.frechet import FeatureExtractor
from kanerva.lab.experiments import (
    Lab,
    experiment,
    perturb,
    random_keys,
    vae_vs_kpp,
)
from kanerva.lab.experiments.drawing import MODELS, models_for, train_to_draw
from kanerva.lab.experiments.measures import (
    Intervals,
    interval,
    is_blurred,
    mean_distance,
    over_memories,
    rms,
    sharpness,
)
from kanerva.lab.harness import Finding, save_picture
from kanerva.memory.heap import Memory
from kanerva.models.kpp import Kpp
from tiny_lab import TinyLab


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models of a few steps are kept for all tests of this file."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def lab(runs: Path) -> Lab:
    return TinyLab(quick=True, runs=runs, steps=2)


def noise(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def check(finding: Finding, tmp_path: Path) -> None:
    """What holds for every finding: plain JSON, lines that fit, pictures that can be written."""
    assert json.loads(json.dumps(finding.figures)) == finding.figures
    assert max(map(len, finding.lines)) <= 110
    assert save_picture(finding, tmp_path / "x.png") == ["x.png"]


# Measures


def test_distances_are_root_mean_squares():
    some, others = torch.rand(3, 2, 5, 4, generator=noise()), torch.rand(4, 2, 5, 4)
    found = rms(some, others)
    for i in range(3):
        for j in range(4):
            expected = (some[i] - others[j]).square().mean().sqrt()
            torch.testing.assert_close(found[i, j], expected)
    assert torch.equal(rms(some, some).diagonal(), torch.zeros(3))
    pairs = [rms(some, some)[i, j] for i in range(3) for j in range(i)]
    torch.testing.assert_close(mean_distance(some), torch.stack(pairs).mean())
    torch.testing.assert_close(mean_distance(torch.stack([some, some * 0]))[1], torch.tensor(0.0))


def test_sharpness_of_known_pictures():
    stripes = torch.zeros(1, 6, 6)
    stripes[:, ::2] = 1
    found = sharpness(stripes, True)
    assert found["edges"].item() == 0.5 and found["grey"].item() == 0  # every row, no column
    grey = sharpness(torch.full((2, 1, 6, 6), 0.5), True)
    assert torch.equal(grey["grey"], torch.ones(2)) and torch.equal(grey["edges"], torch.zeros(2))
    assert "grey" not in sharpness(stripes, False)


def test_blurred_is_beyond_the_error():
    def entry(grey: float, ci95: float = 0.01) -> Intervals:
        return {"grey": {"mean": grey, "ci95": ci95}}

    assert is_blurred(entry(0.3), entry(0.2)) and not is_blurred(entry(0.2), entry(0.3))
    assert not is_blurred(entry(0.3, 0.1), entry(0.2, 0.1)) and not is_blurred(
        entry(0.21), entry(0.2)
    )
    few, many = {"edges": {"mean": 0.1, "ci95": 0.0}}, {"edges": {"mean": 0.2, "ci95": 0.0}}
    assert is_blurred(few, many) and not is_blurred(many, few)


def test_a_summary_is_mean_and_interval():
    found = interval(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert found["mean"] == 2.5
    assert found["ci95"] == pytest.approx(1.96 * math.sqrt(5 / 3) / 2)
    memories = over_memories(torch.tensor([0.0, 2.0, 1.0, 5.0]), 2)
    assert torch.equal(memories, torch.tensor([1.0, 3.0]))


def test_rows_that_do_not_move_have_no_change_and_own_themselves():
    images = torch.rand(4, 1, 6, 6, generator=noise())
    found = perturb.measure_rows(images[:, None].expand(-1, 3, -1, -1, -1), images, images, True)
    assert torch.equal(found["change"], torch.zeros(4)) and torch.equal(found["own"], torch.ones(4))
    assert torch.equal(found["nearest"], torch.zeros(4))
    rolled = perturb.measure_rows(images.roll(1, dims=0)[:, None], images, images, True)
    assert torch.equal(rolled["own"], torch.zeros(4)) and bool((rolled["change"] > 0.1).all())


def test_only_models_that_take_its_pixels_draw_a_data_set():
    assert models_for("omniglot") == MODELS and models_for("mazes") == ("kpp-paper", "vae")


@pytest.mark.parametrize("name", perturb.MODELS)
def test_a_scene_draws_as_its_model_does(lab: Lab, name: str):
    """The same keys and noise give the pictures of the model's own `generate`."""
    model, length = train_to_draw(lab, name)
    images = lab.images(length)
    with torch.no_grad():
        at = perturb.write_scene(model, images[None], noise())
    assert at.starts.shape[:2] == (1, length)
    memory = None if at.memory is None else at.memory[0]
    mine, theirs = noise(5), noise(5)
    with torch.no_grad():
        made = at.pictures(at.draw_keys(3, mine), None if name == "vae" else mine)[0]
    torch.testing.assert_close(made, model.generate(memory, 3, generator=theirs))


# Perturbed keys, random keys


def test_perturb(lab: Lab, tmp_path: Path):
    finding = experiment("perturb").run(lab)
    check(finding, tmp_path)
    models = finding.figures["models"]
    assert set(models) == set(perturb.MODELS) and finding.figures["rows"] == 64
    for name, ways in models.items():
        assert {"unmoved", "0.1", "0.316", "random"} <= set(ways)
        assert ("z redrawn" in ways) == (name != "vae")
        assert 0 <= ways["0.1"]["own"]["mean"] <= 1 and ways["random"]["change"]["mean"] >= 0
        assert ways["0.1"]["change"]["mean"] <= 1.2 * ways["0.316"]["change"]["mean"] + 1e-4


def entry(change: float, within: float, own: float = 1.0, grey: float = 0.1) -> Intervals:
    values = {"change": change, "within": within, "own": own, "grey": grey}
    return {what: {"mean": value, "ci95": 0.01} for what, value in values.items()}


def test_the_verdict_on_perturbed_keys_can_say_no():
    good = {"unmoved": entry(0.0, 0.0), "0.1": entry(0.1, 0.1), "random": entry(0.3, 0.3)}

    def verdict(**other: dict[str, Intervals]) -> str:
        models = {"kpp-paper": good, "vae": good}
        models |= {name.replace("_", "-"): ways for name, ways in other.items()}
        return perturb.verdict({"models": models})

    assert "kpp-paper: local variation, 0.100" in verdict()
    assert "NOT seen: neither is blurred" in verdict()
    blurry = good | {"0.1": entry(0.1, 0.1, grey=0.3)}
    assert "as the paper has it" in verdict(vae=blurry)
    assert "only kpp-paper's pictures are blurred" in verdict(kpp_paper=blurry)
    dead = good | {"0.1": entry(0.0, 0.0), "random": entry(0.001, 0.001)}
    assert "kpp-paper: keys change NOTHING" in verdict(kpp_paper=dead)
    wild = good | {"0.1": entry(0.3, 0.3)}
    assert "kpp-paper: moved keys are NOT" in verdict(kpp_paper=wild)
    still = good | {"0.1": entry(0.001, 0.001)}
    assert "vae: z moved by 0.1 change nothing" in verdict(vae=still)
    retired = {"kpp-generate": blurry, "kpp-paper": good, "vae": good}  # an older record
    assert "only kpp-generate's pictures are blurred" in perturb.verdict({"models": retired})


def test_random_keys(lab: Lab, tmp_path: Path):
    finding = experiment("random-keys").run(lab)
    check(finding, tmp_path)
    found, sizes = finding.figures["pictures"], finding.figures["n"]
    assert sizes["kpp-bits"] == sizes["kpp-bits, nothing written"] == sizes["vae"] == 256
    assert found["two written, mixed"]["gap"]["mean"] > 0.02  # what the measure is to find
    assert abs(found["unwritten images"]["gap"]["mean"]) < 0.02  # and where it is to find nothing
    assert "kpp-paper, keys alone" in found
    assert not {"vae, keys alone", "kpp-bits, keys alone", "vae, nothing written"} & set(found)


def test_pictures_of_one_group_count_once_in_the_error_of_random_keys(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
):
    """If they are all the same, only the number of groups makes a mean more certain."""
    calls = iter(range(10**6))

    def measure(made: torch.Tensor, *_: object) -> random_keys.Values:
        value = float(next(calls))
        alike = torch.full((len(made),), value)
        return {"nearest": alike, "gap": alike, "edges": alike, "apart": alike[:1]}

    monkeypatch.setattr(random_keys, "measure", measure)
    monkeypatch.setattr(random_keys, "models_for", lambda _: ("kpp-paper",))
    figures = experiment("random-keys").run(lab).figures
    found = figures["pictures"]["kpp-paper"]
    assert found["nearest"] == found["apart"] and figures["n"]["kpp-paper"] == 256
    groups = torch.arange(8.0) * 2  # one call more in each group: keys alone
    assert found["nearest"] == interval(groups)


def test_the_verdict_on_random_keys_follows_its_figures():
    def verdict(gap: float, alone: float, *more: str) -> str:
        found = {name: {"gap": {"mean": gap, "ci95": 0.005}} for name in (*MODELS, *more)}
        found["kpp-paper, keys alone"] = {"apart": {"mean": alone, "ci95": 0.0}}
        return random_keys.verdict({"pictures": found})

    assert verdict(0.1, 0.2).startswith("kpp-bits: new images show the memory")
    assert "kpp-paper: random keys show the memory" in verdict(0.1, 0.2)
    retired = verdict(0.1, 0.2, "kpp-generate")  # an older record
    assert retired.startswith("kpp-generate: random keys show the memory")
    assert "do NOT show the memory" in verdict(0.001, 0.2)
    assert "kpp-paper: random keys all give ONE picture" in verdict(0.0, 0.0)


# Samples beside a VAE's


def test_vae_vs_kpp(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fewer = {50: 20, 20_000: 5_000}  # memories, images to learn features from
    monkeypatch.setattr(lab, "pick", lambda quick, full: fewer.get(quick, quick))
    finding = experiment("vae-vs-kpp").run(lab)
    check(finding, tmp_path)
    figures = finding.figures
    assert figures["samples"] == figures["test_images"] == figures["two_sets_of"] == 400
    assert figures["features"]["learnt_from"] == "labels"
    found = figures["models"]
    real = found["training images"]["drawn"]["distance"]
    assert all(found[name]["drawn"]["distance"] > 2 * real for name in MODELS)  # untrained
    assert found["training images"]["grey"]["mean"] == 0 < found["vae"]["grey"]["mean"]
    assert all(found[name]["expected"]["error"] > 0 for name in MODELS)


def test_samples_of_one_memory_count_once_in_the_error_of_sharpness():
    level = torch.tensor([0.1, 0.2, 0.4])
    alike = level.repeat_interleave(vae_vs_kpp.DRAWN)
    pictures = alike.view(-1, 1, 1, 1).expand(-1, 1, 6, 6)
    eye = object.__new__(FeatureExtractor)  # for Fréchet distances, of which there are none
    judge = vae_vs_kpp.Judge(eye, torch.zeros(2, 2), True)
    scores = judge.score(pictures, alike, noise())
    assert scores["nearest"] == pytest.approx(interval(level))
    assert scores["grey"]["ci95"] == pytest.approx(interval(4 * level * (1 - level))["ci95"])


def test_the_verdict_on_samples_can_say_no():
    def one(distance: float, grey: float) -> dict[str, dict[str, float]]:
        drawn = {"distance": distance, "error": 0.1}
        return {"drawn": drawn, "grey": {"mean": grey, "ci95": 0.01}}

    rest = {"kpp-paper": one(9.0, 0.3), "vae": one(9.1, 0.3)}
    found = rest | {"kpp-bits": one(2.0, 0.1), "kpp-bits, nothing written": one(4.0, 0.1)}
    said = vae_vs_kpp.verdict({"models": found})
    assert "kpp-bits is sharper than vae" in said and "and nearer to real images (2.0" in said
    assert "kpp-paper is NOT sharper than vae" in said and "NOT nearer to real images (9.0" in said
    assert "the memory brings samples 2.0 nearer; without it they are 5.1 nearer than vae" in said
    same = found | {"kpp-bits, nothing written": one(2.1, 0.1)}
    assert "the memory makes NO difference" in vae_vs_kpp.verdict({"models": same})
    assert "the memory" not in vae_vs_kpp.verdict({"models": rest})  # 8-bit pixels: no kpp-bits
    retired = {name.replace("bits", "generate"): value for name, value in found.items()}
    assert vae_vs_kpp.verdict({"models": retired}) == said.replace("kpp-bits", "kpp-generate")


@torch.no_grad()
def test_random_keys_of_kpp_replay_or_read_nothing(lab: Lab):
    """Every picture at its mean is that of a block written, or of an empty cell."""
    model = lab.trained("kpp")
    assert isinstance(model, Kpp)
    memory, keys = model.write(lab.images(32)), torch.randn(40, 2, generator=noise(1))

    def pictures(held: Memory) -> torch.Tensor:
        return model.likelihood.mean(model.decoder(model.read(held, keys).mean))[0]

    expected = torch.cat([model.get(memory), pictures(model.empty())[:1]])
    assert rms(pictures(memory), expected).amin(dim=1).max() < 1e-6
