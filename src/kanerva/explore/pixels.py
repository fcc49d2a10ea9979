"""Images as text for JSON, and cues: images that are partly hidden, noisy or shifted."""

import base64
import binascii
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from kanerva.errors import UserError

Image = Float[Tensor, "C H W"]
Shape = tuple[int, int, int]


def to_text(pixels: Float[Tensor, "..."]) -> str:
    """Encode numbers on [0, 1] as bytes, channel by channel, in base64."""
    levels = (pixels.detach().float().cpu().clamp(0, 1) * 255).round().to(torch.uint8)
    return base64.b64encode(levels.contiguous().numpy().tobytes()).decode()


def from_text(text: str, shape: tuple[int, ...]) -> UInt8[Tensor, "..."]:
    """Decode bytes of a shape; refuse anything else."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError("an image must be bytes in base64") from error
    size = torch.Size(shape).numel()
    if len(raw) != size:
        raise UserError(f"an image must be {size} bytes, got {len(raw)}")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(shape)


def to_image(text: str, shape: Shape, binary: bool) -> Image:
    """Decode an image for a model: 0 or 1 if its pixels are binary."""
    levels = from_text(text, shape)
    return (levels > 127).float() if binary else levels.float() / 255


def as_ink(content: bytes, binary: bool) -> str:
    """Encode a file's pixels in base64. For binary models ink is 1, so an image that is mostly
    bright is inverted: it is dark ink on bright paper."""
    levels = torch.frombuffer(bytearray(content), dtype=torch.uint8).float() / 255
    if binary:
        levels = ((1 - levels if levels.mean() > 0.5 else levels) > 0.5).float()
    return to_text(levels)


@dataclass(frozen=True)
class Damage:
    """How a user damaged an image to make a cue."""

    hidden: Bool[Tensor, "H W"]
    noise: Literal["none", "salt_pepper", "gaussian"] = "none"
    amount: float = 0.0  # fraction of pixels, or standard deviation
    down: int = 0
    right: int = 0
    seed: int = 0

    def apply(self, image: Image) -> Image:
        """Make the cue: add noise everywhere, shift, then set hidden pixels to 0."""
        chance = torch.Generator().manual_seed(self.seed)
        cue = image
        if self.amount > 0 and self.noise == "salt_pepper":
            hit = torch.rand(image.shape, generator=chance) < self.amount
            cue = torch.where(hit, torch.rand(image.shape, generator=chance).round(), cue)
        elif self.amount > 0 and self.noise == "gaussian":
            cue = cue + self.amount * torch.randn(image.shape, generator=chance)
        cue = moved(cue, self.down, self.right)
        return cue.masked_fill(self.hidden, 0)

    @property
    def observed(self) -> Float[Tensor, "H W"]:
        """1 where a pixel is visible."""
        return (~self.hidden).float()

    @property
    def shifts(self) -> int:
        """The larger of the two shifts, in pixels."""
        return max(abs(self.down), abs(self.right))


def moved(image: Image, down: int, right: int) -> Image:
    """Shift an image by whole pixels; pixels from outside are 0."""
    height, width = image.shape[-2:]
    if abs(down) >= height or abs(right) >= width:
        return torch.zeros_like(image)
    rows, columns = height - abs(down), width - abs(right)
    part = image[..., max(0, -down) :, max(0, -right) :][..., :rows, :columns]
    result = torch.zeros_like(image)
    result[..., max(0, down) :, max(0, right) :][..., :rows, :columns] = part
    return result
