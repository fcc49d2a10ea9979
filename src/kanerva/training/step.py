"""One training step: forward, backward, clip, update, average.

A step whose loss or gradient is not finite changes nothing. There are three forms, which compute
the same:

    eager      plain PyTorch, operation by operation: the reference for the other two
    compiled   forward and backward as fused kernels (torch.compile), feature maps channels-last
    captured   compiled, and replayed as two CUDA graphs, before and after the gradients are
               complete: nothing waits for Python

A step never waits for the device. Rate, counts and figures stay on it; `look` fetches them.
"""

import copy
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.utils._triton import has_triton

from kanerva.config import RunConfig
from kanerva.errors import UserError
from kanerva.models import build
from kanerva.models.base import MemoryModel
from kanerva.models.terms import ElboTerms
from kanerva.seeding import Share, derive_seed
from kanerva.shapes import Episode
from kanerva.training.devices import average_over_processes
from kanerva.training.optim import make_optimiser, set_rate, update_average

Form = Literal["eager", "compiled", "captured"]
WARM = 3  # steps before a capture, in which libraries choose kernels and buffers are allocated


@dataclass(frozen=True)
class StepResult:
    """Figures of a step, in nats, averaged over the images of all processes; and skipped steps."""

    nll: float
    recon: float
    kl_z: float
    kl_y: float
    grad_norm: float
    skipped: int  # steps so far whose loss or gradient was not finite: they changed nothing
    streak: int  # how many of the last steps in a row were skipped


def form_of(execution: str, device: torch.device) -> Form:
    """Resolve `auto` to the fastest form on this device; refuse one that cannot run on it."""
    if execution == "auto":
        return "captured" if device.type == "cuda" and has_triton() else "eager"
    if execution == "captured" and device.type != "cuda":
        raise UserError("--execution captured is a CUDA graph: on a CPU use eager or compiled")
    if execution not in ("eager", "compiled", "captured"):
        raise UserError(f"unknown execution {execution!r}: choose eager, compiled or captured")
    return execution


@dataclass(frozen=True)
class Parts:
    """What a step works on, on its device. `average` is the moving average of the weights, if the
    config asks for one."""

    model: MemoryModel
    wrapped: nn.Module  # the model as a step calls it: compiled, distributed over processes
    average: MemoryModel | None
    optimizer: torch.optim.Optimizer


def assemble(
    config: RunConfig,
    fabric: Fabric,
    form: Form,
    images: Float[Tensor, "N C H W"] | None = None,
) -> Parts:
    """Build the model from the run's seed, its weight average and its optimiser.

    A new run passes training `images` to `fit_to_data`, before the weights are copied.
    """
    torch.manual_seed(derive_seed(config.seed, "weights"))
    model = build(config.model).to(fabric.device)
    if images is not None:
        model.fit_to_data(images)
    if form != "eager":
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    average = copy.deepcopy(model).eval() if config.optim.ema else None
    module: nn.Module = model
    alone = form == "captured" or fabric.world_size == 1
    if form != "eager":
        # `fallback_random`: the same noise as eager, so that the forms agree. One graph, because a
        # graph break would be slow. Except for a model that writes sequentially: its loop stays
        # eager between two graphs.
        module = torch.compile(  # pyright: ignore[reportAssignmentType]
            model,
            fullgraph=alone and not model.writes_sequentially,
            dynamic=False,
            options={"fallback_random": True},
        )
    wrapped = module
    if form != "captured":  # captured averages gradients itself, between its two graphs
        wrapped = fabric.setup_module(module)
    return Parts(model, wrapped, average, make_optimiser(config.optim, model))


