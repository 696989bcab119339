"""native/run-again.c, the entry point of the image: what kills the agent does not end its container; all else is as ever."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import pytest

from tests.isolation.support_driver import require_cc
from tests.support_deadline import DEADLINE_S
from tests.support_process import output_of, running_process

SOURCE = Path(__file__).parent.parent / "native" / "run-again.c"
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", "-Wpedantic", "-Wconversion", "-Wshadow")
SANITIZERS = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
CLOCK = """
#include <stdio.h>
#include <time.h>
int __wrap_clock_gettime(clockid_t clock, struct timespec *now);
int __wrap_clock_gettime(clockid_t clock, struct timespec *now)
{
    long ms;
    FILE *file = fopen(FILE_OF_MS, "r");
    if (clock != CLOCK_MONOTONIC || file == NULL || fscanf(file, "%ld", &ms) != 1)
        return -1;
    fclose(file);
    now->tv_sec = ms / 1000;
    now->tv_nsec = ms % 1000 * 1000000;
    return 0;
}
"""
"""A clock that stands still at what a file says."""
TWICE = 'if [ -e "$0" ]; then exit 5; fi; touch "$0"; sleep 1000 & echo $$; wait'
"""A program that something else runs with, and that exits with 5 the second time."""


def build(directory: Path, *flags: str) -> Path:
    program = directory / "run-again"
    subprocess.run([require_cc(), *FLAGS, *SANITIZERS, *flags, "-o", program, SOURCE], check=True, timeout=60)
    return program


async def first_line(process: Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        return (await process.stdout.readline()).decode().strip()


async def ended(process: Process) -> tuple[int | None, str]:
    """The exit code, once nobody has its output open any more; and what it wrote to standard error."""
    async with asyncio.timeout(DEADLINE_S):
        _, err = await process.communicate()
    return process.returncode, (err or b"").decode()


async def killed(program: Path, directory: Path) -> tuple[int | None, str]:
    async with running_process(program, "sh", "-c", TWICE, directory / "lives", stdout=PIPE, stderr=PIPE) as process:
        os.kill(int(await first_line(process)), signal.SIGKILL)
        return await ended(process)


async def test_what_is_killed_runs_again_and_what_it_had_started_ends(tmp_path: Path) -> None:
    """The log has a line of it."""
    code, text = await killed(build(tmp_path, "-DSHORT_MS=0", '-DMEMORY="/none"'), tmp_path)
    assert code == 5
    assert '"event": "agent_killed"' in text and '"signal": 9' in text


async def test_what_is_killed_soon_is_left_to_the_kubelet(tmp_path: Path) -> None:
    """Else a container that cannot run would look as if it ran."""
    async with running_process(build(tmp_path), "sh", "-c", "echo $$; read _", stdin=PIPE, stdout=PIPE) as process:
        os.kill(int(await first_line(process)), signal.SIGSEGV)
        assert await ended(process) == (128 + signal.SIGSEGV, "")


@pytest.mark.parametrize(("lived_ms", "code"), [(59_999, 137), (60_000, 5)])
async def test_soon_is_within_a_minute(tmp_path: Path, lived_ms: int, code: int) -> None:
    clock = tmp_path / "clock"
    clock.write_text("1500")
    (tmp_path / "clock.c").write_text(CLOCK)
    flags = (f'-DFILE_OF_MS="{clock}"', "-Wl,--wrap=clock_gettime", str(tmp_path / "clock.c"))
    script = f"if [ -e '{tmp_path}/x' ]; then exit 5; fi; touch '{tmp_path}/x'; "
    script += f"echo {1500 + lived_ms} >'{clock}'; kill -9 $$"
    assert (await output_of(build(tmp_path, '-DMEMORY="/none"', *flags), "sh", "-c", script))[0] == code


@pytest.mark.parametrize(("before", "after", "code"), [(0, 1, 137), (1, 1, 5)])
async def test_what_is_killed_for_want_of_memory_is_the_containers_end(
    tmp_path: Path, before: int, after: int, code: int
) -> None:
    """The kubelet shows OOMKilled then, and waits longer each time. A kill before this life does not count."""
    events = tmp_path / "memory.events"
    events.write_text(f"oom 7\noom_kill {before}\n")
    program = build(tmp_path, "-DSHORT_MS=0", f'-DMEMORY="{events}"')
    script = f"if [ -e '{tmp_path}/x' ]; then exit 5; fi; touch '{tmp_path}/x'; "
    script += f"printf 'oom 7\\noom_kill {after}\\n' >'{events}'; kill -9 $$"
    assert (await output_of(program, "sh", "-c", script))[0] == code


async def test_exit_codes_are_the_programs(tmp_path: Path) -> None:
    """A mistake in the settings is 2 as ever; what cannot be run is 127, no program 2."""
    program = build(tmp_path)
    assert (await output_of(program, "sh", "-c", "exit 7"))[0] == 7
    assert (await output_of(program, "true"))[0] == 0
    assert (await output_of(program, tmp_path / "none"))[0] == 127
    assert (await output_of(program))[0] == 2


async def test_a_sighup_waits_for_the_program(tmp_path: Path) -> None:
    """It comes before the program's first line: the agent reads its settings again, and does not end."""
    script = "import os, signal; os.kill(os.getppid(), signal.SIGHUP); signal.sigwait({signal.SIGHUP}); os._exit(9)"
    assert (await output_of(build(tmp_path), sys.executable, "-c", script))[0] == 9


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
async def test_signals_are_passed_on(tmp_path: Path, number: signal.Signals) -> None:
    """The agent stops."""
    script = f"trap 'exit 9' {number.value}; echo ready; while :; do read _ || :; done"
    async with running_process(build(tmp_path), "bash", "-c", script, stdin=PIPE, stdout=PIPE) as process:
        await first_line(process)
        process.send_signal(number)
        assert (await ended(process))[0] == 9


