"""Keep oneDNN off AMX, before torch first uses it.

Where AMX is virtualised, a bfloat16 product on a CPU can stop the process with SIGILL. oneDNN reads
`ONEDNN_MAX_CPU_ISA` once, at its first use, so the package sets it on import. A value that is
already there is the user's, and stays.
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
