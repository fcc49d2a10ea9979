"""Blocks as streams of bits: as many as they claim, the same on every machine.

Blocks of a memory share one stream, which an arithmetic coder ends once (`encode`). Blocks of a
store have a stream each, so that one is read without the others (`encode_each`): each ends at a
whole byte, and says how much of its image it holds.

Probabilities come from networks in whole numbers (`fixed_point`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kanerva.errors import UserError
from kanerva.memory.coder import (
    Coder,
    OneStream,
    OwnStreams,
    as_int32,
    as_long,
    as_shares,
    as_words,
    bernoulli,
    categorical,
    new_decoder,
    new_encoder,
    shortest,
    uniform,
)
from kanerva.memory.detail import ALL, Detail
from kanerva.memory.fixed_point import BIT, TOTAL, cost_table
from kanerva.memory.gist import LARGEST, GistPrior
from kanerva.memory.pixel_code import PixelCode

# Part of the format:
CHUNK = 256  # blocks that are coded together
_WHOLE = 0.8  # the share of blocks that hold all of their gist, where not all do
_SIZES = ALL.bit_length() + 1  # of a cap, in binary digits: from 0 to 16
_CAPPED = 771  # counts of each size, where one is given; four fifths are left for no cap


@dataclass(frozen=True, eq=False)
class BlockCodec:
    """A model's tables, and the name of the model."""

    prior: GistPrior
    pixels: PixelCode
    name: Callable[[], str]  # the model's fingerprint, worked out when a file needs it

    @property
    def fingerprint(self) -> bytes:
        """Sixteen bytes: other weights read other things."""
        return bytes.fromhex(self.name())[:16]

    @torch.no_grad()
    def encode(self, gists: Float[Tensor, "N D"], detail: Detail) -> bytes:
        """Blocks in order."""
        stream = new_encoder()
        gists, detail = gists.cpu(), detail.apply(lambda part: part.cpu())
        caps, which = detail.caps.unique(return_inverse=True)
        if len(caps) > 255:
            raise UserError(f"blocks with {len(caps)} different caps: a file takes 255")
        whole = bool((detail.kept == self.prior.groups).all())
        head = [len(caps), *_bytes(caps), int(whole)]
        stream.encode(np.array(head, np.int32), uniform(256))
        for start in range(0, len(gists), CHUNK):
            part = slice(start, start + CHUNK)
            if len(caps) > 1:
                stream.encode(as_int32(which[part]), uniform(len(caps)))
            if not whole:
                stream.encode(as_int32(detail.kept[part]), self._kept())
            self._encode_gists(stream, gists[part], detail.kept[part])
            self._encode_pixels(stream, gists[part], detail.apply(lambda x, s=part: x[s]))
        return stream.get_compressed().astype("<u4").tobytes()

    def _encode_gists(self, stream: Coder, gists: Tensor, kept: Tensor) -> None:
        for group in range(self.prior.groups):
            held = gists[kept > group]
            if len(held):
                tables = self._tables(held, group).flatten(0, 1)
                numbers = held.unflatten(1, (self.prior.groups, -1))[:, group].flatten()
                stream.encode(as_int32(numbers + LARGEST), categorical(), as_shares(tables))

    def _encode_pixels(self, stream: Coder, gists: Tensor, detail: Detail) -> None:
        stored = torch.arange(detail.pixels.shape[-1]) < detail.stored[:, None]
        rows = stored.any(dim=1)
        if not bool(rows.any()):
            return
        pixels, stored = detail.pixels[rows], stored[rows]
        counts = self.pixels.table(self._traces(gists[rows]), self._as_images(pixels)).cpu()
        order = stored.T  # pixel by pixel, and of each pixel block by block
        stream.encode(as_int32(pixels.T[order]), bernoulli(), as_shares(counts.T[order]))

    @torch.no_grad()
    def decode(self, data: bytes, count: int) -> tuple[Float[Tensor, "N D"], Detail]:
        """What `encode` was given. Whoever calls has checked the bytes: a damaged stream decodes to
        other blocks."""
        if count == 0:
            pixels, groups = self.pixels.height * self.pixels.width, self.prior.groups
            nothing = Detail.empty(1, 0, groups, pixels, torch.device("cpu"))
            return torch.zeros(0, self.prior.numbers), nothing.apply(lambda part: part[0])
        if len(data) % 4:
            raise UserError("the stream is cut off")
        stream = new_decoder(np.frombuffer(data, "<u4"))
        several = int(stream.decode(uniform(256)))
        head = stream.decode(uniform(256), 2 * several + 1)
        caps = torch.from_numpy(head[:-1].astype(np.int64)).unflatten(0, (-1, 2)) @ torch.tensor(
            [256, 1]
        )
        found = []
        for start in range(0, count, CHUNK):
            size = min(CHUNK, count - start)
            which = np.zeros(size, np.int64)
            if several > 1:
                which = stream.decode(uniform(several), size)
            kept = torch.full((size,), self.prior.groups)
            if not head[-1]:
                kept = as_long(stream.decode(self._kept(), size))
            found.append(self._decode_chunk(OneStream(stream), caps[as_long(which)], kept))
        gists = torch.cat([gist for gist, _ in found])
        return gists, Detail.join([detail for _, detail in found], torch.cat)

    # A stream for each block

    @torch.no_grad()
    def encode_each(
        self, gists: Float[Tensor, "N D"], detail: Detail, counts: Int[Tensor, "N n"]
    ) -> list[bytes]:
        """Blocks, each by itself, given the counts that their pixels are coded with."""
        if not len(gists):
            return []
        gists, detail = gists.cpu(), detail.apply(lambda part: part.cpu())
        numbers, tables = as_int32(gists + LARGEST), as_shares(self._tables(gists))
        pixels, shares, found = as_int32(detail.pixels), as_shares(counts), []
        parts = (detail.caps.tolist(), detail.kept.tolist(), detail.stored.tolist())
        for block, (cap, kept, stored) in enumerate(zip(*parts, strict=True)):
            stream = new_encoder()
            self._encode_head(stream, cap, kept)
            held = kept * self.prior.each
            stream.encode(numbers[block, :held], categorical(), tables[block, :held])
            stream.encode(pixels[block, :stored], bernoulli(), shares[block, :stored])
            found.append(shortest(stream))
        return found

    def _encode_head(self, stream: Coder, cap: int, kept: int) -> None:
        """That a block holds everything; else its cap, by its size, and the groups held."""
        if cap == ALL and kept == self.prior.groups:
            stream.encode(_SIZES, _sizes())
            return
        size = cap.bit_length()
        stream.encode(size, _sizes())
        if size > 1:
            stream.encode(cap - 2 ** (size - 1), uniform(2 ** (size - 1)))
        stream.encode(kept, self._kept())

    @torch.no_grad()
    def decode_each(self, streams: Sequence[bytes]) -> tuple[Float[Tensor, "N D"], Detail]:
        """What `encode_each` was given. All blocks go through the networks together."""
        if not streams:
            return self.decode(b"", 0)
        coders = [new_decoder(as_words(stream)) for stream in streams]
        heads = torch.tensor([self._decode_head(coder) for coder in coders])
        return self._decode_chunk(OwnStreams(coders), heads[:, 0], heads[:, 1])

    def _decode_head(self, stream: Coder) -> tuple[int, int]:
        size = stream.decode(_sizes())
        if size == _SIZES:
            return ALL, self.prior.groups
        cap = min(size, 1)
        if size > 1:
            cap = 2 ** (size - 1) + stream.decode(uniform(2 ** (size - 1)))
        return cap, stream.decode(self._kept())

    # Both

    def _decode_chunk(
        self, source: OneStream | OwnStreams, caps: Int[Tensor, " N"], kept: Int[Tensor, " N"]
    ) -> tuple[Tensor, Detail]:
        prior, size = self.prior, len(caps)
        gists = torch.zeros(size, prior.groups, prior.each)
        costs = torch.zeros(size, prior.groups, dtype=torch.long)
        for group in range(prior.groups):
            held = kept > group
            if not bool(held.any()):
                continue
            tables = self._tables(gists.flatten(1)[held], group)
            numbers = as_long(source.numbers(held.nonzero()[:, 0].numpy(), tables))
            gists[held, group] = (numbers - LARGEST).view(-1, prior.each).float()
        gists = gists.flatten(1)
        groups = torch.arange(prior.groups) < kept[:, None]
        costs = prior.costs(gists.to(self.device)).cpu() * groups
        n = self.pixels.height * self.pixels.width
        # numpy, pixel by pixel: at this size a call of torch's costs more than what it computes
        pixels, pixel_costs = np.zeros((n, size), np.uint8), np.zeros((n, size), np.int64)
        price = cost_table().numpy()
        whole, most = (kept == prior.groups).numpy(), (BIT * caps).numpy()
        spent = costs.sum(dim=1).numpy()

        def choose(i: int, counts: Int[Tensor, " N"]) -> Tensor | None:
            nonlocal spent
            active = whole & (spent < most)
            if not active.any():
                return None
            known = counts.cpu().numpy()
            pixels[i, active] = source.pixels(active.nonzero()[0], known[active])
            chosen = np.where(pixels[i] > 0, known, TOTAL - known)
            pixel_costs[i] = np.where(active, price[chosen], 0)
            spent = spent + pixel_costs[i]
            return torch.from_numpy(pixels[i])

        if (whole & (spent < most)).any():
            self.pixels.follow(self._traces(gists), choose)
        stored, paid = (torch.from_numpy(part.T.copy()) for part in (pixels, pixel_costs))
        return gists, Detail(stored, paid, costs, kept, caps)

    @property
    def device(self) -> torch.device:
        """Where the networks are; blocks stay where the coder is, on the CPU."""
        return self.pixels.place.device

    def _tables(self, gists: Tensor, group: int | None = None) -> Tensor:
        return self.prior.tables(gists.to(self.device), group).cpu()

    def _traces(self, gists: Tensor) -> Tensor:
        """Whole gists with their flags, where the networks are."""
        flags = gists.new_ones(len(gists), self.prior.groups)
        return torch.cat([gists, flags], dim=1).to(self.device)

    def _as_images(self, pixels: Tensor) -> Tensor:
        shape = (self.pixels.height, self.pixels.width)
        return pixels.unflatten(1, shape).float().to(self.device)

    def _kept(self) -> Coder:
        groups = self.prior.groups
        rest = [(1 - _WHOLE) / groups] * groups
        return categorical(np.array([*rest, _WHOLE]))


@cache
def _sizes() -> Coder:
    """How large a cap is; or that there is none."""
    return categorical(as_shares(np.array([_CAPPED] * _SIZES + [TOTAL - _CAPPED * _SIZES])))


def _bytes(caps: Tensor) -> list[int]:
    return [byte for cap in caps.tolist() for byte in divmod(min(cap, ALL), 256)]
