"""A probe process with the real nvidia-ml-py on the fake libnvidia-ml.so.1 (native/fake_nvml.c), for the NVML tests."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest

from tests.support_process import running_process

ROOT = Path(__file__).parents[2]

TWO_PAIRS = """\
count 4
GPU 0 GPU-aaaa 2 00000000:3B:00.0 24576 0 Tesla P40
GPU 1 GPU-bbbb 0 00000000:3C:00.0 24576 0 Tesla P40
GPU 2 GPU-cccc 3 00000000:AF:00.0 16384 0 NVIDIA A10
GPU 3 GPU-dddd 1 00000000:D8:00.0 16384 0 NVIDIA A10
ancestor 0 1 10
ancestor 2 3 30
"""
"""A script of four GPUs; native/fake_nvml.c names what else a script can hold."""

ONE_GPU = """\
count 1
GPU 0 GPU-aaaa 0 00000000:3B:00.0 24576 0 NVIDIA A10
"""


@contextmanager
def fake_library(*defines: str) -> Iterator[Path]:
    """A directory with the fake as libnvidia-ml.so.1, compiled with these macros; skips where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to build the fake libnvidia-ml.so.1 with")
    directory = Path(tempfile.mkdtemp(prefix="gs", dir="/tmp"))
    source = ROOT / "tests" / "native" / "fake_nvml.c"
    flags = ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", "-Wl,-soname,libnvidia-ml.so.1"]
    flags += [f"-D{define}" for define in defines]
    subprocess.run([compiler, *flags, "-o", "libnvidia-ml.so.1", str(source)], cwd=directory, check=True)
    yield directory
    shutil.rmtree(directory)


def becomes(script: Path, text: str) -> None:
    """Changes the machine, at once for every call that follows. `\\udcf8` is the byte F8, which is no UTF-8."""
    fresh = script.with_suffix(".new")
    fresh.write_text(text, errors="surrogateescape")
    fresh.replace(script)


@dataclass
class Probe:
    """The probe process and the machine that it sees."""

    process: asyncio.subprocess.Process
    directory: Path
    ends_with: int = 0

    def becomes(self, script: str, *, logs: bool = False) -> None:
        """With `logs` the openings of NVML and of event sets from now on are `calls`."""
        log = f"log {self.directory / 'calls'}\n" if logs else ""
        becomes(self.directory / "script", script + log)

    @property
    def calls(self) -> list[str]:
        path = self.directory / "calls"
        return path.read_text().split() if path.exists() else []

    async def ask(self, command: str) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{command}\n".encode())
        await self.process.stdin.drain()
        return json.loads(await self.process.stdout.readline())

    async def ask_fatal(self, command: str) -> None:
        """A command in which the process is killed, as the script has it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{command}\n".encode())
        assert await self.process.stdout.readline() == b""
        self.ends_with = -SIGKILL

    async def read(self) -> Any:
        return await self.ask("read")

    async def sample(self) -> Any:
        return await self.ask("sample")

    async def busy(self, *uuids: str) -> Any:
        return await self.ask(f"busy {' '.join(uuids)}")

    async def sample_gpu(self) -> Any:
        """The one GPU of a sample."""
        [gpu] = (await self.sample())["gpus"]
        return gpu

    async def events(self) -> Any:
        return await self.ask("events")


@asynccontextmanager
async def running_probe(
    library: Path | None,
    script: str,
    *,
    timeout_s: float = 10.0,
    wrapper: Sequence[str] = (),
    mig_minors: str | None = None,
    unified_memory_mib: int = 0,
    machine: Path | None = None,
) -> AsyncIterator[Probe]:
    """A probe on this machine; without a library on one that has no NVML. `wrapper` starts it. `mig_minors` is the host's
    file of MIG's device nodes; without it MIG instances are not asked for. Its /proc is `proc` in its directory, and a file
    `on-demand` there selects GPUs on which instances are made; the directory is `machine`, or ends with the probe. It must
    end by itself in the end."""
    directory = machine or Path(tempfile.mkdtemp(prefix="gs", dir="/tmp"))
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    environment |= {"PYTHONPATH": str(ROOT), "FAKE_NVML_SCRIPT": str(directory / "script")}
    if mig_minors is not None:
        (directory / "mig-minors").write_text(mig_minors)
    if library is not None:
        environment["LD_LIBRARY_PATH"] = str(library)
    try:
        async with running_process(
            *(*wrapper, sys.executable, "-m", "tests.gpus.support_nvml_probe"),
            *(str(directory), str(timeout_s), str(unified_memory_mib)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        ) as process:
            probe = Probe(process=process, directory=directory)
            probe.becomes(script)
            yield probe
            assert process.stdin is not None
            process.stdin.close()
            assert await process.wait() == probe.ends_with
    finally:
        if machine is None:
            shutil.rmtree(directory)


async def reads(library: Path | None, *scripts: str, **options: Any) -> list[Any]:
    """What one probe finds while the machine is as each of the scripts in turn."""
    return await _each(Probe.read, library, scripts, options)


async def samples(library: Path, *scripts: str, **options: Any) -> list[Any]:
    """As `reads`, what is sampled."""
    return await _each(Probe.sample, library, scripts, options)


async def _each(
    ask: Callable[[Probe], Awaitable[Any]], library: Path | None, scripts: Sequence[str], options: Mapping[str, Any]
) -> list[Any]:
    found = []
    async with running_probe(library, scripts[0], **options) as probe:
        for script in scripts:
            probe.becomes(script)
            found.append(await ask(probe))
    return found


async def read_once(library: Path | None, script: str, **options: Any) -> Any:
    [found] = await reads(library, script, **options)
    return found
