"""The decoder: a readout to likelihood parameters, one image at a time."""

import pytest
import torch
from torch import nn

from kanerva.config import DecoderConfig, KppDecoderConfig, KppReadoutConfig
from kanerva.decoder import Decoder, SpatialDecoder
from kanerva.layers.evonorm import EvoNormS0
from kanerva.likelihoods import Bernoulli


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("height, width", [(28, 28), (32, 20), (7, 9), (1, 1)])
def test_any_image_size_can_be_decoded_and_every_pixel_varies(layers: int, height: int, width: int):
    net = Decoder(DecoderConfig(base=16, layers=layers), 5, 2, height, width)
    output = net(torch.randn(2, 3, 5))
    assert output.shape == (2, 3, 2, height, width)
    assert (output.flatten(0, 1).std(0) > 0).all()


@pytest.mark.parametrize("training", [True, False])
def test_an_image_is_decoded_from_its_own_readout(training: bool):
    """Condition 1: other images, their order and their number change nothing."""
    net = Decoder(DecoderConfig(base=16, layers=2), 5, 3, 8, 8).train(training)
    readout = torch.randn(3, 4, 5)
    torch.testing.assert_close(net(readout)[1, 2], net(readout[1:2, 2:3])[0, 0])
    torch.testing.assert_close(net(readout), net(readout.flip(0, 1)).flip(0, 1))


def test_the_decoder_carries_no_state():
    assert not list(Decoder(DecoderConfig(base=16), 5, 3, 8, 8).buffers())


def test_evonorm_stands_between_all_layers():
    """App. E. Between every two convolutions, and nothing but convolutions beside it."""
    net = Decoder(DecoderConfig(base=64, layers=3), 5, 3, 28, 28)
    kinds = [type(layer) for layer in net.stack]
    assert kinds == [EvoNormS0, *[nn.ConvTranspose2d, EvoNormS0] * 3, nn.Conv2d]


def test_the_crop_takes_the_middle():
    """9 pixels of 12: one is dropped before and two after."""
    net = Decoder(DecoderConfig(base=16, layers=2), 5, 1, 9, 12)
    readout = torch.randn(1, 1, 5)
    whole = net.stack(net.project(readout[0]).unflatten(-1, (-1, *net.start)))
    assert whole.shape[-2:] == (12, 12)
    torch.testing.assert_close(net(readout)[0], whole[..., 1:10, :])


# kpp: from a readout with a global and a spatial part

PARTS = [(4, 0), (0, 2), (3, 2)]


def spatial(size: int, channels: int, height: int, width: int) -> SpatialDecoder:
    """With nothing at its initial value: a fresh residual block does nothing. Two binary channels,
    so two outputs."""
    readout, image = KppReadoutConfig(size=size, channels=channels), (2, height, width)
    net = SpatialDecoder(KppDecoderConfig(base=16, depth=1), readout, Bernoulli(), image)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return net


def length(size: int, channels: int, height: int, width: int) -> int:
    """Numbers of a readout: the spatial part has a quarter of the side, rounded up."""
    return size + channels * ((height + 3) // 4) * ((width + 3) // 4)


@pytest.mark.parametrize("size, channels", PARTS)
@pytest.mark.parametrize("height, width", [(28, 28), (32, 20), (7, 9), (1, 1)])
def test_a_readout_in_parts_is_decoded_at_any_image_size_and_every_pixel_varies(
    size: int, channels: int, height: int, width: int
):
    net = spatial(size, channels, height, width)
    output = net(torch.randn(2, 3, length(size, channels, height, width)))
    assert output.shape == (2, 3, 2, height, width)
    assert (output.flatten(0, 1).std(0) > 0).all()


@pytest.mark.parametrize("training", [True, False])
def test_an_image_is_decoded_from_its_own_readout_in_parts(training: bool):
    net, readout = spatial(3, 2, 9, 6).train(training), torch.randn(3, 4, length(3, 2, 9, 6))
    whole, close = net(readout), {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(whole[1, 2], net(readout[1:2, 2:3])[0, 0], **close)
    torch.testing.assert_close(whole, net(readout.flip(0, 1)).flip(0, 1), **close)
    assert not list(net.buffers())


def test_the_global_part_comes_first_in_a_readout():
    """As `SpatialReadout` lays it out: with its layer silenced, the first three say nothing."""
    net, readout = spatial(3, 2, 8, 8), torch.randn(1, 1, length(3, 2, 8, 8), requires_grad=True)
    net(readout).square().sum().backward()
    assert readout.grad is not None and (readout.grad != 0).all()
    nn.init.zeros_(net.from_global.weight)
    readout.grad = None
    net(readout).square().sum().backward()
    assert readout.grad is not None
    assert (readout.grad[..., :3] == 0).all() and (readout.grad[..., 3:] != 0).all()


def test_what_exceeds_an_image_is_cropped_to_the_right_and_below():
    """As the encoder fills it up: the smaller image is the larger one's upper left."""
    small, large = spatial(3, 2, 9, 10), spatial(3, 2, 12, 12)
    large.load_state_dict(small.state_dict())
    readout = torch.randn(2, 3, length(3, 2, 12, 12))
    assert torch.equal(small(readout), large(readout)[..., :9, :10])


def test_pixels_follow_their_place_in_the_spatial_part():
    """A readout moved by one place is an image moved by four pixels, away from the edges."""
    net, maps = spatial(0, 1, 64, 52), torch.zeros(1, 1, 16, 13)
    maps[0, 0, 7, 5] = 3.0
    here, there = net(maps.flatten(2)), net(maps.roll((1, 2), dims=(-2, -1)).flatten(2))
    inner = there.roll((-4, -8), dims=(-2, -1))[..., 24:36, 16:28]
    torch.testing.assert_close(inner, here[..., 24:36, 16:28], rtol=0.02, atol=0.02)
    assert (here[..., 24:36, 16:28] - there[..., 24:36, 16:28]).abs().max() > 0.1
