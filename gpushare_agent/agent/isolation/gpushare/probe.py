"""Proves on this node, with this driver, that libgpushare limits: a CUDA program of the agent's own (probe_program.py)
runs under the library. It must be refused memory at a limit and be held to two caps of compute; the second is written
while it runs.

The library finds its limits in /etc/vcuda, by a compiled-in path, because a tenant could name whatever a program could
name. The agent's container has no such directory, and may mount none. So the probe runs under a copy of the library in
which that directory's name is replaced by as long a name of the working directory: the machine code is the one that
containers get. Rejected: a second build with another path, which would be proven instead of the first.

It takes at most two seconds of one GPU, which nobody else may be using. A fault that is there without the library too
is not the library's failure."""

from __future__ import annotations

import asyncio
import json
import mmap
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from gpushare_agent.agent.isolation.gpushare.edits import LIBRARY_NAME
from gpushare_agent.agent.isolation.gpushare.format import (
    CONFIG_BYTES,
    CONFIG_NAME,
    USAGE_NAME,
    GpuLimits,
    encode_config,
    encode_usage,
    write_limits,
)
from gpushare_agent.agent.isolation.gpushare.probe_program import waited_s
from gpushare_agent.agent.isolation.kept import ProbeState
from gpushare_agent.agent.runtime.machine import available_memory_bytes
from gpushare_agent.core.kit.daemon_thread import DaemonThread
from gpushare_agent.core.kit.process import end_process
from gpushare_agent.core.model.errors import AgentError, Unavailable
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.names import MIB, VDEVICE_DIRECTORY, GpuUuid
from gpushare_agent.core.model.usage import GpuSample, SamplesBusy

MEMORY_BYTES = 2048 * MIB
"""The limit. A context takes up to 600 MiB of it."""
NEEDED_BYTES = MEMORY_BYTES + 1024 * MIB
"""The GPU must have so much free, or it would refuse what the library would give."""
CAPS = (3000, 6000)
"""Hundredths of a percent."""
TOLERANCE = 1000
MOST_CONTEXT_BYTES = 1024 * MIB
RUN_TIMEOUT_S = 10.0
FILES_TIMEOUT_S = 5.0
END_TIMEOUT_S = 1.0
MOST_OUTPUT_BYTES = 65536
PREFIX = "gpushare-probe-"
_PROGRAM = Path(__file__).with_name("probe_program.py")
_IN_CONTAINER = f"{VDEVICE_DIRECTORY}/".encode()
_IN_PLACE = b".".ljust(len(_IN_CONTAINER), b"/")
_NOBODY = "00000000-0000-4000-8000-000000000000"
_DROPPED = ("CUDA_", "GPUSHARE_", "KUBERNETES_", "LD_PRELOAD", "PYTHON")
"""Beginnings of the names of variables that the probe does not get."""


class Run(Struct, frozen=True, kw_only=True):
    """What the program printed, how it ended (None: its time was over, a negative number: by that signal), what else was
    said, and the part of its time in which it waited for a processor, if it had to be ended."""

    steps: Sequence[Mapping[str, Any]]
    code: int | None
    said: str = ""
    waited: float = 0.0

    def of(self, step: str) -> list[Mapping[str, Any]]:
        return [one for one in self.steps if one.get("step") == step]

    @property
    def start_error(self) -> str:
        """Why the GPU has no context and no kernel, empty if it has."""
        return "" if any(one.get("step") == "start" and "error" not in one for one in self.steps) else self.error

    @property
    def error(self) -> str:
        """Why it did not come to its end, empty if it did."""
        reported = next((str(one["error"]) for one in self.steps if "error" in one), "")
        if not reported and self.code is None:
            return "it did not end in time"
        if not reported and (self.code or len(self.of("compute")) != len(CAPS)):
            code = self.code or 0
            return f"it ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}: {self.said}"
        return reported


