#!/bin/sh
# Installs Debian's Chromium for the browser tests if it is missing, or says in one line why it cannot.
set -u
command -v chromium >/dev/null && exit 0
command -v apt-get >/dev/null || { echo "no apt-get on this system; install Chromium by hand" >&2; exit 1; }
[ "$(id -u)" = 0 ] || { echo "not root; run: sudo apt-get install chromium" >&2; exit 1; }
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >/dev/null 2>&1
apt-get install -y -qq --no-install-recommends chromium >/dev/null 2>&1 ||
  { echo "apt-get install chromium failed; check that apt-get can reach its package sources" >&2; exit 1; }
