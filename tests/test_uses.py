"""What a heap is for, measured: the measures themselves are right."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kanerva.config import (
    KppConfig,
    KppDecoderConfig,
    KppEncoderConfig,
    KppMemoryConfig,
    KppReadoutConfig,
)
from kanerva.data import FixedEpisodes, ImageSet
from kanerva.distributions import as_normal
from kanerva.evaluation.uses import (
    auroc,
    measure_familiarity,
    measure_generation,
    nearest_is_held,
)
from kanerva.memory.heap import Memory
from kanerva.models.kpp import Kpp


@pytest.fixture
def heap() -> KppConfig:
    return KppConfig(
        image=(1, 8, 8),
        encoder=KppEncoderConfig(width=8, depth=1),
        memory=KppMemoryConfig(size=8, capacity=16),
        readout=KppReadoutConfig(size=3, channels=2, prior_width=8),
        decoder=KppDecoderConfig(base=16, depth=1),
    )


@pytest.fixture
def episodes() -> FixedEpisodes:
    images = torch.randint(256, (40, 1, 8, 8), dtype=torch.uint8)
    labels = torch.arange(40) % 4
    return FixedEpisodes(
        ImageSet("made", "test", images, labels), episode_length=8, binarization="sample"
    )


@pytest.mark.parametrize("ties", [False, True])
def test_auroc_is_the_share_of_pairs_in_order(ties: bool):
    high, low = torch.randn(40) + 1, torch.randn(30)
    if ties:
        high, low = high.round(), low.round()
    above = (high[:, None] > low).float().mean() + 0.5 * (high[:, None] == low).float().mean()
    assert auroc(high, low) == pytest.approx(above.item(), abs=1e-6)
    assert auroc(low + 100, low) == 1.0 and auroc(low - 100, low) == 0.0


def test_familiarity_compares_each_episode_with_strangers(
    heap: KppConfig, episodes: FixedEpisodes, monkeypatch: pytest.MonkeyPatch
):
    model = Kpp(heap).eval()
    written: list[Tensor] = []

    def remember(images: Tensor, *, generator: torch.Generator | None = None) -> Memory:
        written.append(images)
        return model.empty(len(images))

    def known(memory: Memory, images: Tensor) -> Tensor:
        held = written[-1].flatten(2)
        same = (images.flatten(2)[:, :, None] == held[:, None]).all(-1).any(-1)
        return same.float() + 0.01 * torch.rand(same.shape)

    monkeypatch.setattr(model, "write", remember)
    monkeypatch.setattr(model, "familiarity", known)
    found = measure_familiarity(model, episodes, 40)
    assert found is not None and found["auroc"] == 1.0
    assert found["n_written"] == found["n_unwritten"] == 40
    lone = FixedEpisodes(episodes.image_set, episode_length=40, binarization="sample")
    assert measure_familiarity(model, lone, 40) is None


def test_replay_is_near_and_grey_is_grey(
    heap: KppConfig, episodes: FixedEpisodes, monkeypatch: pytest.MonkeyPatch
):
    """Random keys that replay lie at distance zero, greyness zero; moved keys that paint grey do
    not; and keys count by whether a block lies where they fall."""
    model = Kpp(heap).eval()
    shown: list[Tensor] = []
    asked: list[Tensor] = []
    write = model.write

    def remember(images: Tensor, *, generator: torch.Generator | None = None) -> Memory:
        shown.append(images)
        return write(images, generator=generator)

    def paint(memory: Memory, keys: Tensor, *, generator: torch.Generator) -> Tensor:
        asked.append(keys)
        moved = len(asked) > 1
        return torch.full_like(shown[-1], 0.5) if moved else shown[-1].flip(1)

    monkeypatch.setattr(model, "write", remember)
    monkeypatch.setattr(model, "generate_at", paint)
    monkeypatch.setattr(
        model, "generate", lambda memory, count, generator: torch.zeros_like(shown[-1])
    )
    found = measure_generation(model, episodes, 40)
    assert found is not None and found["n"] == 40
    for place in ("held", "free"):
        assert found[f"{place}_nearest"] == pytest.approx(0, abs=2e-3)  # cdist rounds
        assert found[f"{place}_grey"] == 0
    assert found["perturbed_0.1_nearest"] == pytest.approx(0.5, abs=1e-3)
    assert found["perturbed_0.5_grey"] == 1
    assert found["unwritten_nearest"] > 0.3 and found["unwritten_grey"] == 0
    assert found["vae_grey"] == 0 and 0 < found["crossfade_grey"] < 1


def test_a_full_memory_has_no_free_places_to_sample_at(heap: KppConfig, episodes: FixedEpisodes):
    found = measure_generation(
        Kpp(replace(heap, memory=KppMemoryConfig(size=8, capacity=8))).eval(), episodes, 40
    )
    assert found is not None and "held_nearest" in found and "free_nearest" not in found
    assert all(value == value for value in found.values())  # no NaN


def test_a_key_falls_on_a_block_or_beside_it(heap: KppConfig):
    model = Kpp(heap).eval()
    held = model.write(torch.bernoulli(torch.full((2, 5, 1, 8, 8), 0.5)))
    assert nearest_is_held(held, as_normal(held.places)).all()
    assert not nearest_is_held(model.empty(2), as_normal(held.places)).any()
    owners = held.require_slots()
    free = [(row < 0).nonzero()[:3, 0] for row in owners]
    beside = held.grid.centres()[torch.stack(free)]
    assert not nearest_is_held(held, as_normal(beside)).any()
