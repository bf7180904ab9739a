#!/bin/bash
# Packs AIPerf for a GPU machine without a network: aiperf.sh FOLDER; FOLDER gets aiperf.tar.xz.
set -euo pipefail
out=$(realpath -m "${1:?folder}")
here=$(dirname "$(realpath "$0")")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out" "$work"/{dl,site}
. "$here/download.sh"
download "$work/dl" "$here/aiperf.txt"
for wheel in "$work"/dl/*.whl; do unzip -q -o "$wheel" -d "$work/site"; done
tar -C "$work/site" --sort=name --owner=0 --group=0 -cf - . | xz -6 >"$out/aiperf.tar.xz"
du -h "$out/aiperf.tar.xz"
