"""A store of MNIST digits beside nearest neighbours on visible pixels, in numpy, in one run.

    KANERVA_DATA=... python benchmarks/store_search.py [--held 10000] [--cues 200] [--store FILE]

Binary digits (drawn pixel by pixel, seed 0), the shipped `mnist` model. Three tables: per cent
found and milliseconds; calibration over N = 1,000 where accuracy lies between 30 and 95 %; `.none`
for digits of the validation split, which were never written. `right` counts ids; `alike`
counts pictures within squared error 60 of the right one, as Universal Hopfield Networks does.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import kanerva
from kanerva import data
from kanerva.memory.channels import Channel
from kanerva.store.store import Store

SIDE = 28


def digits(split: str, count: int) -> Tensor:
    noise = torch.Generator().manual_seed(0)
    return data.to_float(
        data.binarize(data.load("mnist", split).images[:count], "sample", noise), True
    )


def box(top: int, bottom: int, left: int = 0, right: int = SIDE) -> Tensor:
    seen = torch.zeros(SIDE, SIDE)
    seen[top:bottom, left:right] = 1
    return seen


def salt_pepper(x: Tensor, share: float, g: torch.Generator) -> Tensor:
    hit = torch.rand(x.shape, generator=g) < share
    return torch.where(hit, torch.rand(x.shape, generator=g).round(), x)


def gaussian(x: Tensor, std: float, g: torch.Generator) -> Tensor:
    return x + std * torch.randn(x.shape, generator=g)


def shifted(x: Tensor, down: int, right: int) -> Tensor:
    moved = torch.zeros_like(x)
    to = (slice(max(0, down), SIDE + min(0, down)), slice(max(0, right), SIDE + min(0, right)))
    of = (slice(max(0, -down), SIDE - max(0, down)), slice(max(0, -right), SIDE - max(0, right)))
    moved[..., to[0], to[1]] = x[..., of[0], of[1]]
    return moved


def nearest(
    held: np.ndarray, cues: np.ndarray, seen: np.ndarray | None
) -> tuple[np.ndarray, float]:
    """Rows with the least squared error on visible pixels, and milliseconds a lone cue."""
    seen = np.ones(held.shape[1], np.float32) if seen is None else seen
    begin, found = time.perf_counter(), []
    for cue in cues:
        found.append(int((held @ (2 * cue * seen) - (held * held) @ seen).argmax()))
    return np.array(found), (time.perf_counter() - begin) / len(cues) * 1e3


def ece(said: np.ndarray, right: np.ndarray, bins: int = 15) -> float:
    at = np.minimum((said * bins).astype(int), bins - 1)
    parts = [(at == b) for b in range(bins) if (at == b).any()]
    return float(sum(p.mean() * abs(said[p].mean() - right[p].mean()) for p in parts))


def auroc(low: np.ndarray, high: np.ndarray) -> float:
    more = (high[:, None] > low[None]).mean() + 0.5 * (high[:, None] == low[None]).mean()
    return float(more)


def found(store: Store, images: Tensor, name: str, cues: Tensor, **options) -> None:
    """One row of the first table."""
    raw = images[: len(store)].flatten(1).numpy()
    seen = options.get("observed")
    flat = None if seen is None else np.float32(seen.flatten().numpy())
    rows, other = nearest(raw, cues.flatten(1).numpy(), flat)
    lone = cues[:20]
    store.find(lone[0], prior_none=0.0, **options)
    begin = time.perf_counter()
    for cue in lone:
        store.find(cue, **options)
    whole = (time.perf_counter() - begin) / len(lone) * 1e3
    begin = time.perf_counter()
    for cue in lone:
        store.find(cue, prior_none=0.0, **options)
    alone = (time.perf_counter() - begin) / len(lone) * 1e3
    begin = time.perf_counter()
    hits = store.find(cues, prior_none=0.0, **options)
    batched = (time.perf_counter() - begin) / len(cues) * 1e3
    ours = np.array([one[0].id - 1 for one in hits])
    right = np.arange(len(cues))
    alike = [((images[a] - images[b]) ** 2).sum() <= 60 for a, b in zip(ours, right, strict=True)]
    shares = [100 * np.mean(v) for v in (ours == right, alike, rows == right)]
    print(
        f"{name:<34}{len(store):>7}{shares[0]:>8.1f}{shares[1]:>8.1f}{shares[2]:>9.1f}"
        f"{whole:>9.1f}{alone:>9.1f}{batched:>9.2f}{other:>9.1f}",
        flush=True,
    )


def calibration(store: Store, name: str, cues: Tensor, told: dict) -> None:
    for kind, options in (("told", told), ("untold", {})):
        hits = store.find(cues, prior_none=0.0, **options)
        said = np.array([one[0].probability for one in hits])
        right = np.array([one[0].id == n + 1 for n, one in enumerate(hits)])
        row = f"{100 * right.mean():>8.1f}{said.mean():>8.3f}{ece(said, right):>8.3f}"
        print(f"{name:<34}{kind:<8}{row}", flush=True)


def unheld(store: Store, held: Tensor, new: Tensor, name: str, **options) -> None:
    low, high = (np.array([h.none for h in store.find(x, **options)]) for x in (held, new))
    said, truth = np.concatenate([low, high]), np.repeat([False, True], [len(low), len(high)])
    row = f"{auroc(low, high):>8.4f}{ece(said, truth):>8.3f}{low.mean():>8.3f}{high.mean():>8.3f}"
    print(f"{name:<34}{row}", flush=True)


def open_store(path: Path, images: Tensor) -> Store:
    store = Store(path, model="mnist")
    if missing := len(images) - len(store):
        begin = time.perf_counter()
        store.add(images[-missing:], progress=True)
        print(f"added {missing} at {missing / (time.perf_counter() - begin):.0f} images/s")
    begin = time.perf_counter()
    store.find(images[0], prior_none=0.0)
    print(f"first find, index made: {time.perf_counter() - begin:.2f} s; {store.info()['files']}")
    return store


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--held", type=int, default=10_000)
    parser.add_argument("--cues", type=int, default=200)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--calibration-cues", type=int, default=1000)
    options = parser.parse_args()
    g = torch.Generator().manual_seed(1)
    images, new = digits("test", options.held), digits("validation", options.cues)
    place = options.store or Path(tempfile.mkdtemp()) / "digits.kanerva"
    large = open_store(place, images)
    small = open_store(place.with_name(f"small-{place.name}"), images[:1000])
    x, half = images[: options.cues], box(0, 14)
    print(
        f"{'cue':<34}{'N':>7}{'right':>8}{'alike':>8}{'nearest':>9}"
        f"{'ms':>9}{'no none':>9}{'batched':>9}{'numpy':>9}"
    )
    found(large, images, "clean", x)
    found(large, images, "half hidden, told", x * half, observed=half)
    found(large, images, "half hidden, told, no noise", x * half, observed=half, noise="none")
    found(large, images, "half hidden, untold", x * half)
    found(small, images, "half hidden, untold", x * half)
    found(small, images, "Gaussian 1", gaussian(x, 1.0, g))
    found(small, images, "Gaussian 1, folded and clipped", gaussian(x, 1.0, g).abs().clamp(0, 1))
    found(large, images, "salt & pepper 0.5", salt_pepper(x, 0.5, g))
    found(large, images, "shifted by 2", shifted(x, 2, -2), shifts=3)
    moved = shifted(x, 3, -1) * half
    found(large, images, "shifted within 3, half, told", moved, shifts=3, observed=half)
    found(large, images, "shifted within 3, half, untold", moved, shifts=3)
    x = images[: options.calibration_cues]
    print(f"\n{'calibration, N = 1,000':<34}{'':<8}{'right':>8}{'said':>8}{'ECE':>8}")
    seen = box(0, 7)
    calibration(small, "7 rows of 28 visible", x * seen, {"observed": seen, "noise": "none"})
    seen = box(10, 17, 11, 17)
    calibration(small, "window of 7 x 6 visible", x * seen, {"observed": seen, "noise": "none"})
    seen = (torch.rand(SIDE, SIDE, generator=g) < 0.07).float()
    calibration(small, "7 % of pixels visible", x * seen, {"observed": seen, "noise": "none"})
    calibration(
        small,
        "salt & pepper 0.75",
        salt_pepper(x, 0.75, g),
        {"observed": box(0, 28), "noise": Channel(0.0, 0.75)},
    )
    whole = {"observed": box(0, 28)}
    calibration(
        small, "Gaussian 1.6", gaussian(x, 1.6, g), whole | {"noise": Channel(gaussian=1.6)}
    )
    cues = gaussian(x, 0.9, g).abs().clamp(0, 1)
    calibration(
        small, "Gaussian 0.9, folded and clipped", cues, whole | {"noise": Channel(gaussian=0.9)}
    )
    print(f"\n{'none of these, N = 1,000':<34}{'AUROC':>8}{'ECE':>8}{'held':>8}{'unheld':>8}")
    x = x[: len(new)]
    unheld(small, x, new, "clean")
    unheld(small, x * half, new * half, "half hidden, told", observed=half)
    unheld(small, x * half, new * half, "half hidden, untold")
    unheld(small, salt_pepper(x, 0.5, g), salt_pepper(new, 0.5, g), "salt & pepper 0.5")
    unheld(small, gaussian(x, 1.0, g), gaussian(new, 1.0, g), "Gaussian 1")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    print(f"kanerva {kanerva.__version__}, torch {torch.__version__}")
    main()
