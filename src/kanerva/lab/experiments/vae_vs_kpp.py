"""App. C: samples of a VAE beside those of K++: how sharp, and how near to real images.

Memories are written from training images, which every model has seen, and samples are compared with
test images, which none has: a model that only replays its memory can come as near as other training
images do, no nearer. `nothing written` has kpp's networks and an empty memory: what is left without
it. Random keys of a `store` memory replay: a hard read takes a whole block, one that was written or
an empty one; so it is scored, in the full protocol, but proves nothing.

Sharpness is that of expected pixels, as in the paper's pictures. Fréchet distances are given of
these and of pixels drawn from p(x|z), which is what a model says images look like.
"""

from typing import Any

import torch
from torch import Tensor

from kanerva.evaluation.frechet import Eye, frechet, frechet_spread, trained_eye
from kanerva.lab.experiments.perturb import (
    GROUP,
    MODELS,
    Scene,
    blurred,
    is_binary,
    rms,
    scene,
    sharpness,
    summary,
    trained,
)
from kanerva.lab.harness import Experiment, Finding, Lab
from kanerva.models import Kpp, MemoryModel
from kanerva.pictures import Pictures, sheet
from kanerva.presets import preset
from kanerva.runs import load_split

DRAWN = 20  # samples for every GROUP of images written
RESAMPLES = 20  # of the bootstrap that gives the error
SHOWN = 32


