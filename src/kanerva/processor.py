"""What the environment tells libraries that torch loads: set on import, before torch is loaded.

Where AMX is virtualised, a bfloat16 product on a CPU can stop the process with SIGILL. oneDNN reads
`ONEDNN_MAX_CPU_ISA` once, at its first use.

OpenMP's threads spin while they wait for each other. Where another process keeps a processor busy,
each of the thousands of small products of a step then waits for a thread that is not running, and a
step takes ten times as long. Waiting passively costs a few microseconds a product instead. The
runtimes read `OMP_WAIT_POLICY` when they are loaded.

A value that is already there is the user's, and stays.
"""

import os

VARIABLE, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
# Instruction sets of oneDNN up to and including bfloat16 without AMX. Anything else, `ALL` and
# `DEFAULT` too, admits it.
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
_WAITS = (WAIT, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # each says how long to spin


def wait_passively() -> None:
    """Let threads sleep while they wait, unless the environment says how they wait."""
    if not any(name in os.environ for name in _WAITS):
        os.environ[WAIT] = PASSIVE
