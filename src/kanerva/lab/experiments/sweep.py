"""What experiments share that train several models to compare them: equal runs, seeds, spread.

A `Setting` is trained once for each seed and scored twice on the same test images: `bound` is
valid, `paper_style` (posterior means) is not, and the two are never mixed. A figure over seeds is
mean and standard deviation; with one seed there is no deviation, and 95 % over images stands in.
"""

import math
import statistics
from copy import copy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from kanerva.data.splits import fixed_episodes, load_split
from kanerva.evaluation.bound import bound
from kanerva.evaluation.controls import holding
from kanerva.evaluation.costs import memory_size
from kanerva.evaluation.record import count_reads
from kanerva.evaluation.records import read_records
from kanerva.evaluation.report import columns
from kanerva.lab.experiments import plots
from kanerva.lab.experiments.measures import pm
from kanerva.lab.harness import Lab, full_steps
from kanerva.presets import preset

RESULTS = Path("results")  # where records lie, in the working directory
IMAGES = 1024  # of the test set that a quick version scores; the full one scores it all
SCORES = ("bound", "paper_style")
TERMS = ("nll_nats", "recon", "kl_z", "kl_y")


@dataclass(frozen=True)
class Setting:
    """One thing to train; `parts` are those of `Lab.trained`."""

    label: str
    model: str
    variant: str | None = None
    parts: dict[str, Any] = field(default_factory=dict)


def equal_runs(lab: Lab, quick: int) -> Lab:
    """The lab with every training equally long, whatever each model's own preset says."""
    equal = copy(lab)
    equal.steps = lab.steps or (quick if lab.quick else full_steps(lab.preset))
    return equal


def images_per_step(lab: Lab) -> int:
    """What a step sees: that of the paper's model, for all."""
    start = preset(lab.preset, "kpp-paper")
    return start.episode_length * start.batch


