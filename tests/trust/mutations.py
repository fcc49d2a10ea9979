"""Every kind of file, altered at random: refused, or read as it was; nothing else where a digest
covers it, and never a traceback."""

import random
import re
import shutil
from pathlib import Path

from children import Outcome, run_cases
from corpus import Kind, fingerprint

ODD = [
    b"", b"0", b"-1", b"1e999", b"9" * 400, b"9" * 5000, b"null", b"NaN", b"[]", b"{}", b'""',
    b"[" * 3000, b'{"a":' * 3000, b"true", b"2001-99-99", b"!!int x", b"*a", b"\xff\xfe", b"\0",
    b"18446744073709551616", b"..", b"/", b"\x1b[2J", b"- " * 50,
]  # fmt: skip


def mutate(content: bytes, dice: random.Random) -> bytes:
    """One to three changes."""
    for _ in range(dice.choice((1, 1, 2, 3))):
        content = dice.choice((flip, put, cut, drop, double, insert, blank, swap, replace))(
            content, dice
        )
    return content


def flip(content: bytes, dice: random.Random) -> bytes:
    return put(content, dice, 1 << dice.randrange(8))


def put(content: bytes, dice: random.Random, bits: int = 0) -> bytes:
    if not content:
        return b"\0"
    # headers are small and matter most
    at = dice.randrange(min(len(content), dice.choice((64, 1024, 10**9))))
    changed = bytearray(content)
    changed[at] = changed[at] ^ bits if bits else dice.randrange(256)
    return bytes(changed)


def part(content: bytes, dice: random.Random) -> tuple[int, int]:
    start = dice.randrange(len(content) + 1)
    return start, min(len(content), start + dice.choice((1, 2, 4, 8, 64, 1024)))


def cut(content: bytes, dice: random.Random) -> bytes:
    return content[: dice.randrange(len(content) + 1)]


def drop(content: bytes, dice: random.Random) -> bytes:
    start, end = part(content, dice)
    return content[:start] + content[end:]


def double(content: bytes, dice: random.Random) -> bytes:
    start, end = part(content, dice)
    return content[:end] + content[start:]


def insert(content: bytes, dice: random.Random) -> bytes:
    start, _ = part(content, dice)
    return content[:start] + dice.choice((dice.randbytes(8), dice.choice(ODD))) + content[start:]


def blank(content: bytes, dice: random.Random) -> bytes:
    start, end = part(content, dice)
    return content[:start] + dice.choice((b"\0", b"\xff")) * (end - start) + content[end:]


def swap(content: bytes, dice: random.Random) -> bytes:
    (a, b), (c, d) = sorted((part(content, dice), part(content, dice)))
    return (
        content[:a] + content[c:d] + content[b:c] + content[a:b] + content[d:]
        if b <= c
        else content
    )


def replace(content: bytes, dice: random.Random) -> bytes:
    """A number or a word by something odd; of a text's beginning, or of a header."""
    words = list(re.finditer(rb"-?\d+(\.\d+)?|[a-z_]{3,}", content[:20_000]))
    if not words:
        return put(content, dice)
    chosen = dice.choice(words)
    return content[: chosen.start()] + dice.choice(ODD) + content[chosen.end() :]


def run_mutations(kinds: list[Kind], count: int, place: Path, seed: int = 0) -> list[Outcome]:
    """So many in all, dealt among the kinds."""
    originals = [fingerprint(kind.read(kind.copy_folder(place / "original"))) for kind in kinds]

    def work(case: int) -> str:
        kind = kinds[case % len(kinds)]
        dice = random.Random(f"{seed} {case}")
        folder = place / f"case-{case % 2}"  # two processes: even cases and odd ones
        file = kind.copy(folder)
        file.write_bytes(mutate(file.read_bytes(), dice))
        found = fingerprint(kind.read(folder))
        if found == originals[case % len(kinds)]:
            return "as it was"
        return "silent" if kind.sealed else "changed"

    try:
        return run_cases(work, count)
    finally:
        shutil.rmtree(place, ignore_errors=True)
