"""New images like what is written.

    python examples/dreams.py [PICTURE]

Needs Omniglot and MNIST (`kanerva data fetch omniglot mnist`). Writes five drawings of a character
whose alphabet the model never saw; then twelve sevens; then sevens and threes. Samples twelve new
images of each, pixel by pixel.
"""

import sys

import kanerva
from kanerva import data

import torch

CHARACTER = 300  # which of the test characters


def main(picture: str = "dreams.png") -> None:
    """Save the picture."""
    chance = torch.Generator().manual_seed(0)

    def dream(images: torch.Tensor) -> torch.Tensor:
        return model.generate(model.write(images), 12, sample_pixels=True, generator=chance)

    model, test = kanerva.load("omniglot"), data.load("omniglot", "test")
    character = test.images[test.labels == test.labels.unique()[CHARACTER]][:5]
    drawings = kanerva.prepare(character, model)
    rows = {"five drawings of an unseen character": drawings, "twelve new ones": dream(drawings)}

    model, test = kanerva.load("mnist"), data.load("mnist", "test")
    sevens, threes = (
        kanerva.prepare(test.images[test.labels == digit][:12], model) for digit in (7, 3)
    )
    both = torch.cat([sevens[:6], threes[:6]])
    rows |= {"twelve sevens": sevens, "what a memory of them dreams": dream(sevens)}
    rows |= {"sevens and threes": both, "what a memory of both dreams": dream(both)}
    kanerva.show(**rows).save(picture)
    print(picture)


if __name__ == "__main__":
    main(*sys.argv[1:])