def idle_gpu(
    gpus: Iterable[Gpu],
    samples: Mapping[GpuUuid, GpuSample],
    allocated: Callable[[Gpu], bool],
    host_bytes: Callable[[], int] = available_memory_bytes,
) -> Gpu | str:
    """The first GPU on which a probe disturbs nobody, or why there is none. A GPU whose memory NVML does not say has the
    host's (GB10), of which so much is free."""
    why = "the driver shows no GPU"
    for gpu in sorted(gpus, key=lambda gpu: gpu.index):
        sample = samples.get(gpu.uuid)
        if gpu.mig is not None or not gpu.is_healthy or gpu.is_exclusive_process:
            why = "every GPU is in use, unhealthy, in compute mode EXCLUSIVE_PROCESS, or divided by MIG"
        # Processes that are not known count as some: a probe next to a program would take its memory.
        elif allocated(gpu) or sample is None or sample.processes is None or sample.processes:
            why = (
                "others use the GPUs"
                if sample is not None and sample.processes is not None
                else "their processes are not known"
            )
        elif _free_bytes(sample, host_bytes) < NEEDED_BYTES:
            why = f"no GPU has {NEEDED_BYTES // MIB} MiB free"
        else:
            return gpu
    return why


def _free_bytes(sample: GpuSample, host_bytes: Callable[[], int]) -> int:
    total = sample.memory_total_bytes
    return host_bytes() if total is None else total - (sample.memory_used_bytes or 0)


# ---- the verdict ----


def failure_of(run: Run, library: Path) -> str:
    """Why the library does not limit, empty if it does. Pure."""
    if run.of("driver") and str(library) not in run.of("driver")[0].get("libraries", ()):
        return f"it was not loaded: {run.said or 'the loader says nothing of it'}"
    if run.error:
        return run.error
    [memory], compute = run.of("memory"), run.of("compute")
    taken, limit = memory["blocks"] * memory["block_bytes"], f"{MEMORY_BYTES // MIB} MiB"
    if not memory["code"] or taken > MEMORY_BYTES:
        return f"a program got {taken // MIB} MiB in a share of {limit}"
    if not memory["code_by_dlsym"]:
        return f"a program that asks for functions by dlsym got memory above its share of {limit}"
    if not memory["blocks"] or memory["total_bytes"] != MEMORY_BYTES:
        shown = memory["total_bytes"] // MIB
        return f"a program got {taken // MIB} MiB in a share of {limit}, and was shown {shown}: {run.said}"
    for cap, one in zip(CAPS, compute, strict=True):
        if abs(busy(one) - cap) > TOLERANCE and not _is_starved(one, cap):
            return f"a program with {cap / 100:g} cores computed {busy(one) / 100:.0f} % of the time"
    return ""


def _is_starved(compute: Mapping[str, Any], cap: int) -> bool:
    return busy(compute) < cap - TOLERANCE and 10_000 * compute["waited_s"] > TOLERANCE * compute["seconds"]


def starved_text(run: Run) -> str:
    """Why less was computed than allowed, or the time was over, and the library is not to blame; empty if it was not so.
    Pure."""
    parts = [
        one["waited_s"] / one["seconds"]
        for cap, one in zip(CAPS, run.of("compute"), strict=False)
        if _is_starved(one, cap)
    ]
    # Of a program that had to be ended: one that hangs waits for no processor.
    parts += [run.waited] if run.waited > 0.5 else []
    if not parts:
        return ""
    return f"the node's processors are too busy: a program waited {100 * max(parts):.0f} % of the time for one"


def busy(compute: Mapping[str, Any]) -> float:
    """The part of the time in which the GPU computed for the program, in hundredths of a percent."""
    return float(10_000 * compute["busy_s"] / compute["seconds"])


def passed_text(run: Run) -> str:
    [memory] = run.of("memory")
    peak = run.steps[-1].get("peak_mib", "?")
    held = " and ".join(
        f"{busy(one) / 100:.0f} % at {cap / 100:g} cores" for cap, one in zip(CAPS, run.of("compute"), strict=True)
    )
    return (
        f"a program was refused memory after {memory['blocks'] * memory['block_bytes'] // MIB} MiB and its context in"
        f" {MEMORY_BYTES // MIB} MiB, and computed {held}; it took {peak} MiB of the host's memory"
    )


