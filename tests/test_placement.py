"""Where blocks lie: two placements, what naming a place costs, and reading it back."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kanerva.config import KppMemoryConfig
from kanerva.distributions import ConfinedNormal, DiagonalNormal, as_normal, as_uniform
from kanerva.errors import UserError
from kanerva.memory.placement import Placement, Transport, locality_loss, make_placement

ALL = pytest.mark.parametrize("placement", ["cells", "transport"])
CPU = torch.device("cpu")


def make(placement: str) -> Placement:
    """Two rows of four cells, 8 x 4 pixels each."""
    config = KppMemoryConfig(channels=2, size=16, capacity=8, placement=placement)
    made = make_placement(config, hidden=8, features=6, side=(2, 3))
    if isinstance(made, Transport):
        made.spread.data = torch.tensor([0.7, -0.4])  # not where it starts
        with torch.no_grad():
            for _ in range(50):
                made.propose(features(5, 4))
    return made.eval()


def features(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, 6, 2, 3)


def placed(made: Placement, batch: int, length: int) -> tuple[DiagonalNormal | None, Tensor]:
    """What the key network said, and the cells."""
    proposal = made.propose(features(batch, length))
    return proposal, made.place(proposal, batch, length, None, CPU)


def middles(cells: Tensor) -> Tensor:
    """By hand: the middle (x, y) of each of 2 x 4 cells."""
    return torch.stack([(2 * (cells % 4) + 1) / 4 - 1, (2 * (cells // 4) + 1) / 2 - 1], dim=-1)


def all_written(batch: int, length: int) -> Tensor:
    return torch.ones(batch, length, dtype=torch.bool)


# Where samples go


@ALL
def test_every_sample_has_a_cell_of_its_own(placement: str):
    made = make(placement)
    _, cells = placed(made, 20, 6)
    assert cells.shape == (20, 6) and cells.min() >= 0 and cells.max() < 8
    assert all(len(episode.unique()) == 6 for episode in cells)
    torch.testing.assert_close(made.grid.centres()[cells], middles(cells))


def test_cells_are_dealt_and_no_network_has_a_say():
    made = make("cells")
    assert made.propose(features(2, 3)) is None and not list(made.parameters())
    first, second = (placed(made, 50, 3)[1] for _ in range(2))
    assert not torch.equal(first, second)


def test_transport_keeps_the_order_of_the_key_means():
    """On a full grid: columns by x, so every key of a column lies left of the next one's."""
    proposal, places = placed(make("transport"), 6, 8)
    assert proposal is not None
    for mean, cells in zip(proposal.mean, places, strict=True):
        at = mean[cells.argsort()].view(2, 4, 2)  # row, column
        assert (at[:, :-1, 0].amax(0) < at[:, 1:, 0].amin(0)).all()  # columns from left to right
        assert (at[0, :, 1] < at[1, :, 1]).all()  # in each, the upper cell has the smaller y


def test_normalised_key_means_cannot_collapse():
    """While training they have mean 0 and variance 1, however alike its images are."""
    made = make("transport").train()
    assert isinstance(made, Transport)
    nearly = features(1, 1) + 0.3 * features(4, 10)
    mean = made.propose(nearly).mean.flatten(0, 1)
    torch.testing.assert_close(mean.mean(0), torch.zeros(2), atol=1e-4, rtol=0)
    raw = made.net(nearly.flatten(0, 1))[:, :2]
    var = raw.var(0, correction=0)
    expected = (raw - raw.mean(0)) / (var + 1e-5).sqrt()
    torch.testing.assert_close(mean, expected, rtol=1e-3, atol=1e-3)
    assert (var < 0.1).all() and (mean.var(0, correction=0) > 0.8).all()


