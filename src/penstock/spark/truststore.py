"""The certificates that this machine trusts, in the form that Java reads.

A JRE that comes as a package brings certificates of its own and knows nothing of those that the machine was given, say for a package mirror
behind a company's proxy. Python does know them. The format is Java's JKS: certificates in the clear, and a digest against damage.
"""

from __future__ import annotations

import hashlib
import ssl
import struct
from collections.abc import Iterable

PASSWORD = "changeit"
"""Java's own default. It protects nothing: the certificates are public."""

_MAGIC = 0xFEEDFEED
_VERSION = 2
_TRUSTED_CERTIFICATE = 2
_DIGEST_SALT = b"Mighty Aphrodite"


def system_certificates() -> list[bytes]:
    """The DER form of every certificate authority that Python trusts by default; empty where it cannot list them."""
    return sorted(ssl.create_default_context().get_ca_certs(binary_form=True))


def jks(certificates: Iterable[bytes]) -> bytes:
    """A key store that holds `certificates` as trusted. The same certificates give the same bytes."""
    entries = [_entry(number, certificate) for number, certificate in enumerate(certificates)]
    body = struct.pack(">III", _MAGIC, _VERSION, len(entries)) + b"".join(entries)
    return body + hashlib.sha1(PASSWORD.encode("utf-16-be") + _DIGEST_SALT + body, usedforsecurity=False).digest()


def _entry(number: int, certificate: bytes) -> bytes:
    created_millis = 0
    return b"".join(
        (
            struct.pack(">I", _TRUSTED_CERTIFICATE),
            _text(f"ca-{number}"),
            struct.pack(">q", created_millis),
            _text("X.509"),
            struct.pack(">I", len(certificate)),
            certificate,
        )
    )


def _text(value: str) -> bytes:
    encoded = value.encode("ascii")
    return struct.pack(">H", len(encoded)) + encoded
