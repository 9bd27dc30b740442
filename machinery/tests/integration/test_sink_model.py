"""Generated deliveries to each strategy against a pure model: duplicated, reordered across items, cut into batches,
re-read, sent again. Those that promise to survive do; those that do not are shown failing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from tests.support.deliveries import POOL, PROMISES, Delivery, Run, checked, deliveries, each_event_once, newest_state
from tests.support.made_events import PROJECTIONS, STRATEGIES, batch
from tests.support.sink_driver import PROJECTION, Database, open_sink, projections_in, sink_on


@pytest.fixture
def run(databases: Settings, request: pytest.FixtureRequest) -> Iterator[Run]:
    with open_sink(databases, request.param) as sink:
        yield Run(sink, Database(databases, request.param).totals)


each_strategy = pytest.mark.parametrize("run", sorted({*PROMISES, *STRATEGIES}), indirect=True)  # each has a model


@each_strategy
@checked
@given(deliveries)
@example([Delivery([0, 0]), Delivery([0], back=1)])
def test_a_strategy_does_what_its_model_says_however_events_come(run: Run, batches: list[Delivery]) -> None:
    came = run.deliver(batches)
    assert run.totals() == PROMISES[run.sink.name].model(came)


@each_strategy
@pytest.mark.parametrize("back", [3, 0], ids=["read again", "sent again"])
def test_events_that_come_again(run: Run, back: int) -> None:
    came = run.deliver([Delivery([0, 1, 4]), Delivery([0, 1, 4], back)])
    promise = PROMISES[run.sink.name]
    assert (run.totals() == each_event_once(came)) is (promise.re_reads if back else promise.re_sends)


@each_strategy
def test_what_was_skipped_is_counted(run: Run) -> None:
    some = [run.ours(POOL[number]) for number in (0, 1, 4)]
    assert run.sink.apply(batch(some)).applied == 3
    again = run.sink.apply(batch(some, start=3))
    assert again.duplicates == (3 if PROMISES[run.sink.name].re_sends else 0)


def test_a_guard_on_the_last_event_alone_goes_backwards(databases: Settings, tmp_path: Path) -> None:
    """Why `upsert` compares versions: of several older events that come again, only the last would be known."""
    good = STRATEGIES["upsert"]
    guard = "batch.{version} > known.version"
    assert guard in good.select
    assert good.remember.count("greatest(") == 1
    last = good.remember.replace("greatest(known.version, excluded.version)", "excluded.version")
    weak = replace(
        good, name="weak", select=good.select.replace(guard, "batch.{version} <> known.version"), remember=last
    )
    # The projection has a guard of its own, for what a rebuild has set. Without it, all depends on the strategy.
    states = (PROJECTIONS / f"{PROJECTION}.states.sql").read_text()
    own_guard = "\n WHERE excluded.version > stored.version;"
    assert own_guard in states
    unguarded = projections_in(tmp_path, states.replace(own_guard, ";"))
    found = {}
    for one in (good, weak):
        with closing(connect(databases, SinkRole.WRITER)) as connection:
            run = Run(sink_on(connection, one, unguarded), Database(databases, one.name).totals)
            came = run.deliver([Delivery([0, 4, 8]), Delivery([0, 4], back=3)])
            found[one.name] = run.totals() == newest_state(came)
    assert found == {"upsert": True, "weak": False}
