"""A part of the contract, run with etcd3 0.12 in an environment of its own: prints one JSON object of what happened.

    python etcd3_trial.py PORT CONTROL_FOLDER

The test that starts this breaks etcd when a file appears in the control folder, and says when it is done with another one.
"""

import contextlib
import json
import os
import queue
import sys
import threading
import time
from pathlib import Path

import etcd3

PORT, CONTROL = int(sys.argv[1]), Path(sys.argv[2])
found = {}


def ask(name):
    """Have the test do something to etcd, and wait until it is done."""
    (CONTROL / name).touch()
    while not (CONTROL / f"{name}.done").exists():
        time.sleep(0.02)


def connect():
    return etcd3.client(host="127.0.0.1", port=PORT, timeout=5)


def within(seconds, function):
    """What a function returned or raised, or "hangs"."""
    answers = queue.Queue()

    def run():
        try:
            answers.put(function())
        except Exception as error:  # noqa: BLE001  (whatever it is, it is the finding)
            answers.put(f"raises {type(error).__name__}")

    threading.Thread(target=run, daemon=True).start()
    try:
        return answers.get(timeout=seconds)
    except queue.Empty:
        return "hangs"


def basics():
    client = connect()
    client.put("/e3/a", b"1")
    ok = client.get("/e3/a")[0] == b"1"
    ok = (
        ok
        and client.transaction(
            compare=[client.transactions.version("/e3/b") == 0], success=[client.transactions.put("/e3/b", b"2")], failure=[]
        )[0]
    )
    lease = client.lease(5)
    client.put("/e3/c", b"3", lease=lease)
    lease.revoke()
    return bool(ok and client.get("/e3/c")[0] is None and len(list(client.get_prefix("/e3/"))) == 2)


def watch_over(event, key):
    """Does a watch deliver what was written after `event` happened?"""
    client = connect()
    seen = queue.Queue()
    client.add_watch_prefix_callback("/e3/", seen.put)
    client.put("/e3/before", b"")
    seen.get(timeout=10)
    ask(event)
    for _ in range(100):
        with contextlib.suppress(etcd3.exceptions.Etcd3Exception):
            connect().put(key, b"")
            break
        time.sleep(0.1)
    deadline = time.monotonic() + 8
    while time.monotonic() < deadline:
        try:
            response = seen.get(timeout=0.2)
        except queue.Empty:
            continue
        if isinstance(response, Exception):
            return f"tells {type(response).__name__}"
        if any(item.key == key.encode() for item in response.events):
            return "delivers"
    return "is silent"


def watch_from_compacted_revision():
    client = connect()
    for number in range(5):
        client.put("/e3/compacted", str(number).encode())
    revision = client.get("/e3/compacted")[1].mod_revision
    client.compact(revision)
    iterator, _ = client.watch_prefix("/e3/", start_revision=revision - 3)
    return f"event {next(iterator).key!r}"


def big_backlog():
    client = connect()
    client.put("/e3/begin", b"")
    start = client.get("/e3/begin")[1].mod_revision
    for number in range(60):
        client.put(f"/e3/big/{number:02d}", bytes(150_000))
    iterator, _ = client.watch_prefix("/e3/big/", start_revision=start)
    return sum(1 for _ in zip(range(60), iterator, strict=False))


found["basics"] = within(30, basics)
found["watch from a compacted revision"] = within(10, watch_from_compacted_revision)
found["backlog of 9 MB"] = within(20, big_backlog)
found["watch over a restart"] = within(60, lambda: watch_over("restart", "/e3/after"))
print(json.dumps(found), flush=True)
os._exit(0)  # its watch threads never end
