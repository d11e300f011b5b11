#!/usr/bin/env bash
# miles-quant against torchao and NVIDIA ModelOpt. They live in a folder of their own: Transformers imports torchao
# wherever it finds it, which slows every load.
#   scripts/quant-references.sh [words for pytest]
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/find-uv.sh
source scripts/find-uv.sh

PINS=(torchao==0.18.0 nvidia-modelopt==0.47.0 ninja nvidia-ml-py omegaconf pulp antlr4-python3-runtime)
FOLDER=.venv-references
if [[ $(cat $FOLDER/miles-pins 2>/dev/null) != "${PINS[*]}" ]]; then
    rm -rf $FOLDER
    if ! "$UV" pip install --quiet --python .venv/bin/python --target $FOLDER --no-deps "${PINS[@]}"; then
        echo "left out: torchao and ModelOpt cannot be installed here, so miles-quant is not compared with them"
        exit 0
    fi
    .venv/bin/python -W ignore -m compileall -q $FOLDER || true # its syntax warnings would be errors in the tests
    echo "${PINS[*]}" >$FOLDER/miles-pins
fi
PYTHONPATH=$PWD/$FOLDER exec .venv/bin/python -m pytest packages/miles-quant/tests/test_references.py "$@"
