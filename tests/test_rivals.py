"""The two rivals without a memory to look things up in, and the harness all rivals run in.

What every model keeps is in test_contract.py.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributions import Normal

from kanerva.config import MODEL_CONFIGS, KppPaperConfig, UnshiftedResNetConfig, option_names
from kanerva.data.episodes import FixedEpisodes
from kanerva.data.image_set import ImageSet
from kanerva.evaluation.bound import bound
from kanerva.evaluation.controls import controls
from kanerva.memory.heap import Memory
from kanerva.models import build
from kanerva.models.rivals.no_memory import NoMemory, Vae, dense_net, replaced_parameters
from kanerva.presets import OURS, preset


@pytest.fixture
def vae(tiny: KppPaperConfig, as_model: Callable, draw) -> Vae:
    return awake(Vae(as_model(tiny, "vae")), draw)


@pytest.fixture
def no_memory(tiny: KppPaperConfig, as_model: Callable, draw) -> NoMemory:
    return awake(
        NoMemory(as_model(tiny, "no-memory", encoder=UnshiftedResNetConfig(width=8))), draw
    )


def awake(model, draw):
    """Off its initial values: norms have statistics, posteriors differ from priors."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        mean, log_std = model.readout_posterior.net[-1].bias.chunk(2)
        mean.add_(0.7 * torch.randn_like(mean))
        log_std.sub_(1.0)
        model.train()
        for _ in range(8):
            model.elbo(draw(model.config, 4, 6))
    return model.eval()


def test_rivals_are_the_papers_run_with_another_memory():
    paper = preset("mnist", "kpp-paper")
    for name in (name for name in MODEL_CONFIGS if not name.startswith("kpp")):
        run = preset("mnist", name)
        assert replace(run, model=paper.model) == paper
        for group, theirs in vars(paper.model).items():
            ours = dict(vars(getattr(run.model, group, theirs))) if hasattr(theirs, "group") else {}
            ours.pop("shift", None)
            assert all(getattr(theirs, option) == value for option, value in ours.items())
        assert getattr(run.model.encoder, "shift", 0) == (0.125 if name == "dkm-tsm" else 0)


# vae


def test_the_vaes_bound_is_that_of_its_formula(vae: Vae, draw):
    images = draw(vae.config, 2, 3)
    terms = vae.elbo(images, generator=torch.Generator().manual_seed(1))
    posterior = vae.readout_posterior(vae.encoder(images))
    q = Normal(posterior.mean, posterior.std)
    p = Normal(torch.zeros_like(posterior.mean), torch.ones_like(posterior.std))
    torch.testing.assert_close(terms.readout_kl, torch.distributions.kl_divergence(q, p).sum(-1))
    z = posterior.sample(torch.Generator().manual_seed(1))
    logits = vae.decoder(z)
    pixels = torch.distributions.Bernoulli(logits=logits).log_prob(images).flatten(2).sum(-1)
    torch.testing.assert_close(terms.log_likelihood, pixels)
    assert torch.equal(terms.key_kl, torch.zeros(2, 3))
    assert terms.readout_kl.min() > 0.1


# no-memory


def test_its_dense_net_is_as_large_as_what_it_replaces():
    for name in ("glyphs", "mnist", "cifar10"):
        config = preset(name, "no-memory").model
        model, paper = build(config), build(preset(name, "kpp-paper").model)
        mine, theirs = (sum(p.numel() for p in m.parameters()) for m in (model, paper))
        assert abs(mine - theirs) < 0.05 * theirs
        replaced = sum(
            p.numel()
            for part in (paper.writer, paper.key_network, paper.readout_prior)
            for p in part.parameters()
        )
        assert replaced_parameters(config, model.encoder.features) == replaced
    net = dense_net(64, 10, 5000)
    assert abs(sum(p.numel() for p in net.parameters()) - 5000) < 250


