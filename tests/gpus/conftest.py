from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpus.support_nvml import fake_library


@pytest.fixture(scope="session")
def library_directory() -> Iterator[Path]:
    """The fake libnvidia-ml.so.1, compiled once for all tests of a worker."""
    with fake_library() as directory:
        yield directory
