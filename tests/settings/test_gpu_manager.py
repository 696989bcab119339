"""settings/sources.py: the variables of gpu-manager's image, the flags of gpu-manager and gpu-admission, and of all programs
those that do nothing."""

from __future__ import annotations

import asyncio
from operator import attrgetter
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.commands.check import check_files
from gpushare_agent.agent.commands.former_daemonset import start
from gpushare_agent.core.model.finding import Level
from gpushare_agent.core.settings.reference import text_of
from gpushare_agent.core.settings.settings import SettingsError, load_settings
from gpushare_agent.core.settings.sources import GPU_MANAGER_DAEMONSET, read_gpu_manager


@pytest.mark.parametrize(
    ("value", "level"), [("0", "info"), ("4", "info"), ("5", "debug"), ("warning", "warning"), ("warn", "warning")]
)
def test_log_level_is_klogs_number_or_a_word(value: str, level: str) -> None:
    """`warn` is of GPUShare's extender. Below our own variable, above the file."""
    assert load_settings([], {"LOG_LEVEL": value}).settings.log.level == level
    loaded = load_settings([], {"LOG_LEVEL": value, "GPUSHARE_LOG__LEVEL": "error"})
    assert loaded.settings.log.level == "error" and loaded.outcome(loaded.migrated[0])[0]


def test_extra_flags_are_flags() -> None:
    """gpu-manager's names and ours, with klog's own reported."""
    text = "--v=5 --hostname-override=n1 --share-mode=false --logtostderr=false --query-port 5679"
    loaded = load_settings([], {"EXTRA_FLAGS": text})
    settings = loaded.settings
    assert (settings.node_name, settings.share_mode, settings.web.port) == ("n1", False, 5679)
    assert settings.log.level == "debug"
    assert [key.name for key in loaded.migrated if key.is_lost] == ["EXTRA_FLAGS --logtostderr"]
    assert loaded.sources["web.port"] == "variable EXTRA_FLAGS, flag --query-port"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("EXTRA_FLAGS", "--no-such-flag=1", "variable EXTRA_FLAGS: flag --no-such-flag is unknown"),
        ("EXTRA_FLAGS", "--a='", "cannot be parted into words"),
        ("LOG_LEVEL", "loud", "is no log level"),
    ],
)
def test_mistakes_name_the_variable(name: str, value: str, words: str) -> None:
    """And end the start."""
    with pytest.raises(SettingsError, match=words):
        load_settings([], {name: value})


def test_libcuda_is_reported() -> None:
    """It changes nothing here."""
    (key,) = load_settings([], {"LIBCUDA": "/x"}).migrated
    assert key.is_lost and "volume_config" in key.reason


GPU_MANAGER = {
    "driver": ("nvidia", "driver", "nvml"),
    "extra-config": ("/x.json", "extra_config", "/x.json"),
    "volume-config": ("/v.conf", "volume_config", "/v.conf"),
    "query-port": ("5679", "web.port", "5679"),
    "query-addr": ("0.0.0.0", "web.addr", "0.0.0.0"),
    "kubeconfig": ("/k", "kubeconfig", "/k"),
    "sample-period": ("2", "sample_period_s", "2"),
    "node-labels": ("zone=a", "node_labels", "zone=a"),
    "hostname-override": ("n1", "node_name", "n1"),
    "virtual-manager-path": ("/vm", "virtual_manager.path", "/vm"),
    "device-plugin-path": ("/dp", "kubelet.device_plugin_path", "/dp"),
    "share-mode": ("false", "share_mode", "false"),
    "allocation-check-period": ("60", "allocation.check_period_s", "60"),
    "container-runtime-endpoint": ("/var/run/crio.sock", "runtime.endpoint", "/var/run/crio.sock"),
    "cgroup-driver": ("systemd", "runtime.cgroup_driver", "systemd"),
    "runtime-request-timeout": ("5s", "runtime.request_timeout_s", "5"),
}
"""cmd/manager/options of gpu-manager v1.1.5 but for checkpoint-path: a value, our setting, what that is then."""


