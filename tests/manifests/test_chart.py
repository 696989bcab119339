"""The Helm chart installs what kustomize does for the same choices, and refuses values that are misspelt or do not fit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gpushare_agent import __version__
from gpushare_agent.core.cli.show_settings import render
from gpushare_agent.core.settings.settings import load_settings
from tests.manifests.support_chart import (
    CHART,
    NAMESPACE,
    ON,
    SCHEDULER,
    Objects,
    chart_objects,
    helm,
    kustomize_objects,
    template,
)
from tests.manifests.support_manifests import MANIFESTS, documents

Values = dict[str, Any]
API_SERVERS = [{"ipBlock": {"cidr": "192.0.2.0/28"}}]
WEBHOOK = {"enabled": True, "claimsWebhook": {"enabled": True, "caBundle": "Q0E="}}


def case(
    values: Values, components: str = "", *, base: str = "base", also: str = ""
) -> tuple[Values, list[str], list[str]]:
    """Values, and the same choice as `resources:` and `components:` (below manifests/components) of a kustomization, by
    names with spaces between them."""
    return values, [base, *also.split()], components.split()


CASES: dict[str, tuple[Values, list[str], list[str]]] = {
    "base": case({}),
    "simulated": case({"simulated": ON}, base="overlays/simulated"),
    "vcuda": case({"isolation": "vcuda"}, "vcuda"),
    "mps": case({"isolation": "mps", "mpsDaemon": {"enabled": False}}, "mps"),
    "mps-daemon": case({"isolation": "mps"}, "mps", also="mps-daemon"),
    "none": case({"isolation": "none"}, "isolation-none"),
    "without-host-pid": case({"hostPID": False}, "without-host-pid"),
    "driver-limits": case({"isolation": "gpushare+driver", "driverLimits": {"setByAgent": True}}, "driver-limits"),
    "end-unlimited": case({"endUnlimited": True}, "end-unlimited"),
    "driver-container": case(
        {"isolation": "vcuda", "vcuda": {"driverContainer": True, "pruneDriverVolume": True}},
        "vcuda driver-container prune-driver-volume",
    ),
    "cdi": case({"deviceListStrategy": "cdi-cri"}, "cdi"),
    "driver-from-host": case({"deviceListStrategy": "cdi-cri", "driverFromHost": ON}, "cdi driver-from-host"),
    "nvidia": case({"nvidia": ON}, "nvidia"),
    "nvidia-mig-monitor": case({"nvidia": {"enabled": True, "migMonitor": True}}, "nvidia nvidia-mig-monitor"),
    "dra": case({"dra": ON}, "dra"),
    "dra-whole-gpus": case({"dra": {"enabled": True, "wholeGpus": ON}}, "dra dra-whole-gpus"),
    "dra-nvidia-names": case({"dra": {"enabled": True, "nvidiaNames": True}}, "dra dra-nvidia-names"),
    "dra-mig-profiles": case({"dra": {"enabled": True, "migProfiles": ["all"]}}, "dra dra-mig-profiles"),
    "mig-on-demand": case(
        {"dra": {"enabled": True, "migOnDemand": ["all"]}, "driverFromHost": ON, "deviceListStrategy": "cdi-cri"},
        "cdi driver-from-host dra mig-on-demand",
    ),
    "mig-on-demand-nvidias-runtime": case(
        {"dra": {"enabled": True, "migOnDemand": ["all"]}, "nvidia": {"migMonitor": True}},
        "nvidia-mig-monitor dra mig-on-demand",
    ),
    "gpushare": case({"gpuMem": ON}, "gpushare"),
    "static-pods": case(
        {"staticPods": {"enabled": True, "selfSignedKubelet": True}}, "static-pods static-pods-self-signed"
    ),
    "access": case(
        {"cleanupRejectedPods": False, "nodeFacts": False, "networkPolicy": ON},
        "without-cleanup without-node-facts network-policy",
    ),
    "sockets": case({"displaySocket": ON, "runtimeSocket": ON}, "display-socket runtime-socket"),
    "read-only-etc": case({"hostDirectory": "/var/lib/gpu-manager"}, "read-only-etc"),
    "read-only-etc-cdi": case(
        {"hostDirectory": "/var/lib/gpu-manager", "deviceListStrategy": "cdi-cri", "driverFromHost": ON},
        "cdi driver-from-host read-only-etc",
    ),
    "read-only-etc-vcuda": case({"hostDirectory": "/var/lib/gpu-manager", "isolation": "vcuda"}, "vcuda read-only-etc"),
    "kubelet-directory": case(
        {
            "kubeletDirectory": "/var/lib/k0s/kubelet",
            "dra": ON,
            "staticPods": {"enabled": True, "selfSignedKubelet": True},
        },
        "dra static-pods static-pods-self-signed kubelet-directory",
    ),
    "node-configuration": case({"config": {"name": "gpushare-agent-nodes"}}, "node-configuration"),
    "monitoring": case({"prometheusOperator": ON}, "prometheus-operator"),
    "resize": case({"resizePolicy": ON}, also="resize"),
    "extender": case({"extender": ON}, also="extender"),
    "extender-all": case(
        {"extender": {**WEBHOOK, **SCHEDULER}},
        "../extender/components/claims-webhook",
        also="extender extender/second-scheduler",
    ),
    "extender-network-policy": case(
        {"extender": {"enabled": True, "networkPolicy": ON}}, "../extender/components/network-policy", also="extender"
    ),
    "extender-monitoring": case(
        {"extender": ON, "prometheusOperator": ON},
        "prometheus-operator ../extender/components/prometheus-operator",
        also="extender",
    ),
    "openshift": case({"openshift": ON, "isolation": "mps"}, "mps openshift", also="mps-daemon"),
    "openshift-from-host": case(
        {"openshift": ON, "deviceListStrategy": "cdi-cri", "driverFromHost": ON}, "cdi driver-from-host openshift"
    ),
    "openshift-extender": case(
        {"openshift": ON, "extender": {"enabled": True, **SCHEDULER}},
        "openshift ../extender/components/openshift",
        also="extender extender/second-scheduler",
    ),
    "extender-without-tls": case(
        {"extender": {"enabled": True, "tls": {"enabled": False}}},
        "../extender/components/without-tls",
        also="extender",
    ),
}


@pytest.mark.parametrize(
    ("name", "namespace"),
    [
        *((name, NAMESPACE) for name in CASES),
        *((name, "gpu-team") for name in ("dra", "driver-from-host", "extender-all", "extender-monitoring")),
    ],
)
def test_the_chart_installs_what_kustomize_does(name: str, namespace: str, tmp_path: Path) -> None:
    """Objects, roles, specs and settings; Helm's labels and the names of ConfigMaps aside."""
    values, resources, components = CASES[name]
    named = [f"components/{one}" for one in components]
    found = chart_objects(values, tmp_path, namespace=namespace)  # first: it skips where Helm is missing
    expected = kustomize_objects(tmp_path, *resources, components=named, namespace=namespace)
    del found["Pod", "gpushare-check"]
    assert found["ConfigMap", "gpushare-agent"]["data"]["settings.yaml"]["log"].pop("level") == "info"
    for webhook in found.get(("MutatingWebhookConfiguration", "gpushare-agent-claims"), {}).get("webhooks", ()):
        assert webhook["clientConfig"].pop("caBundle") == "Q0E=", "the guide adds it behind kustomize"
    assert found.keys() == expected.keys()
    for key, one in expected.items():
        assert found[key] == one, key


