// The mark of an event: a colour for its key, a shape for its version.

import { s } from "./dom.js";

const COLOURS = 8;

/** The colour of a key: the same in every tab. Keys may share one. */
export function colourOf(key) {
  let hash = 0;
  for (const letter of key) hash = (Math.imul(hash, 31) + letter.codePointAt(0)) >>> 0;
  return hash % COLOURS;
}

/** The mark of an event; `again` draws a ring. */
export function mark(event, again = false) {
  return s(
    "svg",
    { class: `mark k${colourOf(event.key)}`, viewBox: "0 0 14 14", "aria-hidden": "true" },
    again && s("circle", { cx: 7, cy: 7, r: 6.3, class: "ring" }),
    shapeOf(event.version),
  );
}

function shapeOf(version) {
  if (String(version) === "1") return s("circle", { cx: 7, cy: 7, r: 4.4 });
  if (String(version) === "2") return s("rect", { x: 3, y: 3, width: 8, height: 8, rx: 1 });
  return s("path", { d: "M7 2.4 12 11.4H2Z" });
}
