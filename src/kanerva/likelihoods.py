"""p(X | decoder output), in nats per image: Bernoulli and discretized mixture of logistics (§4).

Images are floats on [0, 1]: exactly 0 or 1 for Bernoulli, k/255 for the mixture. Log-densities are
computed in float32 whatever the precision of the decoder.
"""

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from kanerva.config import LikelihoodName
from kanerva.errors import UserError
from kanerva.layers.kernels.mixture import mixture_log_prob, supported
from kanerva.shapes import DecoderOutput, Episode, PerImage, PerPixel

LastWeight = Float[Tensor, "P K"]  # of the layer that makes a decoder's output
LastBias = Float[Tensor, "P *K"]


class Likelihood(ABC):
    """What a decoder's output means for pixels."""

    has_means = False  # whether `shift_means` can add a guess to its means

    @abstractmethod
    def outputs(self, channels: int) -> int:
        """How many numbers the decoder outputs for each pixel."""

    @abstractmethod
    def check(self, images: Episode) -> None:
        """Refuse pixels outside this likelihood's support: their score would not be a bound."""

    @abstractmethod
    def pixel_log_prob(self, output: DecoderOutput, images: Episode) -> PerPixel:
        """ln p of each pixel, all its channels together."""

    def log_prob(
        self, output: DecoderOutput, images: Episode, observed: PerPixel | None = None
    ) -> PerImage:
        """ln p of each image, or of those of its pixels where `observed` is 1."""
        pixels = self.pixel_log_prob(output, images)
        if observed is not None:
            pixels = torch.where(observed == 0, 0.0, pixels * observed)
        return pixels.flatten(2).sum(-1)

    def shift_means(self, output: DecoderOutput, guess: Episode) -> DecoderOutput:
        """Add `guess` to the means in `output`. A likelihood without means returns it unchanged."""
        return output

    def init_last_layer(self, weight: LastWeight, bias: LastBias, width: float) -> None:
        """Initialise a decoder's last layer so that predictions start within `width` of the mean;
        pixels lie on [-1, 1]."""
        return

    @abstractmethod
    def mean(self, output: DecoderOutput) -> Episode:
        """Expected pixels, for pictures and for iterative reading."""

    @abstractmethod
    def sample(
        self, output: DecoderOutput, generator: torch.Generator | None = None
    ) -> Episode: ...


class Bernoulli(Likelihood):
    """One logit for each binary pixel."""

    def outputs(self, channels: int) -> int:
        return channels

    def check(self, images: Episode) -> None:
        bad = images[~((images == 0) | (images == 1))]
        if len(bad):
            raise UserError(
                f"this model takes pixels that are 0 or 1, got {bad[0].item()}: "
                "kanerva.prepare(images, model) binarizes grey ones"
            )

    def pixel_log_prob(self, output: DecoderOutput, images: Episode) -> PerPixel:
        nll = F.binary_cross_entropy_with_logits(output.float(), images.float(), reduction="none")
        return -nll.sum(2)

    def mean(self, output: DecoderOutput) -> Episode:
        return output.float().sigmoid()

    def sample(self, output: DecoderOutput, generator: torch.Generator | None = None) -> Episode:
        return torch.bernoulli(self.mean(output), generator=generator)


Components = Float[Tensor, "B T C M H W"]


