#!/bin/sh
# A snapshot of etcd into FILE, checked before it takes the place of an older one. From cron, on one machine:
#
#   ETCDCTL_ENDPOINTS=https://10.0.0.1:2379 ETCDCTL_CACERT=ca.pem ETCDCTL_CERT=root.pem ETCDCTL_KEY=root.key backup.sh FILE
#
# Connection and user come from etcdctl's own environment variables: nothing secret in the arguments.
set -eu
file=${1:?usage: backup.sh FILE}
export ETCDCTL_API=3
trap 'rm -f "$file.new" "$file.new.part"' EXIT
etcdctl endpoint health >/dev/null # ends with an error when nobody answers; `snapshot save` would wait for ever
timeout "${BACKUP_SECONDS:-600}" etcdctl snapshot save "$file.new" >/dev/null
etcdctl snapshot status "$file.new" --write-out=json
sync "$file.new"
mv "$file.new" "$file"
