"""`gpushare-agent sandbox`: the agent on an embedded node, to try it or to check it in a script.

Here: the arguments, and the commands for a running sandbox; sandbox/run.py runs one. With `exec` this process enters a
container of the sandbox and becomes the command.

Exit codes: 0 done, 1 not every pod runs or a part failed, 2 a manifest or an argument is wrong. `exec` ends as its command
does; with 1 it cannot run there, 126 it is not executable, 127 it was not found.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpushare_agent.core.cli.command_line import Argument, add_output, arg, one_of, runnable
from gpushare_agent.sandbox.behaviour import KUBERNETES_VERSIONS
from gpushare_agent.sandbox.control import Answer, Request, ask
from gpushare_agent.sandbox.gpu_faults import LOST_REASON
from gpushare_agent.sandbox.held_port import free_port
from gpushare_agent.sandbox.manifests import SAMPLE_SETS, ManifestError, read_manifests, sample_manifests
from gpushare_agent.sandbox.state_directory import NodePaths, default_state_directory

__all__ = ["add_arguments", "run", "split_inner_command"]

_OF_GPUS = ("--gpus", "--gpu-memory-mib", "--topology")
"""Settings of the agents that --node-gpus stands for."""
_MIG_GPU, _MIG_GPU_MIB = "NVIDIA H100 80GB HBM3", 81_559
_MOST_NODES = 32
_MOST_GPUS = 64
_GPUS = re.compile(r"([0-9]{1,2})x([0-9]{1,9})")


_OPTIONS = (
    arg("--nodes N", "nodes, each with an agent (1, or as many as --node-gpus has)", type=int),
    arg("--node-gpus CxM[,CxM...]", "GPUs of the nodes in turn and their memory in MiB: 8x24576,4x16384 or 2x24576+1x81920"),
    arg("--extender", "run the scheduler extender too, which the embedded scheduler asks"),
    arg("--dra", "offer the GPUs (all, or those of --dra.gpus) by ResourceClaims; the samples are claims then"),
    arg("--mig", "--dra with H100s, half of them in MIG mode: instances are made when a claim wants them"),
    arg("--apply FILE|DIR", "manifests, created in file order; - is standard input", action="append", type=Path, default=[]),
    arg("--samples", "sample pods; fitting: without the one that cannot run; waiting: that alone (default: all, with "
        "--apply none)", choices=SAMPLE_SETS),
    arg("--once", "wait until every pod runs, has ended or fits nowhere, print, clean up; exit 0 if all are Running or "
        "Succeeded, else 1 (also with the sample pod that cannot fit)"),
    add_output,  # of --once, with progress on standard error, and of status
    arg("--state-dir DIR", "sockets and files (%(default)s)", type=Path, default=default_state_directory()),
    arg("--port PORT", "the agent's web port (default 5678; 0 takes a free one)", type=int),
    arg("--kubelet-version", "whose behaviour to show (%(default)s)", choices=KUBERNETES_VERSIONS, default="1.36"),
)  # fmt: skip
_NODE = arg("--node NAME", "which node, where there are several", default=None)
_EXEC_USAGE = "gpushare-agent sandbox exec [-n NAMESPACE] [-c CONTAINER] POD [--] COMMAND [ARGUMENT...]"
_COMMANDS: Mapping[str, tuple[str, str, tuple[Argument, ...]]] = {
    "apply": ("create the pods and claims of a manifest", "", (
        arg("-f --file FILE|DIR", "manifests of Pods and claims; a directory's files by name; - is standard input; again "
            "for more", dest="files", action="append", type=Path, required=True),
    )),
    "delete": ("delete pods", "", (
        arg("names NAME", "a pod's name, or NAMESPACE/NAME", nargs="+"),
        arg("-n --namespace NAMESPACE", "of the pods (%(default)s)", default="default"),
    )),
    "exec": ("run one more process in a container", "", (
        arg("pod POD", "its name, or NAMESPACE/NAME"),
        arg("-c --container CONTAINER", "default: the pod's first main container", default=None),
        arg("-n --namespace NAMESPACE", "of the pod (%(default)s)", default="default"),
        arg("-i --stdin", "as with kubectl; the command has this terminal anyway"),
        arg("-t --tty", "likewise"),
    )),
    "restart-kubelet": ("stop and start the embedded kubelet; containers run on", "", (_NODE,)),
    "kill-agent": ("SIGKILL the agent; the sandbox starts it again", "", (_NODE,)),
    "kill-extender": ("SIGKILL the extender; the sandbox starts it again", "", ()),
    "fail-gpu": (
        "make a simulated GPU fail",
        "Makes a simulated GPU fail, as the driver would report it. `status` shows the agent's reaction a few seconds "
        "later: the GPU's units are Unhealthy, running pods go on, new ones go elsewhere.",
        (
            arg("gpu INDEX", "of the GPU, as `status` counts them", type=int),
            one_of(
                arg("--xid N", "the driver reports this Xid error, once; 79: the GPU fell off the bus, 94: a contained "
                    "memory error, 31: a program's own fault, which is ignored", type=int),
                arg("--lost REASON", "the driver no longer finds the GPU, for this reason; the default, with the reason "
                    f"{LOST_REASON!r}", default=None),
            ),
            _NODE,
        ),
    ),
    "heal-gpu": (
        "undo fail-gpu",
        "Ends the loss of a GPU; after an Xid error lets the driver see the GPU reset. It is Healthy again when it has "
        "passed the agent's probes (--health.recovery-probes, --health.recovery-period-s).",
        (arg("gpu INDEX", "of the GPU", type=int), _NODE),
    ),
    "status": ("print GPUs and pods", "", ()),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for argument in _OPTIONS:
        argument(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands for a sandbox that runs")
    for name, (text, description, arguments) in _COMMANDS.items():
        usage = _EXEC_USAGE if name == "exec" else None
        command = commands.add_parser(name, help=text, description=description or None, usage=usage)
        for argument in arguments:
            argument(command)
        # Suppressed: a default here would override a value before the command.
        command.add_argument("--state-dir", type=Path, default=argparse.SUPPRESS, help="of the running sandbox")
    add_output(commands.choices["status"], default=argparse.SUPPRESS)


async def run(args: argparse.Namespace, extra_agent_flags: list[str], inner_command: Sequence[str] = ()) -> int:
    """Returns the exit code; `exec` does not return where it works. Raises AgentError for what a person must change.

    `inner_command` is the second part of `split_inner_command`.
    """
    try:
        if args.command is not None:
            return await _run_command(args, extra_agent_flags, inner_command)
        # Instances on demand are claims' alone.
        args.dra = args.dra or args.mig
        if args.dra and (args.extender or args.kubelet_version != "1.36"):
            raise ManifestError("--dra needs kubelet 1.36, and the scheduler that asks an extender knows no claims")
        # A person with pods of their own wants to see only these.
        samples = args.samples or ("none" if args.apply else "all")
        manifests = [*read_manifests(args.apply), *sample_manifests(samples, by_claims=args.dra, has_mig=args.mig)]
        from gpushare_agent.sandbox import run as sandbox_run  # not for the commands: it takes most of a second

        plan = sandbox_run.Plan(
            state=args.state_dir, kubelet_version=args.kubelet_version, flags=tuple(_agent_flags(args, extra_agent_flags)),
            manifests=tuple(manifests), is_once=args.once, form=args.output, node_flags=node_flags(args, extra_agent_flags),
            has_extender=args.extender, has_mig=args.mig,
        )  # fmt: skip
        return await sandbox_run.run(plan)
    except ManifestError as error:
        _print_error(str(error))
        return 2


def _print_error(text: str) -> None:
    print(f"gpushare-agent sandbox: {text}", file=sys.stderr)


def _agent_flags(args: argparse.Namespace, extra: list[str]) -> list[str]:
    flags = []
    if args.port is not None:
        flags.append(f"--web.port={args.port or free_port()}")
    if args.dra:
        flags.append("--dra.gpus=all")
    if args.mig:
        flags += [f"--simulated.gpu-name={_MIG_GPU}", f"--gpu-memory-mib={_MIG_GPU_MIB}", "--mig.on_demand=all"]
    # Of a flag that is given twice the last counts.
    return [*flags, *extra]


def node_flags(args: argparse.Namespace, extra: Sequence[str] = ()) -> tuple[tuple[str, ...], ...]:
    """The flags of each node: its GPUs, and for all but the first a web port of its own. `extra` are those of all. Raises
    ManifestError."""
    entries = args.node_gpus.split(",") if args.node_gpus else []
    count = args.nodes if args.nodes is not None else max(1, len(entries))
    if not 1 <= count <= _MOST_NODES:
        raise ManifestError(f"--nodes {count}: there can be 1 to {_MOST_NODES}; a real cluster is for more")
    if len(entries) > count:
        raise ManifestError(f"--node-gpus has {len(entries)} entries for {count} nodes: leave some out, or add --nodes")
    if entries and any(word.partition("=")[0] in _OF_GPUS for word in extra):
        raise ManifestError("--node-gpus has everything about the GPUs: leave out --gpus, --gpu-memory-mib, --topology")
    gpus = [_gpus_flags(entry) for entry in entries]
    # The first node keeps the setting's port, which the documentation names.
    ports = [(), *((f"--web.port={free_port()}",) for _ in range(count - 1))]
    # Fewer entries than nodes are used in turn.
    return tuple((*(gpus[number % len(gpus)] if gpus else ()), *ports[number]) for number in range(count))


def _gpus_flags(entry: str) -> tuple[str, ...]:
    """`2x24576+1x81920`: kinds of GPUs of one node."""
    sizes: list[str] = []
    for kind in entry.split("+"):
        match = _GPUS.fullmatch(kind.strip())
        if match is None or not 1 <= int(match[1]) <= _MOST_GPUS:
            raise ManifestError(f"--node-gpus: {entry!r} must be COUNTxMIB, such as 8x24576, several joined by +")
        sizes += [match[2]] * int(match[1])
    if len(sizes) > _MOST_GPUS:
        raise ManifestError(f"--node-gpus: {entry!r} has {len(sizes)} GPUs; a node can have {_MOST_GPUS}")
    return (f"--simulated.gpus={len(sizes)}", f"--simulated.gpu-memory-mib={','.join(sizes)}")


# --- a command for a running sandbox ---


async def _run_command(args: argparse.Namespace, extra: list[str], inner_command: Sequence[str]) -> int:
    # Flags of settings are for agents, and the running ones have theirs already.
    if extra:
        raise ManifestError(f"unknown arguments for {args.command}: {' '.join(extra)}")
    if args.command == "exec" and not inner_command:
        raise ManifestError("exec: no command: say what to run behind the pod's name, such as `exec POD -- sh`")
    # The options of a command have the names of the request's fields.
    request = {name: value for name in Request.__struct_fields__ if (value := getattr(args, name, None)) is not None}
    if args.command == "apply":
        request["pods"] = [manifest.raw for manifest in read_manifests(args.files)]
    # Absolute, because the answer names the path to a person in another directory.
    socket = NodePaths(state=args.state_dir.absolute()).control_socket
    answer: Answer = await ask(socket, request, program=runnable())
    if args.command == "status" and answer["ok"]:
        from gpushare_agent.sandbox.render import print_document

        print_document(answer["document"], args.output, has_addresses=True)
    for line in answer["lines"]:
        print(line, flush=True)  # before the errors, where both go to one place
    for error in answer["errors"]:
        _print_error(error)
    if args.command == "exec" and answer["ok"]:
        # On standard error: standard output is the command's.
        for note in answer["notes"]:
            print(note, file=sys.stderr)
        return become(inner_command, answer["env"])
    # A manifest or a name that is wrong, as before the start: 2.
    return 0 if answer["ok"] else 2 if answer.get("is_rejected") else 1


# --- exec ---

NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""A shell's exit codes for a command that it cannot run."""