def test_in_evaluation_a_key_is_its_own_samples_alone():
    made, maps = make("transport"), features(3, 4)
    whole, alone = made.propose(maps), made.propose(maps[1:2, 2:3])
    torch.testing.assert_close(whole.mean[1, 2], alone.mean[0, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole.log_std[1, 2], alone.log_std[0, 0], rtol=1e-5, atol=1e-5)
    assert (whole.mean.flatten(0, 1).std(0) > 0).all()


@ALL
def test_more_samples_than_there_is_room_for_is_an_error_that_names_the_capacity(placement: str):
    made = make(placement)
    placed(made, 1, 8)
    with pytest.raises(UserError, match="capacity is 8 .* hold 9") as error:
        placed(made, 1, 9)
    assert "\n" not in str(error.value)


# Free cells


@ALL
@pytest.mark.parametrize("taken", [0, 5, 7])
def test_a_free_cell_is_never_one_that_is_held(placement: str, taken: int):
    made = make(placement)
    held = torch.zeros(40, 8, dtype=torch.bool)
    for episode in held:
        episode[torch.randperm(8)[:taken]] = True
    cells = made.find_free(made.propose(features(40, 3)), held, 3, None)
    assert cells.shape == (40, 3)
    assert not held.gather(1, cells).any()


def test_transport_finds_the_nearest_free_cell():
    """By hand: among the middles of cells that are not held."""
    made, held = make("transport"), torch.rand(30, 8) < 0.6
    held[:, 3] = False
    proposal = made.propose(features(30, 2))
    assert proposal is not None
    cells = made.find_free(proposal, held, 2, None)
    points = as_uniform(proposal.mean).detach()
    for b in range(30):
        for t in range(2):
            near = {}
            for cell in range(8):
                if not held[b, cell]:
                    x, y = (2 * (cell % 4) + 1) / 4 - 1, (2 * (cell // 4) + 1) / 2 - 1
                    near[cell] = math.hypot(points[b, t, 0] - x, points[b, t, 1] - y)
            assert cells[b, t] == min(near, key=near.get)


def test_dealt_samples_find_any_free_cell():
    held = torch.tensor([True, False, True, True, False, True, False, True]).expand(9000, -1)
    cells = make("cells").find_free(None, held, 1, None)
    counts = torch.bincount(cells.flatten(), minlength=8)[[1, 4, 6]]
    assert counts.sum() == 9000 and (counts - 3000).abs().max() < 5 * (9000 * 2 / 9) ** 0.5


# What naming a place costs


@ALL
def test_a_key_posterior_lies_around_its_block(placement: str):
    made = make(placement)
    _, cells = placed(made, 3, 5)
    q = made.posterior(cells, all_written(3, 5), torch.full((3,), 3.0))
    torch.testing.assert_close(as_uniform(q.mean), middles(cells), rtol=0, atol=1e-5)


@pytest.mark.parametrize("written", [True, False])
def test_a_soft_cells_divergence_is_the_prior_mass_of_its_box(written: bool):
    """Counted: how often a key from N(0, 1) falls where q does. A written sample fills a learned
    share of its cell, sigmoid(0.7) by sigmoid(-0.4); one that is not written all of it."""
    made, draws = make("transport"), 200_000
    _, cells = placed(made, 2, 3)
    q = made.posterior(cells, torch.full((2, 3), written), torch.full((2,), 5.0))
    assert isinstance(q, ConfinedNormal)
    share = torch.tensor([0.7, -0.4]).sigmoid() if written else torch.ones(2)
    half, points = share * torch.tensor([1 / 4, 1 / 2]), middles(cells)
    keys = torch.randn(draws, 2)
    for b in range(2):
        for t in range(3):
            inside = ((as_uniform(keys) - points[b, t]).abs() <= half).all(1)
            mass = q.kl_to_prior()[b, t].neg().exp().item()
            assert abs(inside.double().mean() - mass) < 5 * (mass * (1 - mass) / draws) ** 0.5
    strayed = (as_uniform(q.sample()) - points).abs() - half
    assert strayed.max() < 1e-5
    torch.testing.assert_close(q.kl_to_prior(), -half.prod().log().expand(2, 3))


def test_the_spread_of_a_soft_cell_can_be_learned():
    """KL = -sum ln(sigmoid(s) * half cell): its gradient is sigmoid(s) - 1 for each sample, and
    keys carry it too."""
    made = make("transport")
    assert isinstance(made, Transport)
    cells = placed(made, 1, 3)[1]
    made.posterior(cells, all_written(1, 3), torch.ones(1)).kl_to_prior().sum().backward()
    expected = 3 * (torch.tensor([0.7, -0.4]).sigmoid() - 1)
    torch.testing.assert_close(made.spread.grad, expected)
    made.spread.grad = None
    made.posterior(cells, all_written(1, 3), torch.ones(1)).sample().sum().backward()
    assert made.spread.grad is not None and (made.spread.grad != 0).all()


def test_a_hard_key_costs_the_choice_of_its_cell_and_no_more():
    """Written: ln(cells), exactly. Not written: ln(cells / empty), for any empty cell does."""
    made = make("cells")
    _, cells = placed(made, 2, 4)
    written = torch.tensor([[True, True, True, False], [True, False, False, False]])
    empty = torch.tensor([5.0, 7.0])
    q = made.posterior(cells, written, empty)
    named, lost = math.log(8), [math.log(8 / 5), math.log(8 / 7)]
    rows = [[named, named, named, lost[0]], [named, lost[1], lost[1], lost[1]]]
    torch.testing.assert_close(q.kl_to_prior(), torch.tensor(rows), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(q.log_ratio(q.sample()), q.kl_to_prior())


@ALL
def test_where_no_cell_is_free_an_unwritten_sample_has_no_mass(placement: str):
    made = make(placement)
    _, cells = placed(made, 1, 2)
    q = made.posterior(cells, torch.tensor([[True, False]]), torch.zeros(1))
    assert q.kl_to_prior().isinf().tolist() == [[False, True]]


def test_a_hard_divergence_is_the_prior_mass_of_all_that_reads_the_same():
    """Counted: how often a key from N(0, 1) reads exactly what the sample reads."""
    made, draws = make("cells"), 100_000
    _, cells = placed(made, 1, 5)
    written = torch.tensor([[True, True, True, True, False]])
    blocks = torch.randn(1, 5, 2, 8, 4) * written[..., None, None, None]
    memory = made.grid.paste(blocks, cells)
    q = made.posterior(cells, written, torch.tensor([4.0]))
    anywhere = made.read(memory, torch.randn(1, draws, 2))[0]
    for t, mine in enumerate(made.read(memory, q.sample())[0]):
        same = (anywhere == mine).flatten(1).all(1).double().mean()
        mass = q.kl_to_prior()[0, t].neg().exp().item()
        assert abs(same - mass) < 5 * (mass * (1 - mass) / draws) ** 0.5


# Blocks in and out


@ALL
@pytest.mark.parametrize("length", [1, 6, 8])
def test_a_block_in_a_cell_is_read_back_at_its_own_key_mean(placement: str, length: int):
    """Whatever lies in the other cells. Hard: bit for bit; soft, at whole pixels: to rounding."""
    made = make(placement)
    _, cells = placed(made, 3, length)
    blocks = torch.randn(3, length, 2, 8, 4)
    q = made.posterior(cells, all_written(3, length), torch.full((3,), 2.0))
    traces = made.read(made.grid.paste(blocks, cells), q.mean)
    close = {"rtol": 0.0, "atol": 0.0} if placement == "cells" else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(traces, blocks, **close)


def test_every_key_in_a_cell_reads_the_same_trace():
    made = make("cells")
    _, cells = placed(made, 4, 8)
    blocks = torch.randn(4, 8, 2, 8, 4)
    memory = made.grid.paste(blocks, cells)
    q = made.posterior(cells, all_written(4, 8), torch.zeros(4))
    for _ in range(50):
        assert torch.equal(made.read(memory, q.sample()), blocks)


def test_a_soft_read_is_a_slice_of_the_memory_pixel_for_pixel():
    """At (0.25, 0) of 16 pixels a block of 8 x 4 covers rows 4-11 and columns 8-11."""
    made, memory = make("transport"), torch.randn(1, 2, 16, 16)
    at = torch.tensor([0.25, 0.0]).view(1, 1, 2)
    found = made.read(memory, as_normal(at))[0, 0]
    torch.testing.assert_close(found, memory[0, :, 4:12, 8:12], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("enabled", [False, True])
def test_between_cells_a_soft_read_is_torchs_own_interpolation(enabled: bool):
    """With gradients and without: two ways to the same window."""
    made, memory = make("transport"), torch.randn(3, 2, 16, 16)
    points = 1.6 * torch.rand(3, 5, 2) - 0.8
    with torch.set_grad_enabled(enabled):
        found = made.read(memory, as_normal(points))
    for b in range(3):
        for t in range(5):
            x, y = points[b, t].tolist()
            window = torch.tensor([[[1 / 4, 0.0, x], [0.0, 1 / 2, y]]])
            grid = F.affine_grid(window, [1, 2, 8, 4], align_corners=False)
            expected = F.grid_sample(memory[b : b + 1], grid, align_corners=False)[0]
            torch.testing.assert_close(found[b, t], expected, rtol=1e-4, atol=1e-4)


@ALL
def test_a_memory_is_the_sum_of_single_writes(placement: str):
    """Malloc adds one term: each sample's block, pasted alone, adds up to the whole."""
    made = make(placement)
    _, cells = placed(made, 2, 5)
    blocks = torch.randn(2, 5, 2, 8, 4)
    total = torch.zeros(2, 2, 16, 16)
    for t in range(5):
        total += made.grid.paste(blocks[:, t : t + 1], cells[:, t : t + 1])
    torch.testing.assert_close(made.grid.paste(blocks, cells), total)


@ALL
def test_reads_are_in_float32_whatever_the_precision(placement: str):
    made = make(placement)
    _, cells = placed(made, 1, 2)
    blocks = torch.randn(1, 2, 2, 8, 4)
    q = made.posterior(cells, all_written(1, 2), torch.ones(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        memory = made.grid.paste(blocks, cells)
        assert memory.dtype == made.read(memory, q.mean).dtype == torch.float32
    assert torch.equal(memory, made.grid.paste(blocks, cells))


# Like beside like


def slow_locality(keys: Tensor, episode: Tensor) -> float:
    """The t-SNE objective written out pair by pair, in float64."""
    images = [F.avg_pool2d(i.double(), 2).flatten() for i in episode.flatten(0, 1)]
    y, count = keys.flatten(0, 1).double(), keys.shape[0] * keys.shape[1]
    everyone = range(count)
    apart = [[(images[i] - images[j]).square().sum().item() for j in everyone] for i in everyone]
    p = [[0.0] * count for _ in everyone]
    for i in everyone:
        others = [j for j in everyone if j != i]
        near = sorted(apart[i][j] for j in others)[min(10, count - 1) - 1]
        weight = {j: math.exp(-2 * apart[i][j] / max(near, 1e-6)) for j in others}
        for j in others:
            p[i][j] += weight[j] / sum(weight.values()) / (2 * count)
            p[j][i] += weight[j] / sum(weight.values()) / (2 * count)
    pairs = [(i, j) for i in everyone for j in everyone if i != j]
    kernel = {(i, j): 1 / (1 + 4 * (y[i] - y[j]).square().sum().item()) for i, j in pairs}
    total = sum(kernel.values())
    return sum(p[i][j] * math.log(p[i][j] * total / kernel[i, j]) for i, j in pairs)


@pytest.mark.parametrize("batch, length", [(1, 3), (2, 4), (3, 7)])  # few and many neighbours
@pytest.mark.parametrize("image", [(1, 8, 8), (3, 7, 10)])
def test_the_locality_loss_is_tsne_pair_by_pair(
    batch: int, length: int, image: tuple[int, int, int]
):
    keys, episode = torch.randn(batch, length, 2), torch.rand(batch, length, *image)
    expected = torch.tensor(slow_locality(keys, episode))
    torch.testing.assert_close(locality_loss(keys, episode), expected, rtol=1e-4, atol=1e-5)


def two_kinds(count: int) -> tuple[Tensor, Tensor]:
    """Images dark or bright, with a little noise, and which are which."""
    bright = torch.arange(count) % 2
    pixels = 0.2 + 0.6 * bright.view(1, -1, 1, 1, 1) + 0.05 * torch.randn(1, count, 1, 8, 8)
    return pixels, bright


def test_the_locality_loss_is_lower_where_near_images_have_near_keys():
    episode, bright = two_kinds(24)
    sides = torch.stack([2.0 * bright - 1, torch.zeros(24)], dim=-1)
    together = (sides + 0.2 * torch.randn(24, 2))[None]
    anyhow = together[:, torch.randperm(24)]
    collapsed = 1e-3 * torch.randn(1, 24, 2)
    assert locality_loss(together, episode) < locality_loss(anyhow, episode) - 0.2
    assert locality_loss(together, episode) < locality_loss(collapsed, episode) - 0.2


def test_descending_the_locality_loss_brings_like_beside_like():
    episode, bright = two_kinds(16)
    keys = torch.randn(1, 16, 2, requires_grad=True)
    descent = torch.optim.Adam([keys], lr=0.1)
    for _ in range(60):
        descent.zero_grad()
        locality_loss(keys, episode).backward()
        descent.step()
    apart = torch.cdist(keys.detach()[0], keys.detach()[0]).fill_diagonal_(torch.inf)
    assert torch.equal(bright[apart.argmin(dim=1)], bright)


@pytest.mark.parametrize("length", [1, 2, 3, 12])
@pytest.mark.parametrize("kind", ["different", "same images", "same keys"])
def test_the_locality_loss_and_its_gradient_are_finite(length: int, kind: str):
    keys, episode = torch.randn(1, length, 2), torch.rand(1, length, 1, 8, 8)
    if kind == "same images":
        episode = episode[:, :1].expand(-1, length, -1, -1, -1)
    if kind == "same keys":
        keys = keys[:, :1].repeat(1, length, 1)
    keys.requires_grad_()
    loss = locality_loss(keys, episode)
    loss.backward()
    assert loss.isfinite() and keys.grad is not None and keys.grad.isfinite().all()
    if length < 3:
        assert loss == 0  # no neighbour to prefer over another
