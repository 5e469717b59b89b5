"""Check the addresses of metrics pages in the settings."""

from __future__ import annotations

import re

URL = re.compile(r"http://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?(?P<path>/[!-~]*)?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def url_error(url: str) -> str | None:
    """Return what is wrong with an address for `http_page.Page`, or None."""
    match = URL.fullmatch(url)
    if match is None or not 0 < int(match["port"] or 80) < 65536:
        return f"{url!r} must be an address such as http://127.0.0.1:8000/metrics"
    return None


def urls_error(urls: tuple[str, ...]) -> str | None:
    """Return what is wrong with the setting `inference_urls`, or None."""
    names = [item.partition("=")[0] for item in urls]
    for item, name in zip(urls, names, strict=True):
        if not _NAME.fullmatch(name) or "=" not in item:
            return 'must be names and addresses, as in ["chat=http://127.0.0.1:8000/metrics"]'
        if wrong := url_error(item.partition("=")[2]):
            return wrong
        if names.count(name) > 1:
            return f"must give each server a different name; {name} is used twice"
    return None