def test_nvidias_replicas_under_mps_have_the_daemon_and_the_setting(tmp_path: Path) -> None:
    """The directory is in the component nvidia."""
    found = chart_objects({"nvidia": {"enabled": True, "sharing": "mps"}}, tmp_path)
    agent = found["DaemonSet", "gpushare-agent"]["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "GPUSHARE_NVIDIA__SHARING", "value": "mps"} in agent["env"]
    assert "/run/gpushare-mps" in {mount["mountPath"] for mount in agent["volumeMounts"]}
    assert ("DaemonSet", "gpushare-mps") in found


def test_settings_of_the_mps_daemon_reach_it(tmp_path: Path) -> None:
    """It reads no file; a user who sets them for the agents alone would believe that they count."""
    chosen = {"multi_user": True, "drain_timeout_s": 12.5, "default_active_thread_percentage": 50, "max_clients": 5}
    settings = {"mps": {**chosen, "exclusive_process": None}}
    found = chart_objects({"isolation": "mps", "settings": settings}, tmp_path)
    variables = {one["name"]: one["value"] for one in _pod(found["DaemonSet", "gpushare-mps"])["containers"][0]["env"]}
    assert {name: value for name, value in variables.items() if name.startswith("GPUSHARE_MPS__")} == {
        "GPUSHARE_MPS__MULTI_USER": "true",
        "GPUSHARE_MPS__DRAIN_TIMEOUT_S": "12.5",
        "GPUSHARE_MPS__DEFAULT_ACTIVE_THREAD_PERCENTAGE": "50",
    }
    read = load_settings([], {name: value for name, value in variables.items() if name.startswith("GPUSHARE_MPS__")})
    assert read.settings.mps.multi_user and read.settings.mps.drain_timeout_s == 12.5


def test_nodes_with_cgroup_v1_get_the_hosts_pids_back(tmp_path: Path) -> None:
    """Under isolation none, which takes them away: a force-deleted pod's processes are seen in no other way."""
    for host_pid in (None, True):
        found = chart_objects({"isolation": "none", "hostPID": host_pid}, tmp_path)
        pod = found["DaemonSet", "gpushare-agent"]["spec"]["template"]["spec"]
        assert pod.get("hostPID", False) is bool(host_pid)


def test_every_component_of_the_manifests_has_a_value() -> None:
    """But nvidia-config: one named configuration (`config.map`) is that of every node, with that file's text too."""
    named = {Path(one).name for _, _, components in CASES.values() for one in components}
    folders = [*(MANIFESTS / "components").iterdir(), *(MANIFESTS / "extender/components").iterdir()]
    assert {path.name for path in folders} - named == {"nvidia-config"}


@pytest.mark.parametrize(("strategy", "has_rights"), [("none", False), ("single", True), ("mixed", True)])
def test_a_strategy_for_mig_gives_the_rights_to_list_instances(strategy: str, has_rights: bool, tmp_path: Path) -> None:
    """Without another value, as NVIDIA's chart does."""
    (agent,) = _pod(chart_objects({"nvidia": ON, "migStrategy": strategy}, tmp_path)["DaemonSet", "gpushare-agent"])[
        "containers"
    ]
    assert ({"name": "NVIDIA_MIG_MONITOR_DEVICES", "value": "all"} in agent["env"]) == has_rights
    assert (agent["securityContext"]["capabilities"].get("add") == ["SYS_ADMIN"]) == has_rights


def test_helm_test_runs_the_check_of_the_manifests(tmp_path: Path) -> None:
    """As a hook, on any node of the agents and not on a named one; as a pod, whose log `helm test --logs` can read."""
    objects = chart_objects({}, tmp_path)
    check, agent = objects["Pod", "gpushare-check"], _pod(objects["DaemonSet", "gpushare-agent"])
    assert check["metadata"].pop("annotations")["helm.sh/hook"] == "test"
    assert check["spec"].pop("nodeSelector") == agent["nodeSelector"]
    job = kustomize_objects(tmp_path, "base", "check")["Job", "gpushare-check"]
    expected = {"activeDeadlineSeconds": job["spec"]["activeDeadlineSeconds"], **_pod(job)}
    assert expected.pop("nodeName")
    for volume in expected["volumes"]:
        if "configMap" in volume:
            volume["configMap"]["name"] = "gpushare-agent"
    assert check["metadata"] == job["metadata"]
    assert check["spec"] == expected


def _pod(one: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = one["spec"]["template"]["spec"]
    return found


def test_the_check_has_the_variables_and_mounts_of_the_agent(tmp_path: Path) -> None:
    """Whatever is chosen: it is the agent's own pod with another command."""
    objects = chart_objects({"simulated": ON, "env": [{"name": "GPUSHARE_X", "value": "1"}]}, tmp_path)
    (agent,) = _pod(objects["DaemonSet", "gpushare-agent"])["containers"]
    (check,) = objects["Pod", "gpushare-check"]["spec"]["containers"]
    assert check["command"] == ["gpushare-agent", "check"]
    assert {key: agent[key] for key in ("env", "image", "volumeMounts")}.items() <= check.items()


def test_the_extenders_monitor_believes_the_authority_of_the_users_secret(tmp_path: Path) -> None:
    """Its certificate is for one name, in every namespace."""
    values = {"prometheusOperator": ON, "extender": {"enabled": True, "tls": {"secretName": "own"}}}
    (scraped,) = chart_objects(values, tmp_path)["PodMonitor", "gpushare-agent-extender"]["spec"]["podMetricsEndpoints"]
    assert scraped["tlsConfig"]["ca"]["secret"]["name"] == "own"


def test_a_size_of_the_operators_leaves_the_driver_to_the_agent(tmp_path: Path) -> None:
    """The limit by which it has the device nodes is no size, and its plugin's pod runs where the agents do."""
    sized = {"limits": {"memory": "1Gi"}}
    chosen = {"deviceListStrategy": "cdi-cri", "driverFromHost": ON, "resources": sized, "nodeSelector": {"a": "b"}}
    objects = chart_objects(chosen, tmp_path)
    agent = _pod(objects["DaemonSet", "gpushare-agent"])
    (container,) = agent["containers"]
    assert container["resources"] == {
        "limits": {"memory": "1Gi", "gpushare-agent/driver": "1"},
        "requests": {"cpu": "50m", "memory": "128Mi"},
    }
    devices = _pod(objects["DaemonSet", "gpushare-driver-devices"])
    assert devices["nodeSelector"] == agent["nodeSelector"] and "affinity" not in devices
    assert "runtimeClassName" not in devices
    (check,) = objects["Pod", "gpushare-check"]["spec"]["containers"]
    assert check["resources"] == container["resources"]


def test_the_resources_of_shares_can_be_left_out(tmp_path: Path) -> None:
    """Where the nodes serve another kind."""
    objects = chart_objects({"vcudaResources": {"enabled": False}, "nvidia": ON}, tmp_path)
    (container,) = _pod(objects["DaemonSet", "gpushare-agent"])["containers"]
    assert {"name": "GPUSHARE_RESOURCES__ENABLED", "value": "false"} in container["env"]


def test_the_kubelet_may_have_another_directory(tmp_path: Path) -> None:
    """Its --root-dir moves all that it makes but device-plugins, a constant of the kubelet. Inside nothing changes."""
    chosen: Values = {"dra": ON, "staticPods": {"enabled": True, "selfSignedKubelet": True}}
    snap = "/var/snap/microk8s/common/var/lib/kubelet"
    agent, default = (
        _pod(chart_objects(chosen | one, tmp_path)["DaemonSet", "gpushare-agent"])
        for one in ({"kubeletDirectory": snap}, {})
    )
    assert {name: path for name, path in _host_paths(agent).items() if "kubelet" in path} == {
        "pod-resources": f"{snap}/pod-resources",
        "plugins-registry": f"{snap}/plugins_registry",
        "kubelet-certificate": f"{snap}/pki/kubelet.crt",
        "device-plugins": "/var/lib/kubelet/device-plugins",
        "plugin": "/var/lib/kubelet/plugins/gpushare-agent",  # the driver names this path of the host itself
    }
    assert agent["containers"] == default["containers"]


def _host_paths(pod: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["hostPath"]["path"] for one in pod["volumes"] if "hostPath" in one}


@pytest.mark.parametrize(
    "values",
    [
        {"simulated": ON},
        {"isolation": "vcuda", "driverFromHost": ON, "vcuda": {"pruneDriverVolume": True}},
        {"isolation": "vcuda", "vcuda": {"driverContainer": True}},
        {"deviceListStrategy": "cdi-cri", "driverFromHost": ON, "dra": ON},
        {"isolation": "mps", "deviceListStrategy": "cdi-annotations"},
        {"isolation": "none"},
        {"nvidia": ON, "gpuMem": ON, "displaySocket": ON, "runtimeSocket": ON},
    ],
)
def test_nothing_is_made_in_an_etc_that_cannot_be_written(values: Values, tmp_path: Path) -> None:
    """Whatever is chosen; and mounts and settings of another directory go together, also in helm test's pod."""
    moved = {"hostDirectory": "/var/mnt/gpu", "cdiDirectory": "/var/cdi/dynamic"}
    objects = chart_objects(values | moved, tmp_path)
    check = objects["Pod", "gpushare-check"]["spec"]
    for pod in (check, *(_pod(one) for (kind, _), one in objects.items() if kind == "DaemonSet")):
        assert not [path for path in _host_paths(pod).values() if path.startswith("/etc") or path == "/var/run/cdi"]
        names = {one["name"] for one in pod["volumes"]}
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            assert {one["name"] for one in container["volumeMounts"]} <= names
    agent = _pod(objects["DaemonSet", "gpushare-agent"])
    (container,) = agent["containers"]
    variables = {one["name"]: one["value"] for one in container["env"] if one["name"].startswith("GPUSHARE_")}
    settings = load_settings([], variables | {"GPUSHARE_CONFIG": ""}).settings
    assert settings.host_directory == Path("/var/mnt/gpu")
    assert settings.libgpushare.directory == Path("/var/mnt/gpu/vdriver/gpushare")
    assert settings.cdi.spec_directories == (Path("/var/cdi/dynamic"),)
    mounts = {one["mountPath"]: _host_paths(agent).get(one["name"]) for one in container["volumeMounts"]}
    assert mounts["/var/mnt/gpu"] == "/var/mnt/gpu" and "/etc/gpu-manager" not in mounts
    assert mounts.get("/var/cdi/dynamic", "/var/cdi/dynamic") == "/var/cdi/dynamic"
    for init in agent.get("initContainers", ()):
        written = next(one["name"] for one in init["volumeMounts"] if one["mountPath"] == "/etc/gpu-manager/vdriver")
        assert _host_paths(agent)[written] == "/var/mnt/gpu/vdriver"


def test_the_runtimes_directory_of_cdi_specs_may_be_another(tmp_path: Path) -> None:
    """What others have in /etc/cdi is still read."""
    values = {"deviceListStrategy": "cdi-cri", "cdiDirectory": "/var/cdi/dynamic"}
    agent = _pod(chart_objects(values, tmp_path)["DaemonSet", "gpushare-agent"])
    (container,) = agent["containers"]
    assert {"name": "GPUSHARE_CDI__SPEC_DIRECTORIES", "value": "/etc/cdi,/var/cdi/dynamic"} in container["env"]
    assert {"/etc/cdi", "/var/cdi/dynamic"} <= {one["mountPath"] for one in container["volumeMounts"]}


def test_a_rollout_may_take_several_nodes_at_a_time(tmp_path: Path) -> None:
    """Each of them still has two agents that hand over."""
    objects = chart_objects({"updateStrategy": {"rollingUpdate": {"maxSurge": "10%"}}}, tmp_path)
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "10%", "maxUnavailable": 0}}
    assert objects["DaemonSet", "gpushare-agent"]["spec"]["updateStrategy"] == strategy


