// The newest events, and the way of one of them through every hop.

import { arrange, byId, h, setText } from "./dom.js";
import { clock, later, money, short } from "./format.js";
import { mark } from "./marks.js";
import { bearer, kept } from "./token.js";

const SHOWN = 14; // until somebody asks for more
const REFUSED = "Open the address that the terminal shows: it has the token.";

export class EventsView {
  constructor() {
    this.rows = new Map(); // by id: a row stays the same element, so that the focus stays
    this.dialog = byId("event");
    this.shown = SHOWN;
    byId("more").addEventListener("click", () => this.showMore());
    this.followed = null;
    this.dialog.addEventListener("close", () => this.follow(null));
    this.dialog.addEventListener("click", (event) => event.target === this.dialog && this.dialog.close());
  }

  render(doc, changed) {
    if (!changed.has("events")) return;
    this.events = new Map((doc.tables.events ?? []).map((event) => [event.id, event]));
    this.draw();
  }

  showMore() {
    const isMore = this.shown === SHOWN;
    this.shown = isMore ? Infinity : SHOWN;
    byId("more").setAttribute("aria-expanded", String(isMore));
    setText(byId("more"), isMore ? "Show fewer events" : "Show more events");
    this.draw();
  }

  draw() {
    const newest = [...(this.events?.values() ?? [])].reverse().slice(0, this.shown);
    for (const id of [...this.rows.keys()]) if (!newest.some((event) => event.id === id)) this.rows.delete(id);
    arrange(byId("rows"), newest.map((event) => this.row(event)));
    if (this.followed && this.events?.has(this.followed)) this.drawHops(this.events.get(this.followed));
  }

  row(event) {
    const text = JSON.stringify(event);
    const known = this.rows.get(event.id);
    if (known?.text === text) return known.element;
    const hadFocus = known?.element.contains(document.activeElement);
    const button = h(
      "button",
      { class: "event", onclick: () => this.open(event.id) },
      mark(event, event.records.length > 1),
      event.type ? `${event.aggregate}.${event.type}` : "not an event of ours",
      event.type ? h("span", { class: "version" }, ` v${event.version}`) : null,
      h("span", { class: "hidden" }, `, event ${short(event.id)}`),
    );
    const [first, ...again] = event.records;
    const element = h(
      "tr",
      {},
      h("th", { scope: "row" }, button),
      h("td", { class: "code" }, short(event.key)),
      h("td", { class: "number" }, money(event.amount)),
      h("td", { class: "code" }, event.written_ms === null ? "not in the outbox" : clock(event.written_ms)),
      h("td", { class: "code" }, first ? `${first.topic} ${first.partition}:${first.offset}` : "on its way", again.length ? h("span", { class: "tag warn" }, `again ×${again.length}`) : null),
      h("td", { class: "code" }, applied(event)),
    );
    this.rows.set(event.id, { text, element });
    if (hadFocus) queueMicrotask(() => button.focus());
    return element;
  }

  async open(id) {
    this.follow(id);
    const event = this.events?.get(id);
    this.hops = h("ol", { class: "hops" });
    this.content = h("div", { class: "content" }, h("p", { class: "note" }, "looking it up"));
    byId("event-body").replaceChildren(
      h("h2", { id: "event-title" }, event ? mark(event) : null, event?.type ? `${event.aggregate}.${event.type} version ${event.version}` : "A record"),
      h("p", { class: "code id" }, id),
      this.hops,
      this.content,
    );
    if (event) this.drawHops(event);
    if (!this.dialog.open) this.dialog.showModal();
    const { row, records, reason } = await lookUp(id);
    if (this.followed !== id) return;
    if (reason) return this.content.replaceChildren(h("p", { class: "note" }, reason));
    this.content.replaceChildren(
      ...(row ? [h("h3", {}, "Row of the outbox"), code(JSON.stringify(row, null, 2))] : []),
      ...records.flatMap((record, index) => [
        h("h3", {}, index ? "Record, sent again" : "Record of the topic"),
        h("p", { class: "code" }, `${record.topic} partition ${record.partition} offset ${record.offset}, key ${record.key}`),
        code(JSON.stringify(record.headers, null, 2)),
        code(pretty(record.value)),
      ]),
    );
  }

  follow(id) {
    this.followed = id;
    for (const dot of document.querySelectorAll(".mark.followed")) dot.classList.remove("followed");
    if (id) for (const dot of document.querySelectorAll(`[data-event="${CSS.escape(id)}"]`)) dot.classList.add("followed");
  }

  drawHops(event) {
    const begin = event.written_ms ?? event.records[0]?.at_ms;
    const hops = [];
    if (event.written_ms !== null) {
      hops.push(["Written to the outbox, with the change", clock(event.written_ms), `in the write-ahead log before ${event.lsn}`]);
    }
    event.records.forEach((record, index) => {
      const text = index ? "Came again on the topic" : event.written_ms === null ? "Written to the topic, not by the relay" : "Relayed to the topic";
      hops.push([text, index || event.written_ms === null ? clock(record.at_ms) : later(begin, record.at_ms), `${record.topic}, partition ${record.partition}, offset ${record.offset}`]);
    });
    for (const [name, sink] of Object.entries(event.sinks)) {
      const when = sink.at_ms === null ? (sink.applied ? "applied earlier" : "not yet") : later(begin, sink.at_ms);
      hops.push([`Sink ${name}`, when, sink.batch === null ? "" : `Spark batch ${sink.batch}`]);
    }
    this.hops.replaceChildren(...hops.map(([what, when, where]) => h("li", {}, h("strong", {}, what), h("span", { class: "when" }, when), h("span", { class: "where" }, where))));
  }
}

/** The row and the records of an event, or the reason why none were found. */
async function lookUp(id) {
  try {
    const response = await fetch(`/api/events/${encodeURIComponent(id)}`, { headers: bearer(kept()) });
    if (response.status === 401) return { reason: REFUSED };
    if (response.status === 404) return { reason: "It is not kept any more." };
    if (!response.ok) return { reason: `It cannot be looked up: the server answered ${response.status}.` };
    return await response.json();
  } catch {
    return { reason: "It cannot be looked up: the server does not answer." };
  }
}

function applied(event) {
  const names = Object.entries(event.sinks);
  const done = names.filter(([, sink]) => sink.applied);
  if (!event.records.length) return "not yet";
  if (!names.length) return "no sink compared here reads it";
  if (done.length < names.length) return `${done.length} of ${names.length}`;
  if (done.some(([, sink]) => sink.at_ms === null)) return "earlier"; // before this page looked
  return later(event.written_ms ?? event.records[0].at_ms, Math.max(...done.map(([, sink]) => sink.at_ms)));
}

const code = (text) => h("pre", { tabindex: "0" }, text);

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
