"""The kernels of the GPU measurement, by NVIDIA's own assembler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "bench" / "gpu" / "kernels.ptx"
TARGETS = ("sm_52", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""Maxwell to Blackwell. An assembler knows a part of them."""


def assembler() -> str:
    """PTXAS, or that of NVIDIA's wheels nvidia-cuda-nvcc or nvidia-cuda-nvcc-cu12, or one in PATH."""
    wheels = [
        Path(entry) / name / "bin" / "ptxas" for entry in sys.path for name in ("nvidia/cu13", "nvidia/cuda_nvcc")
    ]
    found = [os.environ.get("PTXAS"), *(str(path) for path in wheels if path.exists()), shutil.which("ptxas")]
    program = next(filter(None, found), None)
    if program is None:
        pytest.skip("no ptxas: install the wheel nvidia-cuda-nvcc, or set PTXAS to the program")
    return program


@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_assemble(target: str, tmp_path: Path) -> None:
    """For every generation of GPUs that the assembler knows."""
    program = assembler()
    output = tmp_path / "kernels.cubin"
    done = subprocess.run(
        [program, "--gpu-name", target, "--warning-as-error", str(KERNELS), "-o", str(output)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if "is not defined for option 'gpu-name'" in done.stderr:
        pytest.skip(f"this ptxas has no {target}")
    assert done.returncode == 0, done.stderr
    assert output.stat().st_size > 0


def test_every_kernel_that_the_program_asks_for_is_there() -> None:
    """By name; and the text is for drivers since 470, which read PTX up to 7.4."""
    text = KERNELS.read_text()
    asked = set(re.findall(r'kernel\((?:is_cooperative \? )?"(\w+)"', (KERNELS.parent / "probe.c").read_text()))
    assert asked | {"work"} == set(re.findall(r"\.visible \.entry (\w+)\(", text))
    version = re.search(r"^\.version (\d+)\.(\d+)$", text, flags=re.M)
    assert version is not None and (int(version[1]), int(version[2])) <= (7, 4)
