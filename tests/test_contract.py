"""What every model keeps, tested once over all of them.

Each is built, woken, and asked for everything a `MemoryModel` offers. One fresh process then gets
the files of all of them, weights, a memory, y and z, and must find the densities the bound was made
of: the protocol's "test that shows it" (docs/evaluation.md).
"""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kanerva.config import (
    MODEL_CONFIGS,
    AddressedMatrixConfig,
    BitsMemoryConfig,
    CodeConfig,
    DecoderConfig,
    GridConfig,
    KeyConfig,
    KppDecoderConfig,
    KppEncoderConfig,
    KppMemoryConfig,
    KppReadoutConfig,
    LinearReadoutConfig,
    MatrixConfig,
    ModelConfig,
    PaperMemoryConfig,
    PaperReadoutConfig,
    PixelCodeConfig,
    ResNetConfig,
    SlotsConfig,
    VectorReadoutConfig,
    model_from_dict,
    to_dict,
)
from kanerva.errors import UserError
from kanerva.memory.heap import Memory
from kanerva.models import CLASSES, build, model_class
from kanerva.models.base import MemoryModel
from kanerva.models.latent import LatentModel
from kanerva.models.loading import load
from kanerva.models.rivals.vma import VariationalMemoryAddressing, sample_addresses
from kanerva.models.terms import ElboTerms, JointDensity
from kanerva.seeding import stream

CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # float32, another batch size
TERMS = ("log_likelihood", "readout_kl", "key_kl")
KPP_LIKE = {
    "encoder": KppEncoderConfig(width=8, depth=1),
    "readout": KppReadoutConfig(size=4, channels=2, prior_width=8),
    "decoder": KppDecoderConfig(base=16, depth=1),
}
PAPER_LIKE = {
    "encoder": ResNetConfig(width=8),
    "keys": KeyConfig(hidden=16),
    "readout": LinearReadoutConfig(size=5, hidden=16),
    "decoder": DecoderConfig(base=16, layers=2),
}
GROUPS = {
    "kpp": KPP_LIKE | {"memory": KppMemoryConfig(size=12, capacity=12)},
    "kpp-bits": KPP_LIKE
    | {
        "memory": BitsMemoryConfig(channels=3, size=12, capacity=12),
        "code": CodeConfig(groups=4, radius=2, width=12, depth=1, maps=8),
    },
    "kpp-empty": KPP_LIKE | {"memory": GridConfig(size=12, capacity=12)},
    "kpp-bits-empty": KPP_LIKE
    | {
        "memory": GridConfig(channels=3, size=12, capacity=12),
        "code": PixelCodeConfig(radius=2, width=12, depth=1, maps=8),
    },
    "vae": PAPER_LIKE,
    "km": PAPER_LIKE | {"rows": AddressedMatrixConfig(count=6, width=5, address=3, noise=0.7)},
    "dkm": PAPER_LIKE | {"rows": MatrixConfig(count=6, width=5, noise=0.7)},
    "vma": PAPER_LIKE | {"readout": VectorReadoutConfig(size=5, hidden=16)},
    "dnc": PAPER_LIKE | {"rows": SlotsConfig(count=6, width=12, heads=2)},
}
GROUPS["kpp-paper"] = GROUPS["no-memory"] = PAPER_LIKE | {
    "memory": PaperMemoryConfig(size=12, block=6, base=16),
    "readout": PaperReadoutConfig(size=5, hidden=16, prior_width=8),
}
GROUPS["dkm-tsm"] = GROUPS["dkm"]
NAMES = list(MODEL_CONFIGS)
# Further configs, for what a single one of a model does not show
MORE = ["kpp outline", "kpp-empty context", "kpp-paper colour", "dnc colour"]
MORE += ["no-memory shifted"]
FORGETFUL = ["kpp-empty", "kpp-bits-empty", "vae"]
REMEMBERING = [name for name in NAMES if name not in FORGETFUL]


