"""`gpushare-agent`: the table of its commands. argv and environment → settings → an app → an exit code.

Exit codes: 0 done, 1 it could not be done, 2 the command line, a variable or the settings file is wrong, 130 interrupted.
Each command imports its app only when it runs: the time from process start to registration stays short.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import structlog

from gpushare_agent.cli.command_line import (
    ALL_SETTINGS,
    COMPLETION_VARIABLE,
    PROGRAM,
    Command,
    CommandLine,
    Invocation,
    add_output,
    print_version,
    run_app,
)
from gpushare_agent.cli.view_commands import view_commands
from gpushare_agent.settings.node_configuration import NamedConfiguration
from gpushare_agent.settings.settings import LoadedSettings, Settings, SettingsError
from gpushare_agent.settings.sources import DAEMONSETS

log = structlog.get_logger(__name__)

_RESOURCE_SETTINGS = ("resources", "gpushare", "placement")
_GPU_SETTINGS = ("driver", "simulated")


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if COMPLETION_VARIABLE in (environ := os.environ if environ is None else environ):
        from gpushare_agent.cli import completion

        return completion.answer_shell(COMMAND_LINE)
    return COMMAND_LINE.main(arguments, environ)


def _run(call: Invocation) -> int:
    # Logging before the import: what the imports and the settings have to say is in the chosen format.
    loaded = call.load_with_logs()
    _log_migrated_keys(loaded)
    if not DAEMONSETS.isdisjoint(loaded.sources.values()):
        from gpushare_agent.cli import former_daemonset

        former_daemonset.start(loaded, call.environ)
    from gpushare_agent.agent.agent import run as run_agent

    def reload(named: NamedConfiguration | None) -> Settings:
        loaded = call.load(named)
        # The other places were reported at the start; only a node's own configuration may be another now.
        if named is not None:
            _log_migrated_keys(loaded)
        return loaded.settings

    return run_app(run_agent(loaded.settings, reload=reload))


def _log_migrated_keys(loaded: LoadedSettings) -> None:
    """What became of another program's configuration, variables and flags: once, at the start."""
    # A key without effect is a warning: who migrates believes that it still holds.
    for key in loaded.migrated:
        is_lost, text = loaded.outcome(key)
        if is_lost:
            log.warning("foreign_setting_without_effect", key=key.name, value=key.value, source=key.source, reason=text)
        else:
            log.info("foreign_setting_read", key=key.name, value=key.value, source=key.source, becomes=text)


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    add_output(parser, also=("markdown",))
    parser.add_argument(
        "--node-configuration", metavar="FILE", type=Path,
        help="with this named configuration, as nodes have it whose label names it",
    )  # fmt: skip


def _config(call: Invocation) -> int:
    from gpushare_agent.cli import show_settings

    path, named = call.options.node_configuration, None
    if path is not None:
        try:
            named = NamedConfiguration(name=path.name, content=path.read_bytes())
        except OSError as error:
            # As a file of --config: exit code 2.
            raise SettingsError([f"the configuration {path} cannot be read: {error.strerror}"]) from error
    text = show_settings.render(call.load(named), call.options.output)
    print(text, end="")
    return 0


def _extender(call: Invocation) -> int:
    loaded = call.load_with_logs()
    _log_migrated_keys(loaded)
    from gpushare_agent.extender import app as extender

    return run_app(extender.run(loaded.settings))


def _sandbox_arguments(parser: argparse.ArgumentParser) -> None:
    from gpushare_agent.cli import sandbox

    sandbox.add_arguments(parser)


def _sandbox_words(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    from gpushare_agent.cli import sandbox

    return sandbox.split_inner_command(argv)


def _sandbox(call: Invocation) -> int:
    from gpushare_agent.cli import sandbox

    return run_app(sandbox.run(call.options, list(call.flags), call.rest))


def _simulate_arguments(parser: argparse.ArgumentParser) -> None:
    from gpushare_agent.cli import simulate

    simulate.add_arguments(parser)


def _simulate(call: Invocation) -> int:
    settings = call.settings(log_level="error")
    from gpushare_agent.cli import simulate

    return simulate.run(call.options, settings)


def _completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="whose script to print")


def _completion(call: Invocation) -> int:
    from gpushare_agent.cli import completion
    from gpushare_agent.cli.kubectl import PLUGIN_LINE

    print(completion.script(call.options.shell, [COMMAND_LINE, PLUGIN_LINE]), end="")
    return 0


