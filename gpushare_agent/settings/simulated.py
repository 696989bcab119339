"""Settings of simulated GPUs; a section of settings/tree.py."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from gpushare_agent.settings.values import Count, OptionalPath, Section, comma_list


class SimulatedSettings(Section):
    """GPUs without hardware (driver simulated)."""

    cards: Count = Field(default=8, ge=1, le=64, description="GPUs to simulate. With a topology file its rows count.")
    card_memory_mib: Annotated[tuple[Annotated[Count, Field(ge=1, le=4_194_304)], ...], BeforeValidator(comma_list)] = (
        Field(
            default=(24576,),
            min_length=1,
            max_length=64,
            description="Memory of the GPUs, MiB: one value for all, or one for each GPU.",
        )
    )
    topology: OptionalPath = Field(
        default=None,
        description="File with the text of `nvidia-smi topo -m`. Empty: a plain layout.",
    )
    card_name: str = Field(
        default="NVIDIA Simulated 24GB",
        min_length=1,
        max_length=96,
        description="The GPUs' product name.",
    )
    device_nodes: bool = Field(
        default=False,
        description="Give containers /dev/nvidia0… of simulated GPUs: a real runtime needs nodes that exist.",
    )
    faults: OptionalPath = Field(
        default=None,
        description="JSON file that makes simulated GPUs fail (docs/reference/sandbox.md). Empty: none.",
    )
    usage: OptionalPath = Field(
        default=None,
        description="JSON file with the use of simulated GPUs by processes (docs/reference/sandbox.md). Empty: they idle.",
    )

    @model_validator(mode="after")
    def _has_one_memory_per_gpu(self) -> Self:
        sizes = len(self.card_memory_mib)
        if self.topology is None and sizes not in (1, self.cards):
            raise ValueError(f"card_memory_mib has {sizes} values for {self.cards} GPUs; give one, or one for each GPU")
        return self
