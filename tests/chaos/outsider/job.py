"""A job that hurts itself in ways that no order of the chaos runner knows: `echo VERB > ROOT/do-PID` makes that rank do it once."""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import regrow

INPUTS = 16


def parse() -> argparse.Namespace:
    """Command line of this script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--step-seconds", type=float, default=0.05)
    parser.add_argument("--eval-every", type=int, default=10)
    return parser.parse_args()


def verb(root: Path) -> str:
    """What this process was asked to do; empty: nothing. Asked once."""
    for name in (f"do-{os.getpid()}", "do-all"):
        with contextlib.suppress(OSError):
            word = (root / name).read_text().strip()
            if word and name != "do-all":  # empty: it is being written
                (root / name).unlink()
            return word
    return ""


def busy() -> None:
    """Keep a core busy for ever, as a spinning collective does."""
    while True:
        pass


def read_dry_pipe() -> None:
    """Read from a data pipe that nobody writes to."""
    reader, _writer = os.pipe()
    os.read(reader, 1)


def sleep_in_kernel() -> None:
    """Wait in the kernel (CLONE_VFORK) for a child that has a copy of every socket and lives for a minute."""
    if ctypes.CDLL(None).syscall(56, 0x4000 | signal.SIGCHLD, 0, 0, 0, 0) == 0:
        time.sleep(60)
        os._exit(0)


def open_all() -> None:
    """Open files until there are no more descriptors."""
    kept: list[int] = []
    while True:
        kept.append(os.open("/dev/null", os.O_RDONLY))


def many_threads() -> None:
    """Four hundred idle threads, and nowhere to write to."""
    for _ in range(400):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    os.closerange(1, 3)


def hoard() -> None:
    """Take memory until there is none."""
    kept: list[torch.Tensor] = []
    while True:
        kept.append(torch.ones(1 << 22))


def leak() -> None:
    """Leave a little more memory behind every few milliseconds, beside the training."""

    def more() -> None:
        kept: list[bytearray] = []
        while True:
            kept.append(bytearray(b"x" * (4 << 20)))
            time.sleep(0.01)

    threading.Thread(target=more, daemon=True).start()


def read_broken_file() -> None:
    """A read that the kernel answers with EIO: this process's own address 0."""
    with Path("/proc/self/mem").open("rb", buffering=0) as file:
        file.read(1)


def zombies() -> None:
    """A hundred children that end and that nobody waits for."""
    for _ in range(100):
        os.posix_spawn("/bin/true", ["true"], {})


def lost_helper() -> None:
    """A data loader's helper process is killed, and the loader says so."""
    helper = os.fork()
    if helper == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(helper, signal.SIGKILL)
    os.waitpid(helper, 0)
    raise RuntimeError(f"DataLoader worker (pid {helper}) is killed by signal: Killed. ")


def strangers(word: str) -> None:
    """Two hundred connections to whatever a process listens at over TCP; half of them say half a greeting, none is closed."""
    pid = int(word.removeprefix("strangers-"))
    sockets = {str(one.readlink()) for one in Path(f"/proc/{pid}/fd").iterdir() if one.is_symlink()}
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
            address = ("127.0.0.1", int(words[1].split(":")[1], 16))
            for number in range(200):
                peer = socket.create_connection(address, timeout=5)
                if number % 2:
                    peer.sendall(b"PRI * HTTP/2.0\r\n")
                KEPT.append(peer)


COMPUTE: dict[str, Callable[[], object]] = {
    "gil": lambda: ctypes.PyDLL("libc.so.6").pause(),  # a call into C that keeps the interpreter's lock
    "exit0": lambda: os._exit(0),
    "pipe": read_dry_pipe,
    "memory": hoard,
    "abort": os.abort,
    "spin": busy,
    "close": lambda: os.closerange(3, 256),
    "vfork": sleep_in_kernel,
    "files": open_all,
    "threads": many_threads,
    "nap": lambda: time.sleep(1.5),
    "extra": lambda: dist.all_reduce(torch.ones(1)),
    "deaf": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "cloop": lambda: collections.deque(itertools.repeat(0), maxlen=0),  # C code that never lets go of the interpreter's lock
    "leak": leak,
    "eio": read_broken_file,
    "zombies": zombies,
    "resolve": lambda: socket.getaddrinfo("datasets.invalid", 443),
    "loader": lost_helper,
    "flood": lambda: print("RuntimeError: CUDA error: uncorrectable ECC error encountered\n" * 20_000, flush=True),
}
"""What goes wrong inside a step."""

