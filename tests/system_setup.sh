#!/usr/bin/env bash
# Installs the system parts that `make test SYSTEM=1` uses, on Debian or Ubuntu, as root: pip, a compiler, openssl,
# Chromium, ZooKeeper, Prometheus and its Alertmanager, VictoriaMetrics, rsyslog, systemd's own checks of units, Slurm, etcd.
# Unpacks a newer Slurm and an OpenTelemetry collector next to the system, and leaves a build of a Kubernetes API server
# running in the background.
set -euo pipefail
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "make test SYSTEM=1 needs root on Debian or Ubuntu; plain \`make test\` does not" >&2
  exit 2
fi
missing=()
python3 -m pip --version >/dev/null 2>&1 || missing+=(python3-pip)
command -v gcc >/dev/null || missing+=(gcc libc6-dev)
command -v openssl >/dev/null || missing+=(openssl)
command -v chromium >/dev/null || missing+=(chromium)
test -e /usr/share/java/zookeeper.jar || missing+=(zookeeper default-jre-headless)
command -v promtool >/dev/null || missing+=(prometheus)
command -v victoria-metrics >/dev/null || missing+=(victoria-metrics)
command -v systemd-analyze >/dev/null || missing+=(systemd)
command -v rsyslogd >/dev/null || missing+=(rsyslog)
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
# The API server takes minutes to build, and one file of tests needs it. That file waits (testbed/kubernetes_server.py).
cache=/var/cache/drover-testbed
mkdir -p "$cache"
setsid flock --nonblock "$cache/kubernetes.lock" "$(dirname "$0")/kubernetes_setup.sh" \
  </dev/null >>"$cache/kubernetes.log" 2>&1 &
"$(dirname "$0")/slurm_setup.sh"
"$(dirname "$0")/otlp_setup.sh"
