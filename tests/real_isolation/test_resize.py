"""A running program follows a live resize, in both directions, as docs/explanation/resize.md says of each isolation.

One container, as root, on a GPU of 24,576 MiB and 1,000 kernels a second. A program's context takes 300 MiB, so of a share
of n blocks of 256 MiB it can allocate n - 2.
"""

from __future__ import annotations

import json
import ssl
import urllib.request
from collections.abc import Iterator

import pytest
import yaml

from tests.real_isolation.support_isolation import Built, IsolationNode, open_node

pytestmark = pytest.mark.isolation

CORES, BLOCKS = 30, 10
TAKE = "alloc:alloc:256:40"
RESIZE = "gpushare-agent/resize"


@pytest.fixture(params=["gpushare", "vcuda", "driver"])
def node(built: Built, request: pytest.FixtureRequest) -> Iterator[IsolationNode]:
    if reason := built.why_not(request.param):
        pytest.skip(reason)
    flags, driver = ["--resize.mode=free-capacity"], {}
    if request.param == "driver":
        flags, driver = [*flags, "--driver-limits.set-by-agent=true"], {"driver_version": "615.12.01"}
    with open_node(built, request.param, *flags, gpus=1, **driver) as node:
        node.apply("web", cores=CORES, blocks=BLOCKS)
        yield node


@pytest.fixture
def isolation(request: pytest.FixtureRequest) -> str:
    return str(request.node.callspec.params["node"])


def raw_pod(node: IsolationNode, body: object = None) -> dict[str, object]:
    """The pod as the API server has it, after a merge patch where one is given."""
    config = yaml.safe_load((node.state / "kubeconfig").read_text())
    url = f"{config['clusters'][0]['cluster']['server']}/api/v1/namespaces/default/pods/web"
    headers = {"Authorization": f"Bearer {config['users'][0]['user']['token']}"}
    headers["Content-Type"] = "application/merge-patch+json"
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, headers, method="GET" if data is None else "PATCH")
    trusted = ssl.create_default_context(cafile=config["clusters"][0]["cluster"]["certificate-authority"])
    handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusted))
    with urllib.request.build_opener(*handlers).open(asked, timeout=10) as answer:
        return dict(json.load(answer))


def resize(node: IsolationNode, text: str | None, *states: str) -> None:
    """Annotate the pod, and wait for its status."""
    raw_pod(node, {"metadata": {"annotations": {RESIZE: text}}})
    wait_status(node, text, *states)


def wait_status(node: IsolationNode, text: str | None, *states: str) -> None:
    """Until it has one of the states; of None: is none, or has what was allocated."""
    wanted = {f"{text or f'main:cores={CORES},memory={BLOCKS}'},{state}" for state in states}

    def has_come() -> bool:
        annotations = raw_pod(node)["metadata"]["annotations"]  # type: ignore[index]
        status = annotations.get("gpushare-agent/resize-status")
        return status in wanted or (text is None and status is None)

    node.wait_until(has_come, f"{wanted}")


def test_a_running_program_gets_more_memory_after_growth_and_none_after_shrinking(
    node: IsolationNode, isolation: str
) -> None:
    """What it has allocated stays. Under vcuda it follows when it calls cuDriverGetVersion, and not before."""
    again = ["version"] if isolation == "vcuda" else []
    actions = [TAKE, "info", "wait", TAKE, "wait", *again, TAKE, "info", "wait", *again, TAKE, "info"]
    actions += ["wait", "free", "wait", TAKE]
    with node.start("web", *actions) as program:
        assert program.wait_for("wait"), program.error
        resize(node, f"main:cores={CORES},memory=20", "in-force")
        for _ in range(2):
            program.go_on()
            assert program.wait_for("wait")
        smaller = f"main:cores={CORES},memory=6"
        resize(node, smaller, "shrinking" if isolation == "vcuda" else "pending")
        for _ in range(2):
            program.go_on()
            assert program.wait_for("wait")
        if isolation != "vcuda":
            wait_status(node, smaller, "in-force")  # now that it has freed what was more
        program.go_on()
        ended = program.outcome()
    assert ended.blocks() == ([8, 0, 10, 0, 4] if isolation == "vcuda" else [8, 10, 0, 0, 4])
    informed = [step for step in ended.steps if step["action"] == "info"]
    assert [step["total_mib"] for step in informed[:2]] == [BLOCKS * 256, 20 * 256]
    assert (informed[2]["result"], informed[2]["free_mib"]) == (0, 0), "above its size, and cuMemGetInfo answers"
    resize(node, None, "shrinking")
    new = node.run("web", TAKE)
    assert new.step("alloc")["blocks"] == 8


def test_a_new_program_computes_by_the_new_size(node: IsolationNode, isolation: str) -> None:
    """So does the running one under gpushare. Elsewhere it goes on by the old size: vcuda-control is not asked again."""
    if isolation == "driver":
        pytest.skip("the driver limits no compute")
    with node.start("web", "launch:kernel:6", "wait", "launch:kernel:6", "wait") as running:
        assert running.wait_for("wait"), running.error
        resize(node, f"main:cores=80,memory={BLOCKS}", "in-force")
        running.go_on()
        assert running.wait_for("wait")
        grown = node.run("web", "launch:kernel:6").step("launch")["rate"]
        resize(node, f"main:cores=10,memory={BLOCKS}", "in-force" if isolation == "gpushare" else "shrinking")
        shrunk = node.run("web", "launch:kernel:6").step("launch")["rate"]
        running.go_on()
        before, after = running.outcome().rates()
    print(f"{isolation}: before {before}, after {after}, new at 80 {grown}, new at 10 {shrunk}")  # noqa: T201
    assert before < 500 < grown and shrunk < 300
    assert (after > 500) == (isolation == "gpushare")


def test_a_share_that_grew_stays_grown_over_restarts_of_agent_and_container(
    node: IsolationNode, isolation: str
) -> None:
    """The agent's memory is its file; a container's first process begins by the environment, and is told again."""
    resize(node, f"main:cores={CORES},memory=20", "in-force", "pending")
    node.kill_agent()
    with node.start("web", "wait", TAKE) as program:
        assert program.wait_for("wait"), program.error
        resize(node, f"main:cores={CORES},memory=20", "in-force")
        program.go_on()
        assert program.outcome().blocks() == [18]
