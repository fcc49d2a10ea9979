"""Memory: what a user holds after writing an episode. Saved as safetensors, never as a pickle."""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from kanerva.errors import UserError
from kanerva.tensorfile import read_tensors, write_tensors

_FORMAT = "kanerva-memory-1"


@dataclass(frozen=True, eq=False)
class Memory:
    """The memory of one episode (Cm, Hm, Wm), or of a batch of episodes (B, Cm, Hm, Wm)."""

    map: Float[Tensor, "*B Cm Hm Wm"]

    def __post_init__(self) -> None:
        if self.map.ndim not in (3, 4):
            shape = tuple(self.map.shape)
            raise UserError(f"a memory map is (Cm, Hm, Wm) or (B, Cm, Hm, Wm), got {shape}")

    @property
    def is_batch(self) -> bool:
        """Whether this holds several episodes' memories."""
        return self.map.ndim == 4

    @property
    def floats(self) -> int:
        """Numbers in one episode's memory: what a bound gets for free, so say how many."""
        return self.map[0].numel() if self.is_batch else self.map.numel()

    def __getitem__(self, episode: int) -> "Memory":
        """One episode's memory out of a batch."""
        if not self.is_batch:
            raise UserError("this memory holds one episode; there is nothing to index")
        return Memory(self.map[episode])

    def to(self, device: str | torch.device) -> "Memory":
        return Memory(self.map.to(device))

    def save(self, path: str | Path) -> None:
        """Write one file, all of it or nothing."""
        write_tensors(Path(path), {"map": self.map}, {"format": _FORMAT})

    @classmethod
    def load(cls, path: str | Path) -> "Memory":
        """Read what `save` wrote; a file that is no memory, or was altered, is refused."""
        tensors, about = read_tensors(Path(path))
        if about.get("format") != _FORMAT or "map" not in tensors:
            raise UserError(f"{path} is not a saved memory (format {about.get('format')})")
        if not tensors["map"].is_floating_point() or not tensors["map"].isfinite().all():
            raise UserError(f"{path} holds no finite floating-point map")
        return cls(tensors["map"].float())

    def to_image(self, scale: int = 4) -> Image.Image:
        """The map as a picture: three channels as colours, else channels side by side; a batch in
        a row. Each map is stretched to its own range."""
        maps = (self.map if self.is_batch else self.map[None]).detach().float().cpu()
        low, high = maps.amin(dim=(1, 2, 3), keepdim=True), maps.amax(dim=(1, 2, 3), keepdim=True)
        levels = ((maps - low) / (high - low).clamp(min=1e-12) * 255).round().to(torch.uint8)
        if levels.shape[1] == 3:
            picture = Image.fromarray(torch.cat(list(levels), dim=2).permute(1, 2, 0).numpy())
        else:
            picture = Image.fromarray(torch.cat(list(levels.flatten(0, 1)), dim=1).numpy())
        size = (picture.width * scale, picture.height * scale)
        return picture.resize(size, Image.Resampling.NEAREST)
