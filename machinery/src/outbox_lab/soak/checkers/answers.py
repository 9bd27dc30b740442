"""Each key is answered once, and the source has the answers that clients got.

An acknowledged change is there. A refused one is not, and the refusal is the stored one if it is stored. A change with
an unknown outcome is there with its whole answer, or is not there at all. A key that was used is refused to another
request. Each definite answer has a status that the domain expects: an invalid request is not accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus

from outbox_lab.soak.finding import Finding, findings
from outbox_lab.soak.history import History, Operation
from outbox_lab.soak.seen import Source, StoredAnswer

LAST = 20  # changes; clients that send at the same time are fewer


def check(history: History, source: Source) -> list[Finding]:
    """Compare the answers that clients got with those that the source has stored."""
    stored = {answer.key: answer for answer in source.answers}
    times = Counter(answer.key for answer in source.answers)
    operations = history.operations
    return [
        *findings("a key is answered once", _contradictions(history)),
        *findings("a request has a status that the domain expects", _unexpected(history)),
        *findings("the service makes changes after the last fault", _silence(history)),
        *findings("a used key is refused to another request", _accepted(history)),
        *findings("a key is stored once", (key for key, count in times.items() if count > 1)),
        *findings("a stored key was sent by a client", stored.keys() - operations.keys()),
        *findings("an acknowledged change is there, a failed one is not", _untrue(operations.values(), stored)),
    ]


def _contradictions(history: History) -> Iterator[str]:
    for operation in history.operations.values():
        if len(operation.answers) > 1:
            yield f"{operation.key}: {', '.join(str(answer) for answer in operation.answers)}"


def _unexpected(history: History) -> Iterator[str]:
    for one in history.planned:
        if one.expected and one.outcome != "unknown" and one.status not in one.expected:
            yield f"{one.kind}: {one.method} {one.path} at {one.sent_s:.0f} s was answered {one.status}"


def _silence(history: History) -> Iterator[str]:
    """Unknown outcomes are right while a fault lasts, and clients go on after the last one until changes are made.

    Reads and invalid requests say nothing: they are answered although no change can be written any more.
    """
    last = [one.outcome for one in history.attempts if one.key is not None][-LAST:]
    if len(last) == LAST and "unknown" in last and "ok" not in last:
        yield f"none of the last {LAST} changes was acknowledged"


def _accepted(history: History) -> Iterator[str]:
    for one in history.misuses:
        if one.outcome == "ok":
            yield f"{one.key}: {one.method} {one.path} with another body was answered {one.status}"


def _untrue(operations: Iterable[Operation], stored: Mapping[str, StoredAnswer]) -> Iterator[str]:
    for operation in operations:
        answer = stored.get(operation.key)
        is_made = answer is not None and answer.status < HTTPStatus.BAD_REQUEST
        if operation.outcome == "unknown":
            continue
        if answer is None:
            if operation.outcome == "ok":
                yield f"{operation.key}: acknowledged, and not there"
        elif operation.outcome == "failed" and is_made:
            yield f"{operation.key}: failed with {operation.answers[0][0]}, and is there"
        elif (answer.status, answer.body) not in operation.answers:
            yield f"{operation.key}: answered {operation.answers[0]}, and stored as {answer.status, answer.body}"
