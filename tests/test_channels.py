"""Channels: what is said of damaged pixels is what damage does to them."""

import pytest
import torch

from kanerva.errors import UserError
from kanerva.memory.channels import (
    Channel,
    Seen,
    possible_boxes,
    possible_channels,
    possible_masks,
    possible_shifts,
    wrapped,
)

DRAWS = 200_000
LOGITS = torch.tensor([-30.0, -2.0, 0.0, 3.0])
BINARY = Seen(torch.zeros(1, 2, 2, dtype=torch.long), torch.tensor([0.0, 1.0]), "binary")


def damage(pixels: torch.Tensor, channel: Channel) -> torch.Tensor:
    """Simulated, in the order in which the words come: salt & pepper, hidden, noise."""
    salted = torch.rand(pixels.shape) < channel.salt_pepper
    pixels = torch.where(salted, torch.rand(pixels.shape).round(), pixels)
    pixels = torch.where(torch.rand(pixels.shape) < channel.hidden, 0.0, pixels)
    return pixels + channel.gaussian * torch.randn(pixels.shape)


@pytest.mark.parametrize(
    "channel",
    [Channel(), Channel(0.3), Channel(0.0, 0.4), Channel(0.2, 0.6), Channel(0.0, 1.0)],
)
def test_binary_pixels_are_as_probable_as_they_are_frequent(channel: Channel):
    table = BINARY.log_table([channel], LOGITS)[0].exp()
    torch.testing.assert_close(table.sum(dim=0), torch.ones(4))
    clean = torch.bernoulli(LOGITS.sigmoid().expand(DRAWS, -1))
    torch.testing.assert_close(table[1], damage(clean, channel).mean(dim=0), atol=5e-3, rtol=0)


def test_a_sure_pixel_keeps_its_log_odds():
    """In logits of 30 the other value has probability e^-30: no difference of ones."""
    table = BINARY.log_table([Channel()], torch.tensor([-30.0, 30.0]))[0]
    torch.testing.assert_close(table, torch.tensor([[-9.4e-14, -30.0], [-30.0, -9.4e-14]]))


@pytest.mark.parametrize("kind", ["plain", "clipped", "folded"])
@pytest.mark.parametrize("channel", [Channel(gaussian=0.5), Channel(0.4, 0.2, 1.0)])
def test_noisy_pixels_are_as_probable_as_they_are_frequent(kind: str, channel: Channel):
    drawn = damage(torch.bernoulli(LOGITS.sigmoid().expand(DRAWS, -1)), channel)
    drawn = drawn.abs() if kind == "folded" else drawn
    low, high = (-8.0, 9.0) if kind == "plain" else (0.0, 1.0)
    drawn = drawn.clamp(low, high)
    edges = torch.linspace(low, high, 35)
    middle, width = (edges[1:] + edges[:-1]) / 2, edges[1] - edges[0]
    seen = Seen(torch.zeros(1, 1, 1, dtype=torch.long), middle, kind)  # pyright: ignore
    inside = seen.log_table([channel], LOGITS)[0].exp() * width
    for level in range(4):
        values = drawn[:, level]
        if kind != "plain":
            values = values[(values > 0) & (values < 1)]
        counts = torch.histc(values, 34, low, high) / DRAWS
        torch.testing.assert_close(inside[:, level], counts, atol=2e-2, rtol=0.05)
    if kind != "plain":
        ends = Seen(torch.zeros(1, 1, 1, dtype=torch.long), torch.tensor([0.0, 1.0]), kind)  # pyright: ignore
        table = ends.log_table([channel], LOGITS)[0].exp()
        torch.testing.assert_close(table[1], (drawn == 1).float().mean(0), atol=5e-3, rtol=0)
        if kind == "clipped":
            torch.testing.assert_close(table[0], (drawn == 0).float().mean(0), atol=5e-3, rtol=0)


