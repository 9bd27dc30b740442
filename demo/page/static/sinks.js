// The sinks side by side: what each has added up, and how far that is from the ledger.

import { byId, h, refresh } from "./dom.js";
import { count } from "./format.js";

export class SinksView {
  render(doc, changed) {
    if (!changed.has("sinks")) return;
    const part = doc.parts.sinks;
    if (!part) return byId("cards").replaceChildren(); // the server has started again
    if (part.down !== undefined) {
      byId("cards").replaceChildren(h("p", { class: "note" }, `The sinks' database: ${part.down}`));
      return;
    }
    const compared = part.sinks.filter((sink) => sink.drift !== null);
    refresh(byId("cards"), compared.map(card));
  }
}

function card(sink, index) {
  const [kind, verdict] = judged(sink);
  return h(
    "article",
    { class: `card s${index}` },
    h("h3", {}, h("span", { class: "swatch", "aria-hidden": "true" }), sink.name, h("span", { class: "tag" }, sink.strategy)),
    h("p", { class: "figure" }, count(sink.drift), h("span", { class: "unit" }, "cents of drift")),
    h("p", { class: `badge ${kind}` }, verdict),
    h(
      "dl",
      {},
      fact("total", count(sink.total)),
      fact("applied", count(sink.applied)),
      fact("duplicates skipped", count(sink.duplicates)),
      fact("set aside", count(sink.set_aside)),
    ),
  );
}

/** Whether a sink agrees with the ledger: a kind of badge, and words. */
function judged(sink) {
  const pending = sink.pending ? `${count(sink.pending)} accounts in flight` : "";
  if (sink.drift) return ["bad", [`off by ${count(sink.drift)} in ${count(sink.drift_keys)} accounts`, pending].filter(Boolean).join(", ")];
  if (pending) return ["open", pending];
  return sink.compared ? ["good", "agrees with the ledger"] : ["open", "not compared yet"];
}

const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
