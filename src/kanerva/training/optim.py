"""LARS around Adam (App. E), or AdamW; which parameters decay; an average of the weights."""

import torch
from torch import Tensor, nn

from kanerva.config import OptimConfig


class LarsAdam(torch.optim.Optimizer):
    """Adam's step, resized for each weight matrix to a share of that matrix's norm.

        u = m / (sqrt(v) + eps) + weight_decay * w          (m, v bias-corrected)
        w <- w - lr * |w| / |u| * u      in groups with `adapt`, else  w <- w - lr * u

    LARS (You et al. 2017) rescales the step of each layer. Rescaling the *gradient* before Adam, as
    some LARS wrappers do, changes nothing, because Adam divides by its size again; so the ratio is
    applied to Adam's step, as LAMB does. The paper says only "LARS coupled with ADAM".
    """

    def __init__(
        self,
        params: list[dict],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": True
        }  # fmt: skip
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if p not in self.state:
                    self.state[p]["step"] = torch.zeros(())
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            self._update(group, params)

    def _update(self, group: dict, params: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        grads = [p.grad for p in params if p.grad is not None]
        states = [self.state[p] for p in params]
        first, second = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
        torch._foreach_add_([s["step"] for s in states], 1)
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        counts = [s["step"].item() for s in states]
        roots = torch._foreach_sqrt(second)
        torch._foreach_div_(roots, [(1 - beta2**n) ** 0.5 for n in counts])
        torch._foreach_add_(roots, group["eps"])
        update = torch._foreach_div(first, [1 - beta1**n for n in counts])
        torch._foreach_div_(update, roots)
        if group["weight_decay"]:
            torch._foreach_add_(update, params, alpha=group["weight_decay"])
        if group["adapt"]:
            norms = torch.stack(torch._foreach_norm(params))
            sizes = torch.stack(torch._foreach_norm(update))
            ratio = torch.where((norms > 0) & (sizes > 0), norms / sizes, 1.0)
            torch._foreach_mul_(update, list(ratio.unbind()))
        torch._foreach_add_(params, update, alpha=-group["lr"])


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices and kernels decay; biases and the affine terms of norms do not (App. E)."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": matrices, "weight_decay": weight_decay, "adapt": True},
        {"params": vectors, "weight_decay": 0.0, "adapt": False},
    ]


def make_optimiser(config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser a config names."""
    groups = parameter_groups(model, config.weight_decay)
    if config.optimiser == "lars_adam":
        return LarsAdam(groups, lr=config.lr, betas=config.betas)
    for group in groups:
        del group["adapt"]
    fused = all(p.is_cuda for p in model.parameters())
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=fused)


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, decay: float) -> None:
    """average <- decay * average + (1 - decay) * model, parameters only; buffers are copied."""
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)
    for mine, theirs in zip(average.buffers(), model.buffers(), strict=True):
        mine.copy_(theirs)
