"""Start of a process by exec where forking is not safe: tie it to its parent, then become the user's interpreter.

Run by path, with nothing imported but the standard library:
``python cold.py worker <parent pid> <nice> <cwd> -- argv...`` or ``python cold.py store <parent pid> <listener fd> <ready fd>``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Act on the command line."""
    kind, parent = arguments[0], int(arguments[1])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(137)
    if kind == "store":
        from regrow.agent.child import serve_store

        serve_store(int(arguments[2]), int(arguments[3]))
        return
    nice, folder, command = int(arguments[2]), arguments[3], arguments[5:]
    try:
        os.chdir(folder)
        if nice:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        os.execv(sys.executable, [sys.executable, *command])  # noqa: S606  # no shell is wanted
    except OSError as error:
        sys.stderr.write(f"regrow: worker cannot start: {error}\n")
        sys.exit(78)


if __name__ == "__main__":
    main(sys.argv[1:])
