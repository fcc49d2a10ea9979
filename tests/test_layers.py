"""Layers against the formulas and loops they stand for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from kanerva.layers.dense import deep_linear
from kanerva.layers.evonorm import EvoNormS0
from kanerva.layers.residual import ResidualBlock, residual_stack, zeroed
from kanerva.layers.resnet import BasicBlock, Conv3x3, ResNet
from kanerva.layers.temporal_shift import temporal_shift

# EvoNorm-S0


@pytest.mark.parametrize("channels, groups", [(16, 8), (12, 4), (5, 1)])  # the groups that fit
def test_evonorm_is_its_formula(channels: int, groups: int):
    norm = EvoNormS0(channels)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(3, channels, 4, 5)
    expected = torch.empty_like(x)
    for sample in range(3):
        for group in torch.arange(channels).chunk(groups):
            members = x[sample, group]
            std = ((members - members.mean()).square().mean() + 1e-5).sqrt()
            for c in group.tolist():
                gate = torch.sigmoid(norm.v[c] * x[sample, c])
                expected[sample, c] = x[sample, c] * gate / std * norm.gamma[c] + norm.beta[c]
    torch.testing.assert_close(norm(x), expected, rtol=1e-5, atol=1e-5)


def test_evonorm_looks_at_one_sample_only():
    """A prior or decoder built on it must not see the other images (condition 1)."""
    norm, x = EvoNormS0(8), torch.randn(4, 8, 3, 3)
    changed = x.clone()
    changed[1:] = 100 * torch.randn(3, 8, 3, 3)
    for mode in (norm.train(), norm.eval()):
        assert torch.equal(mode(x)[0], mode(changed)[0])


def test_evonorm_carries_no_state():
    assert not list(EvoNormS0(8).buffers())


def test_evonorm_survives_a_constant_map():
    x = torch.full((1, 8, 1, 1), 2.0, requires_grad=True)
    EvoNormS0(8)(x).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


# Temporal shift


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("fraction, moved", [(0.125, 1), (0.25, 2), (0.5, 4), (0.2, 1)])
def test_shift_is_the_loop_it_stands_for(length: int, fraction: float, moved: int):
    maps = torch.randn(3 * length, 8, 2, 3)
    shifted = temporal_shift(maps, length, fraction)
    for episode in range(3):
        for t in range(length):
            for c in range(8):
                source = t - 1 if c < moved else t + 1 if c < 2 * moved else t
                inside = 0 <= source < length
                expected = maps[episode * length + source, c] if inside else torch.zeros(2, 3)
                assert torch.equal(shifted[episode * length + t, c], expected)


def test_no_shift_leaves_everything_where_it_was():
    maps = torch.randn(6, 8, 2, 3)
    assert torch.equal(temporal_shift(maps, 3, 0.0), maps)
    assert torch.equal(temporal_shift(maps, 3, 0.1), maps)  # less than one channel


def test_an_episode_of_one_loses_the_shifted_channels():
    maps = torch.randn(4, 8, 2, 3)
    shifted = temporal_shift(maps, 1, 0.25)
    assert (shifted[:, :4] == 0).all()
    assert torch.equal(shifted[:, 4:], maps[:, 4:])


# ResNet


def test_resnet_has_as_many_parameters_as_torchvisions_without_its_classifier():
    net = ResNet(channels=3, width=64, blocks=(2, 2, 2, 2), shift=0.125)
    assert sum(p.numel() for p in net.parameters()) == 11_689_512 - (512 * 1000 + 1000)
    assert net.features == 512


@pytest.mark.parametrize("side, stride", [(1, 1), (1, 2), (2, 2), (5, 1)])
def test_a_convolution_of_one_pixel_is_a_product_with_its_middle(side: int, stride: int):
    """The same maps and gradients as PyTorch's convolution, at every side."""
    conv = Conv3x3(6, 4, stride).double()
    plain = nn.Conv2d(6, 4, 3, stride, padding=1, bias=False).double()
    plain.load_state_dict(conv.state_dict())
    x = torch.randn(3, 6, side, side, dtype=torch.float64, requires_grad=True)
    ours, theirs = conv(x), plain(x)
    torch.testing.assert_close(ours, theirs)
    cotangent = torch.randn_like(ours)
    mine = torch.autograd.grad(ours, [x, conv.weight], cotangent)
    torch.testing.assert_close(mine, torch.autograd.grad(theirs, [x, plain.weight], cotangent))


def test_resnet_halves_the_side_five_times():
    """Stem, pool and three stages: the receptive geometry of He et al., seen at 64x64."""
    net = ResNet(channels=1, width=8, blocks=(1, 1, 1, 1), shift=0.0).eval()
    sides: list[int] = []
    for block in net.blocks:
        block.register_forward_hook(lambda _m, _i, out: sides.append(out.shape[-1]))
    net(torch.rand(1, 1, 64, 64), length=1)
    assert sides == [16, 8, 4, 2]


def test_the_shift_feeds_the_residual_branch_and_leaves_the_skip():
    """With the branch switched off a block passes its input, moved by nothing (Lin et al. 2019)."""
    block = BasicBlock(8, 8, stride=1, shift=0.25).eval()
    nn.init.zeros_(block.norm2.weight)
    x = torch.rand(6, 8, 4, 4)
    torch.testing.assert_close(block(x, 3), x)


