"""Pixels that see those before them: nothing of the future, and a likelihood that sums to one."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from kanerva.config import DecoderConfig, LikelihoodConfig, ReadoutConfig, RunConfig
from kanerva.decoder import SpatialDecoder
from kanerva.errors import UserError
from kanerva.layers.neighbours import Neighbours
from kanerva.likelihoods import Bernoulli, Likelihood, make_likelihood
from kanerva.presets import preset

HEIGHT, WIDTH = 6, 7
MIXTURE = make_likelihood(LikelihoodConfig(kind="logistic_mixture", components=2))


def net(channels: int = 1, outputs: int = 1, reach: int = 2, ahead: int = 0) -> Neighbours:
    """With nothing at its initial value: a fresh residual block does nothing."""
    sizes = {"features": 5, "outputs": outputs, "width": 8, "depth": 2}
    made = Neighbours(channels=channels, reach=reach, ahead=ahead, **sizes)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def fresh() -> Neighbours:
    return Neighbours(channels=3, features=5, outputs=2, reach=2, width=8, depth=1)


def shown(count: int, channels: int, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features, what was expected, and images."""
    pixels = torch.rand(2, count, channels, height, width)
    return torch.randn(count, 5, height, width), pixels[0], pixels[1]


def sees(made: Neighbours, which: int) -> Iterator[tuple[int, int, list[bool], tuple]]:
    """Each number of one input in turn is changed: how far down and right of an output it lies,
    and whether that output's parameters and guess move."""
    inputs = shown(1, 1, HEIGHT, WIDTH)
    before = torch.cat(made(*inputs), dim=1)
    for i, j in product(range(HEIGHT), range(WIDTH)):
        changed = [one.clone() for one in inputs]
        changed[which][0, 0, i, j] += 0.5
        moved = (torch.cat(made(*changed), dim=1) != before)[0]
        for a, b in product(range(HEIGHT), range(WIDTH)):
            yield i - a, j - b, moved[:, a, b].tolist(), (i, j, a, b)


@pytest.mark.parametrize("reach, ahead", [(1, 0), (2, 0), (3, 0), (2, 1), (1, 2)])
def test_a_pixel_sees_its_neighbourhood_and_nothing_else(reach: int, ahead: int):
    for down, right, moved, where in sees(net(reach=reach, ahead=ahead), which=2):
        same_row = down == 0 and -reach <= right < 0
        above = -reach <= down < 0 and abs(right) <= reach
        assert moved == [same_row or above] * 2, where


def test_features_speak_for_their_own_pixel():
    """And what was expected of it also for those after it."""
    made, (features, expected, images) = net(reach=1), shown(1, 1, HEIGHT, WIDTH)
    before = torch.cat(made(features, expected, images), dim=1)
    other, here = torch.zeros_like(features), [[3, 2]]
    other[:, 4, 3, 2] = 1
    moved = (torch.cat(made(features + other, expected, images), dim=1) != before)[0]
    assert moved[0].nonzero().tolist() == here
    assert not moved[1].any()  # no guess
    moved = (torch.cat(made(features, expected + other[:, 4:], images), dim=1) != before)[0]
    for part in range(2):
        assert moved[part].nonzero().tolist() == here + [[3, 3], [4, 1], [4, 2], [4, 3]]


@pytest.mark.parametrize("reach, ahead", [(2, 1), (1, 2)])
def test_what_is_expected_is_seen_on_all_sides(reach: int, ahead: int):
    for down, right, moved, where in sees(net(reach=reach, ahead=ahead), which=1):
        far = reach if (down, right) < (0, 0) else ahead
        assert moved == [max(abs(down), abs(right)) <= far] * 2, where


@pytest.mark.parametrize("ahead", [0, 2])
def test_the_probabilities_of_all_images_sum_to_one(ahead: int):
    """Of 2^6 binary ones: each pixel's may depend on the others only through those before it."""
    made, (features, expected, _) = net(ahead=ahead), shown(1, 1, 2, 3)
    every = torch.tensor(list(product([0.0, 1.0], repeat=6))).view(-1, 1, 2, 3)
    features, expected = (part.expand(64, -1, -1, -1) for part in (features, expected))
    output, _ = made(features, expected, every)
    log_prob = Bernoulli().log_prob(output[None], every[None])
    assert log_prob.double().exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    moved, _ = made(features, expected, every.roll(1, 0))
    assert (Bernoulli().log_prob(moved[None], every[None]) - log_prob).abs().max() > 0.05


@pytest.mark.parametrize("channels, ahead", [(1, 0), (3, 0), (3, 1), (1, 3)])
def test_drawing_follows_the_density(channels: int, ahead: int):
    """Drawn without chance, an image is what its own parameters say of it, pixel for pixel."""
    made = net(channels=channels, outputs=channels, ahead=ahead)
    features, expected, _ = shown(4, channels, HEIGHT, WIDTH)

    def mean(output: Tensor, guess: Tensor) -> Tensor:
        return (output + guess).sigmoid()

    images = made.draw(features, expected, mean)
    again = mean(*made(features, expected, images))
    torch.testing.assert_close(images, again, rtol=1e-4, atol=1e-5)


def test_draws_have_the_frequencies_of_the_density():
    made, (features, expected, _) = net(), shown(1, 1, 1, 3)
    many = made.draw(
        features.expand(20_000, -1, -1, -1),
        expected.expand(20_000, -1, -1, -1),
        lambda output, guess: torch.bernoulli(output.sigmoid()),
    )
    for bits in product([0.0, 1.0], repeat=3):
        one = torch.tensor(bits).view(1, 1, 1, 3)
        output, _ = made(features, expected, one)
        p = Bernoulli().log_prob(output[None], one[None]).exp().item()
        seen = (many == one).flatten(1).all(dim=1).float().mean().item()
        assert seen == pytest.approx(p, abs=4 * (p * (1 - p) / 20_000) ** 0.5 + 1e-3)


