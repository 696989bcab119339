"""cluster/runtime_classes.py against an API server over HTTP."""

from __future__ import annotations

import asyncio
from typing import cast

import structlog
from msgspec import Raw

from gpushare_agent.agent.cluster import runtime_classes
from gpushare_agent.agent.cluster.runtime_classes import KEPT_S, RuntimeClasses
from gpushare_agent.core.kube.client import KubeApi
from gpushare_agent.core.model.errors import Unavailable
from tests.cluster.support_kube import opened
from tests.fakes.api_server import answers, fake_api, raw_status
from tests.fakes.clock import FakeClock
from tests.support_core import pod
from tests.support_json import undecoded

PATH = "/apis/node.k8s.io/v1/runtimeclasses"
SECURE, DELETED, FORBIDDEN = (pod(name, runtime_class=name) for name in ("secure", "deleted", "gvisor"))
ANSWERS = {
    f"{PATH}/secure": {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": "runsc"},
    f"{PATH}/broken": {"handler": 7},
    f"{PATH}/long": {"handler": "x" * 1000},
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
    """A right is missing, a class is gone, or cannot be read, the API server is away: one line in the log each. The next
    admission asks again."""
    clock = FakeClock()
    others = [answers(403, raw_status(403)), answers(404, raw_status(404)), answers(404, raw_status(404))]
    async with fake_api(answers=ANSWERS, others=others) as server, opened(server.url) as api:
        classes = RuntimeClasses(clock=clock)
        classes.attach(api)
        with structlog.testing.capture_logs() as logs:
            await classes.learn([FORBIDDEN])
            await classes.learn([DELETED, pod("broken", runtime_class="broken"), pod("long", runtime_class="long")])
            await classes.learn([DELETED])
        assert classes.handlers == {}
        assert [(one["name"], one["then"]) for one in logs] == [
            (name, f"its handler counts as {name}") for name in ("gvisor", "broken", "deleted", "long")
        ]
        await classes.learn([SECURE])
    clock.now += KEPT_S
    await classes.learn([SECURE])  # nothing listens there any more
    assert classes.handlers == {"secure": "runsc"}


class _Slow:
    """Answers when told, and takes `takes_s` of the clock for each question."""

    def __init__(self, clock: FakeClock, takes_s: float = 0.0) -> None:
        self.clock, self.takes_s = clock, takes_s
        self.waits: list[float] = []
        self.may_answer = asyncio.Event()

    async def get_runtime_class(self, name: str, *, timeout_s: float) -> Raw:
        self.waits.append(timeout_s)
        if self.takes_s:
            self.clock.now += min(self.takes_s, timeout_s)
            raise Unavailable("no answer")
        await self.may_answer.wait()
        return undecoded({"handler": "runsc"})


async def test_all_classes_of_a_claim_are_waited_for_no_longer_than_one() -> None:
    clock = FakeClock()
    api = _Slow(clock, takes_s=100.0)
    classes = RuntimeClasses(clock=clock)
    classes.attach(cast(KubeApi, api))
    pods = [pod(f"p{n}", runtime_class=f"class-{n}") for n in range(256)]
    await classes.learn(pods, 0.5)
    await classes.learn(pods[:1], -1.0)
    assert len(api.waits) == 257 and api.waits[0] == 0.5
    assert sum(api.waits) < 4 and min(api.waits) > 0  # 0 would be the client's usual time


async def test_two_calls_at_once_both_know_the_handler() -> None:
    """The second does not go on while the first still waits for the answer."""
    api = _Slow(FakeClock())
    classes = RuntimeClasses(clock=api.clock)
    classes.attach(cast(KubeApi, api))

    async def learnt() -> dict[str, str]:
        await classes.learn([SECURE])
        return dict(classes.handlers)

    async with asyncio.TaskGroup() as group:
        both = [group.create_task(learnt()) for _ in range(2)]
        while len(api.waits) < 2 and not any(one.done() for one in both):
            await asyncio.sleep(0)
        api.may_answer.set()
    assert [one.result() for one in both] == [{"secure": "runsc"}] * 2


async def test_no_more_than_some_are_kept() -> None:
    """Those that were read last."""
    api = _Slow(FakeClock())
    api.may_answer.set()
    classes = RuntimeClasses(clock=api.clock)
    classes.attach(cast(KubeApi, api))
    names = [f"class-{n}" for n in range(runtime_classes.MAX_KEPT)]
    await classes.learn([pod(name, runtime_class=name) for name in names])
    api.clock.now += KEPT_S
    await classes.learn([pod("again", runtime_class="class-0"), SECURE])
    assert classes.handlers.keys() == {*names, "secure"} - {"class-1"}
