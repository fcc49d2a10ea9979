"""A folder of your own images: train on it, write some to memory, read them back.

    python examples/own_images.py [FOLDER] [--steps N]

Without a folder it draws one first: discs and squares in many colours.
"""

import argparse
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image, ImageDraw

import kanerva
from kanerva import data
from kanerva.config import (
    KppConfig,
    KppDecoderConfig,
    KppEncoderConfig,
    KppMemoryConfig,
    KppReadoutConfig,
)
from kanerva.pictures import sheet
from kanerva.presets import preset
from kanerva.training.loop import train


def draw_folder(folder: Path, count: int = 400) -> Path:
    """Simple pictures of different sizes, as a stand-in for yours."""
    folder.mkdir(parents=True)
    dice = random.Random(0)
    for index in range(count):
        picture = Image.new("RGB", (48, 40), tuple(dice.randrange(60) for _ in range(3)))
        left, top, size = dice.randrange(4, 24), dice.randrange(4, 16), dice.randrange(10, 20)
        shape = ImageDraw.Draw(picture)
        draw = shape.ellipse if index % 2 else shape.rectangle
        draw(
            (left, top, left + size, top + size), fill=tuple(dice.randrange(256) for _ in range(3))
        )
        picture.save(folder / f"{index:04d}.png")
    return folder


def main(folder: Path | None = None, steps: int = 300, work: Path | None = None) -> Path:
    work = work or Path(tempfile.mkdtemp(prefix="kanerva-"))
    folder = folder or draw_folder(work / "drawings")
    start = preset("images", image=(3, 24, 24))  # cropped about the centre and resized to this
    model = KppConfig(
        image=start.model.image,
        likelihood=start.model.likelihood,
        encoder=KppEncoderConfig(width=16),
        memory=KppMemoryConfig(capacity=9, noise=0.0023, outline=True),  # up to nine images
        readout=KppReadoutConfig(size=16, prior_width=16),
        decoder=KppDecoderConfig(base=32),
    )
    config = replace(
        start,
        model=model,
        data=replace(start.data, folder=str(folder)),
        episode_length=8,
        batch=4,
        steps=steps,
        validate_every=max(steps // 3, 1),
        validate_episodes=4,
    )
    train(config, work / "run")

    model = kanerva.load(work / "run")
    images = data.load_folder(folder, "test", size=(24, 24)).images[:8] / 255
    memory = model.write(images)
    memory.save(work / "episode.safetensors")
    cue = images.clone()
    cue[..., 12:, :] = 0  # the lower half is hidden, and we say so
    seen = (torch.arange(24) < 12).float()[:, None].expand(len(images), 24, 24)
    recalled = model.recall(memory, cue, steps=1, observed=seen)
    picture = work / "recalled.png"
    rows = [("written", images), ("cue", cue), ("read back", recalled[-1])]
    sheet(rows, columns=8).save(picture)
    print(f"bound: {model.elbo(images).nll_nats.mean():.0f} nats per image\n{picture}")
    print(f"after {steps} steps: shapes and places first, colours take some thousands (--steps)")
    return picture


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    main(options.folder, options.steps)
