"""Authentication of the embedded API server: clients need the token of the sandbox's kubeconfig, which has mode 0600.

A pod of image `sandbox/host` is a command that runs with the rights of the sandbox's user, while every user of the machine
reaches the port, and so does every page in a browser of that user. So a request needs the token, a Host header of this
server (a foreign name that resolves to 127.0.0.1 has another), and a body of a type that a page cannot send by itself.
Versions and health are open, as in a real API server. kubectl and client-go send a token over TLS alone, so the program
`openssl` makes a self-signed certificate for each run. State owned: two files.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import shutil
import ssl
import subprocess
from pathlib import Path

from aiohttp import web
from msgspec import Struct

from gpushare_agent.core.model.errors import StartupError
from gpushare_agent.sandbox.api.responses import RefusedRequest

OPEN_PATHS = frozenset({"/version", "/healthz", "/livez", "/readyz"})
_HOST_NAMES = ("127.0.0.1", "localhost", "[::1]")
_TYPES = re.compile(r"application/(([a-z0-9.-]+\+)?json|apply-patch\+yaml|vnd\.kubernetes\.protobuf)")
_KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters:
- name: sandbox
  cluster: {cluster}
users:
- name: sandbox
  user: {{token: "{token}"}}
contexts:
- name: sandbox
  context: {{cluster: sandbox, user: sandbox}}
current-context: sandbox
"""


def check_access(request: web.Request, port: int, authorization: str) -> None:
    """Raises RefusedRequest for a request that is not admitted: `authorization` is the header that a client must send."""
    # First: a page of a foreign name that resolves to 127.0.0.1 must not even learn what is served here.
    if request.headers.getall("Host", []) not in [[f"{name}:{port}"] for name in _HOST_NAMES]:
        named = request.headers.get("Host", "")
        message = f"the Host header {named!r} is not this server's: ask for 127.0.0.1:{port} or localhost:{port}"
        raise RefusedRequest(403, "Forbidden", message)
    # As a real API server: its probes come without credentials.
    if request.path not in OPEN_PATHS and not _is_known(request.headers.getall("Authorization", []), authorization):
        raise RefusedRequest(401, "Unauthorized", "Unauthorized")
    # A browser's form can send text/plain to any address. It sends JSON only after a preflight, which is refused here.
    if request.body_exists and _TYPES.fullmatch(request.content_type) is None:
        text = f"the body of the request is {request.content_type}; accepted are application/json and its patches"
        raise RefusedRequest(415, "UnsupportedMediaType", text)


def _is_known(sent: list[str], expected: str) -> bool:
    # In constant time, and only with one header: with two it is not clear which counts.
    return len(sent) == 1 and hmac.compare_digest(sent[0].encode("utf-8", "surrogateescape"), expected.encode())


def write_kubeconfig(path: Path, url: str, token: str, certificate: Path | None = None) -> None:
    """A new file, in place of whatever has its name; never readable for others, not even for a moment. Raises OSError.

    The certificate is named, not copied: kubernetes-asyncio would write a copy to a file that a kill leaves behind.
    """
    # Removed first: O_EXCL below takes no file of others, and no link.
    path.unlink(missing_ok=True)
    trusted = {} if certificate is None else {"certificate-authority": str(certificate)}
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "w") as text:
        text.write(_KUBECONFIG.format(cluster=json.dumps({"server": url, **trusted}), token=token))


_CONFIGURATION = """\
[req]
distinguished_name = name
x509_extensions = extensions
prompt = no
[name]
CN = gpushare-agent sandbox
[extensions]
basicConstraints = critical, CA:TRUE
keyUsage = critical, digitalSignature, keyCertSign
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = IP:127.0.0.1, IP:::1, DNS:localhost
"""
_DAYS = 365
_TIMEOUT_S = 20.0


class ServerCertificate(Struct, frozen=True, kw_only=True):
    """Two PEM files. The certificate is its own authority, and what clients are to trust."""

    certificate: Path
    key: Path

    def server_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        # No client certificates: clients are known by their token.
        context.load_cert_chain(self.certificate, self.key)
        return context


def make_certificate(directory: Path) -> ServerCertificate | None:
    """`api-server.crt` and `api-server.key`, mode 0600. Blocks for some 30 ms. Raises StartupError.

    None where openssl is not installed: the sandbox needs it for kubectl alone.
    """
    # The tutorial asks for Python and git: without openssl the sandbox serves plain HTTP, which kubectl alone cannot use.
    if shutil.which("openssl") is None:
        return None
    made = ServerCertificate(certificate=directory / "api-server.crt", key=directory / "api-server.key")
    for file in (made.certificate, made.key):
        file.unlink(missing_ok=True)  # openssl would keep the mode of a file that is there
    command = ["openssl", "req", "-x509", "-config", "/dev/stdin", "-days", str(_DAYS), "-nodes", "-newkey", "ec",
        "-pkeyopt", "ec_paramgen_curve:prime256v1", "-keyout", str(made.key), "-out", str(made.certificate)]  # fmt: skip
    try:
        subprocess.run(  # noqa: S603 - the arguments are constants and paths of ours
            command, input=_CONFIGURATION, text=True, capture_output=True, check=True, umask=0o077, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip()
        raise StartupError(
            f"the certificate of the sandbox's API server cannot be made by `openssl`: {said}"
        ) from error
    return made