def _check(call: Invocation) -> int:
    settings = call.settings(log_level="error")
    from gpushare_agent.cli import check

    return run_app(check.run(settings, form=call.options.output))


def _driver_volume_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="print what would be done, and change nothing")
    parser.add_argument("--prune", action="store_true", help="remove old versions that no container has mounted")
    parser.add_argument("--only", choices=("nvidia", "origin"), help="make this volume of volume.conf and no other")
    add_output(parser)


def _driver_volume(call: Invocation) -> int:
    settings, options = call.settings(), call.options
    from gpushare_agent.cli import driver_volume
    from gpushare_agent.isolation.driver_volume.plan import VolumeName

    only = VolumeName(options.only) if options.only else None
    return driver_volume.run(settings, check=options.check, prune=options.prune, form=options.output, only=only)


def _driver_devices_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dev", type=Path, default=Path("/dev"), help="the host's /dev as this process sees it")


def _driver_devices(call: Invocation) -> int:
    settings = call.settings()
    from gpushare_agent.cli import driver_devices

    return run_app(driver_devices.run(settings.kubelet.device_plugin_path, call.options.dev))


def _cdi_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=("generate", "list"), help="write the agent's spec, or print which spec names each GPU"
    )
    parser.add_argument("--check", action="store_true", help="generate: print what would be done, and change nothing")
    add_output(parser)


def _cdi(call: Invocation) -> int:
    settings, options = call.settings(log_level="error"), call.options
    from gpushare_agent.cli import cdi

    return run_app(cdi.run(settings, action=options.action, check=options.check, form=options.output))


def _vdevice_arguments(parser: argparse.ArgumentParser) -> None:
    from gpushare_agent.cli import vdevice

    vdevice.add_arguments(parser, {})


def _vdevice(call: Invocation) -> int:
    """Parses its words itself: the same client also runs as a module, without this command line."""
    from gpushare_agent.cli import vdevice

    return vdevice.run(call.rest, call.environ, program=f"{PROGRAM} vdevice")


def _mps_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="ask the daemon once, whoever runs it: 0 when it serves")


def _mps(call: Invocation) -> int:
    settings = call.settings(log_level="error" if call.options.check else None)
    from gpushare_agent.cli import mps_supervisor

    return run_app(mps_supervisor.check(settings) if call.options.check else mps_supervisor.run(settings))


def _cordon_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--reason", metavar="TEXT", default="", help="why, for whoever finds the GPU cordoned")
    _uncordon_arguments(parser)


def _uncordon_arguments(parser: argparse.ArgumentParser) -> None:
    from gpushare_agent.cli import cordon

    cordon.add_arguments(parser)


