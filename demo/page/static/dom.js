// Elements, made without HTML: every text becomes a text node, whatever it contains.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children. `onclick` and its like are listeners, `class` is the class. */
export function h(tag, attributes = {}, ...children) {
  return made(document.createElement(tag), attributes, children);
}

/** The same for an SVG element. */
export function s(tag, attributes = {}, ...children) {
  return made(document.createElementNS(SVG, tag), attributes, children);
}

function made(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false).map(asNode));
  return element;
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

export const byId = (id) => document.getElementById(id);

/** Set the text of an element if it is another one: what is unchanged is not announced again. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Let an element have these children. One that is equal to its predecessor stays, and a reader's cursor with it. */
export function refresh(parent, children) {
  children.forEach((child, index) => {
    const known = parent.children[index];
    if (!known) parent.append(child);
    else if (!known.isEqualNode(child)) known.replaceWith(child);
  });
  while (parent.children.length > children.length) parent.lastElementChild.remove();
}

/** Let an element have these children. Those that stay are not moved: a moved element loses the focus. */
export function arrange(parent, children) {
  for (const child of [...parent.children]) if (!children.includes(child)) child.remove();
  children.forEach((child, index) => {
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
  });
}