class Step:
    """A training step on a model, its optimiser and its weight average."""

    def __init__(
        self, fabric: Fabric, parts: Parts, *, clip: float, form: Form, kl_weight: float = 1.0
    ) -> None:
        self.fabric, self.clip, self.kl_weight = fabric, clip, kl_weight
        self.form: Form = form
        self.model, self.wrapped = parts.model, parts.wrapped
        self.average, self.optimizer = parts.average, parts.optimizer
        self.apart = form == "captured" and fabric.world_size > 1
        model = parts.model
        self.parameters = list(model.parameters())
        self.buffers: list[Tensor] = list(model.buffers())
        self.before: list[Tensor] = []  # buffers before the forward pass, which changes them
        self.share = torch.zeros((), device=fabric.device)  # weight of the new in the average
        self.seen = torch.zeros(4, device=fabric.device)  # loss and its three terms
        self.figures = torch.zeros(7, device=fabric.device)
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.side: torch.cuda.Stream | None = None  # stream of the warm-up steps before a capture
        self.taken = 0
        rank, world = fabric.global_rank, fabric.world_size
        self.noise = Share(rank, world) if world > 1 else None

    def __call__(self, episode: Episode, *, seed: int, lr: float, decay: float) -> None:
        """Take one step on this process's episodes. `decay` is that of the weight average."""
        set_rate(self.optimizer, lr)
        self.share.fill_(1 - decay)
        torch.manual_seed(seed)
        if self.form != "captured":
            self.once(episode)
        elif self.taken < WARM:  # warm up on a side stream, as CUDA graphs require
            self.side = self.side or torch.cuda.Stream()
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                self.once(episode)
            torch.cuda.synchronize()
        else:
            self._replay(episode, seed)
        self.taken += 1

    def once(self, episode: Episode) -> None:
        """Run the step without a CUDA graph."""
        self._gradients(episode)
        if self.apart:
            self._share_gradients()
        self._update()
        self.optimizer.zero_grad(set_to_none=True)

    def forward(self, episode: Episode) -> tuple[ElboTerms, Tensor]:
        """Return the bound of a batch and the objective: its negative mean, with weighted KL terms,
        plus the model's auxiliary loss."""
        with self.fabric.autocast():
            outputs: dict[str, Tensor] = self.wrapped(episode, self.noise)
        auxiliary = outputs.pop("auxiliary", None)
        terms = ElboTerms(**outputs)
        loss = terms.weighted_loss(self.kl_weight)
        return terms, loss if auxiliary is None else loss + auxiliary

    def _gradients(self, episode: Episode) -> None:
        self.before = [buffer.clone() for buffer in self.buffers]
        terms, objective = self.forward(episode)
        self.fabric.backward(objective)
        with torch.no_grad():
            means = [-terms.log_likelihood.mean(), terms.readout_kl.mean(), terms.key_kl.mean()]
            self.seen.copy_(torch.stack([terms.loss, *means]))
        if not self.apart:
            average_over_processes(self.fabric, self.seen)

    def _share_gradients(self) -> None:
        """Average gradients and figures over processes, in one message."""
        tensors = [p.grad for p in self.parameters if p.grad is not None] + [self.seen]
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        average_over_processes(self.fabric, flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        views = [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
        torch._foreach_copy_(tensors, views)

    @torch.no_grad()
    def _update(self) -> None:
        """Clip, step the optimiser and update the average; if not finite, change nothing."""
        grad_norm = nn.utils.clip_grad_norm_(self.parameters, self.clip)
        bad = ~(self.seen[0].isfinite() & grad_norm.isfinite())  # the same in every process
        self.optimizer.found_inf = bad.float()  # pyright: ignore
        self.optimizer.step()
        for buffer, old in zip(self.buffers, self.before, strict=True):
            buffer.copy_(torch.where(bad, old, buffer))
        if self.average is not None:
            update_average(self.average, self.model, self.share * ~bad)
        skipped, streak = self.figures[5] + bad, (self.figures[6] + 1) * bad
        self.figures.copy_(torch.cat([self.seen, torch.stack([grad_norm, skipped, streak])]))

    def _replay(self, episode: Episode, seed: int) -> None:
        """Run the step as two CUDA graphs, captured at the first call.

        The first ends with the gradients, which several processes then average; the second updates.
        A capture runs nothing.
        """
        if not self.graphs:
            self.episode = episode.clone()
            self.graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
            # With several processes another thread may watch over them: do not capture it.
            mode = "thread_local" if self.apart else "global"
            with torch.cuda.graph(self.graphs[0], capture_error_mode=mode):
                self._gradients(self.episode)
            with torch.cuda.graph(self.graphs[1], capture_error_mode=mode):
                self._update()
            torch.manual_seed(seed)  # a replay uses the generator's state at that time
        self.episode.copy_(episode)
        self.graphs[0].replay()
        if self.apart:
            self._share_gradients()
        self.graphs[1].replay()

    def look(self) -> StepResult:
        """Wait for the last step and return its figures."""
        nll, recon, kl_z, kl_y, grad_norm, skipped, streak = self.figures.tolist()
        return StepResult(nll, recon, kl_z, kl_y, grad_norm, int(skipped), int(streak))

    def carry_on(self, skipped: int) -> None:
        """Continue the count of skipped steps of a resumed run."""
        self.figures[5] = skipped
