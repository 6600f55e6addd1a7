"""Telling others what quarantine says: Slurm, Kubernetes, a program of the site. Off by default.

`orders` decides (pure), `loop` carries out under the leader's term, `slurm`, `kubernetes` and `command` are the ways out.
"""
