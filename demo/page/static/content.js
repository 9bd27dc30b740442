// The page's copy of the server's document: parts, which are replaced; logs, which grow; tables, whose rows have an id.

export const empty = () => ({ parts: {}, logs: {}, tables: {}, limits: {} }); // limits: the greatest lengths

/** Apply a message of the server. Returns the content, and the names of what has changed. */
export function apply(content, kind, message) {
  if (kind === "whole") {
    const names = ["parts", "logs", "tables"].flatMap((group) => Object.keys({ ...content[group], ...message[group] }));
    return [message, new Set(names)];
  }
  const changed = new Set();
  for (const [name, value] of Object.entries(message.parts ?? {})) {
    content.parts[name] = value;
    changed.add(name);
  }
  for (const [name, entries] of Object.entries(message.logs ?? {})) {
    content.logs[name] = [...(content.logs[name] ?? []), ...entries].slice(-content.limits[name]);
    changed.add(name);
  }
  for (const [name, rows] of Object.entries(message.tables ?? {})) {
    const byId = new Map((content.tables[name] ?? []).map((row) => [row.id, row]));
    for (const row of rows) byId.set(row.id, row);
    content.tables[name] = [...byId.values()].slice(-content.limits[name]);
    changed.add(name);
  }
  return [content, changed];
}
