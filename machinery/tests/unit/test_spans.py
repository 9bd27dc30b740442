"""Where spans come from and go to, without a service or a sink; which traceparents are valid, and what they say."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from copy import copy
from dataclasses import replace
from random import Random

import pytest

from outbox.base import spans, trace
from outbox.base.trace import LINKS_MAX, SampledEvents
from outbox.sink.decoding.records import Records
from tests.support.made_events import DECODER, MAIN, NOW_MS, Event, as_read, nth_key, uuid7
from tests.support.paths import ROOT

RANDOM = Random(46)  # noqa: S311
TRACE = "0af7651916cd43dd8448eb211c80319c"
OURS = f"00-{TRACE}-b7ad6b7169203331-01"
PARENT = "b7ad6b7169203331"
UNSAMPLED = f"00-{TRACE}-b7ad6b7169203331-00"
FINDING = copy(DECODER)
FINDING.finds_sampled = True
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"

# What a service and a sink call, in a process of their own: OpenTelemetry takes one provider a process.
CALLS = """
import json, sys
from outbox.base import spans
from outbox.base.trace import SampledEvents
sampled = SampledEvents([(TRACEPARENT.encode(), b"id", 0), (b"1", b"1", 0), (b"\\xff1", None, 0)], 5)
def calls():
    with spans.exported("orders"):
        with spans.request("POST", "/orders/1", TRACEPARENT) as request:
            request.route, request.status = "/orders/<id>", 201
            with spans.appended({"orders"}, 2) as found:
                pass
        with spans.batch("totals", "orders", 4, sampled) as counts:
            counts["applied"] = 4
    return request.traceparent, found
"""
# An application that is instrumented already.
INSTRUMENTED = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
with trace.get_tracer("theirs").start_as_current_span("theirs"):
    calls()
spans = {span.name: span for span in exporter.get_finished_spans()}
parents = {name: span.parent and span.parent.span_id for name, span in spans.items()}
ids = {span.context.span_id: name for name, span in spans.items()}
batch = spans["apply orders"]
links = [[format(link.context.trace_id, "032x"), link.attributes["messaging.message.id"]] for link in batch.links]
found = {name: ids.get(parent) for name, parent in parents.items()}
print(json.dumps([found, links, batch.attributes["outbox.links.left_out"]]))
"""


def run(program: str) -> str:
    """What a Python program has printed."""
    program = CALLS.replace("TRACEPARENT", repr(OURS)) + program
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    "variables",
    [{ENDPOINT: ""}, {ENDPOINT: "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"}],
    ids=["empty", "disabled"],
)
def test_nothing_of_opentelemetry_is_loaded_without_an_endpoint(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = json.loads(run("print(json.dumps([calls(), *sys.modules]))"))
    assert found[0] == [OURS, None]
    assert "outbox.base.spans" in found
    assert [name for name in found[1:] if name.startswith(("opentelemetry", "google"))] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (ENDPOINT, "collector:4318"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0"),
    ],
)
def test_a_wrong_variable_is_one_line_and_no_spans(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")
    monkeypatch.setenv(name, value)
    with spans.exported("orders"):
        assert not spans.are_recorded()
    (line,) = [record.message for record in caplog.records if record.name == spans.__name__]
    assert line.startswith("no spans are exported")


def test_spans_join_those_of_an_instrumented_application(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")
    parents, links, left_out = json.loads(run(INSTRUMENTED))
    assert parents == {"theirs": None, "append orders": "theirs", "apply orders": None}
    assert (links, left_out) == ([[TRACE, "id"]], 4), "no link to an invalid one, which is counted"


def records(*traceparents: str | None) -> Records:
    """Records of events of these traces."""
    made = [Event(uuid7(RANDOM, NOW_MS), nth_key(1), 5, number + 1).record for number in range(len(traceparents))]
    headers = [("traceparent", None if one is None else one.encode()) for one in traceparents]
    return as_read(*(one._replace(headers=[*one.headers, own]) for one, own in zip(made, headers, strict=True)))


@pytest.mark.parametrize(
    ("traceparent", "found"), [(OURS, OURS), (UNSAMPLED, None), ("1", "1"), ("", None), (None, None)]
)
@pytest.mark.parametrize("is_bad", [False, True])
def test_a_sampled_event_is_found_by_its_headers(traceparent: str | None, found: str | None, is_bad: bool) -> None:
    read = records(traceparent)
    if is_bad:  # it is set aside, and linked to all the same
        read = replace(read, values=[b"no JSON"])
    decoded = FINDING.decode(read)
    event_id = dict(read.headers[0])["id"]
    assert [*decoded.sampled.first] == ([] if found is None else [(found.encode(), event_id, NOW_MS)])
    assert DECODER.decode(read).sampled == SampledEvents(), "only if somebody asks"


def test_links_are_bounded_and_the_others_are_counted() -> None:
    count = 3 * DECODER.at_once
    chunking = MAIN.chunking(MAIN.topics[0])
    read = records(*[OURS, UNSAMPLED] * (count // 2))
    chunk = replace(chunking, decoder=FINDING).chunk(read)
    sampled = [dict(of_one)["id"] for of_one in read.headers[: 2 * LINKS_MAX : 2]]
    assert [event_id for _, event_id, _ in chunk.sampled.first] == sampled
    assert chunk.sampled.total == count // 2
    assert len(FINDING.decode(next(read.parts(DECODER.at_once))).sampled.first) == LINKS_MAX
    assert type(chunk).together([chunk, chunk]).sampled.total == count
    assert pickle.loads(pickle.dumps(chunk.sampled)) == chunk.sampled  # noqa: S301 - so tasks return it


@pytest.mark.parametrize(
    ("traceparent", "is_valid", "is_sampled"),
    [
        (f"cc-{TRACE}-{PARENT}-00", True, False),  # of a later version
        (f"00-{TRACE}-{PARENT}-ff", True, True),
        *((f"{one}-01", False, False) for one in (f"ff-{TRACE}-{PARENT}", f"00-{'0' * 32}-{PARENT}")),
        *((f"{one}-01", False, False) for one in (f"00-{TRACE}-{'0' * 16}", f"00-{TRACE.upper()}-{PARENT}")),
        *((f"00-{TRACE}-{PARENT}{end}", False, False) for end in ("-01\n", "-1", "")),
        (None, False, False),
    ],
)
def test_a_traceparent_is_valid_and_sampled_or_ignored(
    traceparent: str | None, is_valid: bool, is_sampled: bool
) -> None:
    expected = (traceparent, TRACE) if is_valid else (None, None)
    assert (trace.valid(traceparent), trace.trace_id(traceparent)) == expected
    assert trace.is_sampled(traceparent) is is_sampled
