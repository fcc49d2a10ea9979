"""The Fréchet distance between two sets of images, on features of a small classifier.

The classifier is trained here, on the training images of the same set. So distances cannot be
compared across sets, nor with published FIDs. Features are normalised to unit variance on real
images. For a set without labels, an autoencoder replaces the classifier.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from kanerva.errors import UserError

Pixels = Float[Tensor, "n C H W"]
Features = Float[Tensor, "_ D"]

WIDTH, SIZE = 32, 64  # channels of the first layer; features
BATCH, RATE = 128, 2e-3
CHUNK = 512  # images at a time, once trained
HELD_OUT = 0.1  # fraction of the labelled images, to measure the classifier's accuracy


class FeatureNetwork(nn.Module):
    """Two convolutions that halve the side, then SIZE features, then a head for the task."""

    def __init__(self, channels: int, height: int, width: int, classes: int | None) -> None:
        super().__init__()
        side = math.ceil(height / 4) * math.ceil(width / 4)
        self.trunk = nn.Sequential(
            nn.Conv2d(channels, WIDTH, 5, stride=2, padding=2),
            nn.SiLU(),
            nn.Conv2d(WIDTH, 2 * WIDTH, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(2 * WIDTH * side, SIZE),
        )
        pixels = channels * height * width
        self.head = nn.Sequential(
            nn.SiLU(), nn.Linear(SIZE, pixels if classes is None else classes)
        )

    def forward(self, images: Pixels) -> Float[Tensor, "n outputs"]:
        return self.head(self.trunk(images))


@dataclass(frozen=True)
class FeatureExtractor:
    """A trained network whose features have unit variance on real images."""

    network: FeatureNetwork
    mean: Float[Tensor, " D"]
    std: Float[Tensor, " D"]
    learnt_from: str  # "labels", or "images" if there were none
    classes: int | None
    accuracy: float | None  # on labelled images that it was not trained on

    @torch.no_grad()
    def __call__(self, images: Pixels) -> Features:
        features = [self.network.trunk(part) for part in images.split(CHUNK)]
        return (torch.cat(features) - self.mean) / self.std


def train_feature_extractor(
    images: Pixels,
    labels: Int[Tensor, " n"] | None,
    *,
    steps: int,
    generator: torch.Generator,
) -> FeatureExtractor:
    """Train a network on real images: to classify them, or to reconstruct them."""
    classes, targets = None, None
    if labels is not None:
        names, targets = labels.to(images.device).unique(return_inverse=True)
        classes = len(names)
    kept = len(images) - (round(HELD_OUT * len(images)) if targets is not None else 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**31, (), generator=generator, device=images.device)))
        channels, height, width = images.shape[1:]
        network = FeatureNetwork(channels, height, width, classes)
    network = network.to(images.device)
    optimiser = torch.optim.AdamW(network.parameters(), lr=RATE)
    with torch.enable_grad():
        for _ in range(steps):
            batch = torch.randint(kept, (BATCH,), generator=generator, device=images.device)
            outputs = network(images[batch])
            if targets is None:
                loss = F.mse_loss(outputs, images[batch].flatten(1))
            else:
                loss = F.cross_entropy(outputs, targets[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    network.eval()
    with torch.no_grad():
        raw = torch.cat([network.trunk(part) for part in images[:kept].split(CHUNK)])
        accuracy = None
        if targets is not None and kept < len(images):
            predicted = torch.cat([network(part) for part in images[kept:].split(CHUNK)]).argmax(
                dim=1
            )
            accuracy = (predicted == targets[kept:]).float().mean().item()
    learnt_from = "images" if labels is None else "labels"
    std = raw.std(dim=0).clamp(min=1e-6)
    return FeatureExtractor(network, raw.mean(dim=0), std, learnt_from, classes, accuracy)


def frechet(some: Features, others: Features) -> float:
    """|m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)): the distance between normals fitted to each set.

    It is positive even between two samples of one distribution, and larger for smaller samples:
    compare only sets of equal size.
    """
    if min(len(some), len(others)) < 2:
        raise UserError(f"a covariance needs two images or more, got {len(some)}, {len(others)}")
    first, second = some.double(), others.double()
    apart = (first.mean(dim=0) - second.mean(dim=0)).square().sum()
    a, b = torch.atleast_2d(first.T.cov()), torch.atleast_2d(second.T.cov())
    root = matrix_root(a)
    inner = torch.linalg.eigvalsh(root @ b @ root).clamp(min=0).sqrt().sum()
    return (apart + a.trace() + b.trace() - 2 * inner).item()


def matrix_root(matrix: Float[Tensor, "D D"]) -> Float[Tensor, "D D"]:
    """The symmetric square root of a covariance matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=0).sqrt() @ vectors.T


def frechet_spread(
    some: Features,
    others: Features,
    *,
    group: int,
    resamples: int,
    generator: torch.Generator,
) -> float:
    """The bootstrap standard deviation of the distance when `some` is resampled. Groups of `group`
    neighbours (the pictures of one memory) stay together."""
    groups = some.unflatten(0, (-1, group))
    distances = []
    for _ in range(resamples):
        chosen = torch.randint(len(groups), (len(groups),), generator=generator, device=some.device)
        distances.append(frechet(groups[chosen].flatten(0, 1), others))
    return torch.tensor(distances).std().item()
