"""The lab that experiments work in, the command, and what each finds in a tiny version."""

import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

import kanerva
from kanerva.cli import main
from kanerva.data import ImageSet
from kanerva.errors import UserError
from kanerva.lab.experiments import NAMES, Lab, allocator, experiment
from kanerva.lab.harness import Finding, in_order, perform, save_picture
from kanerva.lab.page import conclude, page, pages, rank, read_records
from tiny_lab import TinyLab


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models of a few steps are kept for all tests of this file."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def lab(runs: Path) -> Lab:
    return TinyLab(quick=True, runs=runs, steps=3)


def test_a_model_is_trained_once_and_then_found(lab: Lab, runs: Path, capsys):
    first = lab.trained("vae", episode_length=4, batch=2)
    assert "training glyphs-vae" in capsys.readouterr().err
    again = TinyLab(quick=True, runs=runs, steps=3).trained("vae", episode_length=4, batch=2)
    assert "training" not in capsys.readouterr().err
    pairs = zip(first.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs) and not again.training
    lab.trained("vae", episode_length=4, batch=2, seed=1)
    assert "seed 1" in capsys.readouterr().err


def test_a_shipped_model_stands_for_the_run_it_came_from(tmp_path: Path):
    lab = Lab(quick=False, runs=tmp_path, preset="mnist")
    shipped = kanerva.load("mnist-2")
    found = lab.trained("kpp-bits")
    pairs = zip(shipped.parameters(), found.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs) and lab.found == {"mnist-2"}
    assert not lab.is_trained("kpp-bits", seed=1) and not lab.is_trained("kpp-bits-empty")
    assert not lab.is_trained("kpp-bits", code={"gist_bits": 40.0})


@pytest.mark.parametrize("name", ["mnist", "omniglot", "cifar10", "mazes"])
def test_in_a_full_protocol_every_model_sees_as_many_images(name: str, tmp_path: Path):
    lab = Lab(quick=False, runs=tmp_path, preset=name)
    seen = set()
    for model in ("kpp", "kpp-paper", "vae", "dkm"):
        config = lab.config(model)
        assert config.steps is not None
        seen.add(config.steps * config.batch * config.episode_length)
    assert len(seen) == 1


def test_parts_of_a_config_are_replaced(lab: Lab):
    config = lab.config("kpp", memory={"size": 32}, episode_length=8)
    assert (config.model.memory.size, config.episode_length, config.steps) == (32, 8, 3)
    quick = Lab(quick=True, runs=lab.runs)
    assert (quick.config("kpp").steps, quick.config("vae").steps) == (600, 400)
    full = Lab(quick=False, runs=lab.runs, preset="mnist")
    seen = [(c.steps or 0) * c.batch * c.episode_length for c in map(full.config, ("kpp", "dkm"))]
    assert seen == [3_072_000, 3_072_000]  # as many images each


