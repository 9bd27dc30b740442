"""Writes to Cassandra in which an older event never wins.

Each write has the event's version as its timestamp. Of two writes to a cell Cassandra keeps the one with the higher
timestamp, in whatever order they arrive, and a deletion hides what is not newer. So a write may be repeated, many are
on their way at once, and nothing is read first.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from cassandra import ConsistencyLevel
from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, Session
from cassandra.concurrent import execute_concurrent
from cassandra.policies import RoundRobinPolicy, TokenAwarePolicy

Write = tuple[str, tuple[Any, ...]]  # a statement with its values
AT_ONCE = 128  # writes on their way
TIMEOUT_S = 10
# The sink logs what failed, in a line. The driver would add a traceback for each attempt to connect.
logging.getLogger("cassandra").setLevel(logging.CRITICAL)


@cache
def session() -> Session:
    """The session of this process. The driver connects again by itself to a node that was unavailable.

    QUORUM: a write returns once most replicas have it, so the loss of a node afterwards takes no event with it.
    """
    nearest = TokenAwarePolicy(RoundRobinPolicy())
    profile = ExecutionProfile(nearest, consistency_level=ConsistencyLevel.QUORUM, request_timeout=TIMEOUT_S)
    hosts, port = os.environ["CASSANDRA_HOSTS"].split(","), int(os.environ.get("CASSANDRA_PORT", "9042"))
    cluster = Cluster(hosts, port, protocol_version=5, execution_profiles={EXEC_PROFILE_DEFAULT: profile})
    try:
        return cluster.connect()
    except BaseException:
        cluster.shutdown()
        raise


def write(writes: Iterable[Write]) -> None:
    """Execute these, in no order, and return when all are written. Raises the first error."""
    execute_concurrent(session(), [(prepared(cql), values) for cql, values in writes], concurrency=AT_ONCE)


def read(cql: str, *values: object) -> Iterator[Any]:
    """The rows of a query. The driver gets each page of 5,000 when it is needed."""
    return iter(session().execute(prepared(cql), values))


@cache
def prepared(cql: str) -> Any:
    """A statement that each node parses once."""
    statement = session().prepare(cql)
    statement.is_idempotent = True  # the driver may send it again
    return statement
