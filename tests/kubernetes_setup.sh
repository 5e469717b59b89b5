#!/usr/bin/env bash
# Builds a real Kubernetes API server (1.20.2) and the disruption controller out of Debian bookworm's own source package,
# once a machine, for `make test SYSTEM=1`: no such binary is packaged. Three minutes on two cores. Without the clouds' providers,
# which no test needs and which cost a third more.
set -euo pipefail
into=${1:-/var/cache/drover-testbed/kubernetes}
test -x "$into/kube-apiserver" && test -x "$into/kube-controller-manager" && exit 0
echo "building a Kubernetes API server for the tests (three minutes, once) ..."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
key=/usr/share/keyrings/debian-archive-keyring.gpg
test -f "$key" || { echo "the Kubernetes API server of the tests is built on Debian bookworm only" >&2; exit 2; }
echo "deb-src [signed-by=$key] http://deb.debian.org/debian bookworm main" >sources.list
mkdir -p lists/partial
sources=(-o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$work/lists" -o APT::Sandbox::User=root)
apt-get "${sources[@]}" update -qq
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends golang-1.19-go rsync jq dpkg-dev >/dev/null
apt-get "${sources[@]}" source --download-only -qq kubernetes
dpkg-source --no-check -x kubernetes_*.dsc tree >/dev/null
mkdir -p tree/.go/src/k8s.io
ln -s "$work/tree" tree/.go/src/k8s.io/kubernetes
cd tree/.go/src/k8s.io/kubernetes
export PATH=/usr/lib/go-1.19/bin:$PATH GOPATH=$work/tree/.go GOCACHE=$work/cache CGO_ENABLED=0 GOPROXY=off GOFLAGS=-tags=providerless GO111MODULE=off
make WHAT="cmd/kube-apiserver cmd/kube-controller-manager" >"$work/make.log" 2>&1 || { tail -20 "$work/make.log" >&2; exit 1; }
rm -rf "$into" "$into.new" # what was left by one that was stopped
mkdir -p "$into.new"
install -m 755 _output/local/go/bin/kube-apiserver _output/local/go/bin/kube-controller-manager "$into.new"
mv "$into.new" "$into"
