"""The extender's ValidatingAdmissionPolicies: who may write which annotations, and which pods may pass by the scheduler.

Their CEL expressions are evaluated by Google's implementation where it is installed (cel-expr-python, which is not what an
API server runs, but the same language).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from gpushare_agent.core.model.names import (
    CORE_LIMIT_ANNOTATION,
    GPU_ASSIGNED_ANNOTATION,
    GPU_CHOICE_ANNOTATIONS,
    GPUSHARE_ALLOCATION_ANNOTATION,
    GPUSHARE_ASSIGNED_ANNOTATION,
    GPUSHARE_ASSUME_TIME_ANNOTATION,
    GPUSHARE_INDEX_ANNOTATION,
    ISOLATION_ANNOTATION,
    PREDICATE_GPU_INDEX_PREFIX,
    PREDICATE_NODE_ANNOTATION,
    PREDICATE_TIME_ANNOTATION,
    RESIZE_ANNOTATION,
    RESIZE_STATUS_ANNOTATION,
)
from gpushare_agent.core.settings.settings import Settings
from tests.manifests.support_manifests import documents

ANNOTATIONS = "extender/policy-annotations.yaml"
NODE_NAME = "extender/policy-node-name.yaml"
SCHEDULER_NAME = "extender/second-scheduler/policy-scheduler-name.yaml"
RESIZE = "resize/policy-resize.yaml"
DRIVER = "components/driver-from-host/policy.yaml"
SLICES = "components/dra/slices-policy.yaml"
FILES = [ANNOTATIONS, NODE_NAME, SCHEDULER_NAME, RESIZE, DRIVER, SLICES]
RIGHT = "authorizer.group('gpushare-agent').resource('shares').namespace(request.namespace).check('resize').allowed()"
"""Asks the API server's authorizer, which no evaluator of CEL has."""
RIGHTS = re.compile(r"authorizer\..*?\.allowed\(\)")
KNOWN = {"object", "oldObject", "request", "variables", "authorizer"}
"""What an admission policy's expressions may name, and these here do."""
INDEX = f"{PREDICATE_GPU_INDEX_PREFIX}0"
GUARDED = [
    GPU_ASSIGNED_ANNOTATION,
    INDEX,
    f"{PREDICATE_GPU_INDEX_PREFIX}31",
    PREDICATE_NODE_ANNOTATION,
    PREDICATE_TIME_ANNOTATION,
    GPUSHARE_INDEX_ANNOTATION,
    GPUSHARE_ASSIGNED_ANNOTATION,
    GPUSHARE_ASSUME_TIME_ANNOTATION,
    GPUSHARE_ALLOCATION_ANNOTATION,
    "gpushare-agent/anything",
    RESIZE_STATUS_ANNOTATION,
]
FREE = [
    CORE_LIMIT_ANNOTATION,
    ISOLATION_ANNOTATION,
    RESIZE_ANNOTATION,
    "clusterName",
    *GPU_CHOICE_ANNOTATIONS,
    "tencent.com/other",
    "not-gpushare-agent/x",
]
TENANT = "somebody"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether the policy looked at the request at all, and its messages where it denies."""

    is_matched: bool
    denials: tuple[str, ...] = ()


def spec_of(path: str) -> dict[str, Any]:
    (found,) = [item for item in documents(path) if item["kind"] == "ValidatingAdmissionPolicy"]
    return found["spec"]


def expressions(path: str) -> list[str]:
    spec = spec_of(path)
    parts = ("matchConditions", "variables", "validations")
    found = [item["expression"] for part in parts for item in spec.get(part, ())]
    return found + [item["messageExpression"] for item in spec["validations"] if "messageExpression" in item]


@pytest.mark.parametrize("path", FILES)
def test_a_policy_is_in_force_and_fails_closed(path: str) -> None:
    """Its binding denies, in every namespace; a policy that cannot be evaluated lets nothing pass."""
    policy, binding = documents(path)
    assert (policy["kind"], binding["kind"]) == ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    assert {item["apiVersion"] for item in (policy, binding)} == {"admissionregistration.k8s.io/v1"}
    assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}
    assert policy["spec"]["failurePolicy"] == "Fail"
    assert policy["spec"].get("variables", ["x"]) != [], "an empty list would be a difference at each apply"
    assert not any("\n" in text for text in expressions(path))


def test_every_way_to_a_pods_annotations_is_watched() -> None:
    """A status update and a Binding can change them too."""
    (rule,) = spec_of(ANNOTATIONS)["matchConstraints"]["resourceRules"]
    assert rule["operations"] == ["CREATE", "UPDATE"]
    assert set(rule["resources"]) == {"pods", "pods/status", "pods/binding", "bindings"}


@pytest.mark.parametrize(
    ("path", "files"),
    [
        (ANNOTATIONS, ["base/rbac.yaml", "extender/rbac.yaml"]),
        (DRIVER, ["base/rbac.yaml"]),
        (RESIZE, ["resize/role.yaml"]),
    ],
)
def test_the_right_that_a_policy_asks_for_is_granted(path: str, files: list[str]) -> None:
    """By the roles of the programs, or one for users."""
    asked = {tuple(re.findall(r"'([^']*)'", right)) for text in expressions(path) for right in RIGHTS.findall(text)}
    for file in files:
        rules = [rule for item in documents(file) for rule in item.get("rules", ())]
        assert asked <= {
            right for rule in rules for right in product(rule["apiGroups"], rule["resources"], rule["verbs"])
        }


@pytest.mark.parametrize("path", [NODE_NAME, SCHEDULER_NAME])
def test_the_resources_are_those_of_the_default_settings(path: str) -> None:
    """The second scheduler asks about vcore and vmemory; GPUShare's resource is added by who uses it."""
    resources, gpushare = Settings().resources, Settings().gpushare
    named = set(re.findall(r"'([a-z.]+/[a-z-]+)'", " ".join(expressions(path))))
    expected = {resources.vcore, resources.vmemory}
    assert named == (expected | {gpushare.resource} if path == NODE_NAME else expected)


