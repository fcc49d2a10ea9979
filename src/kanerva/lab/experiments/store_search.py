"""Beyond the paper: what a Store finds from damaged cues, how fast, and whether it is calibrated.

The baseline is the nearest image on visible pixels, in numpy, in the same run. Calibration is
measured on cues so damaged that some answers are wrong. `find` is called with the mask and the
noise given, and with neither.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from kanerva.evaluation.report import columns
from kanerva.evaluation.uses import auroc
from kanerva.lab.experiments import plots
from kanerva.lab.experiments.damage import (
    box,
    calibration_error,
    error_by_chance,
    find_all,
    folded,
    gaussian,
    moved,
    nearest_alone,
    nearest_visible,
    percent,
    reliability,
    salt_pepper,
)
from kanerva.lab.harness import About, Figures, Finding, Lab, Pixels
from kanerva.memory.channels import Channel, Seen
from kanerva.models.loading import load
from kanerva.store.store import Store

ALIKE = 60.0  # squared error below which Universal Hopfield Networks count a picture as retrieved
LONE = 20  # cues that are timed one by one
BARS = {"given": 0.03, "not given": 0.06}  # largest ECE
Given = dict[str, Any]  # arguments of `find`


@torch.no_grad()
def run(lab: Lab) -> Finding:
    model = load(lab.preset)
    held, few, cues = lab.pick((150, 100, 20), (10_000, 1_000, 200))
    draws = lab.pick(1, 5)  # with few answers the ECE is mostly chance
    images, new = lab.images(held), lab.images(lab.pick(40, 300), "validation")
    with tempfile.TemporaryDirectory() as folder:
        small = Store(Path(folder) / "small.kanerva", model=model)
        large = Store(Path(folder) / "large.kanerva", model=model)
        small.add(images[:few])
        begin = time.perf_counter()
        large.add(images)
        added = held / (time.perf_counter() - begin)
        figures: Figures = {
            "model": lab.preset,
            "images_per_s_added": added,
            "found": measure_found(lab, small, large, images, cues),
            "calibration": measure_calibration(lab, small, images[:few], draws),
            "none": measure_none(lab, small, images[: len(new)], new),
        }
        small.close()
        large.close()  # also empties the write-ahead log, whose size would count
        figures["bytes_per_image"] = {
            path.name.removeprefix("large."): path.stat().st_size / held for path in large.files
        }
    return Finding(figures, table(figures), draw(figures))


# Shares found, and times


def measure_found(
    lab: Lab, small: Store, large: Store, images: Pixels, count: int
) -> list[Figures]:
    x, noise = images[:count], lab.noise("store-search", "found")
    half = box(x.shape[-2:], (0, 0.5))
    cases: list[tuple[str, Store, Pixels, Given]] = [
        ("clean", large, x, {}),
        ("half hidden, mask given", large, x * half, {"observed": half}),
        ("half hidden", large, x * half, {}),
        ("half hidden", small, x * half, {}),
        ("Gaussian 1", small, gaussian(x, 1.0, noise), {}),
        ("Gaussian 1, folded and clipped", small, folded(x, 1.0, noise), {}),
        ("salt & pepper 0.5", large, salt_pepper(x, 0.5, noise), {}),
        ("moved by 2", large, moved(x, 2, -2), {"shifts": 3}),
        (
            "moved by 3, half hidden, mask given",
            large,
            moved(x, 3, -1) * half,
            {"shifts": 3, "observed": half},
        ),
        ("moved by 3, half hidden", large, moved(x, 3, -1) * half, {"shifts": 3}),
    ]
    rows = []
    for name, store, cues, given in cases:
        lab.say(f"finding: {name}")
        row = {"cue": name, "held": len(store), "cues": len(cues)}
        rows.append(row | find_case(store, images[: len(store)], cues, given))
    return rows


def find_case(store: Store, images: Pixels, cues: Pixels, given: Given) -> Figures:
    """Measure the shares found, and the milliseconds and CPU milliseconds of each search."""
    raw, flat, right = images.flatten(1), cues.flatten(1), torch.arange(len(cues))
    seen = given.get("observed", torch.ones(images.shape[-2:])).flatten().repeat(images.shape[1])
    store.find(cues[0], **given)  # makes the index
    lone = [timed(lambda cue=cue: store.find(cue, **given)) for cue in cues[:LONE]]
    hits, *batch = timed(lambda: find_all(store, cues, **given))
    held, mask = raw.numpy(), seen.numpy()
    numpy = [timed(lambda cue=cue: nearest_alone(held, cue, mask)) for cue in flat.numpy()[:LONE]]
    ids = list(store)
    ours = torch.tensor([ids.index(one[0].id) for one in hits])
    error = (images[ours] - images[: len(cues)]).square().flatten(1).sum(dim=1)
    theirs = nearest_visible(raw, flat, seen)
    figures: Figures = {
        "right": float((ours == right).float().mean()),
        "alike": float((error <= ALIKE).float().mean()),
        "nearest": float((theirs == right).float().mean()),
        "lone_ms": float(np.median([ms for _, ms, _ in lone])),
        "lone_cpu_ms": float(np.median([cpu for _, _, cpu in lone])),
        "batched_ms": batch[0] / len(cues),
        "batched_cpu_ms": batch[1] / len(cues),
        "numpy_ms": float(np.median([ms for _, ms, _ in numpy])),
        "numpy_cpu_ms": float(np.median([cpu for _, _, cpu in numpy])),
        "best_possible": None,
    }
    if not given and not bool(((cues == 0) | (cues == 1)).all()):
        best = torch.tensor([likeliest(raw, cue) for cue in cues])
        figures["best_possible"] = float((best == right).float().mean())
    return figures


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Run `work`. Return its result, milliseconds and CPU milliseconds."""
    begin, cpu = time.perf_counter(), time.process_time()
    answer = work()
    return answer, 1e3 * (time.perf_counter() - begin), 1e3 * (time.process_time() - cpu)


