#!/bin/sh
# All test suites, fast ones first, with the time of each. Suites that only compute or wait run beside each other in two lanes; those
# that measure time or start whole clusters come after them, one at a time.
set -eu
bin=.venv/bin
beside="contract deploy parallel stats ckpt_interval"
first="kernel local core golden sim health security integrations"
alone="agent worker supervisor ckpt parallel_runtime web observe chaos e2e"

run() {
    name=$1
    shift
    begin=$(date +%s)
    if "$@"; then result=passed; else result=FAILED; fi
    echo "suite $name: $result in $(($(date +%s) - begin)) s"
    [ "$result" = passed ] || exit 1
}

suites() {
    for suite in "$@"; do
        [ -n "$(find "tests/$suite" -name 'test_*.py' 2>/dev/null | head -n 1)" ] || continue
        run "$suite" $bin/pytest -q -m "not soak and not gpu" "tests/$suite"
    done
}

for suite in tests/*/; do
    case " $beside $first $alone gpu data __pycache__ " in
        *" $(basename "$suite") "*) ;;
        *) echo "tests/$(basename "$suite") is not in tools/test.sh" >&2; exit 1 ;;
    esac
done
run lint sh -c "$bin/ruff check . && $bin/ruff format --check . && $bin/lint-imports"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
suites $beside >"$log" 2>&1 &
lane=$!
trap 'pkill -P $lane; kill $lane; exit 130' INT TERM
status=0
(suites $first) || status=1
wait $lane || status=1
cat "$log"
[ $status = 0 ] || exit 1
trap - INT TERM
suites $alone