# --- what they decide ---


class Policy:
    """Evaluates one as an API server does: conditions, then variables in their order, then validations."""

    def __init__(self, path: str) -> None:
        cel = pytest.importorskip(
            "cel_expr_python.cel", reason="cel-expr-python, which evaluates CEL, is not installed"
        )
        strings = pytest.importorskip("cel_expr_python.ext.ext_strings")
        optional = pytest.importorskip("cel_expr_python.ext.ext_optional")
        self._spec = spec_of(path)
        self._environment = cel.NewEnv(
            variables=dict.fromkeys(sorted(KNOWN), cel.Type.DYN),
            extensions=[strings.ExtStrings(), optional.ExtOptional()],
        )

    def judge(
        self,
        raw: dict[str, Any],
        *,
        old: dict[str, Any] | None = None,
        user: str = TENANT,
        groups: tuple[str, ...] = ("system:authenticated",),
        has_right: bool = False,
        node: str = "",
        operation: str = "CREATE",
    ) -> Verdict:
        """`has_right` is the authorizer's answer; `node` is that of the user's token."""
        self._has_right = has_right
        extra = {"extra": {"authentication.kubernetes.io/node-name": [node]}} if node else {}
        user_info = {"username": user, "groups": list(groups), **extra}
        known = {
            "object": raw,
            "oldObject": old,
            "request": {"userInfo": user_info, "operation": operation},
            "variables": {},
        }
        if not all(self._is_true(condition["expression"], known) for condition in self._spec["matchConditions"]):
            return Verdict(is_matched=False)
        for variable in self._spec.get("variables", ()):
            value = self._value(variable["expression"], known)
            known = {**known, "variables": {**known["variables"], variable["name"]: value}}
        denied = [item for item in self._spec["validations"] if not self._is_true(item["expression"], known)]
        texts = [
            self._value(item["messageExpression"], known) if "messageExpression" in item else item["message"]
            for item in denied
        ]
        return Verdict(is_matched=True, denials=tuple(texts))

    def _value(self, expression: str, known: dict[str, Any]) -> Any:
        answered = RIGHTS.sub(str(self._has_right).lower(), expression)
        value = self._environment.compile(answered).eval(data=known)
        assert str(value.type()) != "ERROR", f"{expression}: {value}"
        return value.plain_value()

    def _is_true(self, expression: str, known: dict[str, Any]) -> bool:
        value = self._value(expression, known)
        assert isinstance(value, bool), f"{expression}: {value}"
        return value


def pod(annotations: dict[str, str] | None = None, *, asks: str = "", **spec: Any) -> dict[str, Any]:
    """`asks` is a resource that the container has a limit of."""
    metadata = {"name": "a-pod"} if annotations is None else {"name": "a-pod", "annotations": annotations}
    container: dict[str, Any] = {"name": "main", "resources": {"limits": {"cpu": "1"}}}
    if asks:
        container["resources"]["limits"][asks] = "10"
    return {"metadata": metadata, "spec": {"containers": [{"name": "plain"}, container], **spec}}


