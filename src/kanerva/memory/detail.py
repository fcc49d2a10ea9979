"""Detail: the pixels that blocks hold in addition to their gist, and the cap on their bits."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from kanerva.memory.fixed_point import BIT
from kanerva.shapes import Blocks

ALL = 65535  # the cap, in bits, that means no cap
MISMATCH = 0.001  # p(an image is not the one whose pixels are stored)
Slots = Int[Tensor, "*B slots"]


@dataclass(frozen=True, eq=False)
class Detail:
    """The detail of each cell's block; zeros for a free cell. Costs are in 256ths of a bit."""

    pixels: UInt8[Tensor, "*B slots n"]  # 0 or 1; only the first `stored` ones, zeros after them
    pixel_costs: Int[Tensor, "*B slots n"]
    gist_costs: Int[Tensor, "*B slots groups"]
    caps: Slots  # bits that the block may take

    @classmethod
    def empty(cls, batch: int, slots: int, groups: int, n: int, device: torch.device) -> "Detail":
        """The detail of a batch of empty memories with images of `n` pixels."""
        zeros = torch.zeros(batch, slots, n + groups, dtype=torch.long, device=device)
        costs, gists = zeros[..., :n], zeros[..., n:]
        caps = torch.zeros(batch, slots, dtype=torch.long, device=device)
        return cls(costs.to(torch.uint8), costs, gists, caps)

    def apply(self, function: Callable[[Tensor], Tensor]) -> "Detail":
        """Apply a function to every field."""
        return Detail(*[function(getattr(self, f.name)) for f in fields(self)])

    @classmethod
    def join(cls, parts: "list[Detail]", how: Callable[[list[Tensor]], Tensor]) -> "Detail":
        """Join several details field by field, by `torch.stack` or `torch.cat` for example."""
        return cls(*[how([getattr(part, f.name) for part in parts]) for f in fields(cls)])

    def put(self, cells: Int[Tensor, "B T"], new: "Detail") -> "Detail":
        """Replace the detail of some cells."""

        def scatter(pair: list[Tensor]) -> Tensor:
            old, more = pair
            at = cells.view(*cells.shape, *[1] * (old.ndim - 2)).expand_as(more)
            return old.scatter(1, at, more)

        return Detail.join([self, new], scatter)

    def at(self, cells: Int[Tensor, "B T"]) -> "Detail":
        """The detail of some cells."""

        def gather(part: Tensor) -> Tensor:
            index = cells.view(*cells.shape, *[1] * (part.ndim - 2))
            return part.gather(1, index.expand(*cells.shape, *part.shape[2:]))

        return self.apply(gather)

    # What blocks hold

    @property
    def _is_held(self) -> Bool[Tensor, "*B slots parts"]:
        """Whether each block holds each group of the gist, then each pixel: up to and including the
        one at which the cost reaches the cap. A decoder can compute the same."""
        costs = torch.cat([self.gist_costs, self.pixel_costs], dim=-1)
        return costs.cumsum(dim=-1) - costs < BIT * self.caps[..., None]

    @property
    def is_kept(self) -> Bool[Tensor, "*B slots groups"]:
        """Whether each block holds each group of the gist."""
        return self._is_held[..., : self.gist_costs.shape[-1]]

    @property
    def kept(self) -> Slots:
        """The number of groups of the gist that each block holds."""
        return self.is_kept.sum(dim=-1)

    @property
    def is_stored(self) -> Bool[Tensor, "*B slots n"]:
        """Whether each block stores each pixel."""
        return self._is_held[..., self.gist_costs.shape[-1] :]

    @property
    def stored(self) -> Slots:
        """The number of pixels that each block stores."""
        return self.is_stored.sum(dim=-1)

    @property
    def bits(self) -> Float[Tensor, "*B slots"]:
        """Bits of each block."""
        costs = self.gist_costs.sum(dim=-1) + self.pixel_costs.sum(dim=-1)
        return costs.double() / BIT

    def within(self, caps: Slots) -> "Detail":
        """Shrink blocks to caps: a block may exceed its cap only by its last pixel or, if it holds
        none, its last group. Pixels are dropped first, then groups of the gist, from the last. What
        is dropped becomes zeros."""
        less = replace(self, caps=torch.minimum(self.caps, caps))
        groups = self.gist_costs.shape[-1]
        gists, pixels = less._is_held.tensor_split([groups], dim=-1)
        return Detail(
            self.pixels * pixels, self.pixel_costs * pixels, self.gist_costs * gists, less.caps
        )

    def cut(self, blocks: Blocks) -> Blocks:
        """Zero the numbers and flags of the groups that blocks do not keep."""
        flags, flat = self.is_kept, blocks.flatten(2)
        each = flat.shape[-1] // flags.shape[-1] - 1
        held = torch.cat([flags.repeat_interleave(each, dim=-1), flags], dim=-1)
        return (flat * held).unflatten(2, blocks.shape[2:])


def symbol_digest(gists: Float[Tensor, "N D"], detail: Detail) -> bytes:
    """SHA-256 of blocks as integers, to check that decoding returns what was encoded."""
    total = hashlib.sha256()
    for part in (gists.to(torch.int8), detail.kept.to(torch.int16), detail.caps.to(torch.int32)):
        total.update(part.cpu().contiguous().numpy().tobytes())
    total.update(detail.stored.to(torch.int32).cpu().numpy().tobytes())
    total.update(detail.pixels.cpu().contiguous().numpy().tobytes())
    return total.digest()
