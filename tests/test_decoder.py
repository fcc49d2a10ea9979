"""The decoder: a readout to likelihood parameters, one image at a time."""

import pytest
import torch
from torch import nn

from kanerva.config import DecoderConfig
from kanerva.decoder import Decoder
from kanerva.layers.evonorm import EvoNormS0


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
