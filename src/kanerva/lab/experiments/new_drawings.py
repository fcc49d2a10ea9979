"""Beyond the paper: new drawings of a character of which five are written.

A memory of five drawings of an unseen character generates others. A classifier that saw neither the
five nor any sample decides which of twenty characters a sample shows. For comparison, it also
classifies real drawings, and samples of an empty memory. Distances are pixel counts after the best
shift. A sample counts as a copy if it is nearer to one of the five than any two drawings of that
character are to each other.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kanerva.data.augment import random_affine
from kanerva.errors import UserError
from kanerva.evaluation.frechet import FeatureExtractor, train_feature_extractor
from kanerva.evaluation.report import columns
from kanerva.lab.experiments.characters import Drawings, characters
from kanerva.lab.experiments.measures import Estimate, estimate
from kanerva.lab.harness import About, Figures, Finding, Lab
from kanerva.models.kpp_bits import KppBits
from kanerva.pictures import sheet

WRITTEN = 5  # drawings of each character
SAMPLES = 12  # per memory
WAYS = 20  # characters that the classifier chooses from
SHIFT = 3  # largest shift in pixels when drawings are compared
COPIES = 12  # affine copies of each drawing that the classifier learns from
AT_ONCE = 128  # memories processed together
SHOWN = 6  # characters in the picture
ENOUGH, FEW = 0.6, 0.05  # targets: least share of samples recognised, largest share of copies

Rows = Float[Tensor, "n _ C H W"]


def train_classifier(lab: Lab, drawings: Drawings) -> FeatureExtractor:
    """Train a classifier of all characters on these drawings and affine copies of them."""
    count, each = drawings.shape[:2]
    pixels = (255 * drawings.flatten(0, 1)).to(torch.uint8).cpu()
    noise = torch.Generator().manual_seed(lab.seed)
    copies = [pixels, *[random_affine(pixels, noise) for _ in range(COPIES)]]
    labels = torch.arange(count).repeat_interleave(each).repeat(len(copies))
    order = torch.randperm(len(labels), generator=noise)
    images = (torch.cat(copies)[order].float() / 255).to(lab.device)
    steps = lab.pick(400, 12_000)
    return train_feature_extractor(
        images, labels[order], steps=steps, generator=lab.noise("classifier")
    )


@torch.no_grad()
def recognise(
    extractor: FeatureExtractor, images: Rows, rivals: Int[Tensor, "n ways"]
) -> Float[Tensor, " n"]:
    """The share of a row's images that are classified as the first of its candidates."""
    scores = torch.cat([extractor.network(part) for part in images.flatten(0, 1).split(512)])
    scores = scores.unflatten(0, images.shape[:2])
    among = scores.gather(2, rivals[:, None].expand(-1, images.shape[1], -1))
    return (among.argmax(dim=2) == 0).double().mean(dim=1).cpu()


def draw_rivals(count: int, noise: torch.Generator) -> Int[Tensor, "n ways"]:
    """The candidates for each character: itself, then random others."""
    ways = min(WAYS, count)
    chance = torch.rand(count, count, generator=noise, device=noise.device)
    chance.fill_diagonal_(-1)
    return chance.argsort(dim=1)[:, :ways]


def shifted_distances(some: Rows, others: Rows) -> Float[Tensor, "n _ _"]:
    """The number of pixels that differ between each pair in a row, after the best shift."""
    height, width = some.shape[-2:]
    flat, best = some.flatten(2), None
    framed = torch.nn.functional.pad(others, [SHIFT] * 4)
    for down in range(2 * SHIFT + 1):
        for across in range(2 * SHIFT + 1):
            moved = framed[..., down : down + height, across : across + width].flatten(2)
            apart = torch.cdist(flat, moved).square()  # for binary pixels, the number that differ
            best = apart if best is None else torch.minimum(best, apart)
    assert best is not None
    return best


def closest_pairs(drawings: Drawings) -> Float[Tensor, " n"]:
    """The distance between the two most similar drawings of each character."""
    apart = shifted_distances(drawings, drawings)
    itself = torch.eye(drawings.shape[1], dtype=torch.bool, device=apart.device)
    return apart.masked_fill(itself, torch.inf).amin(dim=(1, 2))


