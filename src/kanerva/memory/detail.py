"""What blocks hold beside their gist: pixels, and how many bits each block may take."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from kanerva.memory.fixed_point import BIT
from kanerva.shapes import Blocks

ALL = 65535  # a cap that holds nothing back, in bits
MISMATCH = 0.001  # the probability that an image is not the one whose pixels are stored
Slots = Int[Tensor, "*B slots"]


@dataclass(frozen=True, eq=False)
class Detail:
    """Cell by cell, zeros where one is free. Costs are in 256ths of a bit."""

    pixels: UInt8[Tensor, "*B slots n"]  # the first `stored` of them
    pixel_costs: Int[Tensor, "*B slots n"]
    gist_costs: Int[Tensor, "*B slots groups"]
    kept: Slots  # groups of the gist that are held
    caps: Slots  # bits that a block may take

    @classmethod
    def empty(cls, batch: int, slots: int, groups: int, n: int, device: torch.device) -> "Detail":
        """Of a batch of memories that hold nothing."""
        zeros = torch.zeros(batch, slots, n + groups, dtype=torch.long, device=device)
        costs, gists = zeros[..., :n], zeros[..., n:]
        none = torch.zeros(batch, slots, dtype=torch.long, device=device)
        return cls(costs.to(torch.uint8), costs, gists, none, none)

    def apply(self, function: Callable[[Tensor], Tensor]) -> "Detail":
        """The same of every part."""
        return Detail(*[function(getattr(self, f.name)) for f in fields(self)])

    @classmethod
    def join(cls, parts: "list[Detail]", how: Callable[[list[Tensor]], Tensor]) -> "Detail":
        """Several as one."""
        return cls(*[how([getattr(part, f.name) for part in parts]) for f in fields(cls)])

    def put(self, cells: Int[Tensor, "B T"], new: "Detail") -> "Detail":
        """With something in some cells."""

        def scatter(pair: list[Tensor]) -> Tensor:
            old, more = pair
            at = cells.view(*cells.shape, *[1] * (old.ndim - 2)).expand_as(more)
            return old.scatter(1, at, more)

        return Detail.join([self, new], scatter)

    def at(self, cells: Int[Tensor, "B T"]) -> "Detail":
        """Of some cells."""

        def gather(part: Tensor) -> Tensor:
            index = cells.view(*cells.shape, *[1] * (part.ndim - 2))
            return part.gather(1, index.expand(*cells.shape, *part.shape[2:]))

        return self.apply(gather)

    # What is held

    @property
    def stored(self) -> Slots:
        """Pixels of each image: none without a whole gist; from there up to the one that reaches
        the cap, which a reader can follow."""
        whole = self.kept == self.gist_costs.shape[-1]
        gist = self.gist_costs.sum(dim=-1, keepdim=True)
        before = gist + self.pixel_costs.cumsum(dim=-1) - self.pixel_costs
        return ((before < BIT * self.caps[..., None]) & whole[..., None]).sum(dim=-1)

    @property
    def is_stored(self) -> Bool[Tensor, "*B slots n"]:
        """Whether a block holds a pixel."""
        places = torch.arange(self.pixels.shape[-1], device=self.pixels.device)
        return places < self.stored[..., None]

    @property
    def bits(self) -> Float[Tensor, "*B slots"]:
        """Of each block."""
        costs = self.gist_costs.sum(dim=-1) + self.pixel_costs.sum(dim=-1)
        return costs.double() / BIT

    def within(self, caps: Slots) -> "Detail":
        """The same, no block above its cap by more than its last pixel; the gist gives way last,
        from its end. What is dropped is overwritten."""
        caps = torch.minimum(self.caps, caps)
        fits = (self.gist_costs.cumsum(dim=-1) <= BIT * caps[..., None]).sum(dim=-1)
        kept = torch.minimum(self.kept, fits)
        groups = torch.arange(self.gist_costs.shape[-1], device=caps.device)
        gists = self.gist_costs * (groups < kept[..., None])
        less = Detail(self.pixels, self.pixel_costs, gists, kept, caps)
        held = less.is_stored
        return replace(less, pixels=self.pixels * held, pixel_costs=self.pixel_costs * held)

    def cut(self, blocks: Blocks) -> Blocks:
        """Blocks of these cells without the groups that are dropped: their numbers and flags."""
        groups = self.gist_costs.shape[-1]
        flags = torch.arange(groups, device=blocks.device) < self.kept[..., None]
        flat = blocks.flatten(2)
        each = flat.shape[-1] // groups - 1
        held = torch.cat([flags.repeat_interleave(each, dim=-1), flags], dim=-1)
        return (flat * held).unflatten(2, blocks.shape[2:])


def symbol_digest(gists: Float[Tensor, "N D"], detail: Detail) -> bytes:
    """SHA-256 of blocks as whole numbers: what a code must give back."""
    total = hashlib.sha256()
    for part in (gists.to(torch.int8), detail.kept.to(torch.int16), detail.caps.to(torch.int32)):
        total.update(part.cpu().contiguous().numpy().tobytes())
    total.update(detail.stored.to(torch.int32).cpu().numpy().tobytes())
    total.update(detail.pixels.cpu().contiguous().numpy().tobytes())
    return total.digest()
