"""What these tests change for all is changed back."""

from collections.abc import Iterator

import pytest

from kanerva.models import loading
from kanerva.store import index


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    shelf, exact = loading.PRETRAINED, index.EXACT
    yield
    loading.PRETRAINED, index.EXACT = shelf, exact
