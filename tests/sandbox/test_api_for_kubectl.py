"""What kubectl and client-go ask of an API server beyond reading and writing: selectors, tables, checks of fields."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
import pytest

from gpushare_agent.core.model.errors import Rejected
from gpushare_agent.sandbox.api.kubectl import duration_text, table
from gpushare_agent.sandbox.api.patch import APPLY, STRATEGIC, patched
from gpushare_agent.sandbox.api.server import EmbeddedApiServer
from gpushare_agent.sandbox.api.watch import parse_label_selector
from gpushare_agent.sandbox.report import reason_and_message
from tests.fakes.api_server import MERGE, PODS, open_client
from tests.sandbox.support_sandbox import container, pod

TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"
"""As kubectl sends it."""
JSON = "application/json"


def labelled(name: str, **labels: str) -> dict[str, Any]:
    raw = pod(name)
    raw["metadata"]["labels"] = labels
    return raw


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("", "abc"), ("app=x", "a"), ("app==x,tier=1", "a"), ("app!=x", "bc"), ("app in (x, y)", "ab"),
        ("app notin (x),app", "b"), ("app", "ab"), ("!app", "c"), ("! app", "c"), ("tier in ()", "b"), ("tier=", "b"),
    ],
)  # fmt: skip
async def test_lists_are_filtered_by_labels(selector: str, names: str) -> None:
    """Equality and sets, joined by commas; an absent label is unequal to every value."""
    async with open_client() as client:
        for raw in (labelled("a", app="x", tier="1"), labelled("b", app="y", tier=""), labelled("c")):
            client.api.create_pod(raw)
        _, body = await client.call("GET", "/api/v1/pods", labelSelector=selector)
        assert "".join(item["metadata"]["name"] for item in body["items"]) == names


@pytest.mark.parametrize("selector", ["=x", "app in x", "app in (x", "!app=x", "app=x y", "a,,b"])
async def test_a_label_selector_that_cannot_be_read_is_refused(selector: str) -> None:
    """400 with what was found, for lists and watches; never an empty filter. No pattern tries every cut: a hundred thousand
    blanks or dashes are refused at once."""
    for text in (selector, "a" + " " * 100_000 + "(", "a in (" + "x," * 50_000, "a=" + "-" * 100_000 + "!"):
        with pytest.raises(Rejected):
            parse_label_selector(text)
    async with open_client() as client:
        for watch in ("", "true"):
            status, body = await client.call("GET", PODS, labelSelector=selector, watch=watch)
            assert (status, body["reason"]) == (400, "BadRequest")


async def test_a_table_has_the_columns_that_kubectl_prints() -> None:
    """Rows of a list, of one object, and of a watch; what comes with a row is as much as was asked for."""
    async with open_client() as client:
        client.api.create_pod(pod("a", container("x"), container("y")))
        client.session.headers["Accept"] = TABLE
        _, found = await client.call("GET", PODS, includeObject="Object")
        [row] = found["rows"]
        assert (found["kind"], found["apiVersion"]) == ("Table", "meta.k8s.io/v1")
        assert [c["name"] for c in found["columnDefinitions"] if c["priority"] == 0] == [
            "Name", "Ready", "Status", "Restarts", "Age",
        ]  # fmt: skip
        assert row["cells"][:4] == ["a", "0/2", "Pending", 0]
        assert row["object"]["spec"]
        [row] = (await client.call("GET", f"{PODS}/a"))[1]["rows"]
        assert (row["object"]["kind"], "spec" in row["object"]) == ("PartialObjectMetadata", False)
        async with client.watch(resourceVersion=str(client.api.version), includeObject="None") as watch:
            client.api.create_pod(pod("b"))
            kind, found = await watch.next()
            assert (kind, found["rows"][0]["cells"][0], found["rows"][0]["object"]) == ("ADDED", "b", None)


WAITS = {"name": "main", "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "restartCount": 3}
RUNS = {"name": "main", "state": {"running": {}}, "ready": True, "started": True}
ENDED = {"name": "main", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
FAILED = {"name": "main", "state": {"terminated": {"exitCode": 3}}}


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        ({"phase": "Pending"}, "Pending"),
        ({"phase": "Failed", "reason": "UnexpectedAdmissionError"}, "UnexpectedAdmissionError"),
        ({"phase": "Running", "containerStatuses": [RUNS]}, "Running"),
        ({"phase": "Running", "containerStatuses": [WAITS]}, "CrashLoopBackOff"),
        ({"phase": "Succeeded", "containerStatuses": [ENDED]}, "Completed"),
        ({"phase": "Failed", "containerStatuses": [FAILED]}, "ExitCode:3"),
        ({"phase": "Running", "containerStatuses": [ENDED, RUNS]}, "Running"),
        ({"phase": "Pending", "initContainerStatuses": [RUNS | {"started": False}]}, "Init:0/1"),
        ({"phase": "Pending", "initContainerStatuses": [WAITS]}, "Init:CrashLoopBackOff"),
        ({"phase": "Pending", "initContainerStatuses": [FAILED]}, "Init:Error"),
        ({"phase": "Running", "initContainerStatuses": [ENDED], "containerStatuses": [RUNS]}, "Running"),
    ],
)  # fmt: skip
def test_the_status_of_a_pod_is_that_of_kubectl(status: dict[str, Any], shown: str) -> None:
    """The reason of what keeps it from running, before its phase; Terminating before all."""
    raw = {**pod("a", init=(container("i"),)), "status": status}
    raw["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    assert table("pods", [raw], "1", "None")["rows"][0]["cells"][2] == shown
    raw["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert table("pods", [raw], "1", "None")["rows"][0]["cells"][2] == "Terminating"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "<invalid>"), (0, "0s"), (119, "119s"), (120, "2m"), (125, "2m5s"), (599, "9m59s"), (601, "10m"),
     (10799, "179m"), (10800, "3h"), (12600, "3h30m"), (28800, "8h"), (30000, "8h"), (172800, "2d"), (180000, "2d2h"),
     (700000, "8d"), (800 * 86400, "2y")],
)  # fmt: skip
def test_ages_are_written_as_kubectl_writes_them(seconds: int, text: str) -> None:
    """Of k8s.io/apimachinery/pkg/util/duration: HumanDuration."""
    assert duration_text(seconds) == text


def test_the_age_is_counted_from_the_creation() -> None:
    """An object of two hours ago is 120m old; one without a time is unknown."""
    born = (datetime.now(UTC) - timedelta(hours=2, seconds=5)).strftime("%Y-%m-%dT%H:%M:%SZ")
    maps = [{"metadata": {"name": "a", "creationTimestamp": born}}, {"metadata": {"name": "b"}}]
    rows = table("configmaps", maps, "1", "None")["rows"]
    assert [row["cells"] for row in rows] == [["a", 0, "120m"], ["b", 0, "<unknown>"]]


async def test_an_unknown_field_is_refused_or_warned_of_as_asked() -> None:
    """fieldValidation Strict: 400 in the real server's words, and nothing is created; Warn: a header; else neither."""
    raw = pod("a", {"name": "main", "resorces": {"limits": {"x/y": 1}}})
    said = 'unknown field "spec.containers[0].resorces"'
    async with open_client() as client:
        status, body = await client.call("POST", PODS, raw, fieldValidation="Strict")
        assert (status, body["message"]) == (
            400, f'Pod in version "v1" cannot be handled as a Pod: strict decoding error: {said}',
        )  # fmt: skip
        assert client.api.pods() == []
        async with client.session.post(client.api.url + PODS + "?fieldValidation=Warn", json=raw) as answer:
            assert (answer.status, answer.headers.getall("Warning")) == (
                201, ['299 - "unknown field \\"spec.containers[0].resorces\\""'],
            )  # fmt: skip
        assert (await client.call("POST", PODS, {**raw, "metadata": {"name": "b"}}, fieldValidation="Ignore"))[0] == 201
        patch = {"metadata": {"lables": {"a": "b"}}}
        status, body = await client.call("PATCH", f"{PODS}/b", patch, MERGE, fieldValidation="Strict")
        assert (status, 'unknown field "metadata.lables"' in body["message"]) == (400, True)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"metadata": {"name": "a", "annotations": {"x": 1}}}, "number into field metadata.annotations.x"),
        ({"spec": {"containers": {"name": "x"}}}, "cannot unmarshal object into field spec.containers"),
        ({"spec": {"hostNetwork": "yes", "containers": []}}, "cannot unmarshal string into field spec.hostNetwork"),
    ],
)
async def test_a_value_of_a_wrong_type_is_refused(changed: dict[str, Any], said: str) -> None:
    """400 with the field; a quantity may be a number or a text."""
    async with open_client() as client:
        status, body = await client.call("POST", PODS, {**pod("a"), **changed}, fieldValidation="Strict")
        assert (status, said in body["message"]) == (400, True)
        whole = pod("a", container(cores=30))
        assert (await client.call("POST", PODS, whole, fieldValidation="Strict"))[0] == 201