def likeliest(held: torch.Tensor, cue: torch.Tensor, std: float = 1.0) -> int:
    """The Bayes-optimal answer: the most probable image, given the exact images and the true
    noise."""
    seen = Seen.of(cue, torch.ones(cue.shape[-2:], dtype=torch.bool))
    off, on = seen.log_densities(Channel(gaussian=std), torch.tensor([0.0, 1.0])).unbind(1)
    return int((held @ (on - off)[seen.codes].flatten()).argmax())


# Calibration


def measure_calibration(lab: Lab, store: Store, images: Pixels, draws: int) -> list[Figures]:
    size, noise = images.shape[-2:], lab.noise("store-search", "calibration")
    several, every = images.repeat(draws, 1, 1, 1), torch.ones(images.shape[-2:])
    top, window = box(size, (0, 0.25)), box(size, (0.36, 0.61), (0.39, 0.61))
    scattered = (torch.rand(len(several), *size, generator=noise) < 0.07).float()
    cases: list[tuple[str, Pixels, Given]] = [
        ("a quarter of the rows", images * top, {"observed": top, "noise": "none"}),
        ("a small window", images * window, {"observed": window, "noise": "none"}),
        (
            "7 % of the pixels",
            several * scattered[:, None],
            {"observed": scattered, "noise": "none"},
        ),
        ("salt & pepper 0.75", salt_pepper(several, 0.75, noise), with_noise(every, 0.75, 0.0)),
        ("Gaussian 1.6", gaussian(several, 1.6, noise), with_noise(every, 0.0, 1.6)),
        (
            "Gaussian 0.9, folded and clipped",
            folded(several, 0.9, noise),
            with_noise(every, 0.0, 0.9),
        ),
    ]
    ids, rows = list(store), []
    for name, cues, all_given in cases:
        for kind, given in (("given", all_given), ("not given", {})):
            lab.say(f"calibration: {name}, {kind}")
            hits = find_all(store, cues, prior_none=0.0, k=1, **given)
            probabilities = np.array([one[0].probability for one in hits])
            right = np.array([one[0].id == ids[n % len(ids)] for n, one in enumerate(hits)])
            bins = reliability(probabilities, right)
            rows.append(
                {
                    "cue": name,
                    "what": kind,
                    "cues": len(cues),
                    "right": float(right.mean()),
                    "said": float(probabilities.mean()),
                    "ece": calibration_error(bins),
                    "ece_by_chance": error_by_chance(probabilities),
                    "bins": bins,
                }
            )
    return rows


def with_noise(observed: torch.Tensor, salt: float, std: float) -> Given:
    return {"observed": observed, "noise": Channel(0.0, salt, std)}


def measure_none(lab: Lab, store: Store, held: Pixels, new: Pixels) -> list[Figures]:
    """Measure `.none` for stored images and for as many that were never written."""
    half, rows = box(held.shape[-2:], (0, 0.5)), []
    cases: list[tuple[str, Callable[[Pixels, torch.Generator], Pixels], Given]] = [
        ("clean", lambda x, g: x, {}),
        ("half hidden, mask given", lambda x, g: x * half, {"observed": half}),
        ("half hidden", lambda x, g: x * half, {}),
        ("salt & pepper 0.5", lambda x, g: salt_pepper(x, 0.5, g), {}),
        ("Gaussian 1", lambda x, g: gaussian(x, 1.0, g), {}),
    ]
    for name, damage, given in cases:
        lab.say(f"none of these: {name}")
        noise = lab.noise("store-search", "none", name)
        low, high = (
            np.array([one.none for one in find_all(store, damage(x, noise), **given)])
            for x in (held, new)
        )
        nones, truth = np.concatenate([low, high]), np.repeat([False, True], [len(low), len(high)])
        bins = reliability(nones, truth)
        rows.append(
            {
                "cue": name,
                "held": len(store),
                "cues": len(nones),
                "auroc": auroc(torch.from_numpy(high), torch.from_numpy(low)),
                "ece": calibration_error(bins),
                "held_mean": float(low.mean()),
                "new_mean": float(high.mean()),
            }
        )
    return rows