_LONE_OPTIONS = frozenset({"--once", "--help", "--stdin", "--tty", "-h", "-i", "-t"})
"""The flags of the sandbox and of exec that take no value."""


def split_inner_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of the sandbox, and those of the command that `exec` runs, which are no options of ours.

    The command begins after `--`, or with the first word after the pod's name.
    """
    words: list[int] = []  # where those stand that are neither options nor their values
    position = 0
    while position < len(argv) and len(words) < 3:
        word = argv[position]
        if word == "--" and words:
            return list(argv[:position]), list(argv[position + 1 :])
        if not word.startswith("-") or word == "-":
            words.append(position)
            # The other commands take no words of somebody else's.
            if argv[words[0]] != "exec":
                return list(argv), []
        # The value of an option is no word, or `-n default` would be the pod.
        position += 2 if _wants_value(word) and argv[position + 1 : position + 2] != ["--"] else 1
    if len(words) < 3:
        return list(argv), []
    return list(argv[: words[2]]), list(argv[words[2] :])


def _wants_value(word: str) -> bool:
    """Whether the next word belongs to this one: not in `--name=value`, `-cvalue`, `-it`."""
    is_whole = "=" not in word if word.startswith("--") else len(word) == 2
    return word.startswith("-") and is_whole and word not in _LONE_OPTIONS


def become(command: Sequence[str], inside: Mapping[str, str]) -> int:
    """Replaces this process by the command, with the container's environment. Returns, with an exit code, only where that
    fails."""
    environment = _environment(inside, os.environ)
    # What Python holds back is lost with the process.
    sys.stdout.flush()
    sys.stderr.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what is ignored stays so
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), environment)  # noqa: S606 - what the person asks for, as it stands
    # NotADirectoryError too: a part of PATH may be a file.
    except (FileNotFoundError, NotADirectoryError):
        print(f"gpushare-agent sandbox: {command[0]}: command not found", file=sys.stderr)
        return NOT_FOUND
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        print(f"gpushare-agent sandbox: {command[0]}: cannot be run: {reason}", file=sys.stderr)
        return NOT_EXECUTABLE


def _environment(inside: Mapping[str, str], caller: Mapping[str, str]) -> dict[str, str]:
    """The container's, the caller's terminal, and at the end of PATH where `gpushare-agent` is installed."""
    terminal = {"TERM": caller["TERM"]} if "TERM" in caller else {}
    scripts = sysconfig.get_path("scripts")
    # An empty PATH would search the current directory.
    places = (inside.get("PATH") or os.defpath).split(os.pathsep)
    path = os.pathsep.join(places if scripts in places else [*places, scripts])
    # The container's own variables win, also TERM where its image sets it.
    return {**terminal, **inside, "PATH": path}
