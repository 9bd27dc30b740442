// The chain from left to right. Each station shows what the part itself says.

import { byId, h, refresh } from "./dom.js";
import { bytes, count, plural } from "./format.js";
import { mark } from "./marks.js";

const BATCHES = 3;
const SLOP = 10; // pixels that a pointer may move in a click
const WAL_SCALE = 4 * 1024 * 1024; // a lag of this fills the bar

const STATIONS = [
  { id: "client", title: "Ledger", wants: ["source"], draw: drawService },
  { id: "outbox", title: "Outbox", wants: ["source"], draw: drawOutbox },
  { id: "slot", title: "Replication slot", wants: ["slot"], draw: drawSlot },
  { id: "connect", title: "Kafka Connect", wants: ["connect"], draw: drawConnect },
  { id: "topics", title: "Kafka topics", wants: ["topics"], draw: drawTopics },
  { id: "spark", title: "Spark batches", wants: ["sinks"], draw: drawSpark },
  { id: "tables", title: "Sinks", wants: ["sinks"], draw: drawSinks },
];

export class ChainView {
  /** `events` opens an event, and says which one is followed. */
  constructor(events) {
    this.events = events;
    this.watchPointer(byId("stations"));
    byId("stations").replaceChildren(
      ...STATIONS.map((station) =>
        h("li", { id: `station-${station.id}`, class: "station" }, h("h3", {}, station.title), h("div", { class: "body" }, note("waiting"))),
      ),
    );
  }

  render(doc, changed) {
    for (const station of STATIONS) {
      if (!station.wants.some((name) => changed.has(name))) continue;
      const element = byId(`station-${station.id}`);
      const part = doc.parts[station.wants[0]];
      const isDown = part?.down !== undefined;
      element.classList.toggle("down", isDown);
      refresh(
        element.querySelector(".body"),
        isDown ? [badge("down", "bad"), note(part.down)] : part ? station.draw(part, this) : [note("waiting")],
      );
    }
  }

  dot(one) {
    const dot = mark(one, one.again);
    dot.dataset.event = one.id;
    dot.classList.toggle("followed", one.id === this.events.followed);
    return dot;
  }

  /** Open the event of a dot that is pressed. The dot may have been drawn again before it is released. */
  watchPointer(stations) {
    let pressed = null;
    stations.addEventListener("pointerdown", (event) => {
      const dot = event.target.closest("[data-event]");
      pressed = dot && { id: dot.dataset.event, x: event.clientX, y: event.clientY };
    });
    document.addEventListener("pointercancel", () => (pressed = null)); // a touch that scrolls
    document.addEventListener("pointerup", (event) => {
      const isClick = pressed && Math.hypot(event.clientX - pressed.x, event.clientY - pressed.y) < SLOP;
      if (isClick) this.events.open(pressed.id);
      pressed = null;
    });
  }
}

function drawService(source) {
  return [figure(count(source.transfers), "transfers"), note(plural(source.accounts, "account")), note("one transaction: rows and events")];
}

function drawOutbox(source, view) {
  return [figure(count(source.events), "events"), lane(source.newest.toReversed().map((one) => view.dot(one)))];
}

function drawSlot(slot) {
  return [
    figure(bytes(slot.lag_bytes), "behind the log"),
    meter(slot.lag_bytes / WAL_SCALE, "Lag of the replication slot", bytes(slot.lag_bytes)),
    badge(slot.active ? "read by Debezium" : "inactive", slot.active ? "good" : "bad"),
    note(`confirmed ${slot.confirmed}`),
  ];
}

function drawConnect(connect) {
  const runs = connect.state === "RUNNING" && connect.task === "RUNNING";
  return [
    figure(connect.mode === "exactly-once" ? "exactly-once" : connect.mode, "Debezium → Kafka", "words"),
    badge(runs ? "task runs" : `task ${connect.task.toLowerCase()}`, runs ? "good" : "bad"),
    note(connect.boundary ? `transaction boundary: ${connect.boundary}` : ""),
    connect.error ? note(connect.error) : null,
  ].filter(Boolean);
}

function drawTopics(topics, view) {
  const blocks = topics.topics.map((topic) =>
    h(
      "div",
      { class: "topic" },
      h("p", { class: "name" }, topic.name),
      topic.partitions.map((partition) =>
        h(
          "div",
          { class: "partition" },
          h("span", { class: "ordinal" }, partition.number),
          lane(partition.newest.toReversed().map((one) => view.dot(one))),
        ),
      ),
    ),
  );
  return [...blocks, note(`${plural(topics.repeats, "duplicate")}, ${plural(topics.strangers, "foreign record")}`)];
}

function drawSpark({ sinks }) {
  return sinks.map((sink) =>
    h(
      "div",
      { class: "batches" },
      h("p", { class: "name" }, sink.name, sink.transform && h("span", { class: "tag" }, `transform: ${sink.transform}`)),
      h("ol", { class: "batch-list" }, sink.batches.filter((batch) => batch.records !== null).slice(-BATCHES).map(drawBatch)),
    ),
  );
}

function drawBatch(batch) {
  const state = batch.committed ? "recorded" : "not recorded";
  return h(
    "li",
    { class: batch.committed ? "batch" : "batch open" },
    h("span", { class: "ordinal" }, `#${batch.number}`),
    h("span", { class: "records" }, count(batch.records)),
    h("span", { class: "tick", "aria-hidden": "true" }, batch.committed ? "✓" : "…"),
    h("span", { class: "hidden" }, ` offsets, ${state} by Spark`),
  );
}

function drawSinks({ sinks }) {
  return sinks.map((sink) =>
    h(
      "div",
      { class: "sink-line" },
      h("p", { class: "name" }, sink.name),
      badge(sink.state, sink.state === "running" ? "good" : "bad"),
      note(sink.lag ? `${count(sink.lag)} behind` : "nothing waits"),
    ),
  );
}

// ---------------------------------------------------------------------------------------------------------------------

const figure = (number, unit, kind = "") => h("p", { class: `figure ${kind}` }, number, h("span", { class: "unit" }, unit));
const note = (text) => h("p", { class: "note" }, text);
const badge = (text, kind) => h("p", { class: `badge ${kind}` }, text);
const lane = (dots) => h("div", { class: "lane", "aria-hidden": "true" }, dots);

function meter(share, label, text) {
  const bar = h("div", { class: "bar" });
  bar.style.inlineSize = `${Math.min(100, Math.max(1, share * 100))}%`;
  return h("div", { class: "meter", role: "img", "aria-label": `${label}: ${text}` }, bar);
}
