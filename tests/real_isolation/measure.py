"""Measures one check on a node, and judges it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from tests.native.gpu_program import DEADLINE_S, Ended
from tests.real_isolation.checks import (
    ASKED_BLOCKS,
    BLOCK_MIB,
    KERNELS_PER_S,
    SHARE_BLOCKS,
    SHARE_CORES,
    Check,
    Verdict,
)
from tests.real_isolation.support_isolation import CONTEXT_MIB, IsolationNode, Program

SUCCESS, OUT_OF_MEMORY = 0, 2
LAUNCH_S = 8
"""HAMi-core's throttle swings from second to second; over a few it is what it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`number` is for the table; `error` what the program wrote to standard error, and its exit code."""

    verdict: Verdict
    number: str
    error: str


MEASURED = pytest.StashKey[dict[tuple[str, str], Measured]]()
"""By check and isolation: what the table shows at the end."""


def measure(node: IsolationNode, check: Check) -> Measured:
    """In pods of its own, which are deleted behind it."""
    pods = {"first": SHARE_CORES} | ({"second": check.neighbour_cores} if check.neighbour_cores else {})
    with ExitStack() as stack:
        stack.callback(node.delete_all)
        for name, cores in pods.items():
            node.apply(name, cores=cores, blocks=SHARE_BLOCKS)
        programs = [stack.enter_context(_start(node, name, check)) for name in pods]
        is_waiting = [program.wait_for("wait") for program in programs]  # all of them have their contexts
        if check.after_restart and all(is_waiting):
            node.kill_agent()
        for program in programs:
            program.go_on()
        outcomes = [program.outcome(LAUNCH_S + DEADLINE_S) for program in programs]
    return judge(check, outcomes)


def _start(node: IsolationNode, pod: str, check: Check) -> Program:
    memory = f"alloc:{check.memory}:{BLOCK_MIB}:{ASKED_BLOCKS}"
    action = memory if check.memory else f"launch:{check.launch}:{LAUNCH_S}:{check.blocks_of_launch}"
    asked = {"way": "cuGetProcAddress", "version": 11080} if check.is_cuda_11 else {}
    return node.start(pod, "wait", action, "free", uid=check.uid, **asked)


def judge(check: Check, outcomes: list[Ended]) -> Measured:
    """Of several programs the worst one's memory counts, and the first one's share of the GPU."""
    error = "\n".join(f"exit code {outcome.code}: {outcome.error[-2000:]}" for outcome in outcomes)
    steps = [outcome.step("alloc" if check.memory else "launch") for outcome in outcomes]
    expected = (SUCCESS, OUT_OF_MEMORY) if check.memory else (SUCCESS,)
    if not all(step and step["result"] in expected for step in steps):
        results = [step.get("result") for step in steps]
        return Measured(verdict=Verdict.FAILED, number=f"exit code {outcomes[0].code}, errors {results}", error=error)
    verdict, number = _judge_memory(steps) if check.memory else _judge_rates(steps)
    return Measured(verdict=verdict, number=number, error=error)


def _judge_memory(steps: list[dict[str, int]]) -> tuple[Verdict, str]:
    blocks = [step["blocks"] for step in steps]
    number = f"{' and '.join(map(str, blocks))} of {ASKED_BLOCKS}"
    if not min(blocks):
        return Verdict.FAILED, number
    is_held = max(blocks) * BLOCK_MIB + CONTEXT_MIB <= SHARE_BLOCKS * BLOCK_MIB
    return Verdict.HELD if is_held else Verdict.BYPASSED, number


def _judge_rates(steps: list[dict[str, float]]) -> tuple[Verdict, str]:
    rates = [step["rate"] for step in steps]
    # Two programs without a limit share the GPU evenly: with one, the larger share gets clearly more.
    is_ordered = len(rates) == 1 or rates[1] > 1.2 * rates[0]
    is_throttled = rates[0] < KERNELS_PER_S / 2 and is_ordered
    return Verdict.THROTTLED if is_throttled else Verdict.BYPASSED, f"{' and '.join(f'{rate:.0f}' for rate in rates)}/s"
