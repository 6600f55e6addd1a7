"""Which GPU is local rank k on? NVML's index, CUDA's ordinal and the device minor are three different numbers.

Everything here is by UUID and PCI address; a number that cannot be resolved gives no GPU rather than a wrong one.
"""

from __future__ import annotations

from collections.abc import Sequence

from regrow.wire import Device


def cuda_order(devices: Sequence[Device]) -> tuple[Device, ...]:
    """GPUs as CUDA numbers them with CUDA_DEVICE_ORDER=PCI_BUS_ID (torchrun users should set it): by PCI address."""
    return tuple(sorted(devices, key=lambda one: (one.pci_bus_id, one.uuid)))


def visible(devices: Sequence[Device], cuda_visible_devices: str | None) -> tuple[Device, ...]:
    """The GPUs that a process with this CUDA_VISIBLE_DEVICES has, in the order of its ordinals.

    Ordinals count in CUDA's order; UUIDs may be cut short as CUDA allows. As in CUDA, the first entry that names nothing
    ends the list. None (variable not set): all of them.
    """
    ordered = cuda_order(devices)
    if cuda_visible_devices is None:
        return ordered
    chosen: list[Device] = []
    for word in (part.strip() for part in cuda_visible_devices.split(",")):
        found = _named(ordered, word)
        if found is None or found in chosen:
            break
        chosen.append(found)
    return tuple(chosen)


def _named(ordered: Sequence[Device], word: str) -> Device | None:
    if word.isdigit():
        return ordered[int(word)] if int(word) < len(ordered) else None
    if not word.startswith(("GPU-", "MIG-")):
        return None
    matching = [one for one in ordered if one.uuid.startswith(word)]
    return matching[0] if len(matching) == 1 else None