def test_a_simulated_gpu_may_have_a_terabyte(tmp_path: Path) -> None:
    """Helm reads numbers as floats, and shows such a one as 1.048576e+06, which is no setting."""
    objects = chart_objects({"simulated": {"enabled": True, "memoryMiB": 1 << 20}}, tmp_path)
    (container,) = _pod(objects["DaemonSet", "gpushare-agent"])["containers"]
    assert {"name": "GPUSHARE_SIMULATED__GPU_MEMORY_MIB", "value": "1048576"} in container["env"]


def test_the_values_reach_their_places(tmp_path: Path) -> None:
    """Those that are no component's."""
    toleration = {"key": "nvidia.com/gpu", "operator": "Exists"}
    values: Values = {
        "image": {"repository": "example.test/agent", "tag": "9", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "pull"}],
        "isolation": "mps+driver",
        "deviceListStrategy": ["cdi-annotations", "device-nodes"],
        "nvidia": {"enabled": True, "sharing": "shares"},
        "migStrategy": "mixed",
        "deviceIDStrategy": "index",
        "dra": {"enabled": True, "gpus": ["0", "1"], "wholeGpus": {"enabled": True, "resourceName": "a.test/gpu"}},
        "runtimeSocket": {"enabled": True, "directory": "/run/crio"},
        "logLevel": "debug",
        "settings": {
            "placement": {"share_policy": "spread"},
            "web": {"addr": "::"},
            "resources": {"vcore": "a.test/c"},
        },
        "env": [{"name": "GPUSHARE_ISOLATION", "value": "auto"}],
        "networkPolicy": {"enabled": True, "prometheusNamespace": "metrics"},
        "prometheusOperator": {"enabled": True, "labels": {"release": "prometheus"}},
        "tolerations": [toleration],
        "runtimeClassName": "",
        "updateStrategy": {"type": "OnDelete"},
        "podAnnotations": {"a": "b"},
        "gpuMem": ON,
        "extender": {"enabled": True, "tls": {"enabled": False}, "settings": {"log": {"level": "debug"}}, **SCHEDULER},
    }
    objects = chart_objects(values, tmp_path)
    agent = objects["DaemonSet", "gpushare-agent"]
    (container,) = _pod(agent)["containers"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert (container["image"], container["imagePullPolicy"]) == ("example.test/agent:9", "Always")
    assert variables["GPUSHARE_ISOLATION"] == "auto", "what the user sets goes before all"
    assert variables["GPUSHARE_DEVICE_LIST_STRATEGY"] == "cdi-annotations,device-nodes"
    assert variables["GPUSHARE_DRA__GPUS"] == "0,1"
    nvidia = {name: value for name, value in variables.items() if name.startswith("GPUSHARE_NVIDIA__")}
    assert [nvidia[f"GPUSHARE_NVIDIA__{name}"] for name in ("ENABLED", "SHARING", "MIG_STRATEGY", "DEVICE_IDS")] == [
        *("true", "shares", "mixed", "index")
    ]
    assert {"/var/run/cdi", "/run/crio", "/run/gpushare-mps"} <= {one["mountPath"] for one in container["volumeMounts"]}
    assert "/run/crio" in [one.get("hostPath", {}).get("path") for one in _pod(agent)["volumes"]]
    assert agent["spec"]["updateStrategy"] == {"type": "OnDelete"}
    assert agent["spec"]["template"]["metadata"]["annotations"] == {"a": "b"}
    for kind in ("gpushare-agent", "gpushare-mps"):
        pod = _pod(objects["DaemonSet", kind])
        assert (pod["tolerations"], pod["imagePullSecrets"]) == ([toleration], [{"name": "pull"}])
        assert "runtimeClassName" not in pod
    settings = objects["ConfigMap", "gpushare-agent"]["data"]["settings.yaml"]
    assert (settings["web"], settings["log"]) == ({"addr": "::"}, {"format": "json", "level": "debug"})
    assert objects["DeviceClass", "whole.gpushare-agent"]["spec"]["extendedResourceName"] == "a.test/gpu"
    assert "metrics" in json.dumps(objects["NetworkPolicy", "gpushare-agent"]["spec"])
    monitors = [("PodMonitor", "gpushare-agent"), ("PodMonitor", "gpushare-agent-extender")]
    for key in (*monitors, ("PrometheusRule", "gpushare-agent")):
        assert objects[key]["metadata"]["labels"]["release"] == "prometheus"
    (scraped,) = objects[monitors[1]]["spec"]["podMetricsEndpoints"]
    assert scraped["scheme"] == "http" and "tlsConfig" not in scraped, "the extender has no TLS here"
    _extender_counts_as_the_agents(objects)


def test_named_mig_profiles_have_classes_and_named_gpus_instances_on_demand(tmp_path: Path) -> None:
    dra = {"enabled": True, "gpus": [], "migOnDemand": [0, "NVIDIA H100*"], "migProfiles": ["1g.10gb+me", "3g.40gb"]}
    objects = chart_objects({"dra": dra, "nvidia": {"migMonitor": True}}, tmp_path)
    classes = {name for kind, name in objects if kind == "DeviceClass"}
    own = {"gpu.gpushare-agent", "mig.gpushare-agent"}
    assert classes == {"mig-1g.10gb.me.gpushare-agent", "mig-3g.40gb.gpushare-agent"} | own
    (container,) = _pod(objects["DaemonSet", "gpushare-agent"])["containers"]
    environ = {
        one["name"]: one["value"] for one in container["env"] if "_DRA__" in one["name"] or "_MIG__" in one["name"]
    }
    settings = load_settings([], environ).settings
    assert (settings.dra.gpus, settings.mig.on_demand) == ((), ("0", "NVIDIA H100*"))


@pytest.mark.parametrize(
    "label",
    [{"gpu": "on"}, {"vgpu-manager": "device-plugin"}, {"gpushare": "true"}, {"nvidia.com/gpu.present": "true"}],
)
def test_nodes_may_be_chosen_by_the_label_that_another_program_gave_them(label: Values, tmp_path: Path) -> None:
    """HAMi's, vgpu-manager's, GPUShare's, GPU Feature Discovery's: of agent and MPS daemon. Helm adds maps together, so
    the default label is taken away by a null."""
    selector = {"nvidia-device-enable": None, **label}
    objects = chart_objects({"nodeSelector": selector, "isolation": "mps", "gpuMem": ON}, tmp_path)
    for name in ("gpushare-agent", "gpushare-mps"):
        pod = _pod(objects["DaemonSet", name])
        assert pod["nodeSelector"] == label and "affinity" not in pod


def test_named_configurations_may_be_settings_or_texts(tmp_path: Path) -> None:
    """In a ConfigMap whose change rolls no agent; or one of the user's."""
    text = "version: v1\nflags: {migStrategy: single}\n"
    config = {"map": {"small": {"resources": {"memory_block_mib": 64}}, "nvidia": text}, "default": "small"}
    objects = chart_objects({"config": config}, tmp_path)
    data = objects["ConfigMap", "gpushare-agent-nodes"]["data"]
    assert data == {"small": {"resources": {"memory_block_mib": 64}}, "nvidia": yaml.safe_load(text)}
    agent = _pod(objects["DaemonSet", "gpushare-agent"])
    assert {"name": "GPUSHARE_NODE_CONFIGURATION__DEFAULT", "value": "small"} in agent["containers"][0]["env"]
    agent = _pod(chart_objects({"config": {"name": "own"}}, tmp_path)["DaemonSet", "gpushare-agent"])
    assert [one["configMap"] for one in agent["volumes"] if one["name"] == "node-configurations"] == [{"name": "own"}]


def _extender_counts_as_the_agents(objects: Objects) -> None:
    """It has their settings, and its scheduler asks it about the same resources, without TLS."""
    settings = objects["ConfigMap", "gpushare-agent-extender-settings"]["data"]["settings.yaml"]
    assert settings["placement"] == {"share_policy": "spread"}
    assert (settings["gpushare"], settings["resources"]) == (ON, {"vcore": "a.test/c"})
    assert settings["log"] == {"format": "json", "level": "debug"}
    (asked,) = objects["ConfigMap", "gpushare-scheduler-settings"]["data"]["scheduler.yaml"]["extenders"]
    assert asked["urlPrefix"].startswith("http://") and "tlsConfig" not in asked
    assert "aliyun.com/gpu-mem" in [one["name"] for one in asked["managedResources"]]
    pod = _pod(objects["Deployment", "gpushare-scheduler"])
    assert [one["name"] for one in pod["volumes"]] == ["settings"]
    assert pod["containers"][0]["image"] == "registry.k8s.io/kube-scheduler:v1.33.4"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"isolaton": "none"}, "isolaton"),
        ({"isolation": "hamicore"}, "isolation"),
        ({"pods": {"extendr": {}}}, "extendr"),
        ({"pods": {"extender": {"priorityClasName": "a"}}}, "priorityClasName"),
        ({"pods": {"agent": {"securityContext": {"seLinuxOptions": {"typ": "spc_t"}}}}}, "typ"),
        ({"pods": {"agent": {"containers": [{"resources": {}}]}}}, "name is required"),
        ({"pods": {"agent": {"containers": [{"name": "agent", "securityContext": {"runAsUsr": 0}}]}}}, "runAsUsr"),
        ({"pods": {"agent": {"containers": [{"name": "main"}]}}}, "pods.agent.containers: this pod has no main"),
        ({"pods": {"agent": {"initContainers": [{"name": "driver-volume"}]}}}, "has no driver-volume"),
        ({"extender": {"scheduler": {"image": {"digest": "sha256:1"}}}}, "extender.scheduler.image.digest"),
        ({"dra": {"gpus": "all"}}, "dra.gpus"),
        ({"image": None}, "image is required"),
        ({"nodeFacts": None}, "nodeFacts is required"),
        ({"resources": None}, "resources is required"),
        ({"isolation": "mps", "mpsDaemon": {"resources": None}}, "resources is required"),
        ({"extender": {"enabled": True, "resources": None}}, "resources is required"),
        ({"simulated": {"enabled": True, "memoryMiB": 4194305}}, "simulated.memoryMiB"),
        ({"image": {"repository": None}}, "repository is required"),
        ({"config": {"map": {"a": {"web": {"port": 9}}}}}, "config.map.a.web.port: Service, probes and policies"),
        ({"config": {"map": {"a": "web:\n  port: 9\n"}}}, "config.map.a.web.port: Service, probes and policies"),
        (
            {"isolation": "mps", "config": {"map": {"a": {"isolation": "none"}}}},
            "config.map.a.isolation: has no effect",
        ),
        ({"simulated": {"enabled": True, "gpus": None}}, "gpus is required"),
        ({"runtimeSocket": {"enabled": True, "directory": None}}, "directory is required"),
        ({"networkPolicy": {"enabled": True, "prometheusNamespace": None}}, "prometheusNamespace is required"),
        ({"dra": {"enabled": True, "wholeGpus": {"enabled": True, "resourceName": None}}}, "resourceName is required"),
        ({"extender": {"scheduler": {"image": {"repository": None}}}}, "repository is required"),
        ({"extender": {"claimsWebhook": {"clients": None}}}, "clients is required"),
        ({"extender": {"enabled": True, "tls": {"enabled": None}}}, "enabled is required"),
        ({"image": {"tag": "a b"}}, "image.tag"),
        ({"imagePullSecrets": [{}]}, "name is required"),
        ({"config": {"name": "A_b"}}, "config.name"),
        ({"priorityClassName": "x" * 300}, "priorityClassName"),
        ({"podLabels": {"a": "x" * 64}}, "podLabels.a"),
        ({"nodeSelector": {"a b": "x"}}, "nodeSelector"),
        ({"resources": {"limits": {"memory": "lots"}}}, "resources.limits.memory"),
        ({"updateStrategy": {"rollingUpdate": {"maxSurge": "1"}}}, "updateStrategy.rollingUpdate.maxSurge"),
        ({"updateStrategy": {"rollingUpdate": {"maxSurge": 0}}}, "updateStrategy.rollingUpdate"),
        ({"updateStrategy": {"rollingUpdate": {"maxUnavailable": "10%"}}}, "updateStrategy.rollingUpdate"),
        ({"env": [{"name": "A B"}]}, "env.0.name"),
        ({"env": [{"name": "A", "value": "x", "valueFrom": {}}]}, "env.0"),
        ({"runtimeSocket": {"enabled": True, "directory": "/run/../etc"}}, "runtimeSocket.directory"),
        ({"extender": {"claimsWebhook": {"caBundle": "no base64!"}}}, "extender.claimsWebhook.caBundle"),
        ({"tolerations": [{"operater": "Exists"}]}, "operater"),
        ({"settings": {"placement": {"share_polcy": "spread"}}}, "share_polcy"),
        ({"settings": {"health": {"check_period_s": 7200}}}, "settings.health.check_period_s"),
        ({"settings": {"web": {"port": 6000}}}, "settings.web.port: Service"),
        ({"settings": {"share_mode": "no"}}, "settings.share_mode"),
        ({"extender": {"settings": {"reserve": "bind"}}}, "reserve"),
        ({"config": {"map": {"a": {"nvidia": {"replica": 4}}}}}, "replica"),
        ({"settings": {"isolation": "mps"}}, "use the value `isolation`"),
        ({"settings": {"root": "/host"}}, "settings.root: the manifests mount"),
        ({"settings": {"kubelet": {"root_dir": "/var/lib/k0s/kubelet"}}}, "use the value `kubeletDirectory`"),
        ({"displaySocket": ON, "settings": {"display": {"socket": "/x"}}}, "settings.display.socket: has no effect"),
        (
            {"extender": {**WEBHOOK, "settings": {"extender": {"claims_webhook": "certificate"}}}},
            "extender.settings.extender.claims_webhook: has no effect",
        ),
        (
            {"extender": {"enabled": True, "settings": {"extender": {"lease_namespace": "a"}}}},
            "extender.lease_namespace: its Role",
        ),
        ({"extender": {"enabled": True, "settings": {"gpushare": ON}}}, "set `settings.gpushare`"),
        ({"extender": {**WEBHOOK, "networkPolicy": ON}}, "API servers must reach it"),
        ({"networkPolicy": {"extraFrom": [{"ipblock": {}}]}}, "networkPolicy.extraFrom"),
        ({"extender": {"enabled": True, "claimsWebhook": ON}}, "give `caBundle` or `annotations`"),
        ({"extender": {"enabled": True, "settings": {"extender": {"port": 6000}}}}, "extender.settings.extender.port"),
        ({"extender": {"enabled": True, "settings": {"extender": {"leader_elect": False}}}}, "runs two replicas"),
        ({"settings": {"dra": {"gpus": ["all"]}}}, "use the value `dra.gpus`"),
        ({"settings": {"mig": {"on_demand": ["all"]}}}, "use the value `dra.migOnDemand`"),
        ({"settings": {"gpushare": ON}}, "use the value `gpuMem.enabled`"),
        ({"settings": {"driver_limits": {"set_by_agent": True}}}, "use the value `driverLimits.setByAgent`"),
        ({"settings": {"facts": {"is_written": False}}}, "use the value `nodeFacts`"),
        ({"settings": {"libgpushare": {"unlimited": "end"}}}, "use the value `endUnlimited`"),
        ({"nvidia": ON, "settings": {"nvidia": {"sharing": "mps"}}}, "use the value `nvidia.sharing`"),
        (
            {"nvidia": ON, "migStrategy": "mixed", "settings": {"nvidia": {"mig_strategy": "single"}}},
            "settings.nvidia.mig_strategy: has no effect",
        ),
        ({"simulated": ON, "isolation": "mps"}, "leave `isolation` out"),
        ({"isolation": "vcuda", "hostPID": False}, "not with `hostPID: false`"),
        ({"vcuda": {"driverContainer": True}}, "isolation: vcuda"),
        ({"driverLimits": {"setByAgent": True}}, "gpushare+driver"),
        ({"driverFromHost": ON}, "deviceListStrategy: cdi-cri"),
        ({"driverFromHost": ON, "deviceListStrategy": "cdi-cri", "isolation": "mps"}, "the MPS daemon's pod"),
        ({"vcudaResources": {"enabled": False}}, "nothing else is offered"),
        ({"dra": {"enabled": True, "gpus": []}}, "no GPU is offered"),
        ({"dra": {"migProfiles": ["all"]}}, "dra.enabled"),
        ({"dra": {"enabled": True, "migProfiles": ["1g.10gb", "1g.11gb"]}}, "1g.11gb is none of the profiles"),
        ({"dra": {"enabled": True, "migOnDemand": ["0"]}}, "driverFromHost.enabled"),
        ({"dra": {"wholeGpus": ON}}, "dra.enabled"),
        ({"dra": {"nvidiaNames": True}}, "dra.enabled"),
        ({"dra": {"enabled": True, "nvidiaNames": True, "wholeGpus": ON}}, "another resourceName"),
        ({"staticPods": {"selfSignedKubelet": True}}, "staticPods.enabled"),
        ({"migStrategy": "mixed"}, "nvidia.enabled"),
        ({"config": {"map": {"a": {}}, "name": "b"}}, "give one of them"),
        ({"config": {"map": {"a": {}}, "default": "b"}}, "b is not in config.map"),
        ({"extender": {"claimsWebhook": ON}}, "extender.enabled"),
        ({"extender": ON, "nodeFacts": False}, "nodeFacts"),
        ({"extender": {"enabled": True, "claimsWebhook": ON, "tls": {"enabled": False}}}, "extender.tls.enabled"),
    ],
)
def test_values_that_are_misspelt_or_do_not_fit_are_refused_by_name(values: Values, named: str, tmp_path: Path) -> None:
    """Before anything is installed."""
    done = template(values, tmp_path)
    assert done.returncode != 0
    assert named in done.stderr


