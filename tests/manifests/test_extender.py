"""The extender's manifests agree with the code and with each other: settings, rights, schedulers' configurations, quota."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpushare_agent import __version__
from gpushare_agent.core.model.names import VCORE_RESOURCE, VMEMORY_RESOURCE
from gpushare_agent.core.settings.settings import Settings, load_settings
from gpushare_agent.extender.app import LEASE_NAME
from gpushare_agent.extender.bind import BIND_TIMEOUT_S
from gpushare_agent.extender.claims_webhook import API_TIMEOUT_S
from gpushare_agent.extender.decisions import vgpu_names
from gpushare_agent.extender.decisions.quota import NamespaceQuota, parse_quota
from gpushare_agent.extender.leader_election import APP_LABEL, LEADER, ROLE_LABEL
from tests.manifests.support_manifests import (
    MANIFESTS,
    by_name,
    deployed,
    documents,
    kustomized,
    merged,
    rendered,
    volumes_are_those_mounted,
)

EXTENDER = MANIFESTS / "extender"
NAMESPACE = "gpushare-system"
NAME = "gpushare-agent-extender"
SCHEDULERS = ["second-scheduler", "default-scheduler"]
VERBS = {
    "filterVerb": {"filter", "predicates"},
    "prioritizeVerb": {"priorities"},
    "preemptVerb": {"preemption"},
    "bindVerb": {"bind"},
}
"""Below /scheduler."""
V1_FIELDS = {*VERBS, "urlPrefix", "weight", "enableHTTPS", "tlsConfig", "httpTimeout", "nodeCacheCapable"}
V1_FIELDS |= {"managedResources", "ignorable"}
"""Of an extender in kubescheduler.config.k8s.io/v1; kube-scheduler refuses a file with any other."""


def deployment() -> dict[str, Any]:
    (found,) = documents("extender/deployment.yaml")
    return found


def pod_spec() -> dict[str, Any]:
    return deployment()["spec"]["template"]["spec"]


def settings_with(container: dict[str, Any]) -> Settings:
    environ = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    assert environ["GPUSHARE_CONFIG"] == "/etc/gpushare-agent/settings.yaml"
    return load_settings([], environ | {"GPUSHARE_CONFIG": str(EXTENDER / "settings.yaml")}).settings


def extender_settings() -> Settings:
    return settings_with(pod_spec()["containers"][0])


def configuration(directory: str) -> dict[str, Any]:
    (found,) = documents(f"extender/{directory}/scheduler.yaml")
    return found


def asked(directory: str) -> dict[str, Any]:
    """The extender, as a scheduler's configuration has it."""
    (found,) = configuration(directory)["extenders"]
    return found


def of_kind(directory: str, kind: str) -> list[dict[str, Any]]:
    """As kustomize renders them: it renames, also in Roles."""
    return [item for item in rendered(directory) if item["kind"] == kind]


def test_every_file_is_listed() -> None:
    """kustomize applies what is there, and nothing is forgotten."""
    for directory in (EXTENDER, EXTENDER / "second-scheduler"):
        (found,) = documents(f"{directory}/kustomization.yaml")
        files = found["configMapGenerator"][0]["files"]
        listed = {*found["resources"], *found["configurations"], *files, "kustomization.yaml"}
        assert listed == {path.name for path in directory.iterdir() if path.is_file()}
    for directory in (EXTENDER / "components").iterdir():
        (found,) = documents(f"{directory}/kustomization.yaml")
        listed = {*found.get("resources", ()), *(patch["path"] for patch in found.get("patches", ()))}
        assert listed | {"kustomization.yaml"} == {path.name for path in directory.iterdir()}


def test_the_image_is_the_agents() -> None:
    """One image, of one version, for agents and extender."""
    (agents,), (own,) = documents("base/kustomization.yaml"), documents("extender/kustomization.yaml")
    assert own["images"] == agents["images"]


