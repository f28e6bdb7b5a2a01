#!/usr/bin/env bash
# Install Chromium for the browser tests and scripts/screenshots.py. If a browser is installed, this
# script does nothing and needs neither apt nor a network.
set -euo pipefail
for browser in "${RSTAR2_CHROMIUM:-}" chromium chromium-browser google-chrome; do
  if [ -n "$browser" ] && command -v "$browser" >/dev/null; then
    echo "browser: $(command -v "$browser")"
    exit 0
  fi
done
if ! command -v apt-get >/dev/null; then
  echo "no browser and no apt-get here: install Chromium and put it on PATH (or set RSTAR2_CHROMIUM)" >&2
  exit 1
fi
as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo)
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core
