"""Health check of a container: exit code 0 while the daemon in it answers. Reads the state folder, needs no token.

A supervisor is asked over HTTP (/healthz) at the address in its supervisor.json; an agent's socket must accept a connection.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import sys
import urllib.request
from pathlib import Path

LIMIT_SECONDS = 4.0


def supervisor(address: str) -> str:
    """Why it is not healthy; empty: it is. Its certificate is not checked: this is the loopback of its own container."""
    url = f"{address if '://' in address else 'http://' + address}/healthz"
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    with opener.open(url, timeout=LIMIT_SECONDS) as answer:
        return "" if json.load(answer)["ok"] else "it says that it is not well"


def agent(path: Path) -> str:
    """Why it is not healthy; empty: it is."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(LIMIT_SECONDS)
        client.connect(str(path))
    return ""


def main() -> int:
    """0: healthy."""
    found = False
    for name in ("REGROW_SUPERVISOR_STATE", "REGROW_AGENT_STATE"):
        state = Path(os.environ.get(name, "/state"))
        try:
            if name.startswith("REGROW_SUPERVISOR") and (state / "supervisor.json").exists():
                found, problem = True, supervisor(json.loads((state / "supervisor.json").read_text(encoding="utf-8"))["http"])
            elif name.startswith("REGROW_AGENT") and (state / "agent.sock").exists():
                found, problem = True, agent(state / "agent.sock")
            else:
                continue
        except (OSError, ValueError, KeyError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            print(f"not healthy: {problem}", file=sys.stderr)
            return 1
    if not found:
        print("not healthy: neither supervisor nor agent has begun to serve", file=sys.stderr)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
