"""Cards that do not exist: a driver for rehearsing on machines without GPUs, and for the embedded node.

It answers as the NVML driver does, from settings instead of hardware. Cards keep their UUIDs over restarts: these are
made from the seed (the node's name) and the index. State owned: what was last said about a malformed faults file.

Faults are rehearsed through a JSON file that an operator or a test writes while the agent runs:
`{"lost": {"<index>": "<reason>"}, "all_lost": "<reason>"}`, each key optional.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from gpushare_agent.adapters.topology_text import MAX_CARDS, ParsedTopology, parse_topology
from gpushare_agent.model.errors import StartupError, Unavailable
from gpushare_agent.model.gpus import Card, GpuInventory, Health, NvLink
from gpushare_agent.model.names import GpuUuid
from gpushare_agent.model.topology import Link, LinkKind
from gpushare_agent.model.topology_tree import build_topology

log = structlog.get_logger(__name__)

DRIVER_VERSION = "535.0-simulated"
CARDS_PER_NUMA_NODE = 4
_UUID_SPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "simulated-cards.gpushare-agent")
_NVSWITCH_BUS_ID = "00000000:FE:00.0"
_MAX_NVLINKS_OF_A_CARD = 36
_READ_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Faults:
    """`lost` maps card index to reason; an empty `all_lost` means the driver answers."""

    lost: dict[int, str] = field(default_factory=dict)
    all_lost: str = ""


class SimulatedDriver:
    """Simulated cards. With a topology text its cards are those of the text, else `cards` cards in a default layout.

    `card_memory_mib` has one value per card; a shorter list repeats its last value.
    """

    def __init__(
        self,
        *,
        cards: int,
        card_memory_mib: Sequence[int],
        topology_text: str | None,
        card_name: str,
        seed: str,
        faults_file: Path | None = None,
    ) -> None:
        """Raises StartupError for sizes that do not fit together, Corrupt for a topology text that is none."""
        parsed = parse_topology(topology_text) if topology_text is not None else default_topology(cards)
        memory = _spread_memory(card_memory_mib, len(parsed.links))
        self._inventory = GpuInventory(
            cards=tuple(
                Card(
                    index=index,
                    minor=index,
                    uuid=simulated_uuid(seed, index),
                    bus_id=_bus_id(index),
                    name=card_name,
                    memory_mib=memory_mib,
                    numa_node=parsed.numa[index],
                    nvlinks=_nvlinks(parsed.links[index]),
                )
                for index, memory_mib in enumerate(memory)
            ),
            topology=build_topology(parsed.links, parsed.numa),
            driver_version=DRIVER_VERSION,
        )
        self._faults_file = faults_file
        self._complained_about = ""

    async def read(self) -> GpuInventory:
        """The cards, lost ones Unhealthy.

        Raises:
            Unavailable: the faults file says that the whole driver is lost, or cannot be read in time.
        """
        if self._faults_file is None:
            return self._inventory
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                faults = await asyncio.to_thread(self._read_faults, self._faults_file)
        except TimeoutError as error:
            text = (
                f"reading the simulated cards' faults file {self._faults_file} took longer than {_READ_TIMEOUT_S:g} s"
            )
            raise Unavailable(f"{text}; it is read again at the next look. Check its file system.") from error
        if faults.all_lost:
            raise Unavailable(f"reading the simulated cards failed: {faults.all_lost} (from {self._faults_file})")
        return _with_faults(self._inventory, faults)

    async def close(self) -> None:
        """Nothing is held open."""

    def _read_faults(self, path: Path) -> _Faults:
        try:
            text = _read_regular(path)
        except FileNotFoundError:
            return _Faults()
        except (OSError, UnicodeDecodeError) as error:
            return self._ignore(path, str(error))
        try:
            return _parse_faults(text)
        except ValueError as error:
            return self._ignore(path, str(error))

    def _ignore(self, path: Path, reason: str) -> _Faults:
        """Every read looks at the file again, but one fault is one line of log."""
        if reason != self._complained_about:
            log.warning("faults_file_ignored", path=str(path), reason=reason)
            self._complained_about = reason
        return _Faults()


def simulated_uuid(seed: str, index: int) -> GpuUuid:
    """The UUID of a simulated card: the same for the same seed and index, for ever."""
    return GpuUuid(f"GPU-{uuid.uuid5(_UUID_SPACE, f'{seed}/{index}')}")


def default_topology(cards: int) -> ParsedTopology:
    """A plausible server: pairs behind a PCIe switch, two pairs a NUMA node."""
    if not 1 <= cards <= MAX_CARDS:
        raise StartupError(f"simulating {cards} cards is not possible: choose 1 to {MAX_CARDS} (--cards)")
    rows = tuple(tuple(_default_link(a, b) for b in range(cards)) for a in range(cards))
    return ParsedTopology(links=rows, numa=tuple(index // CARDS_PER_NUMA_NODE for index in range(cards)))


def _default_link(a: int, b: int) -> Link:
    if a == b:
        return Link(kind=LinkKind.SELF)
    if a // CARDS_PER_NUMA_NODE != b // CARDS_PER_NUMA_NODE:
        return Link(kind=LinkKind.SYS)
    return Link(kind=LinkKind.PIX if a // 2 == b // 2 else LinkKind.PHB)


def _spread_memory(card_memory_mib: Sequence[int], cards: int) -> list[int]:
    if not card_memory_mib or any(memory <= 0 for memory in card_memory_mib):
        raise StartupError(f"card memory must be one or more sizes above 0 MiB, not {list(card_memory_mib)}")
    if len(card_memory_mib) > cards:
        raise StartupError(
            f"{len(card_memory_mib)} card memory sizes were given for {cards} cards: name at most one size per card"
        )
    return [card_memory_mib[min(index, len(card_memory_mib) - 1)] for index in range(cards)]


def _bus_id(index: int) -> str:
    """As NVML writes it; every third bus, as behind switches that have buses of their own."""
    return f"00000000:{4 + 3 * index:02X}:00.0"


def _nvlinks(row: Sequence[Link]) -> tuple[NvLink, ...]:
    """A matrix row as links of the card. More links than a card can have means that they all go through an NVSwitch."""
    counts = [(peer, link.nvlinks) for peer, link in enumerate(row) if link.kind is LinkKind.NVLINK]
    remotes = [_bus_id(peer) for peer, nvlinks in counts for _ in range(nvlinks)]
    if len(remotes) > _MAX_NVLINKS_OF_A_CARD:
        remotes = [_NVSWITCH_BUS_ID] * max(nvlinks for _, nvlinks in counts)
    return tuple(NvLink(number=number, remote_bus_id=remote) for number, remote in enumerate(remotes))


def _read_regular(path: Path) -> str:
    """A pipe in the file's place would block its reader for ever."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is no regular file")
        return file.read()


def _parse_faults(text: str) -> _Faults:
    raw_faults = json.loads(text)
    if not isinstance(raw_faults, dict) or not isinstance(raw_faults.get("lost", {}), dict):
        raise ValueError('expected {"lost": {"<index>": "<reason>"}, "all_lost": "<reason>"}')
    lost = {int(index): str(reason) for index, reason in raw_faults.get("lost", {}).items()}
    return _Faults(lost=lost, all_lost=str(raw_faults.get("all_lost") or ""))


def _with_faults(inventory: GpuInventory, faults: _Faults) -> GpuInventory:
    cards = tuple(
        replace(card, health=Health.UNHEALTHY, unhealthy_reason=faults.lost[card.index] or "lost, no reason given")
        if card.index in faults.lost
        else card
        for card in inventory.cards
    )
    return replace(inventory, cards=cards)
