"""Programs of a GPU measurement: their lines, their waiting, their bounds; and the containers they run in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import container
from bench.gpu.programs import StepFailed, run_program
from bench.gpu.sandbox import sample_of, why_no_namespaces

WAITS = """
import sys
print('a library prints this')
print('{"action": "first", "value": 1}', flush=True)
print('{"action": "wait"}', flush=True)
print('{"action": "second", "read": "%s"}' % repr(sys.stdin.readline()).replace(chr(92), ''), flush=True)
"""


def test_a_program_goes_on_when_it_is_told() -> None:
    """What stands between is called while it waits; lines that are no JSON are passed over."""
    waits: list[int] = []
    outcome = run_program([sys.executable, "-c", WAITS], env=dict(os.environ), timeout_s=30.0, at_wait=waits.append)
    assert waits == [0]
    assert [line["action"] for line in outcome.lines] == ["first", "wait", "second"]
    assert outcome.code == 0


def test_a_program_that_ends_early_says_why() -> None:
    """Exit code and the end of standard error are in the reason of the failed step."""
    script = 'import sys; print(\'{"action": "start", "failed": "cuInit"}\'); sys.exit(\'no GPU\')'
    outcome = run_program([sys.executable, "-c", script], env=dict(os.environ), timeout_s=30.0, at_wait=lambda _: None)
    with pytest.raises(StepFailed, match=r"exit code 1; cuInit: ; no GPU"):
        outcome.first("launch")


def test_a_program_that_hangs_is_ended() -> None:
    """With its process group, and the step fails for that reason."""
    outcome = run_program(["sleep", "600"], env=dict(os.environ), timeout_s=0.2)
    assert outcome.code is None
    assert outcome.why() == "its time was over"


def test_a_sample_is_found_by_its_labels() -> None:
    """In the agent's metrics; None where it has no such row."""
    metrics = '# HELP x\nx{pod="a",gpu="0"} 1.5\nx{pod="b",gpu="0"} 2\n'
    assert sample_of(metrics, "x", pod="b") == 2.0
    assert sample_of(metrics, "x", pod="c") is None


def test_without_namespaces_the_hosts_paths_take_the_places(tmp_path: Path) -> None:
    """In the environment, and the preload file becomes LD_PRELOAD."""
    preload = tmp_path / "ld.so.preload"
    preload.write_text("/usr/local/vgpu/libvgpu.so\n")
    mounts = [
        {"container_path": "/etc/ld.so.preload", "host_path": str(preload)},
        {"container_path": "/usr/local/vgpu/libvgpu.so", "host_path": "/opt/lib/libvgpu.so"},
        {"container_path": "/usr/local/nvidia", "host_path": "/srv/driver"},
    ]
    environment = {"LD_LIBRARY_PATH": "/usr/local/nvidia/lib64:/lib", "CORES": "30"}
    assert container.by_hand(environment, mounts) == {
        "LD_LIBRARY_PATH": "/srv/driver/lib64:/lib",
        "CORES": "30",
        "LD_PRELOAD": "/opt/lib/libvgpu.so",
    }


def test_without_namespaces_libgpushare_finds_its_limits_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes no path from anybody, so a copy of it is preloaded."""
    monkeypatch.chdir(tmp_path)
    limits, library = tmp_path / "limits", tmp_path / "libgpushare.so"
    limits.mkdir()
    library.write_bytes(b"code /etc/vcuda/usage\0 data")
    mounts = [
        {"container_path": "/etc/vcuda", "host_path": str(limits)},
        {"container_path": "/etc/vcuda/usage", "host_path": str(limits / "usage")},
    ]
    environment = {"LD_PRELOAD": str(library)}
    container.enter_by_hand(environment, mounts, tmp_path / "limits")
    assert Path.cwd() == limits
    assert Path(environment["LD_PRELOAD"]).read_bytes() == b"code .//////////usage\0 data"


def test_a_container_has_the_answered_mounts_and_the_machine_stays_as_it_is(tmp_path: Path) -> None:
    """Mount points that the machine lacks, its own files next to them, only the answered GPUs' nodes, and its PIDs."""
    if os.geteuid() != 0 or (why := why_no_namespaces()):
        pytest.skip(f"no namespaces: {'not root' if os.geteuid() else why}")
    (tmp_path / "staging").mkdir()
    (tmp_path / "limits").mkdir()
    (tmp_path / "limits" / "share").write_text("30")
    (tmp_path / "one-file").write_text("a file")
    mounts = [
        {"host_path": str(tmp_path / "limits"), "container_path": "/etc/gpushare-test/limits", "read_only": True},
        {"host_path": str(tmp_path / "one-file"), "container_path": "/etc/gpushare-test.conf", "read_only": False},
    ]
    spec = {
        "mounts": mounts, "devices": [{"container_path": "/dev/nvidia7"}], "library_path": "/srv/driver",
        "path": "/usr/bin:/bin", "staging": str(tmp_path / "staging"), "uid": 65534, "has_namespaces": True,
    }  # fmt: skip
    (tmp_path / "spec").write_text(json.dumps(spec))
    tmp_path.chmod(0o755)
    shell = (
        "cat /etc/gpushare-test/limits/share /etc/gpushare-test.conf; echo; id -u; echo $$; echo $LD_LIBRARY_PATH; "
        "test -e /etc/passwd && test -e /dev/null && test -d /dev/shm && echo kept; "
        "touch /etc/gpushare-test/limits/x 2>/dev/null || echo refused"
    )
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", sys.executable, container.__file__]
    done = subprocess.run(
        [*command, str(tmp_path / "spec"), "--", "sh", "-c", shell],
        capture_output=True, text=True, timeout=30, check=False, env={"LD_LIBRARY_PATH": "/answered"},
    )  # fmt: skip
    expected = ["30a file", "65534", "1", "/answered:/srv/driver", "kept", "refused"]
    assert done.stdout.splitlines() == expected, done.stderr
    assert not Path("/etc/gpushare-test").exists()
    assert not Path("/etc/gpushare-test.conf").exists()
