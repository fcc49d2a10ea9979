"""Refine gists: change numbers by one where that saves bits.

A network writes a gist in one pass. Trying every change would take thousands of trials, so only the
most promising ones are tried: those with the largest saving, which is predicted from the exact
change of the gist's cost and the gradient of the pixels' cost.
"""

import math

import torch
from torch import Tensor

from kanerva.memory.fixed_point import BIT
from kanerva.memory.gist import LARGEST, GistPrior, Gists
from kanerva.memory.pixel_code import Binary, PixelCode

_ROUNDS, _TRIES = 2, 6  # ours: a third round saves less than a bit
_AT_ONCE = {"cpu": 16, "cuda": 512}  # images per batch; why few on a CPU: `pixel_code`
_NATS = math.log(2) / BIT  # nats per unit of cost


def refine_gists(prior: GistPrior, code: PixelCode, gists: Gists, images: Binary) -> Gists:
    """Refine the gists of images. Gist and pixels together never take more bits than before."""
    count = _AT_ONCE[gists.device.type]
    pairs = zip(gists.split(count), images.split(count), strict=True)
    return torch.cat([_refine(prior, code, *pair) for pair in pairs])


def _refine(prior: GistPrior, code: PixelCode, gists: Gists, images: Binary) -> Gists:
    with torch.no_grad():
        looked = code.look(images)  # does not depend on the gist
    for _ in range(_ROUNDS):
        gists = _change_some(prior, code, gists, images, looked)
    return gists


def _change_some(
    prior: GistPrior, code: PixelCode, gists: Gists, images: Binary, looked: Tensor
) -> Gists:
    """Try the most promising changes of each gist, one after another; keep those that save bits."""
    flags = torch.ones(len(gists), prior.groups, device=gists.device)

    def pixel_nats(gists: Gists, rows: Tensor | slice = slice(None)) -> Tensor:
        traces = torch.cat([gists, flags[: len(gists)]], dim=1)
        return code.nats(traces, images[rows], looked=looked[rows])

    with torch.enable_grad():
        start = gists.detach().clone().requires_grad_()
        nats = pixel_nats(start)
        (slope,) = torch.autograd.grad(nats.sum(), start)
    one = torch.eye(gists.shape[1], device=gists.device)
    steps = torch.cat([one, -one])
    with torch.no_grad():
        changed = (gists[:, None] + steps).clamp(-LARGEST, LARGEST)
        costs = prior.costs(changed.flatten(0, 1)).sum(dim=-1).unflatten(0, changed.shape[:2])
        now = _NATS * prior.costs(gists).sum(dim=-1)
        gains, order = (now[:, None] - _NATS * costs - slope @ steps.T).topk(_TRIES, dim=1)
        gists, best = gists.clone(), now + nats.detach()
        for gain, step in zip(gains.T, order.T, strict=True):
            rows = (gain > 0).nonzero()[:, 0]  # for the others no saving is expected
            other = (gists[rows] + steps[step[rows]]).clamp(-LARGEST, LARGEST)
            total = _NATS * prior.costs(other).sum(dim=-1) + pixel_nats(other, rows)
            better = total < best[rows]
            gists[rows[better]], best[rows[better]] = other[better], total[better]
    return gists