async def test_a_status_with_nothing_in_it_is_shown() -> None:
    """Fields that are null or absent, as any client may write them."""
    empty = {"phase": None, "conditions": None, "containerStatuses": [{"name": "main", "state": None}]}
    async with open_client() as client:
        await client.call("POST", PODS, pod("a"))
        code, body = await client.call("PUT", f"{PODS}/a/status", {**pod("a"), "status": empty})
        assert (code, body["status"]) == (200, {"phase": "Pending", "containerStatuses": [{"name": "main"}]})
        assert [row["cells"][:3] for row in table("pods", client.api.pods(), "1", "None")["rows"]] == [
            ["a", "0/1", "Pending"]
        ]
        assert reason_and_message(client.api.pod("default", "a")) == ("", "")


async def test_an_invalid_object_names_its_cause_as_kubectl_shows_it() -> None:
    """kubectl prints the causes of a 422, and not its message."""
    async with open_client() as client:
        _, body = await client.call("POST", PODS, pod("No!"))
        assert (body["details"]["kind"], body["details"]["name"]) == ("Pod", "No!")
        assert body["details"]["causes"] == [
            {"reason": "FieldValueInvalid", "field": "metadata.name", "message": body["message"].partition(": ")[2]}
        ]


async def test_a_namespace_is_there_with_its_first_object_and_takes_all_of_them_with_it() -> None:
    """Deleting it deletes what is in it; the others stay."""
    async with open_client() as client:
        assert (await client.call("POST", "/api/v1/namespaces", {"metadata": {"name": "empty"}}))[0] == 201
        for namespace in ("team", "default"):
            client.api.create_pod(pod("a"), namespace)
            client.api.create("configmaps", {"metadata": {"name": "c"}}, namespace)
        _, found = await client.call("GET", "/api/v1/namespaces")
        assert [one["metadata"]["name"] for one in found["items"]] == ["default", "empty", "kube-system", "team"]
        assert (await client.call("DELETE", "/api/v1/namespaces/team"))[0] == 200
        assert [one["metadata"]["namespace"] for one in client.api.store.all("configmaps")] == ["default"]
        assert [one["metadata"]["namespace"] for one in client.api.pods()] == ["default"]


