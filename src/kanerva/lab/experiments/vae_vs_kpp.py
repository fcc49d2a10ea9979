"""App. C: samples of a VAE beside those of K++: how sharp, and how near to real images.

Memories are written from training images, which every model has seen, and samples are compared with
test images, which none has: a model that only replays its memory can come as near as other training
images do, no nearer. `nothing written` has kpp's networks and an empty memory: what is left without
it. Random keys of a `store` memory replay: a hard read takes a whole block, one that was written or
an empty one; so it is scored, in the full protocol, but proves nothing.

Sharpness is that of expected pixels, as in the paper's pictures. Fréchet distances are given of
these and of pixels drawn from p(x|z), which is what a model says images look like.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kanerva.data.splits import load_split
from kanerva.evaluation.frechet import Eye, frechet, frechet_spread, trained_eye
from kanerva.lab.experiments.picture_measures import interval, is_blurred, rms, sharpness
from kanerva.lab.experiments.scene import (
    GROUP,
    MODELS,
    Scene,
    is_binary,
    join,
    train_for_scene,
    write_scene,
)
from kanerva.lab.harness import Experiment, Figures, Finding, Lab
from kanerva.models.base import MemoryModel
from kanerva.pictures import Pictures, sheet
from kanerva.presets import preset

DRAWN = 20  # samples for every GROUP of images written
RESAMPLES = 20  # of the bootstrap that gives the error
SHOWN = 32
TWO_SETS = "test images, two sets"
Scores = dict[str, Any]  # of one model: Fréchet distances, sharpness, distance to what was written


@torch.no_grad()
def draw_samples(
    model: MemoryModel, written: Pictures, length: int, generator: torch.Generator
) -> dict[str, tuple[Pictures, Pictures]]:
    """DRAWN samples at random keys: expected pixels, and pixels drawn; with an empty memory too,
    where a model knows what that is."""
    at = write_scene(model, written.unflatten(0, (-1, length)), generator)
    keys = at.draw_keys(-(-DRAWN * length // GROUP), generator)
    scenes = {"": at}
    if model.has_blocks:
        scenes["nothing written"] = Scene(model, model.empty(len(at.starts)), at.starts)
    found = {}
    for how, one in scenes.items():
        readout = one.readouts(keys, generator)
        mean = model.likelihood.mean(model.decoder(readout))
        drawn = model.sample_pixels(readout, generator)
        found[how] = (mean.flatten(0, 1)[:DRAWN], drawn.flatten(0, 1)[:DRAWN])
    return found


@dataclass(frozen=True)
class Judge:
    """Compares pictures with real ones, by the features that a network sees in both."""

    eye: Eye
    reference: Tensor  # features of real images
    binary: bool

    def distance(self, made: Pictures, generator: torch.Generator) -> dict[str, float]:
        """The Fréchet distance to real images, and its standard error."""
        seen = self.eye(made)
        error = frechet_spread(
            seen, self.reference, group=DRAWN, resamples=RESAMPLES, generator=generator
        )
        return {"distance": frechet(seen, self.reference), "error": error}

    def sharpness(self, made: Pictures) -> dict[str, dict[str, float]]:
        """Its measures as intervals."""
        return {what: interval(value) for what, value in sharpness(made, self.binary).items()}


def score_model(
    lab: Lab, judge: Judge, name: str, model: MemoryModel, length: int, groups: int
) -> tuple[dict[str, Scores], list[tuple[str, Pictures]]]:
    """A model's samples from many memories, scored; and some to look at."""
    made: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for group in range(groups):
        written = lab.images(GROUP, "train", skip=group * GROUP)
        noise = lab.noise(name, "samples", group)
        for how, (mean, drawn) in draw_samples(model, written, length, noise).items():
            near = rms(mean, written).amin(dim=1)
            made.setdefault(join(name, how), []).append((mean, drawn, near))
    found, shown = {}, []
    for label, each in made.items():
        mean, drawn, near = (torch.cat(one) for one in zip(*each, strict=True))
        noise = lab.noise(label, "bootstrap")
        found[label] = {
            "expected": judge.distance(mean, noise),
            "drawn": judge.distance(drawn, noise),
            "nearest": interval(near),
            **judge.sharpness(mean),
        }
        shown.append((f"{label}: expected pixels", mean[:SHOWN]))
    return found, shown


def score_real_images(
    lab: Lab, judge: Judge, real: Pictures, training: Pictures, again: int
) -> dict[str, Scores]:
    """The same of images that no model made: how near samples can come at all."""
    nearest = rms(real[:DRAWN], lab.images(GROUP, "train")).amin(dim=1)
    two = judge.eye(lab.images(2 * again, "test")).split(again)
    return {
        "training images": {
            "drawn": judge.distance(training, lab.noise("others")),
            "nearest": interval(nearest),
            **judge.sharpness(training),
        },
        TWO_SETS: {"drawn": {"distance": frechet(*two)}},
    }


def training_length(lab: Lab, model: str, variant: str | None, steps: int) -> str:
    """How long a model was trained, in words."""
    config = lab.config(model, variant, steps=steps)
    return f"{config.steps} steps"


def split_size(lab: Lab, split: str) -> int:
    return len(load_split(preset(lab.preset), split, lab.data_root))