@pytest.mark.parametrize("name", GUARDED)
def test_a_tenant_can_neither_set_nor_change_nor_remove_a_guarded_annotation(name: str) -> None:
    """Each is denied, with the annotation in the message."""
    policy = Policy(ANNOTATIONS)
    had, other = pod({name: "1", "mine": "x"}), pod({name: "2", "mine": "x"})
    for raw, old in ((had, None), (had, pod()), (had, pod({"mine": "x"})), (other, had), (pod(), had), (pod({}), had)):
        verdict = policy.judge(raw, old=old)
        assert len(verdict.denials) == 1
        assert name in verdict.denials[0]


@pytest.mark.parametrize("name", FREE)
def test_a_tenant_may_write_all_other_annotations(name: str) -> None:
    """Also beside guarded ones, which stay as they are."""
    policy = Policy(ANNOTATIONS)
    assert policy.judge(pod({name: "1"})) == Verdict(is_matched=True)
    assert policy.judge(pod({name: "1", INDEX: "0"}), old=pod({INDEX: "0"})) == Verdict(is_matched=True)


def test_an_update_that_leaves_the_annotations_alone_is_not_looked_at() -> None:
    """The kubelets' updates of a pod's status are most of all updates."""
    policy, had = Policy(ANNOTATIONS), pod({INDEX: "1"})
    assert policy.judge({**had, "status": {"phase": "Running"}}, old=had) == Verdict(is_matched=False)
    assert policy.judge(pod()) == Verdict(is_matched=False)
    assert policy.judge({"metadata": {"name": "a-pod"}, "target": {"name": "a-node"}}) == Verdict(is_matched=False)


def test_a_binding_brings_no_guarded_annotation_to_a_pod() -> None:
    """The API server copies a Binding's annotations."""
    binding = {"metadata": {"name": "a-pod", "annotations": {INDEX: "3"}}, "target": {"name": "a-node"}}
    assert len(Policy(ANNOTATIONS).judge(binding).denials) == 1


@pytest.mark.parametrize("name", ["gpushare-agent", "gpushare-agent-extender", "team-gpushare-agent-x"])
@pytest.mark.parametrize("namespace", ["gpushare-system", "gpu-team"])
def test_agents_and_extender_may_write_them(name: str, namespace: str) -> None:
    """Wherever kustomize puts them and whatever it names them; an account of the same name without the right may not."""
    policy, user = Policy(ANNOTATIONS), f"system:serviceaccount:{namespace}:{name}"
    for raw, old in ((pod({INDEX: "1"}), pod()), (pod(), pod({INDEX: "1"}))):
        assert policy.judge(raw, old=old, user=user, has_right=True) == Verdict(is_matched=True)
        assert policy.judge(raw, old=old, user=user).denials


@pytest.mark.parametrize(
    "user",
    [
        "gpushare-agent",
        "system:admin",
        "system:serviceaccount:argocd:argocd-application-controller",
        "system:serviceaccount:gpushare-agent:default",
        "oidc:system:serviceaccount:gpu-team:gpushare-agent",
    ],
)
def test_who_may_do_everything_may_not_write_them(user: str) -> None:
    """Such accounts create pods for others, as Argo CD does."""
    assert Policy(ANNOTATIONS).judge(pod({INDEX: "1"}), old=pod(), user=user, has_right=True).denials


def test_the_driver_is_for_pods_whose_account_has_the_right() -> None:
    """Whatever the namespace; pods that do not ask for it are not looked at."""
    policy, asks = Policy(DRIVER), pod(asks="gpushare-agent/driver")
    for raw in (asks, pod(asks="gpushare-agent/driver", serviceAccountName="gpushare-agent")):
        assert policy.judge(raw).denials
        assert policy.judge(raw, has_right=True) == Verdict(is_matched=True)
    init = {"name": "init", "resources": {"limits": {"gpushare-agent/driver": "1"}}}
    assert policy.judge(pod(initContainers=[init])).denials
    assert policy.judge(pod(asks="tencent.com/vcuda-core")) == Verdict(is_matched=False)
    (expression,) = [one["expression"] for one in spec_of(DRIVER)["validations"]]
    assert expression.startswith("authorizer.serviceAccount(request.namespace, variables.account) .group(")


