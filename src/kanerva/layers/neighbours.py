"""Pixels one after another: what to expect of each, given those above it and to its left.

    output, guess = near(features, images)   # all pixels of given images at once
    images = near.draw(features, sample)     # in turn: a pixel sees those drawn before it

A pixel sees its row up to `reach` to the left, and `reach` rows above it up to `reach` to either
side: a small neighbourhood (the paper's outlook, §6), not a whole PixelCNN. What lies further away
reaches it through `features`, which come from z. From there on every pixel is by itself, a matrix
product over all of them: no statistic may run over positions, or a pixel would see its future.

The first features are what z alone expects of the pixel's channels: a pixel is shown its neighbours
and by how much each differs from what was expected of it. Beside the parameters stands a guess,
linear in all these and in full precision, from which a likelihood may count its means: bf16 has
eight bits, as many as the pixels.
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
# Pixels and how they differ from what was expected, `reach` rows more above, columns either side:
Framed = Float[Tensor, "N C2 Hf Wf"]


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


class Before(nn.Module):
    """A convolution over the pixels before each: rows above it, and its own to the left."""

    def __init__(self, channels: int, outputs: int, reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.above = nn.Conv2d(channels, outputs, (reach, 2 * reach + 1), bias=False)
        self.left = nn.Conv2d(channels, outputs, (1, reach), bias=False)

    def forward(self, framed: Framed) -> Float[Tensor, "N D H W"]:
        reach = self.reach
        return self.above(framed[:, :, :-1]) + self.left(framed[:, :, reach:, : -reach - 1])


class Neighbours(nn.Module):
    """The parameters of each pixel's likelihood from its features and the pixels before it."""

    def __init__(
        self, channels: int, features: int, outputs: int, reach: int, width: int, depth: int
    ) -> None:
        super().__init__()
        self.channels, self.reach = channels, reach
        self.known = nn.Linear(features, width)
        self.seen = Before(2 * channels, width, reach)
        self.guess = Before(2 * channels, channels, reach)  # at first between left and above
        self.here = zeroed(nn.Conv2d(channels, channels, 1))
        with torch.no_grad():
            for part, place in ((self.guess.above, (-1, reach)), (self.guess.left, (0, -1))):
                part.weight.zero_()
                part.weight[:, :channels, place[0], place[1]] = torch.eye(channels) / 2
        self.body = nn.Sequential(
            *[PixelBlock(width) for _ in range(depth)], nn.LayerNorm(width), nn.SiLU()
        )
        self.last = nn.Linear(width, outputs)

    def forward(self, features: Features, images: Pixels) -> tuple[Parameters, Pixels]:
        """Parameters, and a guess at each pixel on [0, 1] (it may lie outside)."""
        seen = 2 * images - 1
        return self._told(features, self._framed(seen, seen - features[:, : self.channels]))

    def _told(self, features: Features, framed: Framed) -> tuple[Parameters, Pixels]:
        known = self.known(features.movedim(1, -1)) + self.seen(framed).movedim(1, -1)
        output = self.last(self.body(known)).movedim(-1, 1)
        with torch.autocast(framed.device.type, enabled=False):
            expected = features[:, : self.channels].float()
            guess = self.guess(framed.float()) + self.here(expected)
        return output, (guess + 1) / 2

    def _framed(self, *pixels: Pixels) -> Framed:
        """With zeros where there is nothing before."""
        return F.pad(torch.cat(pixels, dim=1), (self.reach, self.reach, self.reach, 0))

    @torch.no_grad()
    def draw(self, features: Features, sample: Callable[[Parameters, Pixels], Pixels]) -> Pixels:
        """Images pixel by pixel, in the order of reading: `sample` draws one, (N, C, 1, 1), from
        its parameters and the guess at it."""
        expected, reach = features[:, : self.channels].float(), self.reach
        height, width = features.shape[-2:]
        images = torch.zeros_like(expected)
        framed = self._framed(images, images)
        for i in range(height):
            for j in range(width):
                near = framed[:, :, i : i + reach + 1, j : j + 2 * reach + 1]
                drawn = sample(*self._told(features[:, :, i : i + 1, j : j + 1], near))[:, :, 0, 0]
                images[:, :, i, j], seen = drawn, 2 * drawn - 1
                new = torch.cat([seen, seen - expected[:, :, i, j]], dim=1)
                framed[:, :, reach + i, reach + j] = new
        return images
