"""A random matrix, the memory of the Kanerva machines (Wu et al. 2018a, 2018b).

M (K rows of C numbers) is matrix normal: mean R, covariance U between rows, none between columns.
Writing a code z at an address w is Bayes' rule for z = w M + noise:

    delta = z - w R,   c = w U,   s = w U w' + sigma^2
    R <- R + c' delta / s,   U <- U - c' c / s                       (`updated`)

Writing a whole episode at known addresses gives the posterior of a linear regression, which does
not depend on the order (`posterior`).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kanerva.config import MatrixConfig
from kanerva.seeding import Noise, normal

Rows = Float[Tensor, "B rows width"]  # M, and R
Square = Float[Tensor, "B rows rows"]
Addresses = Float[Tensor, "B T rows"]  # w
Codes = Float[Tensor, "B T width"]  # z

_SMALLEST_VARIANCE = 1e-3  # ours: sigma and the prior deviation of each row stay above 0.03


def cholesky(matrix: Square) -> Square:
    """The lower Cholesky factor, after adding about the rounding error to the diagonal.

    A failure gives numbers that are not finite instead of an exception, which would have to
    synchronise the device. Training skips such a step.
    """
    diagonal = matrix.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None]
    jitter = 100 * torch.finfo(matrix.dtype).eps * diagonal
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return torch.linalg.cholesky_ex(matrix + jitter * identity).L


class Solve(torch.autograd.Function):
    """x = A^-1 b, A positive definite. With ' for gradients, the implicit function theorem gives

        b' = A^-1 x',   A' = -b' x^T

    which takes two triangular solves with the saved factor. Differentiating through a Cholesky
    factorisation would take six."""

    @staticmethod
    def forward(ctx, matrix: Square, right: Tensor) -> Tensor:  # noqa: ANN001
        root = cholesky(matrix)
        solution = _solve_with_root(root, right)
        ctx.save_for_backward(root, solution)
        return solution

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN001
        root, solution = ctx.saved_tensors
        right = _solve_with_root(root, grad_outputs[0])
        return -right @ solution.mT, right


def _solve_with_root(root: Square, right: Tensor) -> Tensor:
    half = torch.linalg.solve_triangular(root, right, upper=False)
    return torch.linalg.solve_triangular(root.mT, half, upper=True)


def least_squares(memory: Rows, codes: Codes, ridge: Float[Tensor, ""]) -> Addresses:
    """The address at which a memory reads most like a code (2018b):

        w = argmin |z - w M|^2 + ridge |w|^2 = (M M' + ridge I)^-1 M z

    by Cholesky, as in the printed equation. The authors' code passes M M' to a ridge solver, which
    squares it a second time.
    """
    identity = torch.eye(memory.shape[-2], dtype=memory.dtype, device=memory.device)
    squares = memory @ memory.mT + ridge * identity
    return Solve.apply(squares, memory @ codes.mT).mT  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class MatrixNormal:
    """MN(mean, U, I) for each episode, with U = root root'. The root is upper triangular."""

    mean: Rows
    root: Square

    @property
    def covariance(self) -> Square:
        """U, symmetric and positive definite by construction."""
        return self.root @ self.root.mT

    @property
    def log_det(self) -> Float[Tensor, "B"]:  # noqa: F821
        """ln |U|."""
        return 2 * self.root.diagonal(dim1=-2, dim2=-1).log().sum(dim=-1)

    def sample(self, generator: Noise = None) -> Rows:
        """Sample one memory for each episode: R + root noise."""
        noise = normal(tuple(self.mean.shape), generator, self.mean.device)
        return self.mean + self.root @ noise.to(self.mean.dtype)

    def kl(self, prior: "MatrixNormal") -> Float[Tensor, "B"]:  # noqa: F821
        """KL[self || prior] of whole memories, in nats:

        1/2 [C tr(U0^-1 U) + tr((R-R0)' U0^-1 (R-R0)) - C K + C ln |U0|/|U|]

        between the states after and before an episode, including off-diagonal terms.
        """
        rows, width = self.mean.shape[-2:]

        def size(columns: Tensor) -> Tensor:
            """|U0^-1/2 columns|^2."""
            whitened = torch.linalg.solve_triangular(prior.root, columns, upper=True)
            return whitened.square().sum(dim=(-2, -1))

        spread = width * (size(self.root) - rows + prior.log_det - self.log_det)
        return 0.5 * (spread + size(self.mean - prior.mean))


def posterior(
    prior: MatrixNormal, addresses: Addresses, codes: Codes, variance: Float[Tensor, ""]
) -> MatrixNormal:
    """q(M | W, Z): all codes of an episode, written at once.

        U = (U0^-1 + W'W / sigma^2)^-1,   R = R0 + U W' (Z - W R0) / sigma^2

    It is computed in units of the prior, where U0 = I. The matrix to factor is then I + G' G, whose
    eigenvalues stay positive under rounding.
    """
    scaled = addresses @ prior.root  # (B, T, K): W in units of the prior
    identity = torch.eye(scaled.shape[-1], dtype=scaled.dtype, device=scaled.device)
    lower = cholesky(identity + scaled.mT @ scaled / variance)
    root = prior.root @ torch.linalg.solve_triangular(
        lower.mT, identity.expand_as(lower), upper=True
    )
    surprise = codes - addresses @ prior.mean
    mean = prior.mean + root @ (root.mT @ (addresses.mT @ surprise)) / variance
    return MatrixNormal(mean, root)


def updated(
    mean: Rows,
    covariance: Square,
    address: Float[Tensor, "B rows"],
    code: Float[Tensor, "B width"],
    variance: Float[Tensor, ""],
) -> tuple[Rows, Square]:
    """R and U after writing one code: the papers' update, as printed."""
    w = address[:, None]  # (B, 1, K)
    delta = code[:, None] - w @ mean
    shared = w @ covariance
    total = shared @ w.mT + variance
    gain = shared.mT / total  # (B, K, 1)
    return mean + gain @ delta, covariance - gain @ shared


def solve_and_write(
    mean: Rows, covariance: Square, code: Float[Tensor, "B width"], variance: Float[Tensor, ""]
) -> tuple[Rows, Square, Float[Tensor, "B rows"]]:
    """Solve for the address of a code, and write it there; return R, U and the address."""
    address = least_squares(mean, code[:, None], variance)[:, 0]
    return *updated(mean, covariance, address, code, variance), address


# Compiling the loop, unrolled over T, would take minutes. Only `solve_and_write` is compiled.
@torch.compiler.disable(recursive=False)
def solve_addresses(prior: MatrixNormal, codes: Codes, variance: Float[Tensor, ""]) -> Addresses:
    """The addresses at which `dkm` writes. As in the authors' code, each is solved for in the
    memory that the codes before it were written to, so the order matters.
    """
    mean, covariance, found = prior.mean.contiguous(), prior.covariance, []
    for code in codes.unbind(dim=1):
        mean, covariance, address = solve_and_write(mean, covariance, code.contiguous(), variance)
        found.append(address)
    return torch.stack(found, dim=1)


class MatrixPrior(nn.Module):
    """p(M) and sigma, learned. R0 is initialised from N(0, 1), as in the authors' code. U0 is
    diagonal, with one variance for each row (ours: their code has one for all), initially 1."""

    def __init__(self, config: MatrixConfig) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.randn(config.count, config.width))
        self.log_variance = nn.Parameter(torch.zeros(config.count))
        self.log_noise = nn.Parameter(torch.tensor(config.noise).log())

    @property
    def noise_variance(self) -> Float[Tensor, ""]:
        """sigma^2, the variance of a code around w M."""
        return (2 * self.log_noise).exp() + _SMALLEST_VARIANCE

    def forward(self, batch: int) -> MatrixNormal:
        """p(M), expanded to a batch of episodes."""
        deviation = (self.log_variance.exp() + _SMALLEST_VARIANCE).sqrt()
        return MatrixNormal(
            self.mean.expand(batch, -1, -1), torch.diag(deviation).expand(batch, -1, -1)
        )
