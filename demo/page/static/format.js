// Numbers and moments as people read them.

const WHOLE = new Intl.NumberFormat("en");
const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export const count = (number) => (number === null || number === undefined ? "–" : WHOLE.format(number));

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** An amount in cents, as money. */
export const money = (cents) => (cents === null || cents === undefined ? "" : (cents > 0 ? "+" : "") + WHOLE.format(cents));

export function bytes(number) {
  if (number < 1024) return `${number} B`;
  return number < 1024 * 1024 ? `${(number / 1024).toFixed(1)} KiB` : `${(number / 1024 / 1024).toFixed(1)} MiB`;
}

export function clock(ms) {
  const fraction = String(Math.floor(ms % 1000)).padStart(3, "0");
  return `${CLOCK.format(new Date(ms))}.${fraction}`;
}

export const wallClock = (ms) => CLOCK.format(new Date(ms));

/** How much later, in words. */
export function later(from, to) {
  const ms = to - from;
  if (ms < 0) return "at once";
  return ms < 1000 ? `${ms} ms later` : `${(ms / 1000).toFixed(1)} s later`;
}

/** The short form of a UUID: its end, because the beginnings of UUIDv7s are alike. */
export const short = (id) => (/^[0-9a-f-]{36}$/.test(id) ? id.slice(-6) : id.slice(0, 14));