async def test_a_watch_that_lists_first_marks_the_end_of_what_was_there() -> None:
    """sendInitialEvents, as client-go's informers ask since 1.35: without the bookmark they would wait for ever."""
    async with open_client() as client:
        client.api.create_pod(pod("a"))
        asked = {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan", "allowWatchBookmarks": "true"}
        async with client.watch(**asked) as watch:
            assert (await watch.next())[0] == "ADDED"
            kind, mark = await watch.next()
            assert (kind, mark["metadata"]["annotations"]) == ("BOOKMARK", {"k8s.io/initial-events-end": "true"})
            client.api.create_pod(pod("b"))
            assert (await watch.next())[1]["metadata"]["name"] == "b"


async def test_an_unchanged_manifest_can_be_applied_again() -> None:
    """kubectl sends 40 for the stored "40" each time: one quantity. Another number is refused, with what to do."""
    async with open_client() as client:
        client.api.create_pod(pod("a", container(cores=40)))
        for count, code in ((40, 200), (41, 422)):
            limits = {"tencent.com/vcuda-core": count}
            patch = {"spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]}}
            status, body = await client.call("PATCH", f"{PODS}/a", patch, STRATEGIC)
            assert (status, "create it again" in body.get("message", "")) == (code, code == 422)


async def test_a_dry_run_changes_nothing() -> None:
    """Creation, patch and deletion, as `kubectl --dry-run=server` and `kubectl diff` ask."""
    async with open_client() as client:
        assert (await client.call("POST", PODS, pod("a"), dryRun="All"))[0] == 201
        assert client.api.pods() == []
        client.api.create_pod(pod("a"))
        before = client.api.version
        patch = {"metadata": {"labels": {"x": "y"}}}
        _, shown = await client.call("PATCH", f"{PODS}/a", patch, MERGE, dryRun="All")
        assert shown["metadata"]["labels"] == {"x": "y"}
        assert (await client.call("DELETE", f"{PODS}/a", {"dryRun": ["All"]}))[0] == 200
        assert client.api.version == before


@pytest.mark.parametrize(
    ("patch", "after"),
    [
        ({"env": [{"name": "B", "$patch": "delete"}]}, {"env": [{"name": "A", "value": "1"}]}),
        ({"env": [{"name": "C", "value": "3"}], "$setElementOrder/env": [{"name": "C"}, {"name": "A"}, {"name": "B"}]},
         {"env": [{"name": "C", "value": "3"}, {"name": "A", "value": "1"}, {"name": "B", "value": "2"}]}),
        ({"env": [{"name": "A", "$patch": "replace", "valueFrom": {}}]},
         {"env": [{"name": "A", "valueFrom": {}}, {"name": "B", "value": "2"}]}),
        ({"$retainKeys": ["args"]}, {}),
        ({"$patch": "replace", "args": ["x"]}, {"args": ["x"]}),
    ],
)  # fmt: skip
def test_a_strategic_patch_follows_its_directives(patch: dict[str, Any], after: dict[str, Any]) -> None:
    """As kubectl writes them when a list has lost, gained or reordered an entry."""
    env = [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]
    assert patched({"spec": {"env": env}}, {"spec": patch}, STRATEGIC) == {"spec": after}
    texts = {"$deleteFromPrimitiveList/finalizers": ["a"], "finalizers": ["c"]}
    assert patched({"finalizers": ["a", "b"]}, texts, STRATEGIC) == {"finalizers": ["b", "c"]}


@pytest.mark.parametrize(
    ("method", "path", "content_type", "body"),
    [
        ("POST", PODS, JSON, "[" * 40_000),
        ("POST", PODS, JSON, '{"metadata":{"name":"b","annotations":' + '{"a":' * 400 + "1" + "}" * 400 + "}}"),
        ("POST", PODS, JSON, '{"metadata":1}'),
        ("PATCH", f"{PODS}/a", MERGE, '{"metadata":{"ownerReferences":[1]}}'),
        ("PATCH", f"{PODS}/a", MERGE, '{"metadata":{"labels":{"app":1}}}'),
        ("PATCH", f"{PODS}/a/status", MERGE, '{"status":1}'),
        ("PATCH", f"{PODS}/a/status", MERGE, '{"status":{"conditions":"none"}}'),
        ("PATCH", f"{PODS}/a/status", MERGE, '{"status":{"conditions":["Ready"]}}'),
        ("PATCH", f"{PODS}/a/status", MERGE, '{"status":{"conditions":[{"status":"True"}]}}'),
        ("PATCH", f"{PODS}/a/status", MERGE, '{"status":{"containerStatuses":[{"ready":true}]}}'),
        ("PATCH", f"{PODS}/a/status", MERGE, '{"status":{"containerStatuses":{"main":{}}}}'),
        ("PATCH", f"{PODS}/a/status", MERGE, '{"status":{"containerStatuses":[{"name":"main","restartCount":"1"}]}}'),
        ("PATCH", f"{PODS}/a", STRATEGIC, '{"$retainKeys":1}'),
        ("PATCH", f"{PODS}/a", STRATEGIC, '{"spec":{"$setElementOrder/containers":1}}'),
        ("PATCH", f"{PODS}/a", APPLY, "metadata: {name: a, annotations: &a {b: *a}}"),
        ("PATCH", f"{PODS}/a", APPLY, "[" * 3000),
        ("PATCH", f"{PODS}/a", APPLY, "metadata: 1"),
        ("POST", PODS, JSON, '{"metadata":{"name":"b"},"spec":{"containers":[{"name":"c"}],"initContainers":1}}'),
        ("DELETE", f"{PODS}/a", JSON, '{"gracePeriodSeconds":"x"}'),
        ("DELETE", f"{PODS}/a", JSON, '{"preconditions":1}'),
        ("GET", f"{PODS}?watch=1&timeoutSeconds=²", JSON, None),
        ("GET", f"{PODS}?watch=1&resourceVersion={'1' * 5000}", JSON, None),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_what_is_no_object_is_refused(method: str, path: str, content_type: str, body: str | None) -> None:
    """As the client's mistake, not the server's; what is stored stays readable, for lists and for the controllers."""
    async with EmbeddedApiServer() as api, aiohttp.ClientSession(api.url, headers=api.headers) as session:
        api.create_pod(pod("a"))
        before = api.pods()
        async with session.request(method, path, data=body, headers={"Content-Type": content_type}) as answer:
            assert (answer.status, (await answer.json())["kind"]) in ((400, "Status"), (422, "Status"))
        assert api.pods() == before
