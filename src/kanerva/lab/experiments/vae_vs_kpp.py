"""App. C: samples of a VAE and of K++: how sharp they are, and how close to real images.

Memories hold training images, which every model has seen. Samples are compared with test images,
which none has seen. So a model that only replays its memory comes as close as training images do,
and no closer. `nothing written` is `kpp-bits` with an empty memory. `kpp` is left out: its reads
return a whole block, written or empty.

Sharpness is that of expected pixels, as in the paper's pictures. Fréchet distances are given for
these, and for sampled pixels, which are true samples of a model: of p(x|z), or for `kpp-bits` of
its pixel code.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kanerva.data.splits import load_split
from kanerva.evaluation.frechet import (
    FeatureExtractor,
    frechet,
    frechet_spread,
    train_feature_extractor,
)
from kanerva.evaluation.report import columns
from kanerva.lab.experiments.drawing import (
    GROUP,
    MODELS,
    RETIRED,
    is_binary,
    join,
    models_for,
    train_to_draw,
)
from kanerva.lab.experiments.measures import interval, is_blurred, over_memories, pm, rms, sharpness
from kanerva.lab.harness import About, Figures, Finding, Lab
from kanerva.models.base import MemoryModel
from kanerva.pictures import Pictures, sheet
from kanerva.presets import preset

DRAWN = 20  # samples for every GROUP of images written
RESAMPLES = 20  # bootstrap resamples for the error
SHOWN = 32
Scores = dict[
    str, Any
]  # of one model: Fréchet distances, sharpness, distance to the written images


@torch.no_grad()
def draw_samples(
    model: MemoryModel, written: Pictures, length: int, generator: torch.Generator
) -> dict[str, tuple[Pictures, Pictures]]:
    """Expected and sampled pixels of DRAWN samples. A model with blocks also samples from an empty
    memory."""
    episodes = written.unflatten(0, (-1, length))
    memories = {"": model.write(episodes, generator=generator) if model.remembers else None}
    if model.has_blocks:
        memories["nothing written"] = model.empty(len(episodes))
    samples = {}
    for how, memory in memories.items():
        count = DRAWN if memory is None else -(-DRAWN // len(episodes))
        mean, pixels = (
            model.generate(memory, count, sample_pixels=sampled, generator=generator)
            for sampled in (False, True)
        )
        flat = (-1, *written.shape[1:])
        samples[how] = (mean.reshape(flat)[:DRAWN], pixels.reshape(flat)[:DRAWN])
    return samples


@dataclass(frozen=True)
class Judge:
    """Compares pictures with real images by the features of a network."""

    extractor: FeatureExtractor
    reference: Tensor  # features of real images
    binary: bool

    def score(
        self, means: Pictures, near: Tensor, noise: torch.Generator, **made: Pictures
    ) -> Scores:
        """The Fréchet distances of samples, with their standard errors, and their sharpness."""
        scores: Scores = {}
        for how, pictures in made.items():
            seen = self.extractor(pictures)
            error = frechet_spread(
                seen, self.reference, group=DRAWN, resamples=RESAMPLES, generator=noise
            )
            scores[how] = {"distance": frechet(seen, self.reference), "error": error}
        values = {"nearest": near} | sharpness(means, self.binary)
        means_of = {what: over_memories(value, DRAWN) for what, value in values.items()}
        return scores | {what: interval(value) for what, value in means_of.items()}


def score_model(
    lab: Lab, judge: Judge, name: str, model: MemoryModel, length: int, groups: int
) -> tuple[dict[str, Scores], list[tuple[str, Pictures]]]:
    """Score a model's samples from many memories; also return some to draw."""
    made: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for group in range(groups):
        written = lab.images(GROUP, "train", skip=group * GROUP)
        noise = lab.noise(name, "samples", group)
        for how, (mean, pixels) in draw_samples(model, written, length, noise).items():
            near = rms(mean, written).amin(dim=1)
            made.setdefault(join(name, how), []).append((mean, pixels, near))
    found, shown = {}, []
    for label, each in made.items():
        mean, pixels, near = (torch.cat(one) for one in zip(*each, strict=True))
        noise = lab.noise(label, "bootstrap")
        found[label] = judge.score(mean, near, noise, expected=mean, drawn=pixels)
        shown.append((f"{label}: expected pixels", mean[:SHOWN]))
    return found, shown


def split_size(lab: Lab, split: str) -> int:
    return len(load_split(preset(lab.preset), split, lab.data_root))


