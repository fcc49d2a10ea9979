"""The episode encoder: each sample with its neighbours in view, and nothing else."""

from dataclasses import replace

import pytest
import torch

from kanerva.config import EncoderConfig
from kanerva.encoder import EpisodeEncoder

TINY = EncoderConfig(width=8, blocks=(1, 1, 1, 1))


def encoder(channels: int = 1, **options: float) -> EpisodeEncoder:
    """In evaluation, with running statistics that come from some images."""
    net = EpisodeEncoder(replace(TINY, **options), channels)
    with torch.no_grad():
        for _ in range(5):
            net(torch.rand(3, 4, channels, 16, 16))
    return net.eval()


@pytest.mark.parametrize("channels, height, width", [(1, 28, 28), (3, 32, 20), (1, 5, 5)])
def test_any_image_becomes_eight_widths_of_numbers(channels: int, height: int, width: int):
    embedding = encoder(channels)(torch.rand(2, 3, channels, height, width))
    assert embedding.shape == (2, 3, 64)
    assert embedding.std(dim=1).max() > 0  # samples are told apart


def test_a_lone_cue_can_be_encoded():
    net, cue = encoder(), torch.rand(2, 1, 1, 16, 16)
    torch.testing.assert_close(net(cue)[1:], net(cue[1:]))


def test_without_shift_an_embedding_sees_its_own_image_only():
    net, episode = encoder(shift=0.0), torch.rand(2, 6, 1, 16, 16)
    alone = net(episode.flatten(0, 1)[:, None]).view(2, 6, -1)
    torch.testing.assert_close(net(episode), alone, rtol=1e-4, atol=1e-5)


def test_with_shift_a_neighbour_is_seen_one_step_further_per_block():
    """Four blocks, one shift each: what changed at t reaches t ± 4 and stops there."""
    net, episodes = encoder(shift=0.125), torch.rand(8, 12, 1, 16, 16)
    changed = episodes.clone()
    changed[:, 6] = torch.rand(8, 1, 16, 16)
    moved = (net(episodes) - net(changed)).abs().amax((0, 2))
    assert (moved[2:11] > 0).all()
    torch.testing.assert_close(moved[[0, 1, 11]], torch.zeros(3), atol=1e-6, rtol=0)


def test_episodes_of_a_batch_do_not_see_each_other():
    net, episodes = encoder(), torch.rand(3, 4, 1, 16, 16)
    torch.testing.assert_close(net(episodes)[1:2], net(episodes[1:2]), rtol=1e-4, atol=1e-5)


def test_pixels_are_centred():
    """[0, 1] becomes [-1, 1]: a mid-grey image is zero to the first convolution."""
    net = encoder()
    seen: list[torch.Tensor] = []
    net.net.stem.register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[0]))
    net(torch.tensor([0.0, 0.5, 1.0]).view(1, 3, 1, 1, 1).expand(1, 3, 1, 8, 8))
    torch.testing.assert_close(seen[0][:, 0, 0, 0], torch.tensor([-1.0, 0.0, 1.0]))
