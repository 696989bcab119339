"""The commands for one node's set-up and service: check, driver-volume, cdi, vdevice, mps, cordon, uncordon.

Each imports its module only when it runs: the time from process start to registration stays short.
"""

from __future__ import annotations

import argparse
from functools import partial

from gpushare_agent.cli.command_line import PROGRAM, Command, Invocation, add_output, run_app

_GPU_SETTINGS = ("driver", "simulated")


def _check(call: Invocation) -> int:
    settings = call.settings(log_level="error")
    from gpushare_agent.cli.check import check as node_check

    return run_app(node_check.run(settings, form=call.options.output))


def _driver_volume_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="print what would be done, and change nothing")
    parser.add_argument("--prune", action="store_true", help="remove old versions that no container has mounted")
    add_output(parser)


def _driver_volume(call: Invocation) -> int:
    settings, options = call.settings(), call.options
    from gpushare_agent.cli import driver_volume

    return driver_volume.run(settings, check=options.check, prune=options.prune, form=options.output)


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
    settings = call.load().settings
    from gpushare_agent.cli import cordon

    return cordon.run(action, call.options, settings.control.socket)


NODE_COMMANDS: tuple[Command, ...] = (
    Command(
        name="check",
        summary="check what of this node is in place, and print the cure for what is not",
        description="Checks what of this node is in place for the agent, and prints the cure for what is not.",
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
)
