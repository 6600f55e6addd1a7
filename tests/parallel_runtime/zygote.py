"""Runs jobs of several ranks each: imports torch once, then forks. Started by exec with a JSON file of jobs.

[{"name", "world", "call": "module:function", "keywords": {...}}, ...]; `keywords` may hold "{folder}", a fresh folder
of the job. Writes results.json: {name: {"codes": [...], "error": text}}.
"""

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel

import regrow.demo.reference  # noqa: F401 - what the children need

torch.set_num_threads(1)


def fill(value, folder):
    if isinstance(value, str):
        return value.replace("{folder}", str(folder)).replace("{root}", str(folder.parent))
    if isinstance(value, list):
        return [fill(entry, folder) for entry in value]
    return value


def child(job, rank, folder):
    output = os.open(folder / f"rank{rank}.out", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job["world"]), LOCAL_RANK=str(rank))
    code = 1
    try:
        module, name = job["call"].split(":")
        getattr(importlib.import_module(module), name)(**{key: fill(value, folder) for key, value in job["keywords"].items()})
        code = 0
    except BaseException:  # noqa: BLE001 - the parent reports it
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(job, root, limit):
    folder = root / job["name"]
    folder.mkdir()
    children = {}
    for rank in range(job["world"]):
        pid = os.fork()
        if pid == 0:
            child(job, rank, folder)
        children[pid] = rank
    codes = [None] * job["world"]
    deadline = time.monotonic() + limit
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
        if (pid and status) or time.monotonic() > deadline:
            for other in children:
                os.kill(other, 9)
            deadline = float("inf")
        if not pid:
            time.sleep(0.01)  # a poll between two kinds of event, not a wait for one
    error = "\n".join((folder / f"rank{rank}.out").read_text()[-3000:] for rank, code in enumerate(codes) if code not in (0, -9))
    return {"codes": codes, "error": error}


if __name__ == "__main__":
    jobs, root, limit = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), float(sys.argv[3])
    (root / "results.json").write_text(json.dumps({job["name"]: run(job, root, limit) for job in jobs}))
