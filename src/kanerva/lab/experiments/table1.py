"""Table 1: models by data sets, from the records of evaluations; the paper's figures beside ours.

Three figures stand apart and are never mixed: the paper's, our `bound`, which is valid, and our
`paper_style`, which decodes posterior means as the paper seems to and is no bound. The memory is
free in all of them, so its floats for each image stand in the text.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kanerva.data.splits import fixed_episodes, load_split
from kanerva.errors import UserError
from kanerva.evaluation.bound import bound
from kanerva.evaluation.controls import holding
from kanerva.evaluation.costs import memory_size
from kanerva.evaluation.records import is_resized, read_records
from kanerva.lab.experiments.sweep import IMAGES, RESULTS, pm, spread
from kanerva.lab.harness import Experiment, Figures, Finding, Lab
from kanerva.lab.paper_figures import BITS_PER_DIM, KANERVA_PP, NOT_A_BOUND, TABLE1
from kanerva.lab.tables import SETS, of_one_config, score_field, unit

ROWS: dict[str, tuple[str, str, tuple[str | None, ...]]] = {  # row: label, model, its variants
    "vma": ("VMA", "vma", (None,)),
    "km": ("KM", "km", (None,)),
    "km-free": ("KM, KL(M) unpaid", "km", ("free",)),
    "dnc": ("DNC", "dnc", (None,)),
    "dkm": ("DKM", "dkm", (None,)),
    "dkm-free": ("DKM, KL(M) unpaid", "dkm", ("free",)),
    "dkm-tsm": ("DKM w/TSM", "dkm-tsm", (None,)),
    "kpp-paper": ("Kanerva++: kpp-paper", "kpp-paper", (None, "3M")),
    "kpp": ("kpp (ours)", "kpp", (None, "store")),
    "kpp-int8": ("kpp, int8", "kpp", ("store-int8",)),
    "kpp-48": ("kpp, 48 floats", "kpp", ("store-T256-fine",)),
    "kpp-48-int8": ("kpp, 48 floats, int8", "kpp", ("store-T256-fine-int8",)),
    "kpp-generate": ("kpp, to generate", "kpp", ("generate",)),
    "kpp-small": ("kpp, as it ships", "kpp", ("small",)),
    "no-memory": ("no memory", "no-memory", (None,)),
    "vae": ("VAE", "vae", (None,)),
}
SCORES = ("bound", "paper_style")
LOOKS = {  # of a figure in the picture, by whose it is
    "paper": {"color": "black"},
    "bound": {"color": "#1b6ca8", "weight": "bold"},
    "paper_style": {"color": "#777777"},
}
NOTHING = "No record of ours on a data set of the paper's: nothing to compare."
Cells = dict[str, dict[str, Any]]  # by data set and by row


# Cells


def read_tested(folder: Path) -> list[dict[str, Any]]:
    """Every record of a test set under `results/`."""
    places = [folder / name for name in SETS if any((folder / name).glob("*.json"))]
    return [r for place in places for r in read_records(place) if r["split"] == "test"]


def find_cell(found: list[dict[str, Any]], name: str, row: str) -> dict[str, Any] | None:
    """What a row has on a data set: the first variant there is; seeds of one configuration; whole
    test sets rather than parts."""
    _, model, variants = ROWS[row]
    mine = [r for r in found if r["preset"] == name and r["model"] == model]
    for variant in variants:
        alike = [r for r in mine if r["variant"] == variant]
        if variant in (None, "store"):  # weights in a larger memory have a row of their own
            alike = [r for r in alike if not is_resized(r)]
        whole = [r for r in alike if not r["partial"]] or alike
        if whole:
            return average(of_one_config(whole), name)
    return None


def collect_cells(found: list[dict[str, Any]], names: list[str]) -> Cells:
    """Every row's cell of some data sets."""
    return {name: {row: find_cell(found, name, row) for row in ROWS} for name in names}


