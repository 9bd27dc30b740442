"""outbox doctor: look at every hop, and print a remedy for each problem."""

from __future__ import annotations

import json

import click

from outbox.base.errors import Failure, plural
from outbox.base.settings import load


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a script.")
def doctor(as_json: bool) -> None:
    """Look at every hop: databases, slot, connector, topics, sinks, retention, clocks. Status 1 if a problem is found.

    Changes nothing. Use `outbox check` to learn whether events are lost or duplicated.

    \b
    The keys of --json are stable, a list of:
      hop, code, message, remedy (null if all is well), is_ok
    """
    from outbox.audit.doctor import examine

    diagnoses = []
    for diagnosis in examine(load()):
        diagnoses.append(diagnosis)
        if not as_json:
            mark = click.style("ok ", fg="green") if diagnosis.is_ok else click.style("FIX", fg="red")
            remedy = f" — {diagnosis.remedy}" if diagnosis.remedy else ""
            click.echo(f"{mark} {diagnosis.hop:<10}{diagnosis.message}{remedy}")
    if as_json:
        click.echo(json.dumps([diagnosis.as_dict() for diagnosis in diagnoses], indent=2))
    problems = [diagnosis for diagnosis in diagnoses if not diagnosis.is_ok]
    if problems:
        raise Failure(f"{plural(len(problems), 'problem')} found; first: {problems[0].message}", code="problems-found")
