"""LARS around Adam (App. E), AdamW or Muon; which parameters decay; an average of the weights."""

import math
import warnings
from collections import defaultdict

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kanerva.config import OptimConfig


class LarsAdam(torch.optim.Optimizer):
    """Adam's step, rescaled for each weight matrix to a fraction of that matrix's norm.

        u = m / (sqrt(v) + eps) + weight_decay * w          (m, v bias-corrected)
        w <- w - lr * |w| / |u| * u      in groups with `adapt`, else  w <- w - lr * u

    LARS (You et al. 2017) rescales the step of each layer. Rescaling the *gradient* before Adam, as
    some LARS wrappers do, changes nothing, because Adam divides by its size again; so the ratio is
    applied to Adam's step, as LAMB does. The paper says only "LARS coupled with ADAM".
    """

    def __init__(
        self,
        params: list[dict],
        lr: float | Tensor,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": True
        }  # fmt: skip
        super().__init__(params, defaults)
        self.found_inf: Tensor | None = None  # 1 skips the update, as in torch's fused optimisers

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if p not in self.state:
                    self.state[p].update(self._first_state(group, p))
            self._update(group, params, *self._gradients(params))

    def _first_state(self, group: dict, p: Tensor) -> dict[str, Tensor]:
        zeros = torch.zeros_like
        return {
            "step": torch.zeros((), device=p.device), "exp_avg": zeros(p), "exp_avg_sq": zeros(p)
        }  # fmt: skip

    def _gradients(self, params: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Gradients, and 1; or zeros and 0, if the update is to be skipped."""
        grads = [p.grad for p in params if p.grad is not None]
        keep = torch.ones((), device=params[0].device)
        if self.found_inf is not None:
            keep = keep - self.found_inf
            grads = [torch.where(keep > 0, grad, 0) for grad in grads]
        return grads, keep

    def _update(self, group: dict, params: list[Tensor], grads: list[Tensor], keep: Tensor) -> None:
        """Update a group. Nothing waits for the device: counts, rate and `found_inf` stay on it."""
        beta1, beta2 = group["betas"]
        states = [self.state[p] for p in params]
        first, second = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
        # A list: a single tensor would be converted to a number, which waits for the device.
        torch._foreach_add_([s["step"] for s in states], [keep] * len(states))
        torch._foreach_mul_(first, beta1**keep)
        torch._foreach_add_(first, grads, alpha=1 - beta1)
        torch._foreach_mul_(second, beta2**keep)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        count = torch.stack([s["step"] for s in states]).clamp(min=1)
        roots = torch._foreach_sqrt(second)
        torch._foreach_div_(roots, list((1 - beta2**count).sqrt().unbind()))
        torch._foreach_add_(roots, group["eps"])
        update = torch._foreach_div(first, list((1 - beta1**count).unbind()))
        torch._foreach_div_(update, roots)
        if group["weight_decay"]:
            torch._foreach_add_(update, params, alpha=group["weight_decay"])
        if group["adapt"]:
            norms = torch.stack(torch._foreach_norm(params))
            sizes = torch.stack(torch._foreach_norm(update))
            ratio = torch.where((norms > 0) & (sizes > 0), norms / sizes, 1.0)
            torch._foreach_mul_(update, list(ratio.unbind()))
        torch._foreach_mul_(update, keep * group["lr"])
        torch._foreach_sub_(params, update)


Matrices = Float[Tensor, "n rows columns"]
_MOMENTUM = 0.95  # of Muon
_LEAST = 16  # Muon takes weights with this many rows and columns; smaller ones take AdamW's step


class Muon(LarsAdam):
    """Muon for weight matrices (groups with `orthogonal`), AdamW for other parameters.

        m <- 0.95 m + 0.05 g,      u = orthogonalise(0.95 m + 0.05 g)
        w <- w - lr * (0.2 * sqrt(max(rows, columns)) * u + weight_decay * w)

    The step of Jordan et al. (kellerjordan.github.io/posts/muon, 2024), scaled as by Liu et al.
    (arXiv 2502.16982): its entries are about as large as those of Adam's, so rates are alike. The
    kernel of a convolution is one matrix, with a row for each output; a weight of three dimensions
    is a stack of matrices.
    `torch.optim.Muon` takes single matrices only, and reads the rate from the device at every step.
    """

    def _first_state(self, group: dict, p: Tensor) -> dict[str, Tensor]:
        if not group["orthogonal"]:
            return super()._first_state(group, p)
        return {"momentum": torch.zeros_like(p)}

    def _update(self, group: dict, params: list[Tensor], grads: list[Tensor], keep: Tensor) -> None:
        if not group["orthogonal"]:
            return super()._update(group, params, grads, keep)
        momenta = [self.state[p]["momentum"] for p in params]
        torch._foreach_mul_(momenta, 1 - (1 - _MOMENTUM) * keep)
        torch._foreach_add_(momenta, grads, alpha=1 - _MOMENTUM)
        ahead = torch._foreach_mul(momenta, _MOMENTUM)
        torch._foreach_add_(ahead, grads, alpha=1 - _MOMENTUM)
        update = orthogonalise_each(list(ahead))
        torch._foreach_add_(update, params, alpha=group["weight_decay"])
        torch._foreach_mul_(update, keep * group["lr"])
        torch._foreach_sub_(params, update)


def as_matrices(weight: Tensor) -> Matrices:
    """A weight as a stack of matrices: of one, unless it has three dimensions."""
    return weight if weight.ndim == 3 else weight.flatten(1)[None]


def orthogonalise_each(weights: list[Tensor]) -> list[Tensor]:
    """Orthogonalise weights, those of one shape together, and scale them as `Muon` says."""
    alike: dict[torch.Size, list[int]] = defaultdict(list)
    stacks = [as_matrices(weight) for weight in weights]
    for i, stack in enumerate(stacks):
        alike[stack.shape[1:]].append(i)
    found = list(weights)
    for shape, chosen in alike.items():
        scaled = 0.2 * math.sqrt(max(shape)) * orthogonalise(torch.cat([stacks[i] for i in chosen]))
        parts = scaled.split([len(stacks[i]) for i in chosen])
        for i, part in zip(chosen, parts, strict=True):
            found[i] = part.reshape(weights[i].shape)
    return found


def orthogonalise(matrices: Matrices) -> Matrices:
    """Move all singular values near 1 (0.7 to 1.2), by five steps of a Newton-Schulz iteration.

    In bfloat16 on a GPU, where that is many times faster; precision does not matter here.
    """
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.mT
        factor = torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, factor, x, beta=3.4445)
    return (x.mT if tall else x).to(matrices.dtype)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices and kernels decay; biases and the affine terms of norms do not (App. E)."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": matrices, "weight_decay": weight_decay, "adapt": True},
        {"params": vectors, "weight_decay": 0.0, "adapt": False},
    ]


def muon_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Weights that Muon orthogonalises, other matrices, and vectors."""
    matrices, vectors = parameter_groups(model, weight_decay)
    weights = {id(p) for name, p in model.named_parameters() if name.endswith("weight")}
    chosen: list[Tensor] = []
    others: list[Tensor] = []
    for p in matrices["params"]:
        large = id(p) in weights and min(as_matrices(p).shape[1:]) >= _LEAST
        (chosen if large else others).append(p)
    plain = {"adapt": False, "orthogonal": False}
    return [
        {**matrices, **plain, "params": chosen, "orthogonal": True},
        {**matrices, **plain, "params": others},
        {**vectors, **plain},
    ]


def make_optimiser(config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser a config names. Its learning rate is a tensor on the weights' device.

    All optimisers skip the update if their `found_inf` is 1.
    """
    split = muon_groups if config.optimiser == "muon" else parameter_groups
    groups = split(model, config.weight_decay)
    device = next(model.parameters()).device
    for group in groups:
        group["lr"] = torch.tensor(config.lr, device=device)
    if config.optimiser != "adamw":
        return (Muon if config.optimiser == "muon" else LarsAdam)(groups, lr=config.lr)
    for group in groups:
        del group["adapt"]
    on_gpu = device.type == "cuda"  # capturable: the step can be part of a CUDA graph
    warnings.filterwarnings("ignore", message=".*constructed with capturable=True.*")
    return torch.optim.AdamW(groups, fused=True, capturable=on_gpu)


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate in place, on the device."""
    for group in optimizer.param_groups:
        group["lr"].fill_(lr)


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, share: float | Tensor) -> None:
    """average <- average + share * (model - average), parameters only; buffers are copied."""
    mine: list[Tensor] = list(average.parameters())
    theirs: list[Tensor] = list(model.parameters())
    apart = torch._foreach_sub(theirs, mine)
    torch._foreach_mul_(apart, share)
    torch._foreach_add_(mine, apart)
    if buffers := list(average.buffers()):
        torch._foreach_copy_(buffers, list(model.buffers()))
