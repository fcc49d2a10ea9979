"""Controls: the same q and the same noise, another memory."""

from functools import partial

import pytest
import torch

from kanerva.config import ModelConfig
from kanerva.data import FixedEpisodes, ImageSet
from kanerva.evaluation.bound import bound
from kanerva.evaluation.controls import control, controls, other_episode
from kanerva.memory.heap import Memory
from kanerva.models.kpp_paper import KppPaper


def episodes_of(config: ModelConfig, count: int, length: int) -> FixedEpisodes:
    images = torch.randint(256, (count, *config.image), dtype=torch.uint8)
    return FixedEpisodes(
        ImageSet("made", "test", images), episode_length=length, binarization="sample"
    )


def test_only_the_readout_kl_depends_on_the_memory(model: KppPaper, tiny: ModelConfig):
    """In K++ the decoder reads z alone, so a control moves KL z and nothing else."""
    episodes = episodes_of(tiny, 24, 4)
    own = bound(model, episodes)
    for name, found in controls(model, episodes).items():
        assert found is not None and found.n_images == 24
        assert found.kl_y == pytest.approx(own.kl_y, rel=1e-5), name
    for found in (control("zeroed", model, episodes, 6), control("other", model, episodes, 6)):
        assert found.recon == pytest.approx(own.recon, rel=1e-5)
        assert abs(found.kl_z - own.kl_z) > 1e-4


def test_zeroed_is_a_memory_of_zeros(model: KppPaper, tiny: ModelConfig):
    episodes = episodes_of(tiny, 8, 4)
    batch = episodes.batch(0, 2)
    from kanerva.evaluation.bound import stream

    empty = Memory(torch.zeros_like(model.write(batch.images).map))
    terms = model.elbo(batch.images, empty, generator=stream("evaluate", "made/test", 0))
    found = control("zeroed", model, episodes, 2)
    assert found is not None
    assert found.nll_nats == pytest.approx(terms.nll_nats.mean().item(), 1e-5)


def test_other_never_shares_an_image(tiny: ModelConfig):
    episodes = episodes_of(tiny, 9, 4)  # the third episode wraps into the first
    for episode in range(len(episodes)):
        partner = other_episode(episodes, episode)
        assert partner is not None and partner != episode
        mine, theirs = episodes.indices[episode].tolist(), episodes.indices[partner].tolist()
        assert not set(mine) & set(theirs)
    assert other_episode(episodes, 2) == 1


def test_other_is_none_where_no_episode_is_disjoint(model: KppPaper, tiny: ModelConfig):
    assert control("other", model, episodes_of(tiny, 5, 4), 2) is None
    assert control("other", model, episodes_of(tiny, 4, 4), 1) is None


def test_left_out_writes_the_episode_without_the_target(
    model: KppPaper, tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch
):
    """Against a loop: each image's memory is written from its three neighbours. Means instead of
    draws make all terms comparable."""
    images = episodes_of(tiny, 8, 4).batch(0, 2).images
    at_means = partial(KppPaper.terms, model)
    monkeypatch.setattr(model, "terms", lambda *a, **k: at_means(*a, **(k | {"sample": False})))
    fast = model.left_out(images, generator=torch.Generator().manual_seed(0))
    embedding = model.encoder(images)
    for b in range(2):
        for t in range(4):
            rest = torch.cat([images[b, :t], images[b, t + 1 :]])
            maps, alone = model.write(rest).map[None], embedding[b, t][None, None]
            keys = model.key_posterior(alone, maps)
            slow = model.terms(images[b, t][None, None], alone, maps, keys)
            assert slow.key_kl.item() == pytest.approx(fast.key_kl[b, t].item(), rel=1e-4)
            assert slow.nll_nats.item() == pytest.approx(fast.nll_nats[b, t].item(), rel=1e-4)


def test_left_out_is_none_for_episodes_of_one(model: KppPaper, tiny: ModelConfig):
    assert control("left_out", model, episodes_of(tiny, 3, 1), 3) is None


def test_controls_score_as_many_images_as_asked(model: KppPaper, tiny: ModelConfig):
    found = controls(model, episodes_of(tiny, 40, 4), images=10)
    assert {s.n_images for s in found.values() if s is not None} == {12}  # whole episodes