def test_all_it_sees_of_an_episode_is_one_vector(no_memory: NoMemory, draw, tmp_path: Path):
    """Saved and loaded, with z, it gives the densities that the bound was made of."""
    images = draw(no_memory.config, 2, 3)
    memory = no_memory.write(images)
    assert tuple(memory.map.shape) == (2, *no_memory.memory_shape(3))
    memory.save(tmp_path / "m.safetensors")
    again = Memory.load(tmp_path / "m.safetensors")
    posterior = no_memory.readout_posterior(no_memory.encoder(images))
    z = posterior.sample(torch.Generator().manual_seed(3))
    keys = torch.zeros(2, 3, 0)
    joint = no_memory.joint(images, again.map, keys, z)
    prior = no_memory.prior(memory.map)
    exact = Normal(prior.mean, prior.std).log_prob(z).sum(-1)
    torch.testing.assert_close(joint.readout_log_prior, exact)
    other = no_memory.elbo(draw(no_memory.config, 2, 3), memory, sample=False)
    own = no_memory.elbo(images, memory, sample=False)
    torch.testing.assert_close(own.nll_nats, no_memory.elbo(images, sample=False).nll_nats)
    assert not torch.allclose(other.nll_nats, own.nll_nats)


def test_its_kl_is_that_of_two_normals(no_memory: NoMemory, draw):
    images = draw(no_memory.config, 2, 3)
    posterior = no_memory.readout_posterior(no_memory.encoder(images))
    prior = no_memory.prior(no_memory.write(images).map)
    q = Normal(posterior.mean, posterior.std)
    p = Normal(prior.mean.expand_as(posterior.mean), prior.std.expand_as(posterior.std))
    exact = torch.distributions.kl_divergence(q, p).sum(-1)
    torch.testing.assert_close(no_memory.elbo(images).readout_kl, exact)


def test_what_is_left_out_is_not_pooled(no_memory: NoMemory, draw):
    images = draw(no_memory.config, 4)
    terms = no_memory.left_out(images, generator=torch.Generator().manual_seed(0))
    for t in range(4):
        rest = torch.cat([images[:t], images[t + 1 :]])
        prior = no_memory.prior(no_memory.write(rest).map[None])
        posterior = no_memory.readout_posterior(no_memory.encoder(images[None, t : t + 1]))
        torch.testing.assert_close(terms.readout_kl[t], posterior.kl(prior)[0, 0])


# The harness


def test_controls_of_a_model_without_memory_are_its_own_bound(vae: Vae):
    pixels = torch.randint(0, 256, (12, *vae.config.image), dtype=torch.uint8)
    episodes = FixedEpisodes(
        ImageSet("mnist", "test", pixels), episode_length=4, binarization="sample"
    )
    found = controls(vae, episodes)
    assert list(found) == ["own"]
    assert found["own"] == bound(vae, episodes, limit=3)


SMALL = {
    "encoder.width": 8,
    "decoder.base": 16,
    "memory.size": 12,
    "memory.block": 6,
    "memory.base": 16,
    "memory.capacity": 12,
    "readout.size": 5,
    "readout.hidden": 16,
    "readout.prior-width": 8,
    "keys.hidden": 16,
    "rows.count": 6,
    "rows.width": 10,
    "code.groups": 8,
    "code.width": 16,
    "code.maps": 4,
}


@pytest.mark.parametrize("model", sorted(set(MODEL_CONFIGS) - {"kpp", "kpp-paper"}))
def test_a_rival_trains_resumes_evaluates_and_compares(
    tmp_path: Path, mnist_root: Path, model: str, capsys
):
    from kanerva.cli import main

    run, pieces = tmp_path / "run", tmp_path / "pieces"
    flags = ["--preset", "mnist", "--model", model, "--data-root", str(mnist_root)]
    flags += [] if model in OURS else ["--variant", "strong", "--data.augment", "affine"]
    known = option_names(MODEL_CONFIGS[model])
    for option, value in SMALL.items():
        if option.replace("-", "_") in known:
            flags += [f"--{option}", str(value)]
    flags += ["--episode-length", "4", "--batch", "2", "--steps", "4", "--validate-every", "2"]
    flags += ["--validate-episodes", "2", "--device", "cpu"]
    assert main(["train", *flags, "--run", str(run)]) == 0
    for _ in range(4):
        assert main(["train", *flags, "--run", str(pieces), "--resume", "--minutes", "1e-9"]) == 0
    whole, parts = (
        load_file(r / "checkpoints" / "last" / "model.safetensors") for r in (run, pieces)
    )
    assert whole.keys() == parts.keys() and all(torch.equal(whole[k], parts[k]) for k in whole)
    place = ["--data-root", str(mnist_root), "--device", "cpu"]
    assert main(["evaluate", str(run), "--iwae", "2", *place]) == 0
    assert main(["compare", str(run)]) == 0
    assert main(["generate", str(run), *place]) == 0
    out = capsys.readouterr().out
    assert f"{model} on mnist test (50 images)" in out and "iwae_2" in out
