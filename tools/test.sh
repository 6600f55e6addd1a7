#!/bin/sh
# All test suites, fast ones first, with the time of each.
set -eu
bin=.venv/bin
status=0
run() {
    name=$1
    shift
    begin=$(date +%s)
    if "$@"; then result=passed; else result=FAILED; status=1; fi
    echo "suite $name: $result in $(($(date +%s) - begin)) s"
    [ "$status" = 0 ] || exit 1
}
run lint sh -c "$bin/ruff check . && $bin/ruff format --check . && $bin/lint-imports"
for suite in tests/*/; do
    name=$(basename "$suite")
    case $name in gpu | e2e | __pycache__) continue ;; esac
    [ -n "$(find "$suite" -name 'test_*.py' | head -n 1)" ] || continue
    run "$name" $bin/pytest -q -m "not soak and not gpu" "$suite"
done
if [ -n "$(find tests/e2e -name 'test_*.py' | head -n 1)" ]; then
    run e2e $bin/pytest -q -m "not soak and not gpu" tests/e2e
fi
