"""What experiments share that train several models to compare them: equal runs, seeds, spread.

A `Setting` is trained once for each seed and scored twice on the same test images: `bound` is
valid, `paper_style` (posterior means) is not, and the two are never mixed. A figure over seeds is
mean and standard deviation; with one seed there is no deviation, and 95 % over images stands in.
"""

import math
import statistics
from copy import copy
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kanerva.data.splits import fixed_episodes, load_split
from kanerva.evaluation.bound import Score, bound
from kanerva.evaluation.controls import holding
from kanerva.evaluation.costs import memory_size
from kanerva.evaluation.record import count_reads
from kanerva.evaluation.records import read_records
from kanerva.lab.harness import Lab, full_steps
from kanerva.pictures import MODEL_COLOURS
from kanerva.presets import preset

RESULTS = Path("results")  # where records lie, in the working directory
IMAGES = 1024  # of the test set that a quick version scores; the full one scores it all
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
    found: dict[str, list[Score]] = {"bound": [], "paper_style": []}
    floats = 0.0
    for seed in chosen:
        model = lab.trained(setting.model, setting.variant, seed=seed, **setting.parts)
        floats = memory_size(model, config.episode_length)["floats_per_image"]
        for how, scores in found.items():
            scores.append(bound(model, episodes, sample=how == "bound", limit=limit))
    return as_entry(
        setting,
        found,
        variant=config.variant,
        T=config.episode_length,
        K=count_reads(config),
        capacity=getattr(getattr(config.model, "memory", None), "capacity", None),
        floats_per_image=floats,
        steps=config.steps,
        images_per_step=config.episode_length * config.batch,
        seeds=chosen,
    )


def as_entry(
    setting: Setting, found: dict[str, list[Score]], *, T: int, K: int, **facts: Any
) -> dict[str, Any]:
    """Scores of a setting over seeds, and what they are of; only Kanerva++ has K reads."""
    return {
        "label": setting.label,
        "model": setting.model,
        "T": T,
        "K": K if setting.model in ("kpp", "kpp-paper") else None,
        **facts,
        "n_images": found["bound"][0].n_images,
        "floor": math.log(T),
        **{how: over_seeds(scores) for how, scores in found.items()},
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
        first, names = mine[0], [field.name for field in fields(Score)]
        scores = {
            how: [Score(**{k: r[how].get(k, r["n_images"]) for k in names}) for r in mine]
            for how in ("bound", "paper_style")
        }
        entries.append(
            as_entry(
                setting,
                scores,
                variant=setting.variant,
                T=first["T"],
                K=first["K"],
                floats_per_image=first["memory"]["floats_per_image"],
                steps=first["steps"],
                images_per_step=first["images_seen"] // first["steps"],
                seeds=[r["seed"] for r in mine],
            )
        )
    return entries if len({images_seen(entry) for entry in entries}) == 1 else None


def images_seen(entry: dict[str, Any]) -> int:
    """In training."""
    return entry["steps"] * entry["images_per_step"]


def over_seeds(scores: list[Score]) -> dict[str, Any]:
    """Each term's mean and deviation; `kl` is both divergences together."""
    rows = [asdict(score) for score in scores]
    for row in rows:
        row["kl"] = row["kl_z"] + row["kl_y"]
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


def within_published(found: dict[str, Any], published: float) -> bool:
    """Whether a variation is no more than the paper's, or than another training makes by itself."""
    return found["std"] <= max(published, found["seed_std"] or 0.0)


# Words


def seeds_in_words(found: dict[str, Any]) -> str:
    """How much of a variation another training would make by itself."""
    if found["seed_std"] is None:
        return "one seed: how much another training varies is not known"
    return f"std between seeds {found['seed_std']:.2f}"


def seeds_of(entry: dict[str, Any]) -> str:
    """What its figures are of."""
    count = len(entry["seeds"])
    return f"mean ± std of {count} seeds" if count > 1 else "one seed"


def pm(entry: dict[str, Any], digits: int = 2) -> str:
    """12.34±0.05, or 12.34 where there is one."""
    text = f"{entry['mean']:.{digits}f}"
    return text if entry["std"] is None else f"{text}±{entry['std']:.{digits}f}"


def rows(entries: list[dict[str, Any]]) -> list[str]:
    """Entries as a table."""
    head = f"{'':<21}{'T':>4}{'K':>4}{'floats':>8}{'bound':>14}{'recon':>9}{'KL z':>13}{'KL y':>12}"
    lines = [f"{head}{'(paper_style)':>15}"]
    for entry in entries:
        b, style = entry["bound"], entry["paper_style"]["nll_nats"]
        reads = entry["K"] or "-"
        lines.append(
            f"{entry['label']:<21}{entry['T']:>4}{reads:>4}{entry['floats_per_image']:>8.0f}"
            f"{pm(b['nll_nats']):>14}{b['recon']['mean']:>9.2f}{pm(b['kl_z']):>13}"
            f"{pm(b['kl_y']):>12}{'(' + pm(style) + ')':>15}"
        )
    first = entries[0]
    images = " or ".join(map(str, sorted({entry["n_images"] for entry in entries})))
    lines.append(
        f"nats per image, {images} test images, {images_seen(first):,} seen, {seeds_of(first)}; "
        "(paper_style) is no bound; floats of M"
    )
    return lines


# Pictures


def two_panels(title: str) -> Figure:
    """A figure with two panels side by side, empty yet."""
    figure = Figure(figsize=(11.6, 4.4), layout="constrained")
    figure.subplots(1, 2)
    figure.suptitle(title, fontsize=10)
    return figure


def draw_floor(axes: Axes, floor: float) -> None:
    """What no bound of an episode's images can fall below."""
    axes.axhline(floor, color="black", ls="--", lw=1, label=f"floor ln T = {floor:.2f}")


def finish_axes(axes: Axes, across: str, title: str) -> None:
    """Labels, a scale from 0, and a legend above the lines."""
    axes.set_xlabel(across)
    axes.set_ylabel("nats per image")
    axes.set_title(title, fontsize=10)
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])
    axes.legend(fontsize=8, loc="upper center", ncols=2)


