"""A staged tree as an .rpm: a spec that packs it unchanged, with the same scripts as the .deb."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tree import SETTINGS, Package, run, script

SCRIPTS = ("pre", "post", "preun", "postun", "posttrans")
# Folders of the system; all others are the package's.
SYSTEM = {"etc", "opt", "usr", "usr/bin", "usr/lib", "usr/lib/systemd", "usr/lib/systemd/system", "usr/lib/sysusers.d",
          "usr/lib/tmpfiles.d", "usr/share", "usr/share/doc"}  # fmt: skip
SPEC = """\
%global debug_package %{{nil}}
%global __os_install_post %{{nil}}
%global _build_id_links none
%global _binary_payload w3.zstdio
%global _buildhost localhost
%global use_source_date_epoch_as_buildtime 1
%global clamp_mtime_to_source_date_epoch 1
%global build_mtime_policy clamp_to_source_date_epoch
Name: {name}
Version: {version}
Release: 1.py{short}
Summary: {summary}
License: Apache-2.0
AutoReqProv: no
Requires: python{python}, systemd, glibc >= 2.28, libstdc++, shadow-utils
Requires(pre): systemd, shadow-utils
Requires(post): systemd
%description
{description}
%install
cp -a {root}/. %{{buildroot}}/
{scripts}
%files -f {files}
"""


def build(package: Package, root: Path, version: str, python: str, machine: str, out: Path) -> Path:
    with tempfile.TemporaryDirectory(prefix="drover-rpm-") as folder:
        files = Path(folder) / "files"
        files.write_text("".join(file_list(package, root)))
        spec = Path(folder) / "drover.spec"
        spec.write_text(
            SPEC.format(
                name=package.full,
                version=version,
                short=python.replace(".", ""),
                summary=package.summary,
                python=python,
                description=package.description,
                root=root,
                files=files,
                scripts=scripts(package),
            )
        )
        options = ["--define", f"_topdir {folder}/top", "--target", f"{machine}-linux"]
        run(["rpmbuild", "-bb", "--quiet", *options, str(spec)])
        made = next(Path(folder).glob("top/RPMS/*/*.rpm"))
        return Path(shutil.copy2(made, out))


def scripts(package: Package) -> str:
    return "\n".join(f"%{name}\n{_escaped(script(package, 'rpm', name))}" for name in SCRIPTS)


def _escaped(text: str) -> str:
    return text.removeprefix("#!/bin/sh\n").replace("%", "%%")


def file_list(package: Package, root: Path) -> list[str]:
    """Return a line of `%files` for each file and folder. Settings stay where someone changed them."""
    lines = []
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if name in SYSTEM:
            continue
        if name == str(SETTINGS):
            lines.append(f'%dir %attr(0750,root,drover) "/{name}"\n')
        elif name == f"{SETTINGS}/{package.settings}":
            lines.append(f'%config(noreplace) %attr(0640,root,drover) "/{name}"\n')
        elif path.is_symlink():
            lines.append(f'%attr(-,root,root) "/{name}"\n')
        elif path.is_dir():
            lines.append(f'%dir %attr(0755,root,root) "/{name}"\n')
        else:
            mode = "0755" if path.stat().st_mode & 0o100 else "0644"
            lines.append(f'%attr({mode},root,root) "/{name}"\n')
    return lines
