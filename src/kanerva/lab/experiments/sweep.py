"""Shared by experiments that train several models to compare them: equal runs, seeds, spread.

A `Setting` has two scores, from separate runs, which are never mixed. `bound` is a valid bound, and
its runs are trained on it. `kl_over_T` is not a bound; its runs are trained with each KL weighted
by 1/T, as the paper may have done. A figure over seeds is a mean and standard deviation. With one
seed, the 95 % interval over images replaces the deviation.
"""

import math
import statistics
from copy import copy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from kanerva.config import DkmConfig, RunConfig
from kanerva.data.splits import fixed_episodes, load_split
from kanerva.evaluation.bound import bound, kl_over_T
from kanerva.evaluation.controls import holding
from kanerva.evaluation.costs import memory_size
from kanerva.evaluation.record import count_reads
from kanerva.evaluation.records import is_early, read_records
from kanerva.evaluation.report import columns
from kanerva.lab.experiments import plots
from kanerva.lab.experiments.measures import pm
from kanerva.lab.harness import Lab
from kanerva.presets import preset

RESULTS = Path("results")  # the folder of records, in the working directory
IMAGES = 1024  # test images that a quick version scores; the full one scores all
LIKELY = "kl-over-T"  # the variant trained and scored by what may be the paper's accounting
SCORES = ("bound", "paper_style")
TERMS = ("nll_nats", "recon", "kl_z", "kl_y")


@dataclass(frozen=True)
class Setting:
    """One model to train, and the variants under which its records are saved.

    `variant` is that of the `bound` records; its first word is the preset's variant. `likely` is
    that of the `kl_over_T` records, or None. `parts` are options for `Lab.trained`.
    """

    label: str
    model: str
    variant: str | None = None
    likely: str | None = None
    parts: dict[str, Any] = field(default_factory=dict)

    @property
    def start(self) -> str | None:
        """The variant of the preset that a run starts from."""
        return self.variant and self.variant.partition("-")[0]


def of_paper(label: str, model: str, suffix: str = "", **parts: Any) -> Setting:
    """A setting of a model of the paper, with both scores. `bound` uses the variant `strong`."""
    return Setting(label, model, f"strong{suffix}", f"{LIKELY}{suffix}", parts)


def equal_runs(lab: Lab, quick: int) -> Lab:
    """A lab that trains every model for the same number of steps, whatever its preset says."""
    equal = copy(lab)
    full = preset(lab.preset, "kpp-paper", "strong").steps
    equal.steps = lab.steps or (quick if lab.quick else full)
    return equal


def images_per_step(lab: Lab) -> int:
    """Images per step of the paper's model, used for all models."""
    start = preset(lab.preset, "kpp-paper", "strong")
    return start.episode_length * start.batch


