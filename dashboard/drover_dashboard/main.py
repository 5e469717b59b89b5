"""`drover-dashboard`: the console in a browser, for the collector named with --collector."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drover_core import clusters as cluster_settings
from drover_core.grafana import BOARD, Grafana, wrong_address, wrong_board
from drover_core.settings import SettingsError
from drover_dashboard import clusters
from drover_dashboard.client import ClientError, FleetClient, Tls, share
from drover_dashboard.server import auth_settings as people
from drover_dashboard.server.signin_options import add_arguments, sign_in
from drover_dashboard.widgets import grafana, theme

COLLECTOR = "127.0.0.1:7302"


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        tls = _tls(options)
        people.share(sign_in(options))
        _check_free(options.address, options.port)
        several = _several(options, tls)
        _share_grafana(options)
        if several is None:
            share(FleetClient(options.collector or COLLECTOR, tls))
    except (ClientError, SettingsError) as error:
        print(f"drover-dashboard: {error}", file=sys.stderr)
        return 2
    of = f"clusters {', '.join(several.names())}" if several else f"collector {options.collector or COLLECTOR}"
    print(f"console on http://{_shown(options.address)}:{options.port} for {of}", flush=True)
    sys.argv = sys.argv[:1]  # Streamlit would hand the rest to the page's script
    # uvicorn would put X-Forwarded-For in the place of the address that the proxy is known by.
    os.environ["FORWARDED_ALLOW_IPS"] = ""
    # Streamlit starts threads while it is imported. A KeyboardInterrupt there left one that nothing asked to end, and
    # the console hung. The default action ends it at once; while the server runs, the server handles the signal.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from drover_dashboard.server.app import (  # imports Streamlit, a second that --help and errors need not wait
        build,
        share_several,
        warm,
    )

    if several is not None:
        share_several(several)
    app = build()
    threading.Thread(target=warm, name="warm", daemon=True).start()
    app.run(config=_streamlit_options(options))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="drover-dashboard", description="Serve Drover's console to browsers.")
    parser.add_argument(
        "--collector", type=_address, metavar="HOST:PORT", help=f"its Fleet API (default {COLLECTOR})"
    )  # fmt: skip
    parser.add_argument(
        "--settings", type=Path, metavar="FILE", help="TOML with [[clusters]]: many collectors, instead of --collector"
    )
    parser.add_argument("--port", type=_port, default=8501, help="port for browsers (default %(default)s)")
    parser.add_argument("--address", default="127.0.0.1", help="address for browsers (default %(default)s)")
    for name, what in (("ca", "the fleet's CA"), ("cert", "this console's certificate"), ("key", "its key")):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"{what}, PEM; give all three for mutual TLS")
    parser.add_argument("--grafana", default="", metavar="URL", help="Grafana that the pages link to; none: no links")
    parser.add_argument(
        "--grafana-board", default=BOARD, metavar="UID", help="its board of the GPUs (default %(default)s)"
    )  # fmt: skip
    add_arguments(parser)
    return parser


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, such as collector.example:7302")
    return text


def _port(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1 to 65535")
    return int(text)


def _tls(options: argparse.Namespace) -> Tls | None:
    files = (options.ca, options.cert, options.key)
    if not any(files):
        return None
    if not all(files):
        raise ClientError("mutual TLS needs all of --ca, --cert and --key")
    return Tls(*files)


def _several(options: argparse.Namespace, tls: Tls | None) -> clusters.Clusters | None:
    """The clusters that --settings names; None: one collector."""
    if options.settings is None:
        return None
    if options.collector or tls:
        raise ClientError(
            "--settings names each cluster's collector and files: leave out --collector, --ca, --cert, --key"
        )
    found = cluster_settings.load(options.settings)
    if not found.clusters:
        raise ClientError(f"{options.settings}: no [[clusters]]: add one for each collector, with name and collector")
    return clusters.Clusters(clusters.clients(found))


def _share_grafana(options: argparse.Namespace) -> None:
    """
    Raises:
        ClientError: it is named twice, or cannot be linked to.
    """
    if options.settings is not None:
        if options.grafana:
            raise ClientError("--settings names each cluster's Grafana: write grafana there, and leave out --grafana")
        known = cluster_settings.load(options.settings).clusters
        grafana.share({each.name: found for each in known if (found := each.linked) is not None})
        return
    if said := wrong_address(options.grafana):
        raise ClientError(f"--grafana: {said}")
    if said := wrong_board(options.grafana_board):
        raise ClientError(f"--grafana-board: {said}")
    grafana.share({"": Grafana(options.grafana, options.grafana_board)} if options.grafana else {})


def _check_free(address: str, port: int) -> None:
    """Streamlit itself would report an occupied port over several lines, after a second."""
    try:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        raise ClientError(
            f"cannot listen on {address}:{port} ({error.strerror or error}); choose another with --port or --address"
        ) from None


def _shown(address: str) -> str:
    return "127.0.0.1" if address in ("0.0.0.0", "") else address  # noqa: S104  # only compared, never bound here


def _streamlit_options(options: argparse.Namespace) -> dict[str, Any]:
    secrets = {"secrets.files": [str(options.secrets)]} if options.secrets else {}
    return {
        **theme.STREAMLIT,
        **secrets,
        "server.address": options.address,
        "server.port": options.port,
        "server.headless": True,
        "server.fileWatcherType": "none",
        "server.enableCORS": True,
        "server.enableXsrfProtection": True,
        "browser.gatherUsageStats": False,
        "global.minCachedMessageSize": 1000,  # bytes; what a page has already is not sent to it again
        "global.maxCachedMessageAge": 20,  # runs; a page that has just forgotten what is not sent again would stop
        # An open page gets 5 kB a second of nearly the same lines: packed a tenth of it, for 0.3 MB of memory each.
        "server.enableWebsocketCompression": True,
        # A page runs a part of itself 1.5 times a second; a whole garbage collection after each was half of its cost.
        "runner.postScriptGC": False,
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "none",  # a browser sees that something failed; what failed is in the server's log
        "logger.hideWelcomeMessage": True,
        "logger.level": os.environ.get("DROVER_LOG_LEVEL", "warning"),
    }


if __name__ == "__main__":
    sys.exit(main())