@pytest.mark.parametrize("has_gpu_mem", [False, True])
def test_renamed_resources_are_those_of_the_scheduler_the_policies_and_the_webhook(
    has_gpu_mem: bool, tmp_path: Path
) -> None:
    """Else pods that ask by the new names would pass by the extender, its quota and the policies."""
    vcore, vmemory, gpu_mem = names = ["a.test/core", "b.test/memory", "c.test/mem"]
    settings = {"resources": {"vcore": vcore, "vmemory": vmemory}, "gpushare": {"resource": gpu_mem}}
    extender = {**WEBHOOK, **SCHEDULER}
    values = {"settings": settings, "gpuMem": {"enabled": has_gpu_mem}, "extender": extender}
    objects = chart_objects(values, tmp_path)
    (asked,) = objects["ConfigMap", "gpushare-scheduler-settings"]["data"]["scheduler.yaml"]["extenders"]
    of_scheduler = names if has_gpu_mem else [vcore, vmemory]
    assert [one["name"] for one in asked["managedResources"]] == of_scheduler
    policies = [
        objects["ValidatingAdmissionPolicy", f"gpushare-agent-{one}"] for one in ("node-name", "scheduler-name")
    ]
    webhook = objects["MutatingWebhookConfiguration", "gpushare-agent-claims"]["webhooks"][0]
    found = [_resources_in(one) for one in (*policies, webhook["matchConditions"])]
    assert found == [names, of_scheduler, names]


