"""Image features in a memory: write sixteen pictures' maps, find one from a damaged half.

A small convolutional encoder of your own makes maps (8, 7, 7) of random shapes, drawn here. They
are written as blocks; a cue with one half hidden and noise over the rest is encoded in the same
way, read, and decoded. Beside it, the same network without the memory, which must guess the hidden
half from the cue alone, and the nearest picture by pixels, which needs the pictures themselves.

    python examples/memory_of_image_features.py [steps]
"""

import sys

import kanerva
from kanerva.memory.block_memory import Read

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIDE, PICTURES, MAPS = 28, 16, (8, 7, 7)


def draw_shapes(batch: int, generator: torch.Generator) -> Tensor:
    """Blobs with wavy outlines, (B, 16, 1, 28, 28) on [0, 1]."""
    waves = torch.rand(batch, PICTURES, 4, 2, 1, 1, generator=generator)  # 4: size and 3 waves
    place = 8 * torch.rand(batch, PICTURES, 2, 1, 1, generator=generator) - 4
    line = torch.arange(SIDE) - (SIDE - 1) / 2
    y, x = line[:, None] - place[:, :, 0], line - place[:, :, 1]
    angle, radius = torch.atan2(y, x), (y.square() + x.square()).sqrt()
    outline = 4 + 5 * waves[:, :, 0, 0]
    for k in (1, 2, 3):
        size, phase = waves[:, :, k].unbind(2)
        outline = outline + 4 * (size - 0.5) * torch.cos((k + 1) * angle + 6.28 * phase)
    return torch.sigmoid(2 * (outline - radius))[:, :, None]


def damage(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """One half of each hidden (left, right, top or bottom), and noise over the rest."""
    noise = 0.3 * torch.randn(pictures.shape, generator=generator)
    side = torch.randint(4, pictures.shape[:2], generator=generator)
    first = (torch.arange(SIDE) < SIDE // 2).expand(SIDE, SIDE)
    halves = torch.stack([first, ~first, first.T, ~first.T])
    return (pictures + noise) * halves[side][:, :, None]


class Restore(nn.Module):
    """Pictures and damaged cues to restored pictures, with a memory or without."""

    def __init__(self, memory: bool) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(1, 16, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, MAPS[0], 4, stride=2, padding=1),
        )
        self.memory = kanerva.BlockMemory(features=MAPS, blocks=PICTURES) if memory else None
        self.decode = nn.Sequential(
            nn.ConvTranspose2d(MAPS[0], 16, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
        )

    def forward(self, pictures: Tensor, cues: Tensor) -> tuple[Tensor, Read | None]:
        """Restored pictures before a sigmoid, and what each cue found."""
        maps, found = self.maps(cues), None
        if self.memory is not None:
            found = self.memory.read(self.memory.write(self.maps(pictures)), maps)
            maps = found.value
        return self.decode(maps.flatten(0, 1)).unflatten(0, cues.shape[:2]), found

    def maps(self, pictures: Tensor) -> Tensor:
        return self.encode(pictures.flatten(0, 1)).unflatten(0, pictures.shape[:2])


def train(memory: bool, steps: int, seed: int = 0) -> tuple[float, float]:
    """On new shapes: mean squared error of restored pixels; share of cues whose picture is found
    (0 without a memory)."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Restore(memory)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    right = torch.arange(PICTURES).repeat(8)
    for _ in range(steps):
        pictures = draw_shapes(8, generator)
        restored, found = model(pictures, damage(pictures, generator))
        loss = F.binary_cross_entropy_with_logits(restored, pictures)
        if found is not None:  # cue t was made from picture t, whose block is in cell t
            loss = loss + 0.1 * F.cross_entropy(found.score.flatten(0, 1), right)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        pictures = draw_shapes(64, generator)
        restored, found = model(pictures, damage(pictures, generator))
        error = F.mse_loss(restored.sigmoid(), pictures).item()
    if found is None:
        return error, 0.0
    return error, (found.handle == torch.arange(PICTURES)).float().mean().item()


def nearest(seed: int = 0) -> float:
    """Share of cues whose picture is the nearest by pixels."""
    generator = torch.Generator().manual_seed(seed)
    pictures = draw_shapes(64, generator)
    apart = torch.cdist(damage(pictures, generator).flatten(2), pictures.flatten(2))
    return (apart.argmin(dim=2) == torch.arange(PICTURES)).float().mean().item()


def main(steps: int = 200, seed: int = 0) -> dict[str, tuple[float, float]]:
    results = {"BlockMemory": train(True, steps, seed), "no memory": train(False, steps, seed)}
    print(f"after {steps} steps, {PICTURES} pictures: error of pixels, pictures found")
    print(f"{'BlockMemory':14} {results['BlockMemory'][0]:8.4f} {results['BlockMemory'][1]:8.1%}")
    print(f"{'no memory':14} {results['no memory'][0]:8.4f} {'-':>8}")
    print(f"{'nearest pixels':14} {'-':>8} {nearest(seed):8.1%}")
    return results


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
