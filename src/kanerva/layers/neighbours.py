"""Pixels one after another: what to expect of each, given those above it and to its left.

    output, guess = near(features, expected, images)   # all pixels of given images at once
    images = near.draw(features, expected, sample)     # in turn: a pixel sees those before it

A pixel sees its row up to `reach` to the left, and `reach` rows above it up to `reach` to either
side: a small neighbourhood (the paper's outlook, §6), not a whole PixelCNN. What lies further away
reaches it through `features`, which come from z; what z alone expects of pixels it may also see up
to `ahead` to its right and below. From there on every pixel is by itself, a matrix product over all
of them: no statistic may run over positions, or a pixel would see its future.

Neighbours are much alike, and a network that sees their levels learns slowly. So a pixel is shown
differences: of each neighbour from the point midway between left and above, and of what z alone
expected there from what it expects here; colours as green, red less green and blue less green.
Beside the parameters stands a guess, linear in these and in full precision, from which a likelihood
may count its means: bf16 has eight bits, as many as the pixels.
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
# Pixels and what is expected of them, with a margin of what lies around:
Framed = Float[Tensor, "N C2 Hf Wf"]

_GAIN = 4.0  # of a difference, which is small against a level; once more of one between colours


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
        self,
        *,
        channels: int,
        features: int,
        outputs: int,
        reach: int,
        width: int,
        depth: int,
        ahead: int = 0,
        guess: bool = True,
    ) -> None:
        super().__init__()
        self.channels, self.reach, self.ahead = channels, reach, ahead
        self.margin = max(reach, ahead)
        self.before = [(i, j) for i in range(-reach, 0) for j in range(-reach, reach + 1)]
        self.before += [(0, j) for j in range(-reach, 0)]  # rows and columns away
        self.after = [(0, j) for j in range(1, ahead + 1)]
        self.after += [(i, j) for i in range(1, ahead + 1) for j in range(-ahead, ahead + 1)]
        shown = 2 * channels * (len(self.before) + 1) + channels * len(self.after)
        self.known = nn.Linear(features, width)
        self.seen = nn.Linear(shown, width)
        self.guess = zeroed(nn.Linear(shown, channels)) if guess else None
        self.body = nn.Sequential(
            *[PixelBlock(width) for _ in range(depth)], nn.LayerNorm(width), nn.SiLU()
        )
        self.last = nn.Linear(width, outputs)

    def forward(
        self, features: Features, expected: Pixels, images: Pixels
    ) -> tuple[Parameters, Pixels]:
        """Parameters, and a guess at each pixel on [0, 1] (it may lie outside)."""
        return self._told(features, self._framed(expected, images))

    def _told(self, features: Features, framed: Framed) -> tuple[Parameters, Pixels]:
        with torch.autocast(framed.device.type, enabled=False):
            midway, shown = self._shown(framed)
            guess = midway
            if self.guess is not None:
                guess = midway + self.guess(shown).movedim(-1, 1) / _GAIN
        known = self.known(features.movedim(1, -1)) + self.seen(shown)
        return self.last(self.body(known)).movedim(-1, 1), (guess + 1) / 2

    def _shown(self, framed: Framed) -> tuple[Pixels, Float[Tensor, "N H W D"]]:
        """The point midway between left and above, and all a pixel is shown of what is near it."""
        channels, above, around = self.channels, self.reach, self.margin
        height = framed.shape[-2] - above - self.ahead
        width = framed.shape[-1] - 2 * around

        def at(i: int, j: int) -> Tensor:
            i, j = above + i, around + j
            return framed[:, :, i : i + height, j : j + width]

        midway = (at(-1, 0) + at(0, -1))[:, :channels] / 2
        expected = at(0, 0)[:, channels:]
        centre = torch.cat([midway, expected], dim=1)
        near = torch.stack([at(i, j) - centre for i, j in self.before], dim=1)
        near = _GAIN * near.unflatten(2, (2, channels)).flatten(1, 2)
        level = torch.stack([midway, _GAIN * (expected - midway)], dim=1)
        shown = [near, level]
        if self.after:
            later = torch.stack([at(i, j)[:, channels:] for i, j in self.after], dim=1)
            shown.append(_GAIN * (later - expected[:, None]))
        shown = torch.cat(shown, dim=1)  # (N, K, C, H, W)
        if channels == 3:
            red, green, blue = shown.unbind(2)
            shown = torch.stack([green, _GAIN * (red - green), _GAIN * (blue - green)], dim=2)
        return midway, shown.flatten(1, 2).movedim(1, -1)

    def _framed(self, expected: Pixels, images: Pixels) -> Framed:
        """On [-1, 1], with zeros where there is nothing before."""
        around = (self.margin, self.margin, self.reach, self.ahead)
        return F.pad(2 * torch.cat([images, expected], dim=1) - 1, around)

    @torch.no_grad()
    def draw(
        self,
        features: Features,
        expected: Pixels,
        sample: Callable[[Parameters, Pixels], Pixels],
    ) -> Pixels:
        """Images pixel by pixel, in the order of reading: `sample` draws one, (N, C, 1, 1), from
        its parameters and the guess at it."""
        height, width = features.shape[-2:]
        images, above, around = torch.zeros_like(expected), self.reach, self.margin
        framed = self._framed(expected, images)
        for i in range(height):
            for j in range(width):
                near = framed[:, :, i : i + above + 1 + self.ahead, j : j + 2 * around + 1]
                drawn = sample(*self._told(features[:, :, i : i + 1, j : j + 1], near))[:, :, 0, 0]
                images[:, :, i, j] = drawn
                framed[:, : self.channels, above + i, around + j] = 2 * drawn - 1
        return images
