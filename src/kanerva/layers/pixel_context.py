"""A causal pixel context: predict each pixel from z and the pixels above it and to its left.

    output, guess = near(features, expected, images)   # all pixels of known images in parallel
    images = near.sample(features, expected, draw)     # one pixel after another

A pixel sees `radius` pixels to its left, and in the `radius` rows above it those up to `radius`
columns away: a small neighbourhood (the paper's outlook, §6), not a whole PixelCNN. Anything
further away reaches it through `features`, which come from z. All later layers treat each pixel
separately, as matrix products: a statistic over positions would let a pixel see its future.

Neighbours are much alike, and a network that sees their raw levels learns slowly. So the inputs are
differences. One is each neighbour minus the average of left and above. The other is the pixel that
z alone predicts there minus the one it predicts here. Colours enter as green, red minus green and
blue minus green. Beside the likelihood parameters there is a guess, linear in these inputs, which a
likelihood may add its means to. It is not computed in bf16, which has eight bits of precision, no
more than the pixels.

If z holds an outline, the means of small boxes of pixels, then the first pixel of a box is hard to
predict and the last nearly determined. So each position in a `box` has its own input weights, and
a second guess serves images whose z holds no outline (`untold`, the name in saved weights).
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from kanerva.layers.residual import zeroed

Features = Float[Tensor, "N F H W"]  # for each pixel, from z
Pixels = Float[Tensor, "N C H W"]
OutlineMask = Bool[Tensor, " N"]
Parameters = Float[Tensor, "N P H W"]  # of each pixel's likelihood
Framed = Float[Tensor, "N C2 Hf Wf"]  # pixels and their expectation from z, padded by the radius

_GAIN = 4.0  # differences are small against levels; applied twice to those between colours
_AT_ONCE = 64  # images per chunk when fitting


class PixelBlock(nn.Module):
    """x + f(x), with f applied to each position separately; starts as the identity."""

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


class BoxedLinear(nn.Linear):
    """A linear layer over pixels, with separate weights for each position within a box."""

    def __init__(self, inputs: int, outputs: int, box: tuple[int, int]) -> None:
        super().__init__(inputs, box[0] * box[1] * outputs)
        self.box, self.outputs = box, outputs

    def forward(
        self, input: Float[Tensor, "N H W D"], corner: tuple[int, int] = (0, 0)
    ) -> Float[Tensor, "N H W O"]:
        """`corner`: row and column of the first input pixel in the whole image."""
        if self.box == (1, 1):
            return super().forward(input)
        (down, across), (count, height, width, _) = self.box, input.shape
        weight, bias = (
            w.unflatten(0, (*self.box, self.outputs)).roll((-corner[0], -corner[1]), dims=(0, 1))
            for w in (self.weight, self.bias)
        )
        x = F.pad(input, (0, 0, 0, -width % across, 0, -height % down))
        tall, wide = x.shape[1] // down, x.shape[2] // across
        x = self.by_place(x)
        y = torch.baddbmm(bias.flatten(0, 1)[:, None], x, weight.flatten(0, 1).mT)
        y = y.view(down, across, count, tall, wide, self.outputs).permute(2, 3, 0, 4, 1, 5)
        return y.reshape(count, tall * down, wide * across, self.outputs)[:, :height, :width]

    def by_place(self, x: Float[Tensor, "N H W D"]) -> Float[Tensor, "places n D"]:
        """Group pixels by their position within a box. The sides must be multiples of the box's."""
        down, across = self.box
        x = x.unflatten(2, (-1, across)).unflatten(1, (-1, down))  # (N, h, down, w, across, D)
        return x.permute(2, 4, 0, 1, 3, 5).reshape(down * across, -1, x.shape[-1])

    @torch.no_grad()
    def fit(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Set the weights by least squares from inputs (N, H, W, D) to outputs (N, H, W, O).

        Pixels of incomplete boxes at the border are left out.
        """
        places, inputs = self.box[0] * self.box[1], self.in_features + 1  # 1 for the bias
        zeros = self.weight.new_zeros(places, inputs, 1, dtype=torch.float64)
        products, along = zeros.expand(-1, -1, inputs), zeros.expand(-1, -1, self.outputs)
        for x, y in pairs:
            height, width = (
                side - side % b for side, b in zip(x.shape[1:3], self.box, strict=True)
            )
            x, y = (self.by_place(one[:, :height, :width]).double() for one in (x, y))
            x = F.pad(x, (0, 1), value=1.0)
            products, along = products + x.mT @ x, along + x.mT @ y
        least = 1e-6 * products.diagonal(dim1=-2, dim2=-1).mean(dim=-1).clamp(min=1e-12)
        ridge = least[:, None, None] * torch.eye(inputs, device=products.device)
        found = torch.linalg.solve(products + ridge, along)  # (places, D + 1, O)
        self.weight.copy_(found[:, :-1].mT.flatten(0, 1))
        self.bias.copy_(found[:, -1].flatten())


class Neighbours(nn.Module):
    """Compute each pixel's likelihood parameters from its features and the pixels before it."""

    def __init__(
        self,
        *,
        channels: int,
        features: int,
        outputs: int,
        radius: int,
        width: int,
        depth: int,
        box: tuple[int, int] | None = None,
        guess: bool = True,
    ) -> None:
        super().__init__()
        self.channels, self.radius = channels, radius
        self.before = [(i, j) for i in range(-radius, 0) for j in range(-radius, radius + 1)]
        self.before += [(0, j) for j in range(-radius, 0)]  # offsets in rows and columns
        shown = 2 * channels * (len(self.before) + 1)
        places = box or (1, 1)
        self.known = nn.Linear(features, width)
        self.seen = BoxedLinear(shown, width, places)
        self.guess = zeroed(BoxedLinear(shown, channels, places)) if guess else None
        self.untold = zeroed(BoxedLinear(shown, channels, places)) if guess and box else None
        self.body = nn.Sequential(
            *[PixelBlock(width) for _ in range(depth)], nn.LayerNorm(width), nn.SiLU()
        )
        self.last = nn.Linear(width, outputs)

    def forward(
        self,
        features: Features,
        expected: Pixels,
        images: Pixels,
        has_outline: OutlineMask | None = None,
    ) -> tuple[Parameters, Pixels]:
        """Return the parameters, and a guess at each pixel on the scale of [0, 1], not clamped.

        `has_outline` marks images whose z holds an outline; None means all of them.
        """
        return self._near(features, self._framed(expected, images), has_outline)

    def fit_to_data(
        self, expected: Pixels, nothing: Float[Tensor, "1 C H W"], images: Pixels
    ) -> None:
        """Initialise both guesses by least squares on these images.

        `expected` holds the pixels their outlines predict. `nothing` is what an empty outline
        predicts, the same for every image.
        """
        for guess, outline in ((self.guess, expected), (self.untold, nothing.expand_as(images))):
            if guess is not None:
                pieces = zip(outline.split(_AT_ONCE), images.split(_AT_ONCE), strict=True)
                guess.fit(self._pair(*piece) for piece in pieces)

    def _pair(self, expected: Pixels, images: Pixels) -> tuple[Tensor, Tensor]:
        """The inputs of each pixel, and the target of a linear guess."""
        midway, shown = self._shown(self._framed(expected, images))
        return shown, (_GAIN * (2 * images - 1 - midway)).movedim(1, -1)

    def _near(
        self,
        features: Features,
        framed: Framed,
        has_outline: OutlineMask | None,
        corner: tuple[int, int] = (0, 0),
    ) -> tuple[Parameters, Pixels]:
        with torch.autocast(framed.device.type, enabled=False):
            midway, shown = self._shown(framed)
            guess = midway
            if self.guess is not None:
                moved = self.guess(shown, corner)
                if self.untold is not None and has_outline is not None:
                    without = self.untold(shown, corner)
                    moved = torch.where(has_outline[:, None, None, None], moved, without)
                guess = midway + moved.movedim(-1, 1) / _GAIN
        hidden = self.known(features.movedim(1, -1)) + self.seen(shown, corner)
        return self.last(self.body(hidden)).movedim(-1, 1), (guess + 1) / 2

    def _shown(self, framed: Framed) -> tuple[Pixels, Float[Tensor, "N H W D"]]:
        """Return the average of left and above, and the inputs of each pixel."""
        channels, radius = self.channels, self.radius
        height, width = framed.shape[-2] - radius, framed.shape[-1] - 2 * radius

        def at(i: int, j: int) -> Tensor:
            i, j = radius + i, radius + j
            return framed[:, :, i : i + height, j : j + width]

        midway = (at(-1, 0) + at(0, -1))[:, :channels] / 2
        expected = at(0, 0)[:, channels:]
        centre = torch.cat([midway, expected], dim=1)
        near = torch.stack([at(i, j) - centre for i, j in self.before], dim=1)
        near = _GAIN * near.unflatten(2, (2, channels)).flatten(1, 2)
        level = torch.stack([midway, _GAIN * (expected - midway)], dim=1)
        shown = torch.cat([near, level], dim=1)  # (N, K, C, H, W)
        if channels == 3:
            red, green, blue = shown.unbind(2)
            shown = torch.stack([green, _GAIN * (red - green), _GAIN * (blue - green)], dim=2)
        return midway, shown.flatten(1, 2).movedim(1, -1)

    def _framed(self, expected: Pixels, images: Pixels) -> Framed:
        """Scale to [-1, 1] and pad with zeros above and to the sides."""
        around = (self.radius, self.radius, self.radius, 0)
        return F.pad(2 * torch.cat([images, expected], dim=1) - 1, around)

    @torch.no_grad()
    def sample(
        self,
        features: Features,
        expected: Pixels,
        draw: Callable[[Parameters, Pixels], Pixels],
        has_outline: OutlineMask | None = None,
    ) -> Pixels:
        """Sample images pixel by pixel, row by row.

        `draw` samples one pixel of each image, (N, C, 1, 1), from its parameters and the guess.
        """
        height, width = features.shape[-2:]
        images, radius = torch.zeros_like(expected), self.radius
        framed = self._framed(expected, images)
        for i in range(height):
            for j in range(width):
                window = framed[:, :, i : i + radius + 1, j : j + 2 * radius + 1]
                here = self._near(features[:, :, i : i + 1, j : j + 1], window, has_outline, (i, j))
                images[:, :, i, j] = pixels = draw(*here)[:, :, 0, 0]
                framed[:, : self.channels, radius + i, radius + j] = 2 * pixels - 1
        return images
