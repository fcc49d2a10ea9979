"""Pixels one after another: what to expect of each, given those above it and to its left.

    output = near(features, images)   # (N, P, H, W): all pixels of given images at once
    images = near.draw(features, likelihood.sample)   # in turn: a pixel sees those drawn before

A pixel sees its row up to `reach` to the left, and `reach` rows above it up to `reach` to either
side: a small neighbourhood (the paper's outlook, §6), not a whole PixelCNN. What lies further away
reaches it through `features`, which come from z. From there on every pixel is by itself, a matrix
product over all of them: no statistic may run over positions, or a pixel would see its future.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from kanerva.layers.residual import zeroed

Features = Float[Tensor, "N F H W"]  # of each pixel, from z
Pixels = Float[Tensor, "N C H W"]
Parameters = Float[Tensor, "N P H W"]  # of each pixel's likelihood


class PixelBlock(nn.Module):
    """x + f(x) at each place by itself; starts as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.SiLU(),
            zeroed(nn.Linear(2 * width, width)),
        )

    def forward(self, x: Float[Tensor, "*N C"]) -> Float[Tensor, "*N C"]:
        return x + self.body(x)


class Neighbours(nn.Module):
    """The parameters of each pixel's likelihood from its features and the pixels before it."""

    def __init__(
        self, channels: int, features: int, outputs: int, reach: int, width: int, depth: int
    ) -> None:
        super().__init__()
        self.channels, self.reach = channels, reach
        self.known = nn.Linear(features, width)
        self.above = nn.Conv2d(channels, width, (reach, 2 * reach + 1), bias=False)
        self.left = nn.Conv2d(channels, width, (1, reach), bias=False)
        self.body = nn.Sequential(
            *[PixelBlock(width) for _ in range(depth)], nn.LayerNorm(width), nn.SiLU()
        )
        self.last = nn.Linear(width, outputs)

    def forward(self, features: Features, images: Pixels) -> Parameters:
        seen = self.seen(self._framed(images)).movedim(1, -1)
        known = self.known(features.movedim(1, -1)) + seen
        return self.last(self.body(known)).movedim(-1, 1)

    def seen(self, framed: Float[Tensor, "N C Hf Wf"]) -> Float[Tensor, "N D H W"]:
        """What the pixels before it tell of each; `framed` has `reach` rows more above, and
        `reach` columns more on either side."""
        reach = self.reach
        return self.above(framed[:, :, :-1]) + self.left(framed[:, :, reach:, : -reach - 1])

    def _framed(self, images: Pixels) -> Float[Tensor, "N C Hf Wf"]:
        """On [-1, 1], with zeros where there is nothing before."""
        return F.pad(2 * images - 1, (self.reach, self.reach, self.reach, 0))

    @torch.no_grad()
    def draw(self, features: Features, sample: Callable[[Tensor], Tensor]) -> Pixels:
        """Images pixel by pixel, in the order of reading: `sample` draws from the parameters of
        one, (N, P, 1, 1)."""
        count, _, height, width = features.shape
        images = features.new_zeros(count, self.channels, height, width, dtype=torch.float32)
        framed, reach = self._framed(images) * 0, self.reach
        for i in range(height):
            for j in range(width):
                near = framed[:, :, i : i + reach + 1, j : j + 2 * reach + 1]
                seen = self.seen(near).flatten(1)
                known = self.known(features[:, :, i, j]) + seen
                output = self.last(self.body(known))
                drawn = sample(output[:, :, None, None])[:, :, 0, 0]
                images[:, :, i, j] = drawn
                framed[:, :, reach + i, reach + j] = 2 * drawn - 1
        return images
