"""What `/proc/driver/nvidia/version` says of the kernel module."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpushare_agent.agent.runtime.machine import parse_kernel_module, read_kernel_module
from gpushare_agent.core.model.gpus import KernelModule

PROPRIETARY = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023
GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)
"""
OPEN = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder@U22)  Thu Jan 23 2025
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""


@pytest.mark.parametrize(
    ("text", "module"),
    [
        (PROPRIETARY, KernelModule(version="535.104.05", is_open=False)),
        (OPEN, KernelModule(version="570.86.15", is_open=True)),
        ("NVRM version: NVIDIA UNIX aarch64 Kernel Module  615.71  x\n", KernelModule(version="615.71", is_open=False)),
        ("", None),
        ("GCC version:  gcc version 12.3.0\n" + OPEN, None),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module\n", None),
    ],
)
def test_the_first_line_has_version_and_kind(text: str, module: KernelModule | None) -> None:
    """Only that line: the compiler's version stands in the second."""
    assert parse_kernel_module(text) == module


def test_the_major_version_is_a_number() -> None:
    assert KernelModule(version="570.86.15", is_open=True).major == 570


def test_a_node_without_the_driver_has_none(tmp_path: Path) -> None:
    """So does one whose file is a directory."""
    assert read_kernel_module(tmp_path) is None
    (tmp_path / "driver/nvidia/version").mkdir(parents=True)
    assert read_kernel_module(tmp_path) is None


def test_the_file_is_read_below_the_given_proc(tmp_path: Path) -> None:
    """The pod's own, or the host's where it is mounted elsewhere."""
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    (tmp_path / "driver/nvidia/version").write_text(OPEN)
    assert read_kernel_module(tmp_path) == KernelModule(version="570.86.15", is_open=True)
