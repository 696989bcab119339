"""The command line: argv and environment → settings → an app → an exit code.

Exit codes: 0 done, 1 it could not be done, 2 the command line, a variable or the settings file is wrong, 130 interrupted.
Each command imports its app only when it runs: the way from process start to registration stays short.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from gpushare_agent import __version__
from gpushare_agent.cli.completion_words import completion_command
from gpushare_agent.cli.kubectl import PLUGIN_LINE
from gpushare_agent.cli.line import PROGRAM, Command, CommandLine, make_parser, parse, run_app
from gpushare_agent.cli.operator import operator_commands
from gpushare_agent.kit.logs import setup_logging
from gpushare_agent.settings.settings import LoadedSettings, Settings, load_settings

_DRIVER_VOLUME_HELP = f"""\
example:
  {PROGRAM} driver-volume --check

settings that it uses, each also a variable and a key of the YAML file:
  --volume-config                  what to collect, and where the volumes go
  --driver-volume.root             where the host's file system is
  --driver-volume.control-library  the library that limits shares

All other settings are accepted too; `{PROGRAM} run --help` explains them.
"""


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return COMMAND_LINE.main(arguments, os.environ if environ is None else environ)


def _run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = make_parser(
        "run",
        "Runs the node agent until SIGTERM or SIGINT. SIGHUP reads the settings again.",
        argv,
        examples=[f"{PROGRAM} run --config /etc/gpushare-agent/settings.yaml --log.level debug"],
        has_all_settings=True,
    )
    _, flags = parse(parser, argv)

    def reload() -> Settings:
        settings = load_settings(flags, environ).settings
        setup_logging(settings.log.level, settings.log.format)
        return settings

    settings = reload()
    from gpushare_agent.agent.agent import run as run_agent

    return run_app(run_agent(settings, reload=reload))


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        choices=("table", "json", "yaml", "markdown"),
        default="table",
        help="table for people, json with sources, yaml as a settings file, markdown for the reference of all settings",
    )


def _config(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = make_parser(
        "config",
        "Prints the settings in effect and where each came from.",
        argv,
        examples=[f"{PROGRAM} config --config settings.yaml -o yaml"],
        has_all_settings=True,
    )
    _config_arguments(parser)
    options, flags = parse(parser, argv)
    from gpushare_agent.cli import show_settings

    loaded: LoadedSettings = load_settings(flags, environ)
    print(show_settings.render(loaded, options.output), end="")
    return 0


def _text_or_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="text for people, or one JSON document"
    )


def _check(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = make_parser(
        "check",
        "Tells what of this node is in place for the agent, and the cure for what is not.",
        argv,
        examples=[f"{PROGRAM} check --isolation mps"],
    )
    _text_or_json(parser)
    options, flags = parse(parser, argv)
    settings = load_settings(flags, environ).settings
    setup_logging("error", settings.log.format)  # the report says it all
    from gpushare_agent.cli.check import check as node_check

    return run_app(node_check.run(settings, output=options.output))


def _driver_volume_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="tell what would be done, and change nothing")
    parser.add_argument("--prune", action="store_true", help="remove old versions that no container has mounted")
    _text_or_json(parser)


def _driver_volume(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = make_parser("driver-volume", "Collects the driver's libraries and programs for containers to mount.", ())
    parser.epilog = _DRIVER_VOLUME_HELP
    _driver_volume_arguments(parser)
    options, flags = parse(parser, argv)
    settings = load_settings(flags, environ).settings
    setup_logging(settings.log.level, settings.log.format)
    from gpushare_agent.cli import driver_volume

    return driver_volume.run(settings, check=options.check, prune=options.prune, output=options.output)


def _cdi_arguments(parser: argparse.ArgumentParser) -> None:
    from gpushare_agent.cli import cdi

    cdi.add_arguments(parser)


def _cdi(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = make_parser(
        "cdi",
        "Names the node's GPUs for container runtimes by CDI, and tells who names them.",
        argv,
        examples=[f"{PROGRAM} cdi generate --check"],
    )
    _cdi_arguments(parser)
    options, flags = parse(parser, argv)
    settings = load_settings(flags, environ).settings
    setup_logging("error", settings.log.format)  # the report says it all
    from gpushare_agent.cli import cdi

    return run_app(cdi.run(settings, action=options.action, check=options.check, output=options.output))


def _vdevice_arguments(parser: argparse.ArgumentParser) -> None:
    from gpushare_agent.isolation.vcuda import client as vdevice_client

    vdevice_client.add_arguments(parser, {})


def _vdevice(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Needs no settings: it runs inside a container that has a share."""
    from gpushare_agent.isolation.vcuda import client as vdevice_client

    return vdevice_client.run(argv, environ, program=f"{PROGRAM} vdevice")


def _mps_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="ask the daemon once, whoever keeps it: 0 when it serves")