def average(alike: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Seeds of one configuration as one cell."""
    first = alike[0]
    part = score_field(name)
    charged = [r["full_bound"][part] for r in alike if "full_bound" in r]
    return {
        "variant": first["variant"],
        "seeds": [r["seed"] for r in alike],
        "T": first["T"],
        "floats_per_image": first["memory"]["floats_per_image"],
        "n_images": first["n_images"],
        "partial": first["partial"],
        "images_seen": first.get("images_seen"),
        **{how: spread([r[how][part] for r in alike]) for how in SCORES},
        "with_memory_kl": spread(charged) if charged else None,
    }


@torch.no_grad()
def train_and_score(lab: Lab) -> list[dict[str, Any]]:
    """Where there are no records: three models trained and scored for the table alone."""
    found = []
    for name, steps in (("kpp", 600), ("kpp-paper", 400), ("vae", 400)):
        model, config = lab.trained(name, steps=steps), lab.config(name, steps=steps)
        episodes = fixed_episodes(config, load_split(config, "test", lab.data_root), lab.device)
        limit = holding(episodes, IMAGES) if lab.quick else len(episodes)
        scores = {h: bound(model, episodes, sample=h == "bound", limit=limit) for h in SCORES}
        found.append(
            {
                "preset": lab.preset,
                "model": name,
                "variant": config.variant,
                "seed": lab.seed,
                "T": config.episode_length,
                "n_images": scores["bound"].n_images,
                "partial": limit < len(episodes),
                "config_hash": config.config_hash(),
                "memory": memory_size(model, config.episode_length),
                **{
                    h: asdict(s) | {"bits_per_dim": s.bits_per_dim(config.model.image)}
                    for h, s in scores.items()
                },
            }
        )
    return found


# Words


def verdict(figures: Figures) -> str:
    """Which of our figures reach the paper's for Kanerva++."""
    return judge_cells(figures["ours"])


def judge_cells(cells: Cells) -> str:
    """By the valid bound, and whether `paper_style` would say otherwise."""
    by_bound, by_style = (reached(cells, how) for how in SCORES)
    if not by_bound:
        return NOTHING
    words = compare_with_paper(cells, "bound")
    text = f"The paper's figures for Kanerva++, by our valid bound: {words}."
    if by_bound == by_style:
        return f"{text} By paper_style, which is no bound, the same are reached."
    return f"{text} By paper_style, which is no bound: {compare_with_paper(cells, 'paper_style')}."


def shared_columns(cells: Cells, how: str) -> dict[str, list[tuple[str, float]]]:
    """For each of our models, one score on every data set that the paper has too."""
    found = {}
    for row in ("kpp-paper", "kpp", "kpp-48"):
        both = [
            (name, column[row][how]["mean"])
            for name, column in cells.items()
            if column.get(row) and name in KANERVA_PP
        ]
        if both:
            found[ROWS[row][0].split(": ")[-1]] = both
    return found


def reached(cells: Cells, how: str) -> dict[str, list[str]]:
    """For each of our models, the data sets on which one score reaches the paper's."""
    return {
        model: [name for name, ours in both if ours <= KANERVA_PP[name]]
        for model, both in shared_columns(cells, how).items()
    }


def compare_with_paper(cells: Cells, how: str) -> str:
    """Where each of our models reaches the paper's figures, in words."""
    parts = []
    for model, both in shared_columns(cells, how).items():
        good = [f"{SETS[name]} ({ours:.2f})" for name, ours in both if ours <= KANERVA_PP[name]]
        bad = [
            f"{SETS[name]} ({ours:.2f} > {KANERVA_PP[name]:g})"
            for name, ours in both
            if ours > KANERVA_PP[name]
        ]
        words = [f"reaches {', '.join(good)}"] if good else []
        words += [f"does NOT reach {', '.join(bad)}"] if bad else []
        parts.append(f"{model} {' and '.join(words)}")
    return "; ".join(parts)


def format_cells(cells: Cells, trained_here: bool) -> list[str]:
    """A block for each data set, a row for each model that has a figure, ours or the paper's."""
    lines = []
    for name, column in cells.items():
        lines.append(
            f"{SETS[name] + ', ' + unit(name):<24}{'variant':<22}{'seeds':>6}{'T':>5}{'floats':>8}"
            f"{'paper':>10}{'bound':>14}{'paper_style':>14}"
        )
        missing = []
        for row, (label, _, _) in ROWS.items():
            paper, ours = TABLE1.get(row, {}).get(name), column.get(row)
            if ours is None:
                missing += [label] if row in TABLE1 or row in ("kpp", "vae", "no-memory") else []
            if paper is None and ours is None:
                continue
            text = f"  {label:<22}"
            if ours:
                text += f"{(ours['variant'] or '') + (' (part)' if ours['partial'] else ''):<22}"
                text += f"{len(ours['seeds']):>6}{ours['T']:>5}{ours['floats_per_image']:>8.4g}"
            else:
                text += " " * 41
            text += f"{format_published(row, name):>10}"
            text += "".join(f"{pm(ours[how]) if ours else '':>14}" for how in SCORES)
            lines.append(text.rstrip())
            if ours and ours["with_memory_kl"]:
                lines.append(
                    f"  {'':<22}its bound with KL(M) charged: {pm(ours['with_memory_kl'])}"
                )
        if missing:
            lines.append(f"  no record: {', '.join(missing)}")
    lines += [
        "paper: its Table 1, ≤ marks bounds; bound: ours, valid; paper_style: ours at posterior "
        "means, no bound.",
        "floats: the memory's for each image, free in all figures; ±: std over seeds; mazes: ours, "
        "not DMLab.",
    ]
    if trained_here:
        lines.append(f"No records under {RESULTS}/: these few models were trained just now.")
    return lines


def format_published(row: str, name: str) -> str:
    """A figure of the paper's as it stands there."""
    paper = TABLE1.get(row, {}).get(name)
    if paper is None:
        return ""
    digits = f"{paper:.2f}" if name in BITS_PER_DIM else f"{paper:g}"
    return f"{'' if row == NOT_A_BOUND else '≤'}{digits}"


# The picture


def draw(cells: Cells) -> Figure:
    """Models by data sets; under each the paper's figure, our bound and our paper_style."""
    columns = [
        (name, how)
        for name in cells
        for how in ("paper", *SCORES)
        if how != "paper" or any(name in figures for figures in TABLE1.values())
    ]
    shown = [
        row for row in ROWS if row in TABLE1 or any(column.get(row) for column in cells.values())
    ]
    width, height = 2.6 + 0.95 * len(columns), 1.5 + 0.34 * len(shown)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(-2.6 / 0.95, len(columns))
    axes.set_ylim(len(shown) + 1.2, -2.2)
    _heads(axes, columns, len(shown) - 0.5)
    for down, row in enumerate(shown):
        if down % 2:
            axes.axhspan(down - 0.5, down + 0.5, color="#f3f3f3", lw=0)
        axes.text(-2.5 / 0.95, down, _label(cells, row), va="center", fontsize=10)
        for across, (name, how) in enumerate(columns):
            ours = cells[name].get(row)
            published = format_published(row, name)
            text = published if how == "paper" else "" if ours is None else pm(ours[how])
            size = 9 if "±" not in text else 7.5
            look = {"ha": "center", "va": "center", "fontsize": size, **LOOKS[how]}
            axes.text(across + 0.5, down, text, **look)
    axes.text(
        -2.5 / 0.95,
        len(shown) + 0.3,
        "paper: its Table 1. bound: ours, valid. paper_style: ours at posterior means, no bound. "
        "The memory is free in all. Empty: no record.\n"
        + ("One seed each." if _one_seed(cells) else "±: std over seeds, where there are several."),
        va="center",
        fontsize=8.5,
        color="#444444",
    )
    return figure


def _label(cells: Cells, row: str) -> str:
    """A row's label with the variants that stand in it."""
    label, _, wanted = ROWS[row]
    found = {ours["variant"] for column in cells.values() if (ours := column.get(row))}
    named = sorted(found - {None})
    return f"{label}, {'/'.join(named)}" if named and len(wanted) > 1 else label


def _one_seed(cells: Cells) -> bool:
    return all(
        len(ours["seeds"]) == 1 for column in cells.values() for ours in column.values() if ours
    )


def _heads(axes: Axes, columns: list[tuple[str, str]], below: float) -> None:
    """What columns are called, and rules between data sets, down to `below`."""
    for across, (name, how) in enumerate(columns):
        axes.text(across + 0.5, -0.9, how, ha="center", va="center", fontsize=8.5, color="#444444")
        places = [i for i, (other, _) in enumerate(columns) if other == name]
        if across == places[0]:
            middle = (places[0] + places[-1] + 1) / 2
            title = SETS[name] + (" (ours: mazes)" if name == "mazes" else "")
            axes.text(
                middle, -1.7, f"{title}\n{unit(name)}", ha="center", va="center", fontsize=9.5
            )
            axes.plot([across, across], [-2.2, below], color="#bbbbbb", lw=1)
    axes.axhline(-0.5, color="black", lw=1)


def run(lab: Lab) -> Finding:
    found = read_tested(RESULTS)
    here = not found
    if here and not lab.quick:
        raise UserError(
            f"no records under {RESULTS}/ to make the table of: run it in a clone of the project, "
            "or --quick, which trains three small models instead"
        )
    if here:
        found = train_and_score(lab)
    names = [
        name
        for name in SETS
        if any(r["preset"] == name for r in found) or name in TABLE1["kpp-paper"]
    ]
    cells = collect_cells(found, names)
    figures = {"paper": TABLE1, "ours": cells, "from_records": not here}
    return Finding(figures, format_cells(cells, here), {"": draw(cells)})


EXPERIMENT = Experiment(
    name="table1",
    paper="Table 1",
    shows="models by data sets, from records; the paper's figures beside",
    claim="Kanerva++ bounds the negative log likelihood of test images, given their memory, by "
    f"{KANERVA_PP['mnist']:.2f} nats on MNIST, {KANERVA_PP['omniglot']:.2f} on Omniglot, "
    f"{KANERVA_PP['fashion_mnist']:.2f} bits/dim on Fashion-MNIST, {KANERVA_PP['cifar10']:.2f} on "
    "CIFAR-10.",
    run=run,
    verdict=verdict,
    quick="seconds, from records, else 3 min",
    full="seconds, from records",
    presets=("mnist",),
    on_every_set=True,
)
