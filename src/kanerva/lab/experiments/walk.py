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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from kanerva.distributions import as_normal, as_uniform
from kanerva.evaluation.noise import observed
from kanerva.lab.experiments.perturb import summary
from kanerva.lab.harness import Experiment, Finding, Lab, Pixels
from kanerva.models import Kpp
from kanerva.pictures import tile
from kanerva.shapes import DecoderOutput

Points = Float[Tensor, "chains D"]
Density = Callable[[Points], Float[Tensor, " chains"]]

PAPERS_STEP = 0.1
TEMPERED = 1 / 32
GOALS = {"random walk": 0.35, "Langevin": 0.57}  # of acceptance: what is best in few dimensions
QUICK = (400, 100, 96)  # steps, warm-up, and the side of the grid of the exact density
FULL = (5000, 1000, 192)
WRITTEN = 32
RIGHT = 0.1  # of total variation beyond what independent draws of the same worth have
COLUMNS = 12  # pictures along a chain
MOSAIC = 16  # pictures along the side of the map


# Samplers


@dataclass(frozen=True)
class Chains:
    """What chains visited after their warm-up."""

    keys: Float[Tensor, "S chains D"]
    accepted: Bool[Tensor, "S chains"]
    step: Float[Tensor, " chains"]

    @property
    def acceptance(self) -> float:
        return self.accepted.float().mean().item()


def slope(density: Density, keys: Points) -> tuple[Float[Tensor, " chains"], Points]:
    """ln pi and its gradient, chain by chain."""
    with torch.enable_grad():
        at = keys.detach().requires_grad_(True)
        value = density(at)
        (gradient,) = torch.autograd.grad(value.sum(), at)
    return value.detach(), gradient


def walked(
    density: Density,
    start: Points,
    *,
    langevin: bool,
    step: float,
    steps: int,
    warmup: int,
    goal: float | None,
    generator: torch.Generator,
) -> Chains:
    """Random-walk Metropolis, or Langevin's with its Metropolis correction, all chains at once.

    A proposal is y + step * noise, for Langevin y + step^2 / 2 * slope + step * noise. With a
    `goal` each chain fits its step to that acceptance while it warms up; then steps are fixed, so
    what is kept is a Markov chain with limit pi.
    """

    def look(keys: Points) -> tuple[Tensor, Tensor]:
        if langevin:
            return slope(density, keys)
        with torch.no_grad():
            return density(keys), torch.zeros_like(keys)

    here = start
    value, drift = look(here)
    size = torch.full_like(value, step)
    kept, accepted = [], []
    for turn in range(warmup + steps):
        noise = torch.randn(here.shape, generator=generator, device=here.device)
        wide = size[:, None]
        there = here + wide**2 / 2 * drift + wide * noise
        new_value, new_drift = look(there)
        back = (here - there - wide**2 / 2 * new_drift) / wide  # the noise that would lead back
        ratio = new_value - value + (noise.square() - back.square()).sum(dim=1) / 2
        chance = torch.rand(ratio.shape, generator=generator, device=ratio.device)
        yes = chance.log() < ratio
        here = torch.where(yes[:, None], there, here)
        value, drift = (
            torch.where(yes, new_value, value),
            torch.where(yes[:, None], new_drift, drift),
        )
        if turn >= warmup:
            kept.append(here)
            accepted.append(yes)
        elif goal is not None:
            size = size * ((ratio.exp().clamp(max=1).nan_to_num() - goal) / (turn + 1) ** 0.6).exp()
    return Chains(torch.stack(kept), torch.stack(accepted), size)


