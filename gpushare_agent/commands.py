"""`gpushare-agent`: the table of its commands. argv and environment → settings → an app → an exit code.

Exit codes: 0 done, 1 it could not be done, 2 the command line, a variable or the settings file is wrong, 130 interrupted.
Each command imports its app only when it runs: the time from process start to registration stays short.
"""

from __future__ import annotations

from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from gpushare_agent.core.cli.command_line import (
    ALL_SETTINGS,
    PROGRAM,
    Command,
    CommandLine,
    Invocation,
    add_output,
    arg,
    lazy,
    number,
    one_of,
    print_version,
)
from gpushare_agent.core.settings.node_configuration import NamedConfiguration
from gpushare_agent.core.settings.settings import LoadedSettings, Settings
from gpushare_agent.core.settings.sources import DAEMONSETS
from gpushare_agent.kubectl.view_commands import view_commands

log = structlog.get_logger(__name__)

_RESOURCE_SETTINGS = ("resources", "gpushare", "placement")
_GPU_SETTINGS = ("driver", "simulated")


def _run(call: Invocation) -> Coroutine[Any, Any, int]:
    # Logging before the import: what the imports and the settings have to say is in the chosen format.
    loaded = call.load_with_logs()
    _log_migrated_keys(loaded)
    if not DAEMONSETS.isdisjoint(loaded.sources.values()):
        from gpushare_agent.agent.commands import former_daemonset

        former_daemonset.start(loaded, call.environ)
    from gpushare_agent.agent.program import run as run_agent

    def reload(named: NamedConfiguration | None) -> Settings:
        loaded = call.load(named)
        # The other places were reported at the start; only a node's own configuration may be another now.
        if named is not None:
            _log_migrated_keys(loaded)
        return loaded.settings

    return run_agent(loaded.settings, reload=reload)


def _log_migrated_keys(loaded: LoadedSettings) -> None:
    """What became of another program's configuration, variables and flags: once, at the start."""
    # A key without effect is a warning: who migrates believes that it still holds.
    for key in loaded.migrated:
        is_lost, text = loaded.outcome(key)
        if is_lost:
            log.warning("foreign_setting_without_effect", key=key.name, value=key.value, source=key.source, reason=text)
        else:
            log.info("foreign_setting_read", key=key.name, value=key.value, source=key.source, becomes=text)


def _extender(call: Invocation) -> Coroutine[Any, Any, int]:
    loaded = call.load_with_logs()
    _log_migrated_keys(loaded)
    from gpushare_agent.extender import app as extender

    return extender.run(loaded.settings)


def _completion(call: Invocation) -> int:
    from gpushare_agent.core.cli import completion
    from gpushare_agent.kubectl.plugin import PLUGIN_LINE

    print(completion.script(call.options.shell, [COMMAND_LINE, PLUGIN_LINE]), end="")
    return 0


_CORDONED = (
    one_of(
        arg("gpu GPU", "its index (of a MIG instance 0:1), its UUID, or the beginning of that", nargs="?"),
        arg("--list", "print the GPUs and their health, and change nothing"),
    ),
    add_output,
    arg("--socket PATH", "the agent's control socket (default: the setting)", type=Path),
)

