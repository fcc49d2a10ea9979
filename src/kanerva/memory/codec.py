"""Blocks as one stream of bits: as many as they claim, the same on every machine.

All blocks share one stream, which an arithmetic coder ends once: a stream for each would cost 17 to
36 bits more. Probabilities come from networks in whole numbers (`fixed_point`), as counts of 2^16
that the coder takes as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kanerva.errors import UserError
from kanerva.memory.detail import ALL, Detail
from kanerva.memory.fixed_point import BIT, TOTAL
from kanerva.memory.gist import LARGEST, GistPrior
from kanerva.memory.pixel_code import PixelCode

Coder = Any  # the arithmetic coder's, which has no types of its own
CHUNK = 256  # blocks that are coded together: part of the format
_WHOLE = (
    0.8  # the share of blocks that hold all of their gist, where not all do: part of the format
)


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
        constriction = _constriction()
        stream = constriction.stream.queue.RangeEncoder()
        gists, detail = gists.cpu(), detail.apply(lambda part: part.cpu())
        caps, which = detail.caps.unique(return_inverse=True)
        if len(caps) > 255:
            raise UserError(f"blocks with {len(caps)} different caps: a file takes 255")
        whole = bool((detail.kept == self.prior.groups).all())
        head = [len(caps), *_bytes(caps), int(whole)]
        stream.encode(np.array(head, np.int32), _uniform(256))
        for start in range(0, len(gists), CHUNK):
            part = slice(start, start + CHUNK)
            if len(caps) > 1:
                stream.encode(_int32(which[part]), _uniform(len(caps)))
            if not whole:
                stream.encode(_int32(detail.kept[part]), self._kept())
            self._encode_gists(stream, gists[part], detail.kept[part])
            self._encode_pixels(stream, gists[part], detail.apply(lambda x, s=part: x[s]))
        return stream.get_compressed().astype("<u4").tobytes()

    def _encode_gists(self, stream: Coder, gists: Tensor, kept: Tensor) -> None:
        for group in range(self.prior.groups):
            held = gists[kept > group]
            if len(held):
                tables = self._tables(held, group).flatten(0, 1)
                numbers = held.unflatten(1, (self.prior.groups, -1))[:, group].flatten()
                stream.encode(_int32(numbers + LARGEST), _categorical(), _shares(tables))

    def _encode_pixels(self, stream: Coder, gists: Tensor, detail: Detail) -> None:
        stored = torch.arange(detail.pixels.shape[-1]) < detail.stored[:, None]
        rows = stored.any(dim=1)
        if not bool(rows.any()):
            return
        pixels, stored = detail.pixels[rows], stored[rows]
        counts = self.pixels.table(self._traces(gists[rows]), self._as_images(pixels)).cpu()
        order = stored.T  # pixel by pixel, and of each pixel block by block
        stream.encode(_int32(pixels.T[order]), _bernoulli(), _shares(counts.T[order]))

    @torch.no_grad()
    def decode(self, data: bytes, count: int) -> tuple[Float[Tensor, "N D"], Detail]:
        """What `encode` was given. Whoever calls has checked the bytes: a damaged stream decodes to
        other blocks."""
        constriction = _constriction()
        if count == 0:
            pixels, groups = self.pixels.height * self.pixels.width, self.prior.groups
            nothing = Detail.empty(1, 0, groups, pixels, torch.device("cpu"))
            return torch.zeros(0, self.prior.numbers), nothing.apply(lambda part: part[0])
        if len(data) % 4:
            raise UserError("the stream is cut off")
        stream = constriction.stream.queue.RangeDecoder(
            np.frombuffer(data, "<u4").astype(np.uint32)
        )
        several = int(stream.decode(_uniform(256)))
        head = stream.decode(_uniform(256), 2 * several + 1)
        caps = torch.from_numpy(head[:-1].astype(np.int64)).unflatten(0, (-1, 2)) @ torch.tensor(
            [256, 1]
        )
        found = []
        for start in range(0, count, CHUNK):
            size = min(CHUNK, count - start)
            which = np.zeros(size, np.int64)
            if several > 1:
                which = stream.decode(_uniform(several), size)
            kept = torch.full((size,), self.prior.groups)
            if not head[-1]:
                kept = _long(stream.decode(self._kept(), size))
            found.append(self._decode_chunk(stream, caps[_long(which)], kept))
        gists = torch.cat([gist for gist, _ in found])
        return gists, Detail.join([detail for _, detail in found], torch.cat)

    def _decode_chunk(
        self, stream: Coder, caps: Int[Tensor, " N"], kept: Int[Tensor, " N"]
    ) -> tuple[Tensor, Detail]:
        prior, size = self.prior, len(caps)
        gists = torch.zeros(size, prior.groups, prior.each)
        costs = torch.zeros(size, prior.groups, dtype=torch.long)
        for group in range(prior.groups):
            held = kept > group
            if not bool(held.any()):
                continue
            tables = self._tables(gists.flatten(1)[held], group)
            numbers = _long(stream.decode(_categorical(), _shares(tables.flatten(0, 1))))
            gists[held, group] = (numbers - LARGEST).view(-1, prior.each).float()
        gists = gists.flatten(1)
        groups = torch.arange(prior.groups) < kept[:, None]
        costs = prior.costs(gists.to(self.device)).cpu() * groups
        n = self.pixels.height * self.pixels.width
        pixels = torch.zeros(size, n, dtype=torch.uint8)
        pixel_costs = torch.zeros(size, n, dtype=torch.long)
        spent = costs.sum(dim=1)

        def choose(i: int, counts: Int[Tensor, " N"]) -> Tensor | None:
            active = (kept == prior.groups) & (spent < BIT * caps)
            if not bool(active.any()):
                return None
            counts = counts.cpu()
            pixels[active, i] = torch.from_numpy(
                stream.decode(_bernoulli(), _shares(counts[active])).astype(np.uint8)
            )
            pixel_costs[active, i] = self.pixels.cost(counts, pixels[:, i]).cpu()[active]
            spent.add_(pixel_costs[:, i])
            return pixels[:, i]

        if bool(((kept == prior.groups) & (spent < BIT * caps)).any()):
            self.pixels.follow(self._traces(gists), choose)
        return gists, Detail(pixels, pixel_costs, costs, kept, caps)

    @property
    def device(self) -> torch.device:
        """Where the networks are; blocks stay where the coder is, on the CPU."""
        return self.pixels.place.device

    def _tables(self, gists: Tensor, group: int) -> Tensor:
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
        return _categorical(np.array([*rest, _WHOLE]))


# The arithmetic coder


def _constriction() -> Any:
    import constriction  # loaded when the first memory of bits is saved or read

    return constriction


def _uniform(size: int) -> Coder:
    return _constriction().stream.model.Uniform(size)


def _categorical(shares: "np.ndarray | None" = None) -> Coder:
    model = _constriction().stream.model.Categorical
    return model(perfect=False) if shares is None else model(shares, perfect=False)


def _bernoulli() -> Coder:
    return _constriction().stream.model.Bernoulli(perfect=False)


def _shares(counts: Int[Tensor, "..."]) -> np.ndarray:
    """Counts as probabilities: 16 bits, which a float32 holds exactly."""
    return (counts.cpu().numpy() / np.float32(TOTAL)).astype(np.float32)


def _int32(values: Tensor) -> np.ndarray:
    return np.ascontiguousarray(values.cpu().numpy().astype(np.int32))


def _long(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(values).astype(np.int64))


def _bytes(caps: Tensor) -> list[int]:
    return [byte for cap in caps.tolist() for byte in divmod(min(cap, ALL), 256)]