@pytest.mark.parametrize("flag", GPU_MANAGER)
def test_every_flag_of_gpu_manager_is_a_setting(flag: str) -> None:
    """On the command line, with - or _ in its name, and in EXTRA_FLAGS."""
    given, name, value = GPU_MANAGER[flag]
    for loaded in (
        load_settings([f"--{flag}={given}"], {}),
        load_settings([f"--{flag.replace('-', '_')}", given], {}),
        load_settings([], {"EXTRA_FLAGS": f"--{flag}={given}"}),
    ):
        assert text_of(attrgetter(name)(loaded.settings)) == value
        assert loaded.sources[name].endswith(("flag --" + flag, "flag --" + flag.replace("-", "_")))


def test_the_display_socket_of_the_service_unit_is_taken() -> None:
    """gpu-manager.conf has --addr."""
    assert load_settings(["--addr=/run/x.sock"], {}).settings.display.socket == Path("/run/x.sock")


NOTHING_LOST = """
    --logtostderr -logtostderr --alsologtostderr --incluster-mode=false
    --checkpoint-path=/etc/gpu-manager/checkpoint --wait-timeout=1m0s
    --health-check --query-kubelet --open-kernel-modules --domain=nvidia.com
    --device-memory-scaling=1 --disable-core-limit=false --device-memory-factor=1
"""
"""Of klog and gpu-admission, gpu-manager's manifests, GPUShare and HAMi, in this order."""
LOST = """
    --logtostderr=false --log-dir=/var/log/gpu-manager --log_dir=/var/log/gpu-manager --stderrthreshold=2
    --vmodule=tree=5 --log-backtrace-at=main.go:12 --pprofAddress=127.0.0.1:3457
    --checkpoint-path=/c --wait-timeout=2m
    --health-check=false --kubelet-address=10.0.0.1 --kubelet-port=10250 --client-cert=/c --client-key=/k --token=secret
    --timeout=10 --domain=example.com
    --device-split-count=10 --device-memory-scaling=1.8 --device-cores-scaling=2 --disable-core-limit
    --resource-name=nvidia.com/gpu --device-memory-factor=1024 --feature-gates=SharedSMUtilizationWatcher=true
"""


@pytest.mark.parametrize(
    ("flag", "is_lost"), [(flag, text is LOST) for text in (NOTHING_LOST, LOST) for flag in text.split()]
)
def test_a_flag_without_effect_is_accepted_and_reported_once(flag: str, is_lost: bool) -> None:
    """As in EXTRA_FLAGS, with why; a warning only where something is lost. A secret is not repeated."""
    loaded = load_settings([flag], {})
    (key,), (extra,) = loaded.migrated, load_settings([], {"EXTRA_FLAGS": flag}).migrated
    assert (loaded.outcome(key)[0], key.settings, bool(key.reason)) == (is_lost, {}, True)
    assert (extra.name, extra.is_lost) == (f"EXTRA_FLAGS {key.name}", is_lost)
    assert "secret" not in key.value + extra.value


@pytest.mark.parametrize("flags", [["--v=5"], ["-v=5"], ["-v", "5"], ["--v", "5"]])
def test_klogs_verbosity_is_the_log_level(flags: list[str]) -> None:
    """A level of ours beats it, wherever it stands."""
    loaded = load_settings(flags, {"LOG_LEVEL": "warning"})
    assert (loaded.settings.log.level, len(loaded.migrated)) == ("debug", 2)
    assert load_settings(["--log.level=error", *flags], {}).settings.log.level == "error"


@pytest.mark.parametrize(
    ("value", "addr", "port"), [("127.0.0.1:3456", "127.0.0.1", 3456), ("[::1]:80", "::1", 80), (":3456", "", 3456)]
)
def test_gpu_admissions_address_is_the_extenders(value: str, addr: str, port: int) -> None:
    """Host and port in one flag, as Go listens."""
    extender = load_settings([f"--address={value}"], {}).settings.extender
    assert (extender.addr, extender.port) == (addr, port)


def test_gpu_admissions_configuration_is_named_by_the_same_flag(tmp_path: Path) -> None:
    """`--config` of its command line is its own file, not one of ours."""
    path = tmp_path / "gpu-admission.config"
    path.write_text('{"GPUModelLabel": "a/model", "GPUPoolLabel": "a/pool"}', encoding="utf-8")
    loaded = load_settings([f"--config={path}"], {})
    assert loaded.settings.extender.config == path
    assert loaded.outcome(loaded.migrated[0]) == (False, f"extender.config={path}")


