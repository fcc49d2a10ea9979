"""Tables for the documentation only: `quote` writes them to Markdown from records.

The tables that `kanerva evaluate` and `kanerva compare` print are in `evaluation/report.py`.
"""

from typing import Any

from kanerva.evaluation.records import is_early
from kanerva.evaluation.report import CONTROLS, columns, named, seen_by
from kanerva.lab.paper_figures import BITS_PER_DIM

SETS = {  # column titles; `mazes` are ours, not DMLab's
    "glyphs": "glyphs",
    "mnist": "MNIST",
    "omniglot": "Omniglot",
    "fashion_mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "mazes": "DMLab mazes",
}


def unit(name: str) -> str:
    """The unit that a data set is scored in."""
    return "bits/dim" if name in BITS_PER_DIM else "nats/image"


def score_field(name: str) -> str:
    """The key of a score in that unit."""
    return "bits_per_dim" if name in BITS_PER_DIM else "nll_nats"


def keys(records: list[dict[str, Any]]) -> str:
    """A table of what keys contribute: the bound and the memory's size; then, on n images, the
    bound (`own`), its controls, the AUROC of familiarity, and the distance between places within a
    class relative to all pairs (`like/all`)."""
    head = (
        "variant,T,floats,bits,bound,KL z,KL y,n,own,left_out,other,zeroed,permuted,AUROC,like/all"
    )
    rows = [list[str](head.split(","))]
    for r in sorted(records, key=lambda r: (r["preset"], r["bound"]["nll_nats"])):
        tried = [r["controls"].get(name) for name in CONTROLS]
        measured, places, memory = r.get("familiarity"), r.get("places"), r["memory"]
        rows.append(
            [f"{r['preset']} {named(r)}"]
            + [str(r["T"]), f"{memory['floats_per_image']:.4g}", f"{memory['bits_per_image']:.5g}"]
            + [f"{r['bound'][key]:.2f}" for key in ("nll_nats", "kl_z", "kl_y")]
            + [str(r["controls"]["n_images"])]
            + ["-" if entry is None else f"{entry['nll_nats']:.1f}" for entry in tried]
            + ["-" if measured is None else f"{measured['auroc']:.4f}"]
            + ["-" if places is None else f"{places['ratio']:.3f}"]
        )
    return columns(rows, left=1)


def samples(records: list[dict[str, Any]]) -> str:
    """Distance to the nearest written image, and greyness, of samples and of real images."""
    fields = [name for name in records[0]["generation"] if name.endswith("_nearest")]
    names = [name.removesuffix("_nearest") for name in fields]
    rows = [["variant", "n", "", *names]]
    for r in records:
        for what in ("nearest", "grey"):
            made = r["generation"]
            rows.append([f"{r['preset']} {r['variant']}", str(made["n"]), what])
            rows[-1] += [f"{made[f'{name}_{what}']:.3f}" for name in names]
    return columns(rows, left=1)


def early(records: list[dict[str, Any]]) -> str:
    """A table of runs whose best step is well before their end, with the images seen up to it."""
    rows = [["preset", "model", "seed", "bound", "step", "of", "images seen"]]
    for r in filter(is_early, records):
        steps = [str(r[key]) for key in ("best_step", "steps")]
        rows.append(
            [r["preset"], named(r), str(r["seed"]), f"{r['bound']['nll_nats']:.2f}", *steps]
        )
        rows[-1].append(seen_by(r).replace(" early", ""))
    return columns(rows, left=2)


def of_one_config(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of the most common configuration, so that a mean is over seeds alone."""
    hashes = [r["config_hash"] for r in records]
    most = max(hashes, key=lambda one: (hashes.count(one), -hashes.index(one)), default=None)
    return [r for r in records if r["config_hash"] == most]


def trust(record: dict[str, Any]) -> str:
    """A table of what `make trust` tried: the required trials, the actual ones, the failures."""
    rows = [["what", "bad would be", "at least", "tried", "bad", "slowest", "most MB", "s"]]
    for part in record["parts"].values():
        slowest = f"{part['slowest_s']:.1f} s" if part["slowest_s"] else "-"
        most = f"{part['most_mb']:.0f}" if part["most_mb"] else "-"
        counts = [str(part[key]) for key in ("at_least", "tried", "bad")]
        words = [part["what"], part["bad_is"]]
        rows.append([*words, *counts, slowest, most, f"{part['wall_s']:.0f}"])
    return f"{columns(rows, 2)}\n{record['wall_s'] / 60:.1f} minutes on {record['cores']} cores"
