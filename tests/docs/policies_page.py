"""What common admission policies refuse of this project's pods: the list of exceptions of docs/how-to/platforms.md.

The rules are those of the Pod Security Standards, as Kyverno and Gatekeeper have them, and two about resources and probes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import yaml

from tests.manifests.support_manifests import MANIFESTS, daemon_set, documents, merged

Spec = dict[str, Any]
AGENT = "gpushare-agent"
_BASELINE = frozenset(
    (
        *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD"),
        *("NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
    )
)
"""Capabilities that the standard `baseline` lets containers add."""
_ADMITTED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
"""Of the standard `restricted`."""
_ADMITTED_SELINUX = {"container_t", "container_init_t", "container_kvm_t", "container_engine_t", ""}
OTHERS = (
    "components/driver-from-host/driver-devices.yaml",
    "mps-daemon/daemonset.yaml",
    "check/job.yaml",
    "extender/deployment.yaml",
    "extender/second-scheduler/deployment.yaml",
)


def containers(spec: Spec) -> list[Spec]:
    return [*spec.get("initContainers", ()), *spec["containers"]]


def _of(spec: Spec, name: str) -> list[Any]:
    """The field of each container's security context, else of the pod's."""
    of_pod = spec.get("securityContext", {}).get(name)
    return [one.get("securityContext", {}).get(name, of_pod) for one in containers(spec)]


def _added(spec: Spec) -> set[str]:
    return {name for found in _of(spec, "capabilities") for name in (found or {}).get("add", ())}


def _lacks_resources(spec: Spec) -> bool:
    wanted = (("requests", "cpu"), ("requests", "memory"), ("limits", "memory"))
    return any(name not in one.get("resources", {}).get(kind, {}) for one in containers(spec) for kind, name in wanted)


def _lacks_limits(spec: Spec) -> bool:
    return any(not {"cpu", "memory"} <= set(one.get("resources", {}).get("limits", {})) for one in containers(spec))


def _has_no_probe(spec: Spec) -> bool:
    return any(not {"livenessProbe", "readinessProbe", "startupProbe"} & set(one) for one in spec["containers"])


Rule = tuple[str, str, Callable[[Spec], bool]]
RULES: tuple[Rule, ...] = (
    (
        "disallow-host-path, restrict-volume-types",
        "K8sPSPHostFilesystem, K8sPSPVolumeTypes",
        lambda spec: any(not _ADMITTED_VOLUMES & set(one) for one in spec.get("volumes", ())),
    ),
    (
        "disallow-host-namespaces",
        "K8sPSPHostNamespace",
        lambda spec: any(spec.get(name) for name in ("hostPID", "hostIPC", "hostNetwork")),
    ),
    (
        "require-run-as-nonroot, require-run-as-non-root-user",
        "K8sPSPAllowedUsers",
        lambda spec: any(not found for found in _of(spec, "runAsNonRoot")) or 0 in _of(spec, "runAsUser"),
    ),
    (
        "disallow-capabilities",
        "K8sPSPCapabilities",
        lambda spec: bool(_added(spec) - _BASELINE),
    ),
    (
        "disallow-capabilities-strict",
        "K8sPSPCapabilities",
        lambda spec: (
            bool(_added(spec) - {"NET_BIND_SERVICE"})
            or any("ALL" not in (found or {}).get("drop", ()) for found in _of(spec, "capabilities"))
        ),
    ),
    (
        "disallow-privileged-containers, disallow-privilege-escalation",
        "K8sPSPPrivilegedContainer, K8sPSPAllowPrivilegeEscalationContainer",
        lambda spec: (
            any(_of(spec, "privileged")) or any(found is not False for found in _of(spec, "allowPrivilegeEscalation"))
        ),
    ),
    (
        "restrict-seccomp-strict",
        "K8sPSPSeccompV2",
        lambda spec: any((found or {}).get("type") != "RuntimeDefault" for found in _of(spec, "seccompProfile")),
    ),
    (
        "restrict-apparmor-profiles",
        "K8sPSPAppArmor",
        lambda spec: any((found or {}).get("type") == "Unconfined" for found in _of(spec, "appArmorProfile")),
    ),
    (
        "disallow-selinux",
        "K8sPSPSELinuxV2",
        lambda spec: any(
            (found or {}).get("type", "") not in _ADMITTED_SELINUX for found in _of(spec, "seLinuxOptions")
        ),
    ),
    (
        "require-ro-rootfs",
        "K8sPSPReadOnlyRootFilesystem",
        lambda spec: not all(_of(spec, "readOnlyRootFilesystem")),
    ),
    ("require-requests-limits", "K8sRequiredResources", _lacks_resources),
    ("–", "K8sContainerLimits", _lacks_limits),
    ("require-pod-probes", "K8sRequiredProbes", _has_no_probe),
)
"""Kyverno's policies, Gatekeeper's templates, and whether they refuse such a pod."""
ABOUT_RESOURCES = ("require-requests-limits", "–")


def pods() -> Iterator[tuple[str, str, Spec]]:
    """Each workload's name, the component that makes it what it is (empty: none), and its pod."""
    patches: dict[str, list[dict[str, Any]]] = {"": []}
    for folder in sorted(path.parent for path in (MANIFESTS / "components").glob("*/kustomization.yaml")):
        listed = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8")).get("patches", ())
        files = [f"components/{folder.name}/{one['path']}" for one in listed if "path" in one]
        if own := [one for file in files for one in documents(file) if _is_agents(one)]:
            patches[folder.name] = own
    made = (_agents_pod(own) for own in patches.values())
    complete = {one["name"]: one for spec in made for one in containers(spec) if "image" in one}
    for component, own in patches.items():
        spec = _agents_pod(own)
        inits = [merged(complete[one["name"]], one) for one in spec.get("initContainers", ())]
        yield AGENT, component, spec | {"initContainers": inits}
    for file in OTHERS:
        [found] = documents(file)
        yield found["metadata"]["name"], "", found["spec"]["template"]["spec"]