def _resources_in(value: Any) -> list[str]:
    """Of CEL's strings those that are a resource's name."""
    return re.findall(r"'([a-z.]+/[a-z-]+)'", json.dumps(value))


@pytest.mark.parametrize("added", ["", "-eks-2d5f260", "-gke.1134000", "+k3s1", "+rke2r1"])
def test_the_second_scheduler_has_an_image_that_exists(added: str, tmp_path: Path) -> None:
    """Distributions add to the version what no registry has as a tag, or no tag may have."""
    values = {"extender": {"enabled": True, "scheduler": ON}}
    deployment = chart_objects(values, tmp_path, f"--kube-version=v1.33.4{added}")["Deployment", "gpushare-scheduler"]
    assert _pod(deployment)["containers"][0]["image"] == "registry.k8s.io/kube-scheduler:v1.33.4"


def test_the_right_to_the_quota_follows_its_settings(tmp_path: Path) -> None:
    """A leader that may not list it waits for ever."""
    chosen = {"quota_name": "limits"}
    objects = chart_objects({"extender": {"enabled": True, "settings": {"extender": chosen}}}, tmp_path)
    assert [one["resourceNames"] for one in objects["ClusterRole", "gpushare-agent-extender-quota"]["rules"]] == [
        ["limits"]
    ]


