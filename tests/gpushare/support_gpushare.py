"""libgpushare on the fake driver without a container: a directory has the two files that the agent would mount, a program
with that working directory is a process of the container.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpushare_agent.agent.isolation.gpushare.files import GpushareFiles
from gpushare_agent.agent.isolation.gpushare.format import (
    CONFIG_NAME,
    USAGE_NAME,
    GpuLimits,
    Observed,
    encode_config,
    encode_usage,
    write_observed,
)
from gpushare_agent.agent.isolation.gpushare.library import Library
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.names import MIB, PodUid
from native.build_gpushare import SOURCES, build_gpushare
from tests.gpushare.usage_reader import GpuUsage, ProcessUsage, read_usage
from tests.native.build import NATIVE, build_fake_driver, build_program, cuda_include
from tests.native.gpu_program import Ended, Step, build_gpu_program, finish, linked_to

ROOT = Path(__file__).parents[2]
POD = PodUid("11111111-2222-3333-4444-555555555555")
KEY = ContainerKey(POD, "main")
BLOCK_MIB, CONTEXT_MIB = 256, 300
SHARE_MIB = 2560
"""A context and 8 blocks."""
TAKE = f"alloc:alloc:{BLOCK_MIB}:20"
SETTLED_NS = 300_000_000
"""As in region.c: an observation so much later than now finds that nothing has changed since."""
IS_EMULATED = "QEMU_LD_PREFIX" in os.environ
"""Programs are of another processor than this Python: session arm64 of noxfile.py."""
needs_own_programs = pytest.mark.skipif(IS_EMULATED, reason="this machine's own programs preload the library")


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
    driver, programs = build_fake_driver(built.driver), built.programs
    programs.mkdir()
    build_gpu_program(programs, driver)
    linked = linked_to(driver)
    for name in ("hard_program", "other_gpu"):
        build_program(programs / name, NATIVE / f"{name}.c", linked)
    build_program(programs / "every_hook", NATIVE / "every_hook.c", [f"-I{SOURCES}", "-ldl"])
    build_program(programs / "tenant", NATIVE / "tenant.c", linked)
    build_program(programs / "meter", NATIVE / "fake_driver" / "meter.c")
    build_gpushare(cuda_include(), built.library, directory=".")
    build_program(built.virtual_time, NATIVE / "virtual_time.c", ["-shared", "-fPIC"])
    return built


class Running:
    """A program that has come to its first `wait`; `said` is what it said until then."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said = self.listen()

    def tell(self) -> None:
        """Past its `wait`."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def listen(self) -> list[Step]:
        """What it says until it waits again."""
        found: list[Step] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found.append(json.loads(line))
            if found[-1]["action"] == "wait":
                return found
        raise AssertionError(self.process.communicate())

    def go_on(self) -> list[Step]:
        self.tell()
        return self.listen()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def finish(self) -> Ended:
        """Past every `wait`, to its end: what it said since the last one."""
        return finish(self.process)


def uuid_of(gpu: str) -> str:
    """The fake driver's of a GPU, 1, or of an instance, 0:1."""
    _, _, instance = gpu.partition(":")
    return f"{'MIG' if instance else 'GPU'}-00000000-0000-4000-8000-{8 + int(instance) if instance else int(gpu):012x}"


def write_files(directory: Path, limits: GpuLimits, key: ContainerKey = KEY) -> None:
    """The two that the agent makes."""
    (directory / CONFIG_NAME).write_bytes(encode_config(key.pod_uid, key.container, [limits]))
    (directory / USAGE_NAME).write_bytes(encode_usage())


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
        write_files(directory, GpuLimits(uuid=uuid_of(gpu), **limits))
        return Container(self, directory, gpu)

    def env(self, preload: Sequence[Path] = ()) -> dict[str, str]:
        env = {"FAKE_GPU_GPUS": "1"} | {f"FAKE_GPU_{name.upper()}": str(value) for name, value in self.settings.items()}
        env |= {"LD_LIBRARY_PATH": str(self.built.driver), "FAKE_GPU_STATE": str(self.directory / "state")}
        env |= {"FAKE_GPU_DEVICES": "all", "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
        env |= {"QEMU_LD_PREFIX": os.environ["QEMU_LD_PREFIX"]} if IS_EMULATED else {}
        return env | ({"LD_PRELOAD": ":".join(map(str, preload))} if preload else {})

    def virtual_time(self, processes: int) -> dict[str, str]:
        """The variables by which so many have one clock: their computing alone moves it."""
        clock = self.directory / "clock"
        clock.write_bytes(b"")
        return {"VIRTUAL_TIME": str(clock), "VIRTUAL_COUNT": str(processes)}

    def start_tool(
        self, stack: ExitStack, *command: object, env: Mapping[str, str], stdout: int | None = None
    ) -> subprocess.Popen[str]:
        """A program of tests/native in Python that has such a clock; it ends with the stack."""
        words = [sys.executable, *map(str, command)]
        env = self.env([self.built.virtual_time]) | env
        process = subprocess.Popen(words, env=env, cwd=self.directory, stdout=stdout, text=True)
        stack.callback(stack.enter_context(process).kill)
        return process

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
        directories = {container.directory: None for container, _ in programs}
        virtual = self.virtual_time(len(programs) + observed)
        virtual |= {"OBSERVING_PERIOD_S": str(period_s), "OBSERVING_FOR_S": str(observed_s)}
        virtual |= {"OBSERVING_NOBODY": "1"} if knows_nobody else {}
        with ExitStack() as stack:
            if observed:
                self.start_tool(stack, NATIVE / "observing_agent.py", *directories, env=virtual)
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

    @contextmanager
    def running(self, *actions: str, **how: Any) -> Iterator[Running]:
        """Ends with the block."""
        process = self.start(*actions, stdin=subprocess.PIPE, **how)
        try:
            yield Running(process)
        finally:
            process.kill()
            with process:
                pass

    def usage(self) -> tuple[GpuUsage, list[ProcessUsage]]:
        return read_usage((self.directory / USAGE_NAME).read_bytes())

    def observe(self, used_mib: float, later_ns: int = 0) -> None:
        """As the agent writes what it sees now, or so much later."""
        with (self.directory / CONFIG_NAME).open("r+b") as file:
            content = bytearray(file.read())
            write_observed(content, 0, Observed(at_ns=time.monotonic_ns() + later_ns, used_bytes=round(used_mib * MIB)))
            file.seek(0)
            file.write(content)


def neighbour(machine: Machine) -> AbstractContextManager[Running]:
    """Another container's program, which has a context on the GPU."""
    return machine.container("neighbour").running("wait")


def prepared(machine: Machine, limits: Sequence[GpuLimits]) -> tuple[GpushareFiles, Container]:
    """A container whose directory the agent's own code has made: the program runs in it."""
    library = Library(machine.built.library, machine.directory / "own")
    files = GpushareFiles(library, machine.directory / "vm", lambda _: limits)
    library._write(b"installed")  # not the library, which is preloaded from where it was built
    files.prepare(KEY)
    return files, Container(machine, files.container_directory(KEY))
