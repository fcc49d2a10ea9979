"""A split of a data set in memory: bytes, in a fixed order."""

import hashlib
from dataclasses import dataclass

import torch

from kanerva.errors import UserError
from kanerva.shapes import Labels, Pixels


@dataclass(frozen=True)
class ImageSet:
    """The images of one split, before any binarization. In drawings ink is 255 and paper 0.

    Labels say what an image shows (a digit, a character, a code point); no model sees them. Groups
    are for video frames: the path that each frame belongs to. A path's frames are adjacent and in
    order. Episodes are then runs of neighbouring frames instead of random images.
    """

    name: str
    split: str
    images: Pixels
    labels: Labels | None = None
    groups: Labels | None = None

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            kind = str(self.images.dtype).removeprefix("torch.")
            raise UserError(
                f"{self.name} {self.split} holds {kind} {tuple(self.images.shape)}; images are "
                f"uint8 (N, C, H, W)"
            )

    def __len__(self) -> int:
        return self.images.shape[0]

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.image_shape))
        return f"ImageSet({self.name} {self.split}: .images {len(self)} x {shape}, uint8)"

    @property
    def image_shape(self) -> tuple[int, int, int]:
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def fingerprint(self) -> str:
        """SHA-256 of shape and pixels: equal for the same images in the same order."""
        return pixel_hash(self.images)


def pixel_hash(pixels: Pixels) -> str:
    """SHA-256 of the shape and then the bytes, in hex."""
    digest = hashlib.sha256(repr(tuple(pixels.shape)).encode())
    digest.update(pixels.cpu().contiguous().numpy().data)
    return digest.hexdigest()
