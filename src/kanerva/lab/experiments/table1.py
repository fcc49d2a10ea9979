"""Table 1: models by data sets, from evaluation records, with the paper's figures beside ours.

Three kinds of figures are never mixed: the paper's; our `kl_over_T`, of runs trained with each KL
weighted by 1/T, which may be the paper's accounting and is not a bound; and our `bound`, which is
valid. None of them charges for the memory, so each row states its floats per image.
"""

import math
from pathlib import Path
from typing import Any

from kanerva.errors import UserError
from kanerva.evaluation.records import is_early, is_resized, read_records
from kanerva.lab.experiments.measures import pm
from kanerva.lab.experiments.sweep import LIKELY, RESULTS, Setting, spread, train_and_score
from kanerva.lab.harness import About, Figures, Finding, Lab
from kanerva.lab.paper_figures import BITS_PER_DIM, KANERVA_PP, NOT_A_BOUND, TABLE1
from kanerva.lab.tables import SETS, of_one_config, score_field, unit

# row: label, model, variants. The first variant that has records is used
ROWS: dict[str, tuple[str, str, tuple[str | None, ...]]] = {
    "vma": ("VMA", "vma", ("strong", None)),
    "km": ("KM", "km", ("strong", None)),
    "km-free": ("KM, KL(M) unpaid", "km", ("strong-free", "free")),
    "dnc": ("DNC", "dnc", ("strong", None)),
    "dkm": ("DKM", "dkm", ("strong", None)),
    "dkm-free": ("DKM, KL(M) unpaid", "dkm", ("strong-free", "free")),
    "dkm-tsm": ("DKM w/TSM", "dkm-tsm", ("strong", None)),
    "kpp-paper": ("Kanerva++: kpp-paper", "kpp-paper", ("strong", None, "3M")),
    "kpp": ("kpp (ours)", "kpp", (None, "store")),
    "kpp-int8": ("kpp, int8", "kpp", ("store-int8",)),
    "kpp-48": ("kpp, 48 floats", "kpp", ("store-T256-fine",)),
    "kpp-48-int8": ("kpp, 48 floats, int8", "kpp", ("store-T256-fine-int8",)),
    "kpp-generate": ("kpp, retired", "kpp", ("generate",)),
    "kpp-small": ("kpp, narrower", "kpp", ("small",)),
    "no-memory": ("no memory", "no-memory", ("strong", None)),
    "vae": ("VAE", "vae", ("strong", None)),
}
NOTHING = "No record of ours on a data set of the paper's: nothing to compare."
Cells = dict[str, dict[str, Any]]  # cells[data set][row]


# Cells


def read_tested(folder: Path) -> list[dict[str, Any]]:
    """Read every record of a test set under `results/`."""
    places = [folder / name for name in SETS if any((folder / name).glob("*.json"))]
    return [r for place in places for r in read_records(place) if r["split"] == "test"]


def find_cell(
    found: list[dict[str, Any]], name: str, model: str, variants: tuple[str | None, ...]
) -> dict[str, Any] | None:
    """The cell of a model on a data set: the mean over seeds of one configuration. It uses the
    first variant that has records, and prefers records of whole test sets to parts."""
    mine = [r for r in found if r["preset"] == name and r["model"] == model]
    for variant in variants:
        alike = [r for r in mine if r["variant"] == variant]
        if variant in (None, "store"):  # the same weights with a larger memory have their own row
            alike = [r for r in alike if not is_resized(r)]
        whole = [r for r in alike if not r["partial"]] or alike
        if whole:
            return average(of_one_config(whole), name)
    return None


def collect_cells(found: list[dict[str, Any]], names: list[str]) -> Cells:
    """The cells of every row on the data sets `names`, including those of `kl_over_T` runs."""
    wanted = {row: (model, variants) for row, (_, model, variants) in ROWS.items()}
    wanted |= {f"{row}-{LIKELY}": (row, (LIKELY,)) for row in ROWS if row == ROWS[row][1]}
    return {n: {row: find_cell(found, n, *what) for row, what in wanted.items()} for n in names}


