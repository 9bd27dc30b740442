// The mark of an event: a colour for its key, a shape for its version. The shape says what the colour says not.

import { s } from "./dom.js";

const COLOURS = 8;
const colours = new Map(); // by key: the first accounts get the colours that differ most

export function colourOf(key) {
  if (!colours.has(key)) colours.set(key, colours.size % COLOURS);
  return colours.get(key);
}

/** The mark of an event; `again` draws a ring. */
export function mark(event, again = false) {
  const key = event?.key ?? "";
  const shape = event ? shapeOf(event.version) : s("circle", { cx: 7, cy: 7, r: 2.2 });
  return s(
    "svg",
    { class: `mark ${event ? `k${colourOf(key)}` : "unknown"}`, viewBox: "0 0 14 14", "aria-hidden": "true" },
    again && s("circle", { cx: 7, cy: 7, r: 6.2, class: "ring" }),
    shape,
  );
}

function shapeOf(version) {
  if (String(version) === "1") return s("circle", { cx: 7, cy: 7, r: 4 });
  if (String(version) === "2") return s("rect", { x: 3.2, y: 3.2, width: 7.6, height: 7.6, rx: 1 });
  return s("path", { d: "M7 2.4 12 11.4H2Z" });
}
