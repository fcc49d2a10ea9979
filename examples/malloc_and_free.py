"""malloc, free, malloc again, drawn on the memory itself.

    python examples/malloc_and_free.py [RUN] [PICTURE]      # RUN may be a shipped model: glyphs

Writes 24 test images of a run's own data, frees every other one, appends 12 others into free
places, and checks that the survivors come back exactly as before.
"""

import sys
from pathlib import Path

import kanerva
from kanerva.data.splits import fixed_episodes, load_split
from kanerva.models.kpp import Kpp
from kanerva.models.loading import shipped_folder
from kanerva.pictures import map_with_thumbnails
from kanerva.runs import read_run_config

import torch
from PIL import Image


def main(run: str = "runs/demo", picture: str = "malloc_and_free.png") -> float:
    model = kanerva.load(run)
    if not isinstance(model, Kpp):
        raise SystemExit(f"{run} has no cells to free: train the default model")
    config = read_run_config(shipped_folder(run) or Path(run))
    episodes = fixed_episodes(config, load_split(config, "test", None), model.device)
    images = episodes.batch(0, -(-36 // config.episode_length)).images.flatten(0, 1)
    chance = torch.Generator().manual_seed(1)
    whole = model.write(images[:24], generator=chance)
    half = whole.free(*whole.handles[::2])
    again = model.append(half, images[24:36], generator=chance)

    kept = again.handles[:12]  # the survivors: 1, 3, 5, ...
    before = model.recall(whole, images[kept], steps=1)
    after = model.recall(again, images[kept], steps=1)
    change = (before - after).abs().max().item()
    print(f"held {len(whole)}, then {len(half)}, then {len(again)} of {again.capacity}")
    print(f"handles {again.handles}")
    print(f"largest change of a survivor's pixels: {change:g}")

    cells = (model.placement.grid.rows, model.placement.grid.columns)
    frames = [
        map_with_thumbnails(
            memory.to_image(),
            memory.places,
            images[memory.handles],
            memory.handles,
            cells=cells,
            title=title,
            side=380,
        )
        for memory, title in (
            (whole, "24 images written"),
            (half, "every other one freed"),
            (again, "12 others appended: handles 24 to 35"),
        )
    ]
    sheet = Image.new("RGB", (frames[0].width, sum(frame.height for frame in frames)), "white")
    for index, frame in enumerate(frames):
        sheet.paste(frame, (0, index * frame.height))
    sheet.save(picture)
    return change


if __name__ == "__main__":
    main(*sys.argv[1:])
