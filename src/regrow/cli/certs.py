"""`regrow certs`: an authority, certificates of nodes and supervisors, tokens of operators."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regrow.cli.output import Json, emit
from regrow.errors import ConfigurationError

if TYPE_CHECKING:
    from types import ModuleType

Folder = Annotated[Path, typer.Option("--dir", help="Folder with ca.pem and ca.key.")]
Days = Annotated[float, typer.Option(help="Life of the certificate, in days.")]
_CA_DAYS, _DAYS = 1825.0, 90.0
_WARN_DAYS = 14.0


def register(app: typer.Typer) -> None:
    """Add `certs`."""
    group = typer.Typer(help="Certificates and operators' tokens.", no_args_is_help=True, rich_markup_mode=None)
    group.command("ca", help="Make an authority: ca.pem, its list of revoked certificates ca.crl, and ca.key.")(_ca)
    group.command("renew-ca", help="A new authority; the older ones stay trusted until --forget-old.")(_renew_ca)
    group.command("issue", help="Make or renew the certificate of a node, supervisor, etcd member or etcd client.")(_issue)
    group.command("revoke", help="No certificate of this name is trusted any more, once ca.crl is copied to every host.")(_revoke)
    group.command("show", help="All certificates of a folder; exit 3 when one ends within two weeks, 1 when one has ended.")(_show)
    group.command("token", help="Make or replace an operator's token; it is printed once, the file keeps its digest.")(_token)
    app.add_typer(group, name="certs")


def _certificates() -> ModuleType:
    try:
        from regrow import certificates
    except ModuleNotFoundError as error:
        raise ConfigurationError("the package `cryptography` is missing", where="certs", hint="pip install 'regrow[security]'") from error
    return certificates


def _say(document: dict[str, Any], text: str, *, as_json: bool) -> None:
    emit(document, as_json=as_json, human=lambda: typer.echo(text))


def _ca(folder: Folder, days: Days = _CA_DAYS, as_json: Json = False) -> None:
    path = _certificates().make_authority(folder, days=days)
    _say(
        {"ca": str(path)},
        f"{path}, {path.with_suffix('.crl')}: copy both to every host; keep {folder / 'ca.key'} on this one",
        as_json=as_json,
    )


def _renew_ca(
    folder: Folder,
    days: Days = _CA_DAYS,
    forget_old: Annotated[bool, typer.Option("--forget-old", help="Do not renew: drop all but the newest authority.")] = False,
    as_json: Json = False,
) -> None:
    if forget_old:
        gone = _certificates().forget_old_authorities(folder)
        _say({"forgotten": gone}, f"{gone} older authorities are not trusted any more: copy ca.pem to every host", as_json=as_json)
        return
    path = _certificates().renew_authority(folder, days=days)
    _say(
        {"ca": str(path)},
        f"{path} trusts old and new: copy it everywhere, issue all certificates again, then --forget-old",
        as_json=as_json,
    )


def _issue(
    kind: Annotated[str, typer.Argument(help="node, supervisor, etcd or client.")],
    name: Annotated[str, typer.Argument(help="Name of the node (as its agent is called), supervisor, member or user.")],
    folder: Folder,
    host: Annotated[list[str] | None, typer.Option(help="DNS name or address under which it is reached; may be repeated.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the pair goes; default: --dir.")] = None,
    days: Days = _DAYS,
    as_json: Json = False,
) -> None:
    if kind not in ("node", "supervisor", "etcd", "client"):
        raise ConfigurationError(f"{kind!r} is not a kind of certificate", where="certs issue", hint="node, supervisor, etcd or client")
    certificate, key = _certificates().issue(folder, kind, name, hosts=tuple(host or ()), days=days, out=out)
    _say({"certificate": str(certificate), "key": str(key)}, f"{certificate}\n{key}", as_json=as_json)


def _revoke(
    name: Annotated[str, typer.Argument(help="Name of the node, supervisor, member or user.")], folder: Folder, as_json: Json = False
) -> None:
    count = _certificates().revoke(folder, name)
    text = f"{count} certificates of {name} revoked: copy {folder / 'ca.crl'} to every host; `regrow node cordon` for what is connected"
    _say({"name": name, "revoked": count}, text, as_json=as_json)


def _show(folder: Folder, as_json: Json = False) -> None:
    found = _certificates().summaries(folder)
    lines = [
        f"{one.days_left:8.1f} days  {one.file:<24} {'REVOKED ' if one.revoked else ''}{one.subject}  {' '.join(one.names)}".rstrip()
        for one in found
    ]
    emit({"certificates": found}, as_json=as_json, human=lambda: typer.echo("\n".join(lines or ["none"])))
    least = min((one.days_left for one in found if not one.revoked), default=_CA_DAYS)
    raise typer.Exit(1 if least <= 0 else 3 if least < _WARN_DAYS else 0)


def _token(
    name: Annotated[str, typer.Argument(help="Who it is for: the name that the journal shows.")],
    file: Annotated[Path, typer.Option(help="Token file of the supervisors; made when it is not there.")],
    role: Annotated[str, typer.Option(help="view, operate or admin.")] = "view",
    remove: Annotated[bool, typer.Option("--remove", help="Take the token away.")] = False,
    as_json: Json = False,
) -> None:
    from regrow.supervisor.auth import ROLES, make_token, remove_token

    if role not in ROLES:
        raise ConfigurationError(f"{role!r} is not a role", where="--role", hint=", ".join(ROLES))
    if remove:
        remove_token(file, name)
        _say({"name": name, "removed": True}, f"{name} is out", as_json=as_json)
        return
    token = make_token(file, name, role)
    _say({"name": name, "role": role, "token": token}, token, as_json=as_json)
