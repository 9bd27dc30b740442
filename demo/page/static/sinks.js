// The sinks side by side: what each has added up, and how far that is from the ledger.

import { byId, h } from "./dom.js";
import { count } from "./format.js";

export class SinksView {
  render(doc, changed) {
    if (!changed.has("sinks")) return;
    const part = doc.parts.sinks;
    if (part.down !== undefined) {
      byId("cards").replaceChildren(h("p", { class: "note" }, `The sinks' database: ${part.down}`));
      return;
    }
    const compared = part.sinks.filter((sink) => sink.drift !== null);
    byId("cards").replaceChildren(...compared.map(card));
  }
}

function card(sink, index) {
  const agrees = sink.drift === 0;
  const verdict = agrees ? "agrees with the ledger" : `off by ${count(sink.drift)} in ${count(sink.drift_keys)} accounts`;
  return h(
    "article",
    { class: `card s${index}` },
    h("h3", {}, h("span", { class: "swatch", "aria-hidden": "true" }), sink.name, h("span", { class: "tag" }, sink.strategy)),
    h("p", { class: "figure" }, count(sink.drift), h("span", { class: "unit" }, "cents of drift")),
    h("p", { class: `badge ${agrees ? "good" : "bad"}` }, verdict),
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

const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
