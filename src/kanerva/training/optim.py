"""LARS around Adam (App. E), or AdamW; which parameters decay; an average of the weights."""

import warnings

import torch
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
                    self.state[p]["step"] = torch.zeros((), device=p.device)
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            self._update(group, params)

    def _update(self, group: dict, params: list[Tensor]) -> None:
        """Update a group. Nothing waits for the device: counts, rate and `found_inf` stay on it."""
        beta1, beta2 = group["betas"]
        grads = [p.grad for p in params if p.grad is not None]
        keep = torch.ones((), device=params[0].device)
        if self.found_inf is not None:
            keep = keep - self.found_inf
            grads = [torch.where(keep > 0, grad, 0) for grad in grads]
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


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices and kernels decay; biases and the affine terms of norms do not (App. E)."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": matrices, "weight_decay": weight_decay, "adapt": True},
        {"params": vectors, "weight_decay": 0.0, "adapt": False},
    ]


def make_optimiser(config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser a config names. Its learning rate is a tensor on the weights' device.

    Both optimisers skip the update if their `found_inf` is 1.
    """
    groups = parameter_groups(model, config.weight_decay)
    device = next(model.parameters()).device
    for group in groups:
        group["lr"] = torch.tensor(config.lr, device=device)
    if config.optimiser == "lars_adam":
        return LarsAdam(groups, lr=config.lr)
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
