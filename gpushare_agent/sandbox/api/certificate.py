"""The certificate of the embedded API server: kubectl and client-go send a token over TLS alone.

Self-signed for the loopback names, made anew by the program `openssl` for each run. State owned: two files.
"""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

from msgspec import Struct

from gpushare_agent.model.errors import StartupError

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
        context.load_cert_chain(self.certificate, self.key)
        return context


def make_certificate(directory: Path) -> ServerCertificate | None:
    """`api-server.crt` and `api-server.key`, mode 0600. Blocks for some 30 ms. Raises StartupError.

    None where openssl is not installed: the sandbox needs it for kubectl alone.
    """
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
