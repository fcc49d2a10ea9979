"""Fig. 8: pictures drawn from one episode's memory: `kpp-paper` reads at keys y ~ p(Y) = N(0, 1),
`kpp-bits` makes new images.

A picture from a memory should show that memory: it should be nearer to the written images than to
as many others. `keys alone` uses the mean of p(z|M, y), without the noise of z. If keys have no
effect, it gives the same picture for every key. Pictures of `kpp-bits` are compared with those of
the same networks with nothing written.
"""

import torch
from jaxtyping import Float
from torch import Tensor

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
from kanerva.lab.experiments.measures import DEAD, interval, mean_distance, pm, rms, sharpness
from kanerva.lab.harness import About, Figures, Finding, Lab
from kanerva.models.base import MemoryModel
from kanerva.pictures import Pictures, sheet

Values = dict[str, Float[Tensor, " _"]]
SHOWN = 16


def measure(made: Pictures, written: Pictures, others: Pictures, binary: bool) -> Values:
    """Measures of pictures. `nearest` is the distance to the nearest written image. `gap` is how
    much farther the nearest of as many other images is. `apart` is the mean distance between two
    pictures. The rest is sharpness."""
    near, far = rms(made, written).amin(dim=1), rms(made, others).amin(dim=1)
    values = {"nearest": near, "gap": far - near} | sharpness(made, binary)
    return values | {"apart": mean_distance(made)[None]}


@torch.no_grad()
def draw(
    model: MemoryModel, written: Pictures, length: int, generator: torch.Generator
) -> dict[str, Pictures]:
    """As many pictures as were written; by how they were made."""
    if not model.remembers:
        return {"": model.generate(None, len(written), generator=generator)}
    episodes = written.unflatten(0, (-1, length))
    memory = model.write(episodes, generator=generator)
    found = {"": model.generate(memory, length, generator=generator)}
    if model.has_blocks:
        nothing = model.empty(len(episodes))
        found["nothing written"] = model.generate(nothing, length, generator=generator)
    else:
        shape = (*episodes.shape[:2], *model.key_shape)
        keys = torch.randn(shape, generator=generator, device=written.device)
        readout = model.read(memory, keys).mean
        found["keys alone"] = model.likelihood.mean(model.decoder(readout))
    return {how: pictures.flatten(0, 1) for how, pictures in found.items()}


def run(lab: Lab) -> Finding:
    count = lab.pick(8, 32)
    values: dict[str, dict[str, list[Tensor]]] = {}
    sizes: dict[str, int] = {}
    parts = [(f"written into the memory: {SHOWN} of {GROUP}", lab.images(GROUP)[:SHOWN])]
    for name in models_for(lab.preset):
        model, length = train_to_draw(lab, name)
        for group in range(count):
            written = lab.images(GROUP, skip=group * GROUP)
            others = lab.images(GROUP, skip=(group + 1) * GROUP)
            noise = lab.noise(name, "random keys", group)
            made = {
                join(name, how): pictures
                for how, pictures in draw(model, written, length, noise).items()
            }
            if group == 0:
                parts += [(label, pictures[:SHOWN]) for label, pictures in made.items()]
            if name == "vae":  # references for all models, added once
                made["unwritten images"] = lab.images(GROUP, skip=(count + 1 + group) * GROUP)
                made["two written, mixed"] = (written + written.roll(1, dims=0)) / 2
            for label, pictures in made.items():
                found = measure(pictures, written, others, is_binary(model))
                sizes[label] = sizes.get(label, 0) + len(pictures)
                for what, value in found.items():  # pictures of one group are not independent
                    mean = value.mean(dim=0, keepdim=True)
                    values.setdefault(label, {}).setdefault(what, []).append(mean)
    figures = {
        "memories": count,
        "of": GROUP,
        "n": sizes,
        "pictures": {
            name: {what: interval(torch.cat(value)) for what, value in each.items()}
            for name, each in values.items()
        },
    }
    return Finding(figures, table(figures), sheet(parts, columns=SHOWN))


def verdict(figures: Figures) -> str:
    """Which models' pictures show the written images, and which models' keys have no effect."""
    found, words = figures["pictures"], []
    for name in (one for one in (RETIRED, *MODELS) if one in found):
        gap, alone = found[name]["gap"], found.get(f"{name}, keys alone")
        no_minus = gap | {"mean": round(gap["mean"], 3) + 0.0}  # never -0.000
        nearer = f"{pm(no_minus)} nearer to what was written"
        if name == "vae":
            words.append(f"vae, which writes nothing: {nearer}.")
        elif alone is not None and alone["apart"]["mean"] < DEAD:
            words.append(
                f"{name}: random keys all give ONE picture ({alone['apart']['mean']:.4f} apart); "
                f"it differs by z's noise, as a VAE's do, {nearer}."
            )
        else:
            shows = gap["mean"] > max(gap["ci95"], DEAD)
            how = "show the memory" if shows else "do NOT show the memory"
            made = "new images" if name == "kpp-bits" else "random keys"
            words.append(f"{name}: {made} {how}, {nearer} than to other images.")
    return " ".join(words)


def table(figures: Figures) -> list[str]:
    """A table with a row for each model and way of making pictures."""
    measures = ("nearest", "gap", "apart", "edges", "grey")
    rows = [["", "n", "nearest written", "others farther", "two apart", "edges", "greyness"]]
    for name, found in figures["pictures"].items():
        cells = [pm(found.get(what)) for what in measures]
        rows.append([name, str(figures["n"][name]), *cells])
    return [
        f"{figures['memories']} groups of {GROUP} images written; root mean square over pixels, "
        "± 95 % over groups",
        *columns(rows, left=1).splitlines(),
        f"others farther: by how much the nearest of {GROUP} unwritten images is farther; 0 for a "
        "model without memory;",
        "keys alone: z at its mean, else drawn; kpp-bits: new images",
    ]


ABOUT = About(
    paper="Fig. 8",
    shows="pictures drawn from a memory: do they show it?",
    claim="Keys drawn from p(Y) read new pictures of the episode out of its memory.",
    quick="about 3 min on two cores",
    full="30 min on a GPU",
    presets=("omniglot", "mazes"),
)