def config_of(name: str) -> ModelConfig:
    """A tiny config of a model; colour is 10x7 and 8-bit."""
    name, *kind = name.split()
    cls, groups = MODEL_CONFIGS[name], dict(GROUPS[name])
    shifted = cls().encoder
    if hasattr(shifted, "shift"):
        groups["encoder"] = replace(shifted, width=8)
    config = cls(
        image=(1, 8, 8), **{k: v for k, v in groups.items() if k in cls.__dataclass_fields__}
    )
    if kind == ["shifted"]:
        return replace(config, encoder=replace(config.encoder, shift=0.125))
    if kind:
        config = replace(config, image=(3, 10, 7), likelihood="logistic_mixture")
    if kind in (["outline"], ["context"]):
        decoder = replace(config.decoder, neighbours=2, near_width=8)
        config = replace(config, decoder=decoder)
    if kind == ["outline"]:
        config = replace(config, memory=replace(config.memory, outline=True))
    return config


def draw(config: ModelConfig, *leading: int) -> Tensor:
    shape = (*leading, *config.image)
    if config.likelihood == "bernoulli":
        return torch.bernoulli(torch.full(shape, 0.4))
    return torch.randint(256, shape).float() / 255


def woken(config: ModelConfig) -> MemoryModel:
    """In evaluation mode, with nothing left at its initial value."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        model = build(config)
        for parameter in model.parameters():
            size = 0.1 if parameter.ndim < 2 else max(0.3 * parameter.std().item(), 0.05)
            parameter.add_(size * torch.randn_like(parameter))
        model.train()
        for _ in range(4):
            model(draw(config, 4, 6))
    return model.eval()


_AWAKE: dict[str, MemoryModel] = {}


def awake(name: str) -> MemoryModel:
    """The woken model of that name, made once: tests that change it take a copy."""
    if name not in _AWAKE:
        _AWAKE[name] = woken(config_of(name))
    return _AWAKE[name]


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest) -> MemoryModel:
    return awake(request.param)


@pytest.fixture(params=REMEMBERING)
def remembering(request: pytest.FixtureRequest) -> MemoryModel:
    return awake(request.param)


@pytest.fixture(params=FORGETFUL)
def forgetful(request: pytest.FixtureRequest) -> MemoryModel:
    return awake(request.param)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def assert_same_terms(ours: ElboTerms, theirs: ElboTerms) -> None:
    for name in TERMS:
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), **CLOSE)


# Names and configs


def test_every_config_has_a_model_of_its_name_and_none_is_left_over():
    assert list(CLASSES) == NAMES == sorted(GROUPS, key=NAMES.index)
    for name in NAMES:
        assert MODEL_CONFIGS[name].name == name
        assert type(awake(name)) is model_class(name)


@pytest.mark.parametrize("name", NAMES + MORE)
def test_a_config_comes_back_from_its_file(name: str):
    config = config_of(name)
    assert model_from_dict(to_dict(config)) == config


def test_capabilities_are_those_that_the_table_of_models_says():
    def having(capability: str) -> set[str]:
        return {name for name in NAMES if getattr(awake(name), capability)}

    every = set(NAMES)
    assert having("remembers") == every - set(FORGETFUL)
    assert having("recalls") == every - {*FORGETFUL, "no-memory"}
    assert having("has_keys") == every - {*FORGETFUL, "no-memory", "vma"}
    assert having("has_blocks") == {"kpp", "kpp-bits"}
    assert having("has_code") == {"kpp-bits"}
    assert having("is_exact") == {"kpp-bits", "kpp-bits-empty"}
    assert having("has_memory_kl") == {"km", "dkm", "dkm-tsm"}
    assert having("writes_sequentially") == {"dkm", "dkm-tsm", "dnc"}


# Files, and one fresh process for all

FRESH = """
import sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from kanerva.memory.heap import Memory
from kanerva.models.loading import load

