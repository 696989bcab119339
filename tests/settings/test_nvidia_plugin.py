"""settings/nvidia_plugin.py: the configuration of NVIDIA's device plugin as a layer of our settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpushare_agent.core.settings.nvidia_options import OPTIONS
from gpushare_agent.core.settings.nvidia_plugin import parse_nvidia, read_nvidia
from gpushare_agent.core.settings.reference import all_keys
from gpushare_agent.core.settings.settings import LoadedSettings, SettingsError, load_settings
from gpushare_agent.core.settings.sources import Layer

WHOLE = """
version: v1
flags:
  migStrategy: mixed
  failOnInitError: false
  nvidiaDriverRoot: /run/nvidia/driver
  gdsEnabled: true
  deviceDiscoveryStrategy: nvml
  plugin:
    passDeviceSpecs: true
    deviceListStrategy: [envvar, cdi-cri]
    deviceIDStrategy: index
    sharedDevicesAllocationPolicy: packed
resources:
  gpus: [{pattern: "*A100*", name: a100}]
sharing:
  timeSlicing:
    renameByDefault: true
    failRequestsGreaterThanOne: true
    resources:
    - {name: gpu, replicas: 4, rename: gpu.fraction}
    - {name: nvidia.com/mig-1g.10gb, replicas: 2, devices: [0]}
