"""outbox doctor: every hop of the chain, each finding with its remedy."""

from __future__ import annotations

import json

import click

from outbox.audit import doctor as physician
from outbox.base import settings as configuration
from outbox.base.errors import Failure


@click.command()
@click.option("--json", "as_json", is_flag=True, help="For a script.")
def doctor(as_json: bool) -> None:
    """Look at every hop: databases, slot, connector, topics, sinks, retention, clocks. Status 1 if anything is to do.

    Changes nothing. Whether events are lost or doubled is what `outbox check` tells.
    """
    findings = []
    for finding in physician.examine(configuration.load()):
        findings.append(finding)
        if not as_json:
            mark = click.style("ok ", fg="green") if finding.is_well else click.style("FIX", fg="red")
            click.echo(f"{mark} {finding.hop:<10}{finding.text}" + (f" — {finding.remedy}" if finding.remedy else ""))
    if as_json:
        click.echo(json.dumps([finding.as_dict() for finding in findings], indent=2))
    wrong = [finding for finding in findings if not finding.is_well]
    if wrong:
        raise Failure(f"{len(wrong)} of {len(findings)} findings want something done; first: {wrong[0].text}")