torch.set_num_threads(1)
names = ("log_likelihood", "readout_log_prior", "key_log_prior")
for folder in sorted(Path(sys.argv[1]).iterdir()):
    model = load(folder / "weights")
    given = load_file(folder / "latents.safetensors")
    if model.remembers:
        maps = Memory.load(folder / "memory.safetensors").map
    else:
        maps = torch.zeros(len(given["x"]), *model.memory_shape(0))
    rows = []
    with torch.no_grad():
        for t in reversed(range(given["x"].shape[1])):  # one at a time, the last one first
            one = {name: value[:, t : t + 1] for name, value in given.items()}
            keys = one.get("keys", torch.zeros(len(maps), 1, 0))
            rows.append(model.joint(one["x"], maps, keys, one["readout"]))
    rows.reverse()
    save_file({n: torch.cat([getattr(r, n) for r in rows], dim=1) for n in names}, folder / "out")
"""


def latents(
    model: MemoryModel, images: Tensor, noise: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """M as `write` makes it, y and z as the importance weights draw them, and ln q(y, z)."""
    features = model.encoder(images)
    if isinstance(model, VariationalMemoryAddressing):
        maps = model.write(images).map
        held = model.templates(maps)
        log_q = model.address_posterior(features, held)
        address = sample_addresses(log_q, noise)
        shape = (*images.shape[:2], model.config.readout.size)
        reading = model.infer(features, held.at(address), torch.randn(shape, generator=noise))
        chance = log_q.gather(-1, address[..., None])[..., 0]
        keys = model.keys_of(address, images.shape[1])
        return maps, keys, reading.readout, chance + reading.log_posterior
    assert isinstance(model, LatentModel)
    maps, posterior = model.write_episode(images, features, generator=noise)
    keys = posterior.sample(noise)
    reading = model.infer(features, maps, keys, generator=noise)
    prior = model.joint(images, maps, keys, reading.readout).key_log_prior
    return maps, keys, reading.readout, posterior.log_ratio(keys) + prior + reading.log_posterior


def test_a_fresh_process_with_weights_memory_y_and_z_finds_the_same_densities(tmp_path: Path):
    """Nothing of X is in the other process but the pixels it is asked to score, and they enter
    p(x|z) as its argument alone. Less ln q they are the very weights whose mean is the bound."""
    expected: dict[str, JointDensity] = {}
    left: dict[str, Tensor] = {}
    for name in NAMES + MORE:
        if name in (
            "kpp-bits",
            "kpp-bits-empty",
        ):  # no z: test_bits has a process
            continue
        model, folder = awake(name), tmp_path / name
        folder.mkdir()
        images = draw(model.config, 2, 3)
        maps, keys, readout, log_q = latents(model, images, stream(name))
        expected[name] = model.joint(images, maps, keys, readout)
        left[name] = model.log_weights(images, 1, generator=stream(name))[0] + log_q
        model.save_pretrained(folder / "weights")
        if model.remembers:
            memory = model.write(images, generator=stream(name))
            torch.testing.assert_close(memory.map, maps, rtol=0, atol=1e-6)
            memory.save(folder / "memory.safetensors")
        given = {"x": images, "keys": keys, "readout": readout}
        given = {k: v.contiguous() for k, v in given.items() if v.numel()}
        save_file(given, folder / "latents.safetensors")
    run = subprocess.run(
        [sys.executable, "-c", FRESH, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "" and run.stderr == ""
    for name, densities in expected.items():
        found = load_file(tmp_path / name / "out")
        for part, value in found.items():
            torch.testing.assert_close(value, getattr(densities, part), rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(sum(found.values()), left[name], rtol=1e-4, atol=1e-3)


def test_a_saved_model_comes_back_the_same(model: MemoryModel, tmp_path: Path):
    model.save_pretrained(tmp_path)
    back = load(tmp_path)
    assert type(back) is type(model) and back.config == model.config and not back.training
    images = draw(model.config, 2, 3)
    ours, theirs = (m.elbo(images, generator=stream(1)) for m in (model, back))
    assert all(torch.equal(getattr(ours, name), getattr(theirs, name)) for name in TERMS)


def test_a_memory_has_the_shape_and_the_bits_that_are_told(remembering: MemoryModel):
    images = draw(remembering.config, 2, 4)
    memory = remembering.write(images)
    shape = remembering.memory_shape(4)
    assert tuple(memory.map.shape) == (2, *shape) and memory.floats == math.prod(shape)
    if remembering.config.name != "vma":  # whose pixels are bits
        assert remembering.memory_bits(4) == 32 * memory.floats
    empty = remembering.empty(2)
    remembering.check_shape(tuple(empty.map.shape[1:]))
    assert not empty.map.requires_grad and remembering.empty().map.ndim == 3


# One episode, or a batch


@pytest.mark.parametrize("length", [1, 4])
def test_an_episode_is_scored_the_same_alone_and_in_a_batch(model: MemoryModel, length: int):
    images = draw(model.config, 3, length)
    if model.has_blocks:  # deals cells to a batch: each episode in a memory it is given
        memories = [model.write(one) for one in images]
        at = torch.arange(length)
        batch = model.elbo(images, Memory.stack(memories), handles=at.expand(3, -1), sample=False)
        alone = model.elbo(images[1], memories[1], handles=at, sample=False)
    else:
        batch, alone = (model.elbo(x, sample=False) for x in (images, images[1]))
    assert batch.elbo.shape == (3, length) and alone.elbo.shape == (length,)
    assert_same_terms(batch[1], alone)


def test_one_episode_is_a_batch_of_one_in_samples_too(model: MemoryModel):
    images = draw(model.config, 1, 4)
    scores = [model.elbo, model.left_out] + ([model.permuted] if model.remembers else [])
    for score in scores:
        batch, alone = (score(x, generator=stream(3)) for x in (images, images[0]))
        assert batch.elbo.shape == (1, 4) and alone.elbo.shape == (4,)
        assert_same_terms(batch[0], alone)
    batch, alone = (model.log_weights(x, 3, generator=stream(3)) for x in (images, images[0]))
    assert batch.shape == (3, 1, 4) and alone.shape == (3, 4)
    torch.testing.assert_close(batch[:, 0], alone, **CLOSE)
    batch, alone = (model.reconstruct(x) for x in (images, images[0]))
    torch.testing.assert_close(batch[0], alone, **CLOSE)


# The bound


def test_the_bound_is_finite_and_its_divergences_are_not_negative(model: MemoryModel):
    for score in [model.elbo, model.left_out] + ([model.permuted] if model.remembers else []):
        terms = score(draw(model.config, 2, 4))
        expected = terms.log_likelihood - terms.readout_kl - terms.key_kl
        torch.testing.assert_close(terms.elbo, expected)
        assert terms.elbo.isfinite().all() and (terms.log_likelihood < 0).all()
        assert (terms.readout_kl >= -1e-5).all() and (terms.key_kl >= -1e-5).all()


def test_the_same_generator_scores_the_same_and_another_does_not(model: MemoryModel):
    images = draw(model.config, 2, 4)
    first, again, other = (model.elbo(images, generator=stream(s)).elbo for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert model.is_exact or not torch.allclose(first, other)  # codes draw nothing


def test_one_memory_written_first_serves_the_whole_episode(remembering: MemoryModel):
    """Condition 2: `elbo` writes M as `write` does, then goes on as if that memory were given."""
    images, noise = draw(remembering.config, 2, 4), stream(2)
    memory = remembering.write(images, generator=noise)
    handles = {"handles": torch.arange(4).expand(2, -1)} if remembering.has_blocks else {}
    given = remembering.elbo(images, memory, generator=noise, **handles)
    assert_same_terms(remembering.elbo(images, generator=stream(2)), given)
    other = remembering.elbo(images, remembering.empty(2), generator=stream(2))
    assert other.elbo.isfinite().all() and not torch.allclose(other.elbo, given.elbo)


def test_an_image_costs_the_same_in_any_company_where_nothing_is_written(forgetful: MemoryModel):
    images = draw(forgetful.config, 5)
    whole = forgetful.elbo(images, sample=False)
    alone = [forgetful.elbo(images[t : t + 1], sample=False).nll_nats[0] for t in range(5)]
    torch.testing.assert_close(whole.nll_nats, torch.stack(alone), **CLOSE)
    assert (whole.key_kl == 0).all()
    left, own = (s(images, generator=stream(1)) for s in (forgetful.left_out, forgetful.elbo))
    assert_same_terms(left, own)


def test_the_bound_is_the_average_log_weight_and_more_samples_tighten_it(model: MemoryModel):
    """E[ln p(x, z, y | M) - ln q(z, y | X)] is E[L_T]: no term is lost, doubled or divided."""
    copies = draw(model.config, 1, 2).expand(800, -1, -1, -1, -1)
    weights, bounds = model.log_weights(copies, 4), model.elbo(copies).elbo
    error = ((weights.mean(0).var(0) + bounds.var(0)) / 800).sqrt()
    assert ((weights.mean((0, 1)) - bounds.mean(0)).abs() <= 5 * error + 1e-9).all()
    tight = weights.logsumexp(0) - math.log(4)
    assert model.is_exact or (tight.mean(0) > weights.mean((0, 1))).all()  # those are exact


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_memory_is_scored_as_it_is_kept(remembering: MemoryModel, dtype: str):
    """Rounded once, as a whole, however M is come by; the weights are shared."""
    if remembering.config.name == "vma":  # keeps pixels, which are exact
        return
    if remembering.has_code:
        with pytest.raises(UserError, match="bits"):
            remembering.storing_as(dtype)
        return
    kept, images = remembering.storing_as(dtype), draw(remembering.config, 2, 4)
    assert kept.decoder is remembering.decoder and remembering.memory_dtype == "float32"
    whole, noise = remembering.write(images, generator=stream(1)), stream(1)
    memory = kept.write(images, generator=noise)
    torch.testing.assert_close(memory.map, whole.quantise(dtype).map)
    assert not torch.equal(memory.map, whole.map)
    handles = {"handles": torch.arange(4).expand(2, -1)} if kept.has_blocks else {}
    given = kept.elbo(images, memory, generator=noise, **handles)
    assert_same_terms(kept.elbo(images, generator=stream(1)), given)


# Controls


def test_left_out_knows_nothing_of_the_image_it_scores(
    remembering: MemoryModel, monkeypatch: pytest.MonkeyPatch
):
    """Its memory is written from the others: a changed image t leaves row t's as it was."""
    if isinstance(remembering, VariationalMemoryAddressing):
        return  # hides templates instead: test_vma.py
    if remembering.has_code:
        return  # what is not written is told nothing: test_bits.py
    model, seen = deepcopy(remembering), []
    terms = model.terms
    monkeypatch.setattr(model, "terms", lambda *a, **k: seen.append(a[2]) or terms(*a, **k))
    images = draw(model.config, 4)
    changed = images.clone()
    changed[1] = 1 - changed[1]
    for episode in (images, changed):
        model.left_out(episode, generator=stream(1))
    before, after = seen
    torch.testing.assert_close(before[1], after[1])
    assert not any(torch.allclose(before[t], after[t], atol=1e-4) for t in (0, 2, 3))


