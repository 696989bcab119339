"""The MPS supervisor against control programs that misbehave: each case ends in a stated condition, and nothing is left."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gpushare_agent.agent.commands.mps_supervisor import supervise
from gpushare_agent.agent.gpus.simulated import driver as simulated
from gpushare_agent.agent.isolation.mps.control import MpsControl
from gpushare_agent.agent.isolation.mps.supervision import Condition, MpsDaemonProcess, MpsSupervision, Timeouts
from gpushare_agent.core.kit.backoff import Backoff
from gpushare_agent.core.model.errors import StartupError, Unavailable
from gpushare_agent.core.settings.settings import load_settings
from gpushare_agent.sandbox.fake_mps import open_fake_mps
from tests.isolation.support_mps import DEADLINE_S, MpsPlace, mps_place, poll_until, script
from tests.sandbox.support_containers import is_alive
from tests.settings.support_settings import clean_environment, run_program
from tests.support_process import running_process

STARTING, SERVING, WAITING = Condition.STARTING, Condition.SERVING, Condition.WAITING


@pytest.fixture
def place(short_dir: Path) -> MpsPlace:
    return mps_place(short_dir)


# --- in this process ---


@dataclass
class Kept:
    """A supervision, its daemon, the conditions that it went through, and its task."""

    supervision: MpsSupervision
    daemon: MpsDaemonProcess
    seen: list[Condition]
    task: asyncio.Task[None] | None = None

    async def wait_for(self, *conditions: Condition) -> None:
        """Until the conditions so far end like these."""
        await poll_until(
            lambda: tuple(self.seen[-len(conditions) :]) == conditions, f"{conditions}; it was {self.seen}"
        )


@asynccontextmanager
async def kept(
    place: MpsPlace,
    control: MpsControl | None = None,
    daemon: MpsDaemonProcess | None = None,
    *,
    start_s: float = DEADLINE_S,
    drain_s: float = 0.0,
    end_s: float = 5.0,
) -> AsyncIterator[Kept]:
    """A supervision that runs, with short delays; drained at the end."""
    control = control or place.control()
    daemon, seen = daemon or MpsDaemonProcess(control), list[Condition]()
    timeouts = Timeouts(
        start_s=start_s, probe_period_s=0.02, drain_s=drain_s, end_s=end_s, most_bad_starts=3,
        backoff=Backoff(base_s=0.001, cap_s=0.01),
    )  # fmt: skip
    supervision = MpsSupervision(daemon, control, percentage=70, timeouts=timeouts, on_condition=seen.append)
    found = Kept(supervision, daemon, seen)

    async def body() -> None:
        await supervision.run()

    async with asyncio.TaskGroup() as group:
        found.task = group.create_task(body())
        try:
            yield found
        finally:
            found.task.cancel()
            await asyncio.wait({found.task})
            await supervision.drain()
    assert seen[-1] is Condition.STOPPED
    for pid in place.daemons():
        assert not is_alive(pid), pid


async def why_given_up(
    place: MpsPlace,
    control: MpsControl | None = None,
    daemon: MpsDaemonProcess | None = None,
    **timeouts: float,
) -> tuple[str, list[Condition]]:
    """The error with which the supervision ended by itself."""
    found: Kept | None = None
    with pytest.raises(ExceptionGroup) as raised:
        async with kept(place, control, daemon, **timeouts) as found:
            assert found.task is not None
            await asyncio.wait({found.task})
    (error,) = raised.value.exceptions
    assert isinstance(error, StartupError) and found is not None
    return str(error), found.seen


async def test_a_daemon_is_started_asked_and_given_its_default(place: MpsPlace) -> None:
    """It serves only once it has answered and taken the setting; at the end it gets the command quit."""
    async with kept(place) as found:
        await found.wait_for(STARTING, SERVING)
        assert place.record()[:3] == [
            f"daemon {found.daemon.pid}",
            "get_default_active_thread_percentage",
            "set_default_active_thread_percentage 70",
        ]
    assert place.record()[-1] == "quit"
    assert found.seen == [STARTING, SERVING, Condition.DRAINING, Condition.STOPPED]


async def test_a_slow_daemon_is_waited_for(place: MpsPlace) -> None:
    """While it does not answer the condition is starting."""
    place.becomes("waits")
    async with kept(place) as found:
        await poll_until(place.daemons, "the daemon's start")
        assert found.seen == [STARTING]
        place.no_longer("waits")
        await found.wait_for(STARTING, SERVING)
    assert len(place.daemons()) == 1


@pytest.mark.parametrize(
    ("fault", "start_s", "why"),
    [
        ("waits", 0.3, "did not answer within 0.3 s of its start"),
        ("fails", DEADLINE_S, "ended with exit code 3 before it answered"),
    ],
)
async def test_a_daemon_that_does_not_start_is_tried_again_a_few_times(
    place: MpsPlace, fault: str, start_s: float, why: str
) -> None:
    """One that is too slow is ended. Then the supervision ends with the reason, and no start follows."""
    place.becomes(fault)
    words, seen = await why_given_up(place, start_s=start_s)
    assert "3 times in a row" in words and why in words
    assert seen[:6] == [STARTING, WAITING] * 3 and len(place.daemons()) == 3


async def test_a_daemon_that_dies_at_start_once_is_forgiven(place: MpsPlace) -> None:
    """The driver may come a little later than the supervisor."""
    place.becomes("fails", "once")
    async with kept(place) as found:
        await found.wait_for(STARTING, WAITING, STARTING, SERVING)


async def test_a_daemon_that_dies_later_is_started_again(place: MpsPlace) -> None:
    """As often as it takes, with what it left removed and the default given again."""
    with capture_logs() as logs:
        async with kept(place) as found:
            for number in range(1, 5):  # more often than bad starts are forgiven
                await found.wait_for(STARTING, SERVING)
                assert len(place.daemons()) == number
                found.daemon._process.kill()  # type: ignore[union-attr]
                await poll_until(lambda count=number: len(place.daemons()) > count, "the next start")  # type: ignore[misc]
            await found.wait_for(STARTING, SERVING)
    assert len(place.record("set_default_active_thread_percentage")) == 5
    down = [line for line in logs if line["event"] == "mps_daemon_down"]
    assert {line["reason"] for line in down} == {"it was ended by signal 9"} and len(down) == 4
    removed = [line["names"] for line in logs if line["event"] == "mps_stale_files_removed"]
    assert removed and all("control" in names for names in removed)


async def test_what_lives_on_of_a_dead_daemon_is_left_alone_and_waited_for(place: MpsPlace) -> None:
    """Its servers may hold its lock as long as they have clients: no second daemon comes between, and the end is bounded."""
    lock = place.pipe / "control_lock"
    with pytest.raises(ExceptionGroup) as raised:
        async with kept(place) as found:
            await found.wait_for(STARTING, SERVING)
            process = found.daemon._process
            assert process is not None
            lock.unlink()
            with lock.open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                process.kill()
                assert found.task is not None
                await asyncio.wait({found.task})
    (error,) = raised.value.exceptions
    assert "a process of the ended daemon still uses" in str(error) and "has locked" in str(error)
    assert len(place.daemons()) == 1 and lock.exists()


async def test_a_daemon_that_stops_answering_is_left_alone(place: MpsPlace) -> None:
    """To end it would end its clients; when it answers again it serves again."""
    control = place.control()
    async with kept(place, control) as found:
        await found.wait_for(STARTING, SERVING)
        pid = found.daemon.pid
        hangs(place, control)
        await found.wait_for(SERVING, Condition.NOT_ANSWERING)
        place.no_longer("hangs")
        control._timeout_s = DEADLINE_S
        await found.wait_for(Condition.NOT_ANSWERING, SERVING)
        assert found.daemon.pid == pid and place.daemons() == [pid]
    hung = [int(line.split()[1]) for line in place.record("hangs ")]
    await poll_until(lambda: not any(map(is_alive, hung)), f"the end of {hung}")


def hangs(place: MpsPlace, control: MpsControl) -> None:
    """From now on the program gets little time: before, it needed as much as a busy machine takes to start it."""
    control._timeout_s = 0.5
    place.becomes("hangs")


class AnswersAtOnce(MpsControl):
    """Fails as the program did once: a process for each answer may take longer than the time to start."""

    error = Unavailable("")

    async def get_default_active_thread_percentage(self) -> float:
        raise self.error


async def test_nonsense_at_the_start_is_no_answer(place: MpsPlace) -> None:
    """It counts as a start without success, and the error shows its output."""
    place.becomes("nonsense", "lorem ipsum")
    with pytest.raises(Unavailable) as said:
        await place.control().get_default_active_thread_percentage()
    control = AnswersAtOnce(place.program, place.pipe, place.logs)
    control.error = said.value
    words, _ = await why_given_up(place, control, start_s=0.05)
    assert "is invalid: 'lorem ipsum'" in words


async def test_what_a_dead_daemon_left_is_removed_before_the_start(place: MpsPlace) -> None:
    """Its PID file names a process that is gone, or is somebody else's by now."""
    (place.pipe / "nvidia-cuda-mps-control.pid").write_text("1")
    (place.pipe / "control_lock").write_text("")
    with capture_logs() as logs:
        async with kept(place) as found:
            await found.wait_for(STARTING, SERVING)
            assert int((place.pipe / "nvidia-cuda-mps-control.pid").read_text()) == found.daemon.pid
    (line,) = [line for line in logs if line["event"] == "mps_stale_files_removed"]
    assert line["names"] == ["control_lock", "nvidia-cuda-mps-control.pid"]


