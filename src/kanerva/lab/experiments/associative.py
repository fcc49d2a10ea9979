"""Beyond the paper: a Store under the protocols of published associative memories.

    Universal Hopfield Networks (Millidge et al. 2022; BerenMillidge/Theory_Associative_Memory,
        functions.py): the lower half black, or Gaussian noise folded and clipped to [0, 1]; correct
        if the squared error is at most 60; the most similar image by dot, Euclid or Manhattan
    Latent Structured Hopfield Network (fudan-birlab/LSHN, evaluation.ipynb): the lower half grey;
        correct if the squared error is at most 50
    BayesPCN (plai-group/bayes-pcn, dataset/dataset.py, score.py): Gaussian noise, pixels dropped,
        columns hidden at the right; correct if the mean squared error on [-1, 1] is below 0.005

In each protocol the first N images of a set are stored, and damaged copies of them are the cues.
The baselines store the images exactly. Only one baseline uses the mask: the nearest image on
visible pixels.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

from kanerva.evaluation.report import columns
from kanerva.lab.experiments import plots
from kanerva.lab.experiments.damage import (
    box,
    find_all,
    folded,
    gaussian,
    nearest_visible,
    percent,
)
from kanerva.lab.harness import About, Figures, Finding, Lab, Pixels
from kanerva.models.base import MemoryModel
from kanerva.models.loading import load
from kanerva.store.store import Store

Flat = Float[Tensor, "n D"]
Rows = Int[Tensor, " n"]
Mask = Float[Tensor, "*n H W"]
LOCATIONS, ACTIVE = 4096, 40  # of the sparse distributed memory: hard locations, active ones


@dataclass(frozen=True)
class Protocol:
    """One way of damaging cues, and when an answer is correct."""

    name: str
    whose: str
    damage: Callable[[Pixels, torch.Generator], tuple[Pixels, Mask | None]]
    most: float  # largest squared error of a correct answer, summed over pixels on [0, 1]
    mean: bool  # if true, `most` limits the mean over pixels on [-1, 1] instead

    def correct(self, pictures: Pixels, images: Pixels) -> float:
        error = (pictures - images).square().flatten(1)
        size = 4 * error.mean(dim=1) if self.mean else error.sum(dim=1)
        return float((size <= self.most).float().mean())


def hide(images: Pixels, seen: Mask, value: float = 0.0) -> tuple[Pixels, Mask]:
    mask = seen if seen.ndim == 2 else seen[:, None]
    return images * mask + value * (1 - mask), seen


def half(images: Pixels) -> Mask:
    return box(images.shape[-2:], (0, 0.5))


def drop(images: Pixels, share: float, noise: torch.Generator) -> tuple[Pixels, Mask]:
    seen = torch.rand(len(images), *images.shape[-2:], generator=noise) >= share
    return hide(images, seen.float())


PROTOCOLS = (
    Protocol("lower half black", "UHN", lambda x, g: hide(x, half(x)), 60.0, False),
    Protocol("Gaussian 0.5, folded", "UHN", lambda x, g: (folded(x, 0.5, g), None), 60.0, False),
    Protocol("Gaussian 1, folded", "UHN", lambda x, g: (folded(x, 1.0, g), None), 60.0, False),
    Protocol("lower half grey", "LSHN", lambda x, g: hide(x, half(x), 0.5), 50.0, False),
    Protocol("Gaussian 0.8", "BayesPCN", lambda x, g: (gaussian(x, 0.8, g), None), 0.005, True),
    Protocol("75 % dropped", "BayesPCN", lambda x, g: drop(x, 0.75, g), 0.005, True),
    Protocol(
        "right 75 % black",
        "BayesPCN",
        lambda x, g: hide(x, box(x.shape[-2:], (0, 1), (0, 0.25))),
        0.005,
        True,
    ),
)


# Systems: each returns, for every cue, the row of a stored image


def by_dot(held: Flat, cues: Flat) -> Rows:
    return (cues @ held.T).argmax(dim=1)


def by_euclid(held: Flat, cues: Flat) -> Rows:
    return torch.cdist(cues, held).argmin(dim=1)


def by_manhattan(held: Flat, cues: Flat) -> Rows:
    parts = [torch.cdist(part, held, p=1).argmin(dim=1) for part in cues.split(64)]
    return torch.cat(parts)


class SparseDistributedMemory:
    """Kanerva (1988): bits are written to the counters of the nearest hard locations."""

    def __init__(self, held: Flat) -> None:
        noise = torch.Generator().manual_seed(0)
        shape = (LOCATIONS, held.shape[1])
        self.places = 2 * torch.bernoulli(torch.full(shape, 0.5), generator=noise) - 1
        self.counters = torch.zeros(LOCATIONS, held.shape[1])
        for part in _signs(held).split(1024):
            self.counters += self._activate(part).T @ part

    def _activate(self, signs: Flat) -> Float[Tensor, "n locations"]:
        near = (signs @ self.places.T).topk(ACTIVE, dim=1).indices
        return torch.zeros(len(signs), LOCATIONS).scatter_(1, near, 1.0)

    def read(self, cues: Flat) -> Flat:
        return ((self._activate(_signs(cues)) @ self.counters) > 0).float()


def _signs(pixels: Flat) -> Flat:
    return torch.where(pixels > 0.5, 1.0, -1.0)


# Measuring


@torch.no_grad()
def run(lab: Lab) -> Finding:
    small = lab.preset in ("mnist", "omniglot", "glyphs")  # has a shipped model and binary pixels
    options: dict[str, Any] = {}
    if not small:  # no pixel context: pictures and scores then treat pixels as independent
        options = {"decoder": {"neighbours": 0, "near_width": 128}}
    model = load(lab.preset) if small else lab.trained("kpp", **options).cpu()
    sizes = lab.pick((50, 100), (100, 1000, 10_000) if small else (100, 1000))
    many, cues = lab.pick((50, 20), (1000, 200))
    images, rows = lab.images(sizes[-1]), []
    sizes_of_files: dict[str, float] = {}
    for held in sizes:
        with tempfile.TemporaryDirectory() as folder:
            store = make_store(Path(folder) / "held.kanerva", model, images[:held])
            for protocol in PROTOCOLS:
                if held != many and protocol is not PROTOCOLS[0]:
                    continue  # all protocols at one size, the first at every size
                lab.say(f"{held} held: {protocol.name}")
                noise = lab.noise("associative", protocol.name)
                rows += measure(store, images[:held], protocol, cues, noise)
            store.close()
            sizes_of_files = {
                path.name.removeprefix("held."): path.stat().st_size / held for path in store.files
            }
    raw = images[0].numel() * (1 / 8 if small else 1)
    figures: Figures = {
        "rows": rows,
        "cues": cues,
        "bytes_per_image": {"raw": raw, "store": sizes_of_files},
        "trained_steps": None if small else lab.config("kpp", **options).steps,
    }
    return Finding(figures, table(figures), draw(figures))


def make_store(path: Path, model: MemoryModel, images: Pixels) -> Store:
    store = Store(path, model=model)
    store.add(images)
    return store


def measure(
    store: Store, images: Pixels, protocol: Protocol, count: int, noise: torch.Generator
) -> list[Figures]:
    """Measure every system: the share of right images found, the share of answers correct by
    the protocol's rule, and the time."""
    clean = images[: min(count, len(images))]
    cues, seen = protocol.damage(clean, noise)
    held, flat = images.flatten(1), cues.flatten(1)
    ones = torch.ones(len(clean), *images.shape[-2:])
    visible = (ones if seen is None else ones * seen)[:, None].expand_as(cues).flatten(1)
    ids = {id: row for row, id in enumerate(store)}
    memory = SparseDistributedMemory(held)

    def ask(**options) -> tuple[Rows, Pixels]:
        results = find_all(store, cues, k=1, **options)
        return torch.tensor([ids[hits[0].id] for hits in results]), torch.stack(
            [hits[0].image for hits in results]
        )

    def read() -> tuple[Rows, Pixels]:
        picture = memory.read(flat)
        return by_euclid(held, picture), picture.view_as(cues)

    def whole(rows: Rows) -> tuple[Rows, Pixels]:
        return rows, images[rows]

    systems: dict[str, Callable[[], tuple[Rows, Pixels]]] = {
        "store, nothing given": ask,
        "dot": lambda: whole(by_dot(held, flat)),
        "Euclid": lambda: whole(by_euclid(held, flat)),
        "Manhattan": lambda: whole(by_manhattan(held, flat)),
        "sparse distributed memory": read,
    }
    if seen is not None:
        systems = {
            "store, mask given": lambda: ask(observed=seen),
            **systems,
            "nearest on visible pixels": lambda: whole(nearest_visible(held, flat, visible)),
        }
    rows = []
    for name, system in systems.items():
        begin, cpu = time.perf_counter(), time.process_time()
        found, pictures = system()
        spent = time.perf_counter() - begin, time.process_time() - cpu
        rows.append(
            {
                "protocol": protocol.name,
                "whose": protocol.whose,
                "held": len(images),
                "system": name,
                "right": float((found == torch.arange(len(clean))).float().mean()),
                "correct": protocol.correct(pictures, clean),
                "ms": 1e3 * spent[0] / len(clean),
                "cpu_ms": 1e3 * spent[1] / len(clean),
            }
        )
    return rows


