"""Forks ranks from a process that has torch imported: a rank starts in milliseconds instead of ten seconds.

Reads one JSON request a line ({"script", "env", "cwd", "log"}), answers {"pid"}; tells exits as {"pid", "code"}. Ends with
its standard input and kills what is left.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import signal
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    import torch
    import torch.distributed.device_mesh
    import torch.distributed.elastic.multiprocessing.errors
    import torch.distributed.tensor

    torch.set_num_threads(1)
    torch.optim.Adam([torch.nn.Parameter(torch.empty(1))])
    children: set[int] = set()
    wake, wakened = os.pipe()
    os.set_blocking(wakened, False)
    signal.set_wakeup_fd(wakened, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    say({"ready": True})
    buffer = b""
    while True:
        readable, _, _ = select.select([0, wake], [], [])
        if wake in readable:
            os.read(wake, 4096)
            reap(children)
        if 0 not in readable:
            continue
        data = os.read(0, 1 << 20)
        if not data:
            break
        buffer += data
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(wake)
                os.close(wakened)
                become(request)
                return
            children.add(pid)
            say({"pid": pid})
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def become(request: dict[str, Any]) -> None:
    """The child: run the script as `python script` would, then end like an interpreter, but quickly."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = [request["script"]]
    sys.path[0] = str(Path(request["script"]).parent)
    code: object = 0
    try:
        runpy.run_path(request["script"], run_name="__main__")
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException as error:  # noqa: BLE001 - as an interpreter does
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)  # the interpreter's own end costs two seconds


def reap(children: set[int]) -> None:
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            children.discard(pid)
            say({"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def say(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
