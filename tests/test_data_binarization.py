"""Black and white from grey: probabilities are exact, and Pillow is the dither's oracle."""

import numpy as np
import pytest
import torch
from PIL import Image

from kanerva.data.binarization import binarize, to_float
from kanerva.seeding import stream


def every_grey(copies: int) -> torch.Tensor:
    """(copies, 1, 16, 16) images that hold each of the 256 greys once."""
    return torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(copies, 1, 1, 1)


def test_sampled_pixels_are_ones_as_often_as_they_are_bright():
    draws = binarize(every_grey(20_000), "sample", stream("test")).double().mean(0).flatten()
    expected = torch.arange(256) / 255
    error = (draws - expected).abs() / (expected * (1 - expected) / 20_000).sqrt().clamp(min=1e-9)
    assert error[1:-1].max() < 4.5  # standard errors, of 254 greys


def test_black_is_never_drawn_white_nor_white_black():
    draws = binarize(every_grey(20_000), "sample", stream("test")).flatten(1)
    assert draws[:, 0].max() == 0 and draws[:, 255].min() == 1
    assert 0 < draws[:, 1].sum() < 300  # P = 1/255, so 78 are expected
    assert 0 < (1 - draws[:, 254]).sum() < 300


def test_a_stream_draws_the_same_pixels_twice_and_another_stream_others():
    grey = every_grey(50)
    first = binarize(grey, "sample", stream(1, "binarize", 0))
    assert torch.equal(first, binarize(grey, "sample", stream(1, "binarize", 0)))
    assert not torch.equal(first, binarize(grey, "sample", stream(1, "binarize", 1)))


def test_threshold_is_above_one_half():
    ones = binarize(every_grey(1), "threshold").flatten()
    assert torch.equal(ones, (torch.arange(256) / 255 > 0.5).to(torch.uint8))


def test_dither_is_pillows_for_each_image_and_channel():
    grey = torch.randint(0, 256, (3, 2, 7, 9), generator=stream("dither")).to(torch.uint8)
    dots = binarize(grey, "dither")
    for image in range(3):
        for channel in range(2):
            expected = Image.fromarray(grey[image, channel].numpy()).convert("1")
            assert np.array_equal(dots[image, channel].numpy(), np.asarray(expected))


def test_none_changes_nothing_and_bytes_become_fractions():
    grey = every_grey(1)
    assert torch.equal(binarize(grey, "none"), grey)
    torch.testing.assert_close(to_float(grey, False).flatten(), torch.arange(256) / 255)
    ones = binarize(grey, "threshold")
    assert to_float(ones, True).unique().tolist() == [0.0, 1.0]


def test_an_unknown_binarization_is_refused():
    with pytest.raises(Exception, match="stochastic"):
        binarize(every_grey(1), "stochastic")  # pyright: ignore[reportArgumentType]