# Output


def table(figures: Figures) -> list[str]:
    lines = [
        f"right: the image itself, per cent of {figures['cues']} cues; correct: by the protocol's "
        "own rule, of the picture given back;",
        "ms: processor milliseconds a cue, of a batch",
    ]
    rows = [["protocol", "N", "system", "right", "correct", "ms"]]
    last = None
    for row in figures["rows"]:
        this = (f"{row['whose']}: {row['protocol']}", str(row["held"]))
        numbers = [percent(row["right"]), percent(row["correct"]), f"{row['cpu_ms']:.2f}"]
        rows.append([*(this if this != last else ("", "")), row["system"], *numbers])
        last = this
    sizes = figures["bytes_per_image"]
    store = ", ".join(f"{name} {size:.0f}" for name, size in sizes["store"].items())
    steps = figures["trained_steps"]
    trained = "" if steps is None else f"; the store's model was trained for {steps} steps"
    return [
        *lines,
        *columns(rows, left=3).splitlines(),
        f"bytes an image: pixels {sizes['raw']:.0f}; store: {store}{trained}",
    ]


def best_of(rows: Sequence[Figures], names: Sequence[str]) -> Figures:
    return max((row for row in rows if row["system"] in names), key=lambda row: row["right"])


def verdict(figures: Figures) -> str:
    """Compare the store with the published rules and with the nearest visible pixels."""
    parts = []
    most = max(row["held"] for row in figures["rows"])
    keys = dict.fromkeys((row["whose"], row["protocol"], row["held"]) for row in figures["rows"])
    for whose, protocol, held in keys:
        if protocol == PROTOCOLS[0].name and held != most:
            continue
        rows = [
            row for row in figures["rows"] if (row["protocol"], row["held"]) == (protocol, held)
        ]
        theirs = best_of(rows, ("dot", "Euclid", "Manhattan", "sparse distributed memory"))
        mine = {row["system"]: row["right"] for row in rows}
        near = mine.get("nearest on visible pixels")
        given = mine.get("store, mask given")
        text = f"{whose}, {protocol}, N = {held}: nothing given "
        text += f"{percent(mine['store, nothing given'])} against {percent(theirs['right'])} "
        text += f"({theirs['system']})"
        if given is not None:
            text += f", mask given {percent(given)} against {percent(near)} (nearest visible)"
        parts.append(text)
    return "Per cent right. " + "; ".join(parts) + "."