def average(alike: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Average the records of one configuration over seeds."""
    first = alike[0]
    part = score_field(name)
    charged = [r["full_bound"][part] for r in alike if "full_bound" in r]
    likely = [one[part] for r in alike if (one := r.get("kl_over_T"))]
    unwritten = [one[part] for r in alike if (one := r["controls"].get("left_out"))]
    return {
        "variant": first["variant"],
        "seeds": [r["seed"] for r in alike],
        "T": first["T"],
        "floats_per_image": first["memory"]["floats_per_image"],
        "bits_per_image": (bits := first["memory"]["bits_per_image"]),
        "sum": spread([r["bound"][part] for r in alike])["mean"] + memory_cost(bits, first, part),
        "partial": first["partial"],
        "early": any(map(is_early, alike)),
        "bound": spread([r["bound"][part] for r in alike]),
        "kl_over_T": spread(likely) if likely else None,
        "with_memory_kl": spread(charged) if charged else None,
        "left_out": spread(unwritten) if unwritten else None,
    }


def memory_cost(bits: float, record: dict[str, Any], part: str) -> float:
    """Convert a memory's bits per image to the unit of `part`: nats, or bits per dimension."""
    if part == "nll_nats":
        return bits * math.log(2)
    return bits * record["bound"]["bits_per_dim"] * math.log(2) / record["bound"]["nll_nats"]


HEADLINE = {  # rows of the README's table; label: row of ROWS, and score
    "`kpp-paper`, the paper's model": ("kpp-paper", "bound"),
    "**`kpp`**, 384 numbers an image": ("kpp", "bound"),
    "the same, rounded to int8": ("kpp-int8", "bound"),
    "the same, images not written": ("kpp", "left_out"),
    "`kpp`, 48 numbers, int8": ("kpp-48-int8", "bound"),
    "**`kpp-bits`**, every pixel": ("kpp-bits", "bound"),
    "`kpp-bits` without a memory": ("kpp-bits-empty", "bound"),
}


def headline(records: list[dict[str, Any]]) -> str:
    """The README's table, as Markdown: the bound given the memory, the memory's bits, and the sum
    of both."""
    whole = [r for r in records if r["split"] == "test" and not r["partial"]]
    names = [name for name in KANERVA_PP if any(r["preset"] == name for r in records)]
    cells = collect_cells(whole, names)
    for name in names:  # not in Table 1, which counts floats
        cells[name]["kpp-bits"] = find_cell(whole, name, "kpp-bits", ("bits",))
        cells[name]["kpp-bits-empty"] = find_cell(whole, name, "kpp-bits-empty", (None,))
    titles = [f"{SETS[name]}, {unit(name).removesuffix('/image')}" for name in names]
    rows = [
        ["", "bits/image", *(part for title in titles for part in (title, "sum"))],
        ["---", "---:", *("---:" for _ in 2 * names)],
        ["Kanerva++ in the paper", "–"]
        + [part for name in names for part in (f"≤ {KANERVA_PP[name]:.2f}", "–")],
    ]
    for label, (row, how) in HEADLINE.items():
        found = [cells[name][row] for name in names]
        bits = [round(cell["bits_per_image"]) for cell in found if cell]
        if bits:
            size = f"{bits[0]:,}" if len(set(bits)) == 1 else f"{min(bits):,} to {max(bits):,}"
            rows.append([label, "" if how == "left_out" else size])
            for name, cell in zip(names, found, strict=True):
                cost = format_cost(cell[how], how) if cell else "–"
                cost += "\\*" if cell and cell["early"] and how == "bound" else ""
                digits = ".2f" if name in BITS_PER_DIM else ",.0f"
                total = f"{cell['sum']:{digits}}" if cell and how == "bound" else ""
                rows[-1] += [f"**{cost}**" if cell and label.startswith("**") else cost, total]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def format_cost(found: dict[str, Any], how: str) -> str:
    """Format the mean over seeds. For unwritten images, format the range instead if the largest
    value is over 1.2 times the smallest: the mean would describe no seed."""
    low, high = min(found["each"]), max(found["each"])
    apart = how == "left_out" and high > 1.2 * low
    return f"{low:.0f} to {high:.0f}" if apart else f"{found['mean']:.2f}"


def train_cells(lab: Lab) -> Cells:
    """Train and score three models, for a table without records."""
    column: dict[str, Any] = dict.fromkeys(ROWS)
    for name in ("kpp", "kpp-paper", "vae"):
        entry = train_and_score(lab, Setting(name, name), [lab.seed])
        facts = {key: entry[key] for key in ("variant", "seeds", "T", "floats_per_image")}
        facts |= {"partial": True, "early": False, "with_memory_kl": None}
        column[name] = facts | {"bound": entry["bound"]["nll_nats"]}
    return {lab.preset: column}


# Text


def verdict(figures: Figures) -> str:
    """Which of our figures reach the paper's for Kanerva++."""
    judged = judge_cells(figures["ours"])
    return judged if judged == NOTHING else f"{judged} {CONTEXT}"


def judge_cells(cells: Cells) -> str:
    """The verdict by the valid bound alone."""
    found = compare_with_paper(cells)
    if not found:
        return NOTHING
    return f"The paper's figures for Kanerva++, by our valid bound: {in_words(found)}."


CONTEXT = (
    "No bound charges for the memory: its floats are in the table. On Fashion-MNIST and CIFAR-10 a "
    "pixel of kpp also sees earlier pixels; the paper's do not."
)
Comparison = tuple[str, list[str], dict[str, float]]  # model; data sets it reaches; scores


def compare_with_paper(cells: Cells) -> list[Comparison]:
    """For each of our models: the data sets on which it reaches the paper's figure, and its bound
    on every data set of the paper."""
    found = []
    for row in ("kpp-paper", "kpp", "kpp-48"):
        scores = {
            name: column[row]["bound"]["mean"]
            for name, column in cells.items()
            if column.get(row) and name in KANERVA_PP
        }
        reached = [name for name, ours in scores.items() if ours <= KANERVA_PP[name]]
        if scores:
            found.append((ROWS[row][0].split(": ")[-1], reached, scores))
    return found


def in_words(found: list[Comparison]) -> str:
    """Describe where each of our models reaches the paper's figures."""
    parts = []
    for model, reached, scores in found:
        good = [f"{SETS[name]} ({scores[name]:.2f})" for name in reached]
        bad = [
            f"{SETS[name]} ({ours:.2f} > {KANERVA_PP[name]:g})"
            for name, ours in scores.items()
            if name not in reached
        ]
        words = [f"reaches {', '.join(good)}"] if good else []
        words += [f"does NOT reach {', '.join(bad)}"] if bad else []
        parts.append(f"{model} {' and '.join(words)}")
    return "; ".join(parts)


def format_cells(cells: Cells, trained_here: bool) -> list[str]:
    """Format a block for each data set, with a row for each model that has a figure."""
    lines = []
    for name, column in cells.items():
        lines.append(
            f"{SETS[name] + ', ' + unit(name):<24}{'variant':<22}{'seeds':>6}{'T':>5}{'floats':>8}"
            f"{'paper':>10}{'kl_over_T':>14}{'bound':>15}"
        )
        missing = []
        for row, (label, _, _) in ROWS.items():
            published, ours = format_published(row, name), column.get(row)
            likely, facts, score = column.get(f"{row}-{LIKELY}"), "", ""
            if ours:
                variant = (ours["variant"] or "") + (" (part)" if ours["partial"] else "")
                facts = f"{variant:<22}{len(ours['seeds']):>6}{ours['T']:>5}"
                facts += f"{ours['floats_per_image']:>8.4g}"
                score = pm(ours["bound"], 2) + ("*" if ours["early"] else " ")
            if ours or likely or published:
                scores = f"{pm(likely['kl_over_T'], 2) if likely else '':>14}{score:>15}"
                lines.append(f"  {label:<22}{facts:<41}{published:>10}{scores}".rstrip())
            if ours and (charged := ours["with_memory_kl"]):
                lines.append(f"{'':<24}its bound with KL(M) charged: {pm(charged, 2)}")
            if likely:
                count, valid = len(likely["seeds"]), pm(likely["bound"], 2)
                said = f"kl_over_T, seeds: {count}; those weights by a valid bound: {valid}"
                lines.append(f"{'':<24}{said}")
            if not (ours or likely) and (row in TABLE1 or row in ("kpp", "vae", "no-memory")):
                missing.append(label)
        if missing:
            lines.append(f"  no record: {', '.join(missing)}")
    lines += [
        "paper: its Table 1, ≤ marks bounds; bound: ours, valid; *: scored before four "
        "fifths of its run.",
        "kl_over_T: no bound; ours by an accounting that may be the paper's (an inference), of "
        "other runs: each KL",
        "weighed 1/T in training and divided by T in the score, latents at their means.",
        "floats: the memory's for each image, free in all figures; ±: std over seeds; mazes: ours, "
        "not DMLab.",
    ]
    if trained_here:
        lines.append(f"No records under {RESULTS}/: these few models were trained just now.")
    return lines


def format_published(row: str, name: str) -> str:
    """Format a figure as in the paper."""
    paper = TABLE1.get(row, {}).get(name)
    if paper is None:
        return ""
    digits = f"{paper:.2f}" if name in BITS_PER_DIM else f"{paper:g}"
    return f"{'' if row == NOT_A_BOUND else '≤'}{digits}"


def run(lab: Lab) -> Finding:
    found = read_tested(RESULTS)
    if not found and not lab.quick:
        raise UserError(
            f"no records under {RESULTS}/ to make the table of: run it in a clone of the project, "
            "or --quick, which trains three small models instead"
        )
    there = {r["preset"] for r in found} | set(TABLE1["kpp-paper"])
    cells = collect_cells(found, [name for name in SETS if name in there])
    if not found:
        cells = train_cells(lab) | cells
    figures = {"paper": TABLE1, "ours": cells, "from_records": bool(found)}
    return Finding(figures, format_cells(cells, trained_here=not found))


ABOUT = About(
    paper="Table 1",
    shows="models by data sets, from records; the paper's figures beside",
    claim="Kanerva++ bounds the negative log likelihood of test images, given their memory, by "
    f"{KANERVA_PP['mnist']:.2f} nats on MNIST, {KANERVA_PP['omniglot']:.2f} on Omniglot, "
    f"{KANERVA_PP['fashion_mnist']:.2f} bits/dim on Fashion-MNIST, {KANERVA_PP['cifar10']:.2f} on "
    "CIFAR-10.",
    quick="seconds, from records, else 3 min",
    full="seconds, from records",
    presets=("mnist",),
    on_every_set=True,
)
