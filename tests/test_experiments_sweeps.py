"""Table 1 from records, and experiments that train several models to compare them."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from kanerva.data.splits import fixed_episodes, load_split
from kanerva.errors import UserError
from kanerva.evaluation.bound import bound, memory_kl
from kanerva.evaluation.records import read_record, write_record
from kanerva.lab.experiments import (
    Finding,
    Lab,
    characters,
    episode_length,
    few_shot,
    few_shot_views,
    measures,
    memory_useful,
    read_steps,
    sweep,
    table1,
    temporal_shift,
)
from kanerva.models import reads_kin
from kanerva.models.kpp_bits import KppBits
from kanerva.presets import preset
from tiny_lab import TinyLab


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models of two steps are kept for all tests of this file."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def lab(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setattr(sweep, "IMAGES", 64)
    return TinyLab(quick=True, runs=runs, steps=2)


def checked(finding: Finding) -> dict[str, Any]:
    """What holds of every finding: plain JSON, narrow lines, a picture."""
    assert max(map(len, finding.lines)) <= 110
    if finding.picture is not None:
        assert isinstance(finding.picture, Figure) and finding.picture.axes
        finding.picture.canvas.draw()  # pyright: ignore[reportAttributeAccessIssue]
    figures = json.loads(json.dumps(finding.figures, allow_nan=False))
    assert figures == finding.figures
    return figures


def score(nll: float, ci95: float = 0.5) -> dict[str, float]:
    return {"nll_nats": nll, "recon": nll - 3.0, "kl_z": 2.0, "kl_y": 1.0, "ci95": ci95}


# sweep


def test_seeds_become_mean_and_deviation():
    entry = sweep.over_seeds([score(10.0), score(12.0), score(17.0)])
    assert entry["nll_nats"]["mean"] == 13.0 and entry["kl"]["mean"] == 3.0
    assert entry["nll_nats"]["std"] == pytest.approx(math.sqrt((9 + 1 + 16) / 2))
    assert measures.pm(entry["nll_nats"], 2) == "13.00 ±3.61"
    alone = sweep.over_seeds([score(10.0)])
    assert alone["nll_nats"]["std"] is None and measures.pm(alone["kl_z"], 2) == "2.00"
    assert measures.pm(alone["nll_nats"], 2) == "10.00 ±0.50"  # over images
    assert measures.pm(entry["nll_nats"] | {"ci95": 9.0}, 2) == "13.00 ±3.61"
    assert measures.pm(sweep.spread([10.0]), 2) == "10.00"


def test_a_gap_is_as_sure_as_its_seeds_or_its_images():
    many = sweep.gap(
        sweep.over_seeds([score(20.0), score(22.0)]), sweep.over_seeds([score(11.0), score(11.0)])
    )
    assert many["nats"] == 10.0 and many["clear"]
    assert many["margin"] == pytest.approx(2 * math.sqrt(2) / math.sqrt(2))
    assert "2 seeds" in many["over"]
    more = sweep.over_seeds([score(11.0 + n) for n in (0, 1, 2, 3)])  # each has its own count
    both = sweep.gap(sweep.over_seeds([score(20.0), score(22.0)]), more)
    assert both["margin"] == pytest.approx(2 * math.sqrt(2 / 2 + (5 / 3) / 4))
    assert "2 to 4 seeds" in both["over"]
    one = sweep.gap(sweep.over_seeds([score(20.0, 3.0)]), sweep.over_seeds([score(19.0, 4.0)]))
    assert one["margin"] == 5.0 and not one["clear"] and "one seed" in one["over"]


def test_runs_are_equal_and_a_test_may_shorten_them(runs: Path):
    quick = Lab(quick=True, runs=runs)
    assert {sweep.equal_runs(quick, 70).config(m).steps for m in ("kpp", "kpp-paper")} == {70}
    full = Lab(quick=False, runs=runs, preset="mnist")
    assert {sweep.equal_runs(full, 70).config(m).steps for m in ("kpp", "vae")} == {6000}
    assert full.steps is None  # the lab itself is as it was
    assert full.config("vae", "strong").steps == 6000 and full.config("vae").steps == 12_000
    assert sweep.equal_runs(Lab(quick=True, runs=runs, steps=3), 70).steps == 3
    assert sweep.images_per_step(quick) == 64 and sweep.images_per_step(full) == 1024
    assert sweep.in_episodes_of(5, quick) == {"episode_length": 5, "batch": 12}
    assert sweep.seeds(quick) == [0] and sweep.seeds(full) == [0, 1, 2]


def test_a_setting_is_scored_as_evaluate_would(lab: Lab):
    setting = sweep.Setting("x", "no-memory", parts={"episode_length": 4})
    entry = sweep.train_and_score(lab, setting, [0, 1])
    config = lab.config("no-memory", episode_length=4)
    episodes = fixed_episodes(config, load_split(config, "test", None), lab.device)
    for number, seed in enumerate((0, 1)):
        model = lab.trained("no-memory", seed=seed, episode_length=4)
        again = bound(model, episodes, limit=16)
        assert entry["bound"]["nll_nats"]["each"][number] == pytest.approx(again.nll_nats)
        style = bound(model, episodes, sample=False, limit=16).nll_nats
        assert entry["paper_style"]["nll_nats"]["each"][number] == pytest.approx(style)
    assert entry["n_images"] == 64 and entry["T"] == 4 and entry["floor"] == math.log(4)
    assert entry["floats_per_image"] == 128 / 4  # the pooled embedding
    assert entry["kl_over_T"] is None
    lines = sweep.rows([entry])
    assert "±" in lines[1] and "std of 2 seeds" in lines[2] and max(map(len, lines)) <= 110
    assert not any("no bound" in line for line in lines)
    for figure in (
        sweep.draw_bounds(lab, [entry]),
        sweep.draw_sweep(lab, "T", [4], {"no-memory": [entry]}),
    ):
        figure.canvas.draw()  # pyright: ignore[reportAttributeAccessIssue]
        assert len(figure.axes) in (2, 3)


@pytest.mark.parametrize("model", ["kpp-paper", "dkm-tsm"])
def test_the_likely_accounting_is_of_runs_trained_by_it(lab: Lab, model: str):
    """One T, two kinds of runs; DKM pays for KL(M) there and nowhere else."""
    setting = sweep.of_paper("x", model, episode_length=4, batch=2)
    entry = sweep.train_and_score(lab, setting, [0])
    ours = lab.config(model, "strong", episode_length=4, batch=2)
    parts = sweep.likely_parts(ours, setting.parts)
    config = lab.config(model, **parts)
    assert (ours.optim.kl_weight, config.optim.kl_weight) == (1.0, "1/T")
    assert config.optim.optimiser == "lars_adam" and ours.optim.optimiser == "adamw"
    assert (config.episode_length, config.batch) == (ours.episode_length, ours.batch) == (4, 2)
    if model == "dkm-tsm":
        assert config.model.rows.charge and not ours.model.rows.charge
    trained = lab.trained(model, seed=0, **parts)
    episodes = fixed_episodes(config, load_split(config, "test", None), lab.device)
    style = bound(trained, episodes, sample=False, limit=16)
    kl_m = memory_kl(trained, episodes, 16, "x") if model == "dkm-tsm" else 0.0
    found = entry["kl_over_T"]
    assert found["kl"]["mean"] == pytest.approx((style.kl_z + style.kl_y) / 4 + kl_m, rel=1e-4)
    assert found["nll_nats"]["mean"] == pytest.approx(style.recon + found["kl"]["mean"])
    assert found["bound"]["mean"] == pytest.approx(bound(trained, episodes, limit=16).nll_nats)
    assert entry["bound"]["nll_nats"]["mean"] != found["bound"]["mean"]  # of other weights
    assert any("no bound" in line for line in sweep.rows([entry]))


def test_a_sweep_varies_over_its_values():
    entries = [{"bound": sweep.over_seeds([score(n), score(n + 2.0)])} for n in (10.0, 14.0)]
    found = sweep.over_values(entries, "nll_nats")
    assert (found["first"], found["last"], found["range"]) == (11.0, 15.0, 4.0)
    assert found["std"] == pytest.approx(math.sqrt(8)) and found["seed_std"] == math.sqrt(2)
    assert "std between seeds 1.41" in sweep.judge_sweep(found, 1.0, "a", "b", [])
    alone = sweep.over_values([{"bound": sweep.over_seeds([score(n)])} for n in (1.0, 2.0)], "kl")
    assert alone["seed_std"] is None and alone["std"] == 0
    assert "one seed" in sweep.judge_sweep(alone, 1.0, "a", "b", [])


# The four sweeps


def test_memory_useful_compares_equal_runs(lab: Lab):
    figures = checked(memory_useful.run(lab))
    entries = {entry["label"]: entry for entry in figures["entries"]}
    assert set(entries) == {"no-memory", "kpp-paper", "kpp-empty", "kpp"}
    for name in ("T", "steps", "images_per_step", "n_images"):
        assert len({entry[name] for entry in entries.values()}) == 1, name
    for model, found in figures["gaps"].items():
        each = [entries[m]["bound"]["nll_nats"]["mean"] for m in ("no-memory", model)]
        assert found["nats"] == pytest.approx(each[0] - each[1])
    assert set(figures["likely_gaps"]) == {"kpp-paper"}  # kpp is not counted so
    each = [entries[m]["kl_over_T"]["nll_nats"]["mean"] for m in ("no-memory", "kpp-paper")]
    assert figures["likely_gaps"]["kpp-paper"]["nats"] == pytest.approx(each[0] - each[1])
    shifts = [
        lab.config(one.model, one.start, **one.parts).model.encoder.shift
        for one in memory_useful.SETTINGS[:2]
    ]
    assert shifts == [0.125, 0.125]


def test_memory_useful_is_drawn_from_records_where_three_seeds_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sweep, "RESULTS", tmp_path)
    for setting, nats in zip(memory_useful.SETTINGS, (100.0, 98.0, 60.0, 10.0), strict=True):
        file_seeds(tmp_path, setting, nats, 3)
    full = Lab(quick=False, runs=tmp_path / "runs", preset="omniglot")
    figures = checked(memory_useful.run(full))
    assert figures["from_records"] and figures["images_seen"] == 3000
    assert figures["gaps"]["kpp"]["nats"] == pytest.approx(90.0)
    assert figures["entries"][1]["bound"]["nll_nats"]["each"] == [98.0, 99.0, 100.0]
    assert figures["likely_gaps"]["kpp-paper"]["nats"] == pytest.approx(1.0)  # half of the bound's
    assert not (tmp_path / "runs").exists()  # nothing was trained
    assert sweep.read_entries(memory_useful.SETTINGS, "omniglot", least=4) is None
    file = tmp_path / "omniglot" / "kpp-store-s2.json"
    write_record(json.loads(file.read_text()) | {"config_hash": "other"}, file)
    assert sweep.read_entries(memory_useful.SETTINGS, "omniglot") is None
    assert sweep.read_entries(memory_useful.SETTINGS, "mnist") is None


def file_seeds(folder: Path, setting: sweep.Setting, nats: float, seeds: int) -> None:
    """Records as `evaluate` files them, of runs that did not happen: so many nats by the bound,
    half as many by `kl_over_T`."""
    for name in (setting.variant, *([setting.likely] if setting.likely else [])):
        for seed in range(seeds):
            changes = {"variant": name, "seed": seed, "preset": "omniglot"}
            changes["config_hash"] = str(name)
            changes |= {"n_images": 64, "steps": 30, "best_step": 30, "images_seen": 3000}
            if name == setting.likely:
                changes["kl_over_T"] = (nats + seed) / 2
            file = folder / "omniglot" / f"{setting.model}-{name}-s{seed}.json"
            write_record(record(setting.model, nats=nats + seed, **changes), file)


def test_sweeps_of_one_seed_are_drawn_from_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sweep, "RESULTS", tmp_path)
    full = Lab(quick=False, runs=tmp_path / "runs", preset="omniglot")
    lengths = [episode_length.setting("kpp-paper", n, full) for n in episode_length.LENGTHS]
    assert [one.variant for one in lengths] == ["strong-T5", "strong-T16", "strong", "strong-T64"]
    reads = [read_steps.setting(count) for count in read_steps.READS]
    assert [one.likely for one in reads[:2]] == ["kl-over-T-K1", "kl-over-T"]
    for number, setting in enumerate([*lengths, reads[0], *reads[2:]]):  # T = 32, K = 2: one run
        file_seeds(tmp_path, setting, 100.0 + number, 1)
    figures = checked(finding := episode_length.run(full))
    assert list(figures["entries"]) == ["kpp-paper"] and figures["likely_over_T"]["range"] == 1.5
    assert "kl_over_T, no bound, goes from 50.0" in episode_length.verdict(figures)
    assert len(finding.picture.axes) == 3 and any("no bound" in line for line in finding.lines)
    figures = checked(read_steps.run(full))
    assert figures["likely_over_K"]["nll_nats"]["range"] == 2.0
    assert "by kl_over_T" in read_steps.verdict(figures)
    for setting in temporal_shift.PAIRS["dkm"]:
        file_seeds(tmp_path, setting, 90.0, 1)
    figures = checked(temporal_shift.run(full))
    assert set(figures["gains"]) == set(figures["likely_gains"]) == {"dkm"}
    assert figures["order"] == {} and not (tmp_path / "runs").exists()
    assert "makes no clear difference to dkm" in temporal_shift.verdict(figures)


def test_an_entry_scored_early_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sweep, "RESULTS", tmp_path)
    setting = memory_useful.SETTINGS[-1]
    file_seeds(tmp_path, setting, 10.0, 1)
    (whole,) = sweep.read_entries([setting], "omniglot", least=1) or []
    assert not whole["early"] and "*" not in "\n".join(sweep.rows([whole]))
    file = tmp_path / "omniglot" / "kpp-store-s0.json"
    write_record(json.loads(file.read_text()) | {"best_step": 20}, file)
    (cut,) = sweep.read_entries([setting], "omniglot", least=1) or []
    assert cut["early"] and "10.00 ±0.04*" in "\n".join(sweep.rows([cut]))


def test_memory_usefuls_verdict_follows_the_gap():
    useful = {"nats": 20.0, "margin": 1.0, "clear": True, "over": "x"}
    idle, harmful = useful | {"nats": 0.4, "clear": False}, useful | {"nats": -3.0}
    gaps = {"kpp-paper": useful, "kpp": idle}
    said = memory_useful.verdict({"gaps": gaps, "likely_gaps": gaps, "images_seen": 9})
    assert said.startswith("The memory as printed is useful") and "kpp is no different" in said
    for found in (idle, harmful):
        figures = {"gaps": {"kpp-paper": found, "kpp": useful}, "images_seen": 9}
        said = memory_useful.verdict(figures | {"likely_gaps": {"kpp-paper": useful}})
        assert "does NOT hold" in said and ("worse" in said) == (found is harmful)
        assert said.endswith(
            "By kl_over_T, which is no bound: kpp-paper is 20.0 ± 1.0 nats better than no-memory."
        )


def test_episode_length_sees_as_many_images_at_each(lab: Lab):
    figures = checked(episode_length.run(lab))
    assert figures["T"] == [5, 16, 32]
    for entries in figures["entries"].values():
        assert [entry["T"] for entry in entries] == [5, 16, 32]
        assert [entry["images_per_step"] for entry in entries] == [60, 64, 64]
        assert len({entry["steps"] for entry in entries}) == 1
    means = [entry["bound"]["nll_nats"]["mean"] for entry in figures["entries"]["kpp"]]
    assert figures["over_T"]["kpp"]["range"] == pytest.approx(max(means) - min(means))


def test_a_long_episode_gets_more_cells(runs: Path):
    full = Lab(quick=False, runs=runs, preset="mnist")
    for length in episode_length.LENGTHS:
        setting = episode_length.setting("kpp", length, full)
        config = full.config("kpp", **setting.parts)
        assert config.episode_length == length <= config.model.memory.capacity
        assert config.model.memory.shape == (3, 64, 64)
        assert 1020 <= config.batch * length <= 1024
        full.config("kpp-paper", **episode_length.setting("kpp-paper", length, full).parts)


def test_episode_lengths_verdict_follows_the_deviation():
    flat = {"std": 0.3, "range": 0.6, "first": 80.0, "last": 80.6, "seed_std": None}
    steep = flat | {"std": 3.0}
    noisy = steep | {"seed_std": 3.5}
    for found in (flat, noisy):
        figures = {"over_T": {"kpp-paper": found, "kpp": steep}, "likely_over_T": steep}
        assert "As in the paper" in episode_length.verdict(figures)
    figures = {"over_T": {"kpp-paper": steep, "kpp": flat}, "likely_over_T": flat}
    assert "does NOT hold" in episode_length.verdict(figures)


def test_read_steps_reads_more_blocks(lab: Lab):
    figures = checked(read_steps.run(lab))
    assert [entry["K"] for entry in figures["entries"]] == figures["K"] == [1, 2, 8]
    assert figures["kpp"].startswith("not applicable")
    for entry in figures["entries"]:
        terms = entry["bound"]
        total = terms["kl_z"]["mean"] + terms["kl_y"]["mean"]
        assert terms["kl"]["mean"] == pytest.approx(total)
    full = Lab(quick=False, runs=lab.runs, preset="mnist")
    assert full.config("kpp-paper", memory={"reads": 64}).model.memory.reads == 64


def test_read_steps_verdict_follows_the_deviation():
    def said(std: float, kl_y: float) -> str:
        terms = {"std": std, "seed_std": 0.01}
        both = {"kl": terms, "nll_nats": terms}
        figures = {"over_K": both, "likely_over_K": both, "largest_kl_y": kl_y}
        return read_steps.verdict(figures)

    assert "As in the paper" in said(0.03, 0.0) and "hardly depends" in said(0.03, 0.0)
    assert "does NOT hold" in said(0.05, 3.0) and "up to 3.00 nats" in said(0.05, 3.0)


# temporal-shift


def test_an_order_is_undone(lab: Lab):
    images = torch.arange(6.0).view(2, 3, 1, 1, 1)
    shuffled, order = temporal_shift.reorder(images, lab.noise("x"))
    assert not torch.equal(shuffled, images)
    assert torch.equal(shuffled.sort(dim=1).values, images)  # within its episode
    assert torch.equal(temporal_shift.put_back(shuffled[..., 0, 0, 0], order), images[..., 0, 0, 0])


def test_only_what_sees_neighbours_or_writes_in_turn_minds_the_order(lab: Lab):
    figures = checked(temporal_shift.run(lab))
    orders = figures["order"]
    assert orders["kpp-paper, no shift"]["order"] < temporal_shift.EXCHANGEABLE
    assert orders["kpp-paper"]["order"] > temporal_shift.EXCHANGEABLE
    assert all(found["resampling"] > 0 and found["n_images"] == 64 for found in orders.values())
    shown = {entry["label"] for entry in figures["entries"].values()}
    pairs = temporal_shift.PAIRS.values()
    assert shown == set(orders) == {setting.label for pair in pairs for setting in pair}
    for model, (without, shifted) in temporal_shift.PAIRS.items():
        each = [figures["entries"][one.label]["kl_over_T"] for one in (without, shifted)]
        nats = each[0]["nll_nats"]["mean"] - each[1]["nll_nats"]["mean"]
        assert figures["likely_gains"][model]["nats"] == pytest.approx(nats)


def test_temporal_shifts_verdict_follows_gain_and_order():
    gain = {"nats": 2.0, "margin": 1.0, "clear": True, "over": "x"}
    order = {"order": 0.0, "resampling": 2.0}
    figures = {"gains": {"a": gain, "b": gain}, "likely_gains": {"a": gain}, "order": {"a": order}}
    said = temporal_shift.verdict(figures)
    assert said.startswith("The shift helps a and b") and "does not matter to a" in said
    worse = {"gains": {"a": gain, "b": gain | {"nats": -2.0}}}
    said = temporal_shift.verdict(figures | worse | {"order": {"a": order | {"order": 0.5}}})
    assert "does NOT show" in said and "HARMS b" in said and "NOT exchangeable" in said
    assert "which is no bound: it helps a (+2.0 ± 1.0 nats)" in said


# few-shot


@pytest.fixture
def few(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """Fewer characters and numbers."""
    monkeypatch.setattr(few_shot, "WRITTEN", (1, 3))
    whole = few_shot.characters
    monkeypatch.setattr(few_shot, "characters", lambda lab, count: whole(lab, 6))
    return lab


def test_characters_are_whole_and_of_one_kind(lab: Lab):
    drawings, labels = few_shot.characters(lab, 5)
    assert len(labels.unique()) == 5
    assert drawings.shape == (5, 12, 1, 28, 28) and set(drawings.unique().tolist()) == {0.0, 1.0}
    within = (drawings[:, 0] - drawings[:, 1]).abs().mean()
    across = (drawings[:, 0] - drawings.roll(1, 0)[:, 1]).abs().mean()
    assert within < across  # one character looks more like itself
    assert torch.equal(drawings, few_shot.characters(lab, 5)[0])


def test_what_is_scored_is_not_written():
    drawings = torch.arange(12.0).view(3, 4, 1, 1, 1)
    mixed = drawings[few_shot.shuffle(drawings, torch.Generator().manual_seed(1)).unbind(-1)]
    assert torch.equal(mixed.sort(dim=1).values, drawings) and not torch.equal(mixed, drawings)
    episodes = few_shot.mix_episodes(mixed[:, 0])
    assert torch.equal(episodes[:, few_shot.COMPANY // 2], mixed[:, 0])


def test_few_shot_scores_under_the_right_memory(few: Lab):
    """One target by hand: same memory, same noise."""
    drawings = few_shot.characters(few, 6)[0]
    model = few.trained("kpp-paper")
    targets, rest = drawings[:, 0], drawings[:, 1:4]
    found = few_shot.score(few, model, targets, rest, [1, 3], 0)
    noise = few.noise("few-shot", 0, 0)
    with torch.no_grad():
        memory = model.write(rest)
        terms = model.elbo(few_shot.mix_episodes(targets), memory, generator=noise)
    assert torch.allclose(found["", 3][:, 0], terms.nll_nats[:, 4].double())
    # of the character before
    assert torch.allclose(found["", 3][:, 1], terms.nll_nats[:, 3].double())
    assert not torch.allclose(found["", 3], found["", 0])


@torch.no_grad()
@pytest.mark.parametrize("group", [5, 2])  # three drawings are read together, or in groups
def test_drawings_encoded_once_are_read_as_memories_are(
    few: Lab, group: int, monkeypatch: pytest.MonkeyPatch
):
    """Bounds of both decoders as in memories written one by one, where the image is new."""
    for module in (reads_kin, characters):
        monkeypatch.setattr(module, "GROUP", group)
    drawings = few_shot.characters(few, 6)[0]
    model = few.trained("kpp-bits")
    assert isinstance(model, KppBits)
    heard = [*model.kin.parameters(), *model.pixel_code.known.parameters()]
    for parameter in heard:  # kin that say something
        parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    mixed = few_shot.shuffle(drawings, torch.Generator().manual_seed(1))
    held = few_shot.Written(model, drawings)
    found = few_shot.score_kin(few, held, mixed, [1, 3], 0)
    assert set(found) == {(d, n) for d in ("", few_shot.INDEPENDENT) for n in (0, 1, 3)}
    shuffled = drawings[mixed.unbind(-1)]
    images = few_shot.mix_episodes(shuffled[:, 0], 2)
    for count in (0, 1, 3):
        rows = len(images)
        memory = model.write(shuffled[:, 1 : 1 + count]) if count else model.empty(rows)
        exact = model._terms_new(memory.as_batch(), images).nll_nats
        # the pixel code rounds what is expected: sums in another order may round otherwise
        assert torch.allclose(found["", count], exact[:, [1, 0]].double(), atol=0.1)
        if count > group:
            continue  # groups come in order of cells there, so they get other noise
        noise = few.noise("few-shot", 0, 0)
        sketch = model.independent_terms(images, memory, generator=noise).nll_nats
        assert torch.allclose(
            found[few_shot.INDEPENDENT, count], sketch[:, [1, 0]].double(), rtol=1e-4
        )
    assert not torch.allclose(found["", 1], found["", 3], atol=1e-2)


def test_a_cpu_measures_what_is_trained_and_names_the_rest(
    few: Lab, monkeypatch: pytest.MonkeyPatch
):
    """The full protocol on a CPU; a run trained in another precision counts as trained."""
    assert not any(few_shot.is_missing(few, name) for name in few_shot.MODELS)  # quick: all
    few.trained("vae", **few_shot.options(few, "vae"))
    monkeypatch.setattr(few, "quick", False)
    names = [name for name in few_shot.MODELS if few_shot.is_missing(few, name)]
    assert "vae" not in names and {"dkm", few_shot.COPIES} <= set(names)
    monkeypatch.setattr(few, "device", torch.device("cuda"))
    assert few.is_trained("vae", **few_shot.options(few, "vae"))


def test_other_models_come_from_the_record_if_it_scored_the_same_drawings(
    few: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sweep, "RESULTS", tmp_path)
    row = {"empty": {"mean": 9.0, "error": 1.0}, "written": []}
    same = {"characters": 6, "rounds": 2, "written": [1, 3], "others": few_shot.OTHERS}
    earlier = {"models": {name: row for name in ("dkm", "vae", few_shot.COPIES)}}
    record = {"commit": "a" * 40, "device": "NVIDIA H200", "figures": same | earlier}
    path = tmp_path / "reproduce" / f"few-shot-{few.preset}.json"

    def figures_with(**changes: object) -> dict:
        write_record(record | {"figures": record["figures"] | changes}, path)
        figures = same | {"models": {}, "missing": ["dkm", "no-memory", few_shot.COPIES]}
        few_shot.add_earlier(few, figures)
        return figures

    found = figures_with()
    assert found["models"] == {"dkm": row} and found["missing"] == ["no-memory", few_shot.COPIES]
    source = {"commit": "a" * 40, "device": "NVIDIA H200"}
    assert found["earlier"] == {"dkm": source}
    assert "dkm: from an earlier record" in few_shot_views.say_earlier("dkm", **source)
    older = source | {"commit": "b"}  # each model names the record that its figures come from
    again = figures_with(earlier={"dkm": older, "vae": older})
    assert again["earlier"] == {"dkm": older}
    assert figures_with(earlier={"vae": older})["earlier"] == {"dkm": source}
    assert figures_with(rounds=4)["models"] == {}
    assert figures_with(others=None)["models"] == {}  # trained in another way
    path.unlink()
    few_shot.add_earlier(few, untouched := same | {"models": {}, "missing": ["dkm"]})
    assert untouched["models"] == {}


def test_differences_are_paired_within_a_seed():
    """Characters that differ by far more than what is written saves on each."""
    easy = torch.linspace(50.0, 150.0, 9, dtype=torch.float64)
    seeds = [
        {"empty": easy + s, (2, "own"): easy + s - 4, (2, "other"): easy + s + 1} for s in (0, 3)
    ]
    found = few_shot.summarise(seeds, [easy, easy + 3], [2])
    (row,) = found["written"]
    for name, value in {"over_empty": 4, "gain": 5, "other_over": 1}.items():
        assert row[name]["mean"] == pytest.approx(value) and row[name]["error"] < 1e-9
    assert row["own"]["error"] > 5 and found["empty"]["mean"] == pytest.approx(101.5)
    assert row["over_empty_by_seed"] == pytest.approx([4, 4])
    assert row["own_by_seed"] == pytest.approx([96, 99])


def test_few_shot_measures_every_model(few: Lab):
    figures = checked(few_shot.run(few))
    assert figures["characters"] == 6 and figures["written"] == [1, 3]
    ours = {few_shot.OURS, f"{few_shot.OURS}, {few_shot.INDEPENDENT}"}
    copies = {few_shot.COPIES, f"{few_shot.COPIES}, {few_shot.INDEPENDENT}"}
    assert set(figures["models"]) == ours | copies | {"dkm", "no-memory", "vae"}
    assert set(figures["empty"]) == ours
    assert figures["bits_per_drawing"] > 0
    same, ours = few.config("dkm", **few_shot.options(few, "dkm")), few.config("kpp-bits")
    for name in ("data", "episode_length", "batch", "steps"):
        assert getattr(same, name) == getattr(ours, name)
    assert same.variant == "strong" and figures["others"] == "strong"
    for name, found in figures["models"].items():
        for row in found["written"]:
            gain = row["other"]["mean"] - row["own"]["mean"]
            assert row["gain"]["mean"] == pytest.approx(gain, abs=1e-6)
            assert math.isfinite(gain) and row["gain"]["error"] >= 0
            assert name != "vae" or gain == 0  # it writes nothing


def test_a_model_far_off_does_not_hide_the_others(few: Lab):
    assert few_shot_views.nats({"mean": -3.0, "error": 0.5}) == "-3.00±0.50"
    assert few_shot_views.nats({"mean": -2788288.94, "error": 1458177.7}) == "-3e+06±1e+06"
    assert few_shot_views.nats({"mean": -133.05, "error": 499.2}) == "-1e+02±5e+02"
    near = {key: {"mean": 130.0, "error": 1.0} for key in ("own", "other", *few_shot_views.TITLES)}
    far = {key: {"mean": 1e6, "error": 1e5} for key in near}
    models = {
        "kpp-bits": {"empty": near["own"], "written": [near | {"count": 1}]},
        "no-memory": {"empty": near["own"], "written": [far | {"count": 1}]},
    }
    figures = {"characters": 3, "rounds": 1, "written": [1], "models": models, "seeds": 1}
    empty = {name: near["own"] for name in ("kpp-bits", f"kpp-bits, {few_shot.INDEPENDENT}")}
    figures |= {"empty": empty, "bits_per_drawing": 160.0}
    five = {name: found | {"written": found["written"] * 5} for name, found in models.items()}
    five[f"{few_shot.COPIES}, {few_shot.INDEPENDENT}"] = five["kpp-bits"]  # the longest
    wide = few_shot.table(figures | {"written": [1] * 5, "models": five})
    assert max(map(len, wide)) <= 110
    for title in few_shot_views.TITLES.values():
        at = wide.index(title)
        assert [row.split("  ")[1] for row in wide[at + 1 : at + 3]] == ["kpp-bits", "no-memory"]
    figure = few_shot.draw(few.preset, figures)
    assert all(
        bottom < 130 < top < 140 for bottom, top in (axes.get_ylim() for axes in figure.axes)
    )
    legend = figure.axes[-1].get_legend()
    assert legend is not None
    said = [text.get_text() for text in legend.get_texts()]
    assert said == ["kpp-bits", "no-memory (off the plot: see the table)"]


def test_few_shots_verdict_follows_the_gain():
    def model(gain: float, over: float) -> dict:
        parts = {"gain": gain, "over_empty": over}
        row = {name: {"mean": value, "error": 0.1} for name, value in parts.items()}
        return {"written": [row | {"count": 19}]}

    models = {"a": model(5.0, 4.0), "b": model(0.1, 0.1)}
    said = few_shot.verdict({"models": models, "others": "strong"})
    assert "a +5.00 ± 0.10" in said and "No clear use to b" in said
    assert few_shot.verdict({"models": models}) == f"{said}{few_shot.OLDER}"
    said = few_shot.verdict({"models": {"a": model(5.0, -4.0)}})
    assert "nothing to any model" in said and "No clear use to a +5.00 ± 0.10 (-4.00" in said


def test_few_shot_needs_labels(lab: Lab, monkeypatch: pytest.MonkeyPatch):
    unlabelled = replace(load_split(preset("glyphs"), "test", None), labels=None)
    monkeypatch.setattr(characters, "load_split", lambda *_: unlabelled)
    with pytest.raises(UserError, match="needs labels"):
        characters.characters(lab, 5)


# table1

REAL = read_record(Path(__file__).parents[1] / "results" / "mnist" / "kpp-store-s0.json")


def record(model: str, **other: Any) -> dict[str, Any]:
    """A real one with other scores: 20 nats for each bit/dim; `kl_over_T` where it is given."""
    nats = other.pop("nats", 80.0)
    scores = {"bound": REAL["bound"] | {"nll_nats": nats, "bits_per_dim": nats / 20}}
    if total := other.pop("kl_over_T", None):
        scores["kl_over_T"] = {"nll_nats": total, "bits_per_dim": total / 20}
    return REAL | scores | {"model": model, "variant": None, "config_hash": "a"} | other


def filed(folder: Path, *found: dict[str, Any]) -> None:
    for number, one in enumerate(found):
        path = folder / "results" / one["preset"] / f"{one['model']}-{number}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(one))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_table1_reads_records_and_keeps_scores_apart(lab: Lab, folder: Path):
    filed(
        folder,
        *(record("kpp-paper", seed=seed, nats=80.0 + seed) for seed in range(3)),
        record("kpp-paper", seed=9, nats=10.0, config_hash="b"),  # another configuration
        record("kpp-paper", variant="3M", nats=11.0),  # not wanted: the plain one is there
        record("kpp-paper", variant="3M", preset="omniglot", nats=130.0),
        record("kpp", variant="store", nats=5.0),
        record("kpp", variant="store-T8", nats=2.0),
        *(record("kpp-paper", variant="kl-over-T", seed=s, kl_over_T=36.0 + s) for s in range(2)),
        record("vae", preset="cifar10", nats=60.0, best_step=1, steps=10),
        record("vae", preset="omniglot", nats=133.0, best_step=1, steps=10),  # not wanted either
        record("vae", variant="strong", preset="omniglot", nats=118.0, best_step=9, steps=10),
        record("no-memory", variant="kl-over-T", preset="cifar10", nats=90.0, kl_over_T=40.0),
        record("vae", split="validation", nats=1.0),
    )
    figures = checked(finding := table1.run(lab))
    ours = figures["ours"]
    assert ours["mnist"]["kpp-paper"]["bound"] == {"mean": 81.0, "std": 1.0, "each": [80, 81, 82]}
    assert ours["mnist"]["kpp-paper"]["kl_over_T"] is None  # a column of other runs
    assert ours["mnist"]["kpp-paper-kl-over-T"]["kl_over_T"]["mean"] == 36.5
    assert ours["omniglot"]["kpp-paper"]["variant"] == "3M"
    assert ours["omniglot"]["vae"]["bound"]["mean"] == 118.0  # at full strength
    assert ours["mnist"]["kpp"]["bound"]["mean"] == 5.0 and ours["mnist"]["vae"] is None
    assert ours["cifar10"]["vae"]["bound"]["mean"] == 3.0  # bits per dimension
    text = "\n".join(finding.lines)
    assert "≤41.58   36.50 ±0.71   81.00 ±1.00" in text and "3M" in text
    assert (
        "kl_over_T, seeds: 2; those weights by a valid bound: 80.00 ±0.00" in text
        and "no bound" in text
    )
    marked = [line.split()[-1] for line in finding.lines if line.endswith("*")]
    assert marked == ["3.00*"]  # scored at the first of ten steps
    alone = next(line for line in finding.lines if "no memory" in line and "no record" not in line)
    assert alone.split() == ["no", "memory", "2.00"]  # no run by the bound
    said = table1.verdict(figures)
    assert "kpp-paper does NOT reach MNIST (81.00 > 41.58)" in said
    assert "kpp (ours) reaches MNIST (5.00)" in said


def test_a_better_record_changes_table1s_verdict(lab: Lab, folder: Path):
    filed(folder, record("kpp-paper", nats=41.0))
    assert "kpp-paper reaches MNIST (41.00)" in table1.verdict(table1.run(lab).figures)
    filed(
        folder,
        record("kpp-paper", nats=45.0),
        record("kpp-paper", variant="kl-over-T", kl_over_T=9.0),
    )
    said = table1.verdict(table1.run(lab).figures)
    assert "does NOT reach MNIST (45.00" in said and "9.00" not in said  # bounds decide, alone


def test_a_part_stands_back_for_the_whole(lab: Lab, folder: Path):
    filed(folder, record("kpp-paper", nats=40.0, partial=True))
    assert "(part)" in "\n".join(table1.run(lab).lines)
    filed(folder, record("kpp-paper", nats=40.0, partial=True), record("kpp-paper", nats=86.0))
    found = table1.run(lab).figures["ours"]["mnist"]["kpp-paper"]
    assert found["bound"]["mean"] == 86.0 and not found["partial"]


def test_the_full_table1_is_of_records_alone(folder: Path, tmp_path: Path):
    with pytest.raises(UserError, match="no records under"):
        table1.run(Lab(quick=False, runs=tmp_path, preset="mnist"))
    assert not list(tmp_path.glob("*mnist*"))


def test_table1_without_records_trains_a_few(lab: Lab, folder: Path):
    figures = checked(finding := table1.run(lab))
    column = figures["ours"]["glyphs"]
    assert {name for name, ours in column.items() if ours} == {"kpp", "kpp-paper", "vae"}
    assert column["kpp"]["variant"] == "store" and column["vae"]["floats_per_image"] == 0
    assert not figures["from_records"] and "trained just now" in finding.lines[-1]
    assert "nothing to compare" in table1.verdict(figures)


def test_the_papers_figures_are_those_the_claim_names():
    for name in ("mnist", "omniglot", "fashion_mnist", "cifar10"):
        figure = table1.format_published("kpp-paper", name).removeprefix("≤")
        assert figure in table1.ABOUT.claim
    assert table1.format_published("vma", "omniglot") == "103.6"
    assert table1.format_published("vae", "mnist") == ""
