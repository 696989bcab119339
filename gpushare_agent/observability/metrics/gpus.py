"""What cards are and do, as metrics. Pure functions over the node's snapshot. What is not known has no row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from gpushare_agent.model.gpus import Card
from gpushare_agent.model.names import CORES_PER_CARD
from gpushare_agent.model.usage import CardSample, ProcessSample
from gpushare_agent.observability.metrics.text import Number, Series, labels_text, rounded
from gpushare_agent.observability.node_snapshot import MIB, NodeSnapshot

THROTTLE_REASONS = (
    "applications_clocks",
    "board_limit",
    "display_clocks",
    "hw_slowdown",
    "hw_thermal",
    "power_brake",
    "power_cap",
    "reliability",
    "sw_thermal",
    "sync_boost",
)
"""The driver's reasons: a card that tells any shows each of them as 0 or 1. Another one is shown while it holds."""

_CARD_SAMPLES: tuple[tuple[str, str, Callable[[CardSample], Number | None]], ...] = (
    ("memory_used_bytes", "Memory of the card in use, by whomever.", lambda s: s.memory_used_bytes),
    ("sm_utilization_ratio", "Time in which the card computed.", lambda s: s.sm_ratio),
    (
        "memory_bandwidth_utilization_ratio",
        "Time in which the card's memory was read or written.",
        lambda s: s.memory_ratio,
    ),
    ("encoder_utilization_ratio", "Use of the card's encoder.", lambda s: s.encoder_ratio),
    ("decoder_utilization_ratio", "Use of the card's decoder.", lambda s: s.decoder_ratio),
    ("temperature_celsius", "Temperature of the card.", lambda s: s.temperature_celsius),
    ("power_watts", "Power that the card draws.", lambda s: s.power_watts),
    ("power_limit_watts", "Power that the card may draw at most.", lambda s: s.power_limit_watts),
    ("sm_clock_hertz", "Clock of the card's compute.", lambda s: s.sm_clock_hertz),
    ("memory_clock_hertz", "Clock of the card's memory.", lambda s: s.memory_clock_hertz),
    (
        "pcie_received_bytes_per_second",
        "What the card receives over PCIe.",
        lambda s: s.pcie_received_bytes_per_second,
    ),
    ("pcie_sent_bytes_per_second", "What the card sends over PCIe.", lambda s: s.pcie_sent_bytes_per_second),
    ("nvlink_received_bytes_total", "What the card received over NVLink.", lambda s: s.nvlink_received_bytes_total),
    ("nvlink_sent_bytes_total", "What the card sent over NVLink.", lambda s: s.nvlink_sent_bytes_total),
)


def card_series(snapshot: NodeSnapshot) -> Iterator[Series]:
    """By card index."""
    cards = sorted(snapshot.inventory.cards, key=lambda card: card.index)
    labels = {card.uuid: labels_text(uuid=card.uuid, gpu=str(card.index), node=snapshot.node) for card in cards}
    yield _card_info(snapshot, cards)
    for name, text, state in _card_states(snapshot):
        yield Series(f"gpushare_card_{name}", text, rows=[(labels[card.uuid], state(card)) for card in cards])
    usage = snapshot.usage
    if usage is None:
        return
    samples = [(card.uuid, usage.cards[card.uuid]) for card in cards if card.uuid in usage.cards]
    for name, text, sampled in _CARD_SAMPLES:
        rows = [(labels[uuid], rounded(value)) for uuid, s in samples if (value := sampled(s)) is not None]
        yield Series(f"gpushare_card_{name}", text, "counter" if name.endswith("_total") else "gauge", rows)
    yield from _labelled_samples(snapshot, cards, [sample for _, sample in samples])
    strangers = [(labels[s.uuid], usage.strangers.get(s.uuid, ())) for _, s in samples if s.processes is not None]
    text = "Processes on the card that are of no container with a share of it."
    rows = [(one, len(processes)) for one, processes in strangers]
    yield Series("gpushare_card_stranger_processes", text, rows=rows)
    text = "Memory of the card that these processes use."
    rows = [(one, size) for one, processes in strangers if (size := _memory(processes)) is not None]
    yield Series("gpushare_card_stranger_memory_used_bytes", text, rows=rows)


def _card_info(snapshot: NodeSnapshot, cards: Iterable[Card]) -> Series:
    info = Series("gpushare_card_info", "What the card is, always 1.")
    for card in cards:
        labels = labels_text(
            uuid=card.uuid,
            gpu=str(card.index),
            node=snapshot.node,
            name=card.name,
            bus_id=card.bus_id,
            driver_version=snapshot.inventory.driver_version,
        )
        info.rows.append((labels, 1))
    return info


def _card_states(snapshot: NodeSnapshot) -> tuple[tuple[str, str, Callable[[Card], Number]], ...]:
    cores, memory, cordoned = snapshot.cores_allocated, snapshot.memory_allocated_bytes, snapshot.cordoned
    return (
        ("cores_capacity_ratio", "Compute of the card that can be given, 1 is all of it.", lambda card: 1.0),
        (
            "cores_allocated_ratio",
            "Compute of the card that is given to containers.",
            lambda card: cores.get(card.uuid, 0) / CORES_PER_CARD,
        ),
        ("memory_capacity_bytes", "Memory of the card.", lambda card: card.memory_mib * MIB),
        (
            "memory_allocated_bytes",
            "Memory of the card that is given to containers.",
            lambda card: memory.get(card.uuid, 0),
        ),
        ("healthy", "1 while the card is healthy.", lambda card: int(card.is_healthy)),
        ("cordoned", "1 while an operator has the card out of service.", lambda card: int(card.uuid in cordoned)),
    )


def _labelled_samples(
    snapshot: NodeSnapshot, cards: Iterable[Card], samples: Iterable[CardSample]
) -> tuple[Series, Series]:
    """What has a label of its own."""
    index = {card.uuid: str(card.index) for card in cards}
    ecc = Series("gpushare_card_ecc_errors_total", "Memory errors of the card since its driver was loaded.", "counter")
    throttled = Series("gpushare_card_throttled", "1 while the card is slowed down for this reason.")
    for sample in samples:
        common = {"uuid": sample.uuid, "gpu": index[sample.uuid], "node": snapshot.node}
        for kind, count in (("corrected", sample.ecc_corrected_total), ("uncorrected", sample.ecc_uncorrected_total)):
            if count is not None:
                ecc.rows.append((labels_text(kind=kind, **common), count))
        if sample.throttle_reasons is not None:
            for reason in sorted({*THROTTLE_REASONS, *sample.throttle_reasons}):
                labels = labels_text(reason=reason, **common)
                throttled.rows.append((labels, int(reason in sample.throttle_reasons)))
    return ecc, throttled


def _memory(processes: Sequence[ProcessSample]) -> int | None:
    known = [process.memory_bytes for process in processes if process.memory_bytes is not None]
    return sum(known) if known or not processes else None