def _ask_agent(action: str, call: Invocation) -> int:
    # Without logging: standard output and error are the answer to a person.
    settings = call.load().settings
    from gpushare_agent.cli import cordon

    return cordon.run(action, call.options, settings.control.socket)


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
        summary="print the settings in effect and where each came from",
        description="Prints the settings in effect and where each came from; yaml is a settings file, markdown the"
        " reference of all settings.",
        run=_config,
        examples=("config --config settings.yaml -o yaml",),
        add_arguments=_config_arguments,
        settings=ALL_SETTINGS,
    ),
    Command(
        name="check",
        summary="check what of this node is in place, and print the remedy for what is not",
        description="Checks what of this node is in place for the agent, and prints the remedy for what is not.",
        run=_check,
        examples=("check --isolation mps",),
        add_arguments=add_output,
        settings=(
            *("node_name", "isolation", "isolations_allowed", "device_list_strategy", "fail_on_init_error"),
            *("extra_config", "volume_config", "kubeconfig", *_GPU_SETTINGS, "resources", "gpushare", "kubelet"),
            *("virtual_manager", "driver_volume", "mps.pipe_directory", "mps.log_directory", "mps.control"),
            *("mps.command_timeout_s", "hami_core.library", "hami_core.directory", "libgpushare", "cdi", "runtime"),
            *("allocation.cleanup_rejected_pods", "facts.is_written"),
        ),
    ),
    Command(
        name="driver-volume",
        summary="collect the driver's files for containers to mount",
        description="Collects the driver's libraries and programs for containers to mount.",
        run=_driver_volume,
        examples=("driver-volume --check",),
        add_arguments=_driver_volume_arguments,
        settings=("volume_config", "driver_volume"),
    ),
    Command(
        name="driver-devices",
        summary="give this project's own pods NVIDIA's device nodes where its container runtime is not installed",
        description="Serves the resource gpushare-agent/driver, which is all of the node's NVIDIA device nodes.",
        run=_driver_devices,
        examples=("driver-devices --dev /host/dev",),
        add_arguments=_driver_devices_arguments,
        settings=("kubelet.device_plugin_path", "log"),
    ),
    Command(
        name="cdi",
        summary="name the GPUs for container runtimes by CDI, and print which spec names each",
        description="Names the node's GPUs for container runtimes by CDI, and prints which spec names each.",
        run=_cdi,
        examples=("cdi generate --check",),
        add_arguments=_cdi_arguments,
        settings=(*_GPU_SETTINGS, "isolation", "isolations_allowed", "volume_config", "cdi"),
    ),
    Command(
        name="vdevice",
        summary="inside a container: register, and print its limits and PIDs",
        description="Registers this container with the node's GPU agent and prints the limits and PIDs that it wrote.",
        run=_vdevice,
        add_arguments=_vdevice_arguments,
        # All words are its own: in a container there are no settings to read.
        split_rest=lambda argv: ((), argv),
    ),
    Command(
        name="mps",
        summary="run NVIDIA's MPS control daemon on this node",
        description="Runs NVIDIA's MPS control daemon on this node until SIGTERM or SIGINT.",
        run=_mps,
        examples=("mps --check",),
        add_arguments=_mps_arguments,
        settings=("driver", "mps", "log"),
    ),
    Command(
        name="cordon",
        summary="take a GPU out of service; running pods go on",
        description="Takes a GPU out of service: pods that run on it go on, no new pod gets it. Needs root on the node.",
        run=partial(_ask_agent, "cordon"),
        examples=("cordon 3 --reason 'fan replaced on Monday'", "cordon --list"),
        add_arguments=_cordon_arguments,
        settings=("control",),
    ),
    Command(
        name="uncordon",
        summary="put a GPU back in service, and end its wait for a reset",
        description="Puts a GPU back in service, and ends its wait for a reset. Needs root on the node.",
        run=partial(_ask_agent, "uncordon"),
        examples=("uncordon 3",),
        add_arguments=_uncordon_arguments,
        settings=("control",),
    ),
    Command(
        name="extender",
        summary="run the scheduler extender, which filters and ranks nodes for kube-scheduler",
        description="Runs the scheduler extender until SIGTERM or SIGINT: kube-scheduler asks it which nodes have a GPU"
        " with enough free capacity.",
        run=_extender,
        examples=("extender --extender.addr 0.0.0.0 --extender.leader-elect=false",),
        settings=("kubeconfig", *_RESOURCE_SETTINGS, "extender", "log"),
    ),
    Command(
        name="sandbox",
        summary="try the agent on an embedded node, without a cluster or a GPU",
        description="Runs the agent on an embedded node: no cluster, no GPU, no root.",
        run=_sandbox,
        examples=("sandbox --gpus 4 --samples fitting",),
        add_arguments=_sandbox_arguments,
        settings=("isolation", "share_mode", "simulated", *_RESOURCE_SETTINGS, "web", "debug", "log"),
        help_note="The settings are those of its agents.",
        split_rest=_sandbox_words,
    ),
    Command(
        name="simulate",
        summary="replay a workload on a simulated cluster, and compare policies",
        description="Replays a workload on a simulated cluster with the real decisions, and compares what policies make"
        " of it.",
        run=_simulate,
        examples=("simulate --nodes nodes.csv --pods pods.csv --policy binpack,agent-only",),
        add_arguments=_simulate_arguments,
        settings=_RESOURCE_SETTINGS,
    ),
    Command(
        name="completion",
        summary="print a script that makes your shell complete commands and flags",
        description="Prints a script that makes a shell complete commands and flags.",
        run=_completion,
        examples=("completion bash",),
        help_note=f"In a running bash: source <({PROGRAM} completion bash)",
        add_arguments=_completion_arguments,
    ),
    print_version(PROGRAM),
)

COMMAND_LINE: CommandLine = CommandLine(
    program=PROGRAM,
    purpose="lets pods share the NVIDIA GPUs of a Kubernetes node.",
    commands=COMMANDS,
    more=f"`{PROGRAM} COMMAND --help` explains one; `{PROGRAM} run --help` explains every setting.",
)
