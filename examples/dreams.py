"""New images like what is written.

    python examples/dreams.py [PICTURE]

Needs Omniglot and MNIST (`kanerva data fetch omniglot mnist`). Writes five drawings of a character
whose alphabet the model never saw, and samples twelve new ones pixel by pixel. Then writes twelve
sevens, and shows the expected pixels of twelve new digits.
"""

import sys

import torch

import kanerva
from kanerva import data

CHARACTER = 300  # which of the test characters


def main(picture: str = "dreams.png") -> None:
    """Save the picture."""
    chance = torch.Generator().manual_seed(0)
    model, test = kanerva.load("omniglot"), data.load("omniglot", "test")
    character = test.images[test.labels == test.labels.unique()[CHARACTER]][:5]
    drawings = kanerva.prepare(character, model)
    new = model.generate(model.write(drawings), 12, sample_pixels=True, generator=chance)

    model, test = kanerva.load("mnist"), data.load("mnist", "test")
    sevens = kanerva.prepare(test.images[test.labels == 7][:12], model)
    dreams = model.generate(model.write(sevens), 12, generator=chance)
    rows = {
        "five drawings of an unseen character": drawings,
        "twelve new ones": new,
        "twelve sevens": sevens,
        "what a memory of them dreams": dreams,
    }
    kanerva.show(**rows).save(picture)
    print(picture)


if __name__ == "__main__":
    main(*sys.argv[1:])
