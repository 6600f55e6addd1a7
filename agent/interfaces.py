"""The network interface of an address: what gloo has to be told on a host with several, or whose name means loopback."""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
"""ioctl number of <linux/sockios.h>: the IPv4 address of an interface."""
_IF_INET6 = Path("/proc/net/if_inet6")


def interface_of(host: str) -> str:
    """Name of this machine's interface that has the address; empty when none has it, or the name means none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # no such name; a label that is empty or too long
        return ""
    wanted = {str(item[4][0]) for item in found}
    return next((name for _, name in socket.if_nameindex() if _ipv4(name) in wanted), "") or _ipv6(wanted)


def _ipv4(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # it has none
            return ""
    return socket.inet_ntoa(answer[20:24])


def _ipv6(wanted: set[str]) -> str:
    """/proc/net/if_inet6: address without colons, index, prefix length, scope, flags, name."""
    try:
        lines = _IF_INET6.read_text(encoding="ascii").splitlines()
    except OSError:
        return ""
    for line in lines:
        digits, *_, name = line.split()
        if socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)) in wanted:
            return name
    return ""
