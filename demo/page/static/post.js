// Ask the server to do something.

import { byId, setText } from "./dom.js";
import { bearer, kept } from "./token.js";

const REASONS = {
  401: "open the address that the terminal shows: it has the token",
  409: "something else is being done, or it cannot be done now",
};

/** Send JSON. If the server does not do it, the page says why. */
export async function post(path, body) {
  setText(byId("notice"), (await refusal(path, body)) ?? "");
}

async function refusal(path, body) {
  try {
    const response = await fetch(path, {
      method: "POST",
      headers: { ...bearer(kept()), "Content-Type": "application/json" },
      body: JSON.stringify(body),
    });
    return response.ok ? null : `Not done: ${REASONS[response.status] ?? `the server answered ${response.status}`}`;
  } catch {
    return "Not done: the server does not answer";
  }
}