def test_permuted_pays_for_its_neighbours_key(remembering: MemoryModel):
    images = draw(remembering.config, 2, 4)
    own = remembering.elbo(images, sample=False, generator=stream(1))
    found = remembering.permuted(images, generator=stream(1))
    assert found.elbo.shape == (2, 4) and found.elbo.isfinite().all()
    if remembering.has_keys and not remembering.has_memory_kl:  # those draw M, so q(y | M) moves
        torch.testing.assert_close(found.key_kl, own.key_kl.roll(1, dims=1), **CLOSE)


# Generate, recall, read


def test_generating_gives_pictures_for_one_memory_or_a_batch(model: MemoryModel):
    config = model.config
    memory = model.write(draw(config, 2, 4)) if model.remembers else None
    lead = (2,) if memory is not None else ()
    first, again, other = (model.generate(memory, 5, generator=stream(s)) for s in (1, 1, 2))
    assert first.shape == (*lead, 5, *config.image) and not first.requires_grad
    assert torch.equal(first, again) and not torch.allclose(first, other)
    assert first.min() >= 0 and first.max() <= 1
    if memory is not None:
        assert model.generate(memory[1], 3).shape == (3, *config.image)
    pixels = model.generate(memory, 2, sample_pixels=True)
    model.likelihood.check(pixels.view(1, -1, *config.image))


