"""The Fréchet distance against closed forms, and the small network that gives features."""

import math

import pytest
import torch

from kanerva.errors import UserError
from kanerva.evaluation.frechet import (
    SIZE,
    frechet,
    frechet_spread,
    matrix_root,
    train_feature_extractor,
)


def noise(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def exactly(mean: torch.Tensor, std: torch.Tensor, count: int = 400) -> torch.Tensor:
    """Points whose sample mean and covariance are exactly `mean` and diag(std^2)."""
    drawn = torch.randn(count, len(mean), generator=noise(), dtype=torch.float64)
    centred = drawn - drawn.mean(dim=0)
    white = centred @ torch.linalg.inv(torch.linalg.cholesky(centred.T.cov())).T
    return white * std + mean


def test_distance_of_diagonal_normals_is_the_closed_form():
    """|m1 - m2|^2 + sum (s1 - s2)^2 where covariances commute."""
    first = torch.tensor([0.0, 1.0, -2.0]), torch.tensor([1.0, 2.0, 0.5])
    second = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([2.0, 2.0, 0.1])
    expected = sum((a - b).square().sum().item() for a, b in zip(first, second, strict=True))
    found = frechet(exactly(*first).float(), exactly(*second).float())
    assert found == pytest.approx(expected, rel=1e-4)


def test_distance_of_any_two_normals_is_that_of_the_unsymmetric_root():
    """tr (S1 S2)^(1/2) is the sum of the roots of the eigenvalues of S1 S2."""
    some = torch.randn(300, 5, generator=noise(1)) @ torch.randn(5, 5, generator=noise(2))
    others = torch.randn(200, 5, generator=noise(3)) @ torch.randn(5, 5, generator=noise(4)) + 1
    a, b = some.double().T.cov(), others.double().T.cov()
    inner = torch.linalg.eigvals(a @ b).real.clamp(min=0).sqrt().sum()
    apart = (some.double().mean(0) - others.double().mean(0)).square().sum()
    expected = (apart + a.trace() + b.trace() - 2 * inner).item()
    assert frechet(some, others) == pytest.approx(expected, rel=1e-6)
    assert frechet(others, some) == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(matrix_root(a) @ matrix_root(a), a)


def test_distance_of_a_set_to_itself_is_zero_and_of_one_image_an_error():
    some = torch.randn(50, 4, generator=noise())
    assert frechet(some, some) == pytest.approx(0, abs=1e-6)
    assert frechet(some[:, :1], some[:, :1]) == pytest.approx(0, abs=1e-6)
    with pytest.raises(UserError, match="two images or more, got 1, 50"):
        frechet(some[:1], some)


def test_error_is_about_the_spread_of_fresh_samples():
    """Against the standard deviation over sets really drawn anew; groups are independent here."""
    reference = torch.randn(400, 3, generator=noise(9))
    fresh = [frechet(torch.randn(400, 3, generator=noise(n)) + 0.5, reference) for n in range(40)]
    wanted = torch.tensor(fresh).std().item()
    some = torch.randn(400, 3, generator=noise(99)) + 0.5
    found = frechet_spread(some, reference, group=20, resamples=60, generator=noise(7))
    assert wanted / 2 < found < 2 * wanted


def test_error_grows_where_the_pictures_of_a_memory_are_alike():
    """Groups of twenty times the same point tell no more than one point each."""
    reference = torch.randn(400, 3, generator=noise(9))
    alike = torch.randn(20, 3, generator=noise(1)).repeat_interleave(20, dim=0)
    together = frechet_spread(alike, reference, group=20, resamples=40, generator=noise(2))
    apart = frechet_spread(alike, reference, group=1, resamples=40, generator=noise(2))
    assert together > 2 * apart


def bars(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Upright bars of label 7, level bars of label 3, with noise."""
    labels = torch.randint(2, (count,), generator=noise(seed))
    images = torch.rand(count, 1, 12, 10, generator=noise(seed + 1)) * 0.3
    images[labels == 0, :, :, 4:6] = 1
    images[labels == 1, :, 5:7] = 1
    return images, torch.tensor([7, 3])[labels]


def test_a_classifier_tells_what_it_was_shown_and_sees_what_is_odd():
    images, labels = bars(400, 0)
    extractor = train_feature_extractor(images, labels, steps=60, generator=noise())
    assert extractor.learnt_from == "labels" and extractor.classes == 2
    assert extractor.accuracy is not None and extractor.accuracy > 0.95
    seen = extractor(images[:360])
    assert seen.shape == (360, SIZE)
    torch.testing.assert_close(seen.mean(dim=0), torch.zeros(SIZE), atol=1e-3, rtol=0)
    torch.testing.assert_close(seen.std(dim=0), torch.ones(SIZE), atol=1e-3, rtol=0)
    alike, odd = (
        extractor(bars(360, 5)[0]),
        extractor(torch.rand(360, 1, 12, 10, generator=noise(3))),
    )
    assert frechet(alike, seen) < 0.1 * frechet(odd, seen)


def test_without_labels_an_autoencoder_sees():
    images, _ = bars(300, 0)
    extractor = train_feature_extractor(images, None, steps=60, generator=noise())
    assert (extractor.learnt_from, extractor.classes, extractor.accuracy) == ("images", None, None)
    redrawn = extractor.network(images).detach()
    blank = images.flatten(1).var(dim=0).mean()
    assert (redrawn - images.flatten(1)).square().mean() < blank  # better than the mean image


def test_the_same_noise_trains_the_same_network():
    images, labels = bars(200, 0)
    one, two = (
        train_feature_extractor(images, labels, steps=3, generator=noise(4)) for _ in range(2)
    )
    assert torch.equal(one(images), two(images))
    other = train_feature_extractor(images, labels, steps=3, generator=noise(5))
    assert not torch.equal(one(images), other(images)) and math.isfinite(one.accuracy or 0)
