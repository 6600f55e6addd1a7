"""An authority of one's own and the certificates that it signs: elliptic curve P-256, written atomically, keys for their owner only."""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import os
from pathlib import Path
from typing import Literal

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from regrow import revocation, security
from regrow.errors import ConfigurationError
from regrow.ids import check_name

Kind = Literal["node", "supervisor", "etcd", "client"]
CA_FILE, CA_KEY, CRL_FILE, ISSUED_FILE = "ca.pem", "ca.key", "ca.crl", "issued"
_BACKDATE = dt.timedelta(minutes=5)
"""Clocks of hosts differ."""


class Summary(msgspec.Struct, frozen=True):
    """One certificate of a folder."""

    file: str
    subject: str
    names: tuple[str, ...]
    not_after: str
    days_left: float
    authority: bool
    revoked: bool = False


def make_authority(folder: Path, *, days: float, name: str = "regrow") -> Path:
    """ca.pem and ca.key in a new or empty folder.

    Raises:
        ConfigurationError: there is one already: replacing it would cut off everybody at once.
    """
    if (folder / CA_FILE).exists():
        raise ConfigurationError(
            f"{folder / CA_FILE} is there already", where="certs ca", hint="renew with `regrow certs renew-ca`, or use another --dir"
        )
    return _write_authority(folder, days=days, name=name, older=b"")


def renew_authority(folder: Path, *, days: float, name: str = "regrow") -> Path:
    """A new authority that signs from now on; ca.pem keeps the older ones, so that both are trusted while certificates are replaced.

    Raises:
        ConfigurationError: there is none to renew.
    """
    older = _read(folder / CA_FILE)
    return _write_authority(folder, days=days, name=name, older=older)


def forget_old_authorities(folder: Path) -> int:
    """Keep the newest authority only; how many went. The end of a rotation."""
    certificates = x509.load_pem_x509_certificates(_read(folder / CA_FILE))
    own = [found for found in _lists(folder) if revocation.made_by(found, certificates[0])]
    _write(folder / CA_FILE, certificates[0].public_bytes(serialization.Encoding.PEM), mode=0o644)
    if own:
        _write_lists(folder, own)
    return len(certificates) - 1


def _write_authority(folder: Path, *, days: float, name: str, older: bytes) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} authority {os.urandom(3).hex()}")])
    made = (
        _builder(subject, subject, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(folder / CA_KEY, _pem(key), mode=0o600)
    # From the beginning, so that who listens checks lists from the beginning. But where one authority has a list all must have one,
    # and none can be made for an older one, whose key is gone.
    found = _lists(folder)
    if not older or found:
        _write_lists(folder, [*(found if older else []), revocation.make(made, key, ())])
    _write(folder / CA_FILE, made.public_bytes(serialization.Encoding.PEM) + older, mode=0o644)
    return folder / CA_FILE


def issue(folder: Path, kind: Kind, name: str, *, hosts: tuple[str, ...], days: float, out: Path | None = None) -> tuple[Path, Path]:
    """NAME.pem and NAME.key, signed by the authority in `folder`. Over an existing pair: renewed, used at the next handshake.

    `hosts` are DNS names and addresses under which the holder is reached. `kind` etcd and client have no role of ours.

    Raises:
        ConfigurationError: no authority, a bad name, or an authority that has run out.
    """
    check_name(kind, name)
    authority, signing = _authority(folder)
    if authority.not_valid_after_utc < dt.datetime.now(dt.UTC):
        raise ConfigurationError(f"the authority in {folder} has run out", where="certs", hint="regrow certs renew-ca")
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = [_host(host) for host in hosts]
    if kind in ("node", "supervisor"):
        names.append(x509.UniformResourceIdentifier(f"regrow:{kind}:{name}"))
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if kind != "client" else [])]
    builder = (
        _builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), authority.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    made = builder.sign(signing, hashes.SHA256())
    target = out or folder
    paths = (target / f"{name}.pem", target / f"{name}.key")
    revocation.remember(folder / ISSUED_FILE, name, made, authority)
    _write(paths[1], _pem(key), mode=0o600)
    _write(paths[0], made.public_bytes(serialization.Encoding.PEM), mode=0o644)
    return paths


