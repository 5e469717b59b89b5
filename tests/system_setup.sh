#!/usr/bin/env bash
# Installs the system parts that `make test SYSTEM=1` uses, on Debian or Ubuntu, as root: a compiler, openssl, Chromium,
# ZooKeeper, Prometheus and its Alertmanager, systemd's own checks of units, Slurm, etcd. Builds a Kubernetes API server,
# and unpacks a newer Slurm next to the system.
set -euo pipefail
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "make test SYSTEM=1 needs root on Debian or Ubuntu; plain \`make test\` does not" >&2
  exit 2
fi
missing=()
command -v gcc >/dev/null || missing+=(gcc libc6-dev)
command -v openssl >/dev/null || missing+=(openssl)
command -v chromium >/dev/null || missing+=(chromium)
test -e /usr/share/java/zookeeper.jar || missing+=(zookeeper default-jre-headless)
command -v promtool >/dev/null || missing+=(prometheus)
command -v systemd-analyze >/dev/null || missing+=(systemd)
command -v prometheus-alertmanager >/dev/null || missing+=(prometheus-alertmanager)
command -v slurmctld >/dev/null || missing+=(slurmctld slurmd slurm-client munge)
command -v slurmrestd >/dev/null || missing+=(slurmrestd)
command -v ip >/dev/null || missing+=(iproute2)
command -v etcd >/dev/null || missing+=(etcd-server)
if [ ${#missing[@]} -gt 0 ]; then
  echo "installing ${missing[*]} ..."
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
"$(dirname "$0")/slurm_setup.sh" &
newer_slurm=$!
"$(dirname "$0")/kubernetes_setup.sh"
wait "$newer_slurm"