def test_network_policies_may_let_others_in(tmp_path: Path) -> None:
    """API servers, for webhook and `kubectl gpushare`, beside those that each policy names itself."""
    policy = {"enabled": True, "extraFrom": API_SERVERS}
    objects = chart_objects({"networkPolicy": policy, "extender": {**WEBHOOK, "networkPolicy": policy}}, tmp_path)
    for name, own in (("gpushare-agent", "monitoring"), ("gpushare-agent-extender", "gpushare-scheduler")):
        (rule,) = objects["NetworkPolicy", name]["spec"]["ingress"]
        assert own in json.dumps(rule["from"][0]) and rule["from"][1:] == API_SERVERS


def test_the_claims_webhook_may_ask_for_certificates(tmp_path: Path) -> None:
    """By the variable, which goes before the extender's file."""
    webhook = {**WEBHOOK["claimsWebhook"], "clients": "certificate"}
    values = {"extender": {"enabled": True, "claimsWebhook": webhook}}
    (container,) = _pod(chart_objects(values, tmp_path)["Deployment", "gpushare-agent-extender"])["containers"]
    assert {"name": "GPUSHARE_EXTENDER__CLAIMS_WEBHOOK", "value": "certificate"} in container["env"]


def test_the_chart_may_be_installed_in_any_namespace(tmp_path: Path) -> None:
    """Nothing names another one."""
    values = {"dra": ON, "isolation": "mps", "resizePolicy": ON, "networkPolicy": ON, "prometheusOperator": ON}
    values |= {"extender": {**WEBHOOK, "networkPolicy": {"enabled": True, "extraFrom": API_SERVERS}, **SCHEDULER}}
    done = template(values, tmp_path, namespace="gpus")
    assert done.returncode == 0, done.stderr
    assert NAMESPACE not in done.stdout


