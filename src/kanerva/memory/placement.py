"""Where a sample's block is placed, and the key posterior that reads it.

    RandomCells  a random cell; a key reads the whole cell that contains it
    Transport    the mean of the key network, moved to a cell by sorting the episode, so that each
                 sample has its own; a key reads a window around it, which may lie between cells

Blocks are placed in cells, never at the key sample that a read uses: M would then reveal the key at
no cost. Places are (x, y) on [-1, 1]; keys are the same points under the prior N(0, 1). A block is
as large as a cell, so no two blocks share a pixel.
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from kanerva.config import BitsMemoryConfig, KppMemoryConfig
from kanerva.distributions import ConfinedNormal, DiagonalNormal, as_uniform
from kanerva.errors import UserError
from kanerva.memory.blocks import block_windows, read_blocks
from kanerva.memory.grid import Grid, deal, match
from kanerva.seeding import Noise, as_generator
from kanerva.shapes import Blocks, Cells, Episode, FeatureMaps, MemoryMap, Points

Held = Bool[Tensor, "B slots"]  # whether a cell holds a block
_NARROW = 16  # ours: channels of the maps that a key is computed from


class Placement(nn.Module, ABC):
    """A grid of cells, and a rule that assigns samples to them."""

    def __init__(self, capacity: int, size: int) -> None:
        super().__init__()
        self.grid = Grid(capacity, size)

    # Where samples go

    @abstractmethod
    def propose(self, maps: FeatureMaps) -> DiagonalNormal | None:
        """q(y|x) of a key network, (B, T, 2); None if there is no key network."""

    @abstractmethod
    def place(
        self,
        proposal: DiagonalNormal | None,
        batch: int,
        length: int,
        noise: Noise,
        device: torch.device,
    ) -> Cells:
        """Assign every sample of whole episodes to a different cell."""

    @abstractmethod
    def find_free(
        self, proposal: DiagonalNormal | None, held: Held, length: int, noise: Noise
    ) -> Cells:
        """Find a free cell for each sample; several samples may get the same one."""

    # Keys

    @abstractmethod
    def posterior(
        self, cells: Cells, written: Bool[Tensor, "B T"], free: Float[Tensor, " B"]
    ) -> ConfinedNormal:
        """q(y|.) of samples in `cells`. `written`: whether each is in M; `free`: how many cells of
        each memory are free."""

    @abstractmethod
    def read(self, memory: MemoryMap, keys: Points) -> Blocks:
        """The trace that each key points at (Eq. 5)."""

    def require_room(self, length: int) -> None:
        """Refuse more than `capacity` blocks."""
        if length > self.grid.capacity:
            raise UserError(
                f"the memory is full: its capacity is {self.grid.capacity} blocks, and it would "
                f"have to hold {length}: kanerva.load(NAME, capacity={length}) has room, and its "
                "append accepts this memory"
            )

    def _box(self, cells: Cells) -> tuple[Points, Points]:
        """The centre of each cell, and its half widths along x and y."""
        centres = self.grid.centres(cells.device)[cells]
        one = torch.ones_like(centres[..., :1])
        return centres, torch.cat([one / self.grid.columns, one / self.grid.rows], dim=-1)


class RandomCells(Placement):
    """Each sample gets a random cell. A key only has to name its cell: ln(capacity) nats."""

    def propose(self, maps: FeatureMaps) -> None:
        return None

    def place(
        self,
        proposal: DiagonalNormal | None,
        batch: int,
        length: int,
        noise: Noise,
        device: torch.device,
    ) -> Cells:
        self.require_room(length)
        return deal(batch, length, self.grid, noise, device)

    def find_free(
        self, proposal: DiagonalNormal | None, held: Held, length: int, noise: Noise
    ) -> Cells:
        shape = (len(held), length, self.grid.capacity)
        random = torch.rand(shape, generator=as_generator(noise), device=held.device)
        return random.masked_fill(held[:, None], torch.inf).argmin(dim=2)

    def posterior(
        self, cells: Cells, written: Bool[Tensor, "B T"], free: Float[Tensor, " B"]
    ) -> ConfinedNormal:
        """The key of a written sample may be anywhere in its cell. A sample that is not written
        reads a free cell. All `free` cells read as the same zeros, so its key only has to name one
        of them; if none is free, q has no mass and its KL is infinite."""
        centres, half = self._box(cells)
        count = torch.where(written, 1.0, free[:, None])
        return ConfinedNormal(centres, half, count / self.grid.capacity)

    def read(self, memory: MemoryMap, keys: Points) -> Blocks:
        """Read the whole cell that contains each key."""
        return self.grid.read(memory, self.grid.cell_of(as_uniform(keys)))


class Transport(Placement):
    """Learned keys: an episode's keys are sorted onto the grid, so that similar images are near."""

    def __init__(
        self, capacity: int, size: int, hidden: int, features: int, side: tuple[int, int]
    ) -> None:
        super().__init__(capacity, size)
        self.size = size
        self.spread = nn.Parameter(torch.zeros(2))  # logit of the share of a cell that q fills
        self.net = nn.Sequential(
            nn.Conv2d(features, _NARROW, 1),
            nn.Flatten(),
            nn.Linear(_NARROW * side[0] * side[1], hidden),
            nn.SiLU(),
            nn.Linear(hidden, 4),
        )
        self.norm = nn.BatchNorm1d(2, affine=False)  # so that keys cannot collapse

    def propose(self, maps: FeatureMaps) -> DiagonalNormal:
        normal = DiagonalNormal.from_network(
            self.net(maps.flatten(0, 1)).unflatten(0, maps.shape[:2])
        )
        flat, norm = normal.mean.flatten(0, 1), self.norm
        if norm.training and len(flat) == 1:  # one image has no variance: use running statistics
            mean = F.batch_norm(flat, norm.running_mean, norm.running_var, eps=norm.eps)
        else:
            mean = norm(flat)
        return DiagonalNormal(mean.view_as(normal.mean), normal.log_std - 1)  # ours: starts narrow

    def place(
        self,
        proposal: DiagonalNormal | None,
        batch: int,
        length: int,
        noise: Noise,
        device: torch.device,
    ) -> Cells:
        assert proposal is not None
        self.require_room(length)
        return match(as_uniform(proposal.mean), self.grid, noise)

    def find_free(
        self, proposal: DiagonalNormal | None, held: Held, length: int, noise: Noise
    ) -> Cells:
        assert proposal is not None
        centres = self.grid.centres(held.device)
        distance = (as_uniform(proposal.mean)[:, :, None] - centres).square().sum(-1)
        return distance.masked_fill(held[:, None], torch.inf).argmin(dim=2)

    def posterior(
        self, cells: Cells, written: Bool[Tensor, "B T"], free: Float[Tensor, " B"]
    ) -> ConfinedNormal:
        """The prior, truncated to a box: for a written sample a learned share of its cell, for an
        unwritten one a whole free cell. If none is free, q has no mass and its KL is infinite."""
        centres, cell = self._box(cells)
        half = torch.where(written[..., None], self.spread.sigmoid() * cell, cell)
        possible = written | (free > 0)[:, None]
        return ConfinedNormal(centres, half, half.prod(dim=-1) * possible)

    def read(self, memory: MemoryMap, keys: Points) -> Blocks:
        """Read a window around each key, as large as a cell."""
        with torch.autocast(memory.device.type, enabled=False):
            windows = block_windows(as_uniform(keys), self.grid.block[0], self.size)[:, :, None]
            return read_blocks(memory.float(), windows, self.grid.block)[:, :, 0]


