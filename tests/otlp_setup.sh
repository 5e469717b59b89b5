#!/usr/bin/env bash
# Unpacks rotel, a collector of OpenTelemetry, once a machine, for `make test SYSTEM=1`: a wheel of 10 MB from PyPI.
# Nothing is installed.
set -euo pipefail
version=0.0.1a15
into=${1:-/var/cache/drover-testbed/rotel-$version}
test -x "$into/rotel-agent" && exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip download -qq --no-deps --only-binary :all: --python-version 3.11 --implementation cp --abi cp311 \
  --platform "manylinux_2_34_$(uname -m)" --dest "$work" "rotel==$version"
python3 -m zipfile -e "$work"/rotel-*.whl "$work/root"
chmod 755 "$work/root/rotel/rotel-agent"
mkdir -p "$into"
mv "$work/root/rotel/rotel-agent" "$work"/root/rotel-*.dist-info/licenses/LICENSE "$into"
