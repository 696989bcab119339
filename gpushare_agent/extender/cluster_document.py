"""One node of the extender's books, for a person: its GPUs, and who has what of them. Pure; sorted."""

from __future__ import annotations

from typing import Any

from gpushare_agent.extender.ledger import NodeLedger


def node_document(ledger: NodeLedger) -> dict[str, Any]:
    return {
        "name": ledger.node.name,
        "model": ledger.node.model,
        "pool": ledger.node.pool,
        "is_exact": ledger.node.is_exact,
        "cards": [
            {
                "index": room.index,
                "uuid": room.uuid,
                "is_healthy": room.is_healthy,
                "memory_mib": room.memory_mib,
                "cores": room.cores,
                "blocks": room.blocks,
                "units": room.units,
                "is_whole": room.is_whole,
            }
            for room in ledger.rooms
        ],
        "reservations": [
            {
                "pod": f"{reservation.namespace}/{reservation.pod}",
                "pod_uid": reservation.pod_uid,
                "stage": reservation.stage.value,
                "containers": {c.name: list(c.gpus) for c in reservation.plan.containers if c.gpus},
                "charges": {
                    str(c.index): [c.cores, c.blocks, c.units, int(c.is_whole)] for c in reservation.plan.charges
                },
            }
            for _, reservation in sorted(ledger.reservations.items())
        ],
        "strangers": sorted(ledger.unattributed),
    }
