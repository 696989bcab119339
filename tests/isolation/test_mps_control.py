"""Commands to the MPS control daemon through its control program, and its directories; programs are real ones."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from gpushare_agent.agent.isolation.mps import control as mps_control
from gpushare_agent.agent.isolation.mps.control import MpsControl
from gpushare_agent.agent.isolation.mps.files import DAEMON_FILES, PID_FILE, MpsFiles
from gpushare_agent.core.model.errors import StartupError, Unavailable
from gpushare_agent.sandbox.fake_mps import open_fake_mps
from tests.isolation.support_mps import MpsPlace, mps_place, poll_until, script
from tests.isolation.support_vdevice import plant
from tests.sandbox.support_containers import is_alive

ABSENT = Path("nvidia-cuda-mps-control-that-nobody-has")


@pytest.fixture
def place(short_dir: Path) -> MpsPlace:
    return mps_place(short_dir)


@contextmanager
def socket_at(path: Path, *, listens: bool) -> Iterator[None]:
    """A unix socket, as a living daemon's, or as a dead one has left it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(path))
        if listens:
            sock.listen()
        yield
    path.unlink()


async def reason(control: MpsControl) -> str:
    with pytest.raises(Unavailable) as raised:
        await control.check()
    return str(raised.value)


# --- commands ---


async def test_commands_reach_the_daemon_in_its_own_words(place: MpsPlace) -> None:
    """And its answers come back as values."""
    async with open_fake_mps(place.pipe, place.logs, place.program) as daemon:
        daemon.clients = {41: [43, 42]}
        control = place.control()
        await control.check()
        assert await control.list_clients() == [42, 43]
        await control.set_default_active_thread_percentage(50)
        assert await control.get_default_active_thread_percentage() == 50.0
        await control.quit()
        assert daemon.is_ended.is_set()
        assert daemon.commands == [
            "get_default_active_thread_percentage",
            "get_server_list",
            "get_client_list 41",
            "set_default_active_thread_percentage 50",
            "get_default_active_thread_percentage",
            "quit",
        ]


async def test_the_program_gets_the_directories_and_little_else(
    place: MpsPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the agent's own environment that MPS does not need."""
    monkeypatch.setenv("GPUSHARE_SECRET", "1")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/nvidia/lib64")
    seen = place.root / "seen"
    script(place.program, f"tr '\\0' '\\n' < /proc/$$/environ > {seen}; echo 100.0")
    assert await place.control().get_default_active_thread_percentage() == 100.0
    found = dict(line.split("=", 1) for line in seen.read_text().splitlines())
    assert found == {
        "PATH": os.environ["PATH"],
        "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64",
        "CUDA_MPS_PIPE_DIRECTORY": str(place.pipe),
        "CUDA_MPS_LOG_DIRECTORY": str(place.logs),
    }


async def test_a_program_that_hangs_is_killed_with_what_it_started(place: MpsPlace) -> None:
    """After the time for a command; nothing of it is left."""
    pids = place.root / "pids"
    script(place.program, f"sleep 3600 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait")
    words, timeout_s = await reason_once(place, pids.exists)
    assert f"no answer to get_default_active_thread_percentage within {timeout_s:g} s" in words
    for pid in map(int, pids.read_text().split()):
        await poll_until(lambda pid=pid: not is_alive(pid), f"the end of {pid}")  # type: ignore[misc]


async def reason_once(place: MpsPlace, has_begun: Callable[[], bool]) -> tuple[str, float]:
    """The reason with the first time limit in which this machine gets the program as far as that, and the limit."""
    for timeout_s in (0.2, 1.0, 5.0, 25.0):
        words = await reason(place.control(timeout_s=timeout_s))
        if has_begun():
            return words, timeout_s
    raise AssertionError(f"the program has not begun within 25 s: {words}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo lorem ipsum", "is invalid: 'lorem ipsum'"),
        ("echo 0.0", "is invalid"),
        ("echo nan", "is invalid"),
        ("printf '\\377\\000'", "is invalid"),
        ("true", "is invalid: ''"),
        ("echo no daemon >&2; exit 1", "exit code 1): no daemon"),
        ("exit 4", "exit code 4): it gave no reason"),
        ("kill -9 $$", "exit code -9)"),
        ("exec 0<&-; echo 50.5x", "is invalid"),
        ("yes | head -c 70000", "longer than 65536 bytes"),
        ("yes", "longer than 65536 bytes"),
    ],
)
async def test_an_answer_that_is_none_is_reported(place: MpsPlace, text: str, words: str) -> None:
    """With what the program said, shortened; a stream without end is cut off."""
    script(place.program, text)
    found = await reason(place.control())
    assert words in found and len(found) < 1000


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ("echo 12 -3", ": '12 -3'"),
        ("read asked; case $asked in get_server_list) echo 12;; *) echo 12 -3;; esac", ": '12 -3'"),
        pytest.param("head -c 5000 /dev/zero | tr '\\000' 7", "", id="digits that Python refuses to read"),
    ],
)
async def test_numbers_that_are_none_are_reported(place: MpsPlace, answers: str, says: str) -> None:
    """Lists of PIDs are checked entry by entry: the servers', and each server's clients."""
    script(place.program, answers)
    with pytest.raises(Unavailable, match=f"is invalid{says}"):
        await place.control().list_clients()


