"""The projections, on events as the service writes them. The sink's transaction runs without Kafka and Spark."""

from __future__ import annotations

from datetime import UTC, date, datetime

from outbox import Event, Settings, append
from outbox_lab.testing import SinkRole, deliver, outbox_records, query
from sqlalchemy import Engine

from service.orders import Line, Order, cancel, event, place
from service.payloads import OrderPlacedV1

TEA = Line(product="TEA-1", pieces=2, cents=450)
CUP = Line(product="CUP-7", pieces=1, cents=1200)


def write(engine: Engine, *events: Event) -> None:
    """Write events, in this order."""
    with engine.begin() as connection:
        append(connection, *events)


def rows(settings: Settings, sql: str) -> list[tuple[object, ...]]:
    """The rows of a query of the sink database."""
    return query(settings, sql, SinkRole.OWNER)


def at(order: Order, moment: datetime) -> Order:
    """The order, as if it had changed then."""
    return order.model_copy(update={"changed_at": moment})


def test_states_follow_the_events(engine: Engine, databases: Settings) -> None:
    first, second = place([TEA]), place([TEA, CUP])
    write(engine, event(first), event(second))
    deliver(databases, outbox_records(databases), "orders")
    states = "SELECT status, cents, pieces, version FROM order_states ORDER BY pieces"
    assert rows(databases, states) == [("placed", 900, 2, 1), ("placed", 2100, 3, 1)]
    write(engine, event(cancel(second)))
    deliver(databases, outbox_records(databases), "orders")  # the first two for the second time
    assert rows(databases, states) == [("placed", 900, 2, 1), ("cancelled", 0, 3, 2)]


def test_version_1_of_an_event_gives_the_same(engine: Engine, databases: Settings) -> None:
    newest = event(place([TEA, CUP])).payload
    older = OrderPlacedV1(
        order_id=newest.order_id,
        cents=newest.cents,
        lines=newest.lines,
        version=newest.version,
        occurred_at=newest.occurred_at,
    )
    write(engine, Event.of(older))
    deliver(databases, outbox_records(databases), "orders")
    assert rows(databases, "SELECT cents, pieces FROM order_states") == [(2100, 3)]


def test_a_step_that_is_not_allowed_becomes_a_dead_letter(engine: Engine, databases: Settings) -> None:
    placed = place([TEA])
    cancelled = cancel(placed)
    again = cancelled.model_copy(update={"version": 3})  # the rules of the service refuse it
    write(engine, *map(event, (placed, cancelled, again)))
    deliver(databases, outbox_records(databases), "orders")
    detail = "order.cancelled after order.cancelled"
    assert rows(databases, "SELECT reason, detail FROM dead_letters") == [("step not allowed", detail)]
    assert rows(databases, "SELECT status, version FROM order_states") == [("cancelled", 2)]


def test_an_event_behind_a_dead_letter_of_its_order_is_parked(engine: Engine, databases: Settings) -> None:
    order = place([TEA])
    write(engine, event(order), event(cancel(order)), event(place([CUP])))
    broken, *rest = outbox_records(databases)
    deliver(databases, [{**broken, "value": {}}, *rest], "orders")
    assert rows(databases, 'SELECT reason FROM dead_letters ORDER BY "offset"') == [("schema violation",), ("parked",)]
    assert rows(databases, "SELECT status FROM order_states") == [("placed",)]  # the other order


def test_a_day_is_the_same_in_every_time_zone(engine: Engine, databases: Settings) -> None:
    zone = f"ALTER DATABASE {databases.sink_db_url.name} SET timezone = 'Pacific/Auckland'"
    query(databases, zone, SinkRole.OWNER)
    order = at(place([TEA, CUP]), datetime(2026, 11, 21, 23, 59, tzinfo=UTC))
    cancelled = at(cancel(order), datetime(2026, 11, 22, 0, 1, tzinfo=UTC))
    write(engine, event(order), event(cancelled))
    for _ in range(2):
        deliver(databases, outbox_records(databases), "sales")
    assert rows(databases, "SELECT day, product, ordered, cancelled FROM sales_by_day ORDER BY day, product") == [
        (date(2026, 11, 21), "CUP-7", 1, 0),
        (date(2026, 11, 21), "TEA-1", 2, 0),
        (date(2026, 11, 22), "CUP-7", 0, 1),
        (date(2026, 11, 22), "TEA-1", 0, 2),
    ]
