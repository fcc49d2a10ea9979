"""Blocks as streams of bits: as long as their stated cost, and the same on every machine.

The blocks of a memory share one stream of an arithmetic coder (`encode`), so that its end is paid
for once. In a store each block has its own stream (`encode_each`), so that one can be read without
the others. Streams end at a whole byte. They state the caps of blocks; from its cap and from the
costs of what it has read, a decoder knows where a block ends.

Probabilities come from networks in integer arithmetic (`fixed_point`).
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
_MORE = TOTAL // 8  # count, of TOTAL, of "another cap follows"
_SIZES = ALL.bit_length() + 1  # bit lengths that a cap may have: 0 to 16
_CAPPED = 771  # count, of TOTAL, of each bit length; the rest, four fifths, is for "no cap"


@dataclass(frozen=True, eq=False)
class BlockCodec:
    """The networks that code a model's blocks, and the model's fingerprint when it was made."""

    prior: GistPrior
    pixels: PixelCode
    name: str
    name_now: Callable[[], str]

    @property
    def fingerprint(self) -> bytes:
        """Sixteen bytes that identify the weights: others would decode a file to other blocks."""
        return bytes.fromhex(self.name)[:16]

    def require_unchanged(self) -> None:
        """Refuse weights that changed since: files coded with them could not be read."""
        if self.name_now() != self.name:
            raise UserError("the weights of this memory's model have changed since it was written")

    @torch.no_grad()
    def encode(self, gists: Float[Tensor, "N D"], detail: Detail) -> bytes:
        """Encode blocks, in order, into one stream."""
        stream = new_encoder()
        gists, detail = gists.cpu(), detail.apply(lambda part: part.cpu())
        caps, which = detail.caps.unique(return_inverse=True)
        for place, cap in enumerate(caps.tolist(), start=1):
            _encode_cap(stream, cap)
            stream.encode(int(place < len(caps)), bernoulli(_MORE))
        for start in range(0, len(gists), CHUNK):
            part = slice(start, start + CHUNK)
            if len(caps) > 1:
                stream.encode(as_int32(which[part]), uniform(len(caps)))
            some = detail.apply(lambda x, s=part: x[s])
            self._encode_gists(stream, gists[part], some.kept)
            self._encode_pixels(stream, gists[part], some)
        return shortest(stream)

    def _encode_gists(self, stream: Coder, gists: Tensor, kept: Tensor) -> None:
        for group in range(self.prior.groups):
            held = gists[kept > group]
            if len(held):
                tables = self._tables(held, group).flatten(0, 1)
                numbers = held.unflatten(1, (self.prior.groups, -1))[:, group].flatten()
                stream.encode(as_int32(numbers + LARGEST), categorical(), as_shares(tables))

    def _encode_pixels(self, stream: Coder, gists: Tensor, detail: Detail) -> None:
        stored = detail.is_stored
        rows = stored.any(dim=1)
        if not bool(rows.any()):
            return
        pixels, stored = detail.pixels[rows], stored[rows]
        counts = self.pixels.table(self._traces(gists[rows]), self._as_images(pixels)).cpu()
        order = stored.T  # pixel by pixel; for each pixel, block by block
        stream.encode(as_int32(pixels.T[order]), bernoulli(), as_shares(counts.T[order]))

    @torch.no_grad()
    def decode(self, data: bytes, count: int) -> tuple[Float[Tensor, "N D"], Detail]:
        """Invert `encode` for a stream of `count` blocks. A damaged stream decodes to other blocks
        without an error, so callers check its digest."""
        if count == 0:
            pixels, groups = self.pixels.height * self.pixels.width, self.prior.groups
            nothing = Detail.empty(1, 0, groups, pixels, torch.device("cpu"))
            return torch.zeros(0, self.prior.numbers), nothing.apply(lambda part: part[0])
        stream, caps, found = new_decoder(as_words(data)), [], []
        for _ in range(ALL + 1):  # there are no more caps than these, whatever a stream says
            caps.append(_decode_cap(stream))
            if not stream.decode(bernoulli(_MORE)):
                break
        for start in range(0, count, CHUNK):
            size = min(CHUNK, count - start)
            which = np.zeros(size, np.int64)
            if len(caps) > 1:
                which = stream.decode(uniform(len(caps)), size)
            found.append(self._decode_chunk(OneStream(stream), torch.tensor(caps)[as_long(which)]))
        gists = torch.cat([gist for gist, _ in found])
        return gists, Detail.join([detail for _, detail in found], torch.cat)

    # A stream for each block

    @torch.no_grad()
    def encode_each(
        self, gists: Float[Tensor, "N D"], detail: Detail, counts: Int[Tensor, "N n"]
    ) -> list[bytes]:
        """Encode each block into its own stream. `counts`: those that its pixels are coded with."""
        if not len(gists):
            return []
        gists, detail = gists.cpu(), detail.apply(lambda part: part.cpu())
        numbers, tables = as_int32(gists + LARGEST), as_shares(self._tables(gists))
        pixels, shares, found = as_int32(detail.pixels), as_shares(counts), []
        parts = (detail.caps.tolist(), detail.kept.tolist(), detail.stored.tolist())
        for block, (cap, kept, stored) in enumerate(zip(*parts, strict=True)):
            stream = new_encoder()
            _encode_cap(stream, cap)
            held = kept * self.prior.each
            stream.encode(numbers[block, :held], categorical(), tables[block, :held])
            stream.encode(pixels[block, :stored], bernoulli(), shares[block, :stored])
            found.append(shortest(stream))
        return found

    @torch.no_grad()
    def decode_each(self, streams: Sequence[bytes]) -> tuple[Float[Tensor, "N D"], Detail]:
        """Invert `encode_each`. All blocks go through the networks together."""
        if not streams:
            return self.decode(b"", 0)
        coders = [new_decoder(as_words(stream)) for stream in streams]
        caps = torch.tensor([_decode_cap(coder) for coder in coders])
        return self._decode_chunk(OwnStreams(coders), caps)

    # For both

    def _decode_chunk(
        self, source: OneStream | OwnStreams, caps: Int[Tensor, " N"]
    ) -> tuple[Tensor, Detail]:
        prior, size = self.prior, len(caps)
        gists = torch.zeros(size, prior.groups, prior.each)
        costs = torch.zeros(size, prior.groups, dtype=torch.long)
        cost_of_count, limit = cost_table().numpy(), (BIT * caps).numpy()
        spent = np.zeros(size, np.int64)  # 256ths of a bit, so far
        for group in range(prior.groups):
            active = (spent < limit).nonzero()[0]  # blocks that hold this group
            if not len(active):
                break
            tables = self._tables(gists.flatten(1)[active], group)
            numbers = as_long(source.numbers(active, tables)).view(-1, prior.each)
            gists[active, group] = (numbers - LARGEST).float()
            chosen = tables.gather(-1, numbers[..., None])[..., 0]
            costs[active, group] = cost_table()[chosen].sum(dim=-1)
            spent = costs.sum(dim=1).numpy()
        gists = gists.flatten(1)
        n = self.pixels.height * self.pixels.width
        # numpy, pixel by pixel: for arrays this small, a torch call costs more than its arithmetic
        pixels, pixel_costs = np.zeros((n, size), np.uint8), np.zeros((n, size), np.int64)

        def choose(i: int, counts: Int[Tensor, " N"]) -> Tensor | None:
            nonlocal spent
            active = spent < limit  # blocks that store pixel i
            if not active.any():
                return None
            ones = counts.cpu().numpy()
            pixels[i, active] = source.pixels(active.nonzero()[0], ones[active])
            chosen = np.where(pixels[i] > 0, ones, TOTAL - ones)
            pixel_costs[i] = np.where(active, cost_of_count[chosen], 0)
            spent = spent + pixel_costs[i]
            return torch.from_numpy(pixels[i])

        if (spent < limit).any():
            self.pixels.follow(self._traces(gists), choose)
        # from (n, N) to (N, n)
        stored, stored_costs = (torch.from_numpy(x.T.copy()) for x in (pixels, pixel_costs))
        return gists, Detail(stored, stored_costs, costs, caps)

    @property
    def device(self) -> torch.device:
        """The device of the networks; blocks stay on the CPU, where the coder runs."""
        return self.pixels.place.device

    def _tables(self, gists: Tensor, group: int | None = None) -> Tensor:
        return self.prior.tables(gists.to(self.device), group).cpu()

    def _traces(self, gists: Tensor) -> Tensor:
        """Whole gists with their flags, on the networks' device."""
        flags = gists.new_ones(len(gists), self.prior.groups)
        return torch.cat([gists, flags], dim=1).to(self.device)

    def _as_images(self, pixels: Tensor) -> Tensor:
        shape = (self.pixels.height, self.pixels.width)
        return pixels.unflatten(1, shape).float().to(self.device)


@cache
def _sizes() -> Coder:
    """The distribution of a cap's bit length; the last symbol means no cap."""
    return categorical(as_shares(np.array([_CAPPED] * _SIZES + [TOTAL - _CAPPED * _SIZES])))


def _encode_cap(stream: Coder, cap: int) -> None:
    """Encode that there is no cap; or else its bit length, then the remaining digits."""
    size = _SIZES if cap == ALL else cap.bit_length()
    stream.encode(size, _sizes())
    if 1 < size < _SIZES:
        stream.encode(cap - 2 ** (size - 1), uniform(2 ** (size - 1)))


def _decode_cap(stream: Coder) -> int:
    size = stream.decode(_sizes())
    if size < 2:
        return size
    rest = 2 ** (size - 1)
    return ALL if size == _SIZES else rest + stream.decode(uniform(rest))