async def test_a_descendant_that_keeps_the_output_open_costs_no_descriptor(place: MpsPlace) -> None:
    """It may live on in a session of its own, beyond any kill; our ends of the pipes are closed all the same."""
    program = place.root / "lives-on"
    program.symlink_to(shutil.which("sleep") or "")
    script(place.program, f"setsid {program} 3600 & echo 100.0")

    def living() -> list[int]:
        """Also one that is on its way to becoming that program: its arguments still name the script next to it."""
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and names(path, place.root)]

    try:
        _, timeout_s = await reason_once(place, lambda: bool(living()))
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            await reason(place.control(timeout_s=timeout_s))
        await poll_until(lambda: len(os.listdir("/proc/self/fd")) <= before, "as many descriptors as before")
    finally:
        while found := living():
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def names(process: Path, word: Path) -> bool:
    """Whether the arguments of a process, /proc/PID, have the word."""
    try:
        return os.fsencode(word) in (process / "cmdline").read_bytes()
    except OSError:
        return False


async def test_a_program_that_cannot_be_run_is_reported(place: MpsPlace) -> None:
    """A file that the kernel does not take for a program, and none at all."""
    place.program.write_bytes(b"\x7fELF, or so")
    with pytest.raises(Unavailable, match="cannot be run"):
        await place.control().quit()
    with pytest.raises(Unavailable, match="is not installed, so quit was not sent"):
        await place.control(program=ABSENT).quit()


# --- the pipe directory ---


@pytest.mark.parametrize(
    ("planted", "words"), [("file", "is not a directory"), ("", "No such file"), ("dangling", "No such file")]
)
async def test_a_pipe_directory_that_is_none_is_reported_without_asking(
    place: MpsPlace, planted: str, words: str
) -> None:
    """The program is not run: it would answer of another place."""
    script(place.program, f"touch {place.root}/ran; echo 100.0")
    place.pipe.rmdir()
    if planted:
        plant(planted, place.pipe, place.root)
    found = await reason(place.control())
    assert words in found and str(place.pipe) in found
    assert not (place.root / "ran").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
async def test_a_pipe_directory_of_another_user_is_not_believed(place: MpsPlace) -> None:
    """Whoever owns it decides who answers there."""
    script(place.program, "echo 100.0")
    os.chown(place.pipe, 12345, 12345)
    assert "belongs to user 12345, neither to root" in await reason(place.control())
    os.chown(place.pipe, 0, 0)
    await place.control().check()


