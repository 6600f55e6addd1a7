"""Plans that ship with the package."""

from __future__ import annotations

BUILT_IN: dict[str, str] = {
    "smoke": """
name = "smoke"
[cluster]
nodes = 3
[[fault]]
kind = "worker_kill"
[[fault]]
kind = "nvml_noise"
xid = 31
quiet_seconds = 5
[[fault]]
kind = "nvml_xid"
xid = 79
""",
    "gpu": """
name = "gpu"
[cluster]
nodes = 5
[[fault]]
kind = "nvml_noise"
xid = 13
[[fault]]
kind = "nvml_ecc"
[[fault]]
kind = "nvml_hang"
[[fault]]
kind = "nvml_lost"
[[fault]]
kind = "nvml_recovery"
""",
    "daemons": """
name = "daemons"
[cluster]
nodes = 3
[[fault]]
kind = "agent_kill"
[[fault]]
kind = "supervisor_kill"
[[fault]]
kind = "etcd_kill"
[[fault]]
kind = "writer_kill"
[[fault]]
kind = "shim_kill"
""",
    "storage": """
name = "storage"
[cluster]
nodes = 3
[[fault]]
kind = "storage_gone"
quiet_seconds = 12
[[fault]]
kind = "checkpoint_flip"
""",
    "silence": """
name = "silence"
[cluster]
nodes = 3
[[fault]]
kind = "agent_pause"
quiet_seconds = 8
[[fault]]
kind = "supervisor_pause"
quiet_seconds = 8
[[fault]]
kind = "etcd_pause"
quiet_seconds = 8
""",
    "network": """
name = "network"
[cluster]
nodes = 3
[job]
kind = "small"
hang_seconds = 15
[[fault]]
kind = "net_cut"
[[fault]]
kind = "net_one_way"
[[fault]]
kind = "net_delay"
delay_seconds = 1.5
[[fault]]
kind = "net_slow"
rate = 4000
[[fault]]
kind = "clock_shift"
shift_seconds = 600
[[fault]]
kind = "clock_shift"
shift_seconds = -86400
""",
    "packets": """
name = "packets"
[cluster]
nodes = 3
[job]
kind = "small"
hang_seconds = 8
[[fault]]
kind = "net_loss"
ratio = 0.02
quiet_seconds = 20
[[fault]]
kind = "net_rate"
rate = 1000000
quiet_seconds = 20
[[fault]]
kind = "data_cut"
""",
    "disk": """
name = "disk"
[cluster]
nodes = 3
[job]
kind = "small"
[[fault]]
kind = "disk_full"
[[fault]]
kind = "disk_eio"
[[fault]]
kind = "disk_slow"
delay_seconds = 3
""",
    "hangs": """
name = "hangs"
[cluster]
nodes = 3
[job]
kind = "small"
hang_seconds = 8
hang_phase_seconds = { eval = 8, save = 8 }
[[fault]]
kind = "worker_hang"
phase = "eval"
[[fault]]
kind = "worker_hang"
phase = "save"
[[fault]]
kind = "worker_hang"
phase = "collective"
[[fault]]
kind = "preempt"
""",
    "gradients": """
name = "gradients"
[cluster]
nodes = 4
[job]
kind = "small"
[[fault]]
kind = "sick_gemm"
ratio = 0.3
bit = 27
steps = 500
[[fault]]
kind = "sick_gemm"
ratio = 1.0
bit = 27
steps = 500
""",
    "blind": """
name = "blind"
[cluster]
nodes = 4
[job]
kind = "small"
hang_seconds = 10
hang_phase_seconds = { save = 20, eval = 10 }
[[fault]]
kind = "command"
node = "n0"
argv = ["kill", "-STOP", "{writer}"]
[[fault]]
kind = "command"
argv = ["sh", "-c", "kill -STOP {writer}; sleep 1; kill -CONT {writer}"]
quiet_seconds = 3
[[fault]]
kind = "command"
argv = ["prlimit", "--pid", "{pid}", "--nofile=3:3"]
[[fault]]
kind = "command"
node = "n1"
argv = ["kill", "-STOP", "{shim}"]
[[fault]]
kind = "command"
node = "n1"
argv = ["kill", "-CONT", "{shim}"]
quiet_seconds = 3
[[fault]]
kind = "command"
argv = ["renice", "19", "-p", "{pid}"]
[[fault]]
kind = "command"
argv = ["kill", "-SEGV", "{pid}"]
incidents = ["worker_exit"]
names = "rank"
[[fault]]
kind = "command"
argv = ["prlimit", "--pid", "{pid}", "--cpu=1:1"]
incidents = ["worker_exit"]
names = "rank"
[[fault]]
kind = "command"
argv = ["sh", "-c", 'rm -rf "$(ls -d {checkpoints}/step-* | tail -n 1)"']
""",
    "corruption": """
name = "corruption"
[cluster]
nodes = 4
[[fault]]
kind = "worker_nan"
[[fault]]
kind = "kernel_noise"
quiet_seconds = 5
[[fault]]
kind = "kernel_xid"
xid = 95
[[fault]]
kind = "flip_bit"
where = "parameter"
[[fault]]
kind = "worker_hang"
phase = "save"
within_seconds = 180
""",
    "workers": """
name = "workers"
[cluster]
nodes = 4
[[fault]]
kind = "worker_raise"
[[fault]]
kind = "worker_stop"
[[fault]]
kind = "worker_slow"
[[fault]]
kind = "flip_bit"
[[fault]]
kind = "node_kill"
""",
}
"""Plans that ship with the package, by name."""
