"""`gpushare-agent cdi generate|list`: names the node's GPUs for container runtimes by CDI, and lists which spec names each.

The agent does the same by itself where a CDI strategy is set. The command is for a host that only needs the names, and for
a person who asks why a container does not start. For operators: docs/reference/device-lists.md.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from msgspec import to_builtins

from gpushare_agent.agent.commands.check import read_inventory
from gpushare_agent.agent.delivery.cdi_specs import CdiState, SpecChange, cdi_specs
from gpushare_agent.agent.isolation import mounts_driver
from gpushare_agent.core.cli.command_line import Invocation
from gpushare_agent.core.cli.render_text import print_report
from gpushare_agent.core.model.errors import Unavailable

_DRIVER_TIMEOUT_S = 60.0


async def run(call: Invocation) -> int:
    """Prints the report; 1 where a GPU has no name that a runtime takes, or there is no GPU, else 0.

    Raises:
        Unavailable: the driver does not answer, or the spec cannot be written.
        StartupError: volume.conf or the topology file of simulated GPUs is wrong.
    """
    settings, options, form = call.settings(), call.options, call.options.output
    specs = cdi_specs(settings, mounts_driver=mounts_driver(settings))
    async with asyncio.timeout(_DRIVER_TIMEOUT_S):
        gpus = (await read_inventory(settings)).gpus
    # More likely a fault of the driver than a node without GPUs: the spec that is there is left alone.
    if not gpus:
        raise Unavailable("the driver answers, but there is no GPU to name: no CDI spec was written or removed")
    # Listing must not write: it is asked by whoever searches a fault.
    is_done = options.action == "generate" and not options.check
    state = specs.ensure(gpus) if is_done else specs.plan(gpus)
    if options.action == "list":
        print_report(form, _list_document(state), _list_as_text(state))
        # A script asks so whether runtimes can start a container with any of the GPUs.
        return 1 if state.unnamed or _missing(state) else 0
    document = to_builtins(state) | {"is_done": is_done, "named": dict(state.named)}
    print_report(form, document, _as_text(state, is_done=is_done))
    return 1 if state.unnamed else 0


def _missing(state: CdiState) -> set[str]:
    """The GPUs whose name would only come with the agent's own spec. One that was written with other settings names them."""
    return {uuid for uuid, path in state.named if path == state.own_path and uuid not in state.own_names}


def _list_document(state: CdiState) -> dict[str, Any]:
    missing = _missing(state)
    named = {uuid: path for uuid, path in state.named if uuid not in missing}
    unnamed = [*state.unnamed, *missing]
    return {
        "kind": state.kind,
        "named": named,
        "unnamed": sorted(unnamed),
        "troubles": state.troubles,
        "passed_over": state.passed_over,
    }


def _as_text(state: CdiState, *, is_done: bool) -> str:
    ours = [uuid for uuid, path in state.named if path == state.own_path]
    does = "" if is_done or state.change is SpecChange.NONE else "would be "
    lines = [f"{state.own_path}: {does}{state.change.value}, {len(ours)} of {_count(state)} GPUs named there"]
    if not ours and state.change is SpecChange.NONE:
        lines = [f"{state.own_path}: not needed, {len(state.named)} of {_count(state)} GPUs are named by others"]
    # With --check the spec itself is what is to be looked at.
    if not is_done and state.spec is not None:
        lines.append(json.dumps(state.spec, indent=2))
    lines += [f"  {state.kind}={uuid}  {path}" for uuid, path in state.named]
    return "\n".join([*lines, *_remarks(state)])


def _list_as_text(state: CdiState) -> str:
    remedy = f"nobody yet: `gpushare-agent cdi generate` writes {state.own_path}"
    missing = _missing(state)
    lines = [f"{state.kind}={uuid}  {remedy if uuid in missing else path}" for uuid, path in state.named]
    if state.change is SpecChange.WRITTEN and state.own_names and not missing:
        lines.append(
            f"  other settings  {state.own_path} was written with others: `gpushare-agent cdi generate --check` shows these"
        )
    return "\n".join([*lines, *_remarks(state)])


def _remarks(state: CdiState) -> list[str]:
    return [
        *(f"  error        {text}" for text in state.troubles),
        *(f"  passed over  {text}" for text in state.passed_over),
        *(f"  left out     {text}" for text in state.left_out),
    ]


def _count(state: CdiState) -> int:
    return len(state.named) + len(state.unnamed)
