"""The arithmetic coder: symbols to bytes and back, by the library `constriction`.

Probabilities are multiples of 2^-16. float32 represents them exactly, and the coder uses them
without rounding.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from kanerva.memory.fixed_point import TOTAL

Coder = Any  # an object of the library, which has no type annotations


def _constriction() -> Any:
    import constriction  # imported only when a block of bits is first saved or read

    return constriction


def new_encoder() -> Coder:
    return _constriction().stream.queue.RangeEncoder()


def new_decoder(words: np.ndarray) -> Coder:
    """A decoder of 32-bit words; past the last word it reads zeros."""
    return _constriction().stream.queue.RangeDecoder(words.astype(np.uint32))


# Distributions


@cache
def uniform(size: int) -> Coder:
    return _constriction().stream.model.Uniform(size)


def categorical(shares: "np.ndarray | None" = None) -> Coder:
    model = _constriction().stream.model.Categorical
    return model(perfect=False) if shares is None else model(shares, perfect=False)


@cache
def bernoulli(count: int | None = None) -> Coder:
    """The distribution of a binary pixel, with p(1) = count / TOTAL. Without a count, probabilities
    are passed when coding. Only a few hundred counts occur, so these are cached."""
    model = _constriction().stream.model.Bernoulli
    return model(perfect=False) if count is None else model(count / TOTAL, perfect=False)


def as_shares(counts: Int[Tensor, "..."] | np.ndarray) -> np.ndarray:
    """Turn counts into probabilities: count / TOTAL, exact in float32."""
    counts = counts.cpu().numpy() if isinstance(counts, Tensor) else counts
    return (counts / np.float32(TOTAL)).astype(np.float32)


# Symbols


def as_int32(values: Tensor) -> np.ndarray:
    return np.ascontiguousarray(values.cpu().numpy().astype(np.int32))


def as_long(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(values).astype(np.int64))


@dataclass(frozen=True)
class OneStream:
    """A source of symbols for blocks that share one stream: they must be read in order."""

    stream: Coder

    def numbers(self, blocks: np.ndarray, tables: Int[Tensor, "n each A"]) -> np.ndarray:
        """Decode the next group of gist numbers of these blocks."""
        return self.stream.decode(categorical(), as_shares(tables.flatten(0, 1)))

    def pixels(self, blocks: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Decode the next pixel of these blocks."""
        return self.stream.decode(bernoulli(), as_shares(counts))


@dataclass(frozen=True)
class OwnStreams:
    """A source of symbols for blocks that have a stream each."""

    streams: list[Coder]

    def numbers(self, blocks: np.ndarray, tables: Int[Tensor, "n each A"]) -> np.ndarray:
        model, pairs = categorical(), zip(blocks.tolist(), as_shares(tables), strict=True)
        return np.stack([self.streams[block].decode(model, table) for block, table in pairs])

    def pixels(self, blocks: np.ndarray, counts: np.ndarray) -> np.ndarray:
        pairs = zip(blocks.tolist(), counts.tolist(), strict=True)
        found = [self.streams[block].decode(bernoulli(count)) for block, count in pairs]
        return np.array(found, np.uint8)


# Streams that end at a byte


def shortest(stream: Coder) -> bytes:
    """The fewest bytes that decode to what was encoded, if zeros follow them.

    The coder itself would end at a word of 32 bits. Every number in its final interval decodes to
    the same symbols, so this takes the one with the fewest digits in base 256."""
    if stream.is_empty():
        return b""
    done, (lower, width) = stream.pos()
    # A carry may still change the words that are done; the sealed stream includes it. The sealed
    # stream is the first number of the interval whose last word is zero, so the interval starts
    # less than one word below it.
    sealed = stream.get_compressed()[: done + 1].astype(">u4").tobytes()
    lowest = (int.from_bytes(sealed, "big") << 32) - -lower % 2**32
    highest, rest = lowest + width - 1, 64  # bits: the interval is narrower than 2^64
    while highest >> rest << rest < lowest:
        rest -= 8
    return (highest >> rest << rest).to_bytes(4 * (done + 2), "big").rstrip(b"\0")


def as_words(stream: bytes) -> np.ndarray:
    """The bytes of `shortest` as the 32-bit words that a decoder takes."""
    return np.frombuffer(stream + bytes(-len(stream) % 4), ">u4")
