"""The terms of a bound, in nats, for each image of each episode."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kanerva.shapes import PerImage


@dataclass(frozen=True)
class ElboTerms:
    """The three terms of L_T (Eq. 4) in nats for each image of each episode."""

    log_likelihood: PerImage  # ln p(x|z, M, y)
    readout_kl: PerImage  # KL[q(z|.) || p(z|M, y)]
    key_kl: PerImage  # KL[q(y|.) || p(y)], all K heads

    def __repr__(self) -> str:
        terms = {"nll_nats": self.nll_nats} | self.by_name()
        means = ", ".join(f"{name} {float(t.detach().mean()):.2f}" for name, t in terms.items())
        return f"ElboTerms({means}; means of {self.key_kl.numel()} images)"

    @property
    def elbo(self) -> PerImage:
        """A lower bound on ln p(x|M): minus `nll_nats`."""
        return self.log_likelihood - self.readout_kl - self.key_kl

    @property
    def nll_nats(self) -> PerImage:
        """An upper bound on -ln p(x|M), in nats for each image: lower is better."""
        return -self.elbo

    @property
    def loss(self) -> Float[Tensor, ""]:
        """What training minimises: the mean of `nll_nats`."""
        return self.nll_nats.mean()

    def weighted_loss(self, kl_weight: float) -> Float[Tensor, ""]:
        """`loss` with both KL terms multiplied by a weight: a bound only if the weight is one."""
        if kl_weight == 1:
            return self.loss
        return (kl_weight * (self.readout_kl + self.key_kl) - self.log_likelihood).mean()

    def by_name(self) -> dict[str, Tensor]:
        """The three terms as a dict (torch.compile cannot trace `vars`)."""
        return {
            "log_likelihood": self.log_likelihood,
            "readout_kl": self.readout_kl,
            "key_kl": self.key_kl,
        }

    def view(self, shape: tuple[int, ...]) -> "ElboTerms":
        """Reshape every term."""
        return ElboTerms(*[term.reshape(shape) for term in self.by_name().values()])

    def where(self, chosen: Bool[Tensor, "..."], other: "ElboTerms") -> "ElboTerms":
        """These terms where `chosen`, the `other` ones elsewhere."""
        pairs = zip(self.by_name().values(), other.by_name().values(), strict=True)
        return ElboTerms(*[torch.where(chosen, *pair) for pair in pairs])

    @classmethod
    def cat(cls, parts: "list[ElboTerms]") -> "ElboTerms":
        """The terms of several batches as those of one."""
        return cls(*map(torch.cat, zip(*[part.by_name().values() for part in parts], strict=True)))

    @classmethod
    def average(cls, cases: "list[ElboTerms]", log_q: Float[Tensor, "n B T"]) -> "ElboTerms":
        """The bound if q chooses one of several cases: the average of their terms, and KL[q || p]
        of the case. The `key_kl` of a case includes -ln p(case)."""
        averages = []
        for name in cases[0].by_name():
            terms = torch.stack([case.by_name()[name] for case in cases])
            terms = terms + log_q if name == "key_kl" else terms
            averages.append((log_q.exp() * terms).sum(dim=0))
        return cls(*averages)

    def __getitem__(self, episode: int) -> "ElboTerms":
        """One episode's terms out of a batch."""
        return ElboTerms(*[term[episode] for term in self.by_name().values()])


@dataclass(frozen=True)
class JointDensity:
    """ln p(x, z, y | M) of each image, factor by factor: the generative side alone."""

    log_likelihood: PerImage
    readout_log_prior: PerImage
    key_log_prior: PerImage

    @property
    def total(self) -> PerImage:
        return self.log_likelihood + self.readout_log_prior + self.key_log_prior
