"""The drawn characters: unseen ones in test, whole in their frame, the same on every draw."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kanerva.data.glyphs import draw, split_of
from kanerva.data.image_set import ImageSet
from kanerva.data.loading import load

SPLITS = ("train", "validation", "test")


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory):
    """Every split, drawn once; the later ones come from the cache."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KANERVA_CACHE", str(cache))
        yield {split: load("glyphs", split) for split in SPLITS}
    assert len(list(Path(cache, "built").iterdir())) == 1


def labels(image_set: ImageSet) -> torch.Tensor:
    assert image_set.labels is not None
    return image_set.labels


def test_there_are_thousands_of_characters_split_by_code_point(sets: dict[str, ImageSet]):
    characters = {split: set(labels(sets[split]).tolist()) for split in SPLITS}
    total = sum(len(codes) for codes in characters.values())
    assert len(set.union(*characters.values())) == total > 4_500
    assert len(characters["train"]) / total == pytest.approx(0.8, abs=0.02)
    assert len(characters["test"]) / total == pytest.approx(0.1, abs=0.02)
    assert len(sets["train"]) > 20_000 and 2_500 < len(sets["test"]) < 5_000
    assert all(split_of(code) == "test" for code in characters["test"])


def test_no_picture_is_blank_or_cut_off(sets: dict[str, ImageSet]):
    for image_set in sets.values():
        images = image_set.images[:, 0]
        assert images.flatten(1).amax(1).min() > 60
        frame = torch.ones(28, 28, dtype=torch.bool)
        frame[1:-1, 1:-1] = False
        assert images[:, frame].max() == 0


def test_capital_letters_fill_their_frame_like_mnist(sets: dict[str, ImageSet]):
    every = torch.cat([sets[split].images for split in SPLITS])[:, 0]
    codes = torch.cat([labels(sets[split]) for split in SPLITS])
    capitals = every[(codes >= ord("A")) & (codes <= ord("Z"))]
    assert len(capitals) > 250  # 26 in up to 12 styles
    ink = capitals > 40
    tall = ink.any(2).sum(1).float()
    assert 16 <= tall.quantile(0.05) and tall.quantile(0.95) <= 23
    rows = torch.arange(28.0)
    middle = (ink.any(2) * rows).sum(1) / tall
    assert (middle - 13.5).abs().max() < 2.1


def test_spaces_marks_and_look_alikes_are_left_out(sets: dict[str, ImageSet]):
    codes = {code for split in SPLITS for code in labels(sets[split]).tolist()}
    assert {ord("A"), ord("7"), ord("ß"), ord("Ω"), ord("ж")} <= codes
    absent = {0x20, 0xA0, 0xAD, 0x301, 0x391, 0x410}  # spaces, an accent, Alpha, Cyrillic A
    assert not absent & codes


def test_no_test_picture_was_seen_in_training(sets: dict[str, ImageSet]):
    seen = {image.numpy().tobytes() for image in sets["train"].images}
    assert not [1 for image in sets["test"].images if image.numpy().tobytes() in seen]


def test_a_picture_depends_on_its_character_and_style_alone():
    ink = Image.fromarray(np.full((90, 40), 255, np.uint8))
    first = draw(ink, 65, "Sans")
    assert np.array_equal(first, draw(ink, 65, "Sans"))
    assert not np.array_equal(first, draw(ink, 65, "Serif"))
    assert not np.array_equal(first, draw(ink, 66, "Sans"))
