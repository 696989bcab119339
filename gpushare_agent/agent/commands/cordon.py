"""`gpushare-agent cordon` and `uncordon`: have the running agent take a GPU out of service or put it back.

They ask it through its control socket (gpus/control_server.py). Exit codes: 0 done, 1 it could not be done, 2 the GPU
was named wrongly.
"""

from __future__ import annotations

import http.client
import json
import shlex
import socket
from pathlib import Path
from typing import Any

from msgspec import Struct

from gpushare_agent.core.cli.command_line import Form, Invocation
from gpushare_agent.core.cli.render_text import grid, print_as
from gpushare_agent.core.kit.logs import write_stderr
from gpushare_agent.core.kit.sockets import connectable_path
from gpushare_agent.core.model.errors import Unavailable

TIMEOUT_S = 15.0
MAX_ANSWER_BYTES = 1 << 20
WRONG_NAME = (400, 404, 409)


class Answer(Struct, frozen=True, kw_only=True):
    status: int
    document: dict[str, Any]


def run(action: str, call: Invocation) -> int:
    """`action` is cordon or uncordon; without `options.gpu` the GPUs are listed. Raises Unavailable where none answers."""
    options = call.options
    # Without logging: standard output and error are the answer to a person.
    path = options.socket or call.load().settings.control.socket
    if path is None:
        raise Unavailable(
            f"cannot {action} a GPU: the setting control.socket is empty, so the agent has no such socket"
        )
    if options.list:
        return _print_gpus(ask(path, "GET", "/gpus"), options.output)
    if not options.gpu:
        write_stderr(
            f"gpushare-agent: {action}: name a GPU: its index (of a MIG instance 0:1), its UUID or its beginning; "
            "--list prints the GPUs\n"
        )
        return 2
    request = {"gpu": options.gpu} | ({"reason": options.reason} if action == "cordon" else {})
    answer = ask(path, "POST", f"/{action}", request)
    # The GPU was named wrongly, not at all, or ambiguously: exit code 2, as a mistake of the command line.
    if answer.status in WRONG_NAME:
        write_stderr(f"gpushare-agent: cannot {action} the GPU: {answer.document.get('error', '')}\n")
        return 2
    _check(answer, f"{action} the GPU")
    reach = f" --socket {shlex.quote(str(options.socket))}" if options.socket else ""
    print(reported(action, answer.document, reach))
    return 0


def reported(action: str, document: dict[str, Any], reach: str = "") -> str:
    """What happened and what it means. `reach` is what a command needs to reach the same agent."""
    gpu = document["gpu"]
    name = f"GPU {gpu['label']} ({gpu['uuid']})"
    if action == "cordon":
        already = "" if document["changed"] else "already "
        lines = [
            f"{name} is {already}cordoned{': ' + gpu['cordoned'] if gpu['cordoned'] else ''}.",
            f"Pods that run on it go on; no new pod gets it, until `gpushare-agent uncordon {gpu['label']}{reach}`.",
        ]
    elif not document["changed"]:
        lines = [f"{name} was not cordoned and waits for no reset; nothing was changed."]
    else:
        lines = [f"{name} is in service again."] if gpu["is_healthy"] else [f"{name} is no longer cordoned."]
        if document["ended_wait"]:
            lines.append(f"It had waited for a reset since {document['ended_wait']}; that wait is ended.")
    if action == "uncordon" and not gpu["is_healthy"]:
        lines.append(f"It is Unhealthy still: {_reason(gpu) or 'cordoned'}.")
    # The cordon holds now, but the agent could not write its state file.
    if document["not_kept"]:
        lines.append(f"This is forgotten when the agent ends, because it could not be written: {document['not_kept']}")
    return "\n".join(lines)


def ask(path: Path, method: str, target: str, request: dict[str, Any] | None = None) -> Answer:
    """One request to the agent. Raises Unavailable where none answers."""
    try:
        # A socket's address has 108 bytes at most; a path may have more.
        with connectable_path(path) as address:
            connection = _UnixConnection(address)
            try:
                connection.request(method, target, json.dumps(request) if request is not None else None)
                response = connection.getresponse()
                content = response.read(MAX_ANSWER_BYTES)
            finally:
                connection.close()
        document = json.loads(content)
    except (FileNotFoundError, ConnectionRefusedError) as e:
        raise Unavailable(
            f"no agent listens at {path}: start it, or name its control socket with --socket (the setting control.socket)"
        ) from e
    # Before OSError: the socket is for root, and that is what the person has to know.
    except PermissionError as e:
        raise Unavailable(f"the control socket {path} cannot be opened: {e.strerror}; ask as root") from e
    except (OSError, http.client.HTTPException, ValueError) as e:
        raise Unavailable(f"the agent at {path} did not answer as it should: {e!r}; see its log") from e
    if not isinstance(document, dict):
        raise Unavailable(f"what listens at {path} is no agent: its answer is no JSON object")
    return Answer(status=response.status, document=document)


# Not aiohttp, which alone takes 190 ms to load, for one request.
class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, address: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._address = address

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(self._address)


def _check(answer: Answer, what: str) -> None:
    if answer.status != http.client.OK:
        raise Unavailable(f"cannot {what}: {answer.document.get('error', f'HTTP {answer.status}')}")


def _print_gpus(answer: Answer, form: Form) -> int:
    _check(answer, "list the GPUs")
    rows = [(gpu["label"], gpu["uuid"], _health(gpu), _reason(gpu) or "-") for gpu in answer.document["gpus"]]
    print_as(form, answer.document, lambda _: [grid(("GPU", "UUID", "HEALTH", "REASON"), rows, right=("GPU",))])
    return 0


def _health(gpu: dict[str, Any]) -> str:
    """As every view, with the state of a GPU that is not healthy: `Cordoned, Unhealthy (needs-reset)`."""
    cordoned = [] if gpu["cordoned"] is None else ["Cordoned"]
    # A MIG instance may be healthy on a GPU that is not.
    unhealthy = [f"Unhealthy ({gpu['state']})" if gpu["state"] != "healthy" else "Unhealthy"] if gpu["reason"] else []
    return ", ".join([*cordoned, *unhealthy]) or "Healthy"


def _reason(gpu: dict[str, Any]) -> str:
    """The operator's words, and what is wrong with the GPU itself."""
    return "; also, ".join(filter(None, (gpu["cordoned"], gpu["reason"])))
