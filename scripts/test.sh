#!/usr/bin/env bash
# The five checks: ruff check, ruff format, pyright, lint-imports, pytest, a part of which runs apart (quant-references.sh).
# All of them run; any failure fails the whole.
#   scripts/test.sh            everything a machine without a GPU can run
#   scripts/test.sh lint       the first four
#   scripts/test.sh pytest packages/miles-tito -k wire      only pytest, with your arguments
set -uo pipefail
cd "$(dirname "$0")/.." || exit
export PATH="$PWD/.venv/bin:$PATH"
# One thread a process, and none that spins: the tests start several processes on few cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
export RAY_USAGE_STATS_ENABLED=0 WANDB_MODE=${WANDB_MODE:-offline}

failed=()
what=${1:-all}
shift || true

check() {
    local name=$1 started=$SECONDS
    shift
    printf '\n== %s\n' "$name"
    if "$@" </dev/null; then
        printf '== %s: passed in %d s\n' "$name" $((SECONDS - started))
    else
        printf '== %s: FAILED after %d s\n' "$name" $((SECONDS - started))
        failed+=("$name")
    fi
}

lint() {
    check "ruff check" ruff check
    check "ruff format" ruff format --check
    check "pyright" python -m pyright
    check "import borders" lint-imports --no-logo
}

run_pytest() {
    local name=$1
    shift
    printf '\n== %s\n' "$name"
    python -m pytest --durations=15 --durations-min=2 ${CI:+--verbose} "$@" </dev/null || failed+=("$name")
}

# What needs nothing but itself runs on all cores; real engines and whole runs, of several processes each, two at a time, the longest first.
# With arguments, those tests alone.
tests() {
    if (($#)); then
        run_pytest "pytest" -m "not gpu" "$@"
        return
    fi
    run_pytest "pytest, on all cores" --numprocesses auto --dist loadfile -m "not gpu and not sglang" packages tests/workspace tests/docs tests/slim
    run_pytest "pytest, real engines" --numprocesses 2 --dist loadfile -m "sglang and not gpu" packages
    run_pytest "pytest, whole runs" --numprocesses 2 --dist loadfile --no-loadscope-reorder -m "not gpu" tests/real tests/flow tests/clients
}

case $what in
    lint) lint ;;
    pytest) tests "$@" ;;
    all) lint && check "quant references" scripts/quant-references.sh -q && tests ;;
    *)
        echo "usage: scripts/test.sh [lint | pytest ARGS…]" >&2
        exit 2
        ;;
esac
if ((${#failed[@]})); then
    printf '\ntest: failed: %s\n' "$(IFS=, && echo "${failed[*]}")" >&2
    exit 1
fi
