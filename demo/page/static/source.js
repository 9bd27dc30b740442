// The stream of the server, opened again after it broke.

const RETRY_MS = 2000;

/** Call `onMessage(kind, data)` for each message, and `onState("live" | "lost" | "refused")` when that changes. */
export function openStream(onMessage, onState) {
  const source = new EventSource("/api/stream");
  for (const kind of ["whole", "change"]) {
    source.addEventListener(kind, (event) => onMessage(kind, JSON.parse(event.data)));
  }
  source.onopen = () => onState("live");
  source.onerror = async () => {
    if (source.readyState !== EventSource.CLOSED) return onState("lost"); // the browser tries again by itself
    onState((await isRefused()) ? "refused" : "lost");
    setTimeout(() => openStream(onMessage, onState), RETRY_MS);
  };
}

async function isRefused() {
  try {
    return (await fetch("/api/events/none")).status === 401;
  } catch {
    return false;
  }
}
