"""Isolation mps on a node: the control daemon must answer."""

from __future__ import annotations

from gpushare_agent.agent.isolation.choice import Standing
from gpushare_agent.agent.isolation.mps.control import MpsControl
from gpushare_agent.agent.isolation.part import IsolationHost, IsolationPart, NodeProbe, ProbedDriver
from gpushare_agent.core.settings.settings import Settings


class MpsPart(IsolationPart):
    def __init__(self, settings: Settings) -> None:
        self._control = mps_control(settings)
        self.check_period_s = settings.mps.probe_period_s
        self.max_shares_of_gpu = settings.mps.max_clients

    async def check(self) -> None:
        await self._control.check()


def build(host: IsolationHost) -> IsolationPart:
    return MpsPart(host.node.settings)


def probe(settings: Settings, driver: ProbedDriver) -> NodeProbe:
    standing = Standing(place=30, because="an MPS daemon answers", serves_exclusive=True)
    return NodeProbe(check=mps_control(settings).check, standing=standing, is_for_sandbox=True)


def mps_control(settings: Settings) -> MpsControl:
    mps = settings.mps
    return MpsControl(mps.control, mps.pipe_directory, mps.pipe_directory.parent / "log")
