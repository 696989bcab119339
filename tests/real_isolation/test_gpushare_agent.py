"""libgpushare in containers of a node whose agent is killed, upgraded and attacked: no program ends, no limit is lost, and a
neighbour notices nothing.

A share of 30 cores and 2,560 MiB: 8 blocks of 256 MiB next to a context of 300 MiB, and 300 launches of a millisecond a
second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from gpushare_agent.agent.isolation.gpushare.format import MOST_SLOTS
from tests.real_isolation.checks import BLOCK_MIB
from tests.real_isolation.conftest import NodeOf
from tests.real_isolation.support_isolation import CONTEXT_MIB, Built, IsolationNode, open_node

pytestmark = pytest.mark.isolation

TAKE = "alloc:alloc:256:20"
PROGRAMS = 900


@pytest.fixture
def node(node_of: NodeOf) -> Iterator[IsolationNode]:
    node = node_of("gpushare", "host")
    yield node
    node.delete_all()


@pytest.mark.parametrize("kill", ["among", "before"])
def test_of_900_programs_that_start_at_once_none_ends_with_the_agent_killed(built: Built, kill: str) -> None:
    """And the share is whole again behind them. It has room for a context in each slot, so none is refused one, however many
    of them the machine lets live at a time."""
    blocks = MOST_SLOTS * (CONTEXT_MIB + 1) // BLOCK_MIB
    with open_node(built, "gpushare", memory_mib=(blocks + 1) * BLOCK_MIB) as node:
        node.apply("burst", cores=30, blocks=blocks)
        outcome = node.start_at_once("burst", PROGRAMS, "dlsym", "12080", "alloc:alloc:1:1", kill=kill)
        ended = Counter(step["result"] for step in outcome.steps if step["action"] == "ended")
        assert dict(ended) == {0: PROGRAMS}
        node.wait_until(node.is_ready, "the agent")
        left = (blocks * BLOCK_MIB - CONTEXT_MIB) // BLOCK_MIB
        assert node.run("burst", f"alloc:alloc:{BLOCK_MIB}:{blocks}").step("alloc")["blocks"] == left


def is_share(rate: float) -> bool:
    """On a busy machine; 1,000 would be all, and in the first second an idle share has 100 more."""
    return 150 <= rate <= 420


def test_programs_go_on_within_their_limits_while_the_agent_is_killed_and_upgraded(node: IsolationNode) -> None:
    """The next agent comes with another library: running containers keep theirs, a new program in them has the same limits,
    and a container that starts later has the new one."""
    library = node.built.libraries["gpushare"]
    assert not isinstance(library, str)
    before = library.read_bytes()
    node.apply("web", cores=30, blocks=10)
    actions = ("alloc:alloc:256:6", "launch:kernel:3", "wait", "launch:kernel:8", TAKE, "launch:kernel:3", "info")
    with ExitStack() as stack:
        stack.callback(library.write_bytes, before)
        program = stack.enter_context(node.start("web", *actions))
        assert program.wait_for("wait"), program.error
        newer = library.with_name("newer.so")
        newer.write_bytes(before + b"newer")
        newer.chmod(0o755)
        program.go_on()
        newer.replace(library)
        node.kill_agent()
        beside = node.run("web", "info", "alloc:alloc:256:1").step("alloc")["blocks"]
        node.apply("later", cores=30, blocks=10)
        later = node.run("later", TAKE).step("alloc")["blocks"]
        installed = (node.directory / "gpushare" / "libgpushare.so").read_bytes()
        outcome = program.outcome(60)
    rates = outcome.rates()
    assert (outcome.code, outcome.error) == (0, "") and all(map(is_share, rates)), rates
    assert outcome.step("alloc")["blocks"] == 2 and outcome.step("info")["total_mib"] == 2560
    assert (beside, later, installed.endswith(b"newer")) == (1, 8, True)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_neighbour_has_its_share_while_a_tenant_writes_and_fills_its_region(
    node: IsolationNode, is_killed: bool
) -> None:
    """As root in its container: random bytes over all of `usage`, the file made long and filled, truncated, and its mode
    and owner taken away. The agent goes on, or comes back, and cuts the file where it may."""
    node.apply("hostile", cores=30, blocks=10)
    node.apply("web", cores=30, blocks=10)
    script = """
    echo '{"action": "wait"}'
    for i in 1 2 3; do
        head -c 131072 /dev/urandom | dd of=/etc/vcuda/usage conv=notrunc status=none
        /opt/programs/gpu_program dlsym 12080 alloc:alloc:256:3 free > /dev/null
        truncate -s 1T /etc/vcuda/usage
        head -c 50000000 /dev/zero >> /etc/vcuda/usage
        truncate -s 0 /etc/vcuda/usage
    done
    head -c 50000000 /dev/zero > /etc/vcuda/usage
    chmod 000 /etc/vcuda/usage; chown 1000:1000 /etc/vcuda/usage
    for path in /etc/vcuda/gpushare.config /etc/ld.so.preload /usr/local/gpushare/libgpushare.so; do
        rm -f $path; true > $path; mv $path $path.old; chmod 777 $path
    done 2> /dev/null
    rm -rf /etc/vcuda/usage /etc/vcuda/vcuda.sock 2> /dev/null
    echo '{"action": "done", "files": '$(ls /etc/vcuda | wc -l)'}'
    """
    before = node.log_lines("registered")
    with (
        node.start_command("hostile", ["sh", "-c", script]) as hostile,
        node.start("web", TAKE, "launch:kernel:6", "info") as beside,
    ):
        assert hostile.wait_for("wait"), hostile.error
        if is_killed:
            node.kill_agent()
        attacked, found = hostile.outcome(), beside.outcome()
    assert attacked.step("done")["files"] >= 4, attacked
    assert (found.step("alloc")["blocks"], found.code, found.error) == (8, 0, ""), found
    assert is_share(found.step("launch")["rate"]), found
    assert is_killed or node.log_lines("registered") == before
    node.delete("hostile")
    node.apply("hostile", cores=30, blocks=10)
    assert node.run("hostile", TAKE).step("alloc")["blocks"] == 8


def test_variables_of_a_spec_lift_no_limit(node: IsolationNode) -> None:
    """What could lift one is refused (tests/isolation/test_gpushare_edits.py); these do nothing."""
    node.apply("web", cores=30, blocks=10)
    odd = {"LD_LIBRARY_PATH": "/nowhere:/run/nvidia-driver", "LD_PRELOAD": "libm.so.6", "LD_BIND_NOW": "1"}
    odd |= {"LD_AUDIT": "libcuda.so.1", "GPUSHARE_DIRECTORY": "/tmp"}
    odd |= {"CUDA_VISIBLE_DEVICES": "0", "LD_DYNAMIC_WEAK": "1"}
    for way in ("dlsym", "link", "next"):
        assert node.run("web", TAKE, way=way, env=odd).step("alloc")["blocks"] == 8, way
