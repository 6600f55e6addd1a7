#!/bin/sh
# One member's data folder from a snapshot. Run it on every member with the same FILE and CLUSTER, its own NAME and PEER, then start all.
#
#   restore.sh FILE DATA_DIR NAME PEER CLUSTER
#   restore.sh etcd.snapshot /var/lib/etcd m1 https://10.0.0.1:2380 m1=https://10.0.0.1:2380,m2=https://10.0.0.2:2380,m3=https://10.0.0.3:2380
#
# Stop every old member first. An existing data folder is never overwritten: move it away, it may be needed.
set -eu
[ $# = 5 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
file=$1 folder=$2 name=$3 peer=$4 cluster=$5
[ ! -e "$folder" ] || { echo "restore: $folder exists; move it away first" >&2; exit 2; }
export ETCDCTL_API=3
etcdctl snapshot restore "$file" --data-dir "$folder" --name "$name" --initial-advertise-peer-urls "$peer" \
    --initial-cluster "$cluster" >/dev/null
echo "restore: $folder is ready"
