// One stream for all tabs of a browser: it allows only six connections to a host.

import { apply, empty } from "./content.js";
import { openStream } from "./source.js";

const ports = new Set();
let content = empty();
let state = "lost";
let isOpen = false;

function post(message) {
  for (const port of ports) port.postMessage(message);
}

function open() {
  isOpen = true;
  openStream(
    self.name,
    (kind, data) => {
      [content] = apply(content, kind, data);
      post({ kind, data });
    },
    (now) => {
      state = now;
      post({ kind: "state", data: now });
    },
  );
}

self.onconnect = ({ ports: [port] }) => {
  ports.add(port);
  port.onmessage = ({ data }) => {
    if (data === "bye") ports.delete(port);
  };
  port.postMessage({ kind: "state", data: state });
  port.postMessage({ kind: "whole", data: content });
  if (!isOpen) open();
};
