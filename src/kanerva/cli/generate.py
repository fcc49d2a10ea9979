"""`kanerva generate`: samples from one episode's memory."""

from typing import Any

from kanerva.cli.episode import load_model_and_images, make_picture_parser, save_picture
from kanerva.cli.options import Parser, require_at_least
from kanerva.errors import UserError

SPREAD = 0.1


def make_parser(words: list[str]) -> Parser:
    parser = make_picture_parser("generate", "Samples from a memory.")
    parser.add_option("--num", type=int, default=32, help="samples of each kind")
    spread = f"standard deviation of keys around one (§4.1.1), default {SPREAD}; for models with "
    spread += "keys and without blocks, such as kpp-paper"
    parser.add_option("--spread", type=float | None, help=spread)
    parser.add_argument(
        "--sample-pixels", action="store_true", help="sample pixels instead of showing their mean"
    )
    return parser


def run(options: dict[str, Any], words: list[str]) -> int:
    """Draw samples from one episode's memory."""
    require_at_least(options, 1, "num")
    require_at_least(options, 0, "spread")
    import torch

    from kanerva.pictures import sheet
    from kanerva.seeding import stream

    model, images = load_model_and_images(options)
    moves_keys = model.has_keys and not model.has_blocks  # keys of blocks name whole cells
    if options["spread"] is not None and not moves_keys:
        raise UserError(f"{model.config.name} has no keys to move a little: leave out --spread")
    noise, num = stream(options["seed"], "generate", device=model.device), options["num"]
    how: dict[str, Any] = {"sample_pixels": options["sample_pixels"], "generator": noise}
    memory = model.write(images, generator=noise) if model.remembers else None
    samples = model.generate(memory, num, **how)
    parts = [("written", images), ("new images" if model.has_code else "random keys", samples)]
    if not model.has_keys:
        parts = [("images", images), ("samples", samples)]
    elif moves_keys:
        spread = SPREAD if options["spread"] is None else options["spread"]
        key = torch.randn(model.key_shape, generator=noise, device=model.device)
        made = model.generate(memory, num, near=(key, spread), **how)
        parts.append((f"keys around one, standard deviation {spread:g}", made))
    save_picture(sheet(parts, columns=16), options, "generate.png")
    if model.replays:
        print("this model replays: random keys return a stored image, or one that was not written.")
        print("For new images like the stored ones, train --model kpp-bits (binary pixels).")
    return 0
