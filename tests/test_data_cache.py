"""Arrays are built once, kept whole, and built again when the file is not sound."""

from pathlib import Path

import numpy as np
import pytest

from kanerva.data.cache import cache_dir, cached_arrays


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KANERVA_CACHE", str(tmp_path))
    return tmp_path


class Builder:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.calls += 1
        return {"values": np.arange(1000), "names": np.array(["a", "b"])}


def test_the_second_call_reads_and_another_key_builds(private_cache: Path):
    build = Builder()
    first, second = (cached_arrays("squares", "v1", build) for _ in range(2))
    assert build.calls == 1 and cache_dir() == private_cache
    assert all(np.array_equal(first[name], second[name]) for name in first)
    cached_arrays("squares", "v2", build)
    assert build.calls == 2


@pytest.mark.parametrize("damage", [lambda raw: raw[:500], lambda raw: b"", lambda raw: raw[::-1]])
def test_a_damaged_file_is_built_again_and_replaced(private_cache: Path, damage):
    build = Builder()
    cached_arrays("squares", "v1", build)
    (path,) = (private_cache / "built").iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert np.array_equal(cached_arrays("squares", "v1", build)["values"], np.arange(1000))
    assert build.calls == 2
    cached_arrays("squares", "v1", build)
    assert build.calls == 2


def test_one_flipped_byte_is_noticed(private_cache: Path):
    build = Builder()
    cached_arrays("squares", "v1", build)
    (path,) = (private_cache / "built").iterdir()
    raw = bytearray(path.read_bytes())
    raw[2000] ^= 1
    path.write_bytes(raw)
    cached_arrays("squares", "v1", build)
    assert build.calls == 2


def test_a_file_that_lost_an_array_is_built_again(private_cache: Path):
    build = Builder()
    cached_arrays("squares", "v1", build)
    (path,) = (private_cache / "built").iterdir()
    arrays = dict(np.load(path))
    del arrays["values"]
    np.savez(path, allow_pickle=False, **arrays)
    assert len(cached_arrays("squares", "v1", build)["values"]) == 1000


def test_a_cache_that_cannot_be_written_is_done_without(
    private_cache: Path, monkeypatch: pytest.MonkeyPatch
):
    (private_cache / "file").write_text("in the way")
    monkeypatch.setenv("KANERVA_CACHE", str(private_cache / "file"))
    with pytest.warns(UserWarning, match="squares is not cached"):
        arrays = cached_arrays("squares", "v1", Builder())
    assert len(arrays["values"]) == 1000
