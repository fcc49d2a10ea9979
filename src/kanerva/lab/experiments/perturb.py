"""Fig. 7: keys moved a little, y + eps, eps ~ N(0, 0.1), row by row; and a VAE's z moved likewise.

A row starts where a model puts one image: where its block was written (`kpp`), at the mean of
q(y|x) (`kpp-paper`), at the mean of q(z|x) (`vae`). Pictures have z at the mean of p(z|M, y), so
what changes in a row is due to the key alone; `z redrawn` keeps the key and draws z instead.
The paper does not say whether 0.1 is a standard deviation or a variance: both are shown.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from kanerva.lab.experiments.picture_measures import (
    DEAD,
    Intervals,
    interval,
    is_blurred,
    mean_distance,
    rms,
    sharpness,
)
from kanerva.lab.experiments.scene import GROUP, MODELS, is_binary, train_for_scene, write_scene
from kanerva.lab.harness import Experiment, Figures, Finding, Lab, Pixels
from kanerva.lab.paper_figures import KEY_NOISE
from kanerva.models.base import MemoryModel
from kanerva.pictures import Pictures, sheet

Rows = Float[Tensor, "rows R C H W"]  # what moves of one image's key bring
PerRow = Float[Tensor, " rows"]
Ways = dict[str, Intervals]  # by how keys were moved

SPREADS = (KEY_NOISE, KEY_NOISE**0.5)  # the paper's as a standard deviation, and as a variance
FIRST = f"{SPREADS[0]:.3g}"
ACROSS = 8  # pictures of a row


# Rows of moved keys


def measure_rows(rows: Rows, still: Pixels, images: Pixels, binary: bool) -> dict[str, PerRow]:
    """What moving did, for each row: `still` is its picture unmoved, `images` what was written,
    in the same order."""
    nearest = rms(rows.flatten(0, 1), images).unflatten(0, rows.shape[:2])
    own = torch.arange(len(rows), device=rows.device)[:, None]
    found = {
        "change": rms(rows, still[:, None])[..., 0].mean(dim=1),
        "within": mean_distance(rows),
        "nearest": nearest.amin(dim=2).mean(dim=1),
        "own": (nearest.argmin(dim=2) == own).float().mean(dim=1),
    }
    return found | {name: value.mean(dim=1) for name, value in sharpness(rows, binary).items()}


@torch.no_grad()
def move_keys(
    model: MemoryModel, images: Pixels, length: int, generator: torch.Generator
) -> tuple[Pixels, dict[str, Rows]]:
    """Each image's picture unmoved, and rows of it moved in every way: by each spread, with the
    key kept and z redrawn (where there is a key), and with keys that have nothing to do with it."""
    at = write_scene(model, images.unflatten(0, (-1, length)), generator)
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
    found["random"] = rows(at.draw_keys(length * ACROSS, generator).view(shape))
    return at.pictures(at.starts).flatten(0, 1), found


def measure(lab: Lab, model: MemoryModel, length: int, name: str) -> tuple[Ways, list[Tensor]]:
    """Every way of moving, measured over all rows; and rows of the first images to look at."""
    count = lab.pick(2, 32)
    values: dict[str, dict[str, list[PerRow]]] = {}
    shown: list[Tensor] = []
    for group in range(count):
        images = lab.images(GROUP, skip=group * GROUP)
        still, found = move_keys(model, images, length, lab.noise(name, "moves", group))
        for way, rows in {"unmoved": still[:, None], **found}.items():
            for what, value in measure_rows(rows, still, images, is_binary(model)).items():
                values.setdefault(way, {}).setdefault(what, []).append(value)
        if group == 0:
            for rows in (found[f"{SPREADS[0]:.3g}"], found[f"{SPREADS[1]:.3g}"]):
                shown.append(torch.cat([images[:, None], still[:, None], rows], dim=1)[:4])
    figures = {
        way: {
            what: interval(torch.cat(value))
            for what, value in each.items()
            if way != "unmoved" or what not in ("change", "within")
        }
        for way, each in values.items()
    }
    return figures, shown


def verdict(figures: Figures) -> str:
    """Whether keys moved by 0.1 give variations of the image they started from; a VAE's z too?"""
    models = figures["models"]
    words = [judge(name, ways) for name, ways in models.items()]
    blurred = {name: is_blurred(ways[FIRST], ways["unmoved"]) for name, ways in models.items()}
    ours, theirs = blurred["kpp-generate"], blurred["vae"]
    if theirs and not ours:
        words.append("Moving z blurs a VAE's pictures, moving keys not kpp's: as the paper has it.")
    else:
        how = "both are blurred" if theirs else "its pictures stay as sharp"
        words.append(
            "That a VAE's z, moved so little, leaves the valid region is NOT seen: "
            + ("only kpp's pictures are blurred." if ours and not theirs else f"{how}.")
        )
    return " ".join(words)