KEPT: list[socket.socket] = []
"""Connections of strangers."""


def hurt_result(word: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What is wrong after a step, without anybody crashing."""
    if word == "drift":
        with torch.no_grad():
            next(model.parameters()).mul_(1.0 + 1e-3)
    elif word == "rate":  # one rank's schedule is off
        optimizer.param_groups[0]["lr"] *= 1.5
    elif word == "moment":
        next(iter(optimizer.state.values()))["exp_avg_sq"].mul_(0.5)
    elif word == "swap":
        with torch.no_grad():
            first = next(model.parameters())
            first[0], first[1] = first[1].clone(), first[0].clone()


def main() -> None:
    """Train until the plan is over."""
    args = parse()
    run = regrow.attach(global_batch=24, micro_batch=2)
    root = Path.cwd()
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    model = torch.nn.Sequential(torch.nn.Linear(INPUTS, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    plan = run.batches(num_samples=4096)
    state = run.train_state(model=model, optimizer=optimizer, digest_every=1)
    state.restore()
    die_in_save = False
    late = crawl = 0.0
    for step in run.steps(args.steps):
        began = time.perf_counter()
        word = verb(root)
        if word == "raise":
            raise ValueError(f"bad record in step {step}")
        COMPUTE.get(word, partial(strangers, word) if "-" in word else _nothing)()
        crawl = 0.001 if word == "crawl" else crawl
        late = min(late + crawl, 0.04)
        loss = torch.zeros(())
        for micro in plan.step(step):
            rows = torch.tensor(micro.tolist(), dtype=torch.float32).unsqueeze(1)
            inputs = torch.sin(rows * torch.arange(1, INPUTS + 1) * 0.1)
            one = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).sum() / run.global_batch
            one.backward()
            loss += one.detach()
        gradient = next(model.parameters()).grad
        if word == "inf" and gradient is not None:
            gradient.view(-1)[3] = float("inf")
        time.sleep(max(0.0, args.step_seconds - (time.perf_counter() - began)) + late)
        run.computed()
        if run.world_size > 1:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            flat = torch.cat([*(g.reshape(-1) for g in gradients), loss.reshape(1)])
            dist.all_reduce(flat)
            *parts, loss = flat.split([*(g.numel() for g in gradients), 1])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        gradient = next(model.parameters()).grad
        if word == "sign" and gradient is not None:
            gradient.neg_()
        if word == "partial":
            next(model.parameters()).grad = None
        if word != "stale":
            optimizer.step()
        optimizer.zero_grad()
        hurt_result(word, model, optimizer)
        if word == "lock":  # a data loader's lock in an evaluation, with a busy core beside it
            threading.Thread(target=busy, daemon=True).start()
            with run.phase("eval"):
                lock = threading.Lock()
                lock.acquire()
                lock.acquire()
        if step % args.eval_every == 0:
            with run.phase("eval"), torch.no_grad():
                model(torch.zeros(64, INPUTS))
        die_in_save |= word == "die-in-save"
        if die_in_save:
            threading.Thread(target=_die_when_saving, args=(root,), daemon=True).start()
            die_in_save = False
        run.complete(step, loss=float(loss))


def _nothing() -> None:
    return None


def _die_when_saving(root: Path) -> None:
    """Killed in the middle of the next save: its folder is there already."""
    folder = root / "checkpoints"
    known = set(folder.glob("step-*"))
    while not set(folder.glob("step-*")) - known:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
