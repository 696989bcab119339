"""The virtual manager in the whole agent, on the embedded node."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpushare_agent.core.formats.vdevice import decode_config, decode_pids
from gpushare_agent.core.model.names import CORE_LIMIT_ANNOTATION
from tests.agent.support_agent import open_agent, poll_until
from tests.sandbox.support_sandbox import NodeUnderTest, container, open_test_node, pod


def directory_of(node: NodeUnderTest, name: str, inner: str = "main") -> Path:
    uid = node.uid_of(name)
    return node.paths.virtual_manager / uid / inner


async def test_a_share_finds_its_limits_and_its_socket_before_it_starts() -> None:
    """The mount is of its own directory; a whole GPU's says that nothing is limited. The pods are as in gpu-manager's
    README, and so are their annotations."""
    share = container(cores=30, blocks=10)
    share["resources"]["requests"] = share["resources"]["limits"]
    wholes = {"whole": container(cores=100, blocks=30), "pair": container(cores=200, blocks=60)}
    async with open_test_node() as node, open_agent(node, "--isolation=vcuda"):
        await node.start_pods(
            *(pod(name, one, restartPolicy="Never") for name, one in {"share": share, **wholes}.items())
        )
        for name, gpus in (("share", 1), ("whole", 1), ("pair", 2)):
            written = await node.wait_annotation(name, "tencent.com/gpu-assigned", "true")
            assert len(written["tencent.com/predicate-gpu-idx-0"].split(",")) == gpus
        own = directory_of(node, "share")
        config = decode_config((own / "vcuda.config").read_bytes())
        assert (config.utilization, config.memory_bytes, config.enable) == (30, 10 * 256 * 1024 * 1024, True)
        pids = decode_pids((own / "pids.config").read_bytes())
        assert config.hard_limit and set(pids) <= {node.container_of("share").pid}  # which may have been found by now
        assert (own / "vcuda.sock").is_socket()
        answer = next(c for c in node.calls_of("share") if b"/etc/vcuda" in c.response)
        assert str(own).encode() in answer.response
        assert not decode_config((directory_of(node, "whole") / "vcuda.config").read_bytes()).enable


async def test_an_elastic_limit_is_followed_and_a_bad_one_reported() -> None:
    """The annotation may change while the pod runs; one below the cores is ignored, with an Event."""
    async with open_test_node() as node, open_agent(node, "--isolation=vcuda"):
        await node.start_pods(pod("share", container(cores=30, blocks=10), annotations={CORE_LIMIT_ANNOTATION: "60"}))
        path = directory_of(node, "share") / "vcuda.config"
        assert (decode_config(path.read_bytes()).limit, decode_config(path.read_bytes()).hard_limit) == (60, False)
        node.annotate("share", {CORE_LIMIT_ANNOTATION: "20"})

        def is_ignored() -> bool:
            return decode_config(path.read_bytes()).limit == 0 and bool(node.messages("CoreLimitIgnored"))

        await poll_until(is_ignored, "the limit below the cores ignored and reported")


@pytest.mark.parametrize("then", ["vcuda", "none"])
async def test_after_a_restart_every_live_share_has_its_socket_again(then: str) -> None:
    """With the same files; directories of pods that are gone are removed. Under an isolation without directories too, and
    nobody new gets one."""
    async with open_test_node() as node:
        async with open_agent(node, "--isolation=vcuda"):
            await node.start_pods(
                pod("share", container(cores=30, blocks=10)), pod("gone", container(cores=30, blocks=10))
            )
            own, other = directory_of(node, "share"), directory_of(node, "gone")
            before = (own / "vcuda.config").read_bytes()
        assert not (own / "vcuda.sock").exists()
        await node.remove_pod("gone")
        async with open_agent(node, f"--isolation={then}"):
            await poll_until((own / "vcuda.sock").is_socket, "the socket back")
            assert (own / "vcuda.config").read_bytes() == before
            await poll_until(lambda: not other.exists(), "the directory of the gone pod removed")
            await node.start_pods(pod("new", container(cores=30, blocks=10)))
            assert directory_of(node, "new").exists() is (then == "vcuda")
