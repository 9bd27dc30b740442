"""The headers of a Kafka record, whatever their bytes.

Kafka defines the name of a header as UTF-8, but brokers do not check it. If a name is something else, confluent-kafka
returns none of the record's headers, and Java clients (such as Spark's) replace the bad bytes by U+FFFD. For all our
readers such a record has no headers: whoever reads it, it is the same record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from confluent_kafka import Message

Header = tuple[str, bytes | None]

REPLACEMENT = "\ufffd"


def headers_of(message: Message) -> Sequence[Header]:
    """The headers of a record; none if the name of one is no UTF-8."""
    try:
        found: Any = message.headers() or []  # stubs are wider
    except (SystemError, UnicodeDecodeError):  # the one is confluent-kafka's mistake, caused by the other
        message.set_headers([])  # it keeps a list with gaps, and the process that reads them next dies
        return []
    return readable(found)


def readable(headers: Sequence[Header]) -> Sequence[Header]:
    """Headers as any client has them; none if the name of one was no UTF-8."""
    return [] if any(REPLACEMENT in name for name, _ in headers) else headers
