"""Fig. 8: random keys, y ~ p(Y) = N(0, 1), read from one episode's memory.

A picture from a memory should show that memory: it lies nearer to what was written there than to
as many images that were not. `keys alone` keeps z at the mean of p(z|M, y); where keys are dead it
is one picture again and again, and all that differs is z's noise, as in a VAE. `kpp` besides by
where its keys fall: on a block, or on free space; and with nothing written, the same networks.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from kanerva.evaluation.uses import nearest_is_held
from kanerva.lab.experiments.perturb import (
    DEAD,
    GROUP,
    MODELS,
    Figures,
    Scene,
    apart,
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

Values = dict[str, Float[Tensor, " _"]]
SHOWN = 16


def measures(made: Pictures, written: Pictures, others: Pictures, binary: bool) -> Values:
    """Of each picture: how far the nearest written image is, how much farther the nearest of as
    many that were not, how sharp it is; and of all, how far apart two of them are."""
    near, far = rms(made, written).amin(dim=1), rms(made, others).amin(dim=1)
    found = {"nearest": near, "gap": far - near} | sharpness(made, binary)
    return found | ({"apart": apart(made)[None]} if len(made) > 1 else {})


@torch.no_grad()
def drawn(
    model: MemoryModel, written: Pictures, length: int, generator: torch.Generator
) -> dict[str, Pictures]:
    """Pictures at random keys, as many as were written, by what was done."""
    episodes = written.unflatten(0, (-1, length))
    at = scene(model, episodes, generator)
    keys = at.anywhere(length, generator)
    found = {"": at.pictures(keys, generator).flatten(0, 1)}
    if at.memory is not None:
        found["keys alone"] = at.pictures(keys).flatten(0, 1)
    if isinstance(model, Kpp):
        assert at.memory is not None
        held = nearest_is_held(model, at.memory, keys).flatten()
        found["on a block"], found["on free space"] = found[""][held], found[""][~held]
        nothing = Scene(model, model.empty(len(episodes)), at.starts)
        found["nothing written"] = nothing.pictures(keys, generator).flatten(0, 1)
    return found


def verdict(found: dict[str, Figures]) -> str:
    """Whose pictures show what was written, and whose keys are dead."""
    words = []
    for name in MODELS:
        gap, entry = found[name]["gap"], found.get(f"{name}, keys alone")
        shows = gap["mean"] > max(gap["ci95"], DEAD)
        nearer = f"{round(gap['mean'], 3) + 0.0:.3f} ±{gap['ci95']:.3f} nearer to what was written"
        if name == "vae":
            words.append(f"vae, which writes nothing: {nearer}.")
        elif entry is not None and entry["apart"]["mean"] < DEAD:
            words.append(
                f"{name}: random keys all give ONE picture ({entry['apart']['mean']:.4f} apart); "
                f"it differs by z's noise, as a VAE's do, {nearer}."
            )
        else:
            how = "show the memory" if shows else "do NOT show the memory"
            words.append(f"{name}: random keys {how}, {nearer} than to other images.")
    return " ".join(words)


def run(lab: Lab) -> Finding:
    count = lab.pick(8, 32)
    values: dict[str, dict[str, list[Tensor]]] = {}
    written = lab.images(GROUP)
    parts = [(f"written into the memory: {SHOWN} of {GROUP}", written[:SHOWN])]

    def enter(name: str, found: Values) -> None:
        for what, value in found.items():
            values.setdefault(name, {}).setdefault(what, []).append(value)

    for name in MODELS:
        model, length = trained(lab, name)
        for group in range(count):
            written = lab.images(GROUP, skip=group * GROUP)
            others = lab.images(GROUP, skip=(group + 1) * GROUP)
            noise = lab.noise(name, "random keys", group)
            for how, made in drawn(model, written, length, noise).items():
                label = ", ".join(filter(None, [name, how]))
                if len(made):
                    enter(label, measures(made, written, others, is_binary(model)))
                if group == 0 and how not in ("on a block", "on free space"):
                    said = how or ("z ~ N(0, 1)" if name == "vae" else "random keys, z drawn")
                    said = "the same keys, z at its mean" if how == "keys alone" else said
                    parts.append((f"{name}: {said}", made[:SHOWN]))
            if name == "vae":  # to compare with; every model saw the same
                new = lab.images(GROUP, skip=(count + 1 + group) * GROUP)
                mixed = (written + written.roll(1, dims=0)) / 2
                for label, real in (("unwritten images", new), ("two written, mixed", mixed)):
                    enter(label, measures(real, written, others, is_binary(model)))
    figures = {
        name: {what: summary(torch.cat(value)) for what, value in each.items()}
        for name, each in values.items()
    }
    sizes = {name: sum(len(some) for some in each["nearest"]) for name, each in values.items()}
    lines = [
        f"{count} memories of {GROUP} images; root mean square over pixels, ± 95 %",
        f"{'pictures':<30}{'n':>6}{'nearest written':>17}{'others farther':>17}{'two apart':>15}"
        f"{'edges':>8}{'greyness':>10}",
    ]
    for name, found in figures.items():
        cells = [
            f"{found[what]['mean']:.3f} ±{found[what]['ci95']:.3f}" if what in found else "-"
            for what in ("nearest", "gap", "apart")
        ]
        sharp = [f"{found[w]['mean']:.3f}" if w in found else "-" for w in ("edges", "grey")]
        lines.append(
            f"{name:<30}{sizes[name]:6d}{cells[0]:>17}{cells[1]:>17}{cells[2]:>15}"
            f"{sharp[0]:>8}{sharp[1]:>10}"
        )
    lines.append(
        f"others farther: by how much the nearest of {GROUP} unwritten images is farther; 0 for a "
        "model without memory"
    )
    return Finding(
        {"memories": count, "of": GROUP, "n": sizes, "pictures": figures},
        lines,
        verdict(figures),
        {"": sheet(parts, columns=SHOWN)},
    )


EXPERIMENT = Experiment(
    name="random-keys",
    paper="Fig. 8",
    shows="pictures at keys from p(Y): do they show the memory?",
    claim="Keys drawn from p(Y) read new pictures of the episode out of its memory.",
    run=run,
    full="30 min on a GPU",
    presets=("omniglot", "mazes"),
)
