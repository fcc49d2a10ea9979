"""Encoders: a sample with its neighbours in view and nothing else, or by itself (`kpp`)."""

import math

import pytest
import torch
import torch.nn.functional as F

from kanerva.config import KppEncoderConfig, ShiftedResNetConfig
from kanerva.encoder import EpisodeEncoder, SampleEncoder, quarter


def encoder(channels: int = 1, **options: float) -> EpisodeEncoder:
    """In evaluation, with running statistics that come from some images."""
    net = EpisodeEncoder(ShiftedResNetConfig(width=8, **options), channels)
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
    """Eight blocks, one shift each: what changed at t reaches t ± 8 and stops there."""
    net, episodes = encoder(shift=0.125), torch.rand(8, 20, 1, 16, 16)
    changed = episodes.clone()
    changed[:, 10] = torch.rand(8, 1, 16, 16)
    moved = (net(episodes) - net(changed)).abs().amax((0, 2))
    assert (moved[2:19] > 0).all()
    torch.testing.assert_close(moved[[0, 1, 19]], torch.zeros(3), atol=1e-6, rtol=0)


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


# kpp: each sample by itself


def by_itself(channels: int = 1) -> SampleEncoder:
    """With nothing at its initial value: a fresh residual block does nothing."""
    net = SampleEncoder(KppEncoderConfig(width=8), channels)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return net


@pytest.mark.parametrize(
    "channels, height, width", [(1, 28, 28), (3, 32, 20), (1, 30, 17), (1, 5, 7), (2, 1, 1)]
)
def test_any_image_becomes_maps_of_a_quarter_of_its_side(channels: int, height: int, width: int):
    """Rounded up, so that every pixel counts, the last row and column included."""
    net = by_itself(channels)
    episode = torch.rand(2, 3, channels, height, width, requires_grad=True)
    maps = net(episode)
    assert net.features == 16
    assert maps.shape == (2, 3, 16, math.ceil(height / 4), math.ceil(width / 4))
    maps.square().sum().backward()
    assert episode.grad is not None and (episode.grad != 0).all()


def test_a_quarter_is_rounded_up():
    assert [quarter(side) for side in (1, 4, 5, 7, 8, 28, 30)] == [1, 1, 2, 2, 2, 7, 8]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("height, width", [(8, 8), (9, 6)])
def test_a_samples_maps_depend_on_that_sample_alone(training: bool, height: int, width: int):
    """Others can come and go, in training too: no shift and no batch statistics."""
    net, episode = by_itself().train(training), torch.rand(3, 4, 1, height, width)
    maps = net(episode)
    torch.testing.assert_close(maps[1, 2], net(episode[1:2, 2:3])[0, 0], rtol=1e-5, atol=1e-5)
    others = torch.rand_like(episode)
    others[1, 2] = episode[1, 2]
    torch.testing.assert_close(net(others)[1, 2], maps[1, 2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(net(episode.flip(0, 1)).flip(0, 1), maps, rtol=1e-5, atol=1e-5)
    assert not list(net.buffers())


def test_a_side_that_cannot_be_quartered_is_filled_up_with_mid_grey():
    """To the right and below, as the decoder crops."""
    net, episode = by_itself(3), torch.rand(2, 3, 3, 10, 5)
    filled = F.pad(episode, (0, 3, 0, 2), value=0.5)
    torch.testing.assert_close(net(episode), net(filled))


def test_maps_follow_their_image():
    """An image moved by four pixels has maps moved by one, away from the edges."""
    net = by_itself()
    picture = torch.full((1, 1, 1, 64, 64), 0.5)
    picture[..., 28:36, 28:36] = torch.rand(8, 8)
    here, there = net(picture), net(picture.roll((4, 8), dims=(-2, -1)))
    inner = there.roll((-1, -2), dims=(-2, -1))[..., 6:10, 6:10]
    torch.testing.assert_close(inner, here[..., 6:10, 6:10], rtol=0.02, atol=0.02)
    assert (here[..., 6:10, 6:10] - there[..., 6:10, 6:10]).abs().max() > 0.1