def test_lint_finds_nothing() -> None:
    """But that there is no icon."""
    done = helm("lint", CHART, "--strict")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith(("[WARNING]", "[ERROR]"))] == []


def test_every_value_has_a_default_and_a_place_in_the_schema() -> None:
    """So a name is in both or in none."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.Draft7Validator(schema).validate(values)
    assert schema["properties"].pop("global") == {"type": "object"}, "Helm's own"
    _same_names(schema, values, schema["definitions"])


def test_the_schema_takes_every_setting_as_the_agent_prints_it() -> None:
    """`config -o yaml` is a settings file; the schema's definition is made from the same tree (tests/docs/generated.py)."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    settings = schema["definitions"]["agentSettings"]
    printed = yaml.safe_load(render(load_settings([], {}), "yaml"))
    jsonschema.Draft7Validator(settings).validate(printed)
    isolations = settings["properties"]["isolation"]["enum"]
    assert {*schema["properties"]["isolation"]["enum"], None} == {*isolations}, (
        "the value of the chart, written by hand"
    )


def _same_names(schema: Values, values: Values, definitions: Values) -> None:
    """Free and Kubernetes' own maps are values as a whole."""
    assert schema["additionalProperties"] is False
    assert schema["properties"].keys() == values.keys()
    for name, below in schema["properties"].items():
        is_kubernetes = "$ref" in below or name in ("affinity", "updateStrategy")
        if below.get("properties") and not is_kubernetes:
            _same_names(below, values[name], definitions)