class LogisticMixture(Likelihood):
    """Discretized mixture of logistics over 256 levels (Salimans et al. 2017).

    Each component has a weight, a mean and a scale. In colour its green mean depends linearly on
    the red pixel and its blue mean on both, so the mixture is over whole RGB triples. Everything
    happens on [-1, 1]; the first and last bin extend to infinity, so the 256 probabilities sum to
    one. Runs as one fused kernel in each direction when the model is compiled for a GPU.
    """

    has_means = True

    def __init__(self, components: int) -> None:
        self.components = components

    def outputs(self, channels: int) -> int:
        return self.components * (3 if channels == 1 else 10)

    def check(self, images: Episode) -> None:
        levels = images * 255
        good = (images >= 0) & (images <= 1) & ((levels - levels.round()).abs() <= 1e-2)
        if not good.all():
            raise UserError(
                "this model takes 8-bit pixels, floats k/255 on [0, 1], got "
                f"{images[~good][0].item()}: kanerva.prepare(images, model) rounds them"
            )

    def _split(
        self, output: DecoderOutput, channels: int
    ) -> tuple[Float[Tensor, "B T M H W"], Components, Components, Float[Tensor, "B T 3 M H W"]]:
        """Mixture logits, means, log scales and colour coefficients (zero of them for grey)."""
        rest = output.float().unflatten(2, (-1, self.components))  # (B, T, 3 or 10, M, H, W)
        logits, rest = rest[:, :, 0], rest[:, :, 1:]
        means, log_scales = rest[:, :, :channels], rest[:, :, channels : 2 * channels]
        coefficients = rest[:, :, 2 * channels :].tanh()
        if channels == 1:
            coefficients = means.new_zeros(means.shape).expand(-1, -1, 3, -1, -1, -1)
        return logits, means, log_scales.clamp(min=-7.0), coefficients

    def _channels(self, outputs: int) -> int:
        """Channels of an image for which a decoder outputs this many numbers per pixel."""
        return 1 if outputs == self.outputs(1) else 3

    @staticmethod
    def _conditional_means(
        means: Components, coefficients: Float[Tensor, "B T 3 M H W"], levels: Components
    ) -> Components:
        """Each channel's mean given the channels before it."""
        if means.shape[2] == 1:
            return means
        red, green, blue = means.unbind(2)
        r, g, _ = levels.unbind(2)
        a, b, c = coefficients.unbind(2)
        return torch.stack([red, green + a * r, blue + b * r + c * g], dim=2)

    def pixel_log_prob(self, output: DecoderOutput, images: Episode) -> PerPixel:
        flat, pixels = output.flatten(0, 1), images.flatten(0, 1).float()
        if torch.compiler.is_compiling() and supported(flat, pixels, self.components):
            return mixture_log_prob(flat, pixels).unflatten(0, output.shape[:2])
        channels = images.shape[2]
        logits, means, log_scales, coefficients = self._split(output, channels)
        levels = (2 * images.float() - 1).unsqueeze(3)  # (B, T, C, 1, H, W)
        means = self._conditional_means(
            means, coefficients, levels.expand(-1, -1, -1, self.components, -1, -1)
        )
        inverse = (-log_scales).exp()
        upper = (levels - means + 1 / 255) * inverse
        lower = (levels - means - 1 / 255) * inverse
        # ln(s(upper) - s(lower)) = ln s(upper) + ln s(-lower) + ln(1 - e^(lower - upper)): exact,
        # and finite however far in the tails, where the plain difference underflows.
        inside = F.logsigmoid(upper) + F.logsigmoid(-lower)
        inside = inside + (-torch.expm1(-2 / 255 * inverse)).log()
        first, last = levels < -1 + 0.5 / 255, levels > 1 - 0.5 / 255
        log_bin = torch.where(first, F.logsigmoid(upper), inside)
        log_bin = torch.where(last, F.logsigmoid(-lower), log_bin)
        return torch.logsumexp(logits.log_softmax(2) + log_bin.sum(2), dim=2)

    def shift_means(self, output: DecoderOutput, guess: Episode) -> DecoderOutput:
        """Add `guess` to the means. Green and blue means then depend on how much the channels
        before them differ from their guess, not on those channels themselves."""
        rest = output.float().unflatten(2, (-1, self.components))
        channels = guess.shape[2]
        start = (2 * guess.float() - 1).unsqueeze(3)  # (B, T, C, 1, H, W)
        coefficients = rest[:, :, 1 + 2 * channels :].tanh()
        start = start.expand(-1, -1, -1, self.components, -1, -1)
        if channels == 3:
            start = 2 * start - self._conditional_means(start, coefficients, start)
        means = rest[:, :, 1 : 1 + channels] + start
        rest = torch.cat([rest[:, :, :1], means, rest[:, :, 1 + channels :]], dim=2)
        return rest.flatten(2, 3)

    @torch.no_grad()
    def init_last_layer(self, weight: LastWeight, bias: LastBias, width: float) -> None:
        """Initialise means within `width` of zero, scales to `width`, and colours to covary."""
        channels = self._channels(len(weight))
        weight = weight.unflatten(0, (-1, self.components))
        bias = bias.unflatten(0, (-1, self.components))
        weight[1 : 1 + channels] *= 2 * width
        bias[1 : 1 + channels] *= 2 * width
        bias[1 + channels : 1 + 2 * channels] = math.log(width)
        if channels == 3:
            bias[[7, 9]] += 1.0  # green follows red, blue follows green

    def mean(self, output: DecoderOutput) -> Episode:
        """Mixture-weighted locations, each channel given the locations before it.

        For pictures; not the exact mean. Near black and white, samples of a wide component are
        clipped, so their mean lies further inside than its location.
        """
        logits, means, _, coefficients = self._split(output, self._channels(output.shape[2]))
        if means.shape[2] == 3:
            red = means[:, :, 0].clamp(-1, 1)
            green = (means[:, :, 1] + coefficients[:, :, 0] * red).clamp(-1, 1)
            blue = means[:, :, 2] + coefficients[:, :, 1] * red + coefficients[:, :, 2] * green
            means = torch.stack([red, green, blue], dim=2)
        expected = (logits.softmax(2).unsqueeze(2) * means.clamp(-1, 1)).sum(3)
        return ((expected + 1) / 2).clamp(0, 1)

    def sample(self, output: DecoderOutput, generator: torch.Generator | None = None) -> Episode:
        """Sample a component for each pixel, then its channels in turn, rounded to 256 levels."""
        logits, means, log_scales, coefficients = self._split(
            output, self._channels(output.shape[2])
        )
        flat = logits.movedim(2, -1)
        chosen = torch.multinomial(flat.softmax(-1).flatten(0, -2), 1, generator=generator)
        chosen = chosen.view(*flat.shape[:-1])[:, :, None, None]  # (B, T, 1, 1, H, W)

        def pick(parameters: Tensor) -> Tensor:
            index = chosen.expand(-1, -1, parameters.shape[2], -1, -1, -1)
            return parameters.gather(3, index).squeeze(3)

        means, log_scales, coefficients = pick(means), pick(log_scales), pick(coefficients)
        uniform = torch.rand(means.shape, generator=generator, device=means.device)
        noise = log_scales.exp() * torch.logit(uniform, eps=1e-5)
        sampled: list[Tensor] = []
        for channel in range(means.shape[2]):
            mean = means[:, :, channel]
            if channel == 1:
                mean = mean + coefficients[:, :, 0] * sampled[0]
            if channel == 2:
                on_red, on_green = coefficients[:, :, 1], coefficients[:, :, 2]
                mean = mean + on_red * sampled[0] + on_green * sampled[1]
            level = (mean + noise[:, :, channel]).clamp(-1, 1)
            sampled.append(((level + 1) * 127.5).round() / 127.5 - 1)
        return (torch.stack(sampled, dim=2) + 1) / 2


COMPONENTS = 10  # of the mixture. ours


def make_likelihood(name: LikelihoodName) -> Likelihood:
    """The likelihood a config names."""
    return Bernoulli() if name == "bernoulli" else LogisticMixture(COMPONENTS)