def test_recalling_is_a_function_of_memory_and_cue_and_says_every_step(remembering: MemoryModel):
    if not remembering.recalls:
        return
    memory, cue = remembering.write(draw(remembering.config, 4)), draw(remembering.config, 2)
    steps = remembering.recall(memory, cue, steps=4)
    assert steps.shape == (4, *cue.shape) and not steps.requires_grad
    assert torch.equal(steps, remembering.recall(memory, cue, steps=4))
    further = remembering.recall(memory, steps[1], steps=2)
    torch.testing.assert_close(further, steps[2:], rtol=1e-3, atol=1e-3)
    sampled = [remembering.recall(memory, cue, sample=True, generator=stream(s)) for s in (1, 1)]
    assert torch.equal(*sampled)
    batch = remembering.recall(Memory.stack([memory, memory]), torch.stack([cue, cue]), steps=4)
    torch.testing.assert_close(batch[:, 1], steps, rtol=1e-3, atol=1e-3)


def test_reading_gives_a_distribution_over_readouts(remembering: MemoryModel):
    memory = remembering.write(draw(remembering.config, 2, 4))
    keys = torch.randn(2, 3, *remembering.key_shape)
    prior = remembering.read(memory, keys)
    size = sum(math.prod(shape) for shape in remembering.readout_shapes)
    readout = prior.sample(stream(1))
    assert prior.mean.shape == readout.shape == (2, 3, size)
    assert prior.log_prob(readout).shape == (2, 3)
    one = remembering.read(memory[1], keys[1])
    torch.testing.assert_close(one.mean, prior.mean[1:], **CLOSE)
    torch.testing.assert_close(remembering.read(memory[1], keys[1:]).mean, one.mean)


