"""Where a sample's block lies, and the key posterior that finds it again.

    gaussian     the key network's mean, as in the paper (§3.3)
    normalised   the same, with means normalised over the batch, so that keys cannot collapse
    cells        a cell of the grid dealt at random
    transport    the key network's mean, moved to a cell of its own by sorting the episode

Blocks lie at key means or cells, never at the key sample that the read uses: that would carry the
key through M for nothing. Places are (x, y) on [-1, 1], keys the same under the prior N(0, 1); the
width of a window is fixed, a block is read as wide as it was written.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from kanerva.config import KeyConfig, MemoryConfig
from kanerva.distributions import ConfinedNormal, DiagonalNormal, as_normal, as_uniform
from kanerva.errors import UserError
from kanerva.memory.blocks import block_windows, paste_blocks, read_blocks
from kanerva.memory.grid import Grid, dealt, matched
from kanerva.shapes import Blocks, Cells, Episode, FeatureMaps, MemoryMap, Points

KeyPosterior = ConfinedNormal | DiagonalNormal
_NARROW = 16  # ours: maps that a key is made from


@dataclass(frozen=True)
class Places:
    """Where an episode's samples lie: points on [-1, 1], and their cells where there is a grid."""

    points: Points
    cells: Cells | None


class Placer(nn.Module):
    """One of the placements above, with the reads and writes that go with it."""

    def __init__(
        self, memory: MemoryConfig, keys: KeyConfig, features: int, side: tuple[int, int]
    ) -> None:
        super().__init__()
        self.config = memory
        self.grid: Grid | None = None
        self.block = (memory.block, memory.block)
        if memory.placement in ("cells", "transport"):
            self.grid = Grid(memory.capacity, memory.size)
            if memory.read == "hard":
                self.block = self.grid.block
            else:
                self.spread = nn.Parameter(torch.zeros(2))  # logits: share of a cell that q fills
        if memory.placement != "cells":
            self.net = nn.Sequential(
                nn.Conv2d(features, _NARROW, 1),
                nn.Flatten(),
                nn.Linear(_NARROW * side[0] * side[1], keys.hidden),
                nn.SiLU(),
                nn.Linear(keys.hidden, 4),
            )
        if memory.placement in ("normalised", "transport"):
            self.norm = nn.BatchNorm1d(2, affine=False)

    # Where samples go

    def propose(self, maps: FeatureMaps) -> DiagonalNormal | None:
        """q(y|x) of the key network, (B, T, 2); None where cells are dealt."""
        if self.config.placement == "cells":
            return None
        normal = DiagonalNormal.from_network(
            self.net(maps.flatten(0, 1)).unflatten(0, maps.shape[:2])
        )
        if self.config.placement == "gaussian":
            return normal
        flat, norm = normal.mean.flatten(0, 1), self.norm
        if norm.training and len(flat) == 1:  # one image has no spread of its own
            mean = F.batch_norm(flat, norm.running_mean, norm.running_var, eps=norm.eps)
        else:
            mean = norm(flat)
        mean = mean.view_as(normal.mean)
        return DiagonalNormal(mean, normal.log_std - 1)  # ours: starts narrow

    def place(
        self,
        proposal: DiagonalNormal | None,
        batch: int,
        length: int,
        device: torch.device,
        generator: torch.Generator | None = None,
    ) -> Places:
        """A place for each sample of whole episodes."""
        self.check_room(length)
        if self.grid is None:
            assert proposal is not None
            return Places(as_uniform(proposal.mean), None)
        if proposal is None:
            cells = dealt(batch, length, self.grid, generator, device)
        else:
            cells = matched(as_uniform(proposal.mean), self.grid, generator)
        return self.at_cells(cells)

    def vacant(
        self,
        proposal: DiagonalNormal | None,
        held: Bool[Tensor, "B slots"],
        length: int,
        generator: torch.Generator | None = None,
    ) -> Places:
        """For each sample a free cell: the nearest to its key, or any where cells are dealt.
        Several samples may be given the same one. Without a grid, the key mean itself."""
        if self.grid is None:
            assert proposal is not None
            return Places(as_uniform(proposal.mean), None)
        centres = self.grid.centres(held.device)
        if proposal is None:
            shape = (len(held), length, self.grid.capacity)
            distance = torch.rand(shape, generator=generator, device=held.device)
        else:
            distance = (as_uniform(proposal.mean)[:, :, None] - centres).square().sum(-1)
        return self.at_cells(distance.masked_fill(held[:, None], torch.inf).argmin(dim=2))

    def at_cells(self, cells: Cells) -> Places:
        assert self.grid is not None
        return Places(self.grid.centres(cells.device)[cells], cells)

    def check_room(self, length: int) -> None:
        if length > self.config.capacity:
            raise UserError(
                f"the memory is full: its capacity is {self.config.capacity} blocks, and it would "
                f"have to hold {length}"
            )

    # Keys

    def posterior(
        self,
        places: Places,
        proposal: DiagonalNormal | None,
        written: Bool[Tensor, "B T"],
        empty: Float[Tensor, " B"],
    ) -> KeyPosterior:
        """q(y|.) of samples that lie at `places`, given everything M was built from.

        A written sample's key is confined to its cell, all of it for hard reads. One that is not
        written looks into a free cell; hard reads see the same zeros in each of the `empty` ones,
        so its key need only name one of them. Where none is free that has no mass.
        """
        if self.grid is None:
            assert proposal is not None
            return DiagonalNormal(as_normal(places.points), proposal.log_std)
        wide, high = 1 / self.grid.columns, 1 / self.grid.rows
        one = torch.ones_like(places.points[..., :1])
        cell = torch.cat([wide * one, high * one], dim=-1)
        if self.config.read == "hard":
            count = torch.where(written, 1.0, empty[:, None])
            return ConfinedNormal(places.points, cell, count / self.grid.capacity)
        half = torch.where(written[..., None], self.spread.sigmoid() * cell, cell)
        possible = written | (empty > 0)[:, None]
        return ConfinedNormal(places.points, half, half.prod(dim=-1) * possible)

    # Blocks in and out

    def windows(self, points: Points) -> Float[Tensor, "B T 1 3"]:
        """Points as windows of this placer's blocks."""
        return block_windows(points, self.block[0], self.config.size)[:, :, None]

    def paste(self, blocks: Blocks, places: Places) -> MemoryMap:
        """M: the sum of the blocks, each where its sample lies."""
        blocks = blocks.float()
        if self.config.read == "hard":
            assert self.grid is not None and places.cells is not None
            return self.grid.paste(blocks, places.cells)
        with torch.autocast(blocks.device.type, enabled=False):
            size = (self.config.size, self.config.size)
            return paste_blocks(blocks[:, :, None], self.windows(places.points), size)

    def read(self, memory: MemoryMap, keys: Points) -> Blocks:
        """The trace each key points at (Eq. 5): its whole cell, or a window around it."""
        points = as_uniform(keys)
        if self.config.read == "hard":
            assert self.grid is not None
            return self.grid.read(memory, self.grid.cell_of(points))
        with torch.autocast(memory.device.type, enabled=False):
            return read_blocks(memory.float(), self.windows(points), self.block)[:, :, 0]


def locality_loss(keys: Points, episode: Episode) -> Float[Tensor, ""]:
    """Like beside like: the t-SNE objective between images and keys of a batch, no labels.

    Images of half the side are compared pixel by pixel; how near counts as near is set for each
    image by its tenth neighbour. Near pairs attract their keys, all pairs repel (Student's t).
    """
    images = F.avg_pool2d(episode.flatten(0, 1).float(), 2).flatten(1)
    y = keys.flatten(0, 1).float()
    count = len(y)
    if count < 3:
        return y.sum() * 0
    itself = torch.eye(count, dtype=torch.bool, device=y.device)
    with torch.no_grad():
        apart = torch.cdist(images, images).square().masked_fill(itself, torch.inf)
        near = apart.topk(min(10, count - 1), largest=False).values[:, -1:]
        p = (-2 * apart / near.clamp(min=1e-6)).softmax(dim=1)
        p = (p + p.T) / (2 * count)
    kernel = (1 + 4 * (y[:, None] - y).square().sum(-1)).reciprocal().masked_fill(itself, 0)
    q = kernel / kernel.sum()
    return (p * (p.clamp(min=1e-12) / q.clamp(min=1e-12)).log()).sum()