def test_notes_and_guide_give_the_namespace_its_pod_security_label() -> None:
    """The base's namespace has it; Helm makes the namespace without."""
    (base,) = documents("base/namespace.yaml")
    ((label, level),) = base["metadata"]["labels"].items()
    notes = (CHART / "templates/NOTES.txt").read_text(encoding="utf-8")
    assert f"kubectl label namespace {{{{ .Release.Namespace }}}} {label}={level}\n" in notes
    guide = (MANIFESTS.parent / "docs/how-to/install.md").read_text(encoding="utf-8")
    assert f"kubectl label namespace {NAMESPACE} {label}={level} " in guide


def test_the_notes_name_files_that_there_are() -> None:
    """Also who makes the Secrets for which the extender waits."""
    notes = (CHART / "templates/NOTES.txt").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:docs|manifests)/[\w/-]+\.\w+", notes))
    assert "docs/how-to/schedule-with-the-extender.md" in named
    assert [name for name in named if not (MANIFESTS.parent / name).is_file()] == []


def test_the_chart_has_the_projects_version() -> None:
    """In its own spelling, for a chart's version is a semantic one: 2.0.0a1 is 2.0.0-alpha.1."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == __version__
    assert chart["version"].replace("-alpha.", "a").replace("-beta.", "b").replace("-rc.", "rc") == __version__
    assert (CHART / "manifests").resolve() == MANIFESTS.resolve()
