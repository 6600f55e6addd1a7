#!/bin/sh
# All checks that need an NVIDIA GPU, in one short run (about two minutes): real NVML, digest speed, device-to-host staging, a snapshot,
# NCCL re-initialisation, and kill -> memory free -> context -> first GEMM. Prints one JSON line a check; exit 1 if one fails.
# Not run by CI. Without a GPU it says so and exits with 3.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo '{"check": "gpu", "skipped": "no CUDA device"}'; exit 3; }
status=0
step() { "$python" - || { echo "{\"check\": \"$1\", \"failed\": true}"; status=1; }; }

step nvml <<'P'
import json
from regrow.agent.health.prober import probe_once
sample = probe_once(deadline_seconds=20.0, fake_state=None)
print(json.dumps({"check": "nvml", "devices": [device.uuid for device in sample.devices]}))
assert sample.devices
P

step digest <<'P'
import json, time, torch
from regrow.agent.worker.digest import Digester
digester = Digester(7); tensor = torch.randn(2**26, device="cuda"); value = digester.tensor(tensor)
torch.cuda.synchronize(); start = time.perf_counter(); again = digester.tensor(tensor); seconds = time.perf_counter() - start
print(json.dumps({"check": "digest", "gb_per_second": tensor.nbytes / seconds / 1e9}))
assert value == again == digester.tensor(tensor.cpu())
P

step staging <<'P'
import json, time, torch
source = torch.randn(2**28, device="cuda"); target = torch.empty(2**28, pin_memory=True); stream = torch.cuda.Stream()
for _ in range(2):
    torch.cuda.synchronize(); start = time.perf_counter()
    with torch.cuda.stream(stream): target.copy_(source, non_blocking=True)
    stream.synchronize(); seconds = time.perf_counter() - start
print(json.dumps({"check": "staging", "gb_per_second": source.nbytes / seconds / 1e9}))
assert torch.equal(target[:1000], source[:1000].cpu())
P

step snapshot <<'P'
import json, mmap, time, torch
from regrow.ckpt.flatten import Item
from regrow.ckpt.layout import Box, lay_out
from regrow.ckpt.snapshot import Snapshotter
value = torch.randn(2**16, 2**11, device="cuda"); box = Box("w", "float32", tuple(value.shape), (0, 0), tuple(value.shape))
image = lay_out([box]); arenas = [mmap.mmap(-1, image.plan.file_bytes) for _ in range(2)]
made = Snapshotter(image, arenas); made.bind({"w": Item(box, value)}); times = []
for arena in (0, 1, 0):
    torch.cuda.synchronize(); start = time.perf_counter(); value.add_(1.0); assert made.copy(arena) is None; times.append(time.perf_counter() - start)
(chunk,) = image.plan.chunks; stored = torch.frombuffer(arenas[0], dtype=torch.float32, offset=chunk.at, count=value.numel()).view_as(value)
print(json.dumps({"check": "snapshot", "gb_per_second": value.nbytes / times[-1] / 1e9, "pinned": stored.is_pinned()}))
assert torch.equal(stored, value.cpu()) and stored.is_pinned()
P

step nccl <<'P'
import json, os, time, torch, torch.distributed as dist
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1"); times = []
for _ in range(3):
    start = time.perf_counter(); dist.init_process_group("nccl", device_id=torch.device("cuda:0")); x = torch.ones(4, device="cuda")
    dist.all_reduce(x); torch.cuda.synchronize(); dist.destroy_process_group(); times.append(time.perf_counter() - start)
print(json.dumps({"check": "nccl_reinit", "seconds": times}))
P

step restart <<'P'
import json, subprocess, sys, time, torch
code = "import torch; x = torch.randn(2**28, device='cuda'); y = torch.randn(4096, 4096, device='cuda'); (y @ y).sum().item(); print('ready', flush=True); import time; time.sleep(600)"
def begin():
    start = time.perf_counter(); child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"; return child, time.perf_counter() - start
child, first = begin(); before = torch.cuda.mem_get_info()[0]
child.kill(); start = time.perf_counter(); child.wait()
while torch.cuda.mem_get_info()[0] < before + 2**29: assert time.perf_counter() - start < 60
free = time.perf_counter() - start; child, again = begin(); child.kill(); child.wait()
print(json.dumps({"check": "restart", "cold_start_seconds": first, "kill_to_memory_free_seconds": free, "start_to_gemm_seconds": again}))
P
exit $status
