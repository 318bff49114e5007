#!/bin/sh
# Install what the tests need from Debian: gcc, Prometheus with promtool, systemd-journal-remote, and the real
# libnvidia-ml without a driver.
# Outside Debian, or without root, it says what will be skipped; with CI=true that is a failure.
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
library="$root/build/libnvidia-ml"

missing() {
  echo "make test: $1; the tests that need it are skipped" >&2
  [ "${CI:-}" = true ] && exit 1
  exit 0
}

have() { command -v "$1" >/dev/null 2>&1; }

[ -e "$library/libnvidia-ml.so.1" ] && have gcc && have prometheus && have promtool &&
  [ -e /lib/systemd/systemd-journal-remote ] && exit 0
have apt-get || missing "this is no Debian"
[ "$(id -u)" = 0 ] || missing "not root, so nothing can be installed with apt-get"

export DEBIAN_FRONTEND=noninteractive
if ! { have gcc && have prometheus && have promtool && [ -e /lib/systemd/systemd-journal-remote ]; }; then
  apt-get update -q >/dev/null || missing "apt-get update failed"
  apt-get install -y -q --no-install-recommends gcc libc6-dev prometheus systemd-journal-remote >/dev/null || missing "apt-get install failed"
fi

# the library is in non-free: a private copy of the sources leaves the system as it is
if [ ! -e "$library/libnvidia-ml.so.1" ]; then
  apt="$root/build/apt"
  mkdir -p "$apt/sources" "$apt/lists/partial" "$apt/cache/archives/partial" "$library"
  for file in /etc/apt/sources.list.d/*.sources; do
    [ -e "$file" ] && sed 's/^Components:.*/Components: main non-free/' "$file" >"$apt/sources/$(basename "$file")"
  done
  if [ -e /etc/apt/sources.list ]; then
    sed 's/^\(deb .*\) main.*/\1 main non-free/' /etc/apt/sources.list >"$apt/sources/main.list"
  fi
  options="-o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts=$apt/sources"
  options="$options -o Dir::State::lists=$apt/lists -o Dir::Cache=$apt/cache -o APT::Sandbox::User=root"
  # shellcheck disable=SC2086
  (cd "$apt" && apt-get $options update -q >/dev/null && apt-get $options download libnvidia-ml1 >/dev/null) ||
    missing "libnvidia-ml1 could not be downloaded"
  dpkg -x "$apt"/libnvidia-ml1_*.deb "$apt/unpacked" || missing "libnvidia-ml1 could not be unpacked"
  cp -P "$(find "$apt/unpacked" -name 'libnvidia-ml.so.[0-9][0-9]*' -type f | head -n 1)" "$library/libnvidia-ml.so.1" ||
    missing "libnvidia-ml1 holds no library"
  rm -rf "$apt"
fi