def effective(series: Float[Tensor, "S chains"]) -> Float[Tensor, " chains"]:
    """How many independent draws a chain is worth: S over its autocorrelation time, summed up to
    where two neighbouring lags are negative together (Geyer 1992)."""
    length = len(series)
    centred = series.double() - series.double().mean(dim=0)
    padded = torch.fft.rfft(centred, n=2 * length, dim=0)
    lags = torch.fft.irfft(padded.abs().square(), n=2 * length, dim=0)[:length]
    lags = lags / lags[:1].clamp(min=1e-12)
    pairs = lags[: length // 2 * 2].unflatten(0, (-1, 2)).sum(dim=1)
    first = (pairs > 0).long().cumprod(dim=0)
    time = (2 * (pairs * first).sum(dim=0) - 1).clamp(min=1)
    moved = (series != series[:1]).any(dim=0)  # a chain that never did is worth one draw
    return torch.where(moved, length / time, 1.0).to(series.dtype)


# The target, and the same on a grid


@dataclass(frozen=True)
class Target:
    """ln pi, up to a constant, for chains that have a cue each."""

    model: Kpp
    maps: Tensor
    cues: Pixels  # one for each chain
    power: float

    def outputs(self, keys: Points) -> DecoderOutput:
        reading = self.model.readout(self.model.traces(self.maps, keys[None]), sample=False)
        return self.model.decoder(reading.readout)

    def pictures(self, keys: Points) -> Pixels:
        with torch.no_grad():
            return self.model.likelihood.mean(self.outputs(keys))[0]

    def __call__(self, keys: Points) -> Float[Tensor, " chains"]:
        prior = -keys.square().sum(dim=1) / 2
        if self.power == 0:
            return prior
        return prior + self.power * seen_log_prob(self.model, self.outputs(keys), self.cues)


def seen_log_prob(model: Kpp, outputs: DecoderOutput, images: Pixels) -> Float[Tensor, " n"]:
    """ln p of the upper half of each image."""
    return model.likelihood.log_prob(
        outputs, images[None], observed("lower_half_hidden", images[None])
    )[0]


def grid_points(side: int, device: torch.device) -> Float[Tensor, "n 2"]:
    """The middles of side x side equal squares of [-1, 1]^2, row by row."""
    line = (2 * torch.arange(side, device=device) + 1) / side - 1
    return torch.stack(torch.meshgrid(line, line, indexing="xy"), dim=-1).flatten(0, 1)


@torch.no_grad()
def on_grid(target: Target, images: Pixels, side: int) -> Float[Tensor, "cues points"]:
    """ln p(x_seen | y, M) of each cue at every point of a grid. There p(y) is even."""
    found = []
    for keys in as_normal(grid_points(side, target.maps.device)).split(512):
        outputs = target.outputs(keys)
        each = [
            seen_log_prob(target.model, outputs, one.expand(len(keys), -1, -1, -1))
            for one in images
        ]
        found.append(torch.stack(each))
    return torch.cat(found, dim=1)


def in_cells(
    masses: Float[Tensor, "cues points"], side: int, cells: int
) -> Float[Tensor, "cues c"]:
    """Masses at the points of a grid, summed up by cell."""
    per = side // cells
    square = masses.view(-1, cells, per, cells, per)
    return square.sum(dim=(2, 4)).flatten(1)


def cell_of(points: Float[Tensor, "*n 2"], cells: int) -> Tensor:
    column, row = (((points + 1) / 2 * cells).long().clamp(0, cells - 1)).unbind(-1)
    return row * cells + column


def histogram(places: Float[Tensor, "cues n 2"], cells: int) -> Float[Tensor, "cues c"]:
    """The share of some places in each cell."""
    index = cell_of(places, cells)
    ones = torch.ones(index.shape, device=places.device)
    return (
        torch.zeros(len(index), cells**2, device=places.device).scatter_add(1, index, ones)
        / index.shape[1]
    )


def variation(
    one: Float[Tensor, "cues c"], other: Float[Tensor, "cues c"]
) -> Float[Tensor, " cues"]:
    """Total variation: half the sum of differences; 0 the same, 1 disjoint."""
    return (one - other).abs().sum(dim=1) / 2


# The experiment

SAMPLERS: dict[str, tuple[str, float | None]] = {  # label: kind, acceptance its step is fitted to
    f"random walk, {PAPERS_STEP}": ("random walk", None),
    "random walk, fitted": ("random walk", GOALS["random walk"]),
    "Langevin, fitted": ("Langevin", GOALS["Langevin"]),
}
COARSE, FINE = 8, 24  # cells along the map's side: the memory's own; within one of them
TARGETS = {  # label: power; whether chains start where the image was written; cells to compare by
    "prior": (0.0, False, COARSE),
    "tempered": (TEMPERED, False, COARSE),
    "posterior": (1.0, True, FINE),
    "posterior, lost": (1.0, False, COARSE),
}


def compared(
    chains: Chains,
    exact: Float[Tensor, "cues points"],
    places: Float[Tensor, "cues 2"],
    reach: float,
    cells: int,
    generator: torch.Generator,
) -> dict[str, Any]:
    """Chains beside the exact density of each cue, given as masses on the grid; and beside as many
    independent draws of it as the chains say they are worth."""
    cues, side = len(exact), math.isqrt(exact.shape[1])
    spots = as_uniform(chains.keys)  # (S, chains, 2)
    mine = spots.unflatten(1, (cues, -1)).permute(1, 0, 2, 3).flatten(1, 2)  # (cues, n, 2)
    masses = in_cells(exact, side, cells)
    worth = torch.stack([effective(spots[..., axis]) for axis in range(2)]).amin(dim=0)
    draws = max(1, round(worth.sum().item() / cues))
    points = grid_points(side, exact.device)
    home = ((points - places[:, None]).abs().amax(dim=2) < reach).float()  # (cues, n)
    return {
        "acceptance": chains.acceptance,
        "step": chains.step.log().mean().exp().item(),
        "worth_per_1000": 1000 * worth.mean().item() / len(spots),
        "variation": summary(variation(histogram(mine, cells), masses)),
        "draws": draws,
        "variation_of_draws": summary(variation(independent(masses, draws, generator), masses)),
        "at_home": ((mine - places[:, None]).abs().amax(dim=2) < reach).float().mean().item(),
        "exactly_at_home": (exact * home).sum(dim=1).mean().item(),
    }


def independent(
    masses: Float[Tensor, "cues c"], count: int, generator: torch.Generator
) -> Float[Tensor, "cues c"]:
    """Shares of so many independent draws."""
    drawn = torch.multinomial(masses, count, replacement=True, generator=generator)
    ones = torch.ones_like(drawn, dtype=masses.dtype)
    return torch.zeros_like(masses).scatter_add(1, drawn, ones) / count


def verdict(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Do chains reach their target, and is a key moved by 0.1 still where density is high?"""
    words = []
    for label in ("tempered", "posterior"):
        for name in ("random walk, fitted", "Langevin, fitted"):
            one = found[label][name]
            off, draws = one["variation"]["mean"], one["variation_of_draws"]["mean"]
            reaches = "reaches" if off < draws + RIGHT else "does NOT reach"
            words.append(
                f"{SAMPLERS[name][0]} {reaches} the {label} density ({off:.2f} off, {one['draws']} "
                f"independent draws {draws:.2f})"
            )
    words = [f"{', '.join(words)}."]
    words[0] = words[0][0].upper() + words[0][1:]
    paper = f"random walk, {PAPERS_STEP}"
    rates = [found[label][paper]["acceptance"] for label in ("prior", "posterior")]
    words.append(
        f"The paper's step of {PAPERS_STEP} stays where p(y) is high ({rates[0]:.0%} accepted); "
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


def run(lab: Lab) -> Finding:
    model = lab.trained("kpp", "generate", steps=600)
    assert isinstance(model, Kpp) and model.placer.grid is not None
    model.requires_grad_(False)
    images = lab.images(WRITTEN)
    memory = model.write(images, generator=lab.noise("write"))
    count, each = lab.pick(8, WRITTEN), 4
    steps, warmup, side = lab.pick(QUICK, FULL)
    cues, places = images[:count], memory.places[:count]
    reach = 1 / model.placer.grid.columns
    many = cues.repeat_interleave(each, dim=0)
    start = torch.randn(len(many), 2, generator=lab.noise("start"), device=lab.device)
    home = as_normal(places).repeat_interleave(each, dim=0)
    levels = on_grid(Target(model, model.as_maps(memory), many, 1.0), cues, side)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    exacts, chains = {}, {}
    for label, (power, at_home, cells) in TARGETS.items():
        target = Target(model, model.as_maps(memory), many, power)
        exacts[label] = (power * levels).softmax(dim=1)
        found[label] = {}
        for name, (kind, goal) in SAMPLERS.items():
            made = walked(
                target,
                home if at_home else start,
                langevin=kind == "Langevin",
                step=PAPERS_STEP,
                steps=steps,
                warmup=warmup,
                goal=goal,
                generator=lab.noise("walk", label, name),
            )
            chains[label, name] = made
            noise = lab.noise("draws", label, name)
            found[label][name] = compared(made, exacts[label], places, reach, cells, noise)
    figures = {
        "cues": count,
        "chains": len(many),
        "steps": steps,
        "warmup": warmup,
        "tempered_power": TEMPERED,
        "targets": found,
    }
    lines = [
        f"{count} cues, {each} chains of {steps} steps each after {warmup} of warm-up; tempered: "
        f"power 1/{1 / TEMPERED:.0f}",
        f"{'target':<17}{'sampler':<21}{'step':>7}{'accepted':>10}{'worth/1000':>12}{'off':>15}"
        f"{'draws':>15}{'home':>6}{'of':>6}",
    ]
    for label, samplers in found.items():
        for name, one in samplers.items():
            apart, drawn = (
                f"{one[what]['mean']:.3f} ±{one[what]['ci95']:.3f}"
                for what in ("variation", "variation_of_draws")
            )
            lines.append(
                f"{label:<17}{name:<21}{one['step']:7.3f}{one['acceptance']:10.2f}"
                f"{one['worth_per_1000']:12.1f}{apart:>15}{drawn:>15}{one['at_home']:6.2f}"
                f"{one['exactly_at_home']:6.2f}"
            )
    lines += [
        "posterior: started where the image lies; lost: anywhere. worth/1000: of 1,000 steps, in "
        "independent draws.",
        f"off: total variation from the exact density on {COARSE}x{COARSE} cells (posterior: "
        f"{FINE}x{FINE}), ± 95 % over cues;",
        "draws: of as many independent draws as a chain is worth. home: share in the image's cell; "
        "of: exactly",
    ]
    wide = -(exacts["tempered"] * exacts["tempered"].clamp(min=1e-30).log()).sum(dim=1)
    shown = int(wide.median(dim=0).indices)  # a cue neither the vaguest nor the clearest
    look = Look(
        Target(model, model.as_maps(memory), many, TEMPERED),
        cues[shown],
        places[shown],
        exacts["tempered"][shown],
    )
    paths = {name: chains["tempered", name].keys[:, shown * each] for name in list(SAMPLERS)[1:]}
    return Finding(
        figures,
        lines,
        verdict(found),
        {"": look.picture(paths)},
        {"": look.film(paths["Langevin, fitted"], lab.pick(40, 60))},
    )


# Pictures


@dataclass(frozen=True)
class Look:
    """What a chain saw on its way."""

    target: Target
    image: Float[Tensor, "C H W"]
    place: Float[Tensor, "2"]
    exact: Float[Tensor, " n"]

    def mosaic(self, width: int) -> Image.Image:
        """What the memory shows at every place: pictures of a grid of keys."""
        made = self.target.pictures(as_normal(grid_points(MOSAIC, self.exact.device)))
        rows = [torch.cat(list(row), dim=-1) for row in made.unflatten(0, (MOSAIC, MOSAIC))]
        whole = torch.cat(rows, dim=-2).cpu().clamp(0, 1)
        pixels = (whole.expand(3, -1, -1) * 255).round().to(torch.uint8).permute(1, 2, 0)
        resized = Image.fromarray(pixels.numpy()).resize((width, width), Image.Resampling.BOX)
        return Image.blend(
            resized, Image.new("RGB", resized.size), 0.4
        )  # dimmed: paths lie over it

    def cue(self) -> Float[Tensor, "C H W"]:
        """The image, its lower half grey."""
        hidden = self.image.clone()
        hidden[:, hidden.shape[1] // 2 :] = 0.4
        return hidden

    def picture(self, paths: dict[str, Float[Tensor, "S 2"]]) -> Figure:
        """The exact density, chains over the memory's map, and pictures along them."""
        figure = Figure(figsize=(11.5, 7.2), layout="constrained")
        halves = figure.add_gridspec(2, 1, height_ratios=(3.6, 1.9))
        top, bottom = (figure.add_subfigure(half) for half in (halves[0], halves[1]))
        axes = top.subplots(1, 1 + len(paths))
        side = math.isqrt(len(self.exact))
        box = (-1, 1, 1, -1)
        axes[0].imshow(self.exact.view(side, side).cpu().numpy(), extent=box, cmap="magma")
        axes[0].set_title(
            "exact density of the key, tempered;\nx: where the image lies", fontsize=10
        )
        axes[0].plot(*self.place.cpu().tolist(), "x", color="#7fd4ff", ms=9, mew=2)
        back = self.mosaic(640)
        strips = [("cue", self.cue()[None]), ("image", self.image[None])]
        for axis, (name, keys) in zip(axes[1:], paths.items(), strict=True):
            spots = as_uniform(keys).cpu().numpy()
            marks = torch.linspace(0, len(keys) - 1, COLUMNS).round().long()
            axis.imshow(back, extent=box)
            axis.plot(spots[:, 0], spots[:, 1], "-", color="#ffb000", lw=0.8, alpha=0.6)
            at = spots[marks.numpy()]
            axis.plot(at[:, 0], at[:, 1], "o", color="#ffb000", ms=4)
            for number, (x, y) in enumerate(at, 1):
                aside = (-12 if x > 0.9 else 3, -10 if y < -0.9 else 3)  # within the frame
                axis.annotate(
                    str(number),
                    (x, y),
                    aside,
                    textcoords="offset points",
                    fontsize=8,
                    color="#ffffff",
                    fontweight="bold",
                )
            axis.set_title(f"{name}: {len(keys)} steps over\nwhat the memory shows", fontsize=10)
            strips.append((name, self.target.pictures(keys[marks])))
        for axis in axes:
            axis.set_xticks([])
            axis.set_yticks([])
        grid = bottom.add_gridspec(2, COLUMNS + 2)
        for row, (name, pictures) in enumerate(strips[2:]):
            first = bottom.add_subplot(grid[row, 0])
            lead = strips[row]
            cells = [(first, lead[0], lead[1][0])]
            for number, picture in enumerate(pictures, 1):
                axis = bottom.add_subplot(grid[row, number + 1])
                cells.append((axis, str(number), picture))
            for axis, title, picture in cells:
                pixels = picture.detach().cpu().clamp(0, 1).permute(1, 2, 0).numpy()
                axis.imshow(
                    pixels.squeeze(-1) if pixels.shape[2] == 1 else pixels,
                    cmap="gray",
                    vmin=0,
                    vmax=1,
                )
                axis.set_title(title, fontsize=9)
                axis.set_xticks([])
                axis.set_yticks([])
            gap = bottom.add_subplot(grid[row, 1])
            gap.axis("off")
            gap.text(0.5, 0.5, name.replace(", ", ",\n"), ha="center", va="center", fontsize=9)
        return figure

    def film(self, keys: Float[Tensor, "S 2"], frames: int) -> list[Image.Image]:
        """The chain's place on the map, and its picture, step by step."""
        width, margin, line = 512, 10, 20
        back, font = self.mosaic(width), ImageFont.load_default(size=13)
        marks = torch.linspace(0, len(keys) - 1, min(frames, len(keys))).round().long().tolist()
        pictures = self.target.pictures(keys[marks])
        spots = ((as_uniform(keys) + 1) / 2 * width).cpu().tolist()
        scale = max(1, 140 // (self.image.shape[-2] + 4))  # three, one above the other, fit
        made = []
        for index, mark in enumerate(marks):
            small = [
                ("cue: its upper half", self.cue()),
                (f"read at step {mark + 1}", pictures[index]),
                ("the image", self.image),
            ]
            tiles = [(label, tile(one[None], 1, scale)) for label, one in small]
            size = (width + tiles[0][1].width + 3 * margin, width + 2 * margin)
            frame = Image.new("RGB", size, (255, 255, 255))
            draw = ImageDraw.Draw(frame)
            frame.paste(back, (margin, margin))
            trail = [(x + margin, y + margin) for x, y in spots[: mark + 1]]
            if len(trail) > 1:
                draw.line(trail, fill=(150, 110, 30), width=1)
                draw.line(trail[-10:], fill=(255, 176, 0), width=2)
            x, y = trail[-1]
            draw.ellipse((x - 6, y - 6, x + 6, y + 6), outline=(255, 176, 0), width=3)
            down = margin
            for label, picture in tiles:
                draw.text((width + 2 * margin, down), label, fill=(40, 40, 40), font=font)
                frame.paste(picture, (width + 2 * margin, down + line))
                down += picture.height + line + margin
            made.append(frame)
        return made


EXPERIMENT = Experiment(
    name="walk",
    paper="beyond",
    shows="Langevin and random walks over keys; a film",
    claim="Moved keys are steps of a Markov chain: with soft reads it can be corrected to the "
    "model's own density, and walks over what the memory holds.",
    run=run,
    full="20 min on a GPU",
    presets=("mnist",),
)
