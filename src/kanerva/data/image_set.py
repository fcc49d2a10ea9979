"""A split of a data set as it is held in memory: whole bytes, in an order that never changes."""

import hashlib
from dataclasses import dataclass

from kanerva.shapes import Labels, Pixels


@dataclass(frozen=True)
class ImageSet:
    """The images of one split, before any binarization. Ink is 255 and paper 0 where that applies.

    Labels say what an image shows (a digit, a character, a code point); no model is given them.
    Groups are for frames: the path each is from. A path's frames are adjacent and in order, and
    episodes are then runs of neighbours from one path instead of images from anywhere.
    """

    name: str
    split: str
    images: Pixels
    labels: Labels | None = None
    groups: Labels | None = None

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
        """SHA-256 of shape and pixels: equal where the same images are held in one order."""
        return pixel_hash(self.images)


def pixel_hash(pixels: Pixels) -> str:
    """SHA-256, in hex, of the shape and then the bytes."""
    digest = hashlib.sha256(repr(tuple(pixels.shape)).encode())
    digest.update(pixels.cpu().contiguous().numpy().data)
    return digest.hexdigest()
