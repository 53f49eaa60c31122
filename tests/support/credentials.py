"""Certificates, tokens and TCP addresses for tests of access."""

import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

from lab.harness.processes import free_port


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


def token_line(rights: str, token: str, name: str) -> str:
    return f"{rights} token-sha256:{hashlib.sha256(token.encode()).hexdigest()} {name}\n"


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


def make_authority(folder: Path, names: list[str], addresses: Sequence[str] = ()) -> None:
    """ca.pem, and NAME.pem with NAME.key for each name; all are for these IP addresses, too."""
    folder.mkdir(exist_ok=True)
    ip_names = "".join(f",IP:{address}" for address in addresses)
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    authority = ("-x509", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem")
    openssl(folder, "req", *key, *authority, "-subj", "/CN=ca")
    for name in names:
        request_options = ("-keyout", f"{name}.key", "-out", f"{name}.csr")
        openssl(folder, "req", *key, *request_options, "-subj", f"/CN={name}")
        (folder / "names").write_text(f"subjectAltName=DNS:{name},DNS:localhost{ip_names}")
        openssl(
            folder, "x509", "-req", "-days", "2", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey",
            "ca.key", "-CAcreateserial", "-extfile", "names", "-out", f"{name}.pem",
        )  # fmt: skip