def _agents_pod(patches: Sequence[dict[str, Any]]) -> Spec:
    """What a patch deletes stays: it may be another component's, and it is no reason to refuse a pod."""
    found = daemon_set()
    for patch in patches:
        found = merged(found, _without_deletions(patch))
    spec: Spec = found["spec"]["template"]["spec"]
    return spec


def _without_deletions(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_deletions(one) for one in value if not (isinstance(one, dict) and "$patch" in one)]
    return {key: _without_deletions(one) for key, one in value.items()} if isinstance(value, dict) else value


def _is_agents(one: dict[str, Any]) -> bool:
    return bool(one.get("kind") == "DaemonSet" and one["metadata"]["name"] == AGENT)


def refused(rule: Rule, found: Sequence[tuple[str, str, Spec]]) -> dict[str, list[str]]:
    """The workloads that the rule refuses; of the agent the components that make it refused, or not (`not NAME`)."""
    by_default = {name for name, component, spec in found if not component and rule[2](spec)}
    result: dict[str, list[str]] = {name: [] for name in sorted(by_default)}
    for name, component, spec in found:
        if component and rule[2](spec) != (name in by_default):
            result.setdefault(name, []).append(f"not `{component}`" if name in by_default else f"`{component}`")
    return result


def policies() -> str:
    """An item for each rule that refuses anything."""
    found = list(pods())
    lines = []
    for rule in RULES:
        cells = [
            f"`{name}`" + (f" ({', '.join(components)})" if components else "")
            for name, components in refused(rule, found).items()
        ]
        if cells:
            lines.append(f"- **{rule[0]}; {rule[1]}**: {', '.join(cells)}".replace("–; ", ""))
    return "\n".join(lines)
