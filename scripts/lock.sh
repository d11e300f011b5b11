#!/usr/bin/env bash
# Resolves the workspace into uv.lock and takes every address out of it: the lock pins versions, and whoever installs
# chooses the index. Set-up reads it with `uv export --frozen`, which never rewrites the file.
#   scripts/lock.sh [uv lock options]      for example: scripts/lock.sh --upgrade-package ray
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/find-uv.sh

# A find-links folder would fork the lock between its wheels and the index's.
env -u UV_FIND_LINKS -u PIP_FIND_LINKS UV_PYTHON_DOWNLOADS=never "$UV" lock "$@"

stripped=$(mktemp uv.lock.XXXXXX)
trap 'rm -f "$stripped"' EXIT
sed -E -e 's#registry = "[^"]*"#registry = "index"#' -e '/^sdist = /d' -e '/^wheels = \[$/,/^\]$/d' uv.lock >"$stripped"
if grep -nE '[a-z]+://' "$stripped"; then
    echo "lock: the lines above still name an address; teach scripts/lock.sh to take it out" >&2
    exit 1
fi
chmod 644 "$stripped"
mv "$stripped" uv.lock
trap - EXIT
echo "uv.lock: $(grep -c '^\[\[package\]\]' uv.lock) packages, no addresses"
