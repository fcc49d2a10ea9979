"""Settings of the process for the libraries that torch loads: environment variables, set on import
before torch is loaded, and how the commands allocate memory.

On machines with virtualised AMX, a bfloat16 product on the CPU can kill the process with SIGILL.
oneDNN reads `ONEDNN_MAX_CPU_ISA` once, at its first use.

OpenMP's threads spin while they wait for each other. If another process keeps a core busy, each of
the thousands of small products of a step waits for a thread that is not running, and a step takes
ten times as long. Waiting passively costs only a few microseconds per product. The runtimes read
`OMP_WAIT_POLICY` when they are loaded.

glibc returns a large tensor to the system when it is freed. The next one gets new pages, and each
page is faulted in and zeroed. On a CPU this takes up to two thirds of a training step. The commands
keep freed memory instead. The library does not: its process belongs to the user.

A value that the user has set is kept.
"""

import ctypes
import os

VARIABLE, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
# oneDNN's instruction sets without AMX, up to bfloat16. Any other value, such as `ALL` or
# `DEFAULT`, allows AMX.
_BELOW_AMX = (
    "SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2",
    "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16",
)  # fmt: skip


def avoid_amx() -> None:
    """Cap the instruction set, unless the environment names one."""
    os.environ.setdefault(VARIABLE, WITHOUT_AMX)


def admits_amx() -> bool:
    """Whether the environment lets oneDNN use AMX."""
    return os.environ.get(VARIABLE, "ALL").upper() not in _BELOW_AMX


WAIT, PASSIVE = "OMP_WAIT_POLICY", "PASSIVE"
_WAITS = (WAIT, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # each sets how long threads spin


def wait_passively() -> None:
    """Let threads sleep while they wait, unless the environment says how they wait."""
    if not any(name in os.environ for name in _WAITS):
        os.environ[WAIT] = PASSIVE


_ALLOCATION = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # mallopt's options, in malloc.h


def keep_memory() -> bool:
    """Keep freed memory for later tensors, unless the environment says how memory is allocated.
    Return whether this was done: only glibc has these options."""
    tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if tuned or any(name in os.environ for name in _ALLOCATION) or os.name != "posix":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    never, none = -1, 0  # return memory from the heap; place tensors outside of it
    return bool(mallopt(_TRIM_THRESHOLD, never) and mallopt(_MMAP_MAX, none))
