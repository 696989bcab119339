"""`kubectl gpushare defragment --dry-run`: the fewest pods whose move makes GPUs whole. It advises, and moves nothing.

The cluster and its PodDisruptionBudgets are read once with the person's own rights, and kubectl/decisions/defragment.py
decides.
"""

from __future__ import annotations

from collections import Counter

from rich.console import RenderableType
from rich.text import Text

from gpushare_agent.core.cli.command_line import Invocation
from gpushare_agent.core.cli.render_text import counted, plain, print_as
from gpushare_agent.core.kube.budgets import BUDGETS, Budget, read_budget
from gpushare_agent.core.kube.session import KubeLists
from gpushare_agent.core.model.errors import NotFound
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.settings.settings import SettingsError
from gpushare_agent.kubectl.cluster_nodes import NO_NODE, open_cluster
from gpushare_agent.kubectl.cluster_reading import ReadCluster, read_cluster_view
from gpushare_agent.kubectl.decisions.changes import gpus_text
from gpushare_agent.kubectl.decisions.defragment import Advice, Freed, defragment

SCHEMA = 1
_MOST_SHOWN = 20
"""GPUs of the short table; -o wide has all."""
_HOW = (
    "Nothing was moved. For each GPU: cordon it (`gpushare-agent cordon` on its node), evict its pods, so that their "
    "controllers make them again elsewhere, and uncordon it. A moved pod starts again."
)


async def run(call: Invocation) -> int:
    """Raises SettingsError without --dry-run, and AgentError where nodes, pods or budgets cannot be read."""
    settings, form = call.settings(), call.options.output
    if not call.options.dry_run:
        raise SettingsError(["defragment only advises, it moves no pod: run it with --dry-run"])
    async with open_cluster(settings) as api:
        read = await read_cluster_view(api, settings)
        budgets = await _read_budgets(api)
    advice = defragment(read.view, budgets, most=call.options.gpus)
    document = {
        "schema": SCHEMA,
        "whole_gpus": advice.whole,
        "freed": [_freed_document(one, read) for one in advice.freed],
        "staying": [{**_named(uid, read), "reason": why.value} for uid, why in sorted(advice.staying.items())],
        "is_complete": advice.is_complete,
        "not_checked": [f"the quota ({read.quota_problem})"] if read.quota_problem else [],
    }
    print_as(form, document, lambda _: _lines(advice, read, is_wide=form == "wide"))
    return 0


async def _read_budgets(api: KubeLists) -> list[Budget]:
    try:
        return (await api.list_all(BUDGETS, read_budget))[0]
    # An API server without the kind, such as the sandbox's, guards no pod by it. Without the right it is Rejected.
    except NotFound:
        return []


def _named(uid: PodUid, read: ReadCluster) -> dict[str, str]:
    known = read.view.pods.get(uid)
    return {"namespace": known.pod.namespace, "pod": known.pod.name} if known else {"namespace": "", "pod": uid}


def _freed_document(freed: Freed, read: ReadCluster) -> dict[str, object]:
    moves = [
        {
            **_named(move.uid, read),
            "owner": read.view.pods[move.uid].owner,
            "to_node": move.to_node,
            "to_gpus": move.to_gpus,
        }
        for move in freed.moves
    ]
    return {"node": freed.node, "gpu": freed.gpu, "moves": moves}


def _lines(advice: Advice, read: ReadCluster, *, is_wide: bool) -> list[RenderableType]:
    if not read.view.nodes:
        return [Text(NO_NODE)]
    moves = sum(len(one.moves) for one in advice.freed)
    now = f"{counted(advice.whole, 'GPU')} {'is' if advice.whole == 1 else 'are'} whole now"
    if advice.freed:
        gained = f"{len(advice.freed)} more"
        lines = [Text.assemble((f"{now}; the move of {counted(moves, 'pod')} would make {gained} whole:", "bold"))]
    else:
        lines = [Text(f"{now}; no move was found that would make more whole.", style="bold")]
    shown, nodes = advice.freed if is_wide else advice.freed[:_MOST_SHOWN], {one.name: one for one in read.view.nodes}
    for freed in shown:
        lines.append(Text(f"  {gpus_text(nodes[freed.node], [freed.gpu])}"))
        for move in freed.moves:
            name, owner = "/".join(_named(move.uid, read).values()), read.view.pods[move.uid].owner
            lines.append(Text(f"    {plain(name)} ({plain(owner)}) to {gpus_text(nodes[move.to_node], move.to_gpus)}"))
    if len(shown) < len(advice.freed):
        lines.append(Text(f"  and {len(advice.freed) - len(shown)} GPUs more: -o wide", style="dim"))
    stays = [f"{why.value} ({count})" for why, count in Counter(advice.staying.values()).most_common()]
    if stays:
        lines.append(Text(f"Other pods stay: {'; '.join(stays)}."))
    if not advice.is_complete:
        lines.append(Text("Not all GPUs were compared: the cluster is too large for one answer."))
    if read.quota_problem:
        lines.append(Text(plain(f"Not checked: the quota ({read.quota_problem}).")))
    return [*lines, Text(_HOW, style="dim")] if advice.freed else [*lines]
