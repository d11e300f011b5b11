#!/usr/bin/env bash
# Makes .venv: everything Miles needs on a Linux machine without a GPU, at the versions of uv.lock.
#   ./setup.sh            installs what is missing; does nothing, in well under a second, when nothing changed
#   ./setup.sh --digest   prints a hash of everything .venv depends on, for instance as the key of a CI cache
#   PYTHON=python3.12 ./setup.sh    builds on that interpreter instead of the first python3 from 3.11 on
# Safe to interrupt and to run again. The GPU install is `pip install 'miles[all]'`.
set -euo pipefail
cd "$(dirname "$0")"

STAMP=.venv/miles-setup
PLACE=.venv/miles-place  # scripts inside name their interpreter by its full path
LOCKED=.venv/locked.txt
COMPILED=.venv/compiled.txt
TORCH=2.13.0
NEEDED_GB=5  # .venv and the downloads of a first run, with room to unpack

# What the environment is a function of: this place and these files.
digest() {
    { pwd; command -v cc || true; cat uv.lock pyproject.toml packages/*/pyproject.toml setup.sh scripts/find-uv.sh \
        scripts/without-dependencies.txt scripts/references.txt; } | sha256sum | cut -d ' ' -f 1
}

up_to_date() {
    [[ -r $STAMP && $(cat $STAMP) == "$(digest)" && -x .venv/bin/python ]] && .venv/bin/python -c ''
}

step() {
    echo "set-up: $1 (at ${SECONDS} s)"
}

# Two set-ups at once would install over each other.
take_turns() {
    mkdir -p .venv-tools
    exec 9>.venv-tools/lock
    if command -v flock >/dev/null && ! flock --nonblock 9; then
        step "another set-up is at work in this folder; waiting for it"
        flock 9
    fi
}

check_machine() {
    local free_gb
    [[ $(uname -s) == Linux ]] || fail "this is $(uname -s); SGLang and this set-up need Linux."
    free_gb=$(($(df -Pk . | awk 'NR == 2 {print $4}') / 1024 / 1024))
    ((free_gb >= NEEDED_GB)) || fail "$free_gb GB are free in $PWD; a first set-up needs $NEEDED_GB. Free some, or clone to a larger disk."
}

# An environment that works is kept. One whose interpreter is gone, or that was moved here, is made again.
make_environment() {
    local python
    if .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null &&
        [[ $(cat $PLACE 2>/dev/null || pwd) == "$PWD" ]]; then
        return
    fi
    check_machine
    python=$(find_python)
    step "making .venv with $python"
    "$UV" venv --quiet --clear --prompt miles --python "$python" .venv
    pwd >$PLACE
}

# On a terminal uv draws its progress; in a log its list of 200 packages would drown the steps.
pip_install() {
    local command=("$UV" pip install --python .venv/bin/python --no-deps "$@")
    if [[ -t 2 ]]; then
        "${command[@]}"
    else
        "${command[@]}" 2> >(grep --line-buffered -v '^ [+~-] ' >&2)
    fi
}

# A folder of $PIP_FIND_LINKS that holds the CPU build of torch for this interpreter, if any.
torch_folder() {
    local folder tag
    tag=$(.venv/bin/python -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
    for folder in ${PIP_FIND_LINKS:-}; do
        folder=${folder#file://}
        if compgen -G "$folder/torch-$TORCH+cpu-$tag-$tag-*$(uname -m).whl" >/dev/null; then
            echo "$folder"
            return
        fi
    done
}

# Never the build of the plain index, which wants 3 GB of CUDA.
install_torch() {
    local folder
    folder=$(torch_folder)
    if [[ -n $folder ]]; then
        pip_install --no-index --find-links "$folder" "torch==$TORCH+cpu"
    else
        pip_install --torch-backend=cpu "torch==$TORCH" ||
            fail "the CPU build of torch $TORCH could not be fetched (message above). Without access to PyTorch's own index, put
        its wheel (torch-$TORCH+cpu-…-linux_$(uname -m).whl) into a folder and run again with PIP_FIND_LINKS set to it."
    fi
}

# reasoning-gym alone needs a package that comes as C source.
install_compiled() {
    if ! pip_install --requirements "$COMPILED" >.venv/compiled.log 2>&1; then
        step "left out $(tr '\n' ' ' <"$COMPILED")(no C compiler?): reasoning-gym's tasks will not load, everything else works.
        For them: apt-get install gcc python3-dev, then run this again"
    fi
}

install() {
    local package editable=()
    local offline="the message is above. Set-up needs a package index: check the network, or name yours with PIP_INDEX_URL;
        what was downloaded is kept, so run it again to go on"
    export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}
    "$UV" export --quiet --frozen --no-hashes --no-annotate --no-header --no-emit-workspace --no-emit-package torch \
        --group cpu --group dev --output-file "$LOCKED.all" >/dev/null
    grep '^pycosat==' "$LOCKED.all" >"$COMPILED"
    grep -v '^pycosat==' "$LOCKED.all" >"$LOCKED"
    step "torch $TORCH for the CPU"
    install_torch
    step "$(wc -l <"$LOCKED") packages at the versions of uv.lock; a first run downloads about 1 GB"
    pip_install --requirements "$LOCKED" || fail "installing the locked packages failed; $offline."
    install_compiled
    step "SGLang and its router"
    pip_install --requirements scripts/without-dependencies.txt || fail "installing SGLang failed; $offline."
    step "what the tests of miles-tito compare with"
    pip_install --requirements scripts/references.txt || step "left out: the tests that need it will be skipped"
    step "compiling the large packages, so that the first start is as quick as the second"
    (cd "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" &&
        ../../../bin/python -W ignore -m compileall -qq -j 0 torch transformers sglang ray numpy scipy) || true
    step "the seven packages of this repository, editable"
    for package in . packages/*/; do
        editable+=(--editable "$package")
    done
    pip_install --quiet --no-build-isolation "${editable[@]}" ||
        fail "a package of this repository does not build; the message is above."
    .venv/bin/python -c 'import torch; assert torch.version.cuda is None, "a CUDA build of torch got in"' ||
        fail "the installed torch does not work here. Remove .venv and run this again."
}

case ${1:-} in
    "") ;;
    --digest)
        digest
        exit 0
        ;;
    *)
        echo "usage: ./setup.sh [--digest]" >&2
        exit 2
        ;;
esac
if up_to_date; then
    exit 0
fi
trap 'printf "\nset-up: interrupted; run it again to go on from here\n" >&2; exit 130' INT TERM
take_turns
source scripts/find-uv.sh
if up_to_date; then
    exit 0
fi
make_environment
rm -f "$STAMP"
install
digest >"$STAMP"
step "done: .venv is ready"
