"""Beyond the paper: images stored exactly, with a table of pixel contexts.

The simplest lossless code of binary images. The context of a pixel is a few near pixels that come
before it. Its probability of being one is the frequency of ones after that context in the training
set. A memory of such codes has the bound ln T, the lowest possible, so it dominates any memory with
more bits per image.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from kanerva import data
from kanerva.data.splits import fixed_episodes, load_split
from kanerva.errors import UserError
from kanerva.evaluation.records import read_records
from kanerva.evaluation.report import columns
from kanerva.lab.experiments.sweep import RESULTS
from kanerva.lab.harness import About, Figures, Finding, Lab
from kanerva.presets import preset
from kanerva.seeding import stream

Binary = Float[Tensor, "N H W"]
SIZES = (8, 10, 12, 14, 16, 18)  # pixels of a context; the best on validation images is used
RADIUS = 4
PRIOR = 0.4  # pseudo-count of zeros and of ones in every context


def context_offsets(size: int) -> list[tuple[int, int]]:
    """Offsets (rows, columns) of the nearest pixels that come before a pixel in raster order."""
    before = [
        (i, j) for i in range(-RADIUS, 1) for j in range(-RADIUS, RADIUS + 1) if (i, j) < (0, 0)
    ]
    return sorted(before, key=lambda o: (o[0] ** 2 + o[1] ** 2, o))[:size]


def number_contexts(images: Binary, size: int) -> Int[Tensor, "N H W"]:
    """Each pixel's context as a number; pixels outside the image are 0."""
    height, width = images.shape[1:]
    framed = F.pad(images, (RADIUS, RADIUS, RADIUS, 0)).int()
    numbers = torch.zeros(images.shape, dtype=torch.int32)
    for bit, (i, j) in enumerate(context_offsets(size)):
        rows = slice(RADIUS + i, RADIUS + i + height)
        numbers += framed[:, rows, RADIUS + j : RADIUS + j + width] << bit
    return numbers


class ContextTable:
    """How often zeros and ones followed each context."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.counts = torch.zeros(2, 2**size, dtype=torch.float64)  # of zeros, of ones

    def count(self, images: Binary) -> None:
        contexts = number_contexts(images, self.size).flatten()
        for value in (0, 1):
            at = contexts[images.flatten() == value]
            self.counts[value] += torch.bincount(at, minlength=2**self.size)

    def bits(self, images: Binary) -> float:
        """Ideal bits per image, without the few that terminate an arithmetic code."""
        share = (self.counts[1] + PRIOR) / (self.counts.sum(dim=0) + 2 * PRIOR)
        chance = share[number_contexts(images, self.size).long()]
        cost = -torch.where(images > 0.5, chance, 1 - chance).log2()
        return float(cost.sum() / len(images))


def run(lab: Lab) -> Finding:
    config = preset(lab.preset)
    if config.data.binarization == "none":
        raise UserError(f"lossless needs binary pixels, and {lab.preset} has 8-bit ones")
    train = load_split(config, "train", lab.data_root).images[: lab.pick(2000, None)]
    sizes = lab.pick(SIZES[:3], SIZES)
    tables = {size: ContextTable(size) for size in sizes}
    for draw in range(lab.pick(2, 10)):
        noise = stream(lab.seed, "experiment", "lossless", draw)
        for part in data.binarize(train, config.data.binarization, noise).split(5000):
            for table in tables.values():
                table.count(part[:, 0].float())
    held = {}
    for split in ("validation", "test"):
        images = load_split(config, split, lab.data_root)
        episodes = fixed_episodes(config, images, torch.device("cpu"))
        batch = episodes.batch(0, len(episodes))
        held[split] = batch.images[batch.counted][: lab.pick(500, None), 0]
    on_validation = {size: table.bits(held["validation"]) for size, table in tables.items()}
    best = min(on_validation, key=lambda size: on_validation[size])
    bits = tables[best].bits(held["test"])
    figures: Figures = {
        "context": best,
        "validation_bits": {str(size): value for size, value in on_validation.items()},
        "bits_per_image": bits,
        "nats_per_image": bits * math.log(2),
        "n_images": len(held["test"]),
        "dominated": find_dominated(lab.preset, bits),
    }
    rows = [["pixels of context", *map(str, sizes)]]
    rows.append(["bits, validation", *(f"{on_validation[size]:.1f}" for size in sizes)])
    lines = columns(rows, left=1).splitlines()
    lines.append(
        f"test images, {best} pixels of context: {bits:.1f} bits, {bits * math.log(2):.2f} nats"
    )
    return Finding(figures, lines)


def find_dominated(name: str, bits: float) -> list[str]:
    """Records of memories with at least `bits` per image and a bound of at least ln T."""
    folder = RESULTS / name
    found = read_records(folder) if any(folder.glob("*.json")) else []
    return sorted(
        f"{r['model']} {r['variant'] or ''}".strip()
        for r in found
        if r["memory"]["bits_per_image"] >= bits and r["bound"]["nll_nats"] >= math.log(r["T"])
    )


def verdict(figures: Figures) -> str:
    """The bits that a memory should stay below, and how many of our records do not."""
    count = len(figures["dominated"])
    return (
        f"A table of {figures['context']} pixels stores an image in "
        f"{figures['bits_per_image']:.1f} bits ({figures['nats_per_image']:.2f} nats), bound ln T. "
        f"It dominates {count} records of ours: their memories take more bits and tell less."
    )


ABOUT = About(
    paper="beyond",
    shows="bits that the simplest lossless code of an image takes",
    claim="A memory that holds images should need fewer bits than a code that stores them exactly.",
    quick="seconds",
    full="a minute on two cores",
    presets=("mnist", "omniglot"),
)
