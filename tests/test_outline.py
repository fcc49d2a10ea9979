"""A picture's outline: the means of boxes, orthonormal, measured, there and back."""

import math

import pytest
import torch
from torch import nn

from kanerva.layers.outline import FromCosines, ToCosines, box, cosines, lowest_cosines, shares

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


@pytest.mark.parametrize("image", [*IMAGES, (3, 32, 32), (1, 28, 28)])
def test_they_are_orthonormal_and_brightness_comes_first(image: tuple[int, int, int]):
    for count in (1, 5, min(math.prod(image), 384)):
        basis = lowest_cosines(count, image)
        torch.testing.assert_close(basis @ basis.T, torch.eye(count), rtol=0, atol=1e-5)
        assert (basis[0] > 0).all()


@pytest.mark.parametrize(
    "count, image, kept, boxes",
    [
        (384, (3, 32, 32), [256, 64, 64], [(2, 2), (4, 4), (4, 4)]),
        (384, (3, 64, 64), [256, 64, 64], [(4, 4), (8, 8), (8, 8)]),
        (192, (3, 32, 32), [128, 32, 32], [(4, 2), (8, 4), (8, 4)]),
        (384, (1, 28, 28), [384], [(2, 1)]),
        (6, (3, 1, 2), [2, 2, 2], [(1, 1)] * 3),
        (9, (3, 1, 2), [2, 2, 2], [(1, 1)] * 3),
        (1, (1, 3, 5), [1], [(2, 2)]),
    ],
)
def test_the_numbers_are_shared_among_brightness_and_colours(
    count: int, image: tuple[int, int, int], kept: list[int], boxes: list[tuple[int, int]]
):
    assert shares(count, image) == kept
    assert [box(some, *image[1:]) for some in kept] == boxes


def test_an_outline_is_the_means_of_boxes():
    """Of brightness in 2x2 boxes and of colours in 4x4 ones: plain averages."""
    pixels, image = torch.rand(4, 3, 32, 32), (3, 32, 32)
    back = FromCosines(384, image)(ToCosines(384, image)(pixels))

    def plain(x: torch.Tensor, side: int) -> torch.Tensor:
        return torch.nn.functional.avg_pool2d(x, side)

    torch.testing.assert_close(
        plain(back.mean(1, keepdim=True), 2), plain(pixels.mean(1, keepdim=True), 2)
    )
    torch.testing.assert_close(plain(back, 4), plain(pixels, 4))
    in_boxes = back.unflatten(-1, (16, 2)).unflatten(-3, (16, 2))
    assert in_boxes.std(dim=(-1, -3)).max() < 1e-5  # flat within a box
    fine = pixels - pixels.unflatten(-1, (16, 2)).unflatten(-3, (16, 2)).mean(
        (-1, -3)
    ).repeat_interleave(2, -1).repeat_interleave(2, -2)
    again = FromCosines(384, image)(ToCosines(384, image)(pixels - fine))
    torch.testing.assert_close(again, back)  # and finer detail does not count


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


def test_measured_numbers_are_all_of_the_size_a_tanh_keeps():
    """About zero, and as large as each other; there and back they are the same pictures."""
    image, pixels = (3, 8, 8), 0.5 * smooth((3, 8, 8), 64)
    there, back = ToCosines(24, image), FromCosines(24, image)
    before = back(there(pixels))
    for net in (there, back):
        net.fit_to_data(pixels)
    numbers = there(pixels)
    torch.testing.assert_close(numbers.mean(0), torch.zeros(24), rtol=0, atol=1e-4)
    varied = there.spread > 1 / 255
    assert 4 < varied.sum() < 24
    torch.testing.assert_close(numbers.std(0)[varied], torch.full((24,), 0.4)[varied])
    assert (numbers.std(0) < 0.41).all()  # what hardly varies is not blown up
    torch.testing.assert_close(back(numbers), before)


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
    moved = -plain.weight.grad * (0.4 * 0.01) ** 2
    torch.testing.assert_close(
        net(pixels) - start, (pixels - 0.5).flatten(1) @ moved.T, atol=1e-5, rtol=1e-3
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert net(pixels).dtype == torch.float32
        assert FromCosines(24, image)(start.bfloat16()).dtype == torch.float32


def test_what_they_start_from_is_not_saved_and_what_is_usual_is():
    net = FromCosines(6, (1, 4, 4))
    assert sorted(net.state_dict()) == ["change", "middle", "spread"]
