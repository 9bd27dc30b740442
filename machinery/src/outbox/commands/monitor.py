"""outbox monitor: metrics for alerts on the slot, the connector, dead letters, losses and drift."""

from __future__ import annotations

import signal
import threading

import click

from outbox.base.settings import address, load


@click.command("monitor")
@click.option(
    "--bind", type=address, default="127.0.0.1:9401", metavar="HOST:PORT", help="Where it listens; 127.0.0.1:9401."
)
@click.option(
    "--check-every", "every_s", type=click.FloatRange(min=1), default=300.0, help="Seconds between two checks; 300."
)
def monitor_command(bind: tuple[str, int], every_s: float) -> None:
    """Serve Prometheus metrics of what no other process exports: slot, connector, dead letters, losses, drift.

    It reads as the auditor, and runs until it is stopped. It restarts a connector's task that the broker has forgotten,
    and changes nothing else. Each metric describes itself (`# HELP`).
    """
    from outbox.audit import monitor

    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    monitor.serve(load(), bind, every_s, click.echo, ended)