def _mps(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = make_parser(
        "mps",
        "Keeps NVIDIA's MPS control daemon on this node until SIGTERM or SIGINT.",
        argv,
        examples=[f"{PROGRAM} mps --check"],
    )
    _mps_arguments(parser)
    options, flags = parse(parser, argv)
    settings = load_settings(flags, environ).settings
    setup_logging("error" if options.check else settings.log.level, settings.log.format)
    from gpushare_agent.cli import mps_supervisor

    return run_app(mps_supervisor.check(settings) if options.check else mps_supervisor.run(settings))


def _extender(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = make_parser(
        "extender",
        "Runs the scheduler extender until SIGTERM or SIGINT: kube-scheduler asks it which nodes have room on a GPU.",
        argv,
        examples=[f"{PROGRAM} extender --extender.addr 0.0.0.0 --extender.leader-elect=false"],
    )
    _, flags = parse(parser, argv)
    settings = load_settings(flags, environ).settings
    setup_logging(settings.log.level, settings.log.format)
    from gpushare_agent.extender import app as extender

    return run_app(extender.run(settings))


def _sandbox_arguments(parser: argparse.ArgumentParser) -> None:
    from gpushare_agent.cli import sandbox

    sandbox.add_arguments(parser)


def _sandbox(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    from gpushare_agent.cli import sandbox

    words, inner_command = sandbox.split_inner_command(argv)
    parser = make_parser(
        "sandbox",
        "Runs the agent on an embedded node: no cluster, no GPU, no root.",
        words,
        examples=[f"{PROGRAM} sandbox --cards 4 --samples fitting"],
    )
    _sandbox_arguments(parser)
    options, flags = parse(parser, words)
    return run_app(sandbox.run(options, flags, inner_command))


def _simulate_arguments(parser: argparse.ArgumentParser) -> None:
    from gpushare_agent.cli import simulate

    simulate.add_arguments(parser)


def _simulate(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = make_parser(
        "simulate",
        "Replays a workload on a simulated cluster with the real decisions, and compares what policies make of it.",
        argv,
        examples=[
            f"{PROGRAM} simulate --nodes 200 --generate 20000 --plot policies.png",
            f"{PROGRAM} simulate --nodes nodes.csv --pods pods.csv --policy binpack,agent-only -o json",
        ],
    )
    _simulate_arguments(parser)
    options, flags = parse(parser, argv)
    settings = load_settings(flags, environ).settings
    setup_logging("error", settings.log.format)  # the output says it all
    from gpushare_agent.cli import simulate

    return simulate.run(options, settings)


def _cordon_arguments(parser: argparse.ArgumentParser) -> None:
    from gpushare_agent.cli import cordon

    cordon.add_arguments(parser, has_reason=True)


def _uncordon_arguments(parser: argparse.ArgumentParser) -> None:
    from gpushare_agent.cli import cordon

    cordon.add_arguments(parser, has_reason=False)


def _cordon(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = make_parser(
        "cordon",
        "Takes a GPU out of service: pods that run on it go on, no new pod gets it. Needs root on the node.",
        argv,
        examples=[f"{PROGRAM} cordon 3 --reason 'fan replaced on Monday'", f"{PROGRAM} cordon --list"],
    )
    _cordon_arguments(parser)
    return _ask_agent("cordon", parser, argv, environ)


def _uncordon(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = make_parser(
        "uncordon",
        "Puts a GPU back in service, and ends its wait for a reset. Needs root on the node.",
        argv,
        examples=[f"{PROGRAM} uncordon 3"],
    )
    _uncordon_arguments(parser)
    return _ask_agent("uncordon", parser, argv, environ)


def _ask_agent(action: str, parser: argparse.ArgumentParser, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    options, flags = parse(parser, argv)
    if not options.gpu and not options.list:
        parser.error("name a GPU: its index, its UUID or the beginning of it; --list prints the GPUs")
    settings = load_settings(flags, environ).settings
    from gpushare_agent.cli import cordon

    return cordon.run(action, options, settings.control.socket)


def _version(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    make_parser("version", "Prints the version.", ()).parse_args(argv)
    print(f"{PROGRAM} {__version__}")
    return 0


COMMANDS: tuple[Command, ...] = (
    Command(name="run", summary="run the node agent", run=_run),
    *operator_commands(is_plugin=False),
    Command(
        name="config",
        summary="print the settings in effect and where each came from",
        run=_config,
        add_arguments=_config_arguments,
    ),
    Command(
        name="check",
        summary="tell what of this node is in place, and the cure for what is not",
        run=_check,
        add_arguments=_text_or_json,
    ),
    Command(
        name="driver-volume",
        summary="collect the driver's files for containers to mount",
        run=_driver_volume,
        add_arguments=_driver_volume_arguments,
    ),
    Command(
        name="cdi",
        summary="name the GPUs for container runtimes by CDI, and tell who names them",
        run=_cdi,
        add_arguments=_cdi_arguments,
    ),
    Command(
        name="vdevice",
        summary="inside a container: register, and print its limits and PIDs",
        run=_vdevice,
        add_arguments=_vdevice_arguments,
        takes_settings=False,
    ),
    Command(
        name="mps", summary="keep NVIDIA's MPS control daemon on this node", run=_mps, add_arguments=_mps_arguments
    ),
    Command(
        name="extender",
        summary="run the scheduler extender, for kube-scheduler to ask where a GPU has room",
        run=_extender,
    ),
    Command(
        name="cordon",
        summary="take a GPU out of service; running pods go on",
        run=_cordon,
        add_arguments=_cordon_arguments,
    ),
    Command(
        name="uncordon",
        summary="put a GPU back in service, and end its wait for a reset",
        run=_uncordon,
        add_arguments=_uncordon_arguments,
    ),
    Command(
        name="sandbox",
        summary="try the agent on an embedded node, without a cluster or a GPU",
        run=_sandbox,
        add_arguments=_sandbox_arguments,
    ),
    Command(
        name="simulate",
        summary="replay a workload on a simulated cluster, and compare policies",
        run=_simulate,
        add_arguments=_simulate_arguments,
    ),
    completion_command(lambda: (COMMAND_LINE, PLUGIN_LINE)),
    Command(name="version", summary="print the version", run=_version, takes_settings=False),
)

COMMAND_LINE: CommandLine = CommandLine(
    program=PROGRAM,
    purpose="lets pods share the NVIDIA GPUs of a Kubernetes node.",
    commands=COMMANDS,
    more=f"`{PROGRAM} COMMAND --help` tells more; `{PROGRAM} run --help` explains every setting.",
)