"""


def nvidia_layer(content: bytes, place: str) -> Layer:
    """The layer of one text alone."""
    return read_nvidia({}, {}, parse_nvidia(content, place))


def load(tmp_path: Path, text: str, *argv: str, **environ: str) -> LoadedSettings:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load_settings(argv, {"CONFIG_FILE": str(path), **environ})


def outcomes(loaded: LoadedSettings) -> dict[str, tuple[bool, str]]:
    return {key.name: loaded.outcome(key) for key in loaded.migrated}


def test_a_whole_file_becomes_our_settings(tmp_path: Path) -> None:
    """Each key that this agent honours, as theirs has it."""
    loaded = load(tmp_path, WHOLE)
    nvidia = loaded.settings.nvidia
    assert nvidia.enabled and nvidia.mig_strategy == "mixed" and not loaded.settings.fail_on_init_error
    assert loaded.settings.device_list_strategy == ("envvar", "cdi-cri", "device-nodes")
    assert nvidia.device_ids == "index" and nvidia.replica_policy == "packed"
    assert nvidia.rename_replicas and nvidia.refuses_several_replicas and nvidia.sharing == "time-slicing"
    assert nvidia.replica_counts == (("nvidia.com/gpu", 4), ("nvidia.com/mig-1g.10gb", 2))
    assert loaded.sources["nvidia.mig_strategy"] == f"file {tmp_path / 'config.yaml'} (flags.migStrategy)"


def test_what_is_not_so_here_is_reported_with_its_reason(tmp_path: Path) -> None:
    """And what asks for nothing else is not."""
    found = outcomes(load(tmp_path, WHOLE))
    lost = {name for name, (is_lost, _) in found.items() if is_lost}
    assert lost == {
        "flags.nvidiaDriverRoot", "flags.gdsEnabled", "resources.gpus",
        "sharing.timeSlicing.resources.rename", "sharing.timeSlicing.resources.devices"
    }  # fmt: skip
    assert all(text for _, text in found.values())
    assert "NVIDIA_GDS=enabled" in found["flags.gdsEnabled"][1]


def test_a_flag_beats_a_variable_and_a_variable_the_file(tmp_path: Path) -> None:
    """As in their plugin."""
    text = "flags: {migStrategy: mixed, plugin: {deviceIDStrategy: index}}"
    assert load(tmp_path, text).settings.nvidia.mig_strategy == "mixed"
    assert load(tmp_path, text, MIG_STRATEGY="single").settings.nvidia.mig_strategy == "single"
    loaded = load(tmp_path, text, "--mig-strategy=none", MIG_STRATEGY="single")
    assert loaded.settings.nvidia.mig_strategy == "none" and loaded.settings.nvidia.device_ids == "index"


def test_our_own_settings_win_and_it_is_reported(tmp_path: Path) -> None:
    """Over all places of theirs; also the switch itself."""
    loaded = load(tmp_path, WHOLE, GPUSHARE_NVIDIA__MIG_STRATEGY="none", GPUSHARE_NVIDIA__ENABLED="false")
    assert not loaded.settings.nvidia.enabled and loaded.settings.nvidia.mig_strategy == "none"
    is_lost, text = outcomes(loaded)["flags.migStrategy"]
    assert is_lost and text == "nvidia.mig_strategy=none of variable GPUSHARE_NVIDIA__MIG_STRATEGY is in effect"


@pytest.mark.parametrize("argv", [("--nvidia-config",), ("--nvidia.config",), ("--config-file",)])
def test_every_flag_that_names_the_file(tmp_path: Path, argv: tuple[str, ...]) -> None:
    """Ours, and theirs."""
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"version": "v1", "flags": {"migStrategy": "single"}}, indent="\t"))
    loaded = load_settings([*argv, str(path)], {})
    assert loaded.settings.nvidia.mig_strategy == "single" and loaded.settings.nvidia.config == path


@pytest.mark.parametrize(
    ("plugin", "ours"),
    [
        ({"deviceListStrategy": "envvar,cdi-cri"}, ("envvar", "cdi-cri")),
        ({"deviceListStrategy": ["envvar", "cdi-cri"]}, ("envvar", "cdi-cri")),
        ({"passDeviceSpecs": True}, ("envvar", "device-nodes")),
        ({"passDeviceSpecs": True, "deviceListStrategy": "volume-mounts"}, ("volume-mounts", "device-nodes")),
        ({"passDeviceSpecs": True, "deviceListStrategy": "envvar,cdi-cri"}, ("envvar", "cdi-cri", "device-nodes")),
        ({"passDeviceSpecs": True, "deviceListStrategy": ["cdi-cri"]}, ("cdi-cri",)),
        ({"passDeviceSpecs": True, "deviceListStrategy": "cdi-annotations,cdi-cri"}, ("cdi-annotations", "cdi-cri")),
    ],
)
def test_device_lists_have_device_nodes_unless_cdi_alone_names_the_devices(
    plugin: dict[str, object], ours: tuple[str, ...]
) -> None:
    """Given as a text or as a list. As in their plugin, which leaves passDeviceSpecs aside where each is one of CDI."""
    layer = nvidia_layer(json.dumps({"flags": {"plugin": plugin}}).encode(), "x")
    assert layer.problems == [] and layer.values["device_list_strategy"].value == ours


def test_mps_is_used_in_the_place_of_time_slicing() -> None:
    """Where both are there; several replicas are refused then by default."""
    layer = nvidia_layer(
        b"sharing:\n  timeSlicing: {renameByDefault: true, resources: [{name: gpu, replicas: 2}]}\n"
        b"  mps: {resources: [{name: gpu, replicas: 8}]}\n",
        "x",
    )
    assert layer.values["nvidia.sharing"].value == "mps"
    assert layer.values["nvidia.replicas"].value == ("nvidia.com/gpu=8",)
    assert "nvidia.rename_replicas" not in layer.values
    assert {key.name for key in layer.migrated if key.is_lost} == {
        "sharing.timeSlicing.renameByDefault", "sharing.timeSlicing.resources.name",
        "sharing.timeSlicing.resources.replicas"
    }  # fmt: skip


def test_names_of_keys_in_any_case_and_unknown_ones() -> None:
    """Go's JSON takes flags in any case; a key that is unknown to the plugin too is reported with the nearest."""
    layer = nvidia_layer(b"flags: {MIGSTRATEGY: single, migStratgy: mixed}", "x")
    assert layer.values["nvidia.mig_strategy"].value == "single"
    (unknown,) = [key for key in layer.migrated if key.name == "flags.migStratgy"]
    assert unknown.is_lost and "did you mean flags.migStrategy?" in unknown.reason


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("version: v2", "must be one of v1"),
        ("flags: {migStrategy: double}", "one of none, single, mixed"),
        ("flags: {failOnInitError: maybe}", "true or false"),
        ("flags: {deviceDiscoveryStrategy: tegra}", "Tegra"),
        ("flags: [1]", "must be a mapping"),
        ("flags: {plugin: {deviceListStrategy: [envvar, cdi]}}", "one or a list of envvar"),
        ("sharing: {timeSlicing: {renameByDefault: true}}", "has no resources"),
        ("sharing: {mps: {}}", "has no resources"),
        ("sharing: {timeSlicing: {resources: [{name: gpu}]}}", "must have name and replicas"),
        ("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 1}]}}", "at least 2"),
        ("sharing: {timeSlicing: {resources: [{name: GPU, replicas: 2}]}}", "a resource name"),
        ("flags: {migStrategy: mixed}\nsharing: {mps: {resources: [{name: gpu, replicas: 2}]}}", "does not go with"),
        ("imex: {channelIDs: [1]}", "[] or [0]"),
        ("imex: {required: true}", "no IMEX channel"),
        ("a: &a [1]\nb: *a", "aliases are not allowed"),
        ("- 1", "must be a mapping"),
    ],
)
def test_what_the_plugin_refuses_and_what_cannot_be_is_refused(text: str, words: str) -> None:
    """With the place and the cure."""
    (problem,) = nvidia_layer(text.encode(), "configuration one").problems
    assert problem.startswith("configuration one: ") and words in problem


