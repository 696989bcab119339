"""One node of the extender's books, for a person: its cards, and who has what of them. Pure; sorted."""

from __future__ import annotations

from typing import Any

from gpushare_agent.extender.ledger import NodeBooks


def node_document(books: NodeBooks) -> dict[str, Any]:
    return {
        "name": books.node.name,
        "model": books.node.model,
        "pool": books.node.pool,
        "is_exact": books.node.is_exact,
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
            for room in books.rooms
        ],
        "reservations": [
            {
                "pod": f"{reservation.namespace}/{reservation.pod}",
                "pod_uid": reservation.pod_uid,
                "stage": reservation.stage.value,
                "containers": {c.name: list(c.cards) for c in reservation.plan.containers if c.cards},
                "charges": {
                    str(c.index): [c.cores, c.blocks, c.units, int(c.is_whole)] for c in reservation.plan.charges
                },
            }
            for _, reservation in sorted(books.reservations.items())
        ],
        "strangers": sorted(books.strangers),
    }
