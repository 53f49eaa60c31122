"""Identifies the holder of an engine id: the engine that introduced itself under it.

The id itself is public.  An engine proves that it holds the id by the secret that it has chosen at
its start, or by the access entry by which it was admitted.
"""

import hashlib
import hmac
from dataclasses import dataclass

from controller.core.errors import InvalidEngineError
from controller.service.net.callers import Caller

_MAX_SECRET_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """Identifies an engine.

    access_key: key of an access entry, "" for none.  digest: of the secret, b"" for none.  origin:
    where the introduction came from, for the audit.
    """

    access_key: str = ""
    digest: bytes = b""
    origin: str = ""

    @classmethod
    def from_caller(cls, caller: Caller, secret: str) -> "EngineIdentity":
        """Makes the identity of a caller.  Raises InvalidEngineError if the secret is too long."""
        if len(secret) > _MAX_SECRET_CHARACTERS:
            raise InvalidEngineError(
                f"engine_secret has {len(secret)} characters: at most {_MAX_SECRET_CHARACTERS}",
                field_path="engine_secret",
            )
        digest = hashlib.sha256(secret.encode()).digest() if secret else b""
        return cls(caller.access_key, digest, caller.origin)

    def is_same(self, other: "EngineIdentity") -> bool:
        """Returns whether both are the same engine."""
        if self.has_same_secret(other):
            return True
        return bool(self.access_key) and self.access_key == other.access_key

    def has_same_secret(self, other: "EngineIdentity") -> bool:
        """Returns whether both are the same process, or processes that share a secret."""
        return bool(self.digest) and hmac.compare_digest(self.digest, other.digest)


# The identity of an engine that has neither a secret nor an access entry.
ANONYMOUS = EngineIdentity()