GPU_MANAGERS_MOUNTS = (
    "var/lib/kubelet/device-plugins", "etc/gpu-manager/vdriver", "etc/gpu-manager/vm", "etc/gpu-manager/checkpoint",
    "usr/local/host"
)  # fmt: skip


@pytest.fixture
def container(tmp_path: Path) -> Path:
    """The file system of gpu-manager's container, with the host's next to it."""
    for path in (*GPU_MANAGERS_MOUNTS, "host/var/lib/kubelet/pod-resources", "host/usr"):
        (tmp_path / path).mkdir(parents=True)
    return tmp_path


def start_script(container: Path, flags: str = "--logtostderr=false") -> dict[str, object]:
    layer = read_gpu_manager({"EXTRA_FLAGS": flags}, container, container / "host")
    return {name: raw.value for name, raw in layer.values.items()}


def test_gpu_managers_daemonset_finds_the_host_where_it_mounts_nothing(container: Path) -> None:
    """Its container is privileged and in the host's PID namespace; state goes where gpu-manager's went."""
    assert start_script(container) == {
        "web.addr": "",
        "kubelet.pod_resources_socket": f"{container}/host/var/lib/kubelet/pod-resources/kubelet.sock",
        "state_directory": f"{container}/etc/gpu-manager/checkpoint/gpushare-agent",
        "driver_volume.root": f"{container}/host",
        "driver_volume.mount": "true",
    }


def test_version_1_1_0_has_no_checkpoint_directory(container: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing of the host is there for state: said at the start, and by `check`."""
    (container / "etc/gpu-manager/checkpoint").rmdir()
    found = start_script(container)
    assert found["state_directory"] == ""
    settings = load_settings(["--state-directory=", "--driver=simulated"], {})
    source = {**settings.sources, "state_directory": GPU_MANAGER_DAEMONSET}
    start(replace(settings, sources=source), {})
    logged = " ".join(capsys.readouterr().out.split())
    assert "mount_missing" in logged and "sizes of resized shares are lost" in logged
    (first, *_) = asyncio.run(check_files(settings.settings))
    assert (first.level, first.what) == (Level.WARNING, "state") and "cordons" in first.detail


def test_what_is_mounted_or_flagged_is_taken_as_it_is(container: Path) -> None:
    """A manifest that has the mounts gets the defaults; EXTRA_FLAGS beat what the start script passes."""
    for path in ("var/lib/kubelet/pod-resources", "var/lib/gpushare-agent"):
        (container / path).mkdir(parents=True)
    found = start_script(container, "--query-addr=localhost")
    assert found.keys() == {"web.addr", "driver_volume.root", "driver_volume.mount"}
    assert found["web.addr"] == "localhost"


def test_without_privileges_the_host_is_not_reached(container: Path) -> None:
    """/proc/1/root is then closed: pods are identified by the API server alone, and a warning names the mount."""
    (container / "host").rename(container / "closed")
    found = start_script(container)
    assert found["kubelet.pod_resources_socket"] == "" and "driver_volume.root" not in found


def test_an_image_with_the_control_library_goes_on_with_it(container: Path) -> None:
    """As gpu-manager limits shares; any other image has this project's library."""
    (container / "usr/lib64").mkdir()
    (container / "usr/lib64/libcuda-control.so").touch()
    assert start_script(container)["isolation"] == "vcuda"


def test_the_extra_config_of_the_start_script_is_read(container: Path) -> None:
    """Where the image or a mount has it."""
    path = container / "etc/gpu-manager/extra-config.json"
    path.write_text("{}", encoding="utf-8")
    assert start_script(container)["extra_config"] == str(path)


def test_without_extra_flags_nothing_of_the_start_script_is_so(container: Path) -> None:
    """LOG_LEVEL alone is a name that other programs have, too: it opens no port."""
    assert set(read_gpu_manager({"LOG_LEVEL": "4"}, container, container / "host").values) == {"log.level"}