def test_the_settings_are_accepted_and_reach_every_port() -> None:
    """It listens on the pod's addresses, and the ports of pod, Service and network policy are that of the settings."""
    (container,), settings = pod_spec()["containers"], extender_settings()
    assert settings.extender.addr == ""
    (port,) = container["ports"]
    assert port["containerPort"] == settings.extender.port
    (service,) = documents("extender/service.yaml")
    (served,) = service["spec"]["ports"]
    assert (served["port"], served["targetPort"]) == (settings.extender.port, port["name"])
    (policy,) = documents("extender/components/network-policy/network-policy.yaml")
    assert policy["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": port["name"]}]
    annotations = deployment()["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(settings.extender.port)


def test_the_component_prometheus_operator_scrapes_each_replica_once_and_as_it_serves() -> None:
    """By the port's name, over TLS, believing the authority of the Secret, under the certificate's name."""
    (monitor,) = documents("extender/components/prometheus-operator/podmonitor.yaml")
    template = deployment()["spec"]["template"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (port,) = pod_spec()["containers"][0]["ports"]
    assert (endpoint["port"], endpoint["scheme"]) == (port["name"], "https")
    tls = endpoint["tlsConfig"]
    assert tls["serverName"] == NAME
    mounted = {one["secret"]["secretName"] for one in pod_spec()["volumes"] if "secret" in one}
    assert {tls["ca"]["secret"]["name"]} == mounted
    (patch,) = documents("extender/components/prometheus-operator/no-annotations.yaml")
    after = merged(deployment(), patch)["spec"]["template"]["metadata"]["annotations"]
    assert not [name for name in after if name.startswith("prometheus.io/")]


def test_the_labels_find_the_extenders_pods() -> None:
    """Of the Deployment itself, the Service, the network policy and the rule that spreads the replicas."""
    labels = deployment()["spec"]["template"]["metadata"]["labels"]
    (service,) = documents("extender/service.yaml")
    (policy,) = documents("extender/components/network-policy/network-policy.yaml")
    (spread,) = pod_spec()["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert deployment()["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == labels | {ROLE_LABEL: LEADER}
    assert APP_LABEL in labels
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    assert spread["podAffinityTerm"]["labelSelector"]["matchLabels"] == labels
    (scheduler,) = documents("extender/second-scheduler/deployment.yaml")
    (peer,) = policy["spec"]["ingress"][0]["from"]
    (wanted,) = peer["podSelector"]["matchExpressions"]
    assert wanted["operator"] == "In"
    assert {wanted["key"]: wanted["values"][0]} == scheduler["spec"]["template"]["metadata"]["labels"]


def test_the_extender_counts_as_the_agents_do() -> None:
    """Resources' names, units and share policy are those that the agents are deployed with."""
    agents, own = deployed(), extender_settings()
    assert (own.resources, own.gpushare) == (agents.resources, agents.gpushare)
    assert own.placement.share_policy == agents.placement.share_policy


def test_there_are_two_replicas_and_one_is_always_there() -> None:
    """Through updates and drains; the one that does not lead is ready too, or neither would ever end."""
    spec = deployment()["spec"]
    assert (spec["replicas"], extender_settings().extender.leader_elect) == (2, True)
    assert spec["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    (container,) = pod_spec()["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz", "which does not ask who leads"
    (budget,) = documents("extender/disruption.yaml")
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["selector"] == spec["selector"]


def test_the_certificates_come_from_the_secret() -> None:
    """Only clients with a certificate may ask, and the pod's group can read the files."""
    (container,), extender = pod_spec()["containers"], extender_settings().extender
    files = (extender.tls_cert, extender.tls_key, extender.client_ca)
    assert [path and path.name for path in files] == ["tls.crt", "tls.key", "ca.crt"]
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == "tls"]
    assert {str(path and path.parent) for path in files} == {mount["mountPath"]}
    volume = by_name(pod_spec()["volumes"])["tls"]["secret"]
    assert volume["defaultMode"] == 0o440
    assert pod_spec()["securityContext"]["fsGroup"] == pod_spec()["securityContext"]["runAsGroup"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"


def test_the_component_without_tls_takes_settings_secret_and_https_away_together() -> None:
    """One without the others would be a pod that does not start."""
    (patch,) = documents("extender/components/without-tls/plain.yaml")
    template = merged(deployment(), patch)["spec"]["template"]
    (container,) = template["spec"]["containers"]
    extender = settings_with(container).extender
    assert (extender.tls_cert, extender.tls_key, extender.client_ca) == (None, None, None)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTP"
        assert container[probe]["httpGet"]["path"] == pod_spec()["containers"][0][probe]["httpGet"]["path"]
    assert volumes_are_those_mounted(template["spec"])
    assert template["metadata"]["annotations"]["prometheus.io/scheme"] == "http"


def test_the_rights_are_those_that_the_extender_uses() -> None:
    """What ClusterApi (core/kube/client.py) asks of the API server, and nothing else; leases and quota by name."""
    extender = extender_settings().extender
    cluster, quota = of_kind("extender", "ClusterRole")
    assert {(verb, *rule["resources"]) for rule in cluster["rules"] for verb in rule["verbs"]} == {
        ("list", "nodes"),
        ("watch", "nodes"),
        ("get", "pods"),
        ("list", "pods"),
        ("watch", "pods"),
        ("patch", "pods"),
        ("patch", "pods/status"),
        ("create", "pods/binding", "pods/eviction"),
        ("create", "events"),
        ("use", "annotations"),
    }
    (role,) = of_kind("extender", "Role")
    lease = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}
    held = {**lease, "resourceNames": [LEASE_NAME], "verbs": ["get", "update"]}
    assert role["metadata"]["namespace"] == NAMESPACE
    assert role["rules"] == [{**lease, "verbs": ["create"]}, held]
    of_quota = {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [extender.quota_name]}
    assert quota["rules"] == [{**of_quota, "verbs": ["list", "watch"]}]
    assert extender.lease_namespace == "", "the pod's own"
    (container,) = pod_spec()["containers"]
    for name, field in (("POD_NAME", "metadata.name"), ("POD_NAMESPACE", "metadata.namespace")):
        assert {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": field}}} in container["env"]


@pytest.mark.parametrize("directory", ["extender", "extender/second-scheduler"])
def test_every_binding_is_for_the_pods_account_and_every_own_role_is_bound(directory: str) -> None:
    """The rights reach the pods, in the namespace of their role."""
    found = rendered(directory)
    account = documents(f"{directory}/deployment.yaml")[0]["spec"]["template"]["spec"]["serviceAccountName"]
    bindings = [item for item in found if item["kind"].endswith("RoleBinding") or item["kind"] == "ClusterRoleBinding"]
    for binding in bindings:
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}]
    bound = {(b["roleRef"]["kind"], b["metadata"].get("namespace"), b["roleRef"]["name"]) for b in bindings}
    own = {
        (item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"])
        for item in found
        if item["kind"] in ("Role", "ClusterRole")
    }
    assert own <= bound
    assert {name for _, _, name in bound - own} <= {"system:kube-scheduler", "system:volume-scheduler"}


@pytest.mark.parametrize("directory", SCHEDULERS)
def test_a_schedulers_configuration_asks_the_extender_for_what_it_answers(directory: str) -> None:
    """Known fields and verbs, our resources and no others, and more patience than a bind takes."""
    found = asked(directory)
    assert configuration(directory)["apiVersion"] == "kubescheduler.config.k8s.io/v1"
    assert found.keys() == V1_FIELDS
    assert all(found[field] in verbs for field, verbs in VERBS.items())
    web = (MANIFESTS.parent / "gpushare_agent/extender/http.py").read_text(encoding="utf-8")
    assert all(f'web.post("/scheduler/{verb}"' in web for verbs in VERBS.values() for verb in verbs)
    assert (found["nodeCacheCapable"], found["ignorable"]) == (True, False)
    assert found["weight"] > 0
    assert [resource["name"] for resource in found["managedResources"]] == [VCORE_RESOURCE, VMEMORY_RESOURCE]
    assert not any(resource["ignoredByScheduler"] for resource in found["managedResources"])
    assert int(found["httpTimeout"].removesuffix("s")) > BIND_TIMEOUT_S
    assert "percentageOfNodesToScore" not in configuration(directory)


@pytest.mark.parametrize("directory", SCHEDULERS)
def test_a_scheduler_checks_the_extenders_certificate(directory: str) -> None:
    """Without a CA kube-scheduler takes any; the name checked is the same in every namespace."""
    found = asked(directory)
    assert found["enableHTTPS"] is True
    assert found["tlsConfig"].keys() == {"caFile", "certFile", "keyFile", "serverName"}
    host = found["urlPrefix"].removeprefix("https://").partition(":")[0]
    assert found["tlsConfig"]["serverName"] == NAME
    assert host in (NAME, "CLUSTER-IP")
    assert found["urlPrefix"] == f"https://{host}:{extender_settings().extender.port}/scheduler"


@pytest.mark.parametrize("directory", SCHEDULERS)
def test_gpushares_resource_is_one_line_to_uncomment(directory: str) -> None:
    """Not there by default: the extender would bind, in the place of GPUShare's own, pods that it does not know."""
    text = (EXTENDER / directory / "scheduler.yaml").read_text(encoding="utf-8")
    (found,) = yaml.safe_load_all(text.replace("# - {name: aliyun", "- {name: aliyun"))
    names = [one["name"] for one in asked(directory)["managedResources"]]
    assert [one["name"] for one in found["extenders"][0]["managedResources"]] == [*names, "aliyun.com/gpu-mem"]
    assert "aliyun.com/gpu-mem" not in names


def test_the_second_scheduler_has_its_own_name_lease_and_files() -> None:
    """It does not take part in the election of the cluster's own, and finds what its configuration names."""
    found = configuration("second-scheduler")
    (profile,) = found["profiles"]
    assert profile["schedulerName"] == "gpushare-scheduler"
    election = found["leaderElection"]
    role = of_kind("extender/second-scheduler", "Role")[0]
    assert role["rules"][1]["resourceNames"] == [election["resourceName"]]
    assert "resourceNamespace" not in election
    (item,) = documents("extender/second-scheduler/deployment.yaml")
    spec = item["spec"]["template"]["spec"]
    assert volumes_are_those_mounted(spec)
    (container,) = spec["containers"]
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    assert container["command"] == ["kube-scheduler", f"--config={mounts['settings']}/scheduler.yaml"]
    assert container["args"] == ["--leader-elect-resource-namespace=$(POD_NAMESPACE)"]
    files = [path for name, path in asked("second-scheduler")["tlsConfig"].items() if name.endswith("File")]
    assert {str(Path(path).parent) for path in files} == {mounts["tls"]}


def test_the_old_policy_file_says_the_same_as_the_new_configuration() -> None:
    """With its own spelling of HTTPS, the path of gpu-admission, and the timeout in nanoseconds."""
    policy = json.loads((EXTENDER / "default-scheduler/policy.json").read_text(encoding="utf-8"))
    assert (policy.pop("kind"), policy.pop("apiVersion")) == ("Policy", "v1")
    (old,), new = policy.pop("extenders"), asked("default-scheduler")
    assert not policy, "predicates and priorities left out are the default ones"
    assert old.pop("httpTimeout") == int(new.pop("httpTimeout").removesuffix("s")) * 10**9
    assert old.pop("enableHttps") == new.pop("enableHTTPS")
    assert {old.pop("filterVerb"), new.pop("filterVerb")} == VERBS["filterVerb"]
    assert old == new


def test_the_quotas_example_says_what_its_comment_says() -> None:
    """It lies where the extender looks for it, and the guide shows it word for word."""
    (found,) = documents("extender/quota/gpuquota.yaml")
    extender = extender_settings().extender
    assert found["metadata"] == {"name": extender.quota_name, "namespace": extender.quota_namespace}
    assert parse_quota(found["data"]).namespaces == {
        "research": NamespaceQuota(pools=("public", "research"), gpus={"P40": 400, "H100": 250}),
        "serving": NamespaceQuota(vcore=800, vmemory=512),
        "batch": NamespaceQuota(gpus={}),
    }
    guide = (MANIFESTS.parent / "docs/how-to/set-a-quota.md").read_text(encoding="utf-8")
    assert yaml.safe_load(guide.partition("```yaml\n")[2].partition("```")[0])["data"] == found["data"]


def test_the_claims_webhook_reaches_every_replica() -> None:
    """By a Service of its own, whose name is in the certificate that the guide makes; for pods that ask, where asked for."""
    folder = "extender/components/claims-webhook"
    (patch,), (service,) = documents(f"{folder}/setting.yaml"), documents(f"{folder}/service.yaml")
    template = merged(deployment(), patch)["spec"]["template"]
    assert settings_with(template["spec"]["containers"][0]).extender.claims_webhook == "open"
    pause_s = template["spec"]["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    ending_s = BIND_TIMEOUT_S + 1
    assert pause_s + ending_s < template["spec"]["terminationGracePeriodSeconds"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    (served,) = service["spec"]["ports"]
    assert served["targetPort"] in {port["name"] for port in pod_spec()["containers"][0]["ports"]}
    (configuration,) = documents(f"{folder}/webhook.yaml")
    webhook, of_names = configuration["webhooks"]
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    guide = (MANIFESTS.parent / "docs/how-to/schedule-with-the-extender.md").read_text(encoding="utf-8")
    assert f"DNS:{name}.{namespace}.svc" in guide
    web = (MANIFESTS.parent / "gpushare_agent/extender/http.py").read_text(encoding="utf-8")
    for one in (webhook, of_names):
        asked = one["clientConfig"]["service"]
        assert (asked["name"], asked["namespace"], asked["port"]) == (name, namespace, served["port"])
        assert f'web.post("{asked["path"]}"' in web
        assert (one["failurePolicy"], one["reinvocationPolicy"]) == ("Fail", "IfNeeded")
    (condition,) = webhook["matchConditions"]
    settings = Settings()
    assert all(f"'{one}'" in condition["expression"] for one in (VCORE_RESOURCE, VMEMORY_RESOURCE))
    assert f"'{settings.gpushare.resource}'" in condition["expression"]
    assert (webhook["sideEffects"], of_names["sideEffects"]) == ("NoneOnDryRun", "None")
    (condition,) = of_names["matchConditions"]
    assert all(f"'{one}'" in condition["expression"] for one in vgpu_names.NAMES)
    assert webhook["timeoutSeconds"] > API_TIMEOUT_S


@pytest.mark.parametrize(
    ("label", "is_asked"),
    [
        ({"hami.io/webhook": "ignore"}, False),
        ({"vgpu-manager.io/ignore-webhook": "true"}, False),
        ({"hami.io/webhook": "other", "app": "x"}, True),
    ],
)
def test_pods_that_the_former_webhooks_leave_alone_are_left_alone(label: dict[str, str], is_asked: bool) -> None:
    """By the labels of HAMi and vgpu-manager: such a pod's nvidia.com/gpu is a device plugin's."""
    (configuration,) = documents("extender/components/claims-webhook/webhook.yaml")
    expressions = configuration["webhooks"][1]["objectSelector"]["matchExpressions"]
    assert {one["operator"] for one in expressions} == {"NotIn"}
    assert all(label.get(one["key"]) not in one["values"] for one in expressions) is is_asked


@pytest.mark.parametrize("components", [(), ("without-tls", "network-policy"), ("claims-webhook",)], ids=str)
def test_kustomize_renders_the_extender(tmp_path: Path, components: tuple[str, ...]) -> None:
    """With all its objects in the namespaces that they name, and a pod as the tests above see it."""
    named = [f"extender/components/{name}" for name in components]
    found = kustomized(tmp_path, ["extender", "extender/second-scheduler"], named)
    assert {item["metadata"].get("namespace") for item in found} == {None, NAMESPACE}
    (extender,) = [item for item in found if item["kind"] == "Deployment" and item["metadata"]["name"] == NAME]
    spec = extender["spec"]["template"]["spec"]
    assert volumes_are_those_mounted(spec)
    (container,) = spec["containers"]
    assert (settings_with(container).extender.tls_cert is None) == ("without-tls" in components)
    assert container["image"].startswith("gpushare-agent:")
    of_webhook = {item["kind"]: item for item in found if item["metadata"]["name"] == f"{NAME[:14]}-claims-webhook"}
    assert bool(of_webhook) == ("claims-webhook" in components)
    if of_webhook:
        assert [(one["resources"], one["verbs"]) for one in of_webhook["ClusterRole"]["rules"]] == [
            (["resourceclaimtemplates"], ["get", "create"])
        ]
        (subject,) = of_webhook["ClusterRoleBinding"]["subjects"]
        assert (subject["name"], subject["namespace"]) == (spec["serviceAccountName"], NAMESPACE)


def test_the_static_pod_takes_gpu_admissions_place() -> None:
    """Its address, its kubeconfig, its policy file that only filters; without leases, for nobody may create one there."""
    (found,) = documents("extender/static-pod/gpu-admission.yaml")
    spec = found["spec"]
    (only,) = spec["containers"]
    chosen = load_settings(only["args"], {})
    extender = chosen.settings.extender
    assert (extender.addr, extender.port) == ("127.0.0.1", 3456)
    assert (extender.reserve, extender.leader_elect) == ("filter", False)
    assert str(chosen.settings.kubeconfig).startswith("/etc/kubernetes/") and only["command"][1] == "extender"
    assert only["image"] == f"gpushare-agent:{__version__}" and spec["hostNetwork"]
    assert {one["name"] for one in only["volumeMounts"]} == {one["name"] for one in spec["volumes"]}
