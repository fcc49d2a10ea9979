"""What the tests share: models small enough to run in milliseconds, awake enough to be wrong."""

import gzip
import struct
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from torch import Tensor

from kanerva.config import (
    MODEL_CONFIGS,
    DataConfig,
    DecoderConfig,
    KeyConfig,
    KppPaperConfig,
    ModelConfig,
    PaperMemoryConfig,
    PaperReadoutConfig,
    RunConfig,
    ShiftedResNetConfig,
)
from kanerva.models.kpp_paper import KppPaper

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def tiny() -> KppPaperConfig:
    """The paper's model, every size small. (Blocks of 6: at 4 the prior ends in 1x1 maps, whose
    EvoNorm groups of two numbers give the readout KL a tail no average tames.)"""
    return KppPaperConfig(
        image=(1, 8, 8),
        encoder=ShiftedResNetConfig(width=8),
        memory=PaperMemoryConfig(channels=3, size=12, reads=2, block=6, base=16),
        keys=KeyConfig(hidden=16),
        readout=PaperReadoutConfig(size=5, hidden=16, prior_width=8),
        decoder=DecoderConfig(base=16, layers=2),
    )


@pytest.fixture
def tiny_colour(tiny: KppPaperConfig) -> KppPaperConfig:
    """Second values throughout: colour, not square, K = 3, mixture likelihood."""
    return replace(
        tiny,
        image=(3, 10, 7),
        memory=replace(tiny.memory, reads=3, channels=2),
        likelihood="logistic_mixture",
    )


@pytest.fixture
def as_model() -> Callable[..., ModelConfig]:
    """`as_model(config, name, **groups)`: the config of another model with the same sizes, as far
    as it has them; groups as they are given."""

    def build(config: KppPaperConfig, name: str, **groups: object) -> ModelConfig:
        cls, parts = MODEL_CONFIGS[name], dict(groups)
        hints = get_type_hints(cls)
        for f in fields(cls):
            if f.name in parts or not hasattr(config, f.name):
                continue
            value = getattr(config, f.name)
            if is_dataclass(value):
                kind = hints[f.name]
                value = kind(**{g.name: getattr(value, g.name) for g in fields(kind)})
            parts[f.name] = value
        return cls(**parts)

    return build


@pytest.fixture
def draw() -> Callable[..., Tensor]:
    """Images a model's likelihood accepts: `draw(config, B, T)`, or `draw(config, T)`."""

    def images(config: ModelConfig, *leading: int) -> Tensor:
        shape = (*leading, *config.image)
        if config.likelihood == "bernoulli":
            return torch.bernoulli(torch.full(shape, 0.4))
        return torch.randint(256, shape).float() / 255

    return images


@pytest.fixture
def wake(draw: Callable[..., Tensor]) -> Callable[[KppPaperConfig], KppPaper]:
    """Build a model in evaluation mode with nothing left at its initial value.

    A fresh network has zero biases, unit running variances and almost no KL; whatever is dropped
    or doubled there goes unseen. Noise on parameters and a few training passes end that; both
    posteriors move off their priors and narrow, so that each KL is worth some nats.
    """

    def build(config: KppPaperConfig) -> KppPaper:
        model = KppPaper(config)
        with torch.no_grad():
            for parameter in model.parameters():
                size = 0.1 if parameter.ndim < 2 else 0.3 * parameter.std()
                parameter.add_(size * torch.randn_like(parameter))
            for posterior in (model.key_network, model.readout_posterior):
                mean, log_std = posterior.net[-1].bias.chunk(2)
                mean.add_(0.7 * torch.randn_like(mean))
                log_std.sub_(1.0)
            model.train()
            for _ in range(8):
                model.elbo(draw(config, 4, 6))
        return model.eval()

    return build


@pytest.fixture
def model(tiny: KppPaperConfig, wake: Callable[[KppPaperConfig], KppPaper]) -> KppPaper:
    return wake(tiny)


@pytest.fixture(scope="session")
def mnist_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with a small `mnist` in the official format: blobs, 384 for training, 50 to test.

    The last sixth of the training file is validation: 320 train, 64 validation.
    """
    root = tmp_path_factory.mktemp("data")
    (root / "mnist").mkdir()
    generator = torch.Generator().manual_seed(5)
    line = torch.arange(28).float()
    for part, count in (("train", 384), ("t10k", 50)):
        x, y, r = (8 + 12 * torch.rand(3, count, 1, 1, generator=generator)).unbind(0)
        distance = ((line[None, :, None] - y) ** 2 + (line[None, None, :] - x) ** 2).sqrt()
        pixels = (255 * (r / 2 - distance + 1).clamp(0, 1)).to(torch.uint8)
        header = struct.pack(">IIII", 0x803, count, 28, 28)
        path = root / "mnist" / f"{part}-images-idx3-ubyte.gz"
        path.write_bytes(gzip.compress(header + pixels.numpy().tobytes()))
        labels = struct.pack(">II", 0x801, count) + bytes(i % 10 for i in range(count))
        (root / "mnist" / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    return root


@pytest.fixture
def small_run(tiny: KppPaperConfig) -> RunConfig:
    """A run of twelve steps on `mnist_root`, validated and saved every four."""
    return RunConfig(
        model=replace(tiny, image=(1, 28, 28)),
        preset="mnist",
        data=DataConfig(set="mnist"),
        episode_length=8,
        batch=2,
        steps=12,
        log_every=2,
        validate_every=4,
        validate_episodes=4,
    )