@pytest.mark.parametrize("user", ["gpushare-system:gpushare-agent", "gpu-team:team-gpushare-agent-x"])
def test_an_agent_writes_the_slices_of_its_own_node_alone(user: str) -> None:
    """By the node of its token, wherever kustomize has put it; other drivers and administrators are not looked at."""
    policy, agent = Policy(SLICES), f"system:serviceaccount:{user}"
    own = {"spec": {"driver": "gpushare-agent", "nodeName": "a-node"}}
    assert policy.judge(own, user=agent, node="a-node") == Verdict(is_matched=True)
    assert policy.judge({}, old=own, user=agent, node="a-node", operation="DELETE") == Verdict(is_matched=True)
    assert policy.judge(own, user=agent, node="b-node").denials
    assert policy.judge(own, user=agent).denials
    assert policy.judge({"spec": {**own["spec"], "driver": "gpu.nvidia.com"}}, user=agent, node="a-node").denials
    assert policy.judge(own, user="system:serviceaccount:nvidia:driver") == Verdict(is_matched=False)


@pytest.mark.parametrize("resource", ["tencent.com/vcuda-core", "tencent.com/vcuda-memory", "aliyun.com/gpu-mem"])
def test_a_pod_with_a_share_may_not_name_its_node(resource: str) -> None:
    """Whether a main or an init container asks; one that asks for nothing of ours may."""
    policy = Policy(NODE_NAME)
    assert policy.judge(pod(asks=resource, nodeName="a-node")).denials
    init = {"name": "init", "resources": {"limits": {resource: 1}}}
    assert policy.judge(pod(nodeName="a-node", initContainers=[{"name": "plain"}, init])).denials
    assert policy.judge(pod(nodeName="a-node", initContainers=[])) == Verdict(is_matched=True)
    assert policy.judge(pod(asks=resource)) == Verdict(is_matched=False)
    assert policy.judge(pod(asks=resource, nodeName="")) == Verdict(is_matched=False)


def test_a_pod_with_a_share_goes_to_the_second_scheduler() -> None:
    """Others go where they like."""
    policy, name = Policy(SCHEDULER_NAME), "gpushare-scheduler"
    assert documents("extender/second-scheduler/scheduler.yaml")[0]["profiles"] == [{"schedulerName": name}]
    asks = "tencent.com/vcuda-core"
    assert policy.judge(pod(asks=asks, schedulerName="default-scheduler")).denials
    assert policy.judge(pod(asks=asks)).denials
    assert policy.judge(pod(asks=asks, schedulerName=name)) == Verdict(is_matched=False)
    assert policy.judge(pod(schedulerName="default-scheduler")) == Verdict(is_matched=True)


@pytest.mark.parametrize("path", [NODE_NAME, SCHEDULER_NAME])
def test_a_kubelet_may_create_the_mirror_pod_of_a_static_pod_with_a_share(path: str) -> None:
    """It names its node and the default scheduler, and it runs already; a tenant's pod that pretends to be one is denied."""
    annotations = {"kubernetes.io/config.mirror": "0123456789abcdef"}
    mirror = pod(annotations, asks="tencent.com/vcuda-core", nodeName="a-node", schedulerName="default-scheduler")
    kubelet = Policy(path).judge(mirror, user="system:node:a-node", groups=("system:nodes", "system:authenticated"))
    assert kubelet == Verdict(is_matched=False)
    assert Policy(path).judge(mirror).denials


def test_the_size_of_a_share_is_written_by_those_with_the_right_to() -> None:
    """At the pod's creation, later, in a Binding; all else of the pod is not looked at. The right is the role's."""
    policy, had = Policy(RESIZE), pod({RESIZE_ANNOTATION: "main:cores=50"})
    other = pod({RESIZE_ANNOTATION: "main:cores=90"})
    for raw, old in ((had, None), (had, pod()), (other, had), (pod(), had), (pod({}), had)):
        assert policy.judge(raw, old=old, has_right=True) == Verdict(is_matched=True)
        (denial,) = policy.judge(raw, old=old).denials
        assert RESIZE_ANNOTATION in denial
    for raw, old in ((had, had), (pod(), None), (pod({"mine": "x"}), pod())):
        assert policy.judge(raw, old=old) == Verdict(is_matched=False)
    (rule,) = spec_of(RESIZE)["matchConstraints"]["resourceRules"]
    assert rule == spec_of(ANNOTATIONS)["matchConstraints"]["resourceRules"][0]
    (role,) = documents("resize/role.yaml")
    assert role["rules"] == [{"apiGroups": ["gpushare-agent"], "resources": ["shares"], "verbs": ["resize"]}]
    assert [item["expression"] for item in spec_of(RESIZE)["validations"]] == [RIGHT]