# Deep linear nets


def test_deep_linear_is_one_affine_map():
    net = deep_linear(6, 10, 4, layers=3).eval()
    for layer in net:
        nn.init.normal_(layer.bias)
    a, b = torch.randn(5, 6), torch.randn(5, 6)
    torch.testing.assert_close(net(0.3 * a + 0.7 * b), 0.3 * net(a) + 0.7 * net(b))
    torch.testing.assert_close(net(-4 * a), 5 * net(torch.zeros_like(a)) - 4 * net(a))


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_deep_linear_has_the_layers_and_sizes_it_is_told(layers: int):
    net = deep_linear(6, 10, 4, layers)
    sizes = [(layer.in_features, layer.out_features) for layer in net]
    assert sizes == {1: [(6, 4)], 2: [(6, 10), (10, 4)], 3: [(6, 10), (10, 10), (10, 4)]}[layers]


def test_every_deep_linear_layer_has_spectral_norm_one_once_the_power_method_has_converged():
    net = deep_linear(6, 10, 4, layers=3).train()
    with torch.no_grad():
        for layer in net:
            layer.parametrizations.weight.original.mul_(7)  # whatever the optimiser makes of it
        for _ in range(500):
            net(torch.randn(2, 6))
        for layer in net.eval():
            assert parametrize.is_parametrized(layer, "weight")
            norm = torch.linalg.matrix_norm(layer.weight, 2)
            torch.testing.assert_close(norm, torch.tensor(1.0), rtol=1e-3, atol=0)


def test_deep_linear_without_spectral_norm_is_as_large_as_its_weights():
    net = deep_linear(6, 10, 4, layers=2, spectral=False)
    with torch.no_grad():
        for layer in net:
            layer.weight.mul_(7)
            layer.bias.zero_()
    x = torch.randn(2, 6)
    torch.testing.assert_close(net(x), x @ net[0].weight.T @ net[1].weight.T)
    assert not any(parametrize.is_parametrized(layer) for layer in net)


def test_deep_linear_is_one_function_in_evaluation():
    """The power method stands still, so a saved model scores the same twice."""
    net, x = deep_linear(6, 10, 4, layers=3).eval(), torch.randn(2, 6)
    assert torch.equal(net(x), net(x))


# Residual blocks


def awake_stack(width: int, blocks: int) -> nn.Sequential:
    net = residual_stack(width, blocks)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3)
    return net


def test_a_fresh_residual_block_passes_its_input_and_can_learn():
    """The last convolution starts at zero: the identity, with a gradient to leave it by."""
    net, x = residual_stack(8, 3), torch.randn(2, 8, 5, 4)
    assert torch.equal(net(x), x)
    net(x).square().sum().backward()
    for block in net:
        last = [layer for layer in block.body if isinstance(layer, nn.Conv2d)][-1]
        assert last.weight.grad is not None and last.weight.grad.abs().max() > 0


@pytest.mark.parametrize("width, groups", [(16, 8), (12, 4), (5, 1)])  # the groups that fit
def test_a_residual_block_is_its_formula(width: int, groups: int):
    """x + conv(silu(norm(conv(silu(norm(x)))))), statistics written out."""
    block = ResidualBlock(width)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    norm1, conv1, norm2, conv2 = block.body
    x = torch.randn(3, width, 4, 5)

    def normed(maps: torch.Tensor, norm: nn.GroupNorm) -> torch.Tensor:
        grouped = maps.reshape(3, groups, -1)
        mean = grouped.mean(-1, keepdim=True)
        var = (grouped - mean).square().mean(-1, keepdim=True)
        flat = ((grouped - mean) / (var + 1e-5).sqrt()).view_as(maps)
        return flat * norm.weight.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)

    inner = F.conv2d(F.silu(normed(x, norm1)), conv1.weight, conv1.bias, padding=1)
    outer = F.conv2d(F.silu(normed(inner, norm2)), conv2.weight, conv2.bias, padding=1)
    torch.testing.assert_close(block(x), x + outer, rtol=1e-4, atol=1e-4)


def test_residual_blocks_look_at_one_sample_only():
    """A block in memory, a prior or a decoder built on them must not see the other images."""
    net, x = awake_stack(8, 2), torch.randn(4, 8, 3, 3)
    changed = x.clone()
    changed[1:] = 100 * torch.randn(3, 8, 3, 3)
    for mode in (net.train(), net.eval()):
        torch.testing.assert_close(mode(x)[0], mode(changed)[0], rtol=1e-5, atol=1e-5)
    assert not list(net.buffers())


def test_a_stack_is_its_blocks_in_a_row():
    net, x = awake_stack(8, 3), torch.randn(2, 8, 3, 3)
    assert len(net) == 3 and len({id(block) for block in net}) == 3
    torch.testing.assert_close(net(x), net[2](net[1](net[0](x))))


@pytest.mark.parametrize(
    "layer", [nn.Linear(3, 4), nn.Conv2d(2, 3, 3), nn.Linear(3, 4, bias=False)]
)
def test_a_zeroed_layer_says_nothing_and_is_the_layer_it_was(layer: nn.Linear | nn.Conv2d):
    assert zeroed(layer) is layer
    assert all((parameter == 0).all() for parameter in layer.parameters())
    assert all(parameter.requires_grad for parameter in layer.parameters())
