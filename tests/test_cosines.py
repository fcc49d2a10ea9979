"""The lowest cosines of a picture: orthonormal, in order, there and back."""

import math

import pytest
import torch
from torch import nn

from kanerva.layers.cosines import FromCosines, ToCosines, cosines, lowest_cosines

IMAGES = [(1, 7, 5), (3, 6, 4), (3, 8, 8)]


def smooth(image: tuple[int, int, int], count: int = 16) -> torch.Tensor:
    """Pictures with little fine detail and little colour: a slow wave each, on [0, 1]."""
    channels, height, width = image
    noise = torch.Generator().manual_seed(0)
    y = torch.arange(height)[:, None] / height
    x = torch.arange(width) / width
    a, b, c = torch.rand(3, count, 1, 1, 1, generator=noise)
    d = torch.rand(count, channels, 1, 1, generator=noise)
    return 0.5 + 0.3 * torch.cos(3 * (a * y + b * x) + 6 * c) + 0.1 * (d - 0.5)


def test_along_a_side_they_are_the_discrete_cosine_transform():
    for side in (1, 2, 7):
        waves = cosines(side)
        for k in range(side):
            for n in range(side):
                scale = math.sqrt((1 if k == 0 else 2) / side)
                expected = scale * math.cos(math.pi * k * (2 * n + 1) / (2 * side))
                assert waves[k, n].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("image", IMAGES)
def test_they_are_orthonormal_and_the_most_powerful_come_first(image: tuple[int, int, int]):
    total = math.prod(image)
    basis, spread = lowest_cosines(total, image)
    torch.testing.assert_close(basis @ basis.T, torch.eye(total), rtol=0, atol=1e-5)
    assert (spread.diff() <= 0).all()
    assert (basis[0] - basis[0, 0]).abs().max() < 1e-6  # brightness itself
    contrast = spread.square().sum() / total
    assert contrast.item() == pytest.approx(0.25**2, rel=1e-4)
    fewer, _ = lowest_cosines(5, image)
    torch.testing.assert_close(fewer, basis[:5])


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("more", [0, 4])
def test_there_and_back_with_all_of_them_is_the_image(image: tuple[int, int, int], more: int):
    count, pixels = math.prod(image) + more, torch.rand(4, *image)
    numbers = ToCosines(count, image)(pixels)
    torch.testing.assert_close(FromCosines(count, image)(numbers), pixels, rtol=0, atol=1e-4)
    assert more == 0 or (numbers[:, -more:] == 0).all()


@pytest.mark.parametrize("image", IMAGES)
def test_the_more_are_kept_the_nearer_the_picture(image: tuple[int, int, int]):
    pixels, errors = smooth(image), []
    for count in (1, 4, 8, 16):
        back = FromCosines(count, image)(ToCosines(count, image)(pixels))
        errors.append((back - pixels).square().mean().item())
        # a projection: what is left is orthogonal to what is told
        left, told = (pixels - back).flatten(1), (back - 0.5).flatten(1)
        torch.testing.assert_close(
            (left * told).sum(1), torch.zeros(len(pixels)), atol=1e-4, rtol=0
        )
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.2 * errors[0]


def test_numbers_are_of_the_size_a_tanh_keeps():
    """Of the first, brightness: all of black and all of white, whose numbers are the largest."""
    net = ToCosines(24, (3, 8, 8))
    numbers = net(torch.stack([torch.zeros(3, 8, 8), torch.ones(3, 8, 8)]))
    torch.testing.assert_close(numbers[0], -numbers[1])
    assert (numbers[:, 1:].abs() < 1e-5).all() and 0.2 < numbers[1, 0] < 2.5
    assert 0.05 < net(smooth((3, 8, 8), 64)).abs().amax(0)[:4].min()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_they_have_the_precision_of_their_model(dtype: torch.dtype):
    there, back = ToCosines(6, (1, 4, 4)).to(dtype), FromCosines(6, (1, 4, 4)).to(dtype)
    assert back(there(torch.rand(2, 1, 4, 4))).dtype == dtype


def test_they_learn_slowly_and_in_full_precision():
    """A step of an optimiser moves a number a hundredth as far as a plain layer's would."""
    image, pixels = (3, 8, 8), smooth((3, 8, 8))
    net = ToCosines(24, image)
    start = net(pixels).detach()
    optimiser = torch.optim.SGD(net.parameters(), lr=1.0)
    net(pixels).sum().backward()
    optimiser.step()
    plain = nn.Linear(192, 24, bias=False)
    plain.weight.data.copy_(net.start)
    (plain((pixels - 0.5).flatten(1))).sum().backward()
    assert plain.weight.grad is not None
    moved = -plain.weight.grad * 0.01**2
    torch.testing.assert_close(
        net(pixels) - start, (pixels - 0.5).flatten(1) @ moved.T, atol=1e-5, rtol=1e-3
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert net(pixels).dtype == torch.float32
        assert FromCosines(24, image)(start.bfloat16()).dtype == torch.float32


def test_what_they_start_from_is_not_saved():
    net = FromCosines(6, (1, 4, 4))
    assert list(net.state_dict()) == ["change"]