def test_what_was_seen_is_recognised_by_its_values():
    everything = torch.ones(2, 2, dtype=torch.bool)

    def kind(*values: float) -> str:
        return Seen.of(torch.tensor(values, dtype=torch.float).view(1, 2, 2), everything).kind

    assert kind(0, 1, 1, 0) == "binary"
    assert kind(0, 0.4, 1, 0.9) == "clipped"
    assert kind(0.1, 0.4, 1, 0.9) == "folded"
    assert kind(-0.1, 0.4, 1, 0.9) == "plain"
    hidden = torch.tensor([[True, True], [False, True]])  # what is hidden may be anything
    assert Seen.of(torch.tensor([[[0.0, 1], [0.5, 0]]]), hidden).kind == "binary"


def test_values_of_a_noisy_cue_fall_into_the_bins_they_lie_in():
    cue = torch.randn(1, 20, 20)
    cue[0, 0, :2] = torch.tensor([0.0, 1.0])
    seen = Seen.of(cue, torch.ones(20, 20, dtype=torch.bool))
    width = (cue.max() - cue.min()) / 32
    assert bool(((seen.values[seen.codes] - cue).abs() <= width / 2 + 1e-5).all())
    assert seen.codes[0, 0, :2].tolist() == [0, 1]


def test_channels_are_those_that_fit_what_is_given():
    given, open = possible_channels(None, True, "binary"), possible_channels(None, False, "binary")
    assert {c.hidden for c in given} == {0.0} and len({c.hidden for c in open}) > 1
    assert {c.gaussian for c in given} == {0.0} and len({c.salt_pepper for c in given}) > 1
    assert possible_channels("none", True, "binary") == (Channel(),)
    assert all(c.gaussian > 0 for c in possible_channels("gaussian", True, "plain"))
    assert possible_channels(Channel(0.0, 0.5), False, "binary") == (Channel(0.0, 0.5),)
    assert not any(c.folded for c in possible_channels(None, True, "folded"))
    assert any(c.folded for c in possible_channels(None, True, "folded", residual=True))
    assert not any(c.folded for c in possible_channels(None, True, "clipped", residual=True))
    with pytest.raises(UserError, match="noise is none"):
        possible_channels("fog", True, "binary")  # pyright: ignore
    with pytest.raises(UserError, match="shares lie on"):
        Channel(salt_pepper=1.2)


def test_masks_are_blank_bands():
    cue = torch.zeros(1, 6, 6)
    cue[0, 1:3, 2] = 1  # rows 1 and 2, column 2
    boxes = possible_boxes(cue, torch.zeros(1))
    masks, chances = possible_masks(cue, None, boxes)
    assert float(chances.sum()) == pytest.approx(1)
    below = torch.arange(6)[:, None].expand(6, 6) <= 2
    box = torch.zeros(6, 6, dtype=torch.bool)
    box[1:3, 2] = True
    for expected in (torch.ones(6, 6, dtype=torch.bool), below, box):
        assert bool((masks == expected).all(dim=(1, 2)).any())
    assert torch.equal(possible_masks(cue, box, {})[0], box[None])
    nothing = possible_boxes(torch.zeros(1, 6, 6), torch.zeros(1))
    assert nothing == {(0, 6, 0, 6): 1.0}  # nothing says where


def test_shifts_go_every_way_and_wrap_what_leaves():
    shifts = possible_shifts(2)
    assert len(set(shifts)) == 25 and shifts[0] == (0, 0)
    with pytest.raises(UserError, match="shifts is a number"):
        possible_shifts(-1)
    edge = wrapped(torch.ones(4, 5, dtype=torch.bool), (1, -2))
    assert torch.equal(edge[0], torch.ones(5, dtype=torch.bool))
    assert torch.equal(edge[3], torch.tensor([0, 0, 0, 1, 1], dtype=torch.bool))


def test_a_window_is_less_likely_than_a_band_and_that_than_everything():
    """Every place of a side is as likely: the more sides are free, the less likely each place."""
    cue = torch.zeros(1, 28, 28)
    cue[0, 10:15, 9:20] = 1
    chances = possible_boxes(cue, torch.zeros(1))
    whole, band, window = (0, 28, 0, 28), (10, 28, 0, 28), (10, 15, 9, 20)
    assert chances[whole] > 20 * chances[band] > 1000 * chances[window] > 0
    assert sum(chances.values()) == pytest.approx(1) and list(chances)[-1] == window
