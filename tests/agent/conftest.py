from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpus.conftest import library_directory as library_directory  # noqa: PLC0414 - a fixture of these tests, too


@pytest.fixture
def script(library_directory: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the fake libnvidia-ml.so.1 of programs that are started now shows: `becomes` writes it."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library_directory))
    monkeypatch.setenv("FAKE_NVML_SCRIPT", str(short_dir / "script"))
    return short_dir / "script"
