"""Scores over fixed episodes: nothing dropped, repeats not counted, noise of their own."""

import math
from dataclasses import replace

import pytest
import torch

from kanerva.config import ModelConfig
from kanerva.data import FixedEpisodes, ImageSet
from kanerva.evaluation import bound as module
from kanerva.evaluation.bound import bound, iwae, score
from kanerva.models.kpp_paper import KppPaper
from kanerva.models.terms import ElboTerms


@pytest.fixture
def episodes(tiny: ModelConfig) -> FixedEpisodes:
    """23 images in episodes of 4: six episodes, the last with one repeat."""
    images = torch.randint(256, (23, *tiny.image), dtype=torch.uint8)
    return FixedEpisodes(ImageSet("made", "test", images), episode_length=4, binarization="sample")


def test_every_image_counts_once(episodes: FixedEpisodes, monkeypatch):
    """Terms that say which image was scored: their mean is that of the set, whatever the chunk."""
    for size in (1, 4, 100):
        monkeypatch.setattr(module, "CHUNK", size)

        def which(chunk) -> ElboTerms:
            numbers = chunk.batch.indices.float()
            return ElboTerms(-numbers, 2 * numbers, torch.ones_like(numbers))

        found = score(episodes, which)
        assert found.n_images == 23
        assert found.recon == pytest.approx(11) and found.kl_z == pytest.approx(22)
        assert found.nll_nats == pytest.approx(34)
        spread = (3 * torch.arange(23.0) + 1).std().item()
        assert found.ci95 == pytest.approx(1.96 * spread / math.sqrt(23))


def test_a_long_score_says_how_far_it_is_and_a_short_one_nothing(
    model: KppPaper, episodes: FixedEpisodes, monkeypatch, capsys: pytest.CaptureFixture[str]
):
    """Without a terminal, as in a log file: an hour in silence looks like a hang."""
    monkeypatch.setattr(module, "CHUNK", 1)
    bound(model, episodes, title="own")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(module, "_SELDOM", 0)
    bound(model, episodes, title="own")
    assert "own:  50%" in capsys.readouterr().err


def test_a_limit_scores_the_first_episodes(model: KppPaper, episodes: FixedEpisodes):
    assert bound(model, episodes, limit=2).n_images == 8
    assert bound(model, episodes, limit=99).n_images == 23


def test_the_bound_is_the_mean_negative_elbo(model: KppPaper, episodes: FixedEpisodes):
    """At posterior means nothing is drawn, so the average can be taken by hand."""
    batch = episodes.batch(0, 6)
    nll = model.elbo(batch.images, sample=False).nll_nats[batch.counted]
    found = bound(model, episodes, sample=False)
    assert found.nll_nats == pytest.approx(nll.mean().item(), rel=1e-5)
    assert found.nll_nats == pytest.approx(found.recon + found.kl_z + found.kl_y, rel=1e-6)


def test_a_score_repeats_and_leaves_the_global_state_alone(
    model: KppPaper, episodes: FixedEpisodes
):
    before = torch.get_rng_state()
    first = bound(model, episodes)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(123)
    assert bound(model, episodes) == first


def test_a_part_scores_as_it_does_within_the_whole(
    model: KppPaper, episodes: FixedEpisodes, monkeypatch
):
    monkeypatch.setattr(module, "CHUNK", 2)
    seen = []

    def keep(chunk) -> ElboTerms:
        terms = model.elbo(chunk.batch.images, generator=chunk.generator)
        seen.append(terms.nll_nats)
        return terms

    score(episodes, keep, limit=2)
    score(episodes, keep)
    torch.testing.assert_close(seen[0], seen[1])


def test_iwae_is_the_log_mean_weight_and_tightens(model: KppPaper, episodes: FixedEpisodes):
    one, _ = iwae(model, episodes, 1)
    many, ci95 = iwae(model, episodes, 64)
    assert many < one and ci95 > 0
    weights = model.log_weights(
        episodes.batch(0, 6).images, 64, generator=module.stream("evaluate", "made/test", 0)
    )
    by_hand = -(weights.double().exp().mean(0).log())[episodes.batch(0, 6).counted].mean()
    assert many == pytest.approx(by_hand.item(), rel=1e-6)


def test_bits_per_dim_are_nats_over_ln_2_and_the_number_of_pixels():
    found = module.Score(math.log(2) * 3 * 4 * 5 * 7, 0.0, 0.0, 0.0, 0.0, 1)
    assert found.bits_per_dim((3, 4, 5)) == pytest.approx(7)


def test_one_image_has_no_spread(model: KppPaper, tiny: ModelConfig):
    lone = ImageSet("made", "test", torch.zeros(1, *tiny.image, dtype=torch.uint8))
    episodes = FixedEpisodes(lone, episode_length=1, binarization="threshold")
    found = bound(model, episodes)
    assert replace(found, ci95=0.0) == found and math.isfinite(found.nll_nats)
