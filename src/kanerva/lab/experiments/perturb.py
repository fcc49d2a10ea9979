"""Fig. 7: keys moved a little, y + eps, eps ~ N(0, 0.1), row by row; and a VAE's z moved likewise.

A row starts where a model puts one image: where its block was written (`kpp`), at the mean of
q(y|x) (`kpp-paper`), at the mean of q(z|x) (`vae`). Pictures have z at the mean of p(z|M, y), so
what changes in a row is due to the key alone; `z redrawn` keeps the key and draws z instead.
The paper does not say whether 0.1 is a standard deviation or a variance: both are shown.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kanerva.distributions import as_normal
from kanerva.lab.harness import Experiment, Finding, Lab, Pixels
from kanerva.memory.heap import Memory
from kanerva.models import VAE, Kpp, KppPaper, MemoryModel
from kanerva.pictures import sheet
from kanerva.shapes import Episode, Readout

Latents = Float[Tensor, "B n *key"]  # keys, or a VAE's readouts: N(0, 1) a priori, all of them
Rows = Float[Tensor, "rows R C H W"]  # what moves of one image's key bring
PerRow = Float[Tensor, " rows"]

MODELS: dict[str, tuple[str, str | None, int]] = {  # model, variant, and steps of the quick version
    "kpp-generate": ("kpp", "generate", 600),
    "kpp-paper": ("kpp-paper", None, 400),
    "vae": ("vae", None, 400),
}
SPREADS = (0.1, 0.1**0.5)  # 0.1 as a standard deviation, and as a variance
GROUP = 32  # images among which the nearest is looked for: one memory of `kpp`
ACROSS = 8  # pictures of a row
DEAD = 0.01  # a change of pixels on [0, 1] that nobody sees
WORSE = 1.1  # greyer, or fewer edges, by a tenth counts as blurred


# A model before its images; `random_keys` and `vae_vs_kpp` use this too


@dataclass(frozen=True)
class Scene:
    """A model that has written some images, if it can, and knows where each lies."""

    model: MemoryModel
    memory: Memory | None
    starts: Latents

    @property
    def key_shape(self) -> tuple[int, ...]:
        return tuple(self.starts.shape[2:])

    def readouts(self, keys: Latents, generator: torch.Generator | None = None) -> Readout:
        """z at keys: drawn where a generator is given, else its mean."""
        model = self.model
        if isinstance(model, VAE):
            return keys
        assert self.memory is not None
        maps = model.as_maps(self.memory)
        if isinstance(model, Kpp):
            drawn = generator is not None
            reading = model.readout(model.traces(maps, keys), sample=drawn, generator=generator)
            return reading.readout
        assert isinstance(model, KppPaper)
        prior = model.read_maps(maps, keys)
        return prior.mean if generator is None else prior.sample(generator)

    def pictures(self, keys: Latents, generator: torch.Generator | None = None) -> Episode:
        """The same as expected pixels."""
        return self.model.likelihood.mean(self.model.decoder(self.readouts(keys, generator)))

    def anywhere(self, count: int, generator: torch.Generator) -> Latents:
        """`count` keys for each memory from their prior, N(0, 1)."""
        shape = (len(self.starts), count, *self.key_shape)
        return torch.randn(shape, generator=generator, device=self.starts.device)


def scene(model: MemoryModel, episodes: Episode, generator: torch.Generator) -> Scene:
    """Write whole episodes, and see where their images lie."""
    if isinstance(model, VAE):
        return Scene(model, None, model.readout_posterior(model.encoder(episodes)).mean)
    memory = model.write(episodes, generator=generator)
    if isinstance(model, Kpp):
        return Scene(model, memory, as_normal(memory.places))
    assert isinstance(model, KppPaper)
    return Scene(model, memory, model.key_posterior(model.encoder(episodes)).mean)


def trained(
    lab: Lab, name: str, models: dict[str, tuple[str, str | None, int]] = MODELS
) -> tuple[MemoryModel, int]:
    """One of `models`, and how many images it writes into a memory: a part of GROUP."""
    model, variant, steps = models[name]
    length = lab.config(model, variant).episode_length
    return lab.trained(model, variant, steps=steps), length if GROUP % length == 0 else GROUP


def rms(
    some: Float[Tensor, "*any n C H W"], others: Float[Tensor, "*any m C H W"]
) -> Float[Tensor, "*any n m"]:
    """Distances between each of some pictures and each of others: root mean square over pixels."""
    exact = "donot_use_mm_for_euclid_dist"  # the other way a picture is not at 0 from itself
    distance = torch.cdist(some.flatten(-3), others.flatten(-3), compute_mode=exact)
    return distance / math.sqrt(math.prod(some.shape[-3:]))


def apart(pictures: Float[Tensor, "*any n C H W"]) -> Float[Tensor, "*any"]:
    """The mean distance between two of n pictures."""
    count = pictures.shape[-4]
    return rms(pictures, pictures).sum(dim=(-2, -1)) / (count * (count - 1))


def sharpness(
    pictures: Float[Tensor, "*any C H W"], binary: bool
) -> dict[str, Float[Tensor, "*any"]]:
    """`edges`: the mean difference between neighbouring pixels. `grey`, where true pixels are
    black or white: the mean of 4 p (1 - p), 0 where p is as sure as they are, 1 where all grey."""
    down = pictures.diff(dim=-2).abs().flatten(-3).mean(-1)
    across = pictures.diff(dim=-1).abs().flatten(-3).mean(-1)
    found = {"edges": (down + across) / 2}
    return (
        found | {"grey": (4 * pictures * (1 - pictures)).flatten(-3).mean(-1)} if binary else found
    )


def is_binary(model: MemoryModel) -> bool:
    """Whether true pixels are black or white."""
    return model.config.likelihood.kind == "bernoulli"


Figures = dict[str, dict[str, float]]  # name: mean and ci95


def blurred(now: Figures, before: Figures) -> bool:
    """Greyer than before, beyond the error; where pixels are not binary, with fewer edges."""
    low, high = (before["grey"], now["grey"]) if "grey" in now else (now["edges"], before["edges"])
    return high["mean"] > max(WORSE * low["mean"], low["mean"] + low["ci95"] + high["ci95"])


def summary(values: Float[Tensor, " n"]) -> dict[str, float]:
    """A mean, and the half width of its 95 % interval, taking values as independent."""
    half = 1.96 * values.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return {"mean": values.mean().item(), "ci95": half}


# Rows of moved keys


def measures(rows: Rows, still: Pixels, images: Pixels, binary: bool) -> dict[str, PerRow]:
    """What moving did, for each row: `still` is its picture unmoved, `images` what was written,
    in the same order."""
    nearest = rms(rows.flatten(0, 1), images).unflatten(0, rows.shape[:2])
    own = torch.arange(len(rows), device=rows.device)[:, None]
    found = {
        "change": rms(rows, still[:, None])[..., 0].mean(dim=1),
        "within": apart(rows),
        "nearest": nearest.amin(dim=2).mean(dim=1),
        "own": (nearest.argmin(dim=2) == own).float().mean(dim=1),
    }
    return found | {name: value.mean(dim=1) for name, value in sharpness(rows, binary).items()}


@torch.no_grad()
def moves(
    model: MemoryModel, images: Pixels, length: int, generator: torch.Generator
) -> tuple[Pixels, dict[str, Rows]]:
    """Each image's picture unmoved, and rows of it moved in every way: by each spread, with the
    key kept and z redrawn (where there is a key), and with keys that have nothing to do with it."""
    at = scene(model, images.unflatten(0, (-1, length)), generator)
    shape = (*at.starts.shape[:2], ACROSS, *at.key_shape)

    def rows(keys: Tensor, redraw: torch.Generator | None = None) -> Rows:
        made = at.pictures(keys.flatten(1, 2), redraw)
        return made.flatten(0, 1).unflatten(0, (-1, ACROSS))

    found = {}
    for spread in SPREADS:
        noise = torch.randn(shape, generator=generator, device=images.device)
        found[f"{spread:.3g}"] = rows(at.starts[:, :, None] + spread * noise)
    if at.memory is not None:
        found["z redrawn"] = rows(at.starts[:, :, None].expand(shape), generator)
    found["random"] = rows(at.anywhere(length * ACROSS, generator).view(shape))
    return at.pictures(at.starts).flatten(0, 1), found


def measured(
    lab: Lab, model: MemoryModel, length: int, name: str
) -> tuple[dict[str, Figures], list[Tensor]]:
    """Every way of moving, measured over all rows; and rows of the first images to look at."""
    count = lab.pick(2, 32)
    values: dict[str, dict[str, list[PerRow]]] = {}
    shown: list[Tensor] = []
    for group in range(count):
        images = lab.images(GROUP, skip=group * GROUP)
        still, found = moves(model, images, length, lab.noise(name, "moves", group))
        for way, rows in {"unmoved": still[:, None], **found}.items():
            for what, value in measures(rows, still, images, is_binary(model)).items():
                values.setdefault(way, {}).setdefault(what, []).append(value)
        if group == 0:
            for rows in (found[f"{SPREADS[0]:.3g}"], found[f"{SPREADS[1]:.3g}"]):
                shown.append(torch.cat([images[:, None], still[:, None], rows], dim=1)[:4])
    figures = {
        way: {
            what: summary(torch.cat(value))
            for what, value in each.items()
            if way != "unmoved" or what not in ("change", "within")
        }
        for way, each in values.items()
    }
    return figures, shown


def verdict(models: dict[str, dict[str, Figures]]) -> str:
    """Whether keys moved by 0.1 give variations of the image they started from; a VAE's z too?"""
    words, first = [], f"{SPREADS[0]:.3g}"
    worse = {}
    for name, ways in models.items():
        moved, random = ways[first], ways["random"]
        change, anywhere = moved["change"]["mean"], random["change"]["mean"]
        slack = moved["within"]["ci95"] + random["within"]["ci95"]
        what = "z" if name == "vae" else "keys"
        if random["within"]["mean"] < DEAD:
            apart = random["within"]["mean"]
            words.append(
                f"{name}: {what} change NOTHING: drawn at random they give pictures "
                f"{apart:.4f} apart."
            )
        elif change < DEAD:
            words.append(f"{name}: {what} moved by {first} change nothing to be seen.")
        elif moved["within"]["mean"] + slack < random["within"]["mean"]:
            words.append(
                f"{name}: local variation, {change:.3f} for {what} moved by {first}, "
                f"{anywhere:.3f} at random; {moved['own']['mean']:.0%} stay nearest to their own "
                f"image ({ways['unmoved']['own']['mean']:.0%} unmoved)."
            )
        else:
            words.append(f"{name}: moved {what} are NOT nearer to each other than random ones.")
        worse[name] = blurred(moved, ways["unmoved"])
    ours, theirs = worse["kpp-generate"], worse["vae"]
    if theirs and not ours:
        words.append("Moving z blurs a VAE's pictures, moving keys not kpp's: as the paper has it.")
    else:
        how = "both are blurred" if theirs else "its pictures stay as sharp"
        words.append(
            "That a VAE's z, moved so little, leaves the valid region is NOT seen: "
            + ("only kpp's pictures are blurred." if ours and not theirs else f"{how}.")
        )
    return " ".join(words)


