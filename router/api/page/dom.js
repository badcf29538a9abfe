// Makes elements from data. Texts of clients and nodes are inserted here, always as plain text.

const SVG = "http://www.w3.org/2000/svg";
const HIDDEN =
  /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u115f\u180e\u200b-\u200f\u2028-\u202f\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb]|[\u{e0000}-\u{e0fff}]|[\ud800-\udfff]/gu;
const SHOWN_AS = { "\n": "↵", "\t": "⇥" };
// Control, invisible and bidirectional characters, with which a name could imitate another one.

export function visible(text) {
  return String(text).replace(HIDDEN, (character) => {
    if (character in SHOWN_AS) return SHOWN_AS[character];
    return `‹U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}›`;
  });
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : visible(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== "") {
      node.append(child instanceof Node ? child : visible(child));
    }
  }
  return node;
}

// element("td", {class: "number"}, "12"): children are nodes, texts, or lists of them; null is ignored.
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function drawn(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

// Changes the children of `parent` to `wanted`, and keeps those that are equal, so that selection, focus and scroll
// position survive each update.
export function update(parent, wanted) {
  const fresh = [wanted].flat(Infinity).filter((child) => child !== null && child !== undefined && child !== "");
  fresh.forEach((child, index) => {
    const node = child instanceof Node ? child : document.createTextNode(visible(child));
    const old = parent.childNodes[index];
    if (!old) parent.append(node);
    else if (old !== node) replaced(old, node);
  });
  while (parent.childNodes.length > fresh.length) parent.lastChild.remove();
}

function replaced(old, node) {
  if (old.nodeType === Node.TEXT_NODE && node.nodeType === Node.TEXT_NODE) {
    if (old.data !== node.data) old.data = node.data;
    return;
  }
  if (old.nodeName !== node.nodeName || old.id !== node.id || old.nodeType !== Node.ELEMENT_NODE) {
    old.replaceWith(node);
    return;
  }
  for (const { name } of [...old.attributes]) if (!node.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of node.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  update(old, [...node.childNodes]);
}
