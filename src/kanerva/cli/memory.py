"""`kanerva memory`: draw a memory, and each written image at the place of its block."""

from typing import Any, cast

from kanerva.cli.episode import (
    load_model_and_images,
    make_picture_parser,
    save_picture,
    write_memory,
)
from kanerva.cli.options import Parser
from kanerva.errors import UserError


def make_parser(words: list[str]) -> Parser:
    description = "Draw a memory: its map, and the images written at their places."
    parser = make_picture_parser("memory", description)
    parser.add_option("--free", type=list[int], default=[], help="handles to free first: 3, or 3,4")
    return parser


def run(options: dict[str, Any], words: list[str]) -> int:
    """Draw the map of a memory beside its images."""
    from kanerva.models.kpp import Kpp
    from kanerva.pictures import map_with_thumbnails

    model, images = load_model_and_images(options)
    if not model.has_blocks:
        raise UserError(f"{options['run']}: {model.config.name} has no blocks to draw")
    held = write_memory(model, images, options).free(*options["free"])
    grid = cast(Kpp, model).placement.grid
    colours = "its channels" if len(held.map) == 3 else "its three principal components"
    picture = map_with_thumbnails(
        held.to_image(),
        held.places,
        images[held.handles],
        held.handles,
        cells=(grid.rows, grid.columns),
        title=f"the map, {'x'.join(map(str, held.map.shape))}: colours are {colours}",
    )
    save_picture(picture, options, "memory.png")
    handles = ", ".join(map(str, held.handles))
    print(
        f"{len(held)} of {held.capacity} blocks held, {held.bits.sum():.0f} bits; handles {handles}"
    )
    return 0