def run(lab: Lab) -> Finding:
    models, parts = {}, []
    for name in MODELS:
        model, length = trained(lab, name)
        models[name], (near, far) = measured(lab, model, length, name)
        what = "z" if name == "vae" else "key"
        start = f"{name}: written, unmoved, then its {what} moved by"
        start = start.replace("written", "image") if name == "vae" else start
        parts.append((f"{start} {SPREADS[0]:.3g} * noise", near.flatten(0, 1)))
        if name != "kpp-paper":
            parts.append((f"{start} {SPREADS[1]:.3g} * noise", far.flatten(0, 1)))
    rows = lab.pick(2, 32) * GROUP
    lines = [
        f"{rows} rows of {ACROSS}; root mean square over pixels, ± 95 % over rows; z at its mean",
        f"{'model':<14}{'moved by':<10}{'change':>14}{'within a row':>15}{'nearest written':>17}"
        f"{'own':>6}{'edges':>15}{'greyness':>15}",
    ]
    for name, ways in models.items():
        for way, found in ways.items():
            cells = [
                f"{found[what]['mean']:.3f} ±{found[what]['ci95']:.3f}" if what in found else "-"
                for what in ("change", "within", "nearest", "edges", "grey")
            ]
            lines.append(
                f"{name:<14}{way:<10}{cells[0]:>14}{cells[1]:>15}{cells[2]:>17}"
                f"{found['own']['mean']:6.2f}{cells[3]:>15}{cells[4]:>15}"
            )
    lines += [
        "change: from the picture unmoved; own: share whose nearest image is the row's own, among "
        f"{GROUP};",
        "edges: mean difference of neighbouring pixels; greyness: mean of 4p(1-p)",
    ]
    figures = {"rows": rows, "across": ACROSS, "among": GROUP, "models": models}
    return Finding(figures, lines, verdict(models), {"": sheet(parts, columns=ACROSS + 2)})


EXPERIMENT = Experiment(
    name="perturb",
    paper="Fig. 7",
    shows="keys moved by N(0, 0.1), row by row; a VAE's z likewise",
    claim="Keys live in few dimensions, so y + eps, eps ~ N(0, 0.1), stays where density is high "
    "and gives local variations; a VAE's z, moved, leaves the valid region.",
    run=run,
    full="30 min on a GPU",
    presets=("omniglot", "mazes"),
)
