"""`kanerva generate`: samples from one episode's memory."""

from typing import Any

from kanerva.cli.episode import load_model_and_images, make_picture_parser, save_picture
from kanerva.cli.options import Parser, require_at_least


def make_parser(words: list[str]) -> Parser:
    parser = make_picture_parser("generate", "Samples from a memory.")
    parser.add_option("--num", type=int, default=32, help="samples of each kind")
    spread = "standard deviation of keys around one (§4.1.1), for models without blocks"
    parser.add_option("--spread", type=float, default=0.1, help=spread)
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
    noise = stream(options["seed"], "generate", device=model.device)
    num, spread = options["num"], options["spread"]
    how: dict[str, Any] = {"sample_pixels": options["sample_pixels"], "generator": noise}
    memory = model.write(images, generator=noise) if model.remembers else None
    samples = model.generate(memory, num, **how)
    parts = [("written", images), ("new images" if model.has_code else "random keys", samples)]
    if not model.has_keys:
        parts = [("images", images), ("samples", samples)]
    elif not model.has_blocks:
        key = torch.randn(model.key_shape, generator=noise, device=model.device)
        made = model.generate(memory, num, near=(key, spread), **how)
        parts.append((f"keys around one, standard deviation {spread:g}", made))
    save_picture(sheet(parts, columns=16), options, "generate.png")
    if model.replays:
        print("this model replays: random keys return a stored image, or one that was not written.")
        print("For new images like the stored ones, train with --model kpp-bits")
    return 0
