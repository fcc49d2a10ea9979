"""Fig. 6, left: iterative reading of pictures drawn from a memory, which stays fixed."""

from typing import Any

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from kanerva.evaluation.report import columns
from kanerva.lab.experiments import plots
from kanerva.lab.experiments.baselines import squared_distances
from kanerva.lab.experiments.measures import (
    Estimate,
    clearly_lower,
    estimate,
    greyness,
    over_memories,
    pm,
)
from kanerva.lab.harness import About, Figures, Finding, Lab
from kanerva.memory.heap import Memory
from kanerva.models.base import MemoryModel
from kanerva.shapes import Episode

MODELS = ("kpp-bits", "kpp-paper")
STEPS, DRAWN = 10, 8
SAME = 0.01  # root mean square over pixels: below it two pictures look the same
MEASURES = {  # measure: label and decimals in the table
    "bound": ("bound", 1),
    "nearest": ("distance to the nearest written image", 3),
    "grey": ("greyness", 3),
}


def as_scored(model: MemoryModel, pictures: Episode) -> Episode:
    """Round expected pixels to values in the likelihood's support."""
    levels = 1 if model.config.likelihood == "bernoulli" else 255
    return (pictures * levels).round() / levels


def measure(
    model: MemoryModel,
    memory: Memory,
    written: Episode,
    steps: Float[Tensor, "S B T C H W"],
    lab: Lab,
) -> dict[str, Float[Tensor, "S n"]]:
    """For every picture of every step: the bound given the memory, the root mean square distance to
    the nearest written image, and greyness."""
    measured: dict[str, list[Tensor]] = {name: [] for name in MEASURES}
    for pictures in steps:
        chance = lab.noise("iterative", "bound")  # the same for every step
        terms = model.elbo(as_scored(model, pictures), memory, generator=chance)
        for name, values in (
            ("bound", terms.nll_nats),
            ("nearest", squared_distances(pictures, written).min(dim=-1).values.sqrt()),
            ("grey", greyness(pictures)),
        ):
            measured[name].append(values.flatten())
    return {name: torch.stack(values) for name, values in measured.items()}


def spread(pictures: Episode) -> float:
    """Root mean square distance between two pictures of one memory; 0 if all are the same."""
    count = pictures.shape[1]
    total = squared_distances(pictures, pictures).sum()
    return (total / (len(pictures) * count * (count - 1))).sqrt().item()


def copies(pictures: Episode, recalled: Episode) -> float:
    """The share of pictures that equal the recall of some written image."""
    distances = squared_distances(pictures, recalled).min(dim=-1).values.sqrt()
    return (distances < SAME).float().mean().item()


