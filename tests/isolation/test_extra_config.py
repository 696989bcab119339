"""gpu-manager's extra-config file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpushare_agent.agent.delivery.device_nodes import read_extra_devices
from gpushare_agent.core.model.errors import StartupError


def test_device_nodes_are_read_in_order(tmp_path: Path) -> None:
    """Doubles once; no file, none."""
    path = tmp_path / "extra.json"
    path.write_text('{"default": {"devices": ["/dev/null", "/dev/zero", "/dev/null"]}}')
    assert read_extra_devices(path) == ("/dev/null", "/dev/zero")
    assert read_extra_devices(None) == ()


@pytest.mark.parametrize(
    "text",
    ["{}", "null", '{"default": null}', '{"default": {}}', '{"default": {"devices": null}}', '{"default": {"devices": []}}'],
)  # fmt: skip
def test_a_file_that_names_no_device_is_right(tmp_path: Path, text: str) -> None:
    """gpu-manager reads each of them as none, and its own file is `{}`."""
    path = tmp_path / "extra.json"
    path.write_text(text)
    assert read_extra_devices(path) == ()


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"default": 5}', '{"default": {"devices": "x"}}', '{"default": {"devices": ["/etc/passwd"]}}',
     '{"devices": ["/dev/null"]}',
     '{"default": {"devices": ["/dev/\\ud800"]}}', '{"default": {"devices": ["/dev/\\u0000"]}}', '{"default": []}',
     '{"default": {"devices": ["/dev/../etc"]}}', '{"default": {"devices": [5]}}', "[" * 100_000],
)  # fmt: skip
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    """Paths outside /dev are bad too."""
    path = tmp_path / "extra.json"
    path.write_text(text)
    with pytest.raises(StartupError, match=r"extra\.json"):
        read_extra_devices(path)


@pytest.mark.parametrize(("name", "says"), [("pipe", "no regular file"), ("none", "none")])
def test_what_is_no_file_is_refused_by_name(tmp_path: Path, name: str, says: str) -> None:
    """It was asked for; reading a pipe would block the agent's start for ever."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StartupError, match=says):
        read_extra_devices(tmp_path / name)