# ---- the run ----


class LibraryProbe(Struct, kw_only=True, eq=False):
    """`place` is the directory for its files, which is not mounted noexec; None: the system's for temporary files.
    `context_bytes` is what a context took by the driver's count of the program, 0 if `driver` does not say.
    State owned: the thread that writes them, and when a run that must give way ends."""

    library: Callable[[], bytes]
    place: Path | None
    environment: Mapping[str, str]
    timeout_s: float = RUN_TIMEOUT_S
    thread: DaemonThread
    driver: SamplesBusy | None = None
    context_bytes: int = 0
    _scope: asyncio.Timeout | None = None
    _gives_way: bool = False

    def give_way(self) -> None:
        """Ends what runs, at once: somebody needs the GPU."""
        if self._scope is not None and not self._gives_way:
            self._gives_way = True
            # At once: the container that comes must not wait for the two seconds.
            self._scope.reschedule(0)

    async def prove(self, gpu: Gpu) -> tuple[ProbeState, str]:
        """Runs the program under the library, once more if that failed, and without it if it did not start.
        Bounded."""
        self._gives_way, self.context_bytes = False, 0
        try:
            for attempt in (1, 2):
                state, text = await self._try(gpu)
                # What lasts a moment, as a clock that rises, does not come twice. What hangs is not
                # tried twice.
                if state is not ProbeState.FAILED or attempt == 2 or "did not end" in text:
                    break
        except (AgentError, OSError) as error:
            return ProbeState.SKIPPED, str(error)
        return state, text

    async def _try(self, gpu: Gpu) -> tuple[ProbeState, str]:
        directory = await self._in_thread(self._make, gpu, "making the probe's files")
        try:
            library = directory / LIBRARY_NAME
            run = await self._run(directory, gpu, library)
            if self._gives_way:
                return ProbeState.SKIPPED, "it gave way to a container on its GPU"
            # If the driver's own library is missing, that is not libgpushare's fault.
            if not run.of("driver") or run.steps[0].get("error"):
                return ProbeState.SKIPPED, f"the driver's library for programs is not here: {run.error}"
            why, starved = failure_of(run, library), starved_text(run)
            # Not a failure: shares would be refused until another driver or library comes.
            if starved and (not why or run.code is None):
                return ProbeState.SKIPPED, starved
            if not why:
                return ProbeState.PASSED, passed_text(run)
            if "failed to map segment" in run.said:
                return ProbeState.SKIPPED, f"{directory.parent} is mounted noexec"
            if not run.of("memory") and (bare := await self._run(directory, gpu, None)).start_error:
                return ProbeState.SKIPPED, f"CUDA does not start here without the library either: {bare.error}"
            return ProbeState.FAILED, why
        finally:
            await self._in_thread(_remove, directory, "removing the probe's files")

    async def _in_thread(self, work: Callable[..., Any], argument: object, what: str) -> Any:
        return await self.thread.call(lambda: work(argument), what, FILES_TIMEOUT_S)

    def _make(self, gpu: Gpu) -> Path:
        content = self.library()
        if _IN_CONTAINER not in content:
            raise Unavailable(f"the library has no {VDEVICE_DIRECTORY}")
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self.place))
        (directory / LIBRARY_NAME).write_bytes(content.replace(_IN_CONTAINER, _IN_PLACE))
        (directory / CONFIG_NAME).write_bytes(encode_config(_NOBODY, "probe", [_limits(gpu, CAPS[0])]))
        (directory / USAGE_NAME).write_bytes(encode_usage())
        return directory

    async def _run(self, directory: Path, gpu: Gpu, library: Path | None) -> Run:
        """Runs the program to its end, at most `timeout_s`; then it is killed by its handle. Without a library it only
        starts."""
        kept = {name: value for name, value in self.environment.items() if not name.startswith(_DROPPED)}
        kept |= {"CUDA_VISIBLE_DEVICES": gpu.uuid, "CUDA_CACHE_DISABLE": "1"}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_PROGRAM), "start" if library is None else "all"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=directory,
            env=kept | ({"LD_PRELOAD": str(library)} if library is not None else {}),
        )
        steps: list[Mapping[str, Any]] = []
        said: list[str] = []
        code: int | None = None
        waited = 0.0
        try:
            async with asyncio.timeout(self.timeout_s) as self._scope:
                await self._follow(process, directory, gpu, steps, said)
                code = await process.wait()
        except TimeoutError:
            waited = waited_s(process.pid) / self.timeout_s
        finally:
            self._scope = None
            # A process in a driver call that does not return cannot be killed.
            await end_process(process, END_TIMEOUT_S)
        return Run(steps=steps, code=code, said=" | ".join(said)[-400:], waited=waited)

    async def _follow(
        self,
        process: asyncio.subprocess.Process,
        directory: Path,
        gpu: Gpu,
        steps: list[Mapping[str, Any]],
        said: list[str],
    ) -> None:
        assert process.stdin is not None and process.stdout is not None  # noqa: S101 - both are pipes, for mypy
        caps, read = iter(CAPS), 0
        while (line := await _read_line(process.stdout)) and (read := read + len(line)) < MOST_OUTPUT_BYTES:
            step = _parsed(line)
            if step is None:
                said.append(line.decode(errors="replace").strip())
                continue
            steps.append(step)
            if step["step"] == "memory":
                await self._measure_context(gpu)
            if step["step"] in ("memory", "compute") and (cap := next(caps, None)) is not None:
                await self._in_thread(
                    lambda limits: _change(directory, limits), _limits(gpu, cap), "changing the probe's limits"
                )
                with suppress(BrokenPipeError, ConnectionResetError):  # it has ended: its exit code says how
                    process.stdin.write(b"\n")
                    await process.stdin.drain()

    async def _measure_context(self, gpu: Gpu) -> None:
        """The program has given its memory back and waits: it has its context and one module. By the driver's count of the
        process, which no neighbour changes."""
        with suppress(AgentError):
            found = await self.driver.sample_busy([gpu.uuid]) if self.driver is not None else {}
            sizes = [size for one in found.values() for process in one.processes if (size := process.memory_bytes)]
            self.context_bytes = sizes[0] if len(sizes) == 1 and sizes[0] <= MOST_CONTEXT_BYTES else 0


