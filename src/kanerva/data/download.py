"""Download published files once, and check them against the MD5 of their publisher's copy."""

from dataclasses import dataclass
from pathlib import Path

from kanerva.errors import UserError
from kanerva.plain_files import file_digest


@dataclass(frozen=True)
class RemoteFile:
    """A published file: its URL, the MD5 of its publisher's copy, and its size in bytes."""

    name: str
    url: str
    md5: str
    size: int = 0


def published(base: str, files: dict[str, tuple[str, int]]) -> tuple[RemoteFile, ...]:
    """Files in one folder of a server, from name to MD5 and size."""
    return tuple(RemoteFile(name, base + name, *rest) for name, rest in files.items())


def check_published(files: tuple[RemoteFile, ...], place: Path) -> None:
    """Refuse a file with the name and size of a published one but other content."""
    for file in files:
        path = place / file.name
        if path.is_file() and path.stat().st_size == file.size:
            _require_published(path, file)


def _require_published(path: Path, file: RemoteFile) -> None:
    if (found := file_digest(path, "md5")) != file.md5:
        raise UserError(
            f"{path} is not the published file (md5 {found}, not {file.md5}): "
            "move it away and fetch again"
        )


def download(files: tuple[RemoteFile, ...], place: Path) -> list[Path]:
    """Download files to `place`, except those that are already there and correct."""
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{place}: cannot be made ({error.strerror})") from error
    return [_download_file(file, place) for file in files]


def _download_file(file: RemoteFile, place: Path) -> Path:
    path = place / file.name
    if path.exists():
        _require_published(path, file)
        return path
    try:
        import pooch
    except ImportError as error:
        raise UserError("downloads need pooch: pip install 'kanerva[train]'") from error
    try:
        pooch.retrieve(file.url, f"md5:{file.md5}", file.name, place, progressbar=True)
    except Exception as error:  # anything that the network, the server or the disk raised
        unreached = "Connection" in type(error).__name__ or "Timeout" in type(error).__name__
        reason = "no connection" if unreached else " ".join(str(error).split())[:200]
        raise UserError(
            f"could not fetch {file.url}: {reason}: try again, or put the file in {place}"
        ) from error
    return path
