"""libgpushare on the fake driver without a container: a directory has the two files that the agent would mount, a program
with that working directory is a process of the container.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpushare_agent.agent.isolation.gpushare.format import (
    CONFIG_NAME,
    USAGE_NAME,
    GpuLimits,
    encode_config,
    encode_usage,
)
from native.build_gpushare import SOURCES, build_gpushare
from tests.gpushare.usage_reader import GpuUsage, ProcessUsage, read_usage
from tests.native.build import NATIVE, build_fake_driver, build_program, cuda_include

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0
POD = "11111111-2222-3333-4444-555555555555"
BLOCK_MIB, CONTEXT_MIB = 256, 300
IS_EMULATED = "QEMU_LD_PREFIX" in os.environ
"""Programs are of another processor than this Python: session arm64 of noxfile.py."""
needs_own_programs = pytest.mark.skipif(IS_EMULATED, reason="this machine's own programs preload the library")
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GpushareBuilt:
    driver: Path
    programs: Path
    library: Path
    virtual_time: Path


def built_in(directory: Path) -> GpushareBuilt:
    return GpushareBuilt(
        driver=directory / "driver",
        programs=directory / "programs",
        library=directory / "libgpushare.so",
        virtual_time=directory / "libvirtualtime.so",
    )


def build_for_gpushare(directory: Path) -> GpushareBuilt:
    """The library looks for its files in the working directory. Raises CannotBuildError."""
    built = built_in(directory)
    driver, programs, source = build_fake_driver(built.driver), built.programs, NATIVE / "gpu_program.c"
    programs.mkdir()
    build_program(programs / "gpu_program", source, ["-ldl"])
    linked = [f"-L{driver}", "-Wl,--no-as-needed", "-lcuda", "-ldl"]
    build_program(programs / "gpu_program_linked", source, ["-DLINKED", *linked])
    for name in ("hard_program", "other_gpu"):
        build_program(programs / name, NATIVE / f"{name}.c", linked)
    build_program(programs / "every_hook", NATIVE / "every_hook.c", [f"-I{SOURCES}", "-ldl"])
    build_program(programs / "tenant", NATIVE / "tenant.c", linked)
    build_program(programs / "meter", NATIVE / "fake_driver" / "meter.c")
    build_gpushare(cuda_include(), built.library, directory=".")
    build_program(built.virtual_time, NATIVE / "virtual_time.c", ["-shared", "-fPIC"])
    return built


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    steps: list[dict[str, Any]]
    code: int
    error: str

    def step(self, action: str) -> dict[str, Any]:
        """The last one of that name; empty where the program did not come so far."""
        return next((step for step in reversed(self.steps) if step["action"] == action), {})

    def rates(self) -> list[float]:
        return [step["rate"] for step in self.steps if step["action"] == "launch"]


def uuid_of(gpu: str) -> str:
    """The fake driver's of a GPU, 1, or of an instance, 0:1."""
    _, _, instance = gpu.partition(":")
    return f"{'MIG' if instance else 'GPU'}-00000000-0000-4000-8000-{8 + int(instance) if instance else int(gpu):012x}"


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU, and the containers that share it. `settings` are the fake driver's (fake_driver/machine.h)."""

    built: GpushareBuilt
    directory: Path
    settings: Mapping[str, object]

    def container(self, name: str = "main", gpu: str = "0", **limits: Any) -> Container:
        """`limits` as GpuLimits has them; memory_mib for its bytes. `gpu` is the one that the container sees, also as 0:1,
        instance 1 of GPU 0. What a context takes is known where it is a setting of the driver's."""
        directory = self.directory / name
        directory.mkdir()
        if "memory_mib" in limits:
            limits["memory_bytes"] = limits.pop("memory_mib") * MIB
        limits.setdefault("context_bytes", int(str(self.settings.get("context_mib", 0))) * MIB)
        own = GpuLimits(uuid=uuid_of(gpu), **limits)
        (directory / CONFIG_NAME).write_bytes(encode_config(POD, "main", [own]))
        (directory / USAGE_NAME).write_bytes(encode_usage())
        return Container(self, directory, gpu)

    def env(self, preload: Sequence[Path] = ()) -> dict[str, str]:
        env = {"FAKE_GPU_GPUS": "1"} | {f"FAKE_GPU_{name.upper()}": str(value) for name, value in self.settings.items()}
        env |= {"LD_LIBRARY_PATH": str(self.built.driver), "FAKE_GPU_STATE": str(self.directory / "state")}
        env |= {"FAKE_GPU_DEVICES": "all", "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
        env |= {"QEMU_LD_PREFIX": os.environ["QEMU_LD_PREFIX"]} if IS_EMULATED else {}
        return env | ({"LD_PRELOAD": ":".join(map(str, preload))} if preload else {})

    def run_virtual(
        self,
        *programs: tuple[Container, Sequence[str]],
        way: str = "dlsym",
        observed: bool = True,
        period_s: float = 0.1,
        observed_s: float = float("inf"),
        knows_nobody: bool = False,
    ) -> list[Ended]:
        """At the same time, in virtual time, with the agent's part for `observed_s`, unless it is not `observed`;
        `knows_nobody`: it cannot tell whose a process is."""
        if observed and IS_EMULATED:
            pytest.skip("the agent's part is a program of this machine, which takes no part in the others' clock")
        clock = self.directory / "clock"
        clock.write_bytes(b"")
        directories = {str(container.directory): None for container, _ in programs}
        virtual = {"VIRTUAL_TIME": str(clock), "VIRTUAL_COUNT": str(len(programs) + observed)}
        virtual |= {"OBSERVING_PERIOD_S": str(period_s), "OBSERVING_FOR_S": str(observed_s)}
        virtual |= {"OBSERVING_NOBODY": "1"} if knows_nobody else {}
        with ExitStack() as stack:
            if observed:
                command = [sys.executable, str(NATIVE / "observing_agent.py"), *directories]
                agent = stack.enter_context(
                    subprocess.Popen(command, env=self.env([self.built.virtual_time]) | virtual, cwd=self.directory)
                )
                stack.callback(agent.kill)
            preload = [self.built.virtual_time, self.built.library]
            started = [container.start(*words, way=way, preload=preload, env=virtual) for container, words in programs]
            for one in started:
                stack.callback(one.kill)
            return [finish(one) for one in started]


@dataclass(frozen=True, slots=True)
class Container:
    """`devices` are as the fake driver's setting."""

    machine: Machine
    directory: Path
    devices: str = "all"

    def start(
        self,
        *actions: str,
        way: str = "dlsym",
        version: int = 12080,
        preload: Sequence[Path] | None = None,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        stdin: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[str]:
        program = {"link": "gpu_program_linked", "other_gpu": way}.get(way, "gpu_program")
        words = actions if way == "other_gpu" else [way, str(version), *actions]
        command = [*prefix, str(self.machine.built.programs / program), *words]
        return self.start_command(command, preload=preload, env=env, stdin=stdin)

    def start_command(
        self,
        command: Sequence[str],
        *,
        preload: Sequence[Path] | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[str]:
        own = self.machine.env([self.machine.built.library] if preload is None else preload)
        return subprocess.Popen(
            command,
            cwd=self.directory,
            env=own | {"FAKE_GPU_DEVICES": self.devices} | dict(env or {}),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *actions: str, **how: Any) -> Ended:
        return finish(self.start(*actions, **how))

    def usage(self) -> tuple[GpuUsage, list[ProcessUsage]]:
        return read_usage((self.directory / USAGE_NAME).read_bytes())


@contextmanager
def neighbour(machine: Machine) -> Iterator[None]:
    """Another container's program, which has a context on the GPU."""
    with machine.container("neighbour").start("wait", stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        while '"wait"' not in process.stdout.readline():
            assert process.poll() is None, process.communicate()
        yield
        process.communicate(timeout=DEADLINE_S)


def finish(process: subprocess.Popen[str]) -> Ended:
    try:
        output, error = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, error = process.communicate()
        raise AssertionError(f"the program did not end; {output}{error}") from None
    steps = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return Ended(steps=steps, code=process.returncode, error=error)
