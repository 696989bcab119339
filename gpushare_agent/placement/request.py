"""What placement is asked and answers, and which requests make sense at all."""

from __future__ import annotations

from dataclasses import dataclass

from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.names import CORES_PER_CARD, GpuUuid

_VALID = f"Ask for 1 to {CORES_PER_CARD - 1} cores with memory (a share of one card), or a multiple of {CORES_PER_CARD}"
_VALID_SHARING = f"{_VALID} (whole cards, memory optional)."
_VALID_WHOLE = f"Ask for a multiple of {CORES_PER_CARD} cores (whole cards), or use a node that shares its cards."


@dataclass(frozen=True, slots=True, kw_only=True)
class CardState:
    """A card as placement sees it. `free_cores` is 0..100, blocks are memory blocks; `index` is the topology's row."""

    index: int
    uuid: GpuUuid
    healthy: bool
    free_cores: int
    free_blocks: int
    total_blocks: int

    @property
    def is_free(self) -> bool:
        """Nobody uses any of it: it can be given whole."""
        return self.healthy and self.free_cores == CORES_PER_CARD and self.free_blocks == self.total_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRequest:
    """One container's wish.

    `hint` holds card indexes from the scheduler extender's annotation, which any tenant can write. `must_cards` are the
    cards that the kubelet's must-include IDs are on.
    """

    cores: int
    blocks: int
    hint: tuple[int, ...] = ()
    must_cards: tuple[GpuUuid, ...] = ()

    @property
    def whole_cards(self) -> int:
        """How many whole cards are wanted, 0 for a share."""
        return self.cores // CORES_PER_CARD


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The chosen cards by index. `policy` is one of share, fragment, link, hint, must-include."""

    cards: tuple[GpuUuid, ...]
    policy: str
    explanation: str


def validate_request(cores: int, blocks: int, *, share_mode: bool, memory_block_mib: int) -> Refused | None:
    """Says what is wrong with a request whatever the node has, None where nothing is."""
    asked = describe_request(cores, blocks, memory_block_mib)
    valid = _VALID_SHARING if share_mode else _VALID_WHOLE
    if cores < 0 or blocks < 0:
        return _invalid(f"{asked} is not possible: amounts cannot be negative. {valid}")
    if cores == 0:
        what = "asks for memory without cores" if blocks else "asks for nothing of a card"
        return _invalid(f"{asked} {what}. {valid}")
    if cores > CORES_PER_CARD and cores % CORES_PER_CARD:
        lower = cores // CORES_PER_CARD * CORES_PER_CARD
        return _invalid(
            f"{asked} is neither a share of one card nor whole cards; the next valid numbers of cores are {lower} and "
            f"{lower + CORES_PER_CARD}. {valid}"
        )
    if cores < CORES_PER_CARD and not share_mode:
        return Refused(
            reason=RefusalReason.SHARING_DISABLED,
            detail=f"{asked} is a share of a card, and sharing is switched off on this node. {_VALID_WHOLE}",
        )
    if cores < CORES_PER_CARD and blocks == 0:
        return _invalid(
            f"{asked} is a share of a card without memory: say also how much of its memory, in blocks of "
            f"{memory_block_mib} MiB. {valid}"
        )
    return None


def describe_request(cores: int, blocks: int, memory_block_mib: int) -> str:
    """The request as every refusal begins: `40 cores with 16 memory blocks (4096 MiB)`; whole cards may go without."""
    return f"{cores} cores with {describe_blocks(blocks, memory_block_mib)}" if blocks else f"{cores} cores"


def describe_blocks(blocks: int, memory_block_mib: int) -> str:
    return f"{blocks} memory blocks ({blocks * memory_block_mib} MiB)"


def _invalid(detail: str) -> Refused:
    return Refused(reason=RefusalReason.INVALID_REQUEST, detail=detail)
