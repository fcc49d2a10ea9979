"""Fig. 1: the memory as a heap. malloc, write, free, malloc again, with pictures of the memory."""

import torch
from PIL import Image
from torch import Tensor

from kanerva.errors import UserError
from kanerva.lab.harness import About, Figures, Finding, Lab, Pixels
from kanerva.memory.heap import Memory
from kanerva.models.kpp import Kpp
from kanerva.pictures import map_with_thumbnails, stacked

FREED = (3, 11, 20, 30)  # handles to free


def draw_memory(memory: Memory, images: dict[int, Tensor], title: str) -> Image.Image:
    """Draw the map, and beside it the stored images at their places."""
    held = memory.handles
    pictures = torch.stack([images[h] for h in held or [0]])
    return map_with_thumbnails(
        memory.to_image(),
        memory.places.cpu(),
        pictures[: len(held)].cpu(),
        held,
        cells=(memory.grid.rows, memory.grid.columns),
        title=f"{title} ({len(held)} of {memory.capacity} blocks held)",
        side=420,
    )


def error(model: Kpp, memory: Memory, images: Pixels) -> float:
    """Mean squared pixel error of recall from clean cues, one step."""
    return float((model.recall(memory, images, steps=1)[0] - images).square().mean())


def exercise(model: Kpp, images: Pixels) -> tuple[Figures, list[Image.Image]]:
    """Fill the memory, check that the next malloc is refused, free some blocks, and refill them.

    Measure how far each call changed blocks that it should not change, and whether freed images
    are forgotten. Return these figures, and a picture of the memory after each call.
    """
    few = len(FREED)
    parts = images.split([len(images) - 2 * few, few, few])
    named: dict[int, Tensor] = {}  # the image of every handle ever issued

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
    again = malloc(freed, parts[2])
    survivors, gone = (
        torch.stack([named[h] for h in handles]) for handles in (freed.handles, FREED)
    )
    places = {tuple(place) for place in places_of(full, list(FREED)).tolist()}
    new = [handle for handle in again.handles if handle not in freed.handles]
    figures = {
        "capacity": full.capacity,
        "written": len(first),
        "freed": few,
        "changed_by_malloc": largest_change(first, full, first.handles),
        "changed_by_free": largest_change(full, freed, freed.handles),
        "handles_kept": freed.handles == [h for h in full.handles if h not in FREED],
        "refused_when_full": refused,
        "freed_places_taken_again": sum(tuple(p) in places for p in places_of(again, new).tolist()),
        "error_held": error(model, again, survivors),
        "error_freed": error(model, again, gone),
        "familiarity_held": float(model.familiarity(again, survivors).mean()),
        "familiarity_freed": float(model.familiarity(again, gone).mean()),
    }
    titles = {
        "an empty memory": blank,
        "malloc and write: each its own block": first,
        f"malloc again: {few} more": full,
        f"free {', '.join(map(str, FREED))}": freed,
        "malloc again: freed places taken": again,
    }
    return figures, [draw_memory(memory, named, title) for title, memory in titles.items()]


@torch.no_grad()
def run(lab: Lab) -> Finding:
    model = lab.trained("kpp")
    assert isinstance(model, Kpp)
    images = lab.images(model.config.memory.capacity + len(FREED))
    figures, frames = exercise(model, images)
    return Finding(figures, table(figures), stacked(frames))


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
    """Whether malloc and free leave other blocks unchanged, and freed images are forgotten."""
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
    """The places of these handles' blocks, (n, 2)."""
    return memory.places[[memory.handles.index(handle) for handle in handles]]


def largest_change(before: Memory, after: Memory, handles: list[int]) -> float:
    """The largest change of any number in the blocks of these handles."""
    cells = torch.tensor([[after.slot_of(handle) for handle in handles]])
    was, now = (memory.grid.read(memory.map[None].cpu(), cells) for memory in (before, after))
    return float((was - now).abs().max())


ABOUT = About(
    paper="Fig. 1",
    shows="malloc, write, free, malloc again, on the memory itself",
    claim="The memory is a heap: samples are written into blocks of their own, blocks are freed "
    "and taken again, and the rest is not touched.",
    quick="about a minute",
    full="a minute on a GPU",
    presets=("mnist", "omniglot", "mazes"),
)
