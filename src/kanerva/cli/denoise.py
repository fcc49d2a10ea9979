"""`kanerva denoise`: write clean images, read them back from cues with three kinds of noise."""

from typing import Any

from kanerva.cli.episode import (
    load_model_and_images,
    make_picture_parser,
    read_back,
    save_picture,
    write_memory,
)
from kanerva.cli.options import Parser, require_at_least


def make_parser(words: list[str]) -> Parser:
    parser = make_picture_parser("denoise", "Write clean images, then denoise cues by reading.")
    parser.add_option("--steps", type=int, default=10, help="steps of iterative reading")
    return parser


def run(options: dict[str, Any], words: list[str]) -> int:
    """Draw what is read for each kind of noise, and print its error at every step."""
    require_at_least(options, 1, "steps")
    from kanerva.evaluation.noise import NOISES
    from kanerva.pictures import sheet

    model, images = load_model_and_images(options)
    memory, columns = write_memory(model, images, options), min(len(images), 16)
    parts, lines = [("written", images[:columns])], []
    for name in NOISES:
        shown, errors = read_back(model, memory, images, name, options)
        parts += [(f"{name}: {label}", pictures[:columns]) for label, pictures in shown]
        steps = ", ".join(f"{error:.4f}" for error in errors[1:])
        lines.append(f"{name}: mean squared pixel error, cue {errors[0]:.4f}, by step {steps}")
    save_picture(sheet(parts, columns), options, "denoise.png")
    print("\n".join(lines))
    return 0