def test_a_bad_value_ends_the_start(tmp_path: Path) -> None:
    """Next to the other mistakes; also one that only our tree knows."""
    with pytest.raises(SettingsError, match="must be from 1 to 1000"):
        load(tmp_path, "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 5000}]}}")
    with pytest.raises(SettingsError, match=r"variable MIG_STRATEGY: flags\.migStrategy is many"):
        load_settings([], {"MIG_STRATEGY": "many"})
    with pytest.raises(SettingsError, match=r"variable CONFIG_FILE .*cannot read the settings file"):
        load_settings([], {"CONFIG_FILE": str(tmp_path / "none")})


def test_a_file_is_bounded(tmp_path: Path) -> None:
    """1 MiB, and fifty unknown keys are reported."""
    with pytest.raises(SettingsError, match="larger than 1 MiB"):
        load(tmp_path, "#" * (1 << 20) + "\n")
    many = nvidia_layer(json.dumps({f"key{n}": n for n in range(1000)}).encode(), "x")
    assert len(many.migrated) == 50


def test_an_unknown_key_is_reported_whatever_it_has() -> None:
    """A date is a text in JSON and has no other form there: with one as a key the report failed, and the agent with it."""
    (key,) = nvidia_layer(b"{flags: {since: {2026-01-01: 2026-01-02}}}", "x").migrated
    assert (key.name, key.value) == ("flags.since", '{"2026-01-01": "2026-01-02"}')


@pytest.mark.parametrize(
    ("without", "enabled", "ignored"),
    [
        ("48", "", (13, 31, 43, 45, 48, 68, 109)),
        ("", "13,31", (43, 45, 68, 109)),
        ("all", "79", tuple(sorted({*range(1, 256)} - {79}))),
        ("xids", "", tuple(range(1, 256))),
    ],
)
def test_xids_that_leave_a_gpu_healthy(without: str, enabled: str, ignored: tuple[int, ...]) -> None:
    """The plugin's own six are always among them, unless they are enabled."""
    loaded = load_settings([], {"DP_DISABLE_HEALTHCHECKS": without, "DP_ENABLE_HEALTHCHECKS": enabled})
    assert loaded.settings.health.ignored_xids == ignored


def test_the_kubelets_socket_gives_its_directory() -> None:
    """And one of another name is refused."""
    loaded = load_settings([], {"KUBELET_SOCKET": "/data/kubelet/device-plugins/kubelet.sock"})
    assert str(loaded.settings.kubelet.device_plugin_path) == "/data/kubelet/device-plugins"
    with pytest.raises(SettingsError, match=r"a socket named kubelet\.sock"):
        load_settings([], {"KUBELET_SOCKET": "/x/other.sock"})


def test_without_any_of_theirs_nothing_is_turned_on() -> None:
    """Empty variables, which charts write, are unset; each option names settings that exist, or a reason."""
    loaded = load_settings([], {"MIG_STRATEGY": "", "CONFIG_FILE": "", "PATH": "/bin"})
    assert not loaded.settings.nvidia.enabled and not loaded.migrated
    ours = {key.name for key in all_keys()}
    assert all(set(option.settings) <= ours and bool(option.settings) != bool(option.reason) for option in OPTIONS)
