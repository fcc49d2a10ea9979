"""Beyond: keys as a Markov chain. "Future work will investigate this form of locally perturbed
generation through an MCMC lens" (§4.1.1).

The target is the model's own density over keys, given its memory M and a cue: the upper half of an
image that was written,

    pi(y) = p(y) p(x_seen | z(y), M)^power / const,    z(y) the mean of p(z | M, y)

power 1 is the posterior of the key, 0 its prior, and in between lies a density that wanders over
the memory and lingers where pictures look like the cue. The paper's y + eps, eps ~ N(0, 0.1), is
the proposal of a random walk; Langevin's adds half its variance times the slope of ln pi, which
soft reads have. Both are corrected by Metropolis, so both have pi as their limit; and since keys
have two dimensions pi can be had exactly, on a grid, to compare with.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from kanerva.distributions import as_normal, as_uniform
from kanerva.evaluation.report import columns
from kanerva.lab.experiments.key_density import (
    Target,
    draw_independently,
    evaluate_on_grid,
    grid_points,
    histogram,
    sum_by_cell,
    total_variation,
)
from kanerva.lab.experiments.mcmc import Chains, effective_sample_size, run_chains
from kanerva.lab.experiments.measures import interval, pm
from kanerva.lab.experiments.plots import canvas, gallery
from kanerva.lab.harness import About, Figures, Finding, Lab
from kanerva.lab.paper_figures import KEY_NOISE
from kanerva.models.kpp import Kpp
from kanerva.pictures import tile

TEMPERED = 1 / 32
QUICK = (400, 100, 96)  # steps, warm-up, and the side of the grid of the exact density
FULL = (5000, 1000, 192)
WRITTEN = 32
CHAINS = 4  # for each cue
RIGHT = 0.1  # of total variation beyond what as many independent draws have
PAPERS_WALK = f"random walk, {KEY_NOISE}"
SAMPLERS = {  # label: the acceptance its step is fitted to, what is best in few dimensions
    PAPERS_WALK: None,
    "random walk, fitted": 0.35,
    "Langevin, fitted": 0.57,
}
COLUMNS = 12  # pictures along a chain
MOSAIC = 16  # pictures along the side of the map
BOX = (-1, 1, 1, -1)  # the map's edges
COARSE, FINE = 8, 24  # cells along the map's side: the memory's own; within one of them
TARGETS = {  # label: power; whether chains start where the image was written; cells to compare by
    "prior": (0.0, False, COARSE),
    "tempered": (TEMPERED, False, COARSE),
    "posterior": (1.0, True, FINE),
    "posterior, lost": (1.0, False, COARSE),
}


def run(lab: Lab) -> Finding:
    model = lab.trained("kpp", "generate")
    assert isinstance(model, Kpp)
    model.requires_grad_(False)
    images = lab.images(WRITTEN)
    memory = model.write(images, generator=lab.noise("write"))
    count = lab.pick(8, WRITTEN)
    steps, warmup, side = lab.pick(QUICK, FULL)
    cues, places = images[:count], memory.places[:count]
    target = Target(model, model.as_maps(memory), cues.repeat_interleave(CHAINS, dim=0), 1.0)
    levels = evaluate_on_grid(target, cues, side)
    exact = {label: (power * levels).softmax(dim=1) for label, (power, *_) in TARGETS.items()}
    reach = 1 / memory.grid.columns
    chains, found = {}, {}
    for label, (_, _, cells) in TARGETS.items():
        chains[label] = walk_to(lab, label, target, places, steps, warmup)
        found[label] = {
            name: compare_with_exact(
                made, exact[label], places, reach, cells, lab.noise("draws", label, name)
            )
            for name, made in chains[label].items()
        }
    figures = {
        "cues": count,
        "chains": len(target.cues),
        "steps": steps,
        "warmup": warmup,
        "tempered_power": TEMPERED,
        "targets": found,
    }
    one = typical_cue(exact["tempered"])
    walks = chains["tempered"].items()
    paths = {name: made.keys[:, one * CHAINS] for name, made in walks if name != PAPERS_WALK}
    picture = draw_walk(target, cues[one], places[one], exact["tempered"][one], paths)
    return Finding(figures, table(figures), picture)


def walk_to(
    lab: Lab,
    label: str,
    target: Target,
    places: Float[Tensor, "cues 2"],
    steps: int,
    warmup: int,
) -> dict[str, Chains]:
    """Chains of every sampler towards one of the TARGETS."""
    power, at_home, _ = TARGETS[label]
    home = as_normal(places).repeat_interleave(CHAINS, dim=0)
    anywhere = torch.randn(home.shape, generator=lab.noise("start"), device=lab.device)
    return {
        name: run_chains(
            replace(target, power=power),
            home if at_home else anywhere,
            langevin=name.startswith("Langevin"),
            step=KEY_NOISE,
            steps=steps,
            warmup=warmup,
            goal=goal,
            generator=lab.noise("walk", label, name),
        )
        for name, goal in SAMPLERS.items()
    }


def typical_cue(exact: Float[Tensor, "cues points"]) -> int:
    """A cue that leaves its key neither the least nor the most uncertain."""
    entropy = -(exact * exact.clamp(min=1e-30).log()).sum(dim=1)
    return int(entropy.median(dim=0).indices)


def compare_with_exact(
    chains: Chains,
    exact: Float[Tensor, "cues points"],
    places: Float[Tensor, "cues 2"],
    reach: float,
    cells: int,
    generator: torch.Generator,
) -> dict[str, Any]:
    """Chains beside the exact density of each cue, given as masses on the grid; and beside as many
    independent draws of it as the chains amount to."""
    cues, side = len(exact), math.isqrt(exact.shape[1])
    spots = as_uniform(chains.keys)  # (S, chains, 2)
    mine = spots.unflatten(1, (cues, -1)).permute(1, 0, 2, 3).flatten(1, 2)  # (cues, n, 2)
    masses = sum_by_cell(exact, side, cells)
    sizes = torch.stack([effective_sample_size(spots[..., axis]) for axis in range(2)]).amin(dim=0)
    draws = max(1, round(sizes.sum().item() / cues))
    by_draws = draw_independently(masses, draws, generator)
    points = grid_points(side, exact.device)
    home = ((points - places[:, None]).abs().amax(dim=2) < reach).float()  # (cues, n)
    return {
        "acceptance": chains.acceptance,
        "step": chains.step.log().mean().exp().item(),
        "worth_per_1000": 1000 * sizes.mean().item() / len(spots),  # as records call it
        "variation": interval(total_variation(histogram(mine, cells), masses)),
        "draws": draws,
        "variation_of_draws": interval(total_variation(by_draws, masses)),
        "at_home": ((mine - places[:, None]).abs().amax(dim=2) < reach).float().mean().item(),
        "exactly_at_home": (exact * home).sum(dim=1).mean().item(),
    }


def verdict(figures: Figures) -> str:
    """Do chains reach their target, and is a key moved by 0.1 still where density is high?"""
    found, reached = figures["targets"], []
    for label in ("tempered", "posterior"):
        for kind in ("random walk", "Langevin"):
            one = found[label][f"{kind}, fitted"]
            off, draws = one["variation"]["mean"], one["variation_of_draws"]["mean"]
            reaches = "reaches" if off < draws + RIGHT else "does NOT reach"
            apart = f"{off:.2f} off, {one['draws']} independent draws {draws:.2f}"
            reached.append(f"{kind} {reaches} the {label} density ({apart})")
    words = [f"With fitted steps: {', '.join(reached)}."]
    rates = [found[label][PAPERS_WALK]["acceptance"] for label in ("prior", "posterior")]
    words.append(
        f"The paper's step of {KEY_NOISE} stays where p(y) is high ({rates[0]:.0%} accepted); "
        f"from where an image lies, given its upper half, {rates[1]:.0%} are accepted: "
        + ("it stays with it." if rates[1] > 0.5 else "most such steps do NOT stay with it.")
    )
    lost = found["posterior, lost"]
    best = max(lost, key=lambda name: lost[name]["at_home"])
    words.append(
        f"Started anywhere, the best walk ({best}) spends {lost[best]['at_home']:.0%} of its steps "
        f"at the image's place, where {lost[best]['exactly_at_home']:.0%} of the mass is."
    )
    return " ".join(words)


def table(figures: Figures) -> list[str]:
    """A row for each target and sampler."""
    heads = "target,sampler,step,accepted,ESS/1000,off,draws,home,of"
    rows = [list[str](heads.split(","))]
    for label, samplers in figures["targets"].items():
        for name, one in samplers.items():
            start = [f"{one['step']:.3f}", f"{one['acceptance']:.2f}"]
            apart = [pm(one[what]) for what in ("variation", "variation_of_draws")]
            home = [f"{one[what]:.2f}" for what in ("at_home", "exactly_at_home")]
            rows.append([label, name, *start, f"{one['worth_per_1000']:.1f}", *apart, *home])
    return [
        f"{figures['cues']} cues, {CHAINS} chains of {figures['steps']} steps each after "
        f"{figures['warmup']} of warm-up; tempered: power 1/{1 / TEMPERED:.0f}",
        *columns(rows, left=2).splitlines(),
        "posterior: started where the image lies; lost: anywhere. ESS/1000: effective sample size "
        "of 1,000 steps.",
        f"off: total variation from the exact density on {COARSE}x{COARSE} cells (posterior: "
        f"{FINE}x{FINE}), ± 95 % over cues;",
        "draws: of as many independent draws as the ESS. home: share in the image's cell; of: "
        "exactly",
    ]


def draw_walk(
    target: Target,
    image: Float[Tensor, "C H W"],
    place: Float[Tensor, "2"],
    exact: Float[Tensor, " n"],
    paths: dict[str, Float[Tensor, "S 2"]],
) -> Figure:
    """The density of one cue's key, given as masses on a grid; chains over what the memory shows at
    every place; below, the cue, its image, and pictures along each chain."""
    figure = canvas(11.5, 7.2)
    layout: Any = [["density", *paths], ["along"] * (1 + len(paths))]
    panels = figure.subplot_mosaic(layout, height_ratios=(3.6, 1.9))
    side = math.isqrt(len(exact))
    panels["density"].imshow(exact.view(side, side).cpu().numpy(), extent=BOX, cmap="magma")
    panels["density"].plot(*place.cpu().tolist(), "x", color="#7fd4ff", ms=9, mew=2)
    title = "exact density of the key, tempered;\nx: where the image lies"
    panels["density"].set_title(title, fontsize=10)
    shown = target.pictures(as_normal(grid_points(MOSAIC, exact.device)))
    cue, rows = image.clone(), []
    cue[:, cue.shape[1] // 2 :] = 0.4  # hidden: grey
    for name, keys in paths.items():
        marks = torch.linspace(0, len(keys) - 1, COLUMNS).round().long()
        panels[name].imshow(tile(shown, MOSAIC, scale=1), extent=BOX, alpha=0.6)
        panels[name].set_facecolor("black")  # dimmed: paths lie over it
        draw_path(panels[name], keys, marks)
        title = f"{name}: {len(keys)} steps over\nwhat the memory shows"
        panels[name].set_title(title, fontsize=10)
        rows.append(torch.cat([cue[None], image[None], target.pictures(keys[marks])]))
    for name in ("density", *paths):
        panels[name].set(xticks=[], yticks=[])
    numbers = [str(number) for number in range(1, COLUMNS + 1)]
    gallery(panels["along"], torch.stack(rows), list(paths), ["cue", "image", *numbers])
    return figure


def draw_path(axes: Axes, keys: Float[Tensor, "S 2"], marks: Tensor) -> None:
    """A chain as a line, with the steps whose pictures are shown marked and numbered."""
    spots = as_uniform(keys).cpu().numpy()
    axes.plot(*spots.T, "-", color="#ffb000", lw=0.8, alpha=0.6)
    look = {"textcoords": "offset points", "fontsize": 8, "color": "white", "fontweight": "bold"}
    for number, (x, y) in enumerate(spots[marks.numpy()], 1):
        axes.plot(x, y, "o", color="#ffb000", ms=4)
        aside = (-12 if x > 0.9 else 3, -10 if y < -0.9 else 3)  # within the frame
        axes.annotate(str(number), (x, y), aside, **look)


ABOUT = About(
    paper="beyond",
    shows="Langevin and random walks over keys",
    claim="Moved keys are steps of a Markov chain: with soft reads it can be corrected to the "
    "model's own density, and walks over what the memory holds.",
    full="20 min on a GPU",
    presets=("mnist",),
)
