"""Where blocks lie: four placements, what naming a place costs, and reading it back."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kanerva.config import KeyConfig, MemoryConfig
from kanerva.distributions import ConfinedNormal, DiagonalNormal, as_normal, as_uniform
from kanerva.errors import UserError
from kanerva.memory.placement import Placer, Places, locality_loss

ALL = [("gaussian", "soft"), ("normalised", "soft")]
GRIDS = [("cells", "soft"), ("cells", "hard"), ("transport", "soft"), ("transport", "hard")]
ALL += GRIDS
FREE, HARD = [pair[0] for pair in ALL[:2]], ["cells", "transport"]
CPU = torch.device("cpu")


def placer(placement: str, read: str = "soft", **options: int) -> Placer:
    """Two rows of four cells, 8 x 4 pixels each; soft blocks of 4 x 4 fit inside a cell."""
    settings = {"channels": 2, "size": 16, "reads": 1, "block": 4, "capacity": 8, **options}
    memory = MemoryConfig(**settings, placement=placement, read=read)
    made = Placer(memory, KeyConfig(hidden=8), features=6, side=(2, 3))
    if hasattr(made, "spread"):
        made.spread.data = torch.tensor([0.7, -0.4])  # not where it starts
    if hasattr(made, "norm"):
        with torch.no_grad():
            for _ in range(50):
                made.propose(features(5, 4))
    return made.eval()


def features(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, 6, 2, 3)


def placed(made: Placer, batch: int, length: int) -> tuple[DiagonalNormal | None, Places]:
    proposal = made.propose(features(batch, length))
    return proposal, made.place(proposal, batch, length, CPU)


def all_written(batch: int, length: int) -> Tensor:
    return torch.ones(batch, length, dtype=torch.bool)


# Where samples go


def test_only_gridded_placements_read_hard():
    for placement in FREE:
        with pytest.raises(UserError, match=f"placement={placement}"):
            placer(placement, "hard")


@pytest.mark.parametrize("placement", FREE)
def test_without_a_grid_a_block_lies_at_its_key_mean(placement: str):
    proposal, places = placed(placer(placement), 2, 5)
    assert proposal is not None and places.cells is None
    expected = 2 * torch.distributions.Normal(0.0, 1.0).cdf(proposal.mean) - 1
    torch.testing.assert_close(places.points, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("placement, read", GRIDS)
def test_on_a_grid_every_sample_has_a_cell_of_its_own_and_lies_in_its_middle(
    placement: str, read: str
):
    made = placer(placement, read)
    _, places = placed(made, 20, 6)
    assert places.cells is not None and made.grid is not None
    assert all(len(episode.unique()) == 6 for episode in places.cells)
    rows, columns = places.cells // 4, places.cells % 4
    middles = torch.stack([(2 * columns + 1) / 4 - 1, (2 * rows + 1) / 2 - 1], dim=-1)
    torch.testing.assert_close(places.points, middles)


def test_cells_are_dealt_and_no_network_has_a_say():
    made = placer("cells", "hard")
    assert made.propose(features(2, 3)) is None and not list(made.parameters())
    first, second = (placed(made, 50, 3)[1].cells for _ in range(2))
    assert first is not None and second is not None and not torch.equal(first, second)


def test_transport_keeps_the_order_of_the_key_means():
    """On a full grid: columns by x, so every key of a column lies left of the next one's."""
    proposal, places = placed(placer("transport", "hard"), 6, 8)
    assert proposal is not None and places.cells is not None
    for mean, cells in zip(proposal.mean, places.cells, strict=True):
        at = mean[cells.argsort()].view(2, 4, 2)  # row, column
        assert (at[:, :-1, 0].amax(0) < at[:, 1:, 0].amin(0)).all()  # columns from left to right
        assert (at[0, :, 1] < at[1, :, 1]).all()  # in each, the upper cell has the smaller y


@pytest.mark.parametrize("placement", ["normalised", "transport"])
def test_normalised_key_means_cannot_collapse(placement: str):
    """While training they have mean 0 and variance 1, however alike its images are."""
    made, plain = placer(placement).train(), placer("gaussian")
    plain.net.load_state_dict(made.net.state_dict())
    nearly = features(1, 1) + 0.3 * features(4, 10)
    mean = made.propose(nearly).mean.flatten(0, 1)
    torch.testing.assert_close(mean.mean(0), torch.zeros(2), atol=1e-4, rtol=0)
    raw = plain.propose(nearly).mean.flatten(0, 1)
    var = raw.var(0, correction=0)
    expected = (raw - raw.mean(0)) / (var + 1e-5).sqrt()
    torch.testing.assert_close(mean, expected, rtol=1e-3, atol=1e-3)
    assert (var < 0.1).all() and (mean.var(0, correction=0) > 0.8).all()


