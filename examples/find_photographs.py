"""A folder of your own photographs in one file: found from a damaged piece, and forgotten.

    python examples/find_photographs.py [FOLDER] [--steps N]

Without a folder it paints one first: soft colours, discs and bars. A model is trained on the
folder (minutes for a thousand photographs; --steps), then all of it goes into a store.
"""

import argparse
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import kanerva
from kanerva import data
from kanerva.config import (
    KppConfig,
    KppDecoderConfig,
    KppEncoderConfig,
    KppMemoryConfig,
    KppReadoutConfig,
)
from kanerva.data.picture_files import image_files
from kanerva.pictures import sheet
from kanerva.presets import preset
from kanerva.training.loop import train

import torch
from PIL import Image, ImageDraw, ImageFilter

SIDE = 32


def paint_folder(folder: Path, count: int = 300) -> Path:
    """Pictures with something everywhere, as a stand-in for photographs."""
    folder.mkdir(parents=True)
    dice = random.Random(0)

    def colour() -> tuple[int, int, int]:
        return dice.randrange(256), dice.randrange(256), dice.randrange(256)

    for index in range(count):
        picture = Image.new("RGB", (64, 48), colour())
        paint = ImageDraw.Draw(picture)
        for _ in range(8):
            left, top = dice.randrange(-8, 60), dice.randrange(-8, 44)
            corner = (left + dice.randrange(6, 30), top + dice.randrange(6, 30))
            (paint.ellipse if dice.random() < 0.5 else paint.rectangle)(
                (left, top, *corner), fill=colour()
            )
        picture.filter(ImageFilter.GaussianBlur(1.5)).save(folder / f"{index:04d}.png")
    return folder


def fit(folder: Path, run: Path, steps: int) -> None:
    """A small model of the folder. Its blocks start as an outline of each picture: so a few steps
    are enough to find by, and more make sharper pictures."""
    start = preset("images", image=(3, SIDE, SIDE))  # cropped about the centre and resized
    model = KppConfig(
        image=start.model.image,
        likelihood=start.model.likelihood,
        encoder=KppEncoderConfig(width=16),
        memory=KppMemoryConfig(capacity=9, noise=0.0023, outline=True),
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
        validate_every=steps,
        validate_episodes=1,
    )
    train(config, run)


def main(folder: Path | None = None, steps: int = 100, work: Path | None = None) -> Path:
    work = work or Path(tempfile.mkdtemp(prefix="kanerva-"))
    folder = folder or paint_folder(work / "photographs")
    fit(folder, work / "run", steps)

    files = [path for _, path in image_files(folder)]
    held, new = files[:-1], files[-1:]  # the last is not put in
    pictures = data.load_images(held, (3, SIDE, SIDE), resize=True)
    store = kanerva.Store(work / "photographs.kanerva", model=work / "run")
    ids = store.add(pictures, [file.name for file in held], progress=True)
    print(store)

    mine = pictures[7] / 255
    noise = torch.Generator().manual_seed(0)
    seen = torch.zeros(SIDE, SIDE)
    seen[:, : SIDE // 2] = 1
    cues = {
        "left half": (mine * seen, {"observed": seen}),
        "the same, where it is hidden not said": (mine * seen, {}),
        "noise": (mine + 0.1 * torch.randn(mine.shape, generator=noise), {}),
        "moved by two pixels": (mine.roll((2, 2), (1, 2)), {"shifts": 2}),
        "never put in": (data.load_images(new, (3, SIDE, SIDE), resize=True)[0] / 255, {}),
    }
    rows = []
    for name, (cue, given) in cues.items():
        hits = store.find(cue, k=3, **given)
        best = hits[0]
        print(f"{name}: {best.payload} {best.probability:.3f}, none of them {hits.none:.3f}")
        rows.append((name, torch.stack([cue.clamp(0, 1), *hits.images])))

    receipt = store.free(ids[7])
    gone = store.find(mine)
    print(f"{held[7].name} freed: {receipt.bytes} bytes overwritten, {receipt.found} found after")
    print(f"looked for again: none of them {gone.none:.3f}")
    picture = work / "found.png"
    sheet(rows, columns=4).save(picture)
    print(picture)
    return picture


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    main(options.folder, options.steps)
