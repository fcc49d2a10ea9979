"""Decode uploaded image files in a separate process, within limits.

A malicious file can make a decoder slow or exhaust the memory. The process has a few seconds and a
memory limit; it returns bytes of one shape, or a line that says what is wrong.
"""

import subprocess
import sys

from kanerva.data.picture_files import Unreadable, fitted, open_picture
from kanerva.errors import UserError

MOST_BYTES = 12_000_000
MOST_PIXELS = 24_000_000
SECONDS = 5
_ADDRESS_SPACE = 1_500_000_000  # bytes


def decode_file(content: bytes, shape: tuple[int, int, int]) -> bytes:
    """Decode an image file to C x H x W bytes, centre-cropped and resized."""
    if len(content) > MOST_BYTES:
        raise UserError(f"a file has at most {MOST_BYTES // 1_000_000} MB")
    words = [sys.executable, "-m", "kanerva.explore.upload", *map(str, shape)]
    try:
        done = subprocess.run(words, input=content, capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"the file took more than {SECONDS} seconds to read") from error
    if done.returncode != 0 or len(done.stdout) != shape[0] * shape[1] * shape[2]:
        reason = done.stderr.decode(errors="replace").strip() if done.returncode == 2 else ""
        raise UserError(f"cannot read the file: {reason or 'not an image that can be decoded'}")
    return done.stdout


def main(words: list[str]) -> int:
    """Read a file from standard input, write its pixels to standard output."""
    limit_memory()
    channels, height, width = map(int, words)
    try:
        picture = open_picture(sys.stdin.buffer.read(), channels, most=MOST_PIXELS)
        sys.stdout.buffer.write(fitted(picture, (height, width)).tobytes())
    except (Unreadable, MemoryError) as error:
        print(str(error) or "it needs too much memory", file=sys.stderr)
        return 2
    return 0


def limit_memory() -> None:
    """Limit this process's memory, if the system can."""
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