def test_images_come_in_one_order(lab: Lab):
    images = lab.images(6)
    assert images.shape == (6, 1, 28, 28) and set(images.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(images, lab.images(6))
    assert not torch.equal(images, lab.images(6, skip=6))
    with pytest.raises(UserError, match="are needed"):
        lab.images(10**6)


def test_frames_of_a_path_stay_together():
    groups = torch.arange(5).repeat_interleave(4)
    frames = ImageSet("mazes", "test", torch.zeros(20, 1, 2, 2, dtype=torch.uint8), groups=groups)
    order = in_order(frames, torch.Generator().manual_seed(0)).view(5, 4)
    assert (order - order[:, :1] == torch.arange(4)).all()  # neighbours, in order
    assert sorted(order[:, 0].tolist()) == [0, 4, 8, 12, 16] != order[:, 0].tolist()


def test_a_picture_is_saved(tmp_path: Path):
    picture = Image.new("RGB", (8, 8))
    assert save_picture(Finding({}, [], picture), tmp_path / "a.png") == ["a.png"]
    assert save_picture(Finding({}, []), tmp_path / "b.png") == []
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_the_command_lists_and_refuses(capsys):
    assert main(["reproduce", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in NAMES)
    for flags, message in (
        (["figure-9"], "unknown experiment 'figure-9'; there are"),
        ([], "name one"),
        (["allocator", "--quick", "--preset", "mnist"], "--quick runs on glyphs"),
    ):
        assert main(["reproduce", *flags]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_a_folder_that_cannot_be_made_is_refused_before_an_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    def fail(*_: object) -> None:
        raise AssertionError("it was run")

    monkeypatch.setattr("kanerva.lab.harness.perform", fail)
    (tmp_path / "file").touch()
    words = ["reproduce", "spatial-transformer", "--quick", "--out"]
    assert main([*words, str(tmp_path / "file")]) == 2
    assert "cannot write to folder" in capsys.readouterr().err


def test_the_spatial_transformers_example(tmp_path: Path, capsys):
    out = ["--out", str(tmp_path), "--runs", str(tmp_path / "runs")]
    assert main(["reproduce", "spatial-transformer", "--quick", *out]) == 0
    assert "verdict: Quick run, decides nothing" in capsys.readouterr().out
    record = json.loads((tmp_path / "spatial-transformer-quick.json").read_text())
    assert record["command"] == "kanerva reproduce spatial-transformer --quick"
    assert record["figures"]["against_grid_sample"] < 1e-6
    assert record["figures"]["pasted_back"] < 0.1
    assert (tmp_path / "spatial-transformer-quick.png").stat().st_size > 5000


def test_the_allocator_touches_only_its_own_blocks(lab: Lab):
    """Whatever the weights: after three steps what is freed may still look known."""
    finding = experiment("allocator").run(lab)
    found = finding.figures
    assert found["changed_by_malloc"] == found["changed_by_free"] == 0
    assert found["handles_kept"] and "the memory is full" in found["refused_when_full"]
    assert found["freed_places_taken_again"] == found["freed"] == 4
    assert isinstance(finding.picture, Image.Image) and finding.picture.height > 5 * 420
    known = found["familiarity_held"] > 0 > found["familiarity_freed"]
    assert ("no longer known" in allocator.verdict(found)) == known
    said = allocator.verdict(found | {"familiarity_held": 9.0, "familiarity_freed": 2.4})
    assert "touch only" in said and said.endswith("STILL known, by 2 nats to 9 of what is held.")
    assert "do NOT keep the rest" in allocator.verdict(found | {"changed_by_free": 0.1})


def test_reconstructions_are_compared(lab: Lab):
    finding = experiment("reconstructions").run(lab)
    ours, theirs = (finding.figures[name]["recalled"] for name in ("kpp", "kpp-paper"))
    verdict = experiment("reconstructions").verdict(finding.figures)
    assert ("NOT" in verdict) == (ours >= theirs)
    assert all(0 < n <= 1 for f in finding.figures.values() for k, n in f.items() if k != "images")


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_says_what_it_is(name: str):
    found = experiment(name)
    assert found.name == name and found.claim.endswith(".") and len(found.shows) < 70
    assert not found.shows.endswith(".") and found.presets


def test_the_pages_are_those_of_the_records():
    """`make docs` writes docs/experiments; whoever edits one by hand is found out."""
    for path, text in pages(ROOT / "docs" / "experiments", ROOT / "results" / "reproduce").items():
        assert path.read_text() == text, path
        for file in re.findall(r"!\[.*?\]\((.*?)\)", text):
            assert (path.parent / file).stat().st_size > 1000, file


ROOT = Path(__file__).resolve().parents[1]
RETIRED = {"walk"}  # experiments whose code is gone; trials.md says what they found
EVERY = read_records(ROOT / "results" / "reproduce")
RECORDS = [record for record in EVERY if record["name"] not in RETIRED]


def test_a_retired_experiment_has_records_a_paragraph_and_no_page():
    for name in RETIRED:
        assert name not in NAMES and any(record["name"] == name for record in EVERY)
        assert not (ROOT / "docs" / "experiments" / f"{name}.md").exists()
        page = (ROOT / "docs" / "results" / "trials.md").read_text()
        assert f"`kanerva reproduce {name}`" in page


def test_a_record_of_a_retired_variant_says_so():
    drawing = {"iterative", "perturb", "random-keys", "vae-vs-kpp"}
    for record in (one for one in RECORDS if one["name"] in drawing):
        retired = record.get("retired")
        assert (retired is not None) == ("generate" in json.dumps(record["figures"]))
        said = page(record["name"], [record], "."), conclude(record["name"], [record])
        assert all(("generate, which is retired" in words) == bool(retired) for words in said)
        assert retired is None or f"Commit `{retired[:7]}` ran it." in said[0]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: f"{r['name']}-{r['preset']}")
def test_every_stored_record_can_be_judged_and_stores_no_judgement(record: dict):
    """A quick one has no verdict: its figures may lack what was added since it was made."""
    assert "verdict" not in record
    words = experiment(record["name"]).conclusion(record)
    assert words.endswith(".") and "\n" not in words and "nan" not in words


@pytest.mark.parametrize("record", [r for r in RECORDS if r["quick"]], ids=lambda r: r["name"])
def test_a_quick_run_decides_nothing(record: dict):
    said = experiment(record["name"]).conclusion(record)
    assert said.startswith("Quick run, decides nothing")
    assert conclude(record["name"], [record]) == said in page(record["name"], [record], ".")


def test_the_first_preset_with_a_full_record_decides():
    about = experiment("allocator")
    (one,) = [r for r in RECORDS if r["name"] == "allocator" and r["preset"] == "mazes"]
    records = [one | {"preset": name} for name in ("celeba", "mazes", "mnist")]
    ranked = rank([one | {"quick": True, "preset": "glyphs"}, *records], about.presets)
    assert [r["preset"] for r in ranked] == ["mnist", "mazes", "celeba", "glyphs"]
    assert conclude("allocator", ranked).endswith("(mnist; also on mazes, celeba)")
    assert conclude("allocator", []) == "not run yet"


def test_a_verdict_follows_the_record_beside_it():
    """Of mazes: nothing that is held changes, but what was freed is still known."""
    (one,) = [r for r in RECORDS if r["name"] == "allocator" and r["preset"] == "mazes"]
    assert one["figures"]["changed_by_malloc"] == one["figures"]["changed_by_free"] == 0
    said = experiment("allocator").conclusion(one)
    assert "touch only their own block" in said and "STILL known" in said


def test_a_record_holds_the_finding(lab: Lab, tmp_path: Path):
    record = perform(experiment("spatial-transformer"), lab, tmp_path, "kanerva reproduce x")
    assert record == json.loads((tmp_path / "spatial-transformer-quick.json").read_text())
    assert max(map(len, record["lines"])) <= 110


def test_another_seed_replaces_neither_record_nor_picture(runs: Path, tmp_path: Path):
    for seed in (0, 1, 2):
        lab = TinyLab(quick=True, runs=runs, steps=3, seed=seed)
        perform(experiment("spatial-transformer"), lab, tmp_path, "kanerva reproduce x")
    names = {f"spatial-transformer-quick{seed}" for seed in ("", "-s1", "-s2")}
    assert {path.name for path in tmp_path.iterdir()} == {
        name + end for name in names for end in (".json", ".png")
    }
    found = json.loads((tmp_path / "spatial-transformer-quick-s2.json").read_text())
    assert found["seed"] == 2 and found["pictures"] == ["spatial-transformer-quick-s2.png"]


def test_a_page_names_the_seed_of_its_records():
    (one,) = [r for r in RECORDS if r["name"] == "allocator" and r["preset"] == "mazes"]
    seeds = rank([one | {"seed": 2}, one | {"seed": 1}, one], ("mazes",))
    text = page("allocator", seeds, ".")
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    named = ["", ", seed 1", ", seed 2"]
    assert titles == [f"## Full protocol, mazes{seed}" for seed in named]
    assert conclude("allocator", seeds).endswith("(mazes)")
