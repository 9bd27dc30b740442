"""The changes of captured tables on their topics: none is lost, repeated without a reason, or out of order.

A change has no id: table, key, place in the log (LSN) and operation identify it. The source keeps only the state of a
row. So the last change of each row is compared with it, and those before by the column that counts them, if there is
one. A snapshot sends states and no changes: what is between two of them may be missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from outbox.base.database import Row
from outbox_lab.soak.finding import Finding, findings
from outbox_lab.soak.repeats import differing, unexplained
from outbox_lab.soak.seen import RowChange, Seen

SNAPSHOT, CREATED, UPDATED, DELETED = "r", "c", "u", "d"
NEVER_BEFORE = {CREATED: {CREATED, UPDATED}, UPDATED: {DELETED}, DELETED: {DELETED}}
Rows = Mapping[tuple[str, str, str], Sequence[RowChange]]  # by topic, table and key


def check(seen: Seen, *, may_repeat: bool) -> list[Finding]:
    """Compare the captured tables with their topics, and the changes with each other."""
    rows, records, firsts = _rows(seen), seen.row_changes, seen.first_changes
    again = () if may_repeat else unexplained(records, firsts, lambda topic: seen.released_changes.get(topic, 0))
    return [
        *findings("the last change of a row is on its topic", _not_last(seen)),
        *findings("a repeated change of a row is the same change", differing(records, firsts)),
        *findings("with exactly-once a change of a row is on its topic once", again),
        *findings("the changes of a row are on one partition", _spread(rows)),
        *findings("a row is created once, before its other changes, or is a snapshot's", _misborn(rows)),
        *findings("the changes of a row are in the order of the log", _disordered(rows)),
        *findings("the versions of a row have no gap", _gaps(seen, rows)),
    ]


def _rows(seen: Seen) -> Rows:
    """The changes of each row, each once, in the order of the topic."""
    found: dict[tuple[str, str, str], list[RowChange]] = defaultdict(list)
    for change in seen.first_changes.values():
        found[change.topic, change.table, change.key].append(change)
    return found


def _not_last(seen: Seen) -> Iterator[str]:
    for copy in seen.copies:
        last = {change.key: change for change in seen.first_changes.values() if change.topic == copy.topic}
        source = {str(row[copy.key]): row for row in copy.source}
        for key in source.keys() | last.keys():
            if problem := _problem(source.get(key), last.get(key)):
                yield f"{key}: {problem}"


def _problem(row: Row | None, last: RowChange | None) -> str:
    """Why the last change of a row is not the one that has made it; empty if it is."""
    if last is None:
        return "no change is on the topic"
    if row is None or last.op == DELETED:
        is_right = row is None and last.op == DELETED
        return "" if is_right else f"{last.op} at {last.place} is the last, and the source has {row}"
    wrong = sorted(name for name in row if str(row[name]) != str(last.row.get(name)))
    return ", ".join(f"{name} is {last.row.get(name)} at {last.place}, and {row[name]} in the source" for name in wrong)


def _spread(rows: Rows) -> Iterator[str]:
    for (_, table, key), changes in rows.items():
        if len({change.partition for change in changes}) > 1:
            yield f"{table} {key}"


def _misborn(rows: Rows) -> Iterator[str]:
    """The first change of each row that is of a row which is not there, or that creates one which is.

    Behind a snapshot nobody knows: changes that it passes over may follow.
    """
    for changes in rows.values():
        before = DELETED
        for change in changes:
            if before in NEVER_BEFORE.get(change.op, ()):
                yield f"{change.identity} at {change.place}"
                break
            before = change.op


def _disordered(rows: Rows) -> Iterator[str]:
    """The first change of each row that stands behind one with a higher place in the log.

    The place of a snapshot says nothing: a transaction that was open then may have written before it.
    """
    for changes in rows.values():
        streamed = [change for change in changes if change.op != SNAPSHOT]
        for before, change in pairwise(streamed):
            if change.lsn <= before.lsn:
                yield f"{change.identity} at {change.place}, behind {before.lsn}"
                break


def _gaps(seen: Seen, rows: Rows) -> Iterator[str]:
    """The first update of each row whose version is neither that of the change before nor the next one."""
    columns = {copy.topic: copy.version for copy in seen.copies if copy.version is not None}
    for (topic, table, key), changes in rows.items():
        for before, change in pairwise(changes) if topic in columns else ():
            if change.op == UPDATED and before.op != DELETED:
                version, last = change.row[columns[topic]], before.row[columns[topic]]
                if not last <= version <= last + 1:
                    yield f"{table} {key}: {version} behind {last} at {change.place}"
                    break
