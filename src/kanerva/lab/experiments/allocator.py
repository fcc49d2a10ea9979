"""Fig. 1: a heap. malloc, write, free, malloc again, drawn on the memory itself."""

from dataclasses import dataclass

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from kanerva.errors import UserError
from kanerva.lab.harness import Experiment, Figures, Finding, Lab, Pixels
from kanerva.memory.heap import Memory
from kanerva.models.kpp import Kpp
from kanerva.pictures import map_with_thumbnails, stacked

FREED = (3, 11, 20, 30)  # handles


def draw_memory(model: Kpp, memory: Memory, images: dict[int, Tensor], title: str) -> Image.Image:
    """The map, and beside it what is held, where it lies."""
    held = memory.handles
    pictures = torch.stack([images[h] for h in held or [0]])
    drawn = map_with_thumbnails(
        memory.to_image(),
        memory.places.cpu(),
        pictures[: len(held)].cpu(),
        held,
        cells=(memory.grid.rows, memory.grid.columns),
        title=title,
        side=420,
    )
    canvas = Image.new("RGB", (drawn.width, drawn.height + 24), (255, 255, 255))
    canvas.paste(drawn, (0, 0))
    text = f"{len(held)} of {memory.capacity} blocks held"
    font = ImageFont.load_default(size=13)
    ImageDraw.Draw(canvas).text((10, drawn.height), text, fill=(40, 40, 40), font=font)
    return canvas


def error(model: Kpp, memory: Memory, images: Pixels) -> float:
    """Mean squared pixel error of what comes back from clean cues, one step."""
    return float((model.recall(memory, images, steps=1)[0] - images).square().mean())


@dataclass(frozen=True)
class Stages:
    """A memory after each call, and the image of every handle that was ever given out."""

    blank: Memory
    first: Memory
    full: Memory
    freed: Memory
    again: Memory
    refused: str  # what was said when there was no room
    images: dict[int, Tensor]

    def of(self, handles: list[int]) -> Pixels:
        return torch.stack([self.images[handle] for handle in handles])


def exercise(model: Kpp, images: Pixels) -> Stages:
    """malloc until the memory is full, once more to be refused, free some, malloc again."""
    few = len(FREED)
    parts = images.split([len(images) - 2 * few, few, few])
    named: dict[int, Tensor] = {}

    def malloc(memory: Memory, pictures: Tensor) -> Memory:
        after = model.append(memory, pictures)
        new = sorted(set(after.handles) - set(memory.handles))
        named.update(zip(new, pictures, strict=True))
        return after

    blank = model.empty()
    first = malloc(blank, parts[0])
    full = malloc(first, parts[1])
    try:
        model.append(full, parts[2])
        refused = ""
    except UserError as problem:
        refused = str(problem)
    freed = full.free(*FREED)
    return Stages(blank, first, full, freed, malloc(freed, parts[2]), refused, named)


def measure(model: Kpp, stages: Stages) -> Figures:
    """What each call changed that it should not, and whether what was freed is forgotten."""
    first, full, freed, again = stages.first, stages.full, stages.freed, stages.again
    places = {tuple(place) for place in places_of(full, list(FREED)).tolist()}
    new = [handle for handle in again.handles if handle not in freed.handles]
    survivors, gone = stages.of(freed.handles), stages.of(list(FREED))
    return {
        "capacity": full.capacity,
        "written": len(first),
        "freed": len(FREED),
        "changed_by_malloc": largest_change(model, first, full, first.handles),
        "changed_by_free": largest_change(model, full, freed, freed.handles),
        "handles_kept": freed.handles == [h for h in full.handles if h not in FREED],
        "refused_when_full": stages.refused,
        "freed_places_taken_again": sum(tuple(p) in places for p in places_of(again, new).tolist()),
        "error_held": error(model, again, survivors),
        "error_freed": error(model, again, gone),
        "familiarity_held": float(model.familiarity(again, survivors).mean()),
        "familiarity_freed": float(model.familiarity(again, gone).mean()),
    }


def draw(model: Kpp, stages: Stages) -> list[Image.Image]:
    """The memory after each call."""
    written = len(stages.first)
    titles = {
        "an empty memory": stages.blank,
        f"malloc and write: {written} images, each its own block": stages.first,
        f"malloc again: {len(FREED)} more, the rest untouched": stages.full,
        f"free {', '.join(map(str, FREED))}: gone at once": stages.freed,
        "malloc again: the freed places are taken": stages.again,
    }
    return [draw_memory(model, memory, stages.images, title) for title, memory in titles.items()]


@torch.no_grad()
def run(lab: Lab) -> Finding:
    model = lab.trained("kpp", steps=600)
    assert isinstance(model, Kpp)
    stages = exercise(model, lab.images(model.config.memory.capacity + len(FREED)))
    figures = measure(model, stages)
    frames = draw(model, stages)
    return Finding(figures, table(figures), {"": stacked(frames)}, {"": frames})


def table(figures: Figures) -> list[str]:
    kept, spared = figures["changed_by_malloc"], figures["changed_by_free"]
    taken, freed = figures["freed_places_taken_again"], figures["freed"]
    return [
        f"largest change of a held block by malloc {kept:.1e}, by free {spared:.1e}",
        f"handles of the rest {'stay' if figures['handles_kept'] else 'MOVED'}; full at "
        f"{figures['capacity']}, the next image is "
        f"{'refused' if figures['refused_when_full'] else 'TAKEN'}",
        f"of {freed} freed places {taken} were taken by the next {freed} images",
        "mean squared pixel error of what comes back: "
        f"held {figures['error_held']:.4f}, freed {figures['error_freed']:.4f}",
        f"familiarity (nats, mean): held {figures['familiarity_held']:.0f}, freed "
        f"{figures['familiarity_freed']:.0f}",
    ]


def verdict(figures: Figures) -> str:
    """Whether blocks are apart, and whether what was freed is forgotten: two questions."""
    change = max(figures["changed_by_malloc"], figures["changed_by_free"])
    apart = change < 1e-4 and figures["handles_kept"] and figures["refused_when_full"]
    held, freed = figures["familiarity_held"], figures["familiarity_freed"]
    words = "malloc and free touch only their own block: what is held stays, what was freed is "
    if not apart:
        words = "malloc and free do NOT keep the rest as it was, and what was freed is "
    if held > 0 > freed:
        return words + "no longer known."
    return words + f"STILL known, by {freed:.0f} nats to {held:.0f} of what is held."


def places_of(memory: Memory, handles: list[int]) -> Tensor:
    """Where the blocks of these handles lie, (n, 2)."""
    return memory.places[[memory.handles.index(handle) for handle in handles]]


def largest_change(model: Kpp, before: Memory, after: Memory, handles: list[int]) -> float:
    """The largest change of any number in the blocks of these handles."""
    cells = torch.tensor([[after.slot_of(handle) for handle in handles]])
    was, now = (memory.grid.read(memory.map[None].cpu(), cells) for memory in (before, after))
    return float((was - now).abs().max())


EXPERIMENT = Experiment(
    name="allocator",
    paper="Fig. 1",
    shows="malloc, write, free, malloc again, on the memory itself",
    claim="The memory is a heap: samples are written into blocks of their own, blocks are freed "
    "and taken again, and the rest is not touched.",
    run=run,
    verdict=verdict,
    quick="about a minute",
    full="a minute on a GPU",
    presets=("mnist", "omniglot", "mazes"),
)