def judge(name: str, ways: Ways) -> str:
    """Whether one model's moved keys give variations of one image."""
    moved, random, what = ways[FIRST], ways["random"], latent(name)
    change, apart = moved["change"]["mean"], random["within"]["mean"]
    slack = moved["within"]["ci95"] + random["within"]["ci95"]
    if apart < DEAD:
        return (
            f"{name}: {what} change NOTHING: drawn at random they give pictures {apart:.4f} apart."
        )
    if change < DEAD:
        return f"{name}: {what} moved by {FIRST} change nothing to be seen."
    if moved["within"]["mean"] + slack < apart:
        return (
            f"{name}: local variation, {change:.3f} for {what} moved by {FIRST}, "
            f"{random['change']['mean']:.3f} at random; {stay(ways)}."
        )
    return f"{name}: moved {what} are NOT nearer to each other than random ones."


def latent(name: str) -> str:
    """What of a model is moved."""
    return "z" if name == "vae" else "keys"


def stay(ways: Ways) -> str:
    """How many pictures stay nearest to the image of their row."""
    moved, unmoved = (ways[way]["own"]["mean"] for way in (FIRST, "unmoved"))
    return f"{moved:.0%} stay nearest to their own image ({unmoved:.0%} unmoved)"


def run(lab: Lab) -> Finding:
    models: dict[str, Ways] = {}
    parts: list[tuple[str, Pictures]] = []
    for name in MODELS:
        model, length = train_for_scene(lab, name)
        models[name], shown = measure(lab, model, length, name)
        parts += label_rows(name, *shown)
    rows = lab.pick(2, 32) * GROUP
    figures = {"rows": rows, "across": ACROSS, "among": GROUP, "models": models}
    return Finding(figures, table(figures), {"": sheet(parts, columns=ACROSS + 2)})


def label_rows(name: str, near: Rows, far: Rows) -> list[tuple[str, Pictures]]:
    """Rows to look at; of `kpp-paper`, whose keys do little, one kind is enough."""
    what, first = ("z", "image") if name == "vae" else ("key", "written")
    start = f"{name}: {first}, unmoved, then its {what} moved by"
    parts = [(f"{start} {SPREADS[0]:.3g} * noise", near.flatten(0, 1))]
    if name != "kpp-paper":
        parts.append((f"{start} {SPREADS[1]:.3g} * noise", far.flatten(0, 1)))
    return parts


def table(figures: Figures) -> list[str]:
    """A row for each model and way of moving."""
    lines = [
        f"{figures['rows']} rows of {ACROSS}; root mean square over pixels, ± 95 % over rows; z at "
        "its mean",
        f"{'model':<14}{'moved by':<10}{'change':>14}{'within a row':>15}{'nearest written':>17}"
        f"{'own':>6}{'edges':>15}{'greyness':>15}",
    ]
    for name, ways in figures["models"].items():
        for way, found in ways.items():
            cells = [
                f"{found[what]['mean']:.3f} ±{found[what]['ci95']:.3f}" if what in found else "-"
                for what in ("change", "within", "nearest", "edges", "grey")
            ]
            lines.append(
                f"{name:<14}{way:<10}{cells[0]:>14}{cells[1]:>15}{cells[2]:>17}"
                f"{found['own']['mean']:6.2f}{cells[3]:>15}{cells[4]:>15}"
            )
    return lines + [
        "change: from the picture unmoved; own: share whose nearest image is the row's own, among "
        f"{GROUP};",
        "edges: mean difference of neighbouring pixels; greyness: mean of 4p(1-p)",
    ]


EXPERIMENT = Experiment(
    name="perturb",
    paper="Fig. 7",
    shows="keys moved by N(0, 0.1), row by row; a VAE's z likewise",
    claim=f"Keys live in few dimensions, so y + eps, eps ~ N(0, {KEY_NOISE}), stays where density "
    "is high and gives local variations; a VAE's z, moved, leaves the valid region.",
    run=run,
    verdict=verdict,
    full="30 min on a GPU",
    presets=("omniglot", "mazes"),
)
