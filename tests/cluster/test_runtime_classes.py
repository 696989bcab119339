"""cluster/runtime_classes.py against an API server over HTTP."""

from __future__ import annotations

import structlog

from gpushare_agent.agent.cluster import runtime_classes
from gpushare_agent.agent.cluster.runtime_classes import KEPT_S, RuntimeClasses
from tests.cluster.support_kube import opened
from tests.fakes.api_server import answers, fake_api, raw_status
from tests.fakes.clock import FakeClock
from tests.support_core import pod

PATH = "/apis/node.k8s.io/v1/runtimeclasses"
SECURE, DELETED, FORBIDDEN = (pod(name, runtime_class=name) for name in ("secure", "deleted", "gvisor"))
ANSWERS = {
    f"{PATH}/secure": {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": "runsc"},
    f"{PATH}/broken": {"handler": 7},
}


async def test_a_handler_is_read_once_a_minute() -> None:
    """And not for a pod that names no class."""
    clock = FakeClock()
    async with fake_api(answers=ANSWERS) as server, opened(server.url) as api:
        classes = RuntimeClasses(clock=clock)
        await classes.learn([SECURE])
        assert classes.handlers == {} and server.seen == []
        classes.attach(api)
        for _ in range(3):
            await classes.learn([pod("plain"), SECURE, pod("another", runtime_class="secure")])
        assert classes.handlers == {"secure": "runsc"}
        assert [one.path for one in server.seen] == [f"{PATH}/secure"]
        clock.now += KEPT_S
        await classes.learn([SECURE])
        assert len(server.seen) == 2


async def test_without_an_answer_the_former_one_stays_and_admissions_go_on() -> None:
    """A right is missing, a class is gone, or cannot be read, the API server is away: one line in the log each."""
    clock = FakeClock()
    others = [answers(403, raw_status(403)), answers(404, raw_status(404))]
    async with fake_api(answers=ANSWERS, others=others) as server, opened(server.url) as api:
        classes = RuntimeClasses(clock=clock)
        classes.attach(api)
        with structlog.testing.capture_logs() as logs:
            await classes.learn([FORBIDDEN])
            await classes.learn([DELETED, pod("broken", runtime_class="broken")])
            await classes.learn([FORBIDDEN])
        assert classes.handlers == {}
        assert [(one["name"], one["then"]) for one in logs] == [
            (name, f"its handler counts as {name}") for name in ("gvisor", "broken", "deleted")
        ]
        await classes.learn([SECURE])
    clock.now += KEPT_S
    await classes.learn([SECURE])  # nothing listens there any more
    assert classes.handlers == {"secure": "runsc"}


async def test_no_more_than_some_are_kept() -> None:
    """A static pod may name what there is not."""
    async with fake_api() as server, opened(server.url) as api:
        classes = RuntimeClasses(clock=FakeClock())
        classes.attach(api)
        names = [f"class-{n}" for n in range(runtime_classes.MAX_KEPT + 1)]
        await classes.learn([pod(name, runtime_class=name) for name in names])
        assert len(classes._read_at) == 1