def test_the_first_guess_lies_midway_between_left_and_above():
    made, (features, expected, images) = fresh(), shown(2, 3, HEIGHT, WIDTH)
    _, guess = made(features, expected, images)
    between = (images[:, :, 1:, :-1] + images[:, :, :-1, 1:]) / 2
    torch.testing.assert_close(guess[:, :, 1:, 1:], between)
    torch.testing.assert_close(guess[:, :, 0, 0], torch.full((2, 3), 0.5))  # nothing before it


def test_levels_common_to_all_neighbours_are_not_differences():
    """Brighter everywhere, expected so: of all a pixel is shown only the level itself moves."""
    made, (_, expected, images) = fresh(), shown(2, 3, HEIGHT, WIDTH)
    _, before = made._shown(made._framed(expected, images))
    _, after = made._shown(made._framed(expected + 0.25, images + 0.25))
    inside = (slice(None), slice(2, None), slice(2, -2))
    moved = (after - before)[inside].abs().amax(dim=(0, 1, 2)) > 1e-5
    assert moved.nonzero().flatten().tolist() == [moved.numel() - 6]  # green midway, of 6 last ones


# In the decoder


def decoder(neighbours: int) -> tuple[SpatialDecoder, Tensor, Tensor]:
    config = DecoderConfig(base=16, depth=1, neighbours=neighbours, near_width=8, near_depth=1)
    made = SpatialDecoder(config, ReadoutConfig(size=4, channels=2), MIXTURE, (3, 8, 9))
    return made, torch.randn(2, 16, 4 + 2 * 2 * 3), torch.randint(256, (2, 16, 3, 8, 9)) / 255


def test_without_images_it_is_a_sketch():
    """Of pixels by themselves, which no image changes; and not what they are given others."""
    made, readout, images = decoder(2)
    assert made(readout).shape == made(readout, images).shape
    assert not torch.allclose(made(readout), made(readout, images))
    plain, readout, images = decoder(0)
    assert torch.equal(plain(readout), plain(readout, images))


@pytest.mark.parametrize("neighbours", [0, 2])
def test_a_drawn_image_is_one_that_the_likelihood_scores(neighbours: int):
    made, readout, images = decoder(neighbours)
    drawn = made.draw(readout, torch.Generator().manual_seed(0))
    assert drawn.shape == images.shape
    MIXTURE.check(drawn)
    assert MIXTURE.log_prob(made.eval()(readout, drawn), drawn).isfinite().all()


@pytest.mark.parametrize(
    "likelihood, outline, ahead",
    [(Bernoulli(), 0, 0), (MIXTURE, 0, 0), (MIXTURE, 6, 3)],
    ids=["binary", "colour", "outline"],
)
@pytest.mark.parametrize("height, width", [(8, 9), (5, 7)])
def test_no_pixel_of_a_likelihood_sees_itself_or_a_later_one(
    likelihood: Likelihood, outline: int, ahead: int, height: int, width: int
):
    """By any path: slopes of each pixel's parameters in all pixels, through the whole decoder."""
    config = DecoderConfig(base=16, depth=1, neighbours=2, ahead=ahead, near_width=8, near_depth=2)
    readout = ReadoutConfig(size=4, channels=2)
    made = SpatialDecoder(config, readout, likelihood, (3, height, width), outline)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    images = torch.rand(1, 2, 3, height, width, requires_grad=True)
    z = torch.randn(1, 2, 4 + 2 * made.side[0] * made.side[1] + outline)
    output = made(z, images)
    seen = 0
    for i, j in product(range(height), range(width)):
        (slope,) = torch.autograd.grad(output[0, 0, :, i, j].sum(), images, retain_graph=True)
        moved = slope[0].abs().sum(dim=1) > 0  # (2, H, W)
        assert not moved[1].any()  # the other image
        assert not moved[0].flatten()[i * width + j :].any()
        seen += moved.sum().item()
    assert seen > height * width  # and it does see some


def test_a_binary_likelihood_has_no_guess_to_train():
    """Parameters without a gradient stop a run on several devices."""
    config = DecoderConfig(base=16, depth=1, neighbours=2, near_width=8, near_depth=1)
    made = SpatialDecoder(config, ReadoutConfig(size=4, channels=2), Bernoulli(), (1, 8, 8))
    images = torch.bernoulli(torch.rand(1, 2, 1, 8, 8))
    output = made(torch.randn(1, 2, 4 + 2 * 4), images).sum() + made(torch.randn(1, 2, 12)).sum()
    output.backward()
    assert [name for name, p in made.named_parameters() if p.grad is None] == []


def test_a_config_without_neighbours_is_named_as_before():
    """Records made before there were any name the same configuration."""
    assert preset("mnist").config_hash() == "91533748226c09de"


def test_neighbours_are_for_kpp():
    with pytest.raises(UserError, match=r"decoder\.neighbours=3 is for kpp"):
        RunConfig(model="kpp-paper", decoder=DecoderConfig(neighbours=3))
    with pytest.raises(UserError, match="neighbours must not be negative"):
        DecoderConfig(neighbours=-1)
    with pytest.raises(UserError, match="which are 0"):
        DecoderConfig(ahead=1)
    with pytest.raises(UserError, match="sketch must not be negative"):
        DecoderConfig(sketch=-1.0)
