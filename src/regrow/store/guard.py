"""Exec wrapper: makes the program that it becomes die with its parent. Run as a script, by exec, with nothing imported.

    python -I -S guard.py PARENT_PID PROGRAM [ARGUMENT ...]

(A preexec_fn would run Python between fork and exec in a process that may have grpc's threads: never.)
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Set the parent-death signal and become the program."""
    parent, program = int(arguments[0]), arguments[1]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.stderr.write(f"guard: prctl: {os.strerror(ctypes.get_errno())}\n")
        sys.exit(71)
    if os.getppid() != parent:  # it died before the signal was set
        sys.exit(71)
    os.execv(program, arguments[1:])  # noqa: S606  (no shell is wanted)


if __name__ == "__main__":
    main(sys.argv[1:])
