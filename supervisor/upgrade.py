"""Which version may write to the store: a cluster is upgraded under a running job, and a version that is too old keeps its hands off.

`/regrow/<cluster>/meta` holds the form of the keys and the least form that a writer must know. It is written once, by the first
leader, and raised by a version that has to write what older ones would misunderstand.
"""

from __future__ import annotations

import logging
from importlib import metadata

import msgspec

from regrow.errors import ConfigurationError
from regrow.store.base import Comparison, Put, Store, StoreError, mod_revision, version
from regrow.supervisor.keys import Keys

log = logging.getLogger("regrow.supervisor")

FORM = 1
"""Of the keys and values that this version writes. It rises when an older version would misunderstand them."""


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """/meta: what the store holds."""

    form: int = FORM
    least_writer: int = FORM
    """A supervisor that knows a lower form must not lead here."""
    written_by: str = ""
    """Version that raised it last."""


async def admit(store: Store, keys: Keys, comparison: Comparison | None) -> Meta:
    """Check that this version may write, and write down its form where none or a lower one is.

    Raises:
        ConfigurationError: the store was written by a newer version.
        StoreError: the store did not answer, or this term is over.
    """
    item = await store.get(keys.meta)
    found = Meta(form=0, least_writer=0)
    if item is not None:
        try:
            found = msgspec.json.decode(item.value, type=Meta)
        except msgspec.MsgspecError as error:
            raise ConfigurationError(
                f"{keys.meta} is not readable: {error}", where="store", hint="is this the right cluster? a newer version may read it"
            ) from error
    if found.least_writer > FORM:
        raise ConfigurationError(
            f"the store was written by Regrow {found.written_by} (form {found.least_writer}); this is {metadata.version('regrow')} (form {FORM})",
            where=keys.meta,
            hint=f"upgrade this supervisor to {found.written_by} or newer; to go back, restore etcd's backup from before the upgrade",
        )
    if found.form >= FORM:
        return found
    made = Meta(written_by=metadata.version("regrow"))
    same = mod_revision(keys.meta) == item.mod_revision if item is not None else version(keys.meta) == 0
    result = await store.transaction([same, *([comparison] if comparison else [])], [Put(keys.meta, msgspec.json.encode(made))])
    if not result.succeeded:
        raise StoreError("this leader's term is over", where=keys.meta)
    log.info("store form=%d was=%d", FORM, found.form)
    return made
