#!/usr/bin/env bash
# Installs the agents that the tests run, at pinned versions, into one folder outside the repository.
#   tests/clients/setup.sh FOLDER      exits 75 where the npm registry cannot be reached
# Their post-install scripts are not run: the native programs lie in the packages themselves.
set -euo pipefail
folder=$1

claude=2.1.197 codex=0.171.0 opencode=1.18.33 mini=2.4.6
wanted="claude-code $claude, codex $codex, opencode $opencode, mini-swe-agent $mini"
mkdir -p "$folder"
exec 9> "$folder/lock"
flock 9
[[ $(cat "$folder/installed" 2>/dev/null) == "$wanted" ]] && exit 0

command -v npm > /dev/null || { echo "npm is not installed" >&2; exit 75; }
timeout 20 npm view --prefix "$folder" npm version > /dev/null 2>&1 || { echo "the npm registry does not answer" >&2; exit 75; }

folder=$(realpath "$folder")
cd "$(dirname "$0")/../.."
source scripts/find-uv.sh
rm -rf "$folder/npm" "$folder/mini"
npm install --prefix "$folder/npm" --no-audit --no-fund --ignore-scripts --loglevel=error \
    "@anthropic-ai/claude-code@$claude" "@openai/codex@$codex" "opencode-ai@$opencode"
"$UV" venv --quiet --python "$(find_python)" "$folder/mini"
"$UV" pip install --quiet --python "$folder/mini/bin/python" "mini-swe-agent==$mini"
echo "$wanted" > "$folder/installed"
