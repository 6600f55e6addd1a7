"""Many members that are told to start by one decision, folded at once."""

from __future__ import annotations

import msgspec

from regrow.supervisor.core.actions import StartMember
from regrow.supervisor.core.view import Member, View

_change = msgspec.structs.replace


def more_members(view: View, nodes: list[str], action: StartMember, at: float) -> View:
    """The view after orders to start for `nodes` too, each with a number of its own, as folding them one by one would give it.

    Args:
        view: the first order of the start, `action`, is folded: the rendezvous address is in it, and its TCPStore is used up.
        nodes: the others that get the same order.
        action: the first order.
        at: when they are issued.
    """
    view = _change(view, next_seq=view.next_seq + len(nodes))
    job = view.jobs.get(action.job)
    current = job.generation if job is not None else None
    if job is None or current is None or current.number != action.generation:
        return view
    sent: dict[str, Member] = {name: _change(current.members[name], sent_at=at) for name in nodes if name in current.members}
    current = _change(current, members=current.members | sent, master_address=action.master_address)
    return _change(view, jobs=view.jobs | {action.job: _change(job, generation=current)})
