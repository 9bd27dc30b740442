"""A sink of a captured table has each row of it, with its values, and no other row. No fault explains a difference."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from outbox.base.database import Row
from outbox_lab.soak.finding import Finding, findings
from outbox_lab.soak.seen import Copy, Seen


def check(seen: Seen) -> list[Finding]:
    """Compare the table of each such sink with that of the source."""
    return [
        finding for one in seen.copies for finding in findings(f"{one.sink} has the rows of its table", _wrong(one))
    ]


def _wrong(copy: Copy) -> Iterator[str]:
    of_source, of_sink = _by_key(copy.key, copy.source), _by_key(copy.key, copy.rows)
    for key in of_source.keys() | of_sink.keys():
        due, found = of_source.get(key, ()), of_sink.get(key, ())
        if not found:
            yield f"{key}: the sink has no such row"
        elif not due:
            yield f"{key}: the source has no such row"
        elif len(found) != len(due):
            yield f"{key}: {len(found)} rows instead of {len(due)}"
        elif list(found) != list(due):
            yield f"{key}: {_difference(found[0], due[0])}"


def _by_key(key: str, rows: Sequence[Row]) -> Mapping[str, Sequence[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[str(row[key])].append(row)
    return found


def _difference(found: Row, due: Row) -> str:
    names = sorted(name for name in found.keys() | due.keys() if found.get(name) != due.get(name))
    return ", ".join(f"{name} is {found.get(name)} and must be {due.get(name)}" for name in names)
