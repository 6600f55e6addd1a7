"""Lists of certificates that are not trusted any more (CRLs, RFC 5280): ca.crl, beside the authority's ca.pem.

Not in the same file: etcd takes every block of its trusted-ca-file for a certificate and ends. A list does not run out before its
authority: one that does would cut everybody off at once.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import re
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from regrow.errors import ConfigurationError

_BLOCK = re.compile(rb"-----BEGIN X509 CRL-----.+?-----END X509 CRL-----\n?", re.DOTALL)
_BACKDATE = dt.timedelta(minutes=5)


def lists(content: bytes) -> list[x509.CertificateRevocationList]:
    """All lists in a PEM file."""
    return [x509.load_pem_x509_crl(block) for block in _BLOCK.findall(content)]


def made_by(one: x509.CertificateRevocationList, authority: x509.Certificate) -> bool:
    """Whether this authority signed the list."""
    key = authority.public_key()
    return isinstance(key, ec.EllipticCurvePublicKey) and one.issuer == authority.subject and one.is_signature_valid(key)


def make(authority: x509.Certificate, key: ec.EllipticCurvePrivateKey, serials: tuple[int, ...]) -> x509.CertificateRevocationList:
    """A list of these serial numbers, valid as long as the authority."""
    now = dt.datetime.now(dt.UTC)
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.subject)
        .last_update(now - _BACKDATE)
        .next_update(authority.not_valid_after_utc)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .add_extension(x509.CRLNumber(int(now.timestamp() * 1000)), critical=False)
    )
    for serial in serials:
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now - _BACKDATE).build()
        builder = builder.add_revoked_certificate(entry)
    return builder.sign(key, hashes.SHA256())


class Issued(msgspec.Struct, frozen=True):
    """One certificate that has not run out."""

    serial: int
    authority: int
    """Serial number of the authority's certificate."""


def remember(path: Path, name: str, certificate: x509.Certificate, authority: x509.Certificate) -> None:
    """One line for each certificate: serial number, authority, end, name. One that was renewed must be found again to be revoked.

    Raises:
        ConfigurationError: it cannot be written.
    """
    end = certificate.not_valid_after_utc.timestamp()
    line = f"{certificate.serial_number:x} {authority.serial_number:x} {end:.0f} {name}\n"
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), "w", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}", where="certs", hint="check --dir") from error


def valid(path: Path, name: str) -> list[Issued]:
    """Certificates of `name` that have not run out."""
    now = dt.datetime.now(dt.UTC).timestamp()
    found: list[Issued] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        words = line.split()
        with contextlib.suppress(ValueError):
            if len(words) == 4 and words[3] == name and float(words[2]) > now:
                found.append(Issued(int(words[0], 16), int(words[1], 16)))
    return found
