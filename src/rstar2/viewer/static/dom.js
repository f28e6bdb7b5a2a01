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
