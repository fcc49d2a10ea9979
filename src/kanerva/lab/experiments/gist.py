"""Beyond the paper: is a gist worth its bits?

Two codes with the same pixel decoder and the same bits per image are compared. One stores a gist
and then pixels. The other, the prefix-only code, stores only pixels, from the first on. Each is
measured by the bound on stored images and by its pictures. In a picture, stored pixels are exact.
The others are predicted from the gist; the prefix-only code uses the mean of several completions by
the pixel decoder. The gist is also used to find an image from half of its pixels.

Pictures are compared with the binary pixels that were written, and with the grey image that these
were sampled from. The error against binary pixels includes their sampling noise, so it is not zero
even for the grey image itself.
"""

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kanerva.data.splits import fixed_episodes, load_split
from kanerva.errors import UserError
from kanerva.evaluation.report import columns
from kanerva.lab.experiments.measures import estimate
from kanerva.lab.harness import About, Figures, Finding, Lab
from kanerva.memory.detail import ALL, Detail
from kanerva.memory.fixed_point import BIT, TOTAL
from kanerva.memory.heap import Memory
from kanerva.models.kpp_bits import KppBits
from kanerva.pictures import sheet

CAPS = (16, 32, 53, 97)  # bits per image; the last pixel or group of a block may exceed it
FOUND = 53  # the cap at which images are searched for
COMPLETIONS = 16  # samples of the pixels that are not stored, without a gist
SHOWN = 12
AT_ONCE = 512  # completions made together
ENOUGH = 0.98  # share of images that a gist should find
HALF = 0.5  # its picture should be off by less than this share of the prefix-only code's

Images = Float[Tensor, "N 1 H W"]


def halves(height: int, width: int, noise: torch.Generator) -> dict[str, Bool[Tensor, "H W"]]:
    """Masks of visible pixels, by name."""
    rows = torch.arange(height)[:, None].expand(-1, width)
    across = torch.arange(width).expand(height, -1)
    chance = torch.rand(height, width, generator=noise, device=noise.device).cpu()
    return {
        "top": rows < height // 2,
        "bottom": rows >= height // 2,
        "left": across < width // 2,
        "right": across >= width // 2,
        "random": chance < 0.5,
    }


def cap_prefix(model: KppBits, images: Images, cap: int) -> Detail:
    """Code images by the prefix-only code: no gist, and the first pixels up to a cap of bits."""
    count, pixels = len(images), images[:, 0]
    nothing = torch.zeros(count, model.writer.size, device=model.device)
    costs = model.pixel_code.cost(model.pixel_code.table(nothing, pixels), pixels.flatten(1))
    caps = torch.full((count,), ALL, device=model.device)
    # a gist that costs nothing
    gists = torch.zeros(count, model.config.code.groups, dtype=torch.long, device=model.device)
    detail = Detail(pixels.flatten(1).to(torch.uint8), costs, gists, caps)
    return detail.within(torch.full_like(caps, cap))


def complete(
    model: KppBits, detail: Detail, noise: torch.Generator
) -> tuple[Float[Tensor, "N n"], Float[Tensor, "N n"]]:
    """Sample the pixels that are not stored, without a gist. Return the mean of several completions
    of each image, and one of them."""
    count = len(detail.caps)
    total = torch.zeros(count, detail.pixels.shape[1], device=model.device)
    first = total.clone()
    each = torch.arange(count, device=model.device).repeat_interleave(COMPLETIONS)
    for part in each.split(AT_ONCE):
        exact, stored = detail.pixels[part].float(), detail.stored[part]

        def choose(
            i: int,
            counts: Int[Tensor, " N"],
            exact: Tensor = exact,
            stored: Tensor = stored,
        ) -> Tensor:
            chance = torch.rand(counts.shape, generator=noise, device=counts.device)
            return torch.where(i < stored, exact[:, i], (chance < counts / TOTAL).float())

        nothing = torch.zeros(len(part), model.writer.size, device=model.device)
        completed = model.pixel_code.follow(nothing, choose).flatten(1)
        total.index_add_(0, part, completed)
        first[part] = completed
    return total / COMPLETIONS, first


def stored_parts(model: KppBits, memory: Memory) -> tuple[Detail, Tensor]:
    """The detail and the blocks of a memory's images, in order of handle."""
    assert memory.detail is not None
    detail = memory.detail.apply(lambda part: part[memory.cells])
    return detail, model.placement.grid.read(memory.map[None], memory.cells[None])[0]


