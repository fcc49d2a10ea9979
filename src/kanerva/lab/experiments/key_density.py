"""The density over keys given a memory and a cue: as a target of chains, and exactly on a grid."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kanerva.distributions import as_normal
from kanerva.evaluation.noise import observed
from kanerva.lab.experiments.mcmc import Points
from kanerva.lab.harness import Pixels
from kanerva.models.kpp import Kpp
from kanerva.shapes import DecoderOutput


@dataclass(frozen=True)
class Target:
    """ln pi, up to a constant, for chains that have a cue each."""

    model: Kpp
    maps: Tensor
    cues: Pixels  # one for each chain
    power: float

    def outputs(self, keys: Points) -> DecoderOutput:
        reading = self.model.readout(self.model.traces(self.maps, keys[None]), sample=False)
        return self.model.decoder(reading.readout)

    def pictures(self, keys: Points) -> Pixels:
        with torch.no_grad():
            return self.model.likelihood.mean(self.outputs(keys))[0]

    def __call__(self, keys: Points) -> Float[Tensor, " chains"]:
        prior = -keys.square().sum(dim=1) / 2
        if self.power == 0:
            return prior
        return prior + self.power * seen_log_prob(self.model, self.outputs(keys), self.cues)


def seen_log_prob(model: Kpp, outputs: DecoderOutput, images: Pixels) -> Float[Tensor, " n"]:
    """ln p of the upper half of each image."""
    return model.likelihood.log_prob(
        outputs, images[None], observed("lower_half_hidden", images[None])
    )[0]


def grid_points(side: int, device: torch.device) -> Float[Tensor, "n 2"]:
    """The middles of side x side equal squares of [-1, 1]^2, row by row."""
    line = (2 * torch.arange(side, device=device) + 1) / side - 1
    return torch.stack(torch.meshgrid(line, line, indexing="xy"), dim=-1).flatten(0, 1)


@torch.no_grad()
def evaluate_on_grid(target: Target, images: Pixels, side: int) -> Float[Tensor, "cues points"]:
    """ln p(x_seen | y, M) of each cue at every point of a grid. There p(y) is even."""
    found = []
    for keys in as_normal(grid_points(side, target.maps.device)).split(512):
        outputs = target.outputs(keys)
        each = [
            seen_log_prob(target.model, outputs, one.expand(len(keys), -1, -1, -1))
            for one in images
        ]
        found.append(torch.stack(each))
    return torch.cat(found, dim=1)


def sum_by_cell(
    masses: Float[Tensor, "cues points"], side: int, cells: int
) -> Float[Tensor, "cues c"]:
    """Masses at the points of a grid, summed up by cell."""
    per = side // cells
    square = masses.view(-1, cells, per, cells, per)
    return square.sum(dim=(2, 4)).flatten(1)


def cell_of(points: Float[Tensor, "*n 2"], cells: int) -> Tensor:
    column, row = (((points + 1) / 2 * cells).long().clamp(0, cells - 1)).unbind(-1)
    return row * cells + column


def histogram(places: Float[Tensor, "cues n 2"], cells: int) -> Float[Tensor, "cues c"]:
    """The share of some places in each cell."""
    return count_shares(cell_of(places, cells), cells**2)


def count_shares(index: Int[Tensor, "cues n"], cells: int) -> Float[Tensor, "cues c"]:
    ones = torch.ones(index.shape, device=index.device)
    return ones.new_zeros(len(index), cells).scatter_add(1, index, ones) / index.shape[1]


def total_variation(
    one: Float[Tensor, "cues c"], other: Float[Tensor, "cues c"]
) -> Float[Tensor, " cues"]:
    """Total variation: half the sum of differences; 0 the same, 1 disjoint."""
    return (one - other).abs().sum(dim=1) / 2


def draw_independently(
    masses: Float[Tensor, "cues c"], count: int, generator: torch.Generator
) -> Float[Tensor, "cues c"]:
    """Shares of so many independent draws."""
    drawn = torch.multinomial(masses, count, replacement=True, generator=generator)
    return count_shares(drawn, masses.shape[1])