@torch.no_grad()
def sample(lab: Lab, model: KppBits, written: Drawings) -> tuple[Rows, Rows]:
    """Sample new drawings from each memory, and as many from an empty one."""
    samples = []
    for start in range(0, len(written), AT_ONCE):
        noise = lab.noise("samples", start)
        memory = model.write(written[start : start + AT_ONCE], generator=noise)
        samples.append(model.generate(memory, SAMPLES, sample_pixels=True, generator=noise))
    empty = model.generate(
        model.empty(), len(written), sample_pixels=True, generator=lab.noise("empty")
    )
    return torch.cat(samples), empty[:, None]


def run(lab: Lab) -> Finding:
    model = lab.trained("kpp-bits")
    if not isinstance(model, KppBits):
        raise UserError("new-drawings needs a model that generates kin of what is written")
    drawings = characters(lab, lab.pick(24, None))[0]
    extractor = train_classifier(lab, drawings[:, WRITTEN:])
    return measure(lab, model, drawings, extractor)


@torch.no_grad()
def measure(lab: Lab, model: KppBits, drawings: Drawings, extractor: FeatureExtractor) -> Finding:
    """Measure how many samples show their character, and how many copy a drawing of it."""
    written = drawings[:, :WRITTEN]
    samples, alone = sample(lab, model, written)
    rivals = draw_rivals(len(drawings), lab.noise("rivals"))
    closest = closest_pairs(drawings)
    nearest = shifted_distances(samples, written).amin(dim=2)
    real = shifted_distances(drawings[:, WRITTEN : WRITTEN + 1], written).amin(dim=2)
    others = closest_pairs(torch.cat([written, drawings[:, WRITTEN + 1 :]], dim=1))
    shares = {
        "samples": recognise(extractor, samples, rivals),
        "real": recognise(extractor, written, rivals),
        "empty": recognise(extractor, alone, rivals),
    }
    figures: Figures = {
        "characters": len(drawings),
        "ways": rivals.shape[1],
        "samples": SAMPLES,
        "recognised": {name: estimate(share, "error") for name, share in shares.items()},
        "copies": float((nearest < closest[:, None]).double().mean()),
        "copies_of_real": float((real < others[:, None]).double().mean()),
        "pixels_apart": {
            "samples": float(nearest.mean()),
            "real": float(real.mean()),
            "closest_pair": float(closest.mean()),
        },
    }
    parts: list[tuple[str, Tensor]] = []
    for one in range(min(SHOWN, len(drawings))):
        parts += [
            ("five drawings, written", written[one]),
            ("twelve new ones", samples[one]),
        ]
    return Finding(figures, table(figures), sheet(parts, SAMPLES))


def percent(share: Estimate) -> str:
    return f"{share['mean']:.1%} ± {share['error']:.1%}"


def table(figures: Figures) -> list[str]:
    """A table of the shares recognised, and of copies."""
    found, apart = figures["recognised"], figures["pixels_apart"]
    rows = [
        ["", "taken for the character", "copies", "pixels from the nearest written"],
        [
            "samples",
            percent(found["samples"]),
            f"{figures['copies']:.1%}",
            f"{apart['samples']:.0f}",
        ],
        [
            "real drawings",
            percent(found["real"]),
            f"{figures['copies_of_real']:.1%}",
            f"{apart['real']:.0f}",
        ],
        ["samples of an empty memory", percent(found["empty"]), "", ""],
    ]
    return [
        *columns(rows, left=1).splitlines(),
        f"{figures['samples']} samples after {WRITTEN} drawings of each of {figures['characters']} "
        "unseen characters, ± standard error over them;",
        f"one of {figures['ways']} characters, by a classifier that saw neither the written "
        "drawings nor samples. A copy is nearer,",
        f"after the best shift of {SHIFT} pixels, to a written drawing than any two drawings of "
        "the character are to each other",
        f"({apart['closest_pair']:.0f} pixels on average). One seed",
    ]


def verdict(figures: Figures) -> str:
    """Whether samples show the character, and are new."""
    share, real = (figures["recognised"][name]["mean"] for name in ("samples", "real"))
    said = "as hoped" if share >= ENOUGH else f"below the {ENOUGH:.0%} hoped for"
    new = "they are new" if figures["copies"] < FEW else "too many are copies"
    return (
        f"{share:.1%} of the samples are taken for the written character ({said}; real drawings "
        f"{real:.1%}), and {figures['copies']:.1%} are copies: {new}."
    )


ABOUT = About(
    paper="beyond",
    shows="samples like what is written, and whether they are new",
    claim="A memory of five drawings of an unseen character generates new drawings of it.",
    quick="about 4 min on two cores",
    full="minutes on a GPU",
    presets=("omniglot",),
)
