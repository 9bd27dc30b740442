// The stream of the server, opened again after it broke. It is read by hand, because an EventSource sends no header.

import { bearer } from "./token.js";

const RETRY_MS = 2000;
const FRAME = /^event: (\w+)\ndata: (.*)$/;

/** Call `onMessage(kind, data)` for each message, and `onState("live" | "lost" | "refused")` when that changes. */
export async function openStream(token, onMessage, onState) {
  while ((await read(token, onMessage, onState)) !== "refused") {
    onState("lost");
    await new Promise((done) => setTimeout(done, RETRY_MS));
  }
  onState("refused");
}

async function read(token, onMessage, onState) {
  try {
    const response = await fetch("/api/stream", { headers: bearer(token) });
    if (!response.ok) return response.status === 401 ? "refused" : "lost";
    onState("live");
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return "lost";
      const frames = (rest + value).split("\n\n");
      rest = frames.pop();
      for (const frame of frames) {
        const [, kind, data] = FRAME.exec(frame) ?? []; // none: a heartbeat
        if (kind) onMessage(kind, JSON.parse(data));
      }
    }
  } catch {
    return "lost";
  }
}
