"""Fused GPU kernels. On other devices plain PyTorch operations compute the same numbers."""

try:
    import triton as triton  # pyright: ignore[reportMissingImports]
    from torch.library import triton_op as triton_op  # torch 2.6
except ImportError:
    AVAILABLE = False
else:
    AVAILABLE = True
