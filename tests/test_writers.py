"""Writers: an affine map of the pooled embedding, or a block from each sample alone (`kpp`)."""

import pytest
import torch
from torch import nn

from kanerva.config import PaperMemoryConfig
from kanerva.memory.writers import BlockWriter, PooledWriter

FLOAT64 = {"rtol": 1e-9, "atol": 1e-12}


def writer(**options: int) -> PooledWriter:
    settings = {"size": 16, "block": 2, "base": 16, **options}
    return PooledWriter(PaperMemoryConfig(**settings), embedding=6).double().eval()


@pytest.mark.parametrize("size", [2, 4, 5, 8, 24, 40, 64])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_memory_has_the_size_it_is_told_and_every_cell_can_be_written(size: int, channels: int):
    net = writer(size=size, channels=channels)
    maps = net(torch.randn(2, 3, 6, dtype=torch.float64))
    assert maps.shape == (2, channels, size, size)
    spread = net(torch.randn(20, 1, 6, dtype=torch.float64)).std(0)
    assert (spread > 0).all()  # no cell stays at a constant


def test_the_order_of_samples_does_not_matter():
    """§3.1: an episode is exchangeable. (What the temporal shift mixes in is the encoder's.)"""
    net, embedding = writer(), torch.randn(2, 7, 6, dtype=torch.float64)
    shuffled = embedding[:, torch.randperm(7)]
    torch.testing.assert_close(net(embedding), net(shuffled), **FLOAT64)


def test_the_pool_is_a_mean():
    net, embedding = writer(), torch.randn(2, 1, 6, dtype=torch.float64)
    torch.testing.assert_close(net(embedding), net(embedding.expand(2, 9, 6)), **FLOAT64)


@pytest.mark.parametrize("size", [4, 16, 40])
def test_writing_is_affine_in_the_embedding(size: int):
    """App. E: a deep linear conv-transpose decoder; nothing bends between the layers."""
    net = writer(size=size)
    a, b = torch.randn(2, 1, 3, 6, dtype=torch.float64).unbind(0)
    blend = net(1.7 * a - 0.7 * b)
    torch.testing.assert_close(blend, 1.7 * net(a) - 0.7 * net(b), **FLOAT64)


def test_feature_maps_halve_per_layer_from_256():
    """App. E: a base projection of 256, divided by 2 per layer, to a 3 x 64 x 64 memory."""
    net = PooledWriter(PaperMemoryConfig(), embedding=512)
    layers = [m for m in net.modules() if isinstance(m, nn.ConvTranspose2d)]
    assert [layer.in_channels for layer in layers] == [256, 128, 64, 32]
    assert layers[-1].out_channels == 3
    assert net.project.out_features == 256 * 4 * 4


def test_episodes_are_written_apart():
    net, embedding = writer(), torch.randn(3, 4, 6, dtype=torch.float64)
    torch.testing.assert_close(net(embedding)[1:2], net(embedding[1:2]), **FLOAT64)


def test_a_base_that_cannot_be_halved_again_stays_at_one():
    assert writer(size=32, base=2)(torch.zeros(1, 1, 6, dtype=torch.float64)).isfinite().all()


# kpp: each sample its own block


def block_writer(channels: int = 2, block: tuple[int, int] = (4, 3)) -> BlockWriter:
    return BlockWriter((channels, *block), features=6, side=(2, 3)).double()


def features(batch: int, length: int) -> torch.Tensor:
    return torch.randn(batch, length, 6, 2, 3, dtype=torch.float64)


@pytest.mark.parametrize("channels, block", [(1, (4, 4)), (3, (2, 5)), (2, (1, 1))])
def test_a_block_has_the_shape_it_is_told_and_every_number_of_it_varies(
    channels: int, block: tuple[int, int]
):
    net = block_writer(channels, block)
    blocks = net(features(4, 5))
    assert net.shape == (channels, *block) and blocks.shape == (4, 5, channels, *block)
    assert (blocks.flatten(0, 1).std(0) > 0).all()


@pytest.mark.parametrize("size", [1.0, 1e3])
def test_blocks_stay_within_one(size: float):
    blocks = block_writer()(size * features(4, 5))
    assert (blocks.abs() <= 1).all() and blocks.min() < -0.1 and blocks.max() > 0.1


@pytest.mark.parametrize("training", [True, False])
def test_a_block_is_made_from_its_own_sample_alone(training: bool):
    net, maps = block_writer().train(training), features(3, 4)
    torch.testing.assert_close(net(maps)[1, 2], net(maps[1:2, 2:3])[0, 0], **FLOAT64)
    torch.testing.assert_close(net(maps.flip(0, 1)).flip(0, 1), net(maps), **FLOAT64)
    assert not list(net.buffers())


def test_a_block_is_an_affine_map_of_its_sample_before_it_is_squashed():
    net, a, b = block_writer(), features(1, 3), features(1, 3)
    expected = 1.7 * net(a).atanh() - 0.7 * net(b).atanh()
    torch.testing.assert_close(net(1.7 * a - 0.7 * b).atanh(), expected, rtol=1e-6, atol=1e-9)