def revoke(folder: Path, name: str) -> int:
    """No certificate that `name` has is trusted any more; how many there were. ca.crl is the list: copy it to every host.

    Raises:
        ConfigurationError: none was issued under this name that is still valid.
    """
    authority, signing = _authority(folder)
    certificates = x509.load_pem_x509_certificates(_read(folder / CA_FILE))
    issued = revocation.valid(folder / ISSUED_FILE, name)
    serials = {one.serial for one in issued if one.authority == authority.serial_number}
    older = {one.serial_number for one in certificates[1:]}
    if not issued:
        raise ConfigurationError(f"{name!r} has no valid certificate", where="certs revoke", hint="regrow certs show")
    found = _lists(folder)
    others = [one for one in found if not revocation.made_by(one, authority)]
    if any(one.authority in older for one in issued) or not all(
        any(revocation.made_by(one, old) for one in found) for old in certificates[1:]
    ):
        raise ConfigurationError(
            "an older authority is still trusted whose key is gone, so that nothing of it can be revoked",
            where="certs revoke",
            hint="finish the rotation first, which leaves out all that it signed: regrow certs renew-ca --forget-old",
        )
    known = {entry.serial_number for one in found if revocation.made_by(one, authority) for entry in one}
    made = revocation.make(authority, signing, tuple(sorted(known | serials)))
    _write_lists(folder, [*others, made])
    return len(serials - known)


def _lists(folder: Path) -> list[x509.CertificateRevocationList]:
    path = folder / CRL_FILE
    return revocation.lists(_read(path)) if path.exists() else []


def _write_lists(folder: Path, lists: list[x509.CertificateRevocationList]) -> None:
    _write(folder / CRL_FILE, b"".join(one.public_bytes(serialization.Encoding.PEM) for one in lists), mode=0o644)


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The newest one, and its key."""
    signing = serialization.load_pem_private_key(_read(folder / CA_KEY), password=None)
    if not isinstance(signing, ec.EllipticCurvePrivateKey):
        raise ConfigurationError(f"{folder / CA_KEY} is not an elliptic curve key", where="certs", hint="make one by `regrow certs ca`")
    return x509.load_pem_x509_certificates(_read(folder / CA_FILE))[0], signing


def summaries(folder: Path) -> list[Summary]:
    """Every certificate in the folder's .pem files, soonest end first.

    Raises:
        ConfigurationError: the folder cannot be read, or a .pem file holds no certificate.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is not a folder", where="certs show", hint="give the --dir of `regrow certs ca`")
    found: list[Summary] = []
    revoked = {entry.serial_number for one in _lists(folder) for entry in one}
    for path in sorted(folder.glob("*.pem")):
        try:
            certificates = x509.load_pem_x509_certificates(path.read_bytes())
        except ValueError as error:
            raise ConfigurationError(f"{path} holds no certificate: {error}", where="certs show", hint="move it elsewhere") from error
        found += [_summary(path, one, revoked=one.serial_number in revoked) for one in certificates]
    return sorted(found, key=lambda one: one.days_left)


def _summary(path: Path, one: x509.Certificate, *, revoked: bool) -> Summary:
    names: tuple[str, ...] = ()
    with contextlib.suppress(x509.ExtensionNotFound):
        names = tuple(str(item.value) for item in one.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    left = (one.not_valid_after_utc - dt.datetime.now(dt.UTC)).total_seconds() / 86400.0
    authority = bool(one.extensions.get_extension_for_class(x509.BasicConstraints).value.ca)
    return Summary(path.name, one.subject.rfc4514_string(), names, one.not_valid_after_utc.isoformat(), round(left, 2), authority, revoked)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float) -> x509.CertificateBuilder:
    if not 0 < days <= 3650:
        raise ConfigurationError(f"{days} days", where="--days", hint="give days above 0 and up to 3650")
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATE)
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}", where="certs", hint="make it by `regrow certs ca`") from error


def _write(path: Path, content: bytes, *, mode: int) -> None:
    security.write_whole(path, content, mode=mode, where="certs")
