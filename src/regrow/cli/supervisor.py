"""`regrow supervisor`: the daemon that decides."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regrow.cli.output import Json, emit
from regrow.errors import ConfigurationError

if TYPE_CHECKING:
    from regrow.supervisor.actuators.config import ActuatorConfig
    from regrow.supervisor.config import SupervisorConfig
    from regrow.supervisor.core.policy import Policy


def register(app: typer.Typer) -> None:
    """Add `supervisor`."""
    app.command("supervisor")(supervisor)


def supervisor(
    cluster: Annotated[str | None, typer.Option(help="Name of the cluster.")] = None,
    store: Annotated[str | None, typer.Option(help="Store URL: etcd://HOST:PORT[,HOST:PORT].", envvar="REGROW_STORE")] = None,
    state: Annotated[str | None, typer.Option(help="Folder for the journal and supervisor.json.")] = None,
    beat: Annotated[str | None, typer.Option(help="HOST:PORT for agents; port 0: a free one.")] = None,
    http: Annotated[str | None, typer.Option(help="HOST:PORT of the API and /metrics.")] = None,
    advertise: Annotated[str | None, typer.Option(help="Host under which agents reach this supervisor.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of this supervisor.")] = None,
    ttl: Annotated[float | None, typer.Option(help="Leader lease in seconds: a standby takes over within it.")] = None,
    archive: Annotated[str | None, typer.Option(help="PostgreSQL URL that gets every journal entry once.")] = None,
    adopt: Annotated[
        bool | None, typer.Option("--adopt", help="Rebuild an emptied or older store from what agents run and from storage.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with [supervisor], [policy] and [actuators].")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print every setting and where it came from, and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Run a supervisor: leads the cluster, or stands by until the leader is gone."""
    from regrow.supervisor import config as settings
    from regrow.supervisor.actuators import config as actuators

    flags = {
        "cluster": cluster,
        "store": store,
        "state": state,
        "beat": beat,
        "http": http,
        "advertise": advertise,
        "name": name,
        "ttl": ttl,
        "archive": archive,
        "adopt": adopt,
    }
    loaded, policy, story = settings.load(config, flags)
    orders, more = actuators.load(config)
    story += [dataclasses.replace(item, field=f"actuators.{item.field}") for item in more]
    if explain:
        rows = [{"field": item.field, "value": item.value, "source": item.source} for item in story]
        emit({"settings": rows}, as_json=as_json, human=lambda: _print(rows))
        return
    _serve(loaded, policy, orders)


def _print(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        sys.stdout.write(f"{row['field']} = {row['value']!r}  ({row['source']})\n")


def _serve(config: SupervisorConfig, policy: Policy, orders: ActuatorConfig) -> None:
    import asyncio
    import logging

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname).1s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    asyncio.run(_main(config, policy, orders))


async def _main(config: SupervisorConfig, policy: Policy, orders: ActuatorConfig) -> None:
    import asyncio
    import contextlib
    import os
    import signal

    from regrow import notify
    from regrow.processes import wake_at_lifeline_end
    from regrow.supervisor.service import Supervisor

    manager = notify.from_environment()
    service = Supervisor(config, policy, actuators=orders, on_serving=manager.ready, on_leaving=manager.stopping)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.stop)
    lifeline = os.environ.get("REGROW_LIFELINE", "")
    if lifeline:
        if not lifeline.isdigit():
            raise ConfigurationError(f"REGROW_LIFELINE = {lifeline!r} is not a file descriptor", where="environment")

        def ended() -> None:
            with contextlib.suppress(BlockingIOError):
                if os.read(int(lifeline), 1) == b"":
                    loop.remove_reader(int(lifeline))
                    service.stop()
                    loop.call_later(1.5, os._exit, 1)

        wake_at_lifeline_end()
        loop.add_reader(int(lifeline), ended)
    await service.run()
