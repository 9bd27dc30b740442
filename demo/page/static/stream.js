// The document of the server, kept fresh: by a worker that all tabs share, or by a stream of this tab.

import { apply, empty } from "./content.js";
import { openStream } from "./source.js";
import { kept } from "./token.js";

/** Call `onChange(document, changed)` after each message, and `onState(state)` when the stream breaks or is back. */
export function follow(onChange, onState) {
  let content = empty();
  const take = (kind, data) => {
    let changed;
    [content, changed] = apply(content, kind, data);
    onChange(content, changed);
  };
  const port = sharedWorker();
  if (port === null) return openStream(kept(), take, onState);
  port.onmessage = ({ data: { kind, data } }) => (kind === "state" ? onState(data) : take(kind, data));
  addEventListener("pagehide", () => port.postMessage("bye"));
  addEventListener("pageshow", (event) => event.persisted && location.reload());
}

function sharedWorker() {
  if (!("SharedWorker" in window)) return null;
  try {
    return new SharedWorker("/static/worker.js", { type: "module", name: kept() }).port; // one for each token
  } catch {
    return null;
  }
}
