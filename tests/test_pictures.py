"""Sheets of pictures: pixels where they belong, nothing cut off."""

import numpy as np
import torch
from PIL import Image

from kanerva.pictures import map_with_thumbnails, sheet, stacked, tile


def test_a_tile_puts_each_image_in_its_place():
    images = torch.rand(5, 3, 4, 6)
    picture = np.asarray(tile(images, columns=3, scale=1))
    assert picture.shape == (2 * (4 + 2) + 2, 3 * (6 + 2) + 2, 3)
    for index, image in enumerate(images):
        row, column = divmod(index, 3)
        top, left = row * 6 + 2, column * 8 + 2
        cut = picture[top : top + 4, left : left + 6]
        assert np.array_equal(cut, (image * 255).round().byte().permute(1, 2, 0).numpy())
    assert (picture[:2] == 208).all()  # the frame
    assert (picture[8:, 18:] == 255).all()  # no sixth image: paper


def test_grey_and_scale():
    picture = np.asarray(tile(torch.ones(1, 1, 2, 2) * 0.5, columns=1, scale=3))
    assert picture.shape == (18, 18, 3) and (picture[6:12, 6:12] == 128).all()


def test_a_long_label_is_not_cut_off():
    """The last columns and rows of the sheet are paper: ink ends before the border."""
    label = "a label much longer than one small picture is wide"
    picture = np.asarray(
        sheet([(label, torch.zeros(1, 1, 8, 8)), ("b", torch.zeros(2, 1, 8, 8))], 2)
    )
    border = [picture[:5], picture[-5:], picture[:, :5], picture[:, -5:]]
    assert all((part == 255).all() for part in border)
    assert (picture[:, -60:] < 255).any()  # while the label does reach that far


def test_pictures_are_stacked_whole():
    wide, high = Image.new("RGB", (30, 4), (255, 0, 0)), Image.new("RGB", (10, 20), (0, 0, 255))
    both = stacked([wide, high])
    assert both.size == (30, 24)
    assert both.getpixel((29, 3)) == (255, 0, 0) and both.getpixel((9, 23)) == (0, 0, 255)


def test_what_is_held_is_drawn_no_larger_than_its_cell():
    """Cells may be narrow: two images beside each other must not cover one another."""
    places, images = torch.tensor([[-0.75, 0.0], [-0.25, 0.0]]), torch.ones(2, 3, 64, 64)
    images[0], images[1, :2] = 0.0, 0.0  # black, blue
    blank = Image.new("RGB", (8, 8))
    drawn = map_with_thumbnails(blank, places, images, [0, 1], cells=(1, 4), side=160)
    pixels = [drawn.getpixel((180 + x, 110)) for x in (4, 36, 44, 76)]
    assert pixels == [(0, 0, 0), (0, 0, 0), (0, 0, 255), (0, 0, 255)]
