"""A folder of your own images, in three commands: train on it, recall from halves, look inside.

    python examples/own_images.py [FOLDER] [--run RUN] [options of `kanerva train`]

Without a folder it draws one first: discs and squares in many colours. The commands are printed
before they run; type them yourself for a folder of yours. Without a GPU `--size small` is chosen,
which takes minutes.
"""

import argparse
import random
import sys
from pathlib import Path

from kanerva.cli import main as kanerva

from PIL import Image, ImageDraw


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


def main(folder: Path, run: Path, options: list[str]) -> int:
    commands = [
        ["train", "--preset", "images", "--data.folder", str(folder), "--run", str(run), *options],
        ["recall", str(run), "--cue", "lower_half_hidden"],
        ["memory", str(run)],
    ]
    for words in commands:
        print(f"\nkanerva {' '.join(words)}", flush=True)
        if code := kanerva(words):
            return code
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--run", type=Path, default=Path("runs/own-images"))
    asked, others = parser.parse_known_args()
    sys.exit(main(asked.folder or draw_folder(Path("drawings")), asked.run, others))
