#!/usr/bin/env bash
# Installs what `make test-rollout` needs, on Debian or Ubuntu, as root: containers with a systemd, ssh, images.
set -euo pipefail
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "make test-rollout needs root on Debian or Ubuntu" >&2
  exit 2
fi
missing=()
command -v systemd-nspawn >/dev/null || missing+=(systemd-container)
command -v mmdebstrap >/dev/null || missing+=(mmdebstrap)
command -v ssh >/dev/null || missing+=(openssh-client)
command -v git >/dev/null || missing+=(git)
# For images, and the pods made of them.
command -v buildah >/dev/null || missing+=(buildah)
command -v podman >/dev/null || missing+=(podman)
command -v runc >/dev/null || missing+=(runc)
# For the roles that give rights: an accounting for Slurm, and kubectl.
command -v mariadbd >/dev/null || missing+=(mariadb-server)
command -v slurmdbd >/dev/null || missing+=(slurmdbd)
command -v kubectl >/dev/null || missing+=(kubernetes-client)
if [ ${#missing[@]} -gt 0 ]; then
  apt-get update -qq
  RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
tests/system_setup.sh # Slurm, etcd, the Kubernetes API server