def run(lab: Lab) -> Finding:
    in_train, in_test = split_size(lab, "train"), split_size(lab, "test")
    groups = min(lab.pick(50, 500), in_train // GROUP)
    count = groups * DRAWN
    models = MODELS if lab.quick else MODELS | {"kpp-store": ("kpp", "store", 600)}
    ready = {name: train_for_scene(lab, name, models) for name in models}

    pixels, labels = lab.labelled(min(in_train, lab.pick(20_000, 50_000)), "train")
    steps = lab.steps or lab.pick(200, 5000)
    lab.say(f"training what sees features: {steps} steps")
    eye = trained_eye(pixels, labels, steps=steps, generator=lab.noise("eye"))
    real = lab.images(min(count, in_test), "test")
    judge = Judge(eye, eye(real), is_binary(ready["vae"][0]))

    found: dict[str, Scores] = {}
    parts = [("test images", real[:SHOWN])]
    for name, (model, length) in ready.items():
        scores, shown = score_model(lab, judge, name, model, length, groups)
        found |= scores
        parts += shown
    again = len(real) if in_test >= 2 * len(real) else len(real) // 2  # another set as large
    found |= score_real_images(lab, judge, real, pixels[:count], again)
    figures = {
        "samples": count,
        "memories_of": GROUP,
        "test_images": len(real),
        "two_sets_of": again,
        "features": {
            "learnt_from": eye.learnt_from,
            "images": len(pixels),
            "steps": steps,
            "classes": eye.classes,
            "accuracy": eye.accuracy,
        },
        "trained": {name: training_length(lab, *models[name]) for name in models},
        "models": found,
    }
    return Finding(figures, table(figures), {"": sheet(parts, columns=16)})


# In words


def nearer(one: dict[str, float], other: dict[str, float]) -> bool:
    """Nearer by more than two standard errors."""
    error = (one["error"] ** 2 + other["error"] ** 2) ** 0.5
    return one["distance"] + 2 * error < other["distance"]


def distance_in_words(scores: Scores) -> str:
    """Of pixels drawn, with its error."""
    return f"{scores['drawn']['distance']:.1f} ±{scores['drawn']['error']:.1f}"


def sharpness_measure(scores: Scores) -> tuple[str, str]:
    """Which measure of sharpness counts, and what it is called."""
    return ("grey", "greyness") if "grey" in scores else ("edges", "edges")


def verdict(figures: Figures) -> str:
    """Whose samples are sharper, whose nearer to real images, and what the memory adds."""
    found = figures["models"]
    vae, words = found["vae"], []
    for name in MODELS:
        if name == "vae":
            continue
        one = found[name]
        key, called = sharpness_measure(one)
        is_sharper, is_nearer = is_blurred(vae, one), nearer(one["drawn"], vae["drawn"])
        words.append(
            f"{name} is {'' if is_sharper else 'NOT '}sharper than vae ({called} "
            f"{one[key]['mean']:.3f} against {vae[key]['mean']:.3f}) and "
            f"{'' if is_nearer else 'NOT '}nearer to real images ({distance_in_words(one)} against "
            f"{distance_in_words(vae)})."
        )
    return " ".join([*words, memory_effect(found)])


def memory_effect(found: dict[str, Scores]) -> str:
    """How much of the way to real images is due to what was written."""
    ours, empty, vae = (
        found[name] for name in ("kpp-generate", "kpp-generate, nothing written", "vae")
    )
    start = f"kpp's networks with nothing written: {distance_in_words(empty)}, so the memory"
    if not nearer(ours["drawn"], empty["drawn"]):
        return f"{start} makes NO difference."
    near, middle, far = (one["drawn"]["distance"] for one in (ours, empty, vae))
    side = "nearer" if middle < far else "farther"
    return (
        f"{start} brings samples {middle - near:.1f} nearer; without it they are "
        f"{abs(far - middle):.1f} {side} than vae's, by other networks and training."
    )


def table(figures: Figures) -> list[str]:
    """A row for each model and for real images."""
    features, again = figures["features"], figures["two_sets_of"]
    about = "labels" if features["learnt_from"] == "labels" else "images: there are no labels"
    if features["accuracy"] is not None:
        about += f", {features['classes']} classes, {features['accuracy']:.0%} right"
    trained = ", ".join(f"{name} {length}" for name, length in figures["trained"].items())
    lines = [
        f"trained: {trained}",
        f"{figures['samples']} samples each, {DRAWN} for every {GROUP} training images written; "
        f"{figures['test_images']} test images",
        f"features: of a small network trained here on {about}; ± standard error, bootstrap",
        f"{'samples':<30}{'Fréchet, drawn':>17}{'expected pixels':>17}{'edges':>9}{'greyness':>10}"
        f"{'nearest written':>17}",
    ]
    for label, one in figures["models"].items():
        cells = [
            f"{one[w]['distance']:.2f}" + (f" ±{one[w]['error']:.2f}" if "error" in one[w] else "")
            if w in one
            else "-"
            for w in ("drawn", "expected")
        ]
        cells += [
            f"{one[w]['mean']:.3f}" if w in one else "-" for w in ("edges", "grey", "nearest")
        ]
        lines.append(
            f"{label:<30}{cells[0]:>17}{cells[1]:>17}{cells[2]:>9}{cells[3]:>10}{cells[4]:>17}"
        )
    lines.append(
        f"two sets: {again} against {again}; nearest: of the {GROUP} written (for vae: not "
        "written; last: a test image's)"
    )
    if "kpp-store" not in figures["models"]:
        lines.append(
            "kpp-store is left to the full protocol: its random keys replay the blocks written"
        )
    return lines


EXPERIMENT = Experiment(
    name="vae-vs-kpp",
    paper="App. C",
    shows="samples side by side: sharpness, Fréchet distance",
    claim="Samples of K++ are much sharper than a standard VAE's (the paper: on ImageNet32).",
    run=run,
    verdict=verdict,
    quick="about 3 min on two cores",
    full="1 h on a GPU",
    presets=("mnist", "cifar10"),
)
