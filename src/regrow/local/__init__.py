"""A whole cluster on this machine: etcd, a supervisor and agents as child processes of one launcher."""
