"""What all models offer, and the two that have no memory to speak of."""

import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file
from torch.distributions import Normal

from kanerva.cli import main
from kanerva.config import ModelConfig, ModelName, RowsConfig, RunConfig
from kanerva.data import FixedEpisodes, ImageSet
from kanerva.errors import UserError
from kanerva.evaluation.bound import bound
from kanerva.evaluation.controls import controls
from kanerva.memory.heap import Memory
from kanerva.models import MODELS, VAE, NoMemory, build
from kanerva.models.rivals.no_memory import dense_net, replaced_parameters
from kanerva.presets import preset


def plain(tiny: ModelConfig, model: ModelName) -> ModelConfig:
    return replace(tiny, model=model, encoder=replace(tiny.encoder, shift=0.0))


@pytest.fixture
def vae(tiny: ModelConfig, draw) -> VAE:
    return awake(VAE(plain(tiny, "vae")), draw)


@pytest.fixture
def no_memory(tiny: ModelConfig, draw) -> NoMemory:
    return awake(NoMemory(plain(tiny, "no-memory")), draw)


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


def test_every_model_has_its_name():
    assert set(MODELS) == set(get_args(ModelName))
    for name in MODELS:
        config = preset("glyphs", name)
        assert isinstance(build(config.model_config()), MODELS[name])


def test_rivals_are_the_papers_run_with_another_memory():
    paper = preset("mnist", "kpp-paper")
    for name in set(MODELS) - {"kpp", "kpp-paper"}:
        run = preset("mnist", name)
        assert run.encoder.shift == (paper.encoder.shift if name == "dkm-tsm" else 0)
        back = replace(run, model="kpp-paper", encoder=paper.encoder)
        assert back == paper


def test_rows_name_only_what_has_rows():
    """Sizes of a matrix that a model does not have change nothing about it."""
    wide = RowsConfig(width=50)
    for name in MODELS:
        run = preset("glyphs", name)
        same = replace(run, rows=wide).config_hash() == run.config_hash()
        assert same == (name not in ("km", "dkm", "dkm-tsm", "dnc"))


def test_a_shift_is_refused_where_images_are_seen_one_by_one(tiny: ModelConfig):
    with pytest.raises(UserError, match="vae sees one image at a time: encoder.shift=0, not 0.125"):
        replace(tiny, model="vae")


# vae


def test_the_vaes_bound_is_that_of_its_formula(vae: VAE, draw):
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


def test_the_vaes_bound_lies_above_its_importance_weighted_one(vae: VAE, draw):
    images = draw(vae.config, 2, 4)
    noise = torch.Generator().manual_seed(0)
    weights = vae.log_weights(images, 400, generator=noise)
    elbo = weights.mean(0)
    tight = torch.logsumexp(weights, 0) - math.log(400)
    assert (tight > elbo).all()
    many = torch.stack([vae.elbo(images, generator=noise).elbo for _ in range(400)])
    spread = 4 * (weights.std(0) + many.std(0)) / 20
    assert ((many.mean(0) - elbo).abs() < spread).all()


def test_an_image_costs_a_vae_the_same_in_any_company(vae: VAE, draw):
    images = draw(vae.config, 5)
    alone = torch.stack([vae.elbo(images[t : t + 1], sample=False).nll_nats[0] for t in range(5)])
    torch.testing.assert_close(vae.elbo(images, sample=False).nll_nats, alone)


def test_a_vae_says_what_it_has_no_notion_of(vae: VAE, draw):
    images = draw(vae.config, 2)
    memory = Memory(torch.zeros(1, 1, 1))
    for call in (
        lambda: vae.write(images),
        lambda: vae.empty(),
        lambda: vae.recall(memory, images),
        lambda: vae.permuted(images),
        lambda: vae.elbo(images, memory),
        lambda: vae.generate(memory, 2),
        lambda: vae.append(memory, images),
        lambda: vae.memory_kl(images),
    ):
        with pytest.raises(UserError, match="vae"):
            call()
    assert vae.generate(None, 3).shape == (3, *vae.config.image)


# no-memory


def test_its_dense_net_is_as_large_as_what_it_replaces():
    for name in ("glyphs", "mnist", "cifar10"):
        config = preset(name, "no-memory").model_config()
        model, paper = build(config), build(preset(name, "kpp-paper").model_config())
        mine, theirs = (sum(p.numel() for p in m.parameters()) for m in (model, paper))
        assert abs(mine - theirs) < 0.05 * theirs
        replaced = sum(
            p.numel()
            for part in (paper.writer, paper.key_posterior, paper.readout_prior)
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


def test_importance_weights_of_no_memory_average_to_its_bound(no_memory: NoMemory, draw):
    images = draw(no_memory.config, 3)
    noise = torch.Generator().manual_seed(0)
    weights = no_memory.log_weights(images, 400, generator=noise)
    many = torch.stack([no_memory.elbo(images, generator=noise).elbo for _ in range(400)])
    spread = 4 * (weights.std(0) + many.std(0)) / 20
    assert ((many.mean(0) - weights.mean(0)).abs() < spread).all()


def test_no_memory_cannot_recall(no_memory: NoMemory, draw):
    images = draw(no_memory.config, 3)
    memory = no_memory.write(images)
    with pytest.raises(UserError, match="nothing can be looked up"):
        no_memory.recall(memory, images)
    with pytest.raises(UserError, match="nothing to be near to"):
        no_memory.generate(memory, 2, near=(torch.zeros(0), 0.1))
    with pytest.raises(UserError, match="write one first"):
        no_memory.generate(None, 2)
    assert no_memory.generate(memory, 5).shape == (5, *no_memory.config.image)
    batch = no_memory.write(draw(no_memory.config, 2, 3))
    assert no_memory.generate(batch, 5).shape == (2, 5, *no_memory.config.image)


# The harness


def test_controls_of_a_model_without_memory_are_its_own_bound(vae: VAE):
    pixels = torch.randint(0, 256, (12, *vae.config.image), dtype=torch.uint8)
    episodes = FixedEpisodes(
        ImageSet("mnist", "test", pixels), episode_length=4, binarization="sample"
    )
    found = controls(vae, episodes)
    assert list(found) == ["own"]
    assert found["own"] == bound(vae, episodes, limit=3)


@pytest.mark.parametrize("model", sorted(set(MODELS) - {"kpp", "kpp-paper"}))
def test_a_rival_trains_resumes_evaluates_and_compares(
    tmp_path: Path, small_run: RunConfig, mnist_root: Path, model: ModelName, capsys
):
    run, pieces = tmp_path / "run", tmp_path / "pieces"
    flags = ["--preset", "mnist", "--model", model, "--data-root", str(mnist_root)]
    flags += ["--encoder.width", "8", "--encoder.blocks", "[1,1,1,1]", "--decoder.base", "16"]
    flags += ["--memory.size", "12", "--memory.block", "6", "--memory.base", "16"]
    flags += ["--readout.size", "5", "--readout.hidden", "16", "--readout.prior-width", "8"]
    flags += ["--keys.hidden", "16", "--rows.count", "6", "--rows.width", "10"]
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