COMMANDS: tuple[Command, ...] = (
    Command(
        name="run",
        summary="run the node agent",
        description="Runs the node agent until SIGTERM or SIGINT. SIGHUP reads the settings again.",
        run=_run,
        examples=("run --config /etc/gpushare-agent/settings.yaml --log.level debug",),
        settings=ALL_SETTINGS,
    ),
    *view_commands(is_plugin=False),
    Command(
        name="config",
        summary="print the settings in effect and where each came from; yaml is a settings file",
        run=lazy("core.cli.show_settings:run"),
        examples=("config --config settings.yaml -o yaml",),
        arguments=(
            add_output,
            arg("--node-configuration FILE", "as nodes have it whose label names this configuration", type=Path),
        ),
        settings=ALL_SETTINGS,
    ),
    Command(
        name="check",
        summary="check what of this node is in place for the agent, and print the remedy for what is not",
        run=lazy("agent.commands.check:run"),
        examples=("check --isolation mps",),
        arguments=(add_output,),
        settings=(
            *("node_name", "isolation", "isolations_allowed", "device_list_strategy", "fail_on_init_error"),
            *("extra_config", "volume_config", "kubeconfig", *_GPU_SETTINGS, "resources", "gpushare", "kubelet"),
            *("virtual_manager", "driver_volume", "mps.pipe_directory", "mps.control"),
            *("libgpushare", "cdi", "runtime"),
            *("allocation.cleanup_rejected_pods", "facts.is_written"),
        ),
    ),
    Command(
        name="driver-volume",
        summary="collect the driver's libraries and programs for containers to mount",
        run=lazy("agent.commands.driver_volume:run"),
        examples=("driver-volume --check",),
        arguments=(
            arg("--check", "print what would be done, and change nothing"),
            arg("--prune", "remove old versions that no container has mounted"),
            arg("--only", "make this volume of volume.conf and no other", choices=("nvidia", "origin")),
            add_output,
        ),
        settings=("volume_config", "driver_volume"),
    ),
    Command(
        name="driver-devices",
        summary="serve the resource gpushare-agent/driver, which is all of the node's NVIDIA device nodes",
        run=lazy("agent.commands.driver_devices:run"),
        examples=("driver-devices --dev /host/dev",),
        arguments=(arg("--dev DEV", "the host's /dev as this process sees it", type=Path, default=Path("/dev")),),
        settings=("kubelet.device_plugin_path", "mig.on_demand", "log"),
    ),
    Command(
        name="cdi",
        summary="name the node's GPUs for container runtimes by CDI, and print which spec names each",
        run=lazy("agent.commands.cdi:run"),
        examples=("cdi generate --check",),
        arguments=(
            arg("action", "write the agent's spec, or print which spec names each GPU", choices=("generate", "list")),
            arg("--check", "generate: print what would be done, and change nothing"),
            add_output,
        ),
        settings=(*_GPU_SETTINGS, "isolation", "isolations_allowed", "volume_config", "cdi"),
    ),
    Command(
        name="vdevice",
        summary="inside a container: register, and print its limits and PIDs",
        run=lazy("agent.commands.vdevice:run"),
        arguments=(
            arg("--addr ADDR", "the socket or its directory (GPUSHARE_VDEVICE, /etc/vcuda/vcuda.sock)", default=None),
            arg("--bus-id BUS_ID", "PCI bus ID; usually empty"),
            arg("--pod-uid POD_UID", "default: as vcuda.config next to the socket says"),
            one_of(
                arg("--cont-id ID", "register by container ID, 64 hexadecimal digits"),
                arg("--cont-name NAME", "register by name; default: likewise"),
            ),
            arg("--no-register", "only read the files", dest="register", action="store_false"),
            arg(
                "-w --watch SECONDS",
                "print what changes, every SECONDS (1), until interrupted",
                nargs="?",
                type=number(0.1, 3600, " seconds"),
                const=1.0,
            ),
            arg("-o --output", "json: a document a line", choices=("text", "json"), default="text"),
        ),
        help_note="Exit code 3: the agent did not answer; the files were read and printed.",
    ),
    Command(
        name="mps",
        summary="run NVIDIA's MPS control daemon on this node",
        run=lazy("agent.commands.mps_supervisor:run"),
        examples=("mps --check",),
        arguments=(arg("--check", "ask the daemon once, whoever runs it: 0 when it serves"),),
        settings=("driver", "mps", "log"),
    ),
    Command(
        name="cordon",
        summary="take a GPU out of service: its pods go on, no new pod gets it; needs root on the node",
        run=partial(lazy("agent.commands.cordon:run"), "cordon"),
        examples=("cordon 3 --reason 'fan replaced on Monday'", "cordon --list"),
        arguments=(arg("--reason TEXT", "why, for whoever finds the GPU cordoned"), *_CORDONED),
        settings=("control",),
    ),
    Command(
        name="uncordon",
        summary="put a GPU back in service, and end its wait for a reset; needs root on the node",
        run=partial(lazy("agent.commands.cordon:run"), "uncordon"),
        examples=("uncordon 3",),
        arguments=_CORDONED,
        settings=("control",),
    ),
    Command(
        name="extender",
        summary="run the scheduler extender, which filters and ranks nodes for kube-scheduler",
        run=_extender,
        examples=("extender --extender.addr= --extender.leader-elect=false",),
        settings=("kubeconfig", *_RESOURCE_SETTINGS, "extender", "log"),
    ),
    Command(
        name="sandbox",
        summary="run the agent on an embedded node: no cluster, no GPU, no root",
        description="Runs the agent on an embedded node: no cluster, no GPU, no root. Settings are those of its agents:"
        " --gpus, --gpu-memory-mib and --topology say which GPUs they have.",
        run=lambda call: lazy("sandbox.command:run")(call.options, list(call.flags), call.rest),
        examples=("sandbox --gpus 4 --samples fitting",),
        arguments=(lazy("sandbox.command:add_arguments"),),
        settings=("isolation", "share_mode", "simulated", *_RESOURCE_SETTINGS, "web", "log"),
        split_rest=lazy("sandbox.command:split_inner_command"),
    ),
    Command(
        name="simulate",
        summary="replay a workload on a simulated cluster with the real decisions, and compare policies",
        run=lazy("simulation.command:run"),
        examples=("simulate --nodes nodes.csv --pods pods.csv --policy binpack,agent-only",),
        arguments=(lazy("simulation.command:add_arguments"),),
        settings=_RESOURCE_SETTINGS,
    ),
    Command(
        name="completion",
        summary="print a script that makes your shell complete commands and flags",
        run=_completion,
        examples=("completion bash",),
        help_note=f"In a running bash: source <({PROGRAM} completion bash)",
        arguments=(arg("shell", "whose script to print", choices=("bash", "zsh", "fish")),),
    ),
    print_version(PROGRAM),
)

COMMAND_LINE: CommandLine = CommandLine(
    program=PROGRAM,
    purpose="lets pods share the NVIDIA GPUs of a Kubernetes node.",
    commands=COMMANDS,
    more=f"`{PROGRAM} COMMAND --help` explains one; `{PROGRAM} run --help` explains every setting.",
)

main = COMMAND_LINE.main
