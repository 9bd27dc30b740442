// A plot of the last minutes, drawn as SVG. Lines differ in dash as well as in colour.

import { byId, h, refresh, s, setText } from "./dom.js";
import { count, wallClock } from "./format.js";

const WINDOW_MS = 5 * 60_000;
const HEIGHT = 230;
const PAD = { left: 64, right: 14, top: 26, bottom: 26 };
const MEASURES = [
  { name: "drift", label: "Drift", unit: "cents", of: (values) => values[1] },
  { name: "total", label: "Total", unit: "cents", of: (values) => values[0], note: "The sum of all balances, without their signs. Errors of single accounts may cancel in it; the drift adds them up." },
  { name: "duplicates", label: "Duplicates skipped", unit: "events", of: (values) => values[2] },
  { name: "aside", label: "Set aside", unit: "events", of: (values) => values[3] },
  { name: "lag", label: "Behind", unit: "offsets", of: (values) => values[4] },
];

export class Plot {
  constructor() {
    this.measure = MEASURES[0];
    this.note = h("p", { class: "note" });
    const choose = (measure) => h(
      "label", {},
      h("input", { type: "radio", name: "measure", value: measure.name, checked: measure === this.measure, onchange: () => this.show(measure) }),
      h("span", {}, measure.label),
    );
    byId("measure").append(...MEASURES.map(choose));
    byId("plot").after(this.note);
    new ResizeObserver(() => this.draw()).observe(byId("plot"));
  }

  show(measure) {
    this.measure = measure;
    setText(this.note, measure.note ?? "");
    this.draw();
  }

  render(doc, changed) {
    if (!changed.has("samples") && !changed.has("marks")) return;
    this.samples = doc.logs.samples ?? [];
    this.marks = doc.logs.marks ?? [];
    this.draw();
  }

  draw() {
    const box = byId("plot");
    const width = Math.max(280, box.clientWidth);
    const samples = this.samples ?? [];
    const end = samples.at(-1)?.at_ms ?? Date.now();
    const begin = end - WINDOW_MS;
    const shown = samples.filter((sample) => sample.at_ms >= begin);
    const names = [...new Set(shown.flatMap((sample) => Object.keys(sample.sinks)))].sort();
    const lines = names.map((name) => ({
      name,
      points: shown.filter((one) => name in one.sinks).map((one) => [one.at_ms, this.measure.of(one.sinks[name]) ?? 0]),
    }));
    const values = lines.flatMap((line) => line.points.map(([, value]) => value));
    const ticks = niceTicks(Math.min(0, ...values), Math.max(1, ...values));
    const x = (ms) => PAD.left + ((ms - begin) / WINDOW_MS) * (width - PAD.left - PAD.right);
    const [low, high] = [ticks[0], ticks.at(-1)];
    const y = (value) => HEIGHT - PAD.bottom - ((value - low) / (high - low)) * (HEIGHT - PAD.top - PAD.bottom);
    const marks = (this.marks ?? []).filter((one) => one.at_ms >= begin && one.kind !== "lesson");
    const flagAt = []; // side by side where moments are close
    for (const one of marks) flagAt.push(Math.max(x(one.at_ms), (flagAt.at(-1) ?? 0) + 14));
    box.replaceChildren(
      s(
        "svg",
        { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": this.words(lines) },
        ticks.map((tick) => [
          s("line", { x1: PAD.left, x2: width - PAD.right, y1: y(tick), y2: y(tick), class: "grid" }),
          s("text", { x: PAD.left - 8, y: y(tick) + 4, class: "axis end" }, count(tick)),
        ]).flat(),
        (width < 560 ? [4, 2, 0] : [4, 3, 2, 1, 0]).map((minutes) =>
          s("text", { x: x(end - minutes * 60_000), y: HEIGHT - 6, class: minutes ? "axis middle" : "axis end" }, minutes ? `−${minutes} min` : "now")),
        marks.map((one, index) => [
          s("line", { x1: x(one.at_ms), x2: x(one.at_ms), y1: PAD.top - 6, y2: HEIGHT - PAD.bottom, class: `moment ${one.kind}` }),
          s("text", { x: flagAt[index], y: PAD.top - 12, class: `flag ${one.kind}` }, index + 1),
        ]).flat(),
        lines.map((line, index) =>
          s("path", { d: line.points.map(([ms, value], at) => `${at ? "L" : "M"}${x(ms).toFixed(1)} ${y(value).toFixed(1)}`).join(""), class: `line s${index}` })),
      ),
    );
    refresh(byId("marks"), marks.map((one) => h("li", { class: one.kind }, h("time", {}, wallClock(one.at_ms)), " ", one.text)));
  }

  words(lines) {
    const now = lines.map((line) => `${line.name} ${count(line.points.at(-1)?.[1])}`);
    return `${this.measure.label} in ${this.measure.unit} over the last five minutes. Now: ${now.join(", ") || "nothing yet"}.`;
  }
}

/** Round values from below the least to above the greatest. */
export function niceTicks(least, greatest) {
  const rough = (greatest - least) / 4 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1, [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough));
  const first = Math.floor(least / step) * step;
  const ticks = [];
  for (let tick = first; tick < greatest + step; tick += step) ticks.push(tick);
  return ticks;
}