def test_a_path_that_cannot_hold_sockets_is_reported(place: MpsPlace) -> None:
    """A relative one, and one that is too long for a unix address."""
    assert "not an absolute path" in MpsFiles(Path("pipe"), place.logs, "x").obstacle()
    assert "too long" in MpsFiles(Path("/" + "x" * 100), place.logs, "x").obstacle()


# --- without the control program ---


async def test_without_the_program_the_daemon_serves_if_somebody_listens(place: MpsPlace) -> None:
    """All that an agent's image without the driver's programs can find out."""
    control = place.control(program=ABSENT)
    assert "there is no MPS control socket" in await reason(control)
    (place.pipe / "control").write_text("")
    assert "is no socket" in await reason(control)
    (place.pipe / "control").unlink()
    with socket_at(place.pipe / "control", listens=False):
        assert "has ended" in await reason(control)
    with socket_at(place.pipe / "control", listens=True):
        await control.check()


# --- who lives there, and what a dead one left ---


def files_of(place: MpsPlace, program: str = "nvidia-cuda-mps-control") -> MpsFiles:
    return MpsFiles(place.pipe, place.logs, program)


def test_a_living_daemon_is_known_by_its_socket_its_lock_or_its_pid(place: MpsPlace) -> None:
    """Any one of them is enough to leave it alone."""
    files = files_of(place)
    assert files.live_daemon() == ""
    with socket_at(place.pipe / "control", listens=True):
        assert "a process listens" in files.live_daemon()
    lock = place.pipe / "control_lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "has locked" in files.live_daemon()
    own_name = Path("/proc/self/comm").read_text().strip()
    (place.pipe / PID_FILE).write_text(f"{os.getpid()}\n")
    assert f"names PID {os.getpid()}" in files_of(place, own_name).live_daemon()


@pytest.mark.parametrize(
    "text",
    ["", "-1", "0", "lorem", "9" * 20, "4194305", pytest.param(str(os.getpid()), id="another program")],
)
def test_a_pid_file_that_names_no_daemon_means_none(place: MpsPlace, text: str) -> None:
    """A dead PID, one that another program has by now, and nonsense."""
    (place.pipe / PID_FILE).write_text(text)
    assert files_of(place).live_daemon() == ""


def test_only_what_a_daemon_makes_is_removed(place: MpsPlace) -> None:
    """Other files in the pipe directory are somebody's."""
    for name in (*DAEMON_FILES, "notes", "control.txt"):
        (place.pipe / name).write_text("")
    assert files_of(place).remove_stale() == list(DAEMON_FILES)
    assert sorted(path.name for path in place.pipe.iterdir()) == ["control.txt", "notes"]
    assert files_of(place).remove_stale() == []
    (place.pipe / "log").mkdir()
    with pytest.raises(StartupError, match="cannot be removed"):
        files_of(place).remove_stale()


def test_directories_are_made_for_everybody_to_read(short_dir: Path) -> None:
    """Servers run as their clients' users and must reach them; what exists is kept as it is."""
    pipe, logs, shared = short_dir / "a/pipe", short_dir / "a/log", short_dir / "shm"
    before = os.umask(0o077)
    try:
        files = MpsFiles(pipe, logs, "x")
        files.make(shared_memory=shared)
        files.make(shared_memory=shared)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (pipe, logs, shared)] == [0o755, 0o755, 0o1777]
    (short_dir / "file").write_text("")
    with pytest.raises(StartupError, match=r"cannot be made .*mps.pipe_directory"):
        MpsFiles(short_dir / "file/pipe", logs, "x").make()
    with pytest.raises(StartupError, match="cannot be made"):
        MpsFiles(short_dir / "file", logs, "x").make()


async def test_the_longest_answer_is_still_taken(place: MpsPlace) -> None:
    """The bound is for what is invalid, not for a long list."""
    script(place.program, f"yes 1 | head -c {mps_control.MAX_ANSWER_BYTES}")
    assert await place.control().list_clients() == [1]