def _limits(gpu: Gpu, cap: int) -> GpuLimits:
    return GpuLimits(uuid=gpu.uuid, memory_bytes=MEMORY_BYTES, cores=cap)


def _change(directory: Path, limits: GpuLimits) -> None:
    """Changes the limits in the mapped file, as a live resize does."""
    with (
        (directory / CONFIG_NAME).open("r+b") as file,
        mmap.mmap(file.fileno(), CONFIG_BYTES) as mapped,
        memoryview(mapped) as view,
    ):
        write_limits(view, 0, limits)


def _remove(directory: Path) -> None:
    for name in (LIBRARY_NAME, CONFIG_NAME, USAGE_NAME):
        (directory / name).unlink(missing_ok=True)
    directory.rmdir()


def remove_left(place: Path) -> None:
    """Removes what a probe left there when its agent was killed. Raises OSError."""
    for directory in place.glob(f"{PREFIX}*"):
        _remove(directory)


def _parsed(line: bytes) -> Mapping[str, Any] | None:
    with suppress(ValueError):
        step = json.loads(line)
        if isinstance(step, dict) and isinstance(step.get("step"), str):
            return step
    return None


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """Empty at the end, and of a line that is longer than the stream's limit of 64 KiB."""
    try:
        return await stream.readline()
    except ValueError:
        return b""
