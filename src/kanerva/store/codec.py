"""Blocks as bytes, each of which can be read without the others. The model determines the codec:

0   blocks of floats: a float32 scale, then int8 numbers
2   blocks of bits: gist and detail, one stream for each block (`memory/codec.py`)
"""

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kanerva.errors import UserError
from kanerva.memory.evidence import Pictures
from kanerva.memory.quantise import pack
from kanerva.models.finding import decode_blocks
from kanerva.models.kpp import Kpp
from kanerva.models.kpp_bits import KppBits
from kanerva.plain_files import reason

INT8, BITS = 0, 2  # 1 was another form of blocks with a cap
Images = Float[Tensor, "T C H W"]
Coded = tuple[int, bytes]  # codec and block


class Int8Codec:
    """The codec of blocks of floats, rounded to int8."""

    id = INT8

    def __init__(self, model: Kpp) -> None:
        self.model = model

    def write(self, images: Images) -> tuple[list[bytes], Pictures]:
        """Encode images as blocks; return also the pictures that the blocks decode to."""
        episode = images[None]
        blocks = self.model.blocks(episode, self.model.encoder(episode))[0]
        coded = [encode(block) for block in blocks]
        return coded, self.read([(INT8, block) for block in coded])

    def read(self, rows: Sequence[Coded]) -> Pictures:
        """Decode blocks to pictures. Blocks are untrusted: what cannot be decoded is refused."""
        blocks = [decode(*row, self.model.writer.shape) for row in rows]
        return decode_blocks(self.model, torch.stack(blocks)[None])


class BitsCodec:
    """The codec of blocks of bits, gist and detail. Stored pixels are lossless."""

    id = BITS

    def __init__(self, model: KppBits) -> None:
        self.model, self.codec = model, model.codec
        symbols = model.prior.numbers + math.prod(model.config.image)
        self.longest = 2 * symbols + 8  # bytes: no symbol costs more than 16 bits

    def write(self, images: Images) -> tuple[list[bytes], Pictures]:
        episode = images[None]
        blocks = self.model.quick_blocks(self.model.encoder(episode))  # refining is too slow here
        detail, counts = self.model.code_and_counts(episode, blocks)
        blocks = detail.cut(blocks)  # apply the model's cap
        gists = blocks[0].flatten(1)[:, : self.model.prior.numbers]
        coded = self.codec.encode_each(gists, detail.apply(lambda part: part[0]), counts[0])
        return coded, decode_blocks(self.model, blocks, detail)

    def read(self, rows: Sequence[Coded]) -> Pictures:
        for codec, data in rows:
            _require(codec, BITS)
            if len(data) > self.longest:
                raise UserError(f"a block has {len(data)} bytes, above {self.longest}: damaged")
        try:
            gists, detail = self.codec.decode_each([data for _, data in rows])
        except (ValueError, LookupError, RuntimeError, AssertionError) as error:
            raise UserError(f"a block is damaged: {reason(error)}") from error
        blocks = self.model.writer.blocks(gists[None], detail.kept[None])
        return decode_blocks(self.model, blocks, detail.apply(lambda part: part[None]))


Codec = Int8Codec | BitsCodec


def codec_of(model: Kpp) -> Codec:
    """The codec for stores of this model."""
    return BitsCodec(cast(KppBits, model)) if model.has_code else Int8Codec(model)


def encode(block: Float[Tensor, "Cm h w"]) -> bytes:
    """Encode a block: four bytes for the scale, then one for each number."""
    packed = pack(block.cpu(), "int8")
    scale = np.float32(packed["scale"].item()).astype("<f4").tobytes()
    return scale + packed["map"].numpy().tobytes()


def decode(codec: int, data: bytes, shape: Sequence[int]) -> Float[Tensor, "Cm h w"]:
    """Decode a block of this shape."""
    _require(codec, INT8)
    if len(data) != 4 + math.prod(shape):
        raise UserError(f"a block has {len(data)} bytes, not {4 + math.prod(shape)}: damaged")
    levels = np.frombuffer(data, dtype=np.int8, offset=4).astype(np.float32)
    scale = np.frombuffer(data, dtype="<f4", count=1)[0]
    if not np.isfinite(scale * 128):
        raise UserError("a block holds numbers that are not finite")
    return torch.from_numpy(levels * scale).view(*shape)


def _require(codec: int, expected: int) -> None:
    if codec != expected:
        raise UserError(
            f"a block has codec {codec}, but this model reads only {expected}: "
            f"damaged, or written by another kanerva; add its image again"
        )