def in_episodes_of(length: int, lab: Lab) -> dict[str, int]:
    """Options that give the same number of images per step in episodes of `length`."""
    return {"episode_length": length, "batch": images_per_step(lab) // length}


def seeds(lab: Lab, full: int = 3) -> list[int]:
    """The seeds to train: `full` of them, or one in the quick version."""
    return [lab.seed + number for number in range(lab.pick(1, full))]


@torch.no_grad()
def train_and_score(lab: Lab, setting: Setting, chosen: list[int]) -> dict[str, Any]:
    """Train a setting with each seed, score it on the test set, and return its entry of figures."""
    model, parts = setting.model, setting.parts
    config = lab.config(model, setting.start, **parts)
    episodes = fixed_episodes(config, load_split(config, "test", lab.data_root), lab.device)
    limit = holding(episodes, IMAGES) if lab.quick else len(episodes)
    length, runs, likely = config.episode_length, [], []
    for seed in chosen:
        trained = lab.trained(model, setting.start, seed=seed, **parts)
        scores = {
            how: bound(trained, episodes, sample=how == "bound", limit=limit) for how in SCORES
        }
        run = {"variant": config.variant, "seed": seed, "T": length, "K": count_reads(config)}
        run |= {"steps": config.steps, "images_seen": config.steps * config.batch * length}
        run |= {"memory": memory_size(trained, length), "n_images": scores["bound"].n_images}
        runs.append(run | {how: asdict(score) for how, score in scores.items()})
        if setting.likely is not None:
            trained = lab.trained(model, seed=seed, **likely_parts(config, parts))
            at_means = bound(trained, episodes, sample=False, limit=limit)
            counted = kl_over_T(trained, episodes, limit=limit)
            valid = bound(trained, episodes, limit=limit)
            found = {"paper_style": at_means, "kl_over_T": counted, "bound": valid}
            likely.append({how: asdict(score) for how, score in found.items()})
    return as_entry(setting, runs, likely)


def likely_parts(config: RunConfig, parts: dict[str, Any]) -> dict[str, Any]:
    """Options of the `kl_over_T` run: each KL weighted by 1/T, the paper's optimiser, and the same
    number of images per step. DKM's objective then includes KL(M), as its port's does."""
    weighed = {"optim": {"kl_weight": "1/T"}, "batch": config.batch} | parts
    if isinstance(config.model, DkmConfig):
        weighed["rows"] = parts.get("rows", {}) | {"charge": True}
    return weighed


def as_entry(
    setting: Setting, runs: list[dict[str, Any]], likely: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """The entry of a setting, averaged over seeds. `runs` are records, or dicts of the same form.
    Only Kanerva++ has K reads."""
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
        "early": any(map(is_early, runs)),
        **{how: over_seeds([run[how] for run in runs]) for how in SCORES},
        "kl_over_T": likely_over_seeds(likely) if likely else None,
    }


def likely_over_seeds(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Over seeds: `kl_over_T`, its KL divided by T, and the valid bound of the same weights.

    Older records have no confidence interval of `kl_over_T`. The interval of `paper_style` is used
    instead: the same score with KL terms that are not divided by T.
    """
    totals = [run["kl_over_T"]["nll_nats"] for run in runs]
    rest = [run["paper_style"]["recon"] for run in runs]
    sure = [run["kl_over_T"].get("ci95") or run["paper_style"]["ci95"] for run in runs]
    entry = {
        "nll_nats": spread(totals),
        "kl": spread([total - recon for total, recon in zip(totals, rest, strict=True)]),
        "bound": spread([run["bound"]["nll_nats"] for run in runs]),
    }
    return with_error(entry, sure)


def read_entries(
    settings: list[Setting], preset_name: str, least: int = 3
) -> list[dict[str, Any]] | None:
    """Read the entries of settings from records of whole test sets. Return None unless each score
    of each setting has at least `least` seeds, all of one configuration."""
    folder = RESULTS / preset_name
    found = read_records(folder) if any(folder.glob("*.json")) else []
    entries = []
    for setting in settings:
        names = [setting.variant] if setting.likely is None else [setting.variant, setting.likely]
        counted = []
        for name in names:
            mine = [r for r in found if (r["model"], r["variant"]) == (setting.model, name)]
            counted.append([r for r in mine if not r["partial"]])
        if any(len(c) < least or len({r["config_hash"] for r in c}) > 1 for c in counted):
            return None
        entries.append(as_entry(setting, *counted))
    return entries


def images_seen(entry: dict[str, Any]) -> int:
    """Images seen in training."""
    return entry["steps"] * entry["images_per_step"]


def over_seeds(scores: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation of each term over seeds. `kl` is the sum of both KL terms."""
    rows = [score | {"kl": score["kl_z"] + score["kl_y"]} for score in scores]
    entry: dict[str, Any] = {name: spread([r[name] for r in rows]) for name in (*TERMS, "kl")}
    return with_error(entry, [row["ci95"] for row in rows])


def with_error(entry: dict[str, Any], sure: list[float]) -> dict[str, Any]:
    """Add the 95 % interval over images. With one seed it is also the error of the total."""
    entry["ci95"] = statistics.fmean(sure)
    if len(sure) == 1:
        entry["nll_nats"]["ci95"] = entry["ci95"]
    return entry


def spread(values: list[float]) -> dict[str, Any]:
    """The mean, the sample standard deviation (None for one value), and the values."""
    std = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "std": std, "each": values}


def gap(worse: dict[str, Any], better: dict[str, Any]) -> dict[str, Any]:
    """By how many nats the second score is lower, with a margin. The margin is two standard errors
    over seeds. With one seed it is the 95 % interval over images, which ignores the variation
    between trainings."""
    nats = worse["nll_nats"]["mean"] - better["nll_nats"]["mean"]
    both = (worse, better)
    counts = [len(entry["nll_nats"]["each"]) for entry in both]
    if min(counts) > 1:
        spreads = [entry["nll_nats"]["std"] for entry in both]
        errors = [2 * s / math.sqrt(count) for s, count in zip(spreads, counts, strict=True)]
        over = f"two standard errors, {say_range(counts)} seeds"
    else:
        errors = [entry["ci95"] for entry in both]
        over = "95 % over images, one seed"
    margin = math.hypot(*errors)
    return {"nats": nats, "margin": margin, "clear": abs(nats) > margin, "over": over}


def gaps_to(
    without: dict[str, Any], others: list[dict[str, Any]], how: str
) -> dict[str, dict[str, Any]]:
    """Map labels to the gap from `without`, for each of the others that has the score `how`."""
    return {one["label"]: gap(without[how], one[how]) for one in others if one[how]}


def over_values(entries: list[dict[str, Any]], term: str, how: str = "bound") -> dict[str, Any]:
    """How a term of a score varies over the values of a sweep, and between seeds at one value."""
    terms = [entry[how][term] for entry in entries]
    means = [one["mean"] for one in terms]
    deviations = [one["std"] for one in terms if one["std"] is not None]
    return {
        "std": statistics.stdev(means),
        "range": max(means) - min(means),
        "first": means[0],
        "last": means[-1],
        "seed_std": statistics.fmean(deviations) if deviations else None,
    }


# Text


def judge_sweep(
    found: dict[str, Any], published: float, holds: str, fails: str, said: list[str]
) -> str:
    """Whether the variation is at most the paper's, or at most that between seeds."""
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


def seeds_of(*entries: dict[str, Any]) -> str:
    """Describe what the figures of entries are means of."""
    counts = [len(entry["seeds"]) for entry in entries]
    if max(counts) == 1:
        return "one seed ± 95 % over images"
    return f"mean ± std of {say_range(counts)} seeds"


def say_range(counts: list[int]) -> str:
    """Format numbers that are usually the same: "3", or "3 to 5"."""
    low, high = min(counts), max(counts)
    return f"{low}" if low == high else f"{low} to {high}"


def rows(entries: list[dict[str, Any]]) -> list[str]:
    """Format entries as a table."""
    lines = [["", "T", "K", "floats", "bound", "recon", "KL z", "KL y", "[kl_over_T]"]]
    for entry in entries:
        facts = [entry["label"], entry["T"], entry["K"] or "-", f"{entry['floats_per_image']:.0f}"]
        terms = [pm(entry["bound"][term], 2) for term in TERMS]
        terms[0] += "*" if entry["early"] else ""
        likely = entry["kl_over_T"]
        lines.append(
            [*map(str, facts), *terms, f"[{pm(likely['nll_nats'], 2)}]" if likely else "-"]
        )
    images, seen = (
        " or ".join(f"{n:,}" for n in sorted(set(each)))
        for each in ([e["n_images"] for e in entries], map(images_seen, entries))
    )
    text = [
        *columns(lines, left=1).splitlines(),
        f"nats per image, {images} test images, {seen} seen, {seeds_of(*entries)}; floats of M",
    ]
    if any(entry["kl_over_T"] for entry in entries):
        text.append("[kl_over_T]: no bound; other runs, trained with each KL weighed 1/T")
    if any(entry["early"] for entry in entries):
        text.append("*: scored before four fifths of its run")
    return text


def gap_lines(gaps: dict[str, dict[str, Any]], what: str) -> list[str]:
    """Format gaps as lines, one per model; each starts with `what`."""
    return [
        f"{what} {model}: {found['nats']:.2f} ± {found['margin']:.2f} nats ({found['over']})"
        for model, found in gaps.items()
    ]


# Pictures


def draw_sweep(
    lab: Lab, across: str, at: list[int], by_model: dict[str, list[dict[str, Any]]]
) -> Figure:
    """Plot each model's bound, its KL terms and `kl_over_T` against T or K."""
    first = next(iter(by_model.values()))[0]
    title = f"{lab.preset}: {seeds_of(first)}, {first['steps']} steps of about "
    figure = plots.canvas(13.6, 4.4, f"{title}{images_per_step(lab)} images")
    left, right, last = figure.subplots(1, 3)
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
        if all(entry["kl_over_T"] for entry in entries):
            found = [entry["kl_over_T"]["nll_nats"] for entry in entries]
            plots.draw_line(last, places, found, label=model, color=plots.COLOURS[model])
    titles = {left: "test bound; dashes: its floor ln T", right: "its divergences"}
    for axes, title in (titles | {last: "kl_over_T: no bound; other runs"}).items():
        plots.finish_axes(axes, across, at, title, places)
        axes.set_ylabel("nats per image")
        axes.set_ylim(bottom=0)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    return figure


def draw_bounds(lab: Lab, entries: list[dict[str, Any]]) -> Figure:
    """Plot both scores: a bar for each entry, a point for each seed."""
    first = entries[0]
    seen = " or ".join(f"{n:,}" for n in sorted({images_seen(entry) for entry in entries}))
    title = f"{lab.preset}, T={first['T']}, {seen} images each; {seeds_of(*entries)}"
    figure = plots.canvas(11.6, 4.4, title)
    titles = {"bound": "test bound; dashes: floor ln T", "kl_over_T": "kl_over_T: no bound"}
    for axes, (how, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        there = [entry for entry in entries if entry[how]]
        names = [entry["label"].replace(", ", ",\n") for entry in there]
        found = [entry[how]["nll_nats"] for entry in there]
        colours = [plots.COLOURS[entry["model"]] for entry in there]
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
