"""Refine gists: change numbers by one where that saves bits.

A network writes a gist in one pass. Trying every change would take thousands of trials, so only the
most promising ones are tried: those with the largest saving, which is predicted from the exact
change of the gist's cost and the gradient of the pixels' cost. A trial computes only pixels that
are uncertain, a small part; whether all trials together saved bits is then checked on all pixels.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from kanerva.memory.fixed_point import BIT
from kanerva.memory.gist import LARGEST, GistPrior, Gists
from kanerva.memory.pixel_code import LEVELS, Binary, PixelCode, nats_of

_ROUNDS, _TRIES = 2, 6  # ours: a third round saves less than a bit
_SURE = 0.005  # a pixel predicted within this of its value is not computed in trials
_AT_ONCE = {"cpu": 16, "cuda": 512}  # images per batch; why few on a CPU: `pixel_code`
_NATS = math.log(2) / BIT  # nats per unit of cost


def refine_gists(prior: GistPrior, code: PixelCode, gists: Gists, images: Binary) -> Gists:
    """Refine the gists of images. Gist and pixels together never take more bits than before."""
    count = _AT_ONCE[gists.device.type]
    with torch.inference_mode(False):  # gradients say which changes are promising
        pairs = zip(gists.clone().split(count), images.clone().split(count), strict=True)
        return torch.cat([_refine(prior, code, *pair) for pair in pairs])


@torch.no_grad()
def _refine(prior: GistPrior, code: PixelCode, gists: Gists, images: Binary) -> Gists:
    looked, pixels = code.look(images), images.flatten(1)  # do not depend on the gist
    best, least = gists, torch.full((len(gists),), torch.inf, device=gists.device)
    for remaining in range(_ROUNDS, -1, -1):
        levels = code.levels(_as_blocks(prior, gists), looked)
        total = _NATS * prior.costs(gists).sum(dim=-1) + nats_of(levels, pixels).sum(dim=1)
        better = total < least
        best, least = torch.where(better[:, None], gists, best), torch.where(better, total, least)
        if remaining:
            gists = _change_some(prior, code, best, levels, looked, pixels)
    return best


def _as_blocks(prior: GistPrior, gists: Gists) -> Float[Tensor, "N _"]:
    """Whole gists with their flags."""
    return torch.cat([gists, gists.new_ones(len(gists), prior.groups)], dim=1)


def _change_some(
    prior: GistPrior,
    code: PixelCode,
    gists: Gists,
    levels: Float[Tensor, "N n"],
    looked: Float[Tensor, "N n width"],
    pixels: Float[Tensor, "N n"],
) -> Gists:
    """Try the most promising changes of each gist, one after another; keep those that seem to save
    bits. `levels`: logits of all pixels before, from which uncertain ones are chosen."""
    uncertain = ((levels / LEVELS).sigmoid() - pixels).abs() > _SURE
    image, pixel = uncertain.nonzero().unbind(dim=1)
    near, values = looked[image, pixel], pixels[image, pixel]

    def pixel_nats(gists: Gists, use: Tensor) -> Float[Tensor, " N"]:
        """The cost of uncertain pixels; only of the images to `use`."""
        row = use[image].nonzero()[:, 0]
        at = (image[row], pixel[row])
        each = nats_of(code.levels_at(_as_blocks(prior, gists), near[row], *at), values[row])
        return each.new_zeros(len(gists)).index_add(0, at[0], each)

    with torch.enable_grad():
        start = gists.detach().clone().requires_grad_()
        nats = pixel_nats(start, torch.ones_like(uncertain[:, 0]))
        (slope,) = torch.autograd.grad(nats.sum(), start)
    one = torch.eye(gists.shape[1], device=gists.device)
    steps = torch.cat([one, -one])
    changed = (gists[:, None] + steps).clamp(-LARGEST, LARGEST)
    costs = prior.costs(changed.flatten(0, 1)).sum(dim=-1).unflatten(0, changed.shape[:2])
    now = _NATS * prior.costs(gists).sum(dim=-1)
    promise = now[:, None] - _NATS * costs - slope @ steps.T
    gains, order = promise.topk(min(_TRIES, len(steps)), dim=1)
    best = now + nats.detach()
    for gain, step in zip(gains.T, order.T, strict=True):
        promising = gain > 0
        other = (gists + steps[step]).clamp(-LARGEST, LARGEST)
        total = _NATS * prior.costs(other).sum(dim=-1) + pixel_nats(other, promising)
        better = promising & (total < best)
        gists = torch.where(better[:, None], other, gists)
        best = torch.where(better, total, best)
    return gists
