// The page: it takes the token, follows the stream, and lets each view draw what has changed.

import { BreakView } from "./breakit.js";
import { ChainView } from "./chain.js";
import { byId, setText } from "./dom.js";
import { EventsView } from "./events.js";
import { LessonView } from "./lesson.js";
import { Plot } from "./plot.js";
import { SinksView } from "./sinks.js";
import { follow } from "./stream.js";
import { takeToken } from "./token.js";

const STATES = {
  live: "live",
  lost: "no answer; trying again",
  refused: "open the address that the terminal shows: it has the token",
};

function begin() {
  takeToken();
  const events = new EventsView();
  const views = [new ChainView(events), new SinksView(), new Plot(), new LessonView(), new BreakView(), events];
  let latest;
  let pending = new Set();
  const draw = () => {
    const changed = pending;
    pending = new Set();
    for (const view of views) {
      try {
        view.render(latest, changed);
      } catch (error) {
        console.error(error); // the other views are drawn all the same
      }
    }
  };
  follow(
    (doc, changed) => {
      latest = doc;
      if (!pending.size) requestAnimationFrame(draw);
      for (const name of changed) pending.add(name);
    },
    (state) => {
      setText(byId("link"), STATES[state]);
      byId("link").className = `link ${state}`;
      document.body.classList.toggle("stale", state !== "live");
    },
  );
}

begin();
