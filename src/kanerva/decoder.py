"""p(X|Z): the paper's conv-transpose decoder (App. E), and `kpp`'s."""

from math import ceil

import torch
from torch import nn

from kanerva.config import DecoderConfig, KppDecoderConfig, KppReadoutConfig
from kanerva.encoder import quarter
from kanerva.errors import UserError
from kanerva.layers.evonorm import EvoNormS0
from kanerva.layers.outline import FromCosines, ToCosines, box, shares
from kanerva.layers.pixel_context import Features, Neighbours, OutlineMask, Parameters, Pixels
from kanerva.layers.residual import NormSiLU, residual_stack
from kanerva.likelihoods import Likelihood
from kanerva.readout import before_tanh
from kanerva.seeding import Noise, as_generator, stream
from kanerva.shapes import DecoderOutput, Episode, Readout

_EMPTY_RMS = 0.02  # below this root mean square an outline is that of an empty cell; usual: 0.4
_FIT_PIXELS = 2**20  # enough to fit a linear guess
_CONTEXT_DEPTH = 4  # ours: residual blocks of the pixel context
_NARROWEST = 16  # ours: channels are halved per layer, but not below this


class Decoder(nn.Module):
    """Map a readout to likelihood parameters: project, double the side `layers` times, crop."""

    def __init__(
        self, config: DecoderConfig, readout: int, outputs: int, height: int, width: int
    ) -> None:
        super().__init__()
        self.height, self.width = height, width
        self.start = (ceil(height / 2**config.layers), ceil(width / 2**config.layers))
        self.project = nn.Linear(readout, config.base * self.start[0] * self.start[1])
        maps, layers = config.base, [EvoNormS0(config.base)]
        for _ in range(config.layers):
            fewer = max(maps // 2, _NARROWEST)
            layers += [nn.ConvTranspose2d(maps, fewer, 4, stride=2, padding=1), EvoNormS0(fewer)]
            maps = fewer
        self.stack = nn.Sequential(*layers, nn.Conv2d(maps, outputs, 3, padding=1))

    def forward(self, readout: Readout) -> DecoderOutput:
        maps = self.project(readout.flatten(0, 1)).unflatten(-1, (-1, *self.start))
        pixels = self.stack(maps)
        top = (pixels.shape[-2] - self.height) // 2
        left = (pixels.shape[-1] - self.width) // 2
        pixels = pixels[..., top : top + self.height, left : left + self.width]
        return pixels.unflatten(0, readout.shape[:2])


class SpatialDecoder(nn.Module):
    """`kpp`'s decoder: map a readout with a global and a spatial part to likelihood parameters.

    It has `base` channels at a quarter of the side and half as many at half the side; a last
    convolution predicts 2x2 pixels per position. The parameters of this first prediction are the
    sketch. With a pixel context it also outputs features, from which the context refines the sketch
    once the pixels above and to the left are known. With an outline, the outline's picture is added
    to the predicted means. With `kin`, a readout may end with maps of what is expected of an image
    that is not stored.
    """

    def __init__(
        self,
        config: KppDecoderConfig,
        readout: KppReadoutConfig,
        likelihood: Likelihood,
        image: tuple[int, int, int],
        outline: int = 0,
        kin: bool = False,
    ) -> None:
        """`outline`: how many numbers of the readout are an outline; 0 for none."""
        super().__init__()
        self.likelihood = likelihood
        self.outline = FromCosines(outline, image) if outline else None
        channels, self.height, self.width = image
        outputs = likelihood.outputs(channels)
        base, half = config.base, config.base // 2
        self.side = (quarter(self.height), quarter(self.width))
        self.sizes = (readout.size, readout.channels * self.side[0] * self.side[1], outline)
        if readout.size:
            self.from_global = nn.Linear(readout.size, base * self.side[0] * self.side[1])
        if readout.channels:
            self.from_maps = nn.Conv2d(readout.channels, base, 3, padding=1)
        if kin:
            self.from_kin = nn.Conv2d(readout.prior_width, base, 3, padding=1, bias=False)
        self.outputs, last, self.near = outputs, outputs, None
        if config.neighbours:
            last = outputs + config.near_width
            self.near = Neighbours(
                channels=channels,
                features=config.near_width,
                outputs=outputs,
                radius=config.neighbours,
                width=config.near_width,
                depth=_CONTEXT_DEPTH,
                box=_box(outline, image, config.neighbours) if outline else None,
                guess=likelihood.has_means,
            )
            likelihood.init_last_layer(self.near.last.weight, self.near.last.bias, 0.05)
        self.stack = nn.Sequential(
            residual_stack(base, config.depth),
            nn.Conv2d(base, 4 * half, 1),
            nn.PixelShuffle(2),
            residual_stack(half, config.depth),
            NormSiLU(1, half),
            nn.Conv2d(half, 4 * last, 3, padding=1),
            nn.PixelShuffle(2),
        )
        weight, bias = (p.unflatten(0, (last, 4)).flatten(1) for p in self.stack[-2].parameters())
        likelihood.init_last_layer(weight[:outputs], bias[:outputs], 0.1 if outline else 0.2)

    def forward(self, readout: Readout, images: Episode | None = None) -> DecoderOutput:
        """Return the parameters of p(x | z) for each pixel.

        With a pixel context and `images`, they are those of p(x_i | z, pixels of `images` before
        i). Without images they are the sketch, which treats pixels as independent; pictures and
        comparisons use it.
        """
        sketch, features, has_outline = self._pixels(readout)
        if self.near is None or images is None:
            return sketch.unflatten(0, readout.shape[:2])
        near = self.near(features, self._expected(sketch), images.flatten(0, 1), has_outline)
        return self._shift_means(*near).unflatten(0, readout.shape[:2])

    @torch.no_grad()
    def sample(self, readout: Readout, generator: Noise = None) -> Episode:
        """Sample p(x | z): all pixels at once, or one after another with a pixel context."""
        if self.near is None:
            return self.likelihood.sample(self(readout), as_generator(generator))

        def sample_pixel(output: Parameters, guess: Pixels) -> Pixels:
            return self.likelihood.sample(
                self._shift_means(output, guess)[None], as_generator(generator)
            )[0]

        sketch, features, has_outline = self._pixels(readout)
        images = self.near.sample(features, self._expected(sketch), sample_pixel, has_outline)
        return images.unflatten(0, readout.shape[:2])

    def _expected(self, sketch: Parameters) -> Pixels:
        return self.likelihood.mean(sketch[None])[0]

    def _shift_means(self, output: Parameters, guess: Pixels) -> Parameters:
        return self.likelihood.shift_means(output[None], guess[None])[0]

    def _pixels(self, readout: Readout) -> tuple[Parameters, Features, OutlineMask | None]:
        """Return the sketch, the pixel context's features, and which images have an outline."""
        z, kin = readout.flatten(0, 1).tensor_split([sum(self.sizes)], dim=-1)
        numbers, maps, outline = z.split(self.sizes, dim=-1)
        parts = []
        if numbers.shape[1]:
            parts.append(self.from_global(numbers).unflatten(-1, (-1, *self.side)))
        if maps.shape[1]:
            parts.append(self.from_maps(maps.unflatten(-1, (-1, *self.side))))
        if kin.shape[1]:
            parts.append(self.from_kin(kin.unflatten(-1, (-1, *self.side))))
        pixels = self.stack(sum(parts[1:], parts[0]))[..., : self.height, : self.width]
        sketch, features = pixels[:, : self.outputs], pixels[:, self.outputs :]
        if self.outline is None:
            return sketch, features, None
        has_outline = outline.detach().square().mean(dim=-1) > _EMPTY_RMS**2
        return self._shift_means(sketch, self.outline(outline)), features, has_outline


def _box(outline: int, image: tuple[int, int, int], radius: int) -> tuple[int, int]:
    """The outline's box, halved until a pixel's context covers all of it."""
    down, across = box(min(shares(outline, image)), *image[1:])
    while max(down, across) > radius + 1:
        down, across = (down // 2, across) if down > across else (down, across // 2)
    return down, across


@torch.no_grad()
def fit_outlines(writer: ToCosines, decoder: SpatialDecoder, pixels: Pixels, noise: float) -> None:
    """Fit outlines to these images, and with a pixel context its linear guesses too.

    Outlines take their mean and standard deviation from the data. The guesses are fitted by least
    squares, one to outlines with the memory's noise, one to images without an outline.
    """
    assert decoder.outline is not None
    if len(pixels) < 2:
        raise UserError("an outline cannot be fitted to one image: give at least two")
    for outline in (writer, decoder.outline):
        outline.fit_to_data(pixels)
    if decoder.near is not None:
        pixels = pixels[:: ceil(pixels[:, 0].numel() / _FIT_PIXELS)]
        blocks = writer(pixels).tanh()
        generator = stream("measure", device=blocks.device)
        normal = torch.randn(blocks.shape, generator=generator, device=blocks.device)
        expected = decoder.outline(before_tanh(blocks + noise * normal))
        nothing = decoder.outline(torch.zeros_like(blocks[:1]))
        decoder.near.fit_to_data(expected, nothing, pixels)
