"""Pixels that see those before them: nothing of the future, and a likelihood that sums to one."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from kanerva.config import KppDecoderConfig, KppReadoutConfig, run_from_dict
from kanerva.decoder import SpatialDecoder
from kanerva.errors import UserError
from kanerva.layers.pixel_context import BoxedLinear, Neighbours
from kanerva.likelihoods import Bernoulli, Likelihood, LogisticMixture

HEIGHT, WIDTH = 6, 7
ONE = (1, 1)
MIXTURE = LogisticMixture(2)


def net(
    channels: int = 1, outputs: int = 1, radius: int = 2, box: tuple[int, int] = ONE
) -> Neighbours:
    """With nothing at its initial value: a fresh residual block does nothing."""
    sizes = {"features": 5, "outputs": outputs, "width": 8, "depth": 2}
    made = Neighbours(channels=channels, radius=radius, box=box, **sizes)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def fresh() -> Neighbours:
    return Neighbours(channels=3, features=5, outputs=2, radius=2, width=8, depth=1)


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


@pytest.mark.parametrize("radius, box", [(1, ONE), (2, ONE), (3, ONE), (2, (2, 2)), (1, (4, 2))])
def test_a_pixel_sees_its_neighbourhood_and_nothing_else(radius: int, box: tuple[int, int]):
    for down, right, moved, where in sees(net(radius=radius, box=box), which=2):
        same_row = down == 0 and -radius <= right < 0
        above = -radius <= down < 0 and abs(right) <= radius
        assert moved == [same_row or above] * 2, where


def test_features_speak_for_their_own_pixel():
    """And what was expected of it also for those after it."""
    made, (features, expected, images) = net(radius=1), shown(1, 1, HEIGHT, WIDTH)
    before = torch.cat(made(features, expected, images), dim=1)
    other, here = torch.zeros_like(features), [[3, 2]]
    other[:, 4, 3, 2] = 1
    moved = (torch.cat(made(features + other, expected, images), dim=1) != before)[0]
    assert moved[0].nonzero().tolist() == here
    assert not moved[1].any()  # no guess
    moved = (torch.cat(made(features, expected + other[:, 4:], images), dim=1) != before)[0]
    for part in range(2):
        assert moved[part].nonzero().tolist() == here + [[3, 3], [4, 1], [4, 2], [4, 3]]


@pytest.mark.parametrize("box", [(1, 1), (2, 1), (4, 2)])
@pytest.mark.parametrize("corner", [(0, 0), (3, 1)])
def test_each_place_of_a_box_has_weights_of_its_own(box: tuple[int, int], corner: tuple[int, int]):
    """Against a plain product, pixel by pixel; pictures need not be whole boxes."""
    layer, x = BoxedLinear(5, 3, box), torch.randn(2, HEIGHT, WIDTH, 5)
    weights, biases = layer.weight.view(*box, 3, 5), layer.bias.view(*box, 3)
    made = layer(x, corner)
    assert made.shape == (2, HEIGHT, WIDTH, 3)
    for i, j in product(range(HEIGHT), range(WIDTH)):
        place = (corner[0] + i) % box[0], (corner[1] + j) % box[1]
        torch.testing.assert_close(made[:, i, j], x[:, i, j] @ weights[place].T + biases[place])


@pytest.mark.parametrize("box", [(1, 1), (2, 1), (4, 2)])
def test_fitted_weights_are_those_of_least_squares(box: tuple[int, int]):
    """In pieces as at once, place by place; pixels beyond whole boxes are left out."""
    noise = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 9, 7, 4, generator=noise), torch.randn(60, 9, 7, 2, generator=noise)
    layer = BoxedLinear(4, 2, box)
    layer.fit([(x[:10], y[:10]), (x[10:], y[10:])])
    for a, b in product(range(box[0]), range(box[1])):
        inputs, outputs = (
            one[:, a : 9 // box[0] * box[0] : box[0], b : 7 // box[1] * box[1] : box[1]]
            for one in (x, y)
        )
        inputs = torch.cat([inputs, torch.ones_like(inputs[..., :1])], dim=-1).flatten(0, 2)
        best = torch.linalg.lstsq(inputs, outputs.flatten(0, 2)).solution
        weight, bias = layer.weight.view(*box, 2, 4)[a, b], layer.bias.view(*box, 2)[a, b]
        torch.testing.assert_close(torch.cat([weight.T, bias[None]]), best, rtol=1e-3, atol=1e-4)


def test_a_measured_guess_is_nearer_than_midway():
    """Where pictures are smooth and an outline is told, and on pictures it has not seen."""
    noise = torch.Generator().manual_seed(0)
    wild = torch.rand(400, 3, 16, 16, generator=noise)
    images = torch.nn.functional.avg_pool2d(wild, 3, stride=1)[..., :12, :12]
    outline = torch.nn.functional.avg_pool2d(images, 2).repeat_interleave(2, -1)
    outline = outline.repeat_interleave(2, -2)
    made = Neighbours(channels=3, features=5, outputs=2, radius=2, width=8, depth=1, box=(2, 2))
    features = torch.zeros(400, 5, 12, 12)

    def error(part: slice) -> Tensor:
        _, guess = made(features[part], outline[part], images[part])
        return (guess - images[part]).square().mean(dim=(0, 1)).sqrt()

    before = error(slice(300, 400))
    made.fit_to_data(outline[:300], outline[:1], images[:300])
    after = error(slice(300, 400))
    assert (after.mean() < 0.5 * before.mean()).item()
    assert after[1::2, 1::2].max() < 1e-3  # the last of its box, which its mean gives away


def test_who_is_told_nothing_has_a_guess_of_its_own():
    """Image by image, drawn or scored; measured from what is then expected of all."""
    noise = torch.Generator().manual_seed(0)
    images = torch.rand(300, 1, 8, 8, generator=noise).cumsum(-1) / 8
    made = net(box=(2, 2))
    nothing = images.mean(dim=0, keepdim=True)
    made.fit_to_data(images, nothing, images)  # told all of it
    told = torch.arange(300) % 3 > 0
    expected = torch.where(told[:, None, None, None], images, nothing.expand_as(images))
    features = torch.randn(300, 5, 8, 8)
    _, guess = made(features, expected, images, told)
    wrong = (guess - images).square().mean(dim=(1, 2, 3)).sqrt()
    assert wrong[told].max() < 1e-3 and 0.01 < wrong[~told].mean() < 0.06
    _, every = made(features, expected, images)
    assert torch.equal(every[told], guess[told])
    assert (every - images)[~told].square().mean().sqrt() > 1.5 * wrong[~told].mean()

    def mean(output: Tensor, guess: Tensor) -> Tensor:
        return (output + guess).sigmoid()

    some = slice(0, 6)
    drawn = made.sample(features[some], expected[some], mean, told[some])
    again = mean(*made(features[some], expected[some], drawn, told[some]))
    torch.testing.assert_close(drawn, again, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("box", [(1, 1), (2, 2)])
def test_the_probabilities_of_all_images_sum_to_one(box: tuple[int, int]):
    """Of 2^6 binary ones: each pixel's may depend on the others only through those before it."""
    made, (features, expected, _) = net(box=box), shown(1, 1, 2, 3)
    every = torch.tensor(list(product([0.0, 1.0], repeat=6))).view(-1, 1, 2, 3)
    features, expected = (part.expand(64, -1, -1, -1) for part in (features, expected))
    output, _ = made(features, expected, every)
    log_prob = Bernoulli().log_prob(output[None], every[None])
    assert log_prob.double().exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    moved, _ = made(features, expected, every.roll(1, 0))
    assert (Bernoulli().log_prob(moved[None], every[None]) - log_prob).abs().max() > 0.05


