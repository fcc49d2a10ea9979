"""Random streams by name: each draw is a function of (seed, names), never of what ran before it."""

import hashlib

import torch


def derive_seed(*names: int | str) -> int:
    """A 63-bit seed from a path of names, as in `derive_seed(seed, "binarize", epoch)`."""
    digest = hashlib.sha256("/".join(str(name) for name in names).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def stream(*names: int | str, device: str | torch.device = "cpu") -> torch.Generator:
    """A generator of its own for one purpose."""
    return torch.Generator(device=device).manual_seed(derive_seed(*names))
