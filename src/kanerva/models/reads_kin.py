"""Bounds and samples of new images, those that a memory of `kpp-bits` does not store.

    p(y = new | M) = m / (n + m), with n blocks stored and m = max(n, 32); 1 / (n + m) for each
    p(x | M, new) = (1 - u) p(x | M, related to the stored images) + u p(x | empty memory)

The reader of kin (`memory/kin.py`) predicts a new image from blocks that it reads together. Its
output has two parts: maps for the pixel code, and maps for p(z | M, new) and p(x | z, M), where
pixels are independent given z.

More than `GROUP` blocks are seldom all alike. Then N blocks are read in N groups, and

    p(x | M, related) = 1/N sum over blocks y of p(x | y and the blocks most like y)

In a memory of more than `TRIED` blocks, a new image reads the groups that it resembles most; the
other terms of the sum are left out, so the bound stays a bound. With independent pixels, the group
is a part of y: q(group | x) chooses it, and its KL is included.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kanerva.config import KppBitsConfig
from kanerva.errors import UserError
from kanerva.inputs import as_handles
from kanerva.memory.heap import Memory
from kanerva.memory.kin import (
    GROUP,
    TRIED,
    KinReader,
    key_costs,
    mix_unlike,
    most_alike,
    new_costs,
)
from kanerva.memory.pixel_code import PixelCode
from kanerva.memory.writers import GistWriter
from kanerva.models.base import Handles, Images, Near
from kanerva.models.kpp import Kpp
from kanerva.models.terms import ElboTerms
from kanerva.readout import SpatialPrior
from kanerva.seeding import Noise, uniform
from kanerva.shapes import Blocks, Cells, Episode, FeatureMaps, KinMaps

Known = Bool[Tensor, "B T"]  # a flag for each block
Expected = Float[Tensor, "B maps Hq Wq"]  # what a new image is expected to look like
IMAGES = 64  # new images of one memory that are scored at once
_AT_ONCE = {"cpu": 64, "cuda": 1024}  # groups in one batch


@dataclass(frozen=True)
class Readable:
    """What the reader of kin sees of N stored blocks, and expects from each alone."""

    blocks: Float[Tensor, "N Cm h w"]
    features: Float[Tensor, "N features Hq Wq"]
    whole: Bool[Tensor, " N"]
    alone: Float[Tensor, "N maps Hq Wq"]

    def without(self, index: int) -> "Readable":
        rest = torch.arange(len(self.whole), device=self.whole.device) != index
        return Readable(self.blocks[rest], self.features[rest], self.whole[rest], self.alone[rest])


@dataclass(frozen=True)
class Kin:
    """What B memories say about new images: what to expect, from each of G groups of blocks."""

    maps: Float[Tensor, "B G maps Hq Wq"]
    number: int  # of groups, of which G were read
    held: Int[Tensor, " B"]  # blocks of each memory

    @classmethod
    def cat(cls, parts: "list[Kin]") -> "Kin":
        """Memories with the same number of groups, as one batch."""
        maps, held = (
            torch.cat([getattr(part, name) for part in parts]) for name in ("maps", "held")
        )
        return cls(maps, parts[0].number, held)


Score = Callable[[Kin, Episode], ElboTerms]


class ReadsKin(Kpp):
    """`kpp` with a reader of kin and a pixel code."""

    config: KppBitsConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    writer: GistWriter  # pyright: ignore[reportIncompatibleVariableOverride]
    kin: KinReader
    pixel_code: PixelCode
    reads_kin = True

    # Read kin

    def ask_kin(
        self, blocks: Blocks, features: FeatureMaps, whole: Known, held: Bool[Tensor, "R T"]
    ) -> Float[Tensor, "R maps Hq Wq"]:
        """Predict a new image from blocks: from the image of a block that stores all of it
        (`whole`), else from its gist. `held`: which of the T blocks a memory holds, for one or
        several memories of each row of blocks."""
        spread = self.readout.spread(blocks).unflatten(0, blocks.shape[:2])
        return self.kin(features, spread, whole, held)

    def _split_kin(self, kin: KinMaps) -> tuple[KinMaps, KinMaps]:
        """Split the reader's output into maps for the pixel code and maps for z."""
        maps = self.config.code.maps
        return kin[:, :, :maps], kin[:, :, maps:]

    def _read_kin(self, memory: Memory, near: int | None = None) -> Expected:
        """Predict a new image from all blocks of memories that hold at most `GROUP`, or from the
        block of a handle."""
        owners = memory.require_slots()
        if near is not None:
            memory.slots_of([near] * len(owners))  # refuses a handle that is not there
            owners = owners.masked_fill(owners != near, -1)
        held = owners.topk(min(GROUP, owners.shape[1]), dim=1)
        return self.ask_kin(*self._see(memory, held.indices), held.values >= 0)

    def _see(self, memory: Memory, cells: Cells) -> tuple[Blocks, FeatureMaps, Known]:
        """What the reader sees of these cells."""
        assert memory.detail is not None
        detail = memory.detail.at(cells)
        pixels = detail.pixels.float().unflatten(-1, self.config.image)
        blocks = self.placement.grid.read(memory.map, cells)
        return blocks, self.encoder(pixels), detail.is_stored.all(dim=-1)

    # Read groups of a large memory

    def _readable(self, memory: Memory, index: int) -> Readable:
        """All blocks of one memory of a batch."""
        cells = (memory.require_slots()[index] >= 0).nonzero()[:, 0]
        seen = self._see(memory[index].as_batch(), cells[None])
        return self.readable(*[part[0] for part in seen])

    @torch.no_grad()
    def readable(
        self,
        blocks: Float[Tensor, "N Cm h w"],
        features: Float[Tensor, "N features Hq Wq"],
        whole: Bool[Tensor, " N"],
    ) -> Readable:
        """Blocks that are to be read in groups."""
        each = torch.arange(len(whole), device=whole.device)[:, None]
        alone = self._read_groups(blocks, features, whole, each)
        return Readable(blocks, features, whole, alone)

    def _read_groups(
        self,
        blocks: Float[Tensor, "N Cm h w"],
        features: Float[Tensor, "N features Hq Wq"],
        whole: Bool[Tensor, " N"],
        groups: Int[Tensor, "G n"],
    ) -> Expected:
        """Predict a new image from each group of blocks."""
        found = []
        for part in groups.split(_AT_ONCE[groups.device.type]):
            every = torch.ones_like(whole[part])
            found.append(self.ask_kin(blocks[part], features[part], whole[part], every))
        return torch.cat(found)

    def _read_alike(self, held: Readable, of: Int[Tensor, "*n"]) -> Float[Tensor, "*n maps Hq Wq"]:
        """Predict a new image from each of some blocks, with those most like it."""
        needed, at = of.unique(return_inverse=True)
        groups = most_alike(held.alone, GROUP, needed)
        return self._read_groups(held.blocks, held.features, held.whole, groups)[at]

    def read_groups(self, held: Readable, images: Float[Tensor, "T C H W"]) -> Kin:
        """What one memory says about each of T new images: from its few blocks together, from each
        group, or, with more than `TRIED` groups, from those that the image resembles most."""
        number = len(held.whole)
        count = torch.full((len(images),), number, device=self.device)
        every = torch.arange(number, device=self.device)
        if number <= GROUP:
            read = self._read_groups(held.blocks, held.features, held.whole, every[None])
            return Kin(read.expand(len(images), 1, *read.shape[1:]), 1, count)
        chosen = every.expand(len(images), -1)
        if number > TRIED:
            chosen = self._resembled(held, images)
        return Kin(self._read_alike(held, chosen), number, count)

    def _resembled(
        self, held: Readable, images: Float[Tensor, "T C H W"]
    ) -> Int[Tensor, "T tried"]:
        """For each image, the blocks from which the reader expects images most like those that it
        expects from the image itself."""
        nothing = self.free_cells(1, len(images))[0]
        every = torch.ones(len(images), dtype=torch.bool, device=self.device)
        own = self.readable(nothing, self.encoder(images[None])[0], every).alone
        apart = torch.cdist(own.flatten(1), held.alone.flatten(1))
        return apart.topk(TRIED, largest=False).indices

    # The bound

    def _terms_new(self, memory: Memory, episode: Episode) -> ElboTerms:
        """The terms of new images: a mixture over whether they are related to the stored ones."""
        return self._score_new(memory, episode, self.terms_beside)

    @torch.no_grad()
    def _score_new(self, memory: Memory, episode: Episode, score: Score) -> ElboTerms:
        """Apply `score` to new images of each memory, and what is read for them. Without gradients:
        their graph grows with images times groups."""
        count = (memory.require_slots() >= 0).sum(dim=1)
        if int(count.max()) <= GROUP:
            return score(Kin(self._read_kin(memory)[:, None], 1, count), episode)
        found = []
        for index, images in enumerate(episode):
            if count[index] <= GROUP:
                one = slice(index, index + 1)
                kin = Kin(self._read_kin(memory[index].as_batch())[:, None], 1, count[one])
                found.append(score(kin, episode[one]))
                continue
            held = self._readable(memory, index)
            parts = [
                score(self.read_groups(held, some), some[:, None]) for some in images.split(IMAGES)
            ]
            found.append(ElboTerms.cat(parts).view((1, len(images))))
        return ElboTerms.cat(found)

    def terms_beside(self, kin: Kin, episode: Episode) -> ElboTerms:
        """The terms of new images, given what was read."""
        like = torch.stack([self.log_like(group, episode) for group in kin.maps.unbind(1)])
        like = like.logsumexp(dim=0) - math.log(kin.number)
        score = mix_unlike(like, self.log_alone(episode), kin.held)
        key = key_costs(kin.held, torch.zeros_like(score, dtype=torch.bool))
        return ElboTerms(score, torch.zeros_like(score), key)

    def log_alone(self, episode: Episode) -> Float[Tensor, "B T"]:
        """ln p(x) of images given an empty memory."""
        return self._log_pixels(self.free_cells(*episode.shape[:2]), episode).sum(dim=-1)

    def log_like(self, kin: Expected, episode: Episode) -> Float[Tensor, "B T"]:
        """ln p(x | M, new, related to the blocks that were read together)."""
        nothing = self.free_cells(*episode.shape[:2])
        beside = self._split_kin(kin[:, None].expand(-1, episode.shape[1], -1, -1, -1))[0]
        return self._log_pixels(nothing, episode, beside).sum(dim=-1)

    def independent_terms(
        self, images: Images, memory: Memory, *, generator: Noise = None
    ) -> ElboTerms:
        """The bound of new images with pixels independent given z, where p(z | M, new) reads
        kin."""
        self.as_maps(memory, images)

        def score(kin: Kin, episode: Episode) -> ElboTerms:
            return self.independent_beside(kin, episode, generator)

        terms = self._score_new(memory.as_batch(), self.as_pixels(images), score)
        return terms if images.ndim == 5 else terms[0]

    def independent_beside(self, kin: Kin, episode: Episode, generator: Noise = None) -> ElboTerms:
        """The bound with independent pixels, given what was read. Whether an image is related to
        the stored ones, and to which group, is a part of y: q(y | x) weighs each case by its cost
        at posterior means, before anything is sampled, and its KL is included."""
        features = self.encoder(episode)
        nothing = self.free_cells(*episode.shape[:2])
        means, found = [], []
        for group in (None, *kin.maps.unbind(1)):
            beside, key = None, new_costs(kin.held, like=group is not None)
            if group is not None:
                each = group[:, None].expand(-1, episode.shape[1], -1, -1, -1)
                beside, key = self._split_kin(each)[1], key + math.log(kin.number)
            for sample, into in ((False, means), (True, found)):
                how: dict[str, Any] = {"sample": sample, "generator": generator}
                reading = self.readout(nothing, features, beside=beside, **how)
                score = self.log_likelihood(reading.readout, episode)
                into.append(ElboTerms(score, reading.kl, key.expand_as(score).to(score)))
        log_q = torch.stack([-terms.nll_nats for terms in means]).log_softmax(dim=0)
        both = ElboTerms.average(found, log_q)
        return found[0].where((kin.held == 0)[:, None], both)

    def _expect(self, memory: Memory, number: int, near: int | None, generator: Noise) -> KinMaps:
        """What each of a number of new images is expected to look like: with more than `GROUP`
        blocks, each is related to a group of its own."""
        count = (memory.require_slots() >= 0).sum(dim=1)
        if near is not None or int(count.max()) <= GROUP:
            return self._read_kin(memory, near)[:, None].expand(-1, number, -1, -1, -1)
        found = []
        for index, chance in enumerate(uniform((len(count), number), generator, self.device)):
            if count[index] <= GROUP:
                one = self._read_kin(memory[index].as_batch())
                found.append(one.expand(number, -1, -1, -1))
                continue
            held = self._readable(memory, index)
            chosen = (chance * len(held.whole)).long().clamp(max=len(held.whole) - 1)
            found.append(self._read_alike(held, chosen))
        return torch.stack(found)

    def _log_pixels(
        self, blocks: Blocks, episode: Episode, beside: KinMaps | None = None
    ) -> Float[Tensor, "B T n"]:
        """ln p of every pixel, given the block and the pixels before it."""
        pixels, flat = episode.flatten(0, 2), None if beside is None else beside.flatten(0, 1)
        found = self.pixel_code.log_probs(blocks.flatten(2).flatten(0, 1), pixels, flat)
        return found.unflatten(0, episode.shape[:2])

    # Generate

    @torch.no_grad()
    def generate(
        self,
        memory: Memory | None,
        num_samples: int,
        *,
        near: Near | Handles | SupportsIndex | None = None,
        sample_pixels: bool = False,
        generator: Noise = None,
    ) -> Float[Tensor, "*B T C H W"]:
        """Make new images, related to the stored ones: sample z from p(z | M, new) and decode its
        expected pixels or, with `sample_pixels`, sample pixels one by one from the pixel code.
        `near=handle` makes images related to that one; `near=(key, spread)` reads blocks at keys
        around one instead."""
        memory = self.require_memory(memory)
        handle, pair = _handle_or_pair(near)
        self.check_samples(num_samples, pair)
        self.as_maps(memory)
        if pair is not None:
            return super().generate(
                memory, num_samples, near=pair, sample_pixels=sample_pixels, generator=generator
            )
        for_code, for_z = self._split_kin(
            self._expect(memory.as_batch(), num_samples, handle, generator)
        )
        nothing = self.free_cells(*for_z.shape[:2])
        if sample_pixels:
            traces = nothing.flatten(2).flatten(0, 1)
            pixels = self.pixel_code.sample(traces, generator, for_code.flatten(0, 1))
            images = pixels[:, None].unflatten(0, for_code.shape[:2])
        else:
            readout = SpatialPrior(self.readout, nothing, for_z).sample(generator)
            images = self.likelihood.mean(self.decoder(readout))
        return images if memory.is_batch else images[0]


def _handle_or_pair(near: object) -> tuple[int | None, Any]:
    """A handle and None, or None and what should be a key with its spread."""
    if near is None or isinstance(near, tuple):
        return None, near
    named = as_handles(near)
    if named.numel() != 1:
        raise UserError("near is one handle, or a pair (key, spread)")
    return int(named), None
