// Makes elements. Text of a run only gets into text nodes and attributes, never into markup.

/** h("a.link", {href, onclick}, ...children): an element; children are nodes, text, or lists. */
export function h(spec, props, ...children) {
  const [tag, ...classes] = spec.split(".");
  const node = document.createElement(tag || "div");
  if (classes.length) node.className = classes.join(" ");
  fill(node, props, children);
  return node;
}

/** The same for SVG. */
export function s(spec, props, ...children) {
  const [tag, ...classes] = spec.split(".");
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  if (classes.length) node.setAttribute("class", classes.join(" "));
  fill(node, props, children);
  return node;
}

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "href" && !isLocal(value)) continue;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  append(node, children);
}

// Only links to this page's own addresses are made.
const isLocal = (href) => /^[/?#](?!\/)/.test(String(href));

function append(node, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(node, child);
    else node.append(child instanceof Node ? child : visible(String(child)));
  }
}

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

/** Control characters, ANSI escapes and direction marks as visible symbols. */
export function visible(text) {
  return text.replace(/\r\n/g, "\n").replace(HIDDEN, (c) => {
    const code = c.codePointAt(0);
    if (code < 32) return String.fromCodePoint(0x2400 + code);
    if (code === 127) return "\u2421";
    return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
  });
}

/** A control by what stays the same when its view is drawn again; null for anything else. */
function signature(node) {
  if (node.tagName === "SUMMARY") return `SUMMARY ${node.parentNode.id}`;
  const named = ["id", "name", "data-row", "data-mode", "aria-label", "href"].find((name) => node.hasAttribute(name));
  return named ? `${node.tagName} ${named}=${node.getAttribute(named)} ${node.type === "checkbox" ? node.value : ""}` : null;
}

/** The control inside `root` that has focus; see `focusAgain`. */
export function focusedIn(root) {
  const node = document.activeElement;
  return node && node !== root && root.contains(node) ? { signature: signature(node), at: node.selectionStart ?? null } : null;
}

/** Focus the control that had it before the view was drawn again; false if it is not there any more. */
export function focusAgain(root, held) {
  if (!held?.signature) return false;
  const tag = held.signature.split(" ", 1)[0];
  const node = [...root.querySelectorAll(tag)].find((one) => signature(one) === held.signature);
  if (!node) return false;
  node.focus({ preventScroll: true });
  if (held.at !== null && node.setSelectionRange) node.setSelectionRange(held.at, held.at);
  return true;
}

/** Replace what a node holds: open details stay open, tables stay scrolled, and focus stays on its control. */
export function redraw(node, children) {
  const held = focusedIn(node), open = [...node.querySelectorAll("details[open]")].map((one) => one.id);
  const scrolled = [...node.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
  node.replaceChildren(...children);
  for (const one of node.querySelectorAll("details")) if (one.id && open.includes(one.id)) one.open = true;
  node.querySelectorAll(".scroll").forEach((one, i) => { one.scrollLeft = scrolled[i] || 0; });
  focusAgain(node, held);
}

/** Long text, cut until its button is clicked. */
export function long(spec, text, most = 6000, render = (t) => [t]) {
  if (text.length <= most) return h(spec, null, render(text));
  const node = h(spec, null, render(text.slice(0, most)));
  const more = h("button.more", { type: "button" }, `… show all ${text.length.toLocaleString("en")} characters`);
  more.addEventListener("click", () => node.replaceChildren(...h("div", null, render(text)).childNodes));
  node.append(more);
  return node;
}

const tip = () => document.getElementById("tip");

/** Show a tooltip of rows [[label, value], ...] near a pointer or an element. */
export function showTip(rows, x, y) {
  const box = tip();
  box.replaceChildren(...rows.map((row) =>
    typeof row === "string" ? h("b", null, row)
      : h("div.tiprow", null, row[2] !== undefined && h("i", { style: { background: row[2] } }), h("span", null, row[0]), h("span.tipval", null, row[1]))));
  box.hidden = false;
  const left = Math.max(8, Math.min(innerWidth - box.offsetWidth - 8, x + 14));
  const above = y - box.offsetHeight - 12;
  box.style.left = `${left}px`;
  box.style.top = `${above < 8 ? Math.min(innerHeight - box.offsetHeight - 8, y + 18) : above}px`;
}

export function hideTip() { tip().hidden = true; }