def line_over(
    axes: Axes, at: list[int], entries: list[dict[str, Any]], term: str, label: str, **how: Any
) -> None:
    """A term of the bound against T or K, at even distances, with deviations."""
    found = [entry["bound"][term] for entry in entries]
    axes.errorbar(
        range(len(at)),
        [one["mean"] for one in found],
        yerr=None if found[0]["std"] is None else [one["std"] for one in found],
        label=label,
        capsize=4,
        marker="o",
        **how,
    )
    axes.set_xticks(range(len(at)), [str(value) for value in at])


def bars(axes: Axes, entries: list[dict[str, Any]], how: str, title: str) -> None:
    """Mean and deviation of one score, a bar for each entry, a point for each seed."""
    for place, entry in enumerate(entries):
        found = entry[how]["nll_nats"]
        colour = MODEL_COLOURS.get(entry["model"], "#6a6a6a")
        axes.bar(place, found["mean"], yerr=found["std"], color=colour, alpha=0.75, capsize=6)
        if found["std"] is not None:
            axes.plot([place] * len(found["each"]), found["each"], "k.", ms=5)
        top = found["mean"] + (found["std"] or 0.0)
        axes.annotate(pm(found), (place, top), (0, 4), textcoords="offset points", ha="center")
    if how == "bound":
        draw_floor(axes, entries[0]["floor"])
        axes.legend(loc="upper left", fontsize=8)
    highest = max(entry[how]["nll_nats"]["mean"] for entry in entries)
    axes.set_ylim(0, 1.25 * highest)
    axes.set_xticks(range(len(entries)), [entry["label"].replace(", ", ",\n") for entry in entries])
    axes.set_ylabel("nats per image")
    axes.set_title(title, fontsize=10)