def sketch(model: KppBits, detail: Detail, blocks: Tensor) -> Float[Tensor, "N n"]:
    """Stored pixels, and what the gist predicts for the others."""
    return torch.where(detail.is_stored, detail.pixels.float(), expect(model, blocks))


@torch.no_grad()
def expect(model: KppBits, blocks: Tensor) -> Float[Tensor, "N n"]:
    """The pixels that gists predict."""
    output = model.decoder(model.readout(blocks[None], sample=False).readout)
    return model.likelihood.mean(output)[0].flatten(1)


def rmse(pictures: Float[Tensor, "N n"], images: Images) -> float:
    return float((pictures - images.flatten(1)).square().mean().sqrt())


def run(lab: Lab) -> Finding:
    model, config = lab.trained("kpp-bits"), lab.config("kpp-bits")
    if not isinstance(model, KppBits):
        raise UserError("gist needs a model with blocks of bits, such as kpp-bits")
    split = load_split(config, "test", lab.data_root)
    episodes = fixed_episodes(config, split, lab.device)
    count = lab.pick(64, 256)
    grey = fixed_episodes(config, split, lab.device, "none")
    images, levels = (
        one.batch(0, -(-count // config.episode_length)).images.flatten(0, 1)[:count]
        for one in (episodes, grey)
    )
    return measure(lab, model, images, levels)


def measure(lab: Lab, model: KppBits, images: Images, grey: Images) -> Finding:
    """Measure both codes with all images in one memory. `images` were sampled from `grey`."""
    count = len(images)
    large = model.with_capacity(count)
    assert isinstance(large, KppBits)
    written = large.write(images)
    noise = lab.noise("gist")
    rows: list[dict[str, Any]] = []
    pictures = [("as written", images[:SHOWN])]
    for cap in CAPS:
        held = written.shrink(bits=cap)
        detail, blocks = stored_parts(large, held)
        terms = large.elbo(images, held, handles=held.handles)
        ours = sketch(large, detail, blocks)
        prefix = cap_prefix(large, images, cap)
        means, one = complete(large, prefix, noise)
        score = large._log_pixels(torch.zeros_like(blocks)[None], images[None])[0]
        rows.append(
            {
                "cap": cap,
                "gist": {
                    "bits": estimate(detail.bits),
                    "nats": estimate(-terms.log_likelihood),
                    "rmse": rmse(ours, images),
                    "rmse_grey": rmse(ours, grey),
                },
                "prefix": {
                    "bits": estimate(prefix.bits),
                    "nats": estimate(-(score * ~prefix.is_stored).sum(dim=1)),
                    "rmse": rmse(means, images),
                    "rmse_grey": rmse(means, grey),
                    "rmse_one": rmse(one, images),
                },
            }
        )
        shape = images.shape[1:]
        bits = {name: f"{rows[-1][name]['bits']['mean']:.0f}" for name in ("gist", "prefix")}
        pictures += [
            (f"gist first, {bits['gist']} bits", ours[:SHOWN].unflatten(1, shape)),
            (f"pixels only, {bits['prefix']} bits: their mean", means[:SHOWN].unflatten(1, shape)),
            ("and one of them", one[:SHOWN].unflatten(1, shape)),
        ]
    alone = compare_alone(large, written, images, grey, noise)
    held = written.shrink(bits=FOUND)
    found = {}
    for name, seen in halves(images.shape[2], images.shape[3], lab.noise("halves")).items():
        hits = large.find(held, images, observed=seen.to(lab.device))
        assert isinstance(hits, list)
        right = [len(h) > 0 and h[0].id == t for h, t in zip(hits, held.handles, strict=True)]
        found[name] = sum(right) / count
    figures: Figures = {"images": count, "rows": rows, "found": found, "found_cap": FOUND}
    figures["alone"] = alone
    figures["noise"] = rmse(grey.flatten(1), images)
    figures["key"] = float(large.elbo(images, written, handles=written.handles).key_kl.mean())
    return Finding(figures, table(figures), sheet(pictures, SHOWN))


def compare_alone(
    model: KppBits, written: Memory, images: Images, grey: Images, noise: torch.Generator
) -> dict[str, dict[str, float]]:
    """The picture of a gist without any pixel, and that of the prefix-only code with no fewer
    bits."""
    detail, blocks = stored_parts(model, written)
    bits = float(detail.gist_costs.sum(dim=-1).double().mean()) / BIT
    prefix = cap_prefix(model, images, math.ceil(bits))
    pictures = {
        "gist": (bits, expect(model, blocks)),
        "prefix": (float(prefix.bits.mean()), complete(model, prefix, noise)[0]),
    }
    return {
        name: {"bits": bits, "rmse": rmse(made, images), "rmse_grey": rmse(made, grey)}
        for name, (bits, made) in pictures.items()
    }


def table(figures: Figures) -> list[str]:
    """A table of both codes at every cap, then the shares found."""
    each = ["bits", "nats", "sum", "rmse", "grey"]
    rows = [["", *each, *each, "rmse of one"]]
    for row in figures["rows"]:
        cells = [f"cap {row['cap']}"]
        for name in ("gist", "prefix"):
            bits, nats = row[name]["bits"]["mean"], row[name]["nats"]["mean"]
            cells += [f"{bits:.1f}", f"{nats:.1f}", f"{bits * math.log(2) + nats:.1f}"]
            cells += [f"{row[name]['rmse']:.3f}", f"{row[name]['rmse_grey']:.3f}"]
        rows.append([*cells, f"{row['prefix']['rmse_one']:.3f}"])
    found = ", ".join(f"{name} {share:.1%}" for name, share in figures["found"].items())
    return [
        *columns(rows, left=1).splitlines(),
        "first gist, then pixels; then the prefix-only code. nats: of an image whose place is "
        "known, without its key",
        f"({figures['key']:.2f}); sum: bits as nats, and nats. rmse: of the picture, from "
        "the pixels written; grey:",
        f"from the grey image they were drawn from, which itself is off by "
        f"{figures['noise']:.3f}. The prefix-only code's picture is",
        "the mean of several completions of what is not stored; rmse of one: one of them. "
        f"{figures['images']} images, one seed",
        *describe_alone(figures),
        f"found by gist at {figures['found_cap']} bits among {figures['images']}, mask given: "
        f"{found}",
    ]


def describe_alone(figures: Figures) -> list[str]:
    """The lines on the gist without pixels."""
    gist, prefix = (figures["alone"][name] for name in ("gist", "prefix"))
    return [
        f"the gist without any pixel, {gist['bits']:.1f} bits: rmse {gist['rmse']:.3f}, grey "
        f"{gist['rmse_grey']:.3f}; the prefix-only code, {prefix['bits']:.1f} bits: "
        f"{prefix['rmse']:.3f}, {prefix['rmse_grey']:.3f}"
    ]


def verdict(figures: Figures) -> str:
    """Whether gists find images, and give better pictures than as many bits of pixels."""
    row = next(row for row in figures["rows"] if row["cap"] == figures["found_cap"])
    worst = min(figures["found"].values())
    gist, prefix = row["gist"], row["prefix"]
    said = [
        f"Found from half of its pixels by {gist['bits']['mean']:.0f} bits: {worst:.1%} at "
        f"worst, {'as' if worst >= ENOUGH else 'less than'} hoped. Its picture is off by "
        f"{gist['rmse']:.3f} from the pixels written, {gist['rmse'] / prefix['rmse']:.2f} of the "
        f"mean picture of as many bits of pixels, {gist['rmse'] / prefix['rmse_one']:.2f} of one "
        "that the decoder goes on with.",
        f"The grey image itself is off by {figures['noise']:.3f}. From that the gist's picture "
        f"is off by {gist['rmse_grey']:.3f}, {gist['rmse_grey'] / prefix['rmse_grey']:.2f} of "
        "the mean picture of pixels alone.",
    ]
    gist, prefix = (figures["alone"][name] for name in ("gist", "prefix"))
    share = gist["rmse_grey"] / prefix["rmse_grey"]
    said.append(
        f"The gist without any pixel ({gist['bits']:.0f} bits) is off by "
        f"{gist['rmse_grey']:.3f} from the grey image, {share:.2f} of the prefix-only code's, "
        f"{'below' if share < HALF else 'not below'} half."
    )
    return " ".join(said)


ABOUT = About(
    paper="beyond",
    shows="what as many bits tell as gist, and as pixels alone",
    claim="A gist of fifty bits finds its image among 256 from any half, and draws it better than "
    "as many bits of pixels.",
    quick="about 4 min on two cores",
    full="about 10 min on two cores",
)