def make_placement(
    config: KppMemoryConfig | BitsMemoryConfig, hidden: int, features: int, side: tuple[int, int]
) -> Placement:
    """Make the placement that a config names. `hidden`: units of the key network, if it has one."""
    if config.placement == "cells":
        return RandomCells(config.capacity, config.size)
    if config.placement == "transport":
        return Transport(config.capacity, config.size, hidden, features, side)
    raise UserError(f"make_placement does not know placement={config.placement}")


def locality_loss(keys: Points, episode: Episode) -> Float[Tensor, ""]:
    """Place similar images near each other: the t-SNE objective between the images and the keys of
    a batch. It uses no labels.

    Images are halved in size and compared pixel by pixel. The distance to its tenth neighbour sets
    the bandwidth for each image. Near pairs attract their keys, all pairs repel (Student's t).
    """
    images = F.avg_pool2d(episode.flatten(0, 1).float(), 2).flatten(1)
    y = keys.flatten(0, 1).float()
    count = len(y)
    if count < 3:
        return y.sum() * 0
    diagonal = torch.eye(count, dtype=torch.bool, device=y.device)
    with torch.no_grad():
        distance = torch.cdist(images, images).square().masked_fill(diagonal, torch.inf)
        bandwidth = distance.topk(min(10, count - 1), largest=False).values[:, -1:]
        p = (-2 * distance / bandwidth.clamp(min=1e-6)).softmax(dim=1)
        p = (p + p.T) / (2 * count)
    kernel = (1 + 4 * (y[:, None] - y).square().sum(-1)).reciprocal().masked_fill(diagonal, 0)
    q = kernel / kernel.sum()
    return (p * (p.clamp(min=1e-12) / q.clamp(min=1e-12)).log()).sum()
