"""gpu-manager's extra-config file."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpushare_agent.isolation.device_nodes import read_extra_devices
from gpushare_agent.model.errors import StartupError


def test_device_nodes_are_read_in_order(tmp_path: Path) -> None:
    """Doubles once; no file, none."""
    path = tmp_path / "extra.json"
    path.write_text('{"default": {"devices": ["/dev/null", "/dev/zero", "/dev/null"]}}')
    assert read_extra_devices(path) == ("/dev/null", "/dev/zero")
    assert read_extra_devices(None) == ()
    path.write_text('{"default": {}}')
    assert read_extra_devices(path) == ()


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"default": 5}', '{"default": {"devices": "x"}}', '{"default": {"devices": ["/etc/passwd"]}}',
     '{"default": {"devices": ["/dev/../etc"]}}', '{"default": {"devices": [5]}}', "[" * 100_000],
)  # fmt: skip
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    """Paths outside /dev are bad too."""
    path = tmp_path / "extra.json"
    path.write_text(text)
    with pytest.raises(StartupError, match=r"extra\.json"):
        read_extra_devices(path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    """It was asked for."""
    with pytest.raises(StartupError, match="none"):
        read_extra_devices(tmp_path / "none")