@torch.no_grad()
def run(lab: Lab) -> Finding:
    figures: Figures = {"steps": STEPS, "models": {}}
    pictures: dict[str, Float[Tensor, "rows columns C H W"]] = {}
    for name in MODELS:
        model, length = lab.trained(name), lab.config(name).episode_length
        written = lab.images(lab.pick(128, 1024) // length * length).unflatten(0, (-1, length))
        memory = model.write(written, generator=lab.noise("iterative", "write"))
        first = model.generate(memory, length, generator=lab.noise("iterative", "keys"))
        steps = torch.cat([first[None], model.recall(memory, first, steps=STEPS)])
        values = measure(model, memory, written, steps, lab)
        recalled = model.recall(memory, written, steps=1)  # recall from true images, to compare
        own = measure(model, memory, written, recalled, lab)

        def means(of: Float[Tensor, " n"], length: int = length) -> Estimate:
            return estimate(over_memories(of, length))

        gains = {what: values[what][0] - values[what][-1] for what in MEASURES}
        figures["models"][name] = {
            "length": length,
            "images": first.shape[0] * first.shape[1],
            "written": {what: means(own[what][0]) for what in MEASURES},
            "copies": copies(steps[-1], recalled[0]),
            "spread": [spread(pictures) for pictures in steps],
            # first picture minus last step, image by image
            "gain": {what: means(gain) for what, gain in gains.items()},
        } | {what: [means(step) for step in values[what]] for what in MEASURES}
        pictures[name] = steps[:, 0, :DRAWN].transpose(0, 1)
    return Finding(figures, table(figures), draw(figures, pictures))


def title(name: str, found: dict[str, Any]) -> str:
    """The model, with its variant in records of kpp's variant generate, which is retired."""
    return f"{name} ({found['variant']})" if found.get("variant") else name


def table(figures: Figures) -> list[str]:
    """A block for each model, a row for each step; step 0 is the picture that was drawn."""
    lines = [
        "± standard error over memories; distances are root mean square over pixels; greyness is "
        "the mean of 4p(1 - p);",
        "spread is between pictures of one memory; the bound is on -ln p(picture | memory), its "
        "pixels rounded.",
        "Step 0 is the picture that was drawn: from a random key, or by kpp-bits as a new image.",
    ]
    for name, found in figures["models"].items():
        rows = [["step", "bound, nats", "nearest written", "greyness", "spread"]]
        for step, apart in enumerate(found["spread"]):
            cells = [pm(found[what][step], digits) for what, (_, digits) in MEASURES.items()]
            rows.append([str(step), *cells, f"{apart:.3f}"])
        cells = [pm(found["written"][what], MEASURES[what][1]) for what in MEASURES]
        rows.append(["written ones, recalled", *cells, ""])
        lines += [
            "",
            f"{title(name, found)}: {found['images']} pictures, {found['length']} images in each "
            f"memory; {found['copies']:.0%} end as what it gives back of one",
            *columns(rows, left=1).splitlines(),
        ]
    return lines


def verdict(figures: Figures) -> str:
    """For each model: whether its pictures improve, how fast, and whether they stay diverse."""
    return " ".join(judge(name, found) for name, found in figures["models"].items())


def judge(name: str, found: dict[str, Any]) -> str:
    """Whether one model's pictures improve by the bound and another measure, and stay diverse."""
    fallen = [what for what in MEASURES if clearly_lower(found["gain"][what])]
    alike = found["spread"][-1] < 0.1 * found["spread"][0]
    improved = "bound" in fallen and len(fallen) > 1 and not alike
    course = []
    for what in MEASURES:
        called, digits = MEASURES[what]
        first, last = (f"{found[what][step]['mean']:.{digits}f}" for step in (0, -1))
        course.append(f"{called} {first} to {last}{' nats' if what == 'bound' else ''}")
    does = "does" if improved else "does NOT"
    words = f"{title(name, found)} {does} improve its pictures: {', '.join(course)},"
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


def draw(figures: Figures, pictures: dict[str, Float[Tensor, "R S C H W"]]) -> Figure:
    """Draw each model's pictures at every step; below, plot the measures."""
    counts = [f"{found['images']} of {name}" for name, found in figures["models"].items()]
    caption = f"below: means and standard errors over memories, {', '.join(counts)}"
    figure = plots.canvas(14.0, 9.6, caption)
    layout: Any = [[name for name in pictures for _ in MEASURES]]  # two above three
    layout.append([what for what in MEASURES for _ in pictures])
    panels = figure.subplot_mosaic(layout, height_ratios=(1.5, 1))
    steps = range(figures["steps"] + 1)
    for name, rows in pictures.items():
        plots.gallery(panels[name], rows, [], [str(step) for step in steps])
        panels[name].set_xlabel(f"{title(name, figures['models'][name])}: step", fontsize=11)
        panels[name].xaxis.set_label_position("top")
    for what in MEASURES:
        axes = panels[what]
        for name, found in figures["models"].items():
            look: Any = {"color": plots.COLOURS[name], "label": title(name, found)}
            plots.draw_line(axes, steps, found[what], marker=".", **look)
            look |= {"label": f"{name}, written ones recalled"}
            axes.axhline(found["written"][what]["mean"], linestyle=":", **look)
        plots.finish_axes(axes, "step", steps, MEASURES[what][0])
        axes.set_ylim(bottom=0)
    plots.legend_below(figure, panels["grey"], 2)
    return figure


ABOUT = About(
    paper="Fig. 6, left",
    shows="random-key generations cleaned over ten steps",
    claim="Inferring a random-key generation again and again, the memory fixed, slowly but clearly "
    "improves it.",
    quick="about 3 min on two cores",
    presets=("mnist", "omniglot"),
)
