#!/usr/bin/env bash
# Unpacks Slurm 24.11 of Debian trixie next to this system, once a machine, for `make test SYSTEM=1`: bookworm's own (22.05)
# has a slurmrestd that cannot change nodes. 32 MB of packages, 130 MB on disk; nothing of it is installed.
set -euo pipefail
into=${1:-/var/cache/drover-testbed/slurm-24.11}
test -x "$into/enter" && exit 0
echo "unpacking Slurm 24.11 for the tests (half a minute, once) ..."
key=/usr/share/keyrings/debian-archive-keyring.gpg
test -f "$key" || { echo "Slurm 24.11 for the tests comes from Debian's archive, whose key is not here" >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/archives/partial" "$work/root"
echo "deb [signed-by=$key] http://deb.debian.org/debian trixie main" >"$work/sources.list"
: >"$work/status" # as if nothing were installed: its own libc comes along
options=(-o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$work/lists"
  -o "Dir::State::status=$work/status" -o "Dir::Cache::archives=$work/archives" -o APT::Sandbox::User=root -o Debug::NoLocking=1)
apt-get "${options[@]}" update -qq
apt-get "${options[@]}" install -y -qq --no-install-recommends --download-only \
  slurmctld slurmd slurmrestd slurm-client slurm-wlm-jwt-plugin dash coreutils util-linux >/dev/null
for package in "$work"/archives/*.deb; do
  dpkg-deb --extract "$package" "$work/root"
done
for folder in bin sbin lib lib64; do
  test -e "$work/root/$folder" || ln -s "usr/$folder" "$work/root/$folder"
done
for program in slurmctld slurmd slurmstepd; do
  ln -sf "$program-wlm" "$work/root/usr/sbin/$program"
done
mkdir -p "$work"/root/{proc,dev,sys,tmp,run,root,etc}
grep -E '^(root|nobody):' /etc/passwd >"$work/root/etc/passwd"
grep -E '^(root|nogroup):' /etc/group >"$work/root/etc/group"
printf 'passwd: files\ngroup: files\nhosts: files\n' >"$work/root/etc/nsswitch.conf"
cat >"$work/root/enter" <<'END'
#!/bin/sh
# enter FOLDER PROGRAM...: run it with this root, and with FOLDER and the devices and processes of the machine in it.
root=$(dirname "$0")
if [ "$1" != --inside ]; then exec unshare --mount --propagation private "$0" --inside "$@"; fi
shift
folder=$1
shift
for there in /proc /dev /sys "$folder"; do
  mkdir -p "$root$there"
  mount --rbind "$there" "$root$there"
done
mount --bind /etc/hosts "$root/etc/hosts"
exec chroot "$root" "$@"
END
: >"$work/root/etc/hosts"
chmod 755 "$work/root/enter" "$work/root"
mkdir -p "$(dirname "$into")"
rm -rf "$into"
mv "$work/root" "$into"
