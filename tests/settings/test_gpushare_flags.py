"""The flags of GPUShare's device plugin, and of HAMi's: taken, or answered with what to write."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpushare_agent import __main__
from gpushare_agent import commands as command_line
from gpushare_agent.agent.commands.former_daemonset import start
from gpushare_agent.core.cli import interrupts
from gpushare_agent.core.settings.settings import SettingsError, load_settings
from gpushare_agent.core.settings.sources import GPUSHARE_DAEMONSET, GPUSHARE_PROGRAM, read_gpushare

DAEMONSET = ("-logtostderr", "--v=5", "--memory-unit=GiB")
"""device-plugin-ds.yaml; the document on MPS adds --mps-pipe."""


def test_the_command_line_of_the_daemonset_serves_gpu_mem() -> None:
    """As it stands there, with nothing lost."""
    loaded = load_settings(DAEMONSET, {})
    settings = loaded.settings
    assert (settings.gpushare.enabled, settings.gpushare.unit, settings.log.level) == (True, "GiB", "debug")
    assert settings.isolation == "gpushare"
    assert [loaded.outcome(key)[0] for key in loaded.migrated] == [False, False, False]


def test_the_unit_is_one_of_two() -> None:
    """Another one is a mistake, where GPUShare goes on with GiB."""
    assert load_settings(["--memory-unit", "MiB"], {}).settings.gpushare.unit == "MiB"
    assert not load_settings(["--memory-unit=MiB", "--gpushare.enabled=false"], {}).settings.gpushare.enabled
    with pytest.raises(SettingsError, match="'KiB' is not allowed; allowed: GiB or MiB"):
        load_settings(["--memory-unit=KiB"], {})


def test_the_pipe_directory_alone_switches_mps_on() -> None:
    """As GPUShare is started with MPS; an isolation that any place names wins."""
    loaded = load_settings([*DAEMONSET, "--mps-pipe=/root/nvidia-mps"], {})
    assert (loaded.settings.isolation, loaded.settings.mps.pipe_directory) == ("mps", Path("/root/nvidia-mps"))
    assert loaded.sources["isolation"] == "flag --mps-pipe"
    assert load_settings(["--mps-pipe=/p"], {"GPUSHARE_ISOLATION": "none"}).settings.isolation == "none"
    assert load_settings(["--mps.pipe-directory=/p"], {}).settings.isolation == "gpushare"


@pytest.mark.parametrize(("flag", "isolation"), [("--mps", "mps"), ("--mps=true", "mps"), ("--mps=false", "gpushare")])
def test_mps_is_an_isolation(flag: str, isolation: str) -> None:
    """Off is GPUShare's default, and loses nothing."""
    loaded = load_settings([flag], {})
    assert (loaded.settings.isolation, loaded.outcome(loaded.migrated[0])[0]) == (isolation, False)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpus-memory-mib", "24GB"], "did you mean --gpu-memory-mib"),
        (["--gpu-memory-mib", "24GB"], "24GB is 24576"),
        (["--resources.memory-block-mib=1Gi"], "1Gi is 1024"),
        (["--memory-units=GiB"], "did you mean --memory-unit"),
        (["--node-config-path=/n.yaml"], "by --config"),
    ],
)
def test_a_mistake_leads_to_the_right_setting(flags: list[str], words: str) -> None:
    """By name, and by the number for a size with its unit."""
    with pytest.raises(SettingsError, match=words):
        load_settings(flags, {})


@pytest.mark.parametrize(
    ("value", "excluded"), [("0,2", ("0", "2")), ("0-2", ("0", "1", "2")), ("1..2,GPU-7", ("1", "2", "GPU-7"))]
)
def test_vgpu_managers_excluded_devices_are_the_setting(value: str, excluded: tuple[str, ...]) -> None:
    """With its ranges."""
    assert load_settings([f"--exclude-devices={value}"], {}).settings.excluded_gpus == excluded


def test_gpushares_program_is_the_command_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name in the DaemonSet, with its flags; `read_gpushare` finds which it was."""
    called: list[list[str]] = []
    monkeypatch.setattr(command_line, "main", lambda: called.append(sys.argv[1:]) or 0)
    monkeypatch.setattr(interrupts, "hold_hangup", lambda: called.append(["SIGHUP waits"]))
    monkeypatch.setattr(sys, "argv", ["gpushare-device-plugin-v2", *DAEMONSET])
    monkeypatch.setenv(GPUSHARE_PROGRAM, "")
    try:
        assert __main__.run_as_gpushare() == 0
    finally:
        interrupts.raise_error()
    assert called == [["SIGHUP waits"], ["run", *DAEMONSET]]
    assert os.environ[GPUSHARE_PROGRAM] == "gpushare-device-plugin-v2"


OF_PROGRAM = {GPUSHARE_PROGRAM: "gpushare-device-plugin-v2"}


def test_its_daemonset_mounts_the_plugin_directory_alone(tmp_path: Path) -> None:
    """In its own PID namespace: no path leads to the host. Its account may neither patch nodes nor delete pods."""
    found = {name: raw.value for name, raw in read_gpushare(OF_PROGRAM, tmp_path, tmp_path).values.items()}
    assert found == {
        "gpushare.enabled": "true",
        "kubelet.pod_resources_socket": "",
        "state_directory": "",
        "isolation": "none",
        "facts.is_written": "false",
        "allocation.cleanup_rejected_pods": "false",
    }
    assert read_gpushare({}, tmp_path, tmp_path).values == {}


def test_with_the_mounts_of_ours_it_limits_shares(tmp_path: Path) -> None:
    """What is mounted is used. The image has the directory of the isolation, so its being there says nothing."""
    for path in ("var/lib/kubelet/pod-resources", "var/lib/gpushare-agent", "etc/gpu-manager", "proc/self"):
        (tmp_path / path).mkdir(parents=True)
    assert read_gpushare(OF_PROGRAM, tmp_path, tmp_path).values["isolation"].value == "none"
    line = "601 590 254:0 /etc/gpu-manager /etc/gpu-manager rw,relatime - ext4 /dev/root rw\n"
    (tmp_path / "proc/self/mountinfo").write_text(line, encoding="utf-8")
    found = read_gpushare(OF_PROGRAM, tmp_path, tmp_path).values
    assert found.keys() == {"gpushare.enabled", "facts.is_written", "allocation.cleanup_rejected_pods"}


def test_a_setting_from_any_place_beats_those_of_its_daemonset() -> None:
    """Also the isolation of its own flag."""
    loaded = load_settings([*DAEMONSET, "--mps-pipe=/p"], {**OF_PROGRAM, "GPUSHARE_FACTS__IS_WRITTEN": "true"})
    assert (loaded.settings.isolation, loaded.settings.facts.is_written) == ("mps", True)
    assert loaded.sources["allocation.cleanup_rejected_pods"] == GPUSHARE_DAEMONSET


def test_what_its_account_may_not_do_is_said_at_the_start() -> None:
    """A warning each, with the setting that does without it; the mounts of this machine are not a container's."""
    with capture_logs() as logged:
        start(load_settings(DAEMONSET, OF_PROGRAM), {})
    found = {line["right"]: line["then"] for line in logged if line["event"] == "right_missing"}
    assert found == {"patch nodes": "facts.is_written=false", "delete pods": "allocation.cleanup_rejected_pods=false"}
