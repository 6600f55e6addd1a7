"""Which interface has an address: in a network namespace with several of them, and what cannot be known."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.e2e import network

from regrow.agent.interfaces import interface_of

SETUP = (
    "ip link set lo up && ip link add left type veth peer name right && ip link set left up && ip link set right up"
    " && ip addr add 10.9.8.1/24 dev left && ip addr add 10.9.9.1/24 dev right && ip -6 addr add fd00:9::1/64 dev right nodad"
)
ASK = "import json, sys; from regrow.agent.interfaces import interface_of; print(json.dumps([interface_of(it) for it in sys.argv[1:]]))"


def test_loopback() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("localhost") == "lo"


@pytest.mark.parametrize("host", ["192.0.2.77", "2001:db8::77", "", "no such name", "two..dots", "x" * 80])
def test_what_no_interface_has_or_no_name_means(host: str) -> None:
    assert interface_of(host) == ""


@pytest.mark.skipif(bool(network.why_not()), reason=network.why_not() or "never")
def test_the_one_of_several_that_has_the_address() -> None:
    asked = ("10.9.8.1", "10.9.9.1", "fd00:9::1", "127.0.0.1", "10.9.8.2")
    words = " ".join(f"'{word}'" for word in (sys.executable, "-c", ASK, *asked))
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", f"{SETUP} && exec {words}"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["left", "right", "right", "lo", ""]