@pytest.mark.parametrize("placement", ["gaussian", "normalised", "transport"])
def test_in_evaluation_a_key_is_its_own_samples_alone(placement: str):
    made, maps = placer(placement), features(3, 4)
    whole, alone = made.propose(maps), made.propose(maps[1:2, 2:3])
    torch.testing.assert_close(whole.mean[1, 2], alone.mean[0, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole.log_std[1, 2], alone.log_std[0, 0], rtol=1e-5, atol=1e-5)
    assert (whole.mean.flatten(0, 1).std(0) > 0).all()


@pytest.mark.parametrize("placement, read", ALL)
def test_more_samples_than_there_is_room_for_is_an_error_that_names_the_capacity(
    placement: str, read: str
):
    made = placer(placement, read)
    placed(made, 1, 8)
    with pytest.raises(UserError, match="capacity is 8 .* hold 9") as error:
        placed(made, 1, 9)
    assert "\n" not in str(error.value)


# Free cells


@pytest.mark.parametrize("placement, read", GRIDS)
@pytest.mark.parametrize("taken", [0, 5, 7])
def test_a_vacant_cell_is_never_one_that_is_held(placement: str, read: str, taken: int):
    made = placer(placement, read)
    held = torch.zeros(40, 8, dtype=torch.bool)
    for episode in held:
        episode[torch.randperm(8)[:taken]] = True
    places = made.vacant(made.propose(features(40, 3)), held, 3)
    assert places.cells is not None and places.cells.shape == (40, 3)
    assert not held.gather(1, places.cells).any()


@pytest.mark.parametrize("read", ["soft", "hard"])
def test_transport_finds_the_nearest_free_cell(read: str):
    """By hand: among the middles of cells that are not held."""
    made, held = placer("transport", read), torch.rand(30, 8) < 0.6
    held[:, 3] = False
    proposal = made.propose(features(30, 2))
    places = made.vacant(proposal, held, 2)
    assert places.cells is not None
    points = as_uniform(proposal.mean).detach()
    for b in range(30):
        for t in range(2):
            near = {}
            for cell in range(8):
                if not held[b, cell]:
                    x, y = (2 * (cell % 4) + 1) / 4 - 1, (2 * (cell // 4) + 1) / 2 - 1
                    near[cell] = math.hypot(points[b, t, 0] - x, points[b, t, 1] - y)
            assert places.cells[b, t] == min(near, key=near.get)


def test_dealt_samples_find_any_free_cell():
    held = torch.tensor([True, False, True, True, False, True, False, True]).expand(9000, -1)
    places = placer("cells", "hard").vacant(None, held, 1)
    assert places.cells is not None
    counts = torch.bincount(places.cells.flatten(), minlength=8)[[1, 4, 6]]
    assert counts.sum() == 9000 and (counts - 3000).abs().max() < 5 * (9000 * 2 / 9) ** 0.5


@pytest.mark.parametrize("placement", FREE)
def test_without_a_grid_a_vacant_place_is_the_key_mean(placement: str):
    made = placer(placement)
    proposal = made.propose(features(2, 3))
    places = made.vacant(proposal, torch.ones(2, 8, dtype=torch.bool), 3)
    assert places.cells is None and torch.equal(places.points, as_uniform(proposal.mean))


# What naming a place costs


@pytest.mark.parametrize("placement, read", ALL)
def test_a_key_posterior_lies_around_its_block(placement: str, read: str):
    made = placer(placement, read)
    proposal, places = placed(made, 3, 5)
    q = made.posterior(places, proposal, all_written(3, 5), torch.full((3,), 3.0))
    torch.testing.assert_close(as_uniform(q.mean), places.points, rtol=0, atol=1e-5)


@pytest.mark.parametrize("placement", FREE)
def test_a_free_keys_divergence_is_the_expected_log_ratio(placement: str):
    """Monte Carlo against N(0, 1), with the width that the network said."""
    made, draws = placer(placement), 20_000
    proposal, places = placed(made, 1, 1)
    assert proposal is not None
    one = made.posterior(places, proposal, all_written(1, 1), torch.ones(1))
    assert isinstance(one, DiagonalNormal) and torch.equal(one.log_std, proposal.log_std)
    many = DiagonalNormal(*(x.expand(1, draws, 2) for x in (one.mean, one.log_std)))
    y, prior = many.sample(), torch.distributions.Normal(0.0, 1.0)
    there = torch.distributions.Normal(one.mean, proposal.std)
    ratio = (there.log_prob(y) - prior.log_prob(y)).sum(-1)
    error = ratio.std() / draws**0.5
    assert abs(ratio.mean() - one.kl_to_prior()) < 5 * error
    torch.testing.assert_close(many.log_ratio(y), ratio, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("placement", HARD)
@pytest.mark.parametrize("written", [True, False])
def test_a_soft_cells_divergence_is_the_prior_mass_of_its_box(placement: str, written: bool):
    """Counted: how often a key from N(0, 1) falls where q does. A written sample fills a learned
    share of its cell, sigmoid(0.7) by sigmoid(-0.4); one that is not written all of it."""
    made, draws = placer(placement), 200_000
    proposal, places = placed(made, 2, 3)
    wrote = torch.full((2, 3), written)
    q = made.posterior(places, proposal, wrote, torch.full((2,), 5.0))
    assert isinstance(q, ConfinedNormal)
    share = torch.tensor([0.7, -0.4]).sigmoid() if written else torch.ones(2)
    half = share * torch.tensor([1 / 4, 1 / 2])
    keys = torch.randn(draws, 2)
    for b in range(2):
        for t in range(3):
            inside = ((as_uniform(keys) - places.points[b, t]).abs() <= half).all(1)
            mass = q.kl_to_prior()[b, t].neg().exp().item()
            assert abs(inside.double().mean() - mass) < 5 * (mass * (1 - mass) / draws) ** 0.5
    strayed = (as_uniform(q.sample()) - places.points).abs() - half
    assert strayed.max() < 1e-5
    torch.testing.assert_close(q.kl_to_prior(), -half.prod().log().expand(2, 3))


def test_the_spread_of_a_soft_cell_can_be_learned():
    """KL = -sum ln(sigmoid(s) * half cell): its gradient is sigmoid(s) - 1 for each sample, and
    keys carry it too."""
    made = placer("cells")
    q = made.posterior(placed(made, 1, 3)[1], None, all_written(1, 3), torch.ones(1))
    q.kl_to_prior().sum().backward()
    expected = 3 * (torch.tensor([0.7, -0.4]).sigmoid() - 1)
    torch.testing.assert_close(made.spread.grad, expected)
    made.spread.grad = None
    made.posterior(
        placed(made, 1, 3)[1], None, all_written(1, 3), torch.ones(1)
    ).sample().sum().backward()
    assert made.spread.grad is not None and (made.spread.grad != 0).all()


@pytest.mark.parametrize("placement", HARD)
def test_a_hard_key_costs_the_choice_of_its_cell_and_no_more(placement: str):
    """Written: ln(cells), exactly. Not written: ln(cells / empty), for any empty cell does."""
    made = placer(placement, "hard")
    proposal, places = placed(made, 2, 4)
    written = torch.tensor([[True, True, True, False], [True, False, False, False]])
    empty = torch.tensor([5.0, 7.0])
    q = made.posterior(places, proposal, written, empty)
    named, lost = math.log(8), [math.log(8 / 5), math.log(8 / 7)]
    rows = [[named, named, named, lost[0]], [named, lost[1], lost[1], lost[1]]]
    torch.testing.assert_close(q.kl_to_prior(), torch.tensor(rows), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(q.log_ratio(q.sample()), q.kl_to_prior())


def test_a_hard_divergence_is_the_prior_mass_of_all_that_reads_the_same():
    """Counted: how often a key from N(0, 1) reads exactly what the sample reads."""
    made, draws = placer("transport", "hard"), 100_000
    proposal, places = placed(made, 1, 5)
    written = torch.tensor([[True, True, True, True, False]])
    blocks = torch.randn(1, 5, 2, 8, 4) * written[..., None, None, None]
    memory, q = (
        made.paste(blocks, places),
        made.posterior(places, proposal, written, torch.tensor([4.0])),
    )
    anywhere = made.read(memory, torch.randn(1, draws, 2))[0]
    for t, mine in enumerate(made.read(memory, q.sample())[0]):
        same = (anywhere == mine).flatten(1).all(1).double().mean()
        mass = q.kl_to_prior()[0, t].neg().exp().item()
        assert abs(same - mass) < 5 * (mass * (1 - mass) / draws) ** 0.5


# Blocks in and out


@pytest.mark.parametrize("placement, read", GRIDS)
@pytest.mark.parametrize("length", [1, 6, 8])
def test_a_block_in_a_cell_is_read_back_at_its_own_key_mean(placement: str, read: str, length: int):
    """Whatever lies in the other cells. Hard: bit for bit; soft, at whole pixels: to rounding."""
    made = placer(placement, read)
    proposal, places = placed(made, 3, length)
    blocks = torch.randn(3, length, 2, *made.block)
    q = made.posterior(places, proposal, all_written(3, length), torch.full((3,), 2.0))
    traces = made.read(made.paste(blocks, places), q.mean)
    close = {"rtol": 0.0, "atol": 0.0} if read == "hard" else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(traces, blocks, **close)


@pytest.mark.parametrize("placement", FREE)
def test_a_block_between_pixels_is_read_back_at_its_own_key_mean(placement: str):
    """Bilinear both ways: a slope keeps its values but at the block's edge."""
    made = placer(placement)
    proposal, places = placed(made, 30, 1)
    places = Places(places.points.clamp(-0.7, 0.7), None)  # all of it on the map
    ramp = torch.arange(4) / 3 - 0.5
    blocks = ramp[:, None] * torch.randn(30, 1, 2, 1, 1) + ramp * torch.randn(30, 1, 2, 1, 1)
    q = made.posterior(places, proposal, all_written(30, 1), torch.ones(30))
    traces = made.read(made.paste(blocks, places), q.mean)
    inner = blocks[..., 1:3, 1:3]
    torch.testing.assert_close(traces[..., 1:3, 1:3], inner, rtol=0, atol=1e-4)


@pytest.mark.parametrize("placement", HARD)
def test_every_key_in_a_cell_reads_the_same_trace(placement: str):
    made = placer(placement, "hard")
    proposal, places = placed(made, 4, 8)
    blocks = torch.randn(4, 8, 2, 8, 4)
    memory = made.paste(blocks, places)
    q = made.posterior(places, proposal, all_written(4, 8), torch.zeros(4))
    for _ in range(50):
        assert torch.equal(made.read(memory, q.sample()), blocks)


def test_hard_blocks_fill_whole_cells_and_soft_ones_keep_their_own_size():
    assert placer("cells", "hard").block == (8, 4)
    assert placer("cells", "soft").block == placer("gaussian").block == (4, 4)


@pytest.mark.parametrize("placement", ["gaussian", "cells"])
def test_a_soft_block_is_a_slice_of_the_memory_pixel_for_pixel(placement: str):
    """At (0.25, -0.5) of 16 pixels a block of 4 covers rows 2-5 and columns 8-11."""
    made, block = placer(placement), torch.randn(1, 1, 2, 4, 4)
    at = torch.tensor([0.25, -0.5]).view(1, 1, 2)
    memory = made.paste(block, Places(at, torch.tensor([[2]])))
    expected = torch.zeros(1, 2, 16, 16)
    expected[..., 2:6, 8:12] = block[0]
    torch.testing.assert_close(memory, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(made.read(memory, as_normal(at)), block, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("placement, read", ALL)
def test_a_memory_is_the_sum_of_single_writes(placement: str, read: str):
    """Malloc adds one term: each sample's block, pasted alone, adds up to the whole."""
    made = placer(placement, read)
    _, places = placed(made, 2, 5)
    blocks = torch.randn(2, 5, 2, *made.block)
    total = torch.zeros(2, 2, 16, 16)
    for t in range(5):
        cells = None if places.cells is None else places.cells[:, t : t + 1]
        total += made.paste(blocks[:, t : t + 1], Places(places.points[:, t : t + 1], cells))
    torch.testing.assert_close(made.paste(blocks, places), total)


@pytest.mark.parametrize("placement, read", ALL)
def test_blocks_of_lower_precision_are_kept_in_float32(placement: str, read: str):
    made = placer(placement, read)
    proposal, places = placed(made, 1, 2)
    blocks = torch.randn(1, 2, 2, *made.block).bfloat16()
    q = made.posterior(places, proposal, all_written(1, 2), torch.ones(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        memory = made.paste(blocks, places)
        assert memory.dtype == made.read(memory, q.mean).dtype == torch.float32
    assert torch.equal(memory, made.paste(blocks, places))


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
