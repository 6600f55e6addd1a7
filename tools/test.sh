#!/bin/sh
# All test suites, fast ones first, with the time of each.
set -eu
bin=.venv/bin
run() {
    name=$1
    shift
    begin=$(date +%s)
    if "$@"; then result=passed; else result=FAILED; fi
    echo "suite $name: $result in $(($(date +%s) - begin)) s"
    [ "$result" = passed ] || exit 1
}
run lint sh -c "$bin/ruff check . && $bin/ruff format --check . && $bin/lint-imports"
for suite in kernel local stats core golden parallel ckpt_interval sim health contract security deploy integrations agent worker supervisor ckpt parallel_runtime web observe chaos e2e; do
    [ -n "$(find "tests/$suite" -name 'test_*.py' 2>/dev/null | head -n 1)" ] || continue
    run "$suite" $bin/pytest -q -m "not soak and not gpu" "tests/$suite"
done
for suite in tests/*/; do
    case " kernel local stats core golden parallel ckpt_interval sim health contract security deploy integrations agent worker supervisor ckpt parallel_runtime web observe chaos e2e gpu data __pycache__ " in
        *" $(basename "$suite") "*) ;;
        *) echo "tests/$(basename "$suite") is not in tools/test.sh" >&2; exit 1 ;;
    esac
done