async def test_a_terminal_does_not_stop_what_could_not_be_ended_then(tmp_path: Path) -> None:
    """Ctrl-Z in `docker run -it`: the container's first process, which has no handler of it, would go on too."""
    script = "trap 'exit 9' TERM; echo ready; while :; do read _ || :; done"
    async with running_process(build(tmp_path), "bash", "-c", script, stdin=PIPE, stdout=PIPE) as process:
        await first_line(process)
        for number in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGTERM):
            process.send_signal(number)
        assert (await ended(process))[0] == 9


async def test_a_parent_that_ignores_the_end_of_children_takes_no_exit_code(tmp_path: Path) -> None:
    """It is inherited, and the kernel would keep no status of the program: nobody would see its end."""
    script = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    assert (await output_of(sys.executable, "-c", script, build(tmp_path), "sh", "-c", "exit 7"))[0] == 7


async def test_what_is_killed_while_it_stops_stays_ended(tmp_path: Path) -> None:
    """A container that is to end must not begin again."""
    script = "trap 'echo $$' TERM; echo ready; while :; do read _ || :; done"
    program = build(tmp_path, "-DSHORT_MS=0", '-DMEMORY="/none"')
    async with running_process(program, "bash", "-c", script, stdin=PIPE, stdout=PIPE) as process:
        await first_line(process)
        process.terminate()
        os.kill(int(await first_line(process)), signal.SIGKILL)
        assert (await ended(process))[0] == 137


async def test_the_program_does_not_outlive_it(tmp_path: Path) -> None:
    """Else two agents would serve the node after a kill of the container."""
    async with running_process(build(tmp_path), "sh", "-c", "echo $$; read _", stdin=PIPE, stdout=PIPE) as process:
        await first_line(process)
        process.kill()
        assert (await ended(process))[0] == -signal.SIGKILL
