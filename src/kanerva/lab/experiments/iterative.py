"""Fig. 6, left: pictures from random keys, read again and again while the memory stays fixed."""

from typing import Any

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from kanerva.lab.experiments.baselines import (
    COLOURS,
    canvas,
    clearly_lower,
    gallery,
    legend_below,
    mean_and_error,
    squared_distances,
    style_axes,
)
from kanerva.lab.harness import Experiment, Figures, Finding, Lab
from kanerva.memory.heap import Memory
from kanerva.models.base import MemoryModel
from kanerva.shapes import Episode

MODELS: dict[str, tuple[str | None, int]] = {"kpp": ("generate", 600), "kpp-paper": (None, 400)}
STEPS, DRAWN = 10, 8
SAME = 0.01  # root mean square over pixels: two pictures that no eye tells apart
MEASURES = {
    "bound": "bound, nats per picture, rounded",
    "grey": "greyness, mean of 4p(1 - p)",
    "nearest": "distance to the nearest written image",
    "change": "distance to the step before",
}
GAINS = ("bound", "grey", "nearest")
SHORT = {"bound": "bound", "grey": "greyness", "nearest": "distance to the nearest written image"}
DECIMALS = {"bound": 1, "grey": 3, "nearest": 3, "change": 3}


def as_scored(model: MemoryModel, pictures: Episode) -> Episode:
    """Expected pixels as pixels that the likelihood is a density of: the nearest ones."""
    levels = 1 if model.config.likelihood == "bernoulli" else 255
    return (pictures * levels).round() / levels


def measure(
    model: MemoryModel,
    memory: Memory,
    written: Episode,
    steps: Float[Tensor, "S B T C H W"],
    lab: Lab,
) -> dict[str, Float[Tensor, "S n"]]:
    """Of every picture of every step: the bound on it given the memory; how grey it is; root mean
    square distance to the nearest written image, and to the picture of the step before."""
    found: dict[str, list[Tensor]] = {name: [] for name in MEASURES}
    for number, pictures in enumerate(steps):
        chance = lab.noise("iterative", "bound")  # the same for every step
        terms = model.elbo(as_scored(model, pictures), memory, generator=chance)
        before = steps[max(number - 1, 0)]
        for name, values in (
            ("bound", terms.nll_nats),
            ("grey", (4 * pictures * (1 - pictures)).flatten(2).mean(-1)),
            ("nearest", squared_distances(pictures, written).min(dim=-1).values.sqrt()),
            ("change", (pictures - before).square().flatten(2).mean(-1).sqrt()),
        ):
            found[name].append(values.flatten())
    return {name: torch.stack(values) for name, values in found.items()}


def spread(pictures: Episode) -> float:
    """Root mean square distance between two pictures of one memory: 0 where all are the same."""
    count = pictures.shape[1]
    return (
        (squared_distances(pictures, pictures).sum() / (len(pictures) * count * (count - 1)))
        .sqrt()
        .item()
    )


def copies(pictures: Episode, recalled: Episode) -> float:
    """The share of pictures that are what the memory gives back of some written image."""
    return (
        (squared_distances(pictures, recalled).min(dim=-1).values.sqrt() < SAME)
        .float()
        .mean()
        .item()
    )


@torch.no_grad()
def run(lab: Lab) -> Finding:
    figures: Figures = {"steps": STEPS, "models": {}}
    pictures: dict[str, Float[Tensor, "rows columns C H W"]] = {}
    for name, (variant, training) in MODELS.items():
        model = lab.trained(name, variant, steps=training)
        length = lab.config(name, variant).episode_length
        written = lab.images(lab.pick(128, 1024)).unflatten(0, (-1, length))
        memory = model.write(written, generator=lab.noise("iterative", "write"))
        first = model.generate(memory, length, generator=lab.noise("iterative", "keys"))
        steps = torch.cat([first[None], model.recall(memory, first, steps=STEPS)])
        values = measure(model, memory, written, steps, lab)
        again = model.recall(memory, written, steps=1)  # how good a picture can get here
        own = measure(model, memory, written, again, lab)
        figures["models"][name] = {
            "variant": variant,
            "length": length,
            "images": first.shape[0] * first.shape[1],
            "written": {measure: mean_and_error(own[measure][0]) for measure in GAINS},
            "copies": copies(steps[-1], again[0]),
            "spread": [spread(pictures) for pictures in steps],
            "gain": {  # of the last step over the first picture, image for image
                measure: mean_and_error(values[measure][0] - values[measure][-1])
                for measure in GAINS
            },
        } | {measure: [mean_and_error(step) for step in values[measure]] for measure in MEASURES}
        pictures[name] = steps[:, 0, :DRAWN].transpose(0, 1)
    return Finding(figures, table(figures), {"": draw(figures, pictures)})


# In words


