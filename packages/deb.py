"""A staged tree as a .deb: control files, then dpkg-deb, which clamps all times to SOURCE_DATE_EPOCH."""

from __future__ import annotations

import email.utils
import gzip
import hashlib
from pathlib import Path

from tree import DEBIAN_MACHINES, HERE, SETTINGS, Package, epoch_s, run, script

MAINTAINER = "Drover <drover@localhost>"
SCRIPTS = ("preinst", "postinst", "prerm", "postrm")
CONTROL = """\
Package: {name}
Version: {version}
Architecture: {machine}
Maintainer: {maintainer}
Installed-Size: {kib}
Depends: python{python}, systemd, libc6 (>= 2.28), libstdc++6, passwd
Section: admin
Priority: optional
Description: {summary}
{description}
"""
COPYRIGHT = """\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: Drover
Comment: Dependencies lie below /{environment}, each with its own
 license in its *.dist-info folder; all are free software.

Files: *
Copyright: 2026 The authors of Drover
License: Apache-2.0
 On Debian systems the text is in /usr/share/common-licenses/Apache-2.0.
"""


def version_of(version: str, python: str) -> str:
    """Return the version with the Python that it is for: a newer Debian's package then follows an older one's."""
    return f"{version}+py{python}"


def build(package: Package, root: Path, version: str, python: str, machine: str, out: Path) -> Path:
    full = version_of(version, python)
    documents(package, root, full)
    control = root / "DEBIAN"
    control.mkdir()
    for name in SCRIPTS:
        path = control / name
        path.write_text(script(package, "deb", name))
        path.chmod(0o755)
    (control / "conffiles").write_text(f"/{SETTINGS}/{package.settings}\n")
    (control / "md5sums").write_text(md5sums(root))
    size = sum(path.lstat().st_size for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    (control / "control").write_text(
        CONTROL.format(
            name=package.full,
            version=full,
            machine=DEBIAN_MACHINES[machine],
            maintainer=MAINTAINER,
            kib=size // 1024,
            python=python,
            summary=package.summary,
            description=_folded(package.description),
        )
    )
    target = out / f"{package.full}_{full}_{DEBIAN_MACHINES[machine]}.deb"
    # xz takes five minutes for the collector on two cores. Debian 12 and Ubuntu 22.04 read zstd.
    run(["dpkg-deb", "--root-owner-group", "-Zzstd", "-z3", "--build", str(root), str(target)])
    return target


def documents(package: Package, root: Path, version: str) -> None:
    """Write what Debian wants of each package below /usr/share/doc, and the reasons for what lintian would say."""
    folder = root / "usr/share/doc" / package.full
    folder.mkdir(parents=True)
    when = email.utils.formatdate(epoch_s(), usegmt=False)
    text = f"{package.full} ({version}) stable; urgency=medium\n\n  * docs/how-to/upgrade.md says what changed.\n\n"
    text += f" -- {MAINTAINER}  {when}\n"
    (folder / "changelog.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=epoch_s()))
    (folder / "copyright").write_text(COPYRIGHT.format(environment=package.environment))
    overrides = root / "usr/share/lintian/overrides" / package.full
    overrides.parent.mkdir(parents=True)
    template = (HERE / "lintian-overrides").read_text()
    overrides.write_text(template.replace("PACKAGE", package.full))


def md5sums(root: Path) -> str:
    lines = []
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        kept = path.is_file() and not path.is_symlink()
        if kept and name.parts[0] not in ("DEBIAN", SETTINGS.parts[0]):
            digest = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
            lines.append(f"{digest}  {name}\n")
    return "".join(lines)


def _folded(text: str) -> str:
    lines, line = [], ""
    for word in text.split():
        if len(line) + len(word) > 76:
            lines.append(line)
            line = ""
        line += f" {word}"
    return "\n".join([*lines, line])
