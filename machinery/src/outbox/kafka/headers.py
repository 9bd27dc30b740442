"""The headers of a Kafka record, whatever their bytes.

Kafka defines the name of a header as UTF-8, but brokers do not check it. If a name is something else, confluent-kafka
returns none of the record's headers: for all our readers such a record has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import methodcaller
from typing import Any

from confluent_kafka import Message

Header = tuple[str, bytes | None]

# confluent-kafka returns a list with gaps and raises an error at once. A call in C notices that always; one in Python
# may not, once the interpreter has optimised it for being called often, and the process dies at the first gap.
HEADERS = methodcaller("headers")


def headers_of(message: Message) -> Sequence[Header]:
    """The headers of a record; none if the name of one is no UTF-8."""
    try:
        found: Any = HEADERS(message) or []  # stubs are wider
    except (SystemError, UnicodeDecodeError):  # the one is how Python reports such a call, caused by the other
        message.set_headers([])  # it has kept the list with gaps
        return []
    headers: Sequence[Header] = found
    return headers
