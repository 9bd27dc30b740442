// The buttons that break the chain, and what has happened.

import { arrange, byId, h, setText } from "./dom.js";
import { wallClock } from "./format.js";
import { post } from "./post.js";

const GROUPS = { traffic: "Send", relay: "Break the relay", sinks: "Break the sinks" };
const KINDS = { done: "", settled: "Settled", failed: "Did not work" };

export class BreakView {
  constructor() {
    this.buttons = new Map();
    this.sentences = new Map(); // by moment and kind
  }

  render(doc, changed) {
    const stage = doc.parts.stage;
    if (stage && (changed.has("stage") || changed.has("connect"))) {
      if (!this.buttons.size) this.make(stage.actions);
      const isSo = { "exactly-once": "exactly-once-on", "at-least-once": "exactly-once-off" }[doc.parts.connect?.mode];
      for (const action of stage.actions) {
        const button = this.buttons.get(action.name);
        // aria-disabled, so that the focus stays on a button while it works
        const isOff = Boolean(stage.busy) || action.lacks !== null || action.name === isSo;
        button.setAttribute("aria-disabled", String(isOff));
        setText(button.querySelector(".hint"), action.lacks ?? action.hint);
        button.classList.toggle("busy", stage.busy === action.label);
      }
      byId("break").classList.toggle("working", Boolean(stage.busy));
    }
    if (changed.has("said")) this.tell(doc.logs.said ?? []);
  }

  make(actions) {
    const group = (name) =>
      h(
        "div",
        { class: "group", role: "group", "aria-labelledby": `group-${name}` },
        h("h3", { id: `group-${name}` }, GROUPS[name]),
        h("div", { class: "row" }, actions.filter((action) => action.group === name).map((action) => this.button(action))),
      );
    byId("buttons").replaceChildren(...Object.keys(GROUPS).map(group));
  }

  button(action) {
    const press = () => button.getAttribute("aria-disabled") !== "true" && post("/api/act", { action: action.name });
    const button = h("button", { class: "act", "data-action": action.name, onclick: press }, action.label, h("span", { class: "hint" }, action.hint));
    this.buttons.set(action.name, button);
    return button;
  }

  tell(said) {
    const shown = said.slice(-4).reverse().map((one) => [`${one.at_ms} ${one.kind}`, one]);
    this.sentences = new Map(shown.map(([key, one]) => [key, this.sentences.get(key) ?? sentence(one)]));
    arrange(byId("said"), [...this.sentences.values()]); // a reader hears what is new, once
  }
}

function sentence(one) {
  const title = KINDS[one.kind] ? `${one.label} — ${KINDS[one.kind]}. ` : `${one.label}. `;
  return h("p", { class: one.kind }, h("time", {}, wallClock(one.at_ms)), h("strong", {}, title), one.text);
}
