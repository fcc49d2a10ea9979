"""The arithmetic coder: symbols to bytes and back, by constriction.

Probabilities are counts of 2^16, which a float32 holds exactly and the coder takes as they are.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from kanerva.memory.fixed_point import TOTAL

Coder = Any  # the library's, which has no types of its own


def _constriction() -> Any:
    import constriction  # loaded when the first block of bits is saved or read

    return constriction


def new_encoder() -> Coder:
    return _constriction().stream.queue.RangeEncoder()


def new_decoder(words: np.ndarray) -> Coder:
    """It reads zeros after the last word."""
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
    """Of pixels; or of one whose count is known, of which there are a few hundred."""
    model = _constriction().stream.model.Bernoulli
    return model(perfect=False) if count is None else model(count / TOTAL, perfect=False)


def as_shares(counts: Int[Tensor, "..."] | np.ndarray) -> np.ndarray:
    """Counts as probabilities: 16 bits, which a float32 holds exactly."""
    counts = counts.cpu().numpy() if isinstance(counts, Tensor) else counts
    return (counts / np.float32(TOTAL)).astype(np.float32)


# Symbols


def as_int32(values: Tensor) -> np.ndarray:
    return np.ascontiguousarray(values.cpu().numpy().astype(np.int32))


def as_long(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(values).astype(np.int64))


@dataclass(frozen=True)
class OneStream:
    """Blocks that share a stream, to be read in order."""

    stream: Coder

    def numbers(self, blocks: np.ndarray, tables: Int[Tensor, "n each A"]) -> np.ndarray:
        """The next numbers of these blocks."""
        return self.stream.decode(categorical(), as_shares(tables.flatten(0, 1)))

    def pixels(self, blocks: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """The next pixel of these blocks."""
        return self.stream.decode(bernoulli(), as_shares(counts))


@dataclass(frozen=True)
class OwnStreams:
    """Blocks that have a stream each."""

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
    """The fewest bytes that decode to what was encoded, zeros being read after their end.

    The coder itself ends at a word of 32 bits. All numbers of its interval decode alike, so this is
    the one with the fewest digits to base 256."""
    if stream.is_empty():
        return b""
    done, (lower, width) = stream.pos()
    # Words that are done may wait for a carry yet: the sealed stream has it. That is the interval's
    # first number whose second word is zero, so the interval starts less than a word below.
    sealed = stream.get_compressed()[: done + 1].astype(">u4").tobytes()
    lowest = (int.from_bytes(sealed, "big") << 32) - -lower % 2**32
    highest, size, rest = lowest + width - 1, 0, 32 * (done + 2)
    while highest >> rest << rest < lowest:
        size, rest = size + 1, rest - 8
    return (highest >> rest).to_bytes(size, "big")


def as_words(stream: bytes) -> np.ndarray:
    """What `shortest` gave, as a decoder takes it."""
    return np.frombuffer(stream + bytes(-len(stream) % 4), ">u4")
