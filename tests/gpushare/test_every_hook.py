"""Each hook of libgpushare: a program comes by it, and it does what it is there for."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from native.gpushare.generate import HOOKS, read_hooks, versions
from tests.gpushare.conftest import MachineWith
from tests.gpushare.support_gpushare import Container, Machine, neighbour
from tests.native.build import CannotBuildError, cuda_include
from tests.native.gpu_program import finish

pytestmark = pytest.mark.isolation

KINDS = read_hooks(HOOKS.read_text(encoding="utf-8"))
HOOKED = [name for name, kind in KINDS.items() if kind == "hook"]
UNSEEN = {"cuEventSynchronize": "what it waits is in the host's time of a span alone, which nothing shows"}
"""Hooks whose effect no program of a test can see, and why."""


def settings_for(name: str) -> dict[str, object]:
    """Of a MIG instance what only such a one has, and one of the lists."""
    return {"instances": "10240"} if "Attributes" in name or "Processes_v3" in name else {}


def container(machine: Machine) -> Container:
    return machine.container(memory_mib=2560, cores=9000, gpu="0:0" if "instances" in machine.settings else "0")


def has_effect(share: Container, *words: str) -> bool:
    """Whether a program that calls a function sees what its hook does; in virtual time, so always in the same way."""
    machine = share.machine
    command = [str(machine.built.programs / "every_hook"), *words]
    # The clock is for one process.
    env = {} if words == ("forks",) else {"FAKE_GPU_LOG": "1"} | machine.virtual_time(1)
    with neighbour(machine) if "RunningProcess" in words[-1] else nullcontext():
        preload = [machine.built.virtual_time, machine.built.library]
        ended = finish(share.start_command(command, preload=preload, env=env))
    assert ended.code == 0, ended.error[-2000:]
    return bool(ended.step(words[0])["has_effect"])


@pytest.mark.parametrize("name", [name for name in HOOKED if name not in UNSEEN])
def test_each_hook_has_its_effect(machine_with: MachineWith, name: str) -> None:
    assert has_effect(container(machine_with(**settings_for(name))), "does", name)


@pytest.mark.parametrize(
    "action",
    [
        # In another stream, where the program launches and allocates; in the mode that forbids most, which stays as it was.
        pytest.param("captures", id="a capture is not spoilt by what the library asks the driver"),
        # The driver may do anything then; the fake one ends the program.
        pytest.param("ends", id="events of a context that has ended are not asked for"),
        pytest.param("forks", id="nor are a parent's in its child"),
        pytest.param("formats", id="an array takes what its format says"),
    ],
)
def test_hooks_together_have_their_effect(machine_with: MachineWith, action: str) -> None:
    assert has_effect(container(machine_with()), action)


def test_a_program_comes_by_each_hook(machine_with: MachineWith) -> None:
    """By dlsym with the driver's handle and with RTLD_NEXT, and by cuGetProcAddress as of the function's version."""
    try:
        typedefs = (cuda_include() / "cudaTypedefs.h").read_text(encoding="utf-8")
    except CannotBuildError as error:
        pytest.skip(str(error))
    known = versions({name: kind for name, kind in KINDS.items() if kind != "pass"}, typedefs)
    words = [str(word) for name in HOOKED for word in (name, *known[name][:2], int(known[name][2]))]
    share = container(machine_with(cuda_version=max(since for _, since, _ in known.values())))
    ended = finish(share.start_command([str(share.machine.built.programs / "every_hook"), "finds", *words]))
    assert ended.code == 0, ended.error[-2000:]
    found = {step["action"]: (step["by_name"], step["next"], step["asked"]) for step in ended.steps[:-1]}
    assert found == dict.fromkeys(HOOKED, (1, 1, 1)) and ended.step("unhooked")["count"] == 0