async def test_clients_get_their_time_to_end(place: MpsPlace) -> None:
    """The daemon gets the command quit when the last one has gone."""
    place.becomes("clients", "500 501\n500 502\n")
    with capture_logs() as logs:
        async with kept(place, drain_s=DEADLINE_S) as found:
            await found.wait_for(STARTING, SERVING)
            assert found.task is not None
            found.task.cancel()
            async with asyncio.TaskGroup() as group:
                drained = group.create_task(found.supervision.drain())
                await poll_until(lambda: place.record("get_client_list"), "a question about clients")
                assert not place.record("quit") and not drained.done()
                place.no_longer("clients")
    waited = [line["clients"] for line in logs if line["event"] == "mps_waits_for_clients"]
    assert waited == [[501, 502], []]
    assert len(place.record("quit")) == 1


class ClientsThatStay(MpsControl):
    """Answers about clients at once: a process for each answer may take longer than the time to drain."""

    async def list_clients(self) -> list[int]:
        return [501]


async def test_clients_that_stay_are_waited_for_no_longer_than_allowed(place: MpsPlace) -> None:
    """They are named in the log, and the daemon ends."""
    with capture_logs() as logs:
        async with kept(place, ClientsThatStay(place.program, place.pipe, place.logs), drain_s=0.0) as found:
            await found.wait_for(STARTING, SERVING)
    (line,) = [line for line in logs if line["event"] == "mps_clients_left"]
    assert line["clients"] == [501]


