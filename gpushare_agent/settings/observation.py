"""Settings of what watches and shows the node: log, HTTP, health, usage, decisions, node facts, control, display, debug.

Sections of settings/tree.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from gpushare_agent.settings.values import DNS_NAME, Count, OptionalPath, Seconds, Section, comma_list, matches


def _no_list(value: object) -> object:
    """An empty text is an empty list, not a list with one empty entry."""
    return () if value == "" else comma_list(value)


Xids = Annotated[tuple[Annotated[Count, Field(ge=1, le=100_000)], ...], BeforeValidator(_no_list)]


class LogSettings(Section):
    """What is logged, always to standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severity that is logged."
    )
    format: Literal["auto", "json", "console"] = Field(
        default="auto",
        description="One JSON object a line, or text for people. auto: text on a terminal, JSON elsewhere.",
    )


class WebSettings(Section):
    """The HTTP endpoints: metrics, health, readiness."""

    addr: str = Field(
        default="localhost",
        min_length=1,
        max_length=253,
        description="Address to listen on. localhost serves this host only; 0.0.0.0 lets Prometheus and probes in.",
    )
    port: Count = Field(default=5678, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")


class HealthSettings(Section):
    """Watching the GPUs."""

    check_period_s: Seconds = Field(
        default=5.0, ge=0.05, le=3600, description="Period of reading the GPUs' state from the driver, seconds."
    )
    event_period_s: Seconds = Field(
        default=1.0,
        ge=0.05,
        le=60,
        description="How often the driver's events (Xid errors, ECC) are fetched, seconds.",
    )
    ignored_xids: Xids = Field(
        default=(13, 31, 43, 45, 68, 109),
        description="Xid errors that leave a GPU Healthy, comma list. The default are those that a program causes, not the"
        " GPU. Empty: none is ignored.",
    )
    reset_xids: Xids = Field(
        default=(48, 62, 64, 74, 79, 95, 119, 120, 136, 140, 143),
        description="Xid errors after which a GPU stays Unhealthy until it was reset (or uncordoned by hand), comma list."
        " After any other the GPU comes back once it has passed the probes.",
    )
    recovery_probes: Count = Field(
        default=3, ge=1, le=100, description="Probes in a row that an Unhealthy GPU must pass to be Healthy again."
    )
    recovery_period_s: Seconds = Field(
        default=10.0,
        ge=0.05,
        le=3600,
        description="Time between two of these probes, seconds. It doubles each time that the GPU becomes Unhealthy again.",
    )
    recovery_period_max_s: Seconds = Field(
        default=600.0, ge=0.05, le=86400, description="Most time between two of these probes, seconds."
    )
    state_file: OptionalPath = Field(
        default=Path("/var/lib/gpushare-agent/health.json"),
        description="File that preserves, over a restart of the agent, which GPUs are cordoned and which wait for a reset."
        " Empty: neither outlives the agent.",
    )


class UsageSettings(Section):
    """History of the samples (their period is sample_period_s)."""

    history_s: Seconds = Field(
        default=900.0, ge=10, le=86400, description="How much of the past the dashboard's curves show, seconds."
    )
    history_points: Count = Field(
        default=180, ge=10, le=3600, description="Points of one curve; more are memory and nothing else."
    )
    idle_period_s: Seconds = Field(
        default=60.0,
        ge=0,
        le=3600,
        description="Period of sampling while nothing reads the use, seconds: for the history alone. 0 samples each"
        " sample_period_s always.",
    )


class DecisionSettings(Section):
    """Explanations of what was decided."""

    kept: Count = Field(
        default=500, ge=1, le=100_000, description="Decisions kept in memory for `explain` and the dashboard."
    )


class FactsSettings(Section):
    """The agent's labels and annotation about its GPUs on the node's object."""

    is_written: bool = Field(
        default=True,
        description="Write labels and one annotation about the GPUs to the node's object. Needs the right to patch nodes."
        " false: the scheduler extender knows nothing of this node.",
    )
    label_prefix: Annotated[str, matches(DNS_NAME, "is no label prefix such as gpushare-agent or nvidia.com")] = Field(
        default="gpushare-agent",
        description="Prefix of the labels gpu.product, gpu.memory, gpu.count and so on. nvidia.com gives the names of"
        " NVIDIA's feature discovery, for clusters that do not run it.",
    )


class ControlSettings(Section):
    """The socket of `cordon` and `uncordon`, for root alone."""

    socket: OptionalPath = Field(
        default=Path("/run/gpushare-agent/control.sock"),
        description="Unix socket through which root takes GPUs out of service and back. Empty: none.",
    )


class DisplaySettings(Section):
    """gpu-manager's gRPC service for usage and topology."""

    socket: OptionalPath = Field(
        default=Path("/var/run/gpu-manager.sock"),
        description="Unix socket of the service display.GPUDisplay. The default is gpu-manager's. Empty: none.",
    )


class DebugSettings(Section):
    """The debug listener: tasks, allocations, pods, topology, settings, log level."""

    addr: str = Field(
        default="localhost",
        max_length=253,
        description="Address of the debug listener. Any other than this host's own needs debug.token_file. Empty: none.",
    )
    port: Count = Field(default=5679, ge=0, le=65535, description="Its port; 0 takes any free one.")
    token_file: OptionalPath = Field(
        default=None,
        description="File with the token that callers must send as `Authorization: Bearer`. Empty: none is needed.",
    )
