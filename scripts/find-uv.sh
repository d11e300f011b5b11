# Sourced from the repository root: sets UV to a uv that reads this workspace, installing one into .venv-tools if needed.
# shellcheck shell=bash disable=SC2034
UV_WANTED=0.13.9  # installed when the machine has none
UV_OLDEST=0.9.0   # the oldest that is used as found; pyproject.toml says the same

# pip's settings for a private index or certificate hold for uv too, which does not read them itself.
export UV_PYTHON_DOWNLOADS=never
if [[ -n ${PIP_INDEX_URL:-} && -z ${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-} ]]; then
    export UV_DEFAULT_INDEX=$PIP_INDEX_URL
fi
if [[ -z ${SSL_CERT_FILE:-} ]]; then
    for bundle in "${PIP_CERT:-}" /etc/ssl/certs/ca-certificates.crt; do
        if [[ -n $bundle && -r $bundle ]]; then
            export SSL_CERT_FILE=$bundle
            break
        fi
    done
fi

fail() {
    printf '\nset-up: %s\n' "$1" >&2
    exit 1
}

# Prints the version of the uv at $1 where it runs and is new enough.
usable_uv() {
    local version
    version=$("$1" --version 2>/dev/null | awk '{print $2}') || return 1
    [[ -n $version && $(printf '%s\n%s\n' "$UV_OLDEST" "$version" | sort -V | head -n 1) == "$UV_OLDEST" ]]
}

# The full path of the interpreter to build on: PYTHON if set, else the first python3 that is new enough.
find_python() {
    local name path seen=""
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        path=$("$name" -c 'import sys; print(sys.executable if sys.version_info >= (3, 11) else "")' 2>/dev/null) || continue
        if [[ -n $path ]]; then
            echo "$path"
            return
        fi
        seen="$seen $("$name" -c 'import platform; print(platform.python_version())' 2>/dev/null)"
    done
    fail "no Python 3.11 or newer (tried ${PYTHON:-python3 python3.13 python3.12 python3.11};${seen:-none} found).
        Install one (Debian 12 and Ubuntu 24.04 have it: apt-get install python3 python3-pip), or name it: PYTHON=/path/to/python3.12 make …"
}

find_uv() {
    local candidate python
    for candidate in "$(command -v uv || true)" .venv-tools/bin/uv; do
        if [[ -n $candidate ]] && usable_uv "$candidate"; then
            UV=$candidate
            return
        fi
    done
    python=$(find_python)
    echo "set-up: installing uv $UV_WANTED into .venv-tools (this machine has none from $UV_OLDEST on)"
    # --target needs neither the venv module nor leave to write into the system's Python.
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        fail "$python has no pip to fetch uv with. Install pip (apt-get install python3-pip) or uv, then run this again."
    fi
    "$python" -m pip install --quiet --root-user-action=ignore --disable-pip-version-check --upgrade --target .venv-tools "uv==$UV_WANTED" ||
        fail "pip could not install uv (its message is above). Without network: put a uv on PATH and run this again."
    UV=.venv-tools/bin/uv
}

find_uv