async def test_a_daemon_that_will_not_quit_is_killed(place: MpsPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the command nor SIGTERM ends it; nor does a control program that hangs hold up the end."""
    place.becomes("deaf")
    control, killpg = place.control(), os.killpg
    async with kept(place, control, drain_s=DEADLINE_S, end_s=0.1) as found:
        await found.wait_for(STARTING, SERVING)
        pid, sent = found.daemon.pid, list[int]()

        def kill_once_heard(group: int, number: int) -> None:
            """A tenth of a second may be over before a busy machine lets the daemon run."""
            if group == pid:
                sent.append(number)
                while number == signal.SIGKILL and "SIGTERM" not in place.record():
                    time.sleep(0.01)
            killpg(group, number)

        monkeypatch.setattr(os, "killpg", kill_once_heard)
        hangs(place, control)
    assert sent == [signal.SIGTERM, signal.SIGKILL]
    assert "SIGTERM" in place.record() and "quit" not in place.record()


# --- as a process ---


@asynccontextmanager
async def program(place: MpsPlace, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    async with running_process(
        *(sys.executable, "-m", "gpushare_agent", "mps", "--driver=simulated", "--log.format=json"),
        *(*place.flags(), "--mps.probe-period-s=0.1", *flags),
        env=clean_environment(),
        stderr=asyncio.subprocess.PIPE,
    ) as process:
        yield process
    for pid in place.daemons():
        assert not is_alive(pid)


async def log_until(process: asyncio.subprocess.Process, event: str, **fields: Any) -> dict[str, Any]:
    """The next line of this kind; what the daemon itself prints is skipped."""
    assert process.stderr is not None
    while raw := await process.stderr.readline():
        line = json.loads(raw) if raw.startswith(b"{") else {}
        if line.get("event") == event and fields.items() <= line.items():
            return dict(line)
    raise AssertionError(f"it ended before it logged {event} {fields}")


async def end_of(process: asyncio.subprocess.Process) -> tuple[int | None, str]:
    _, err = await process.communicate()
    return process.returncode, err.decode()


async def test_the_command_makes_its_directories_serves_and_ends_at_a_signal(short_dir: Path) -> None:
    """Exit code 0; `--check` meanwhile reports that it serves, and afterwards why not."""
    place = mps_place(short_dir)
    place.pipe.rmdir()
    place.logs.rmdir()
    check = ("mps", "--check", *place.flags())
    async with program(place) as process:
        await log_until(process, "mps_condition", condition="serving")
        ended = await run_program(*check)
        assert (ended.code, ended.out) == (0, f"the control daemon of {place.pipe} answers\n")
        process.send_signal(signal.SIGTERM)
        code, err = await end_of(process)
    assert code == 0 and "stopped" in err and "Traceback" not in err
    ended = await run_program(*check)
    assert ended.code == 1 and ended.err == ""
    assert "Cannot find MPS control daemon" in ended.out and "; start the daemon with this pipe directory" in ended.out


async def test_a_second_signal_cuts_the_waiting_for_clients_short(place: MpsPlace) -> None:
    """The first one waits as long as the setting allows."""
    place.becomes("clients", "500 501\n")
    async with program(place, "--mps.drain-timeout-s=3600") as process:
        await log_until(process, "mps_condition", condition="serving")
        process.send_signal(signal.SIGTERM)
        await log_until(process, "mps_waits_for_clients")
        process.send_signal(signal.SIGTERM)
        code, err = await end_of(process)
    assert code == 0 and "mps_drain_cut_short" in err


@pytest.mark.skipif(os.geteuid() != 0, reason="the daemon must be root's to serve several users")
async def test_a_daemon_for_several_users_is_started_as_such(place: MpsPlace) -> None:
    """NVIDIA's option follows; without the setting there is none."""
    for flags, options in ((["--mps.multi-user"], " -multiuser-server"), ([], "")):
        async with program(place, *flags) as process:
            await log_until(process, "mps_condition", condition="serving")
            process.send_signal(signal.SIGTERM)
            code, _ = await end_of(process)
        assert code == 0
        assert place.record("daemon ")[-1] == f"daemon {place.daemons()[-1]}{options}"


async def test_a_driver_that_lacks_the_option_is_named(place: MpsPlace) -> None:
    """It ends at once with its usage, and the error says what it was given."""
    place.becomes("old")
    control = place.control()
    daemon = MpsDaemonProcess(control, is_multi_user=True)
    words, _ = await why_given_up(place, control, daemon)
    assert "ended with exit code 1 before it answered; it was given -multiuser-server (mps.multi_user)" in words


async def test_gpus_older_than_volta_get_no_server_for_several_users(
    place: MpsPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their control program takes the option, and the clients of other users fail."""
    monkeypatch.setattr(simulated, "COMPUTE_CAPABILITY", (6, 1))
    settings = load_settings(["--driver=simulated", "--gpus=2", "--mps.multi-user", *place.flags()], {}).settings
    with pytest.raises(StartupError, match=r"GPU 0, 1 is older than Volta .*Set mps.multi_user to false"):
        await supervise(settings)
    assert place.daemons() == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may")
async def test_only_root_serves_several_users(place: MpsPlace) -> None:
    """Refused before the daemon's start."""
    async with program(place, "--mps.multi-user") as process:
        code, err = await end_of(process)
    assert code == 1 and "must be started by root" in err and place.daemons() == []


async def test_a_daemon_of_the_deployer_is_not_disturbed(place: MpsPlace) -> None:
    """The command refuses to start a second one, and names the way to go on."""
    fake = place.program.read_text()
    async with open_fake_mps(place.pipe, place.logs, place.program) as daemon:
        script(place.program, fake.partition("\n")[2])
        async with program(place) as process:
            code, err = await end_of(process)
        assert code == 1 and place.daemons() == []
        (last,) = [line for line in err.splitlines() if line.startswith("gpushare-agent: ")]
        assert "already runs" in last and "a process listens" in last and "echo quit" in last
        assert daemon.commands == [] and (place.pipe / "control").is_socket()


async def test_without_the_program_the_command_ends_at_once(place: MpsPlace) -> None:
    """With what to install."""
    place.program.unlink()
    async with program(place) as process:
        code, err = await end_of(process)
    assert code == 1 and "is not installed" in err and "Traceback" not in err


async def test_a_supervisor_that_was_killed_leaves_its_daemon_to_its_clients(place: MpsPlace) -> None:
    """The next one refuses, naming it; nobody ends a daemon that he has not started."""
    command = (sys.executable, "-m", "gpushare_agent", "mps", *place.flags())
    with (place.root / "stderr").open("wb") as log:  # a pipe would stay open as long as the daemon lives
        process = await asyncio.create_subprocess_exec(*command, env=clean_environment(), stderr=log)
    try:
        await poll_until(lambda: place.record("set_default"), "a daemon with its default")
        process.kill()
        await process.wait()
        (pid,) = place.daemons()
        assert is_alive(pid)
        second = await run_program(*command[3:])
        assert second.code == 1 and "left alone" in second.err and is_alive(pid)
    finally:
        await place.control().quit()
    await poll_until(lambda: not is_alive(pid), "the daemon's end")