def table(figures: Figures) -> list[str]:
    """A block for each model, a row for each step; step 0 is the picture from a random key."""
    lines = [
        "± standard error over pictures; distances are root mean square over pixels; greyness is "
        "the mean of 4p(1 - p);",
        "spread is between pictures of one memory; the bound is on -ln p(picture | memory), its "
        "pixels rounded.",
        "Step 0 is the picture from a random key.",
    ]
    for name, found in figures["models"].items():
        lines += [
            "",
            f"{title(name, found)}: {found['images']} pictures, {found['length']} images in each "
            f"memory; {found['copies']:.0%} end as what it gives back of one",
            f"{'step':<22}{'bound, nats':>18}{'greyness':>18}{'nearest written':>18}"
            f"{'step before':>18}{'spread':>12}",
        ]
        for step in range(figures["steps"] + 1):
            cells = [entry(measure, found[measure][step]) for measure in MEASURES]
            lines.append(f"{step:<22}" + "".join(cells) + f"{found['spread'][step]:>12.3f}")
        cells = [entry(measure, found["written"][measure]) for measure in GAINS]
        lines.append(f"{'written ones, recalled':<22}" + "".join(cells))
    return lines


def title(name: str, found: dict[str, Any]) -> str:
    return f"{name} ({found['variant']})" if found["variant"] else name


def entry(measure: str, value: dict[str, float]) -> str:
    """One cell of the table."""
    decimals = DECIMALS[measure]
    text = f"{value['mean']:.{decimals}f} ± {value['se']:.{decimals}f}"
    return f"{text:>18}"


def course(found: dict[str, Any]) -> str:
    """Each measure, from the first picture to the last."""
    words = []
    for measure, unit in (("bound", " nats"), ("nearest", ""), ("grey", "")):
        first, last = (found[measure][step]["mean"] for step in (0, -1))
        digits = DECIMALS[measure]
        words.append(f"{SHORT[measure]} {first:.{digits}f} to {last:.{digits}f}{unit}")
    return ", ".join(words)


def verdict(figures: Figures) -> str:
    """For each model: do pictures improve, how much of it at once, and what do they become?"""
    return " ".join(judge(name, found) for name, found in figures["models"].items())


def judge(name: str, found: dict[str, Any]) -> str:
    """Whether one model's pictures improve: by the bound and another measure, staying diverse."""
    fallen = [measure for measure in GAINS if clearly_lower(found["gain"][measure])]
    alike = found["spread"][-1] < 0.1 * found["spread"][0]
    improved = "bound" in fallen and len(fallen) > 1 and not alike
    does = "does" if improved else "does NOT"
    words = f"{title(name, found)} {does} improve its pictures: {course(found)},"
    if alike:
        first, last = found["spread"][0], found["spread"][-1]
        return f"{words} and all of a memory become the same (spread {first:.3f} to {last:.3f})."
    words += f" {found['copies']:.0%} becoming what the memory gives back of a written image"
    if improved:
        later = found["bound"][1]["mean"] - found["bound"][-1]["mean"]
        at_once = 1 - later / found["gain"]["bound"]["mean"]
        words += f"; {at_once:.0%} of the gain in nats comes with the first step"
        words += ", so not slowly" if at_once > 0.9 else ""
    return f"{words}."


# In pictures


def draw(figures: Figures, pictures: dict[str, Float[Tensor, "R S C H W"]]) -> Figure:
    """Each model's pictures, step by step; below, what was measured of them."""
    figure = canvas(14.0, 9.6)
    panels = figure.subplot_mosaic(  # two above three
        [
            [name for name in pictures for _ in GAINS],
            [measure for measure in GAINS for _ in pictures],
        ],
        height_ratios=(1.5, 1),
    )
    steps = range(figures["steps"] + 1)
    for name, rows in pictures.items():
        gallery(panels[name], rows, [], [str(step) for step in steps])
        panels[name].set_xlabel(f"{title(name, figures['models'][name])}: step", fontsize=11)
        panels[name].xaxis.set_label_position("top")
    for measure in GAINS:
        axes = panels[measure]
        for name, found in figures["models"].items():
            mean = [step["mean"] for step in found[measure]]
            error = [step["se"] for step in found[measure]]
            colour = COLOURS[name]
            axes.errorbar(
                steps, mean, error, label=title(name, found), color=colour, marker=".", capsize=2
            )
            best = found["written"][measure]["mean"]
            axes.axhline(best, color=colour, linestyle=":", label=f"{name}, written ones recalled")
        axes.set_title(MEASURES[measure], fontsize=10)
        style_axes(axes, "step", steps)
        axes.set_ylim(bottom=0)
    legend_below(figure, panels[GAINS[-1]], 2)
    counts = [f"{found['images']} of {name}" for name, found in figures["models"].items()]
    said = f"below: means and standard errors over pictures, {', '.join(counts)}"
    figure.suptitle(said, fontsize=10)
    return figure


EXPERIMENT = Experiment(
    name="iterative",
    paper="Fig. 6, left",
    shows="random-key generations cleaned over ten steps",
    claim="Inferring a random-key generation again and again, the memory fixed, slowly but clearly "
    "improves it.",
    run=run,
    verdict=verdict,
    presets=("mnist", "omniglot"),
)