# Output


def table(figures: Figures) -> list[str]:
    rows = [["found, %", "N", "right", "alike", "nearest", "best", "ms", "batched", "numpy"]]
    for row in figures["found"]:
        shares = [percent(row[name]) for name in ("right", "alike", "nearest", "best_possible")]
        times = [f"{row[name]:.1f}" for name in ("lone_ms", "batched_ms", "numpy_ms")]
        rows.append([row["cue"], str(row["held"]), *shares, *times])
    first = columns(rows, left=1).splitlines()
    rows = [["processor ms", "N", "lone", "batched", "numpy"]]
    for row in figures["found"]:
        times = [f"{row[f'{name}_cpu_ms']:.1f}" for name in ("lone", "batched", "numpy")]
        rows.append([row["cue"], str(row["held"]), *times])
    second = columns(rows, left=1).splitlines()
    rows = [["sure, N as above", "", "cues", "right", "said", "ECE", "by chance"]]
    for row in figures["calibration"]:
        numbers = [percent(row["right"]), percent(row["said"])]
        numbers += [f"{row['ece']:.3f}", f"{row['ece_by_chance']:.3f}"]
        rows.append([row["cue"], row["what"], str(row["cues"]), *numbers])
    third = columns(rows, left=2).splitlines()
    rows = [["none of these", "cues", "AUROC", "ECE", "held", "new"]]
    for row in figures["none"]:
        numbers = [f"{row[name]:.4f}" for name in ("auroc", "ece", "held_mean", "new_mean")]
        rows.append([row["cue"], str(row["cues"]), *numbers])
    sizes = ", ".join(f"{name} {size:.0f}" for name, size in figures["bytes_per_image"].items())
    return [
        "right: the image itself; alike: within squared error 60 of it; nearest: least error on "
        "visible pixels;",
        "best: Bayes' rule with raw images and the true noise. ms: a lone cue, one of a batch, "
        "nearest in numpy",
        *first,
        "",
        *second,
        "",
        "given: mask, kind and strength of noise; by chance: ECE of as many calibrated answers",
        *third,
        "",
        *columns(rows, left=1).splitlines(),
        "",
        f"added at {figures['images_per_s_added']:.0f} images/s; bytes an image: {sizes}",
    ]


def verdict(figures: Figures) -> str:
    found = {(row["cue"], row["held"]): row for row in figures["found"]}
    most = max(held for _, held in found)
    parts = [
        f"{cue}: {percent(found[cue, most]['right'])} % of {found[cue, most]['cues']} cues found "
        f"among {most}"
        for cue in ("half hidden, mask given", "half hidden", "moved by 2", "salt & pepper 0.5")
    ]
    for kind, bar in BARS.items():
        worst = max((row for row in figures["calibration"] if row["what"] == kind), key=_ece)
        reached = "" if worst["ece"] <= bar else "NOT "
        parts.append(
            f"worst ECE {kind} {worst['ece']:.3f} ({worst['cue']}; by chance "
            f"{worst['ece_by_chance']:.3f}), the bar of {bar} is {reached}reached"
        )
    clean = figures["none"][0]
    return "; ".join([*parts, f"AUROC of none on clean cues {clean['auroc']:.4f}"]) + "."


def _ece(row: Figures) -> float:
    return row["ece"]


def draw(figures: Figures) -> Figure:
    """Plot reliability: the probability against the share of right answers."""
    names = list(dict.fromkeys(row["cue"] for row in figures["calibration"]))
    figure = plots.canvas(12.0, 7.6)
    for axes, name in zip(figure.subplots(2, 3).flat, names, strict=True):
        axes.plot([0, 1], [0, 1], color="#aaaaaa", linestyle=":")
        for row in figures["calibration"]:
            if row["cue"] == name:
                colour = "#1f4e8c" if row["what"] == "given" else "#d98e04"
                said, right = ([b[key] for b in row["bins"]] for key in ("said", "right"))
                sizes = [12 + 300 * b["count"] / row["cues"] for b in row["bins"]]
                label = f"{row['what']}, ECE {row['ece']:.3f}"
                axes.scatter(said, right, sizes, color=colour, alpha=0.6, label=label)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("probability of the best hit")
        axes.set_ylabel("share that is right")
        axes.legend(loc="upper left", fontsize=8)
    return figure


ABOUT = About(
    paper="beyond",
    shows="a store: found from damaged cues, how fast, how surely",
    claim="A store finds half-hidden, noisy and moved images where nearest pixels do not, knows "
    "how sure it is, and says when an image is not there.",
    quick="a minute on two cores",
    full="20 minutes on two cores",
)
