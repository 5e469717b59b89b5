#!/usr/bin/env bash
# Unpacks rotel, a collector of OpenTelemetry, once a machine, for `make test SYSTEM=1`: a wheel of 10 MB from PyPI.
# Nothing is installed.
set -euo pipefail
version=0.0.1a15
into=${1:-/var/cache/drover-testbed/rotel-$version}
test -x "$into/rotel-agent" && exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# It is a program that the tests run as root: only these two wheels, of x86_64 and aarch64.
echo "rotel==$version --hash=sha256:2f4117e58410c933e0dc042a268ef738dab2e3a5d63b5831209acdac2a6ddcb7" \
  "--hash=sha256:4eb01f9e5d228e4086f63e16cf1d0fa6e92b724bde51f120932a742acec5b0ba" >"$work/wanted.txt"
python3 -m pip download -qq --no-deps --only-binary :all: --python-version 3.11 --implementation cp --abi cp311 \
  --platform "manylinux_2_34_$(uname -m)" --dest "$work" --require-hashes -r "$work/wanted.txt"
python3 -m zipfile -e "$work"/rotel-*.whl "$work/root"
chmod 755 "$work/root/rotel/rotel-agent"
mkdir -p "$into"
mv "$work/root/rotel/rotel-agent" "$work"/root/rotel-*.dist-info/licenses/LICENSE "$into"
