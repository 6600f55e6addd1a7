#!/bin/sh
# Makes the virtual environment. Safe to run twice; says what it installs.
set -eu
venv=$1
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "regrow needs Python 3.11 or newer; $python is $("$python" --version 2>&1). Try: make PYTHON=python3.12 demo" >&2
    exit 2
}
[ -x "$venv/bin/python" ] || {
    echo "setup: making $venv"
    "$python" -m venv "$venv"
}
echo "setup: installing torch 2.13.0 (CPU), the packages of pyproject.toml and the development tools into $venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$venv/bin/pip" install --quiet --disable-pip-version-check -r tools/requirements-dev.txt
"$venv/bin/pip" install --quiet --disable-pip-version-check --editable '.[train,objects,security]'
