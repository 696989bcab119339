"""gpu-client, compiled from native/gpu-client.c by the machine's compiler, and the calls that vcuda-control makes of it."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.isolation.support_driver import require_cc
from tests.isolation.support_vdevice import POD
from tests.support_process import output_of

SOURCES = [Path(__file__).parents[2] / "native" / name for name in ("gpu-client.c", "vdevice.c")]
DEADLINE_S = 60.0
_WARNINGS = ("-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-Wpedantic", "-Wconversion", "-Wshadow")
_SANITIZERS = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@functools.cache
def sanitizer_flags() -> tuple[str, ...]:
    """None of them where the compiler has no sanitizers."""
    with tempfile.TemporaryDirectory() as directory:
        source, program = Path(directory) / "probe.c", Path(directory) / "probe"
        source.write_text("int main(void) { return 0; }\n")
        made = subprocess.run(
            [require_cc(), *_SANITIZERS, "-o", program, source], check=False, capture_output=True, timeout=60
        )
        works = (
            made.returncode == 0
            and subprocess.run([program], check=False, capture_output=True, timeout=60).returncode == 0
        )
    return _SANITIZERS if works else ()


def compile_gpu_client(program: Path, *, calls_ms: int | None = None, attempt_ms: int | None = None) -> Path:
    """With sanitizers where times are given, for tests of answers; without them as it is built for containers."""
    flags = ["-O2"] if calls_ms is None else [f"-DCALLS_MS={calls_ms}", *sanitizer_flags()]
    flags += [f"-DATTEMPT_MS={attempt_ms}"] if attempt_ms is not None else []
    subprocess.run([require_cc(), *_WARNINGS, *flags, "-o", program, *SOURCES], check=True, timeout=120)
    return program


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    text: str


async def run_gpu_client(program: Path, *arguments: str | Path) -> Ended:
    code, _, text = await output_of(program, *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=None)
    return Ended(code, text.decode())


async def register_by_name(program: Path, address: Path | str, name: str = "cuda", pod_uid: str = POD) -> Ended:
    """With the arguments that vcuda-control gives where /etc/vcuda/vcuda.config is in place."""
    return await run_gpu_client(
        program, "--addr", address, "--bus-id", "00000000:3B:00.0", "--pod-uid", pod_uid, "--cont-name", name
    )


async def register_by_id(program: Path, address: Path | str, container_id: str, pod_uid: str = POD) -> Ended:
    """And where it is not."""
    return await run_gpu_client(
        program, "--addr", address, "--bus-id", "", "--pod-uid", pod_uid, "--cont-id", container_id
    )