def draw(figures: Figures) -> Figure:
    """Plot the per cent right of every system under every protocol."""
    rows = figures["rows"]
    middle = next(row["held"] for row in rows if row["protocol"] == PROTOCOLS[1].name)
    names = list(dict.fromkeys(row["system"] for row in rows))
    protocols = list(dict.fromkeys(row["protocol"] for row in rows))
    figure = plots.canvas(12.0, 5.2, f"N = {middle}")
    axes = figure.subplots()
    width = 0.85 / len(names)
    for n, name in enumerate(names):
        found = {
            row["protocol"]: 100 * row["right"]
            for row in rows
            if row["system"] == name and row["held"] == middle
        }
        at = [protocols.index(protocol) + n * width for protocol in found]
        axes.bar(at, list(found.values()), width, label=name)
    axes.set_xticks([n + 0.4 for n in range(len(protocols))], protocols, fontsize=8, rotation=12)
    axes.set_ylabel("per cent right")
    axes.set_ylim(0, 104)
    plots.legend_below(figure, axes, 4)
    return figure


ABOUT = About(
    paper="beyond",
    shows="a store under the protocols of other associative memories",
    claim="With the damage of their own protocols, a store names more images than Universal "
    "Hopfield Networks' rules and a sparse distributed memory. Given a mask, the nearest image on "
    "visible pixels does as well or better.",
    quick="a minute on two cores",
    full="minutes on two cores (mnist); cifar10 trains a model first",
    presets=("mnist", "cifar10"),
)
