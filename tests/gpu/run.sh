#!/usr/bin/env bash
# Every check that needs a GPU, and a table of the results. See README.md beside this file.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit

OUT=${OUT:-$(mktemp -d)}
LIMIT_S=${LIMIT_S:-480}
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ -x .venv-gpu/bin/python ]] && PYTHON=.venv-gpu/bin/python
fi

# The sources as they stand: nothing of ours has to be installed.
for source in packages/*/src; do
    PYTHONPATH=$PWD/$source${PYTHONPATH:+:$PYTHONPATH}
done
export PYTHONPATH PYTHONUNBUFFERED=1

"$PYTHON" tests/gpu/machine.py || exit
options=(-m gpu --junit-xml="$OUT/gpu.xml" -W ignore::pytest.PytestConfigWarning)
"$PYTHON" -c 'import pytest_timeout' 2>/dev/null && options+=(--timeout=120)
timeout --kill-after=10 "$LIMIT_S" "$PYTHON" -m pytest "${options[@]}" "$@" packages tests </dev/null
status=$?
"$PYTHON" tests/gpu/table.py "$OUT/gpu.xml" | tee "$OUT/gpu.txt"
exit $status