def test_bytes_and_other_floats_are_taken_as_they_are_meant(model: MemoryModel):
    images = draw(model.config, 2, 3)
    for dtype in (torch.float64, torch.float16):
        assert_same_terms(
            model.elbo(images.to(dtype), sample=False, generator=stream(1)),
            model.elbo(images, sample=False, generator=stream(1)),
        )
    with pytest.raises(UserError, match="got torch.uint8"):
        model.elbo(images.byte())


# Training


def test_training_reaches_every_parameter_that_has_a_part_in_the_bound(model: MemoryModel):
    """All but a bias of `vma`'s scores, which a softmax cancels, and what `kpp-empty` and its
    like would make of a block, for they are given zeros."""
    model = deepcopy(model).train()
    with torch.enable_grad():
        outputs = model(draw(model.config, 8, 4))
        assert type(outputs) is dict and set(outputs) - {"auxiliary"} == set(TERMS)
        auxiliary = outputs.pop("auxiliary", torch.zeros(()))
        (ElboTerms(**outputs).loss + auxiliary).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        idle = ("score.2.bias", "readout.lift.weight", "pixel_code.lift.weight")
        assert parameter.grad.any() or name in idle, name
        assert parameter.grad.any() or model.config.name in ("vma", *FORGETFUL), name


# Errors