@pytest.mark.parametrize("channels, box", [(1, ONE), (3, ONE), (3, (2, 2)), (1, (4, 2))])
def test_drawing_follows_the_density(channels: int, box: tuple[int, int]):
    """Drawn without chance, an image is what its own parameters say of it, pixel for pixel."""
    made = net(channels=channels, outputs=channels, box=box)
    features, expected, _ = shown(4, channels, HEIGHT, WIDTH)

    def mean(output: Tensor, guess: Tensor) -> Tensor:
        return (output + guess).sigmoid()

    images = made.sample(features, expected, mean)
    again = mean(*made(features, expected, images))
    torch.testing.assert_close(images, again, rtol=1e-4, atol=1e-5)


def test_draws_have_the_frequencies_of_the_density():
    made, (features, expected, _) = net(), shown(1, 1, 1, 3)
    many = made.sample(
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
    width = 8 if neighbours else KppDecoderConfig.near_width
    config = KppDecoderConfig(base=16, depth=1, neighbours=neighbours, near_width=width)
    made = SpatialDecoder(config, KppReadoutConfig(size=4, channels=2), MIXTURE, (3, 8, 9))
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
    drawn = made.sample(readout, torch.Generator().manual_seed(0))
    assert drawn.shape == images.shape
    MIXTURE.check(drawn)
    assert MIXTURE.log_prob(made.eval()(readout, drawn), drawn).isfinite().all()


@pytest.mark.parametrize(
    "likelihood, outline",
    [(Bernoulli(), 0), (MIXTURE, 0), (MIXTURE, 6)],
    ids=["binary", "colour", "outline"],
)
@pytest.mark.parametrize("height, width", [(8, 9), (5, 7)])
def test_no_pixel_of_a_likelihood_sees_itself_or_a_later_one(
    likelihood: Likelihood, outline: int, height: int, width: int
):
    """By any path: slopes of each pixel's parameters in all pixels, through the whole decoder."""
    config = KppDecoderConfig(base=16, depth=1, neighbours=2, near_width=8)
    readout = KppReadoutConfig(size=4, channels=2)
    made = SpatialDecoder(config, readout, likelihood, (3, height, width), outline)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    images = torch.rand(1, 2, 3, height, width, requires_grad=True)
    z = torch.randn(1, 2, 4 + 2 * made.side[0] * made.side[1] + outline)
    z[:, 1, z.shape[-1] - outline :] = 0  # of one image an outline says nothing
    output = made(z, images)
    for image in range(2):
        seen = 0
        for i, j in product(range(height), range(width)):
            one = output[0, image, :, i, j].sum()
            (slope,) = torch.autograd.grad(one, images, retain_graph=True)
            moved = slope[0].abs().sum(dim=1) > 0  # (2, H, W)
            assert not moved[1 - image].any()  # the other image
            assert not moved[image].flatten()[i * width + j :].any()
            seen += moved.sum().item()
        assert seen > height * width  # and it does see some


@pytest.mark.parametrize(
    "outline, image, radius, expected",
    [
        (384, (3, 32, 32), 3, (4, 4)),
        (384, (3, 32, 32), 1, (2, 2)),
        (384, (3, 64, 64), 3, (4, 4)),
        (384, (1, 28, 28), 3, (2, 1)),
        (192, (3, 32, 32), 3, (4, 4)),
    ],
)
def test_places_are_those_of_the_largest_box_a_pixel_sees(
    outline: int, image: tuple[int, int, int], radius: int, expected: tuple[int, int]
):
    config = KppDecoderConfig(base=16, depth=1, neighbours=radius, near_width=8)
    made = SpatialDecoder(config, KppReadoutConfig(size=4, channels=2), MIXTURE, image, outline)
    assert made.near is not None and made.near.seen.box == expected
    assert made.near.guess is not None and made.near.guess.box == expected


def test_an_empty_place_is_drawn_as_it_is_scored():
    """By the guess of those who are told nothing: here white, the other black."""
    config = KppDecoderConfig(base=16, depth=1, neighbours=2, near_width=8)
    made = SpatialDecoder(config, KppReadoutConfig(size=4, channels=2), MIXTURE, (3, 8, 8), 12)
    near = made.near
    assert near is not None and near.guess is not None and near.untold is not None
    with torch.no_grad():
        near.guess.bias.fill_(-8.0)
        near.untold.bias.fill_(8.0)
        z = torch.randn(1, 2, 4 + 2 * 4 + 12)
        z[:, 1, -12:] = 0
        drawn = made.sample(z, torch.Generator().manual_seed(0))
        score = MIXTURE.log_prob(made(z, drawn), drawn)[0]
        wrong = MIXTURE.log_prob(made(z, drawn.flip(1)), drawn.flip(1))[0]
    assert drawn[0, 0].mean() < 0.1 and drawn[0, 1].mean() > 0.9
    assert (score > wrong + 100).all()


def test_a_binary_likelihood_has_no_guess_to_train():
    """Parameters without a gradient stop a run on several devices."""
    config = KppDecoderConfig(base=16, depth=1, neighbours=2, near_width=8)
    made = SpatialDecoder(config, KppReadoutConfig(size=4, channels=2), Bernoulli(), (1, 8, 8))
    images = torch.bernoulli(torch.rand(1, 2, 1, 8, 8))
    output = made(torch.randn(1, 2, 4 + 2 * 4), images).sum() + made(torch.randn(1, 2, 12)).sum()
    output.backward()
    assert [name for name, p in made.named_parameters() if p.grad is None] == []


def test_neighbours_are_for_kpp():
    with pytest.raises(UserError, match="neighbours"):
        run_from_dict({"model": "kpp-paper", "decoder": {"neighbours": 3}})
    with pytest.raises(UserError, match="neighbours must not be negative"):
        KppDecoderConfig(neighbours=-1)