def run(lab: Lab) -> Finding:
    in_train, in_test = split_size(lab, "train"), split_size(lab, "test")
    groups = min(lab.pick(50, 500), in_train // GROUP)
    count = groups * DRAWN
    ready = {name: train_to_draw(lab, name) for name in models_for(lab.preset)}

    pixels, labels = lab.labelled(min(in_train, lab.pick(20_000, 50_000)), "train")
    steps = lab.steps or lab.pick(200, 5000)
    lab.say(f"training the feature extractor: {steps} steps")
    extractor = train_feature_extractor(pixels, labels, steps=steps, generator=lab.noise("eye"))
    real = lab.images(min(count, in_test), "test")
    judge = Judge(extractor, extractor(real), is_binary(ready["vae"][0]))

    found: dict[str, Scores] = {}
    parts = [("test images", real[:SHOWN])]
    for name, (model, length) in ready.items():
        scores, shown = score_model(lab, judge, name, model, length, groups)
        found |= scores
        parts += shown
    # references for the lowest distance: training images, and two sets of test images
    near = torch.cat(
        [
            rms(images, lab.images(GROUP, "train", skip=group * GROUP)).amin(dim=1)
            for group, images in enumerate(real.split(DRAWN)[: len(real) // DRAWN])
        ]
    )
    training = pixels[:count]
    found["training images"] = judge.score(training, near, lab.noise("others"), drawn=training)
    again = len(real) if in_test >= 2 * len(real) else len(real) // 2
    two = extractor(lab.images(2 * again, "test")).split(again)
    found["test images, two sets"] = {"drawn": {"distance": frechet(*two)}}
    figures = {
        "samples": count,
        "memories_of": GROUP,
        "test_images": len(real),
        "two_sets_of": again,
        "features": {
            "learnt_from": extractor.learnt_from,
            "images": len(pixels),
            "steps": steps,
            "classes": extractor.classes,
            "accuracy": extractor.accuracy,
        },
        "models": found,
    }
    return Finding(figures, table(figures), sheet(parts, columns=16))


def nearer(one: Scores, other: Scores) -> bool:
    """Whether one is closer to real images than the other, by more than two standard errors."""
    mine, theirs = one["drawn"], other["drawn"]
    error = (mine["error"] ** 2 + theirs["error"] ** 2) ** 0.5
    return mine["distance"] + 2 * error < theirs["distance"]


def distance(scores: Scores, how: str = "drawn", digits: int = 1) -> str:
    """Format the distance to real images with its error."""
    found = scores.get(how)
    return "-" if found is None else pm(found | {"mean": found["distance"]}, digits)


def verdict(figures: Figures) -> str:
    """Which models' samples are sharper and closer to real images, and what the memory adds."""
    found = figures["models"]
    vae, words = found["vae"], []
    for name in (RETIRED, *MODELS):
        if name == "vae" or name not in found:
            continue
        one = found[name]
        key, called = ("grey", "greyness") if "grey" in one else ("edges", "edges")
        words.append(
            f"{name} is {'' if is_blurred(vae, one) else 'NOT '}sharper than vae ({called} "
            f"{one[key]['mean']:.3f} against {vae[key]['mean']:.3f}) and "
            f"{'' if nearer(one, vae) else 'NOT '}nearer to real images ({distance(one)} against "
            f"{distance(vae)})."
        )
    ours = RETIRED if RETIRED in found else "kpp-bits"
    return " ".join([*words, memory_effect(found, ours)] if ours in found else words)


def memory_effect(found: dict[str, Scores], name: str) -> str:
    """How much closer to real images the written memory brings a model's samples."""
    ours, empty = found[name], found[f"{name}, nothing written"]
    start = f"{name} with nothing written: {distance(empty)}, so the memory"
    if not nearer(ours, empty):
        return f"{start} makes NO difference."
    near, middle, far = (one["drawn"]["distance"] for one in (ours, empty, found["vae"]))
    side = "nearer" if middle < far else "farther"
    return (
        f"{start} brings samples {middle - near:.1f} nearer; without it they are "
        f"{abs(far - middle):.1f} {side} than vae's, by other networks and training."
    )


def table(figures: Figures) -> list[str]:
    """A table with a row for each model and for real images."""
    features, again = figures["features"], figures["two_sets_of"]
    about = "labels" if features["learnt_from"] == "labels" else "images: there are no labels"
    if features["accuracy"] is not None:
        about += f", {features['classes']} classes, {features['accuracy']:.0%} right"
    rows = [["", "Fréchet, drawn", "expected pixels", "edges", "greyness", "nearest written"]]
    for label, one in figures["models"].items():
        cells = [distance(one, how, 2) for how in ("drawn", "expected")]
        rows.append([label, *cells, *(pm(one.get(what)) for what in ("edges", "grey", "nearest"))])
    return [
        f"{figures['samples']} samples each, {DRAWN} for every {GROUP} training images written; "
        f"{figures['test_images']} test images",
        f"features: of a small network trained here on {about}",
        "± standard error, bootstrap; of edges, greyness and nearest 95 % over groups of "
        f"{DRAWN} samples",
        *columns(rows, left=1).splitlines(),
        f"two sets: {again} against {again}; nearest: of the {GROUP} written (for vae: not "
        "written; last: a test image's)",
    ]


ABOUT = About(
    paper="App. C",
    shows="samples side by side: sharpness, Fréchet distance",
    claim="Samples of K++ are much sharper than a standard VAE's (the paper: on ImageNet32).",
    quick="about 3 min on two cores",
    full="1 h on a GPU",
    presets=("mnist", "cifar10"),
)
