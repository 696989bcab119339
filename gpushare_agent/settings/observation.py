"""Settings of what watches and shows the node: log, HTTP, health, usage, decisions, node facts, control, display, debug.

Sections of settings/tree.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from gpushare_agent.settings.values import DNS_NAME, Count, OptionalPath, Seconds, Section, comma_list, matches

Xids = Annotated[tuple[Annotated[Count, Field(ge=1, le=100_000)], ...], BeforeValidator(comma_list)]


class LogSettings(Section):
    """What is logged, always to standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severity that is logged."
    )
    format: Literal["auto", "json", "console"] = Field(
        default="auto",
        description="json: one object a line. console: text. auto: console on a terminal, else json.",
    )


class WebSettings(Section):
    """The HTTP endpoints: metrics, health, readiness."""

    addr: str = Field(
        default="localhost",
        min_length=1,
        max_length=253,
        description="Address to listen on. 0.0.0.0 lets Prometheus and probes in.",
    )
    port: Count = Field(default=5678, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")


class HealthSettings(Section):
    """Watching the GPUs."""

    check_period_s: Seconds = Field(
        default=5.0, ge=0.05, le=3600, description="Period of reading the GPUs' state from the driver."
    )
    event_period_s: Seconds = Field(
        default=1.0,
        ge=0.05,
        le=60,
        description="Period of reading simulated events, half the first pause after a failure. NVML's (Xid errors, ECC) are "
        "waited for.",
    )
    ignored_xids: Xids = Field(
        # NVIDIA's device plugin ignores the same: errors of a program, not of the GPU.
        default=(13, 31, 43, 45, 68, 109),
        description="Xid errors that leave a GPU Healthy. Empty: none.",
    )
    reset_xids: Xids = Field(
        default=(48, 62, 64, 74, 79, 95, 119, 120, 136, 140, 143),
        description="Xid errors after which a GPU stays Unhealthy until it is reset or uncordoned.",
    )
    recovery_probes: Count = Field(
        default=3, ge=1, le=100, description="Probes in a row that an Unhealthy GPU must pass to be Healthy again."
    )
    recovery_period_s: Seconds = Field(
        default=10.0,
        ge=0.05,
        le=3600,
        description="Time between two of these probes, doubled each time the GPU becomes Unhealthy again.",
    )
    recovery_period_max_s: Seconds = Field(
        default=600.0, ge=0.05, le=86400, description="Most time between two of these probes."
    )
    state_file: OptionalPath = Field(
        default=Path("/var/lib/gpushare-agent/health.json"),
        description="File that keeps cordons and pending resets over a restart. Empty: none.",
    )


class UsageSettings(Section):
    """History of the samples (their period is sample_period_s)."""

    history_s: Seconds = Field(default=900.0, ge=10, le=86400, description="Length of the history.")
    history_points: Count = Field(default=180, ge=10, le=3600, description="Points of one curve of the history.")
    idle_period_s: Seconds = Field(
        default=60.0,
        ge=0,
        le=3600,
        description="Period of sampling while nothing reads the use. 0: always sample_period_s.",
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
        description="Write labels and annotations to the Node. Needs the right to patch nodes; the extender needs them.",
    )
    label_prefix: Annotated[str, matches(DNS_NAME, "is no label prefix such as gpushare-agent or nvidia.com")] = Field(
        default="gpushare-agent",
        description="Prefix of the labels gpu.product, gpu.memory, gpu.count and so on.",
    )
    taint_above: float = Field(
        default=1.0,
        ge=0.0,
        le=1.0,
        description="While more than this part of the node's GPUs is free, it has the taint gpushare-agent/free-gpus with "
        "PreferNoSchedule, so that pods without GPUs go elsewhere where they can. 1: never.",
    )


class ControlSettings(Section):
    """The socket of `cordon` and `uncordon`, for root alone."""

    socket: OptionalPath = Field(
        default=Path("/run/gpushare-agent/control.sock"),
        description="Unix socket of `cordon` and `uncordon`. Empty: none.",
    )


class DisplaySettings(Section):
    """gpu-manager's gRPC service for usage and topology."""

    socket: OptionalPath = Field(
        default=Path("/var/run/gpu-manager.sock"),
        description="Unix socket of the service display.GPUDisplay. Empty: none.",
    )


class DebugSettings(Section):
    """The debug listener: tasks, allocations, pods, topology, settings, log level."""

    addr: str = Field(
        default="localhost",
        max_length=253,
        description="Address to listen on. One that other hosts reach needs debug.token_file. Empty: no listener.",
    )
    port: Count = Field(default=5679, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    token_file: OptionalPath = Field(
        default=None,
        description="File with the token that callers send as `Authorization: Bearer`. Empty: none is needed.",
    )