def cannot(model: MemoryModel, images: Tensor, memory: Memory | None) -> Iterator[tuple]:
    """Calls that cannot work, and what their one line must say."""
    grey = 0.5 * images
    channels, height, width = model.config.image
    yield lambda: model.elbo(images[..., :-1]), str((3, channels, height, width - 1))
    yield lambda: model.elbo(images[:0]), "none"
    yield lambda: model.elbo(images.long()), "torch.int64"
    yield lambda: model.elbo(grey), "0.5"
    yield lambda: model.log_weights(grey, 2), "0.5"
    yield lambda: model.left_out(grey), "0.5"
    yield lambda: model.log_weights(images, 0), "0"
    yield lambda: model.left_out(images[:1]), "1"
    yield lambda: model.generate(memory, -3), "-3"
    yield lambda: model.generate(memory, 0), "0"
    name = model.config.name
    if not model.has_memory_kl:
        yield lambda: model.memory_kl(images), name
    if not model.has_blocks:
        yield lambda: model.resized(model.config), name
    if not model.has_keys:
        yield lambda: model.generate(memory, 2, near=(torch.zeros(model.key_shape), 0.1)), "near"
    else:
        yield lambda: model.generate(memory, 2, near=(torch.zeros(9, 9), 0.1)), "(9, 9)"
    if memory is None:
        some = Memory(torch.zeros(1, 1, 1))
        yield lambda: model.write(images), name
        yield lambda: model.empty(), name
        yield lambda: model.elbo(images, some), name
        yield lambda: model.generate(some, 2), name
        yield lambda: model.permuted(images), name
        yield lambda: model.append(some, images), name
        yield lambda: model.recall(some, images), name
        yield lambda: model.familiarity(some, images), name
        return
    wrong = Memory(torch.zeros(7, 5, 3))
    pair, many = Memory.stack([memory, memory]), images.expand(3, -1, -1, -1, -1)
    yield lambda: model.generate(None, 2), "write one first"
    yield lambda: model.elbo(images, wrong), "(7, 5, 3)"
    yield lambda: model.generate(wrong, 2), "(7, 5, 3)"
    yield lambda: model.elbo(images, pair), "2"
    yield lambda: model.elbo(many, memory), str(tuple(many.shape))
    yield lambda: model.elbo(many, pair), str(tuple(many.shape))
    yield lambda: model.read(memory), "say where"
    yield lambda: model.read(memory, torch.zeros(3, 5, *model.key_shape)), "do not fit"
    yield lambda: model.read(memory, torch.zeros(2, 11)), "(2, 11)"
    if not model.has_blocks and name != "vma":
        yield lambda: model.append(memory, images), name
        yield lambda: model.familiarity(memory, images), name
        yield lambda: model.read(memory, handles=[0]), name
        yield lambda: memory.free(0), "as a whole"
    if model.recalls:
        yield lambda: model.recall(memory, images, steps=0), "0"
        yield lambda: model.recall(memory, images, steps=-2), "-2"
        yield lambda: model.recall(pair, many), str(tuple(many.shape))
    else:
        yield lambda: model.recall(memory, images), "nothing can be looked up"


def test_a_call_that_cannot_work_is_one_line_of_error(model: MemoryModel):
    images = draw(model.config, 3)
    memory = model.write(images) if model.remembers else None
    for number, (call, value) in enumerate(cannot(model, images, memory)):
        with pytest.raises(UserError) as error:
            call()
        assert value in str(error.value) and "\n" not in str(error.value), number


def test_grey_pixels_may_be_trained_on(model: MemoryModel):
    grey = 0.5 * draw(model.config, 2, 4)
    assert deepcopy(model).train().elbo(grey).loss.isfinite()


@pytest.mark.parametrize("name", FORGETFUL)
def test_there_is_nothing_to_round_where_nothing_is_written(name: str):
    model = awake(name)
    images, rounded = draw(model.config, 2, 4), awake(name).storing_as("int8")
    plain, same = (m.elbo(images, generator=stream(0)).nll_nats for m in (model, rounded))
    assert torch.equal(plain, same) and rounded.memory_bits(4, "int8") == 0


def test_weights_of_version_1_load_by_their_old_names(tmp_path: Path):
    model, new, old = awake("kpp-paper"), "key_network.net.", "key_posterior.net."
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {k.replace(new, old, 1): v for k, v in load_file(path).items()}
    assert any(k.startswith(old) for k in tensors)
    save_file(tensors, path)
    again = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())


@torch.no_grad()
def test_whether_an_image_is_stored_is_decided_before_anything_is_sampled():
    """Choosing the lower of two sampled costs would give less than a bound."""
    torch.manual_seed(3)
    model = awake("kpp")
    images = draw(model.config, 6)
    memory = model.write(images[:3], generator=torch.Generator().manual_seed(0))
    costs = torch.stack(
        [
            model.elbo(images, memory, generator=torch.Generator().manual_seed(seed)).key_kl
            for seed in range(64)
        ]
    )
    assert torch.equal(costs, costs[:1].expand_as(costs))