def in_episodes_of(length: int, lab: Lab) -> dict[str, int]:
    """Parts of a config that sees so many images a step, T of them in an episode."""
    return {"episode_length": length, "batch": images_per_step(lab) // length}


def seeds(lab: Lab, full: int = 3) -> list[int]:
    """One in the quick version."""
    return [lab.seed + number for number in range(lab.pick(1, full))]


@torch.no_grad()
def train_and_score(lab: Lab, setting: Setting, chosen: list[int]) -> dict[str, Any]:
    """Train for each seed, score on the test set; the entry that stands in figures."""
    config = lab.config(setting.model, setting.variant, **setting.parts)
    episodes = fixed_episodes(config, load_split(config, "test", lab.data_root), lab.device)
    limit = holding(episodes, IMAGES) if lab.quick else len(episodes)
    length, runs = config.episode_length, []
    for seed in chosen:
        model = lab.trained(setting.model, setting.variant, seed=seed, **setting.parts)
        scores = {how: bound(model, episodes, sample=how == "bound", limit=limit) for how in SCORES}
        run = {"variant": config.variant, "seed": seed, "T": length, "K": count_reads(config)}
        run |= {"steps": config.steps, "images_seen": config.steps * config.batch * length}
        run |= {"memory": memory_size(model, length), "n_images": scores["bound"].n_images}
        runs.append(run | {how: asdict(score) for how, score in scores.items()})
    return as_entry(setting, runs)


def as_entry(setting: Setting, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Runs of a setting, records or as they have it, over seeds; only Kanerva++ has K reads."""
    first = runs[0]
    return {
        "label": setting.label,
        "model": setting.model,
        "variant": first["variant"],
        "T": first["T"],
        "K": first["K"] if setting.model in ("kpp", "kpp-paper") else None,
        "floats_per_image": first["memory"]["floats_per_image"],
        "steps": first["steps"],
        "images_per_step": first["images_seen"] // first["steps"],
        "seeds": [run["seed"] for run in runs],
        "n_images": first["n_images"],
        "floor": math.log(first["T"]),
        **{how: over_seeds([run[how] for run in runs]) for how in SCORES},
    }


def read_entries(
    settings: list[Setting], preset_name: str, least: int = 3
) -> list[dict[str, Any]] | None:
    """The same entries from records of whole test sets, where each setting has at least so many
    seeds, of one configuration, and all saw as many images. Else None."""
    folder = RESULTS / preset_name
    found = read_records(folder) if any(folder.glob("*.json")) else []
    entries = []
    for setting in settings:
        named = (setting.model, setting.variant)
        mine = [r for r in found if (r["model"], r["variant"]) == named and not r["partial"]]
        if len(mine) < least or len({r["config_hash"] for r in mine}) > 1:
            return None
        entries.append(as_entry(setting, mine))
    return entries if len({images_seen(entry) for entry in entries}) == 1 else None


def images_seen(entry: dict[str, Any]) -> int:
    """In training."""
    return entry["steps"] * entry["images_per_step"]


def over_seeds(scores: list[dict[str, Any]]) -> dict[str, Any]:
    """Each term's mean and deviation; `kl` is both divergences together."""
    rows = [score | {"kl": score["kl_z"] + score["kl_y"]} for score in scores]
    entry: dict[str, Any] = {name: spread([r[name] for r in rows]) for name in (*TERMS, "kl")}
    return entry | {"ci95": statistics.fmean(row["ci95"] for row in rows)}


def spread(values: list[float]) -> dict[str, Any]:
    """Mean, sample deviation (None of one), and each."""
    std = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "std": std, "each": values}


def gap(worse: dict[str, Any], better: dict[str, Any]) -> dict[str, Any]:
    """By how many nats the second entry's bound is lower, and how sure that is: two standard errors
    over seeds; of one seed 95 % over images, which says nothing of another training."""
    nats = worse["nll_nats"]["mean"] - better["nll_nats"]["mean"]
    count = min(len(entry["nll_nats"]["each"]) for entry in (worse, better))
    if count > 1:
        errors = [2 * e["nll_nats"]["std"] / math.sqrt(count) for e in (worse, better)]
    else:
        errors = [worse["ci95"], better["ci95"]]
    margin = math.hypot(*errors)
    over = f"two standard errors, {count} seeds" if count > 1 else "95 % over images, one seed"
    return {"nats": nats, "margin": margin, "clear": abs(nats) > margin, "over": over}


def over_values(entries: list[dict[str, Any]], term: str) -> dict[str, Any]:
    """How a term of the bound varies over the values of a sweep, and between seeds at one value."""
    found = [entry["bound"][term] for entry in entries]
    means = [one["mean"] for one in found]
    deviations = [one["std"] for one in found if one["std"] is not None]
    return {
        "std": statistics.stdev(means),
        "range": max(means) - min(means),
        "first": means[0],
        "last": means[-1],
        "seed_std": statistics.fmean(deviations) if deviations else None,
    }


# Words


def judge_sweep(
    found: dict[str, Any], published: float, holds: str, fails: str, said: list[str]
) -> str:
    """Whether a variation is no more than the paper's, or than another training makes by itself."""
    between = found["seed_std"]
    said.append(
        "one seed: how much another training varies is not known"
        if between is None
        else f"std between seeds {between:.2f}"
    )
    claim = (
        f"{holds} (std at most {published}, or that of seeds)"
        if found["std"] <= max(published, between or 0.0)
        else f"{fails} than the paper's {published} nats: the claim does NOT hold"
    )
    return f"{claim}: {'; '.join(said)}."


def seeds_of(entry: dict[str, Any]) -> str:
    """What its figures are of."""
    count = len(entry["seeds"])
    return f"mean ± std of {count} seeds" if count > 1 else "one seed"


def rows(entries: list[dict[str, Any]]) -> list[str]:
    """Entries as a table."""
    lines = [["", "T", "K", "floats", "bound", "recon", "KL z", "KL y", "(paper_style)"]]
    for entry in entries:
        facts = [entry["label"], entry["T"], entry["K"] or "-", f"{entry['floats_per_image']:.0f}"]
        terms = [pm(entry["bound"][term], 2) for term in TERMS]
        style = pm(entry["paper_style"]["nll_nats"], 2)
        lines.append([*map(str, facts), *terms, f"({style})"])
    first = entries[0]
    images = " or ".join(map(str, sorted({entry["n_images"] for entry in entries})))
    return [
        *columns(lines, left=1).splitlines(),
        f"nats per image, {images} test images, {images_seen(first):,} seen, {seeds_of(first)}; "
        "(paper_style): no bound; floats of M",
    ]


def gap_lines(gaps: dict[str, dict[str, Any]], what: str) -> list[str]:
    """Gaps as lines, by model; `what` says what a gap is of it."""
    return [
        f"{what} {model}: {found['nats']:.2f} ± {found['margin']:.2f} nats ({found['over']})"
        for model, found in gaps.items()
    ]


# Pictures


def draw_sweep(
    lab: Lab, across: str, at: list[int], by_model: dict[str, list[dict[str, Any]]]
) -> Figure:
    """The bound of each model, and its divergences, against T or K."""
    first = next(iter(by_model.values()))[0]
    title = f"{lab.preset}: {seeds_of(first)}, {first['steps']} steps of about "
    figure = plots.canvas(11.6, 4.4, f"{title}{images_per_step(lab)} images")
    left, right = figure.subplots(1, 2)
    places = range(len(at))
    for model, entries in by_model.items():
        for axes, term, label, style in (
            (left, "nll_nats", "", "-"),
            (right, "kl", ", KL z + KL y", "-"),
            (right, "kl_y", ", KL y", ":"),
        ):
            look: Any = {"label": model + label, "color": plots.COLOURS[model], "ls": style}
            plots.draw_line(axes, places, [entry["bound"][term] for entry in entries], **look)
        left.plot(places, [entry["floor"] for entry in entries], "k--", lw=1)
    for axes, title in ((left, "test bound; dashes: its floor ln T"), (right, "its divergences")):
        plots.finish_axes(axes, across, at, title, places)
        axes.set_ylabel("nats per image")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
    return figure


def draw_bounds(lab: Lab, entries: list[dict[str, Any]]) -> Figure:
    """Both scores, a bar for each entry, a point for each seed."""
    first = entries[0]
    title = f"{lab.preset}, T={first['T']}, {images_seen(first):,} images each; {seeds_of(first)}"
    figure = plots.canvas(11.6, 4.4, title)
    names = [entry["label"].replace(", ", ",\n") for entry in entries]
    titles = {"bound": "test bound; dashes: floor ln T", "paper_style": "paper_style (no bound)"}
    for axes, (how, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        found = [entry[how]["nll_nats"] for entry in entries]
        colours = [plots.COLOURS[entry["model"]] for entry in entries]
        bars = axes.bar(names, [one["mean"] for one in found], color=colours, alpha=0.75)
        axes.bar_label(bars, [pm(one, 2) for one in found], padding=4)
        for name, one in zip(names, found, strict=True):
            axes.plot([name] * len(one["each"]), one["each"], "k.", ms=5)
        if how == "bound":
            axes.axhline(first["floor"], color="black", ls="--", lw=1)
        axes.margins(y=0.2)
        axes.set_ylabel("nats per image")
        axes.set_title(title, fontsize=10)
    return figure