@torch.no_grad()
def samples(
    model: MemoryModel, written: Pictures, length: int, generator: torch.Generator
) -> dict[str, tuple[Pictures, Pictures]]:
    """DRAWN samples at random keys: expected pixels, and pixels drawn; with an empty memory too,
    where a model knows what that is."""
    at = scene(model, written.unflatten(0, (-1, length)), generator)
    keys = at.anywhere(-(-DRAWN * length // GROUP), generator)
    scenes = {"": at}
    if isinstance(model, Kpp):
        scenes["nothing written"] = Scene(model, model.empty(len(at.starts)), at.starts)
    found = {}
    for how, one in scenes.items():
        readout = one.readouts(keys, generator)
        mean = model.likelihood.mean(model.decoder(readout))
        drawn = model.draw_pixels(readout, generator)
        found[how] = (mean.flatten(0, 1)[:DRAWN], drawn.flatten(0, 1)[:DRAWN])
    return found


def scored(
    eye: Eye, made: Pictures, reference: Tensor, generator: torch.Generator
) -> dict[str, float]:
    """The distance of pictures to real images, and its standard error."""
    seen = eye(made)
    error = frechet_spread(seen, reference, group=DRAWN, resamples=RESAMPLES, generator=generator)
    return {"distance": frechet(seen, reference), "error": error}


def nearer(one: dict[str, float], other: dict[str, float]) -> bool:
    """Nearer by more than two standard errors."""
    error = (one["error"] ** 2 + other["error"] ** 2) ** 0.5
    return one["distance"] + 2 * error < other["distance"]


def verdict(found: dict[str, Any]) -> str:
    """Whose samples are sharper, whose nearer to real images, and what the memory adds."""
    vae, words = found["vae"], []
    for name in MODELS:
        if name == "vae":
            continue
        one = found[name]
        what = "greyness" if "grey" in one else "edges"
        sharp = "grey" if "grey" in one else "edges"
        is_sharper = blurred(vae, one)
        is_nearer = nearer(one["drawn"], vae["drawn"])
        words.append(
            f"{name} is {'' if is_sharper else 'NOT '}sharper than vae ({what} "
            f"{one[sharp]['mean']:.3f} against {vae[sharp]['mean']:.3f}) and "
            f"{'' if is_nearer else 'NOT '}nearer to real images ({one['drawn']['distance']:.1f} "
            f"±{one['drawn']['error']:.1f} against {vae['drawn']['distance']:.1f} "
            f"±{vae['drawn']['error']:.1f})."
        )
    ours, empty = found["kpp-generate"]["drawn"], found["kpp-generate, nothing written"]["drawn"]
    adds = nearer(ours, empty)
    words.append(
        f"kpp's networks with nothing written: {empty['distance']:.1f} ±{empty['error']:.1f}, so "
        + (
            f"the memory makes {empty['distance'] - ours['distance']:.1f} of the difference, other "
            f"networks and training {vae['drawn']['distance'] - empty['distance']:.1f}."
            if adds
            else "the memory makes NO difference."
        )
    )
    return " ".join(words)


def training_length(lab: Lab, model: str, variant: str | None, steps: int) -> str:
    """How long a model was trained, in words."""
    config = lab.config(model, variant, steps=steps)
    return f"{config.epochs} epochs" if config.steps is None else f"{config.steps} steps"


def run(lab: Lab) -> Finding:
    sizes = {
        split: len(load_split(preset(lab.preset), split, lab.data_root))
        for split in ("train", "test")
    }
    groups = min(lab.pick(50, 500), sizes["train"] // GROUP)
    count = groups * DRAWN
    models = MODELS if lab.quick else MODELS | {"kpp-store": ("kpp", "store", 600)}
    ready = {name: trained(lab, name, models) for name in models}
    lengths = {name: training_length(lab, *models[name]) for name in models}
    many = min(sizes["train"], lab.pick(20_000, 50_000))
    pixels, labels = lab.labelled(many, "train")
    steps = lab.steps or lab.pick(200, 5000)
    lab.say(f"training what sees features: {steps} steps")
    eye = trained_eye(pixels, labels, steps=steps, generator=lab.noise("eye"))
    real = lab.images(min(count, sizes["test"]), "test")
    reference, again = eye(real), len(real)
    if sizes["test"] < 2 * again:  # too few for another set as large: halves
        again = again // 2
    binary = is_binary(ready["vae"][0])
    found: dict[str, Any] = {}
    parts = [("test images", real[:SHOWN])]
    for name, (model, length) in ready.items():
        made: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
        for group in range(groups):
            written = lab.images(GROUP, "train", skip=group * GROUP)
            noise = lab.noise(name, "samples", group)
            for how, (mean, drawn) in samples(model, written, length, noise).items():
                near = rms(mean, written).amin(dim=1)
                made.setdefault(", ".join(filter(None, [name, how])), []).append(
                    (mean, drawn, near)
                )
        for label, each in made.items():
            mean, drawn, near = (torch.cat(one) for one in zip(*each, strict=True))
            noise = lab.noise(label, "bootstrap")
            found[label] = {
                "expected": scored(eye, mean, reference, noise),
                "drawn": scored(eye, drawn, reference, noise),
                "nearest": summary(near),
                **{what: summary(value) for what, value in sharpness(mean, binary).items()},
            }
            parts.append((f"{label}: expected pixels", mean[:SHOWN]))
    others = pixels[:count]
    apart = rms(real[:DRAWN], lab.images(GROUP, "train")).amin(dim=1)
    found["training images"] = {
        "drawn": scored(eye, others, reference, lab.noise("others")),
        "nearest": summary(apart),
        **{what: summary(value) for what, value in sharpness(others, binary).items()},
    }
    two = eye(lab.images(2 * again, "test")).split(again)
    found["test images, two sets"] = {"drawn": {"distance": frechet(*two)}}
    about = "labels" if eye.learnt_from == "labels" else "images: there are no labels"
    figures = {
        "samples": count,
        "memories_of": GROUP,
        "test_images": len(real),
        "two_sets_of": again,
        "features": {
            "learnt_from": eye.learnt_from,
            "images": many,
            "steps": steps,
            "classes": eye.classes,
            "accuracy": eye.accuracy,
        },
        "trained": lengths,
        "models": found,
    }
    seen = "" if eye.accuracy is None else f", {eye.classes} classes, {eye.accuracy:.0%} right"
    said = ", ".join(f"{name} {long}" for name, long in lengths.items())
    lines = [
        f"trained: {said}",
        f"{count} samples each, {DRAWN} for every {GROUP} training images written; "
        f"{len(real)} test images",
        f"features: of a small network trained here on {about}{seen}; ± standard error, bootstrap",
        f"{'samples':<30}{'Fréchet, drawn':>17}{'expected pixels':>17}{'edges':>9}{'greyness':>10}"
        f"{'nearest written':>17}",
    ]
    for label, one in found.items():
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
    if lab.quick:
        lines.append(
            "kpp-store is left to the full protocol: its random keys replay the blocks written"
        )
    return Finding(figures, lines, verdict(found), {"": sheet(parts, columns=16)})


EXPERIMENT = Experiment(
    name="vae-vs-kpp",
    paper="App. C",
    shows="samples side by side: sharpness, Fréchet distance",
    claim="Samples of K++ are much sharper than a standard VAE's (the paper: on ImageNet32).",
    run=run,
    quick="about 3 min on two cores",
    full="1 h on a GPU",
    presets=("mnist", "cifar10"),
)
