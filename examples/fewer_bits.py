"""Forgetting by degrees, and new images like what is held.

    python examples/fewer_bits.py [PICTURE]

Writes 16 characters that the model never saw, and shrinks the memory step by step: each row of the
picture states the bits an image takes and the bytes of the saved file. Then writes five pictures
of one character and samples twelve new ones, pixel by pixel.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import kanerva
from kanerva import data

import torch

CAPS = (None, 100, 56, 32, 16)  # bits of an image; only its last pixel or integer may exceed it
CHARACTER = 40  # the test image whose character is written in several fonts


def main(picture: str = "fewer_bits.png") -> list[float]:
    """Save the picture; return the bits per image of each row."""
    model = kanerva.load("glyphs")
    chance = torch.Generator().manual_seed(0)
    test = data.load("glyphs", "test")
    some = torch.randperm(len(test), generator=chance)[:16]
    memory = model.write(kanerva.prepare(test.images[some], model, generator=chance))
    rows, bits = {}, []
    for cap in CAPS:
        shrunk = memory if cap is None else memory.shrink(bits=cap)
        bits.append(float(shrunk.bits.mean()))
        with TemporaryDirectory() as folder:
            shrunk.save(path := Path(folder) / "memory.kanerva")
            name = f"{bits[-1]:.0f} bits an image, a file of {path.stat().st_size} bytes"
        print(name)
        rows[name] = model.get(shrunk)
    fonts = test.images[test.labels == test.labels[CHARACTER]][:5]
    rows["five pictures of one character"] = written = kanerva.prepare(fonts, model)
    new = model.generate(model.write(written), 12, sample_pixels=True, generator=chance)
    rows["twelve samples"] = new
    kanerva.show(**rows).save(picture)
    print(picture)
    return bits


if __name__ == "__main__":
    main(*sys.argv[1:])
