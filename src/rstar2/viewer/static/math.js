// Formulas, as the server parsed them (report/latex.py), as MathML. Only known elements are made.

import { h, visible } from "/static/dom.js";

const TAGS = new Set("math mrow mi mn mo mtext mspace mfrac msqrt mroot msub msup msubsup munder mover munderover mtable mtr mtd mphantom".split(" "));
const ATTRIBUTES = new Set("display alttext class stretchy form movablelimits accent mathvariant linethickness width".split(" "));

function node({ tag, text, children, attributes }) {
  if (!TAGS.has(tag)) return document.createTextNode(visible(text));
  const made = document.createElementNS("http://www.w3.org/1998/Math/MathML", tag);
  for (const [name, value] of attributes) if (ATTRIBUTES.has(name)) made.setAttribute(name, value);
  made.append(...(children.length ? children.map(node) : [visible(text)]));
  return made;
}

/** A formula; its source is shown instead while the page shows sources. */
export const formula = (one, space = "") => h("span.tex", { title: one.source }, node(one.math), h("code.source", null, one.source + space));

/** Text with its formulas; `parts` is null for text without. */
export function rich(text, parts) {
  if (!parts) return [text];
  const gap = (i) => isBlock(parts[i]) && typeof parts[i + 1] === "string" ? /^\s?/.exec(parts[i + 1])[0] : "";  // a block has a line of its own
  return parts.map((one, i) => typeof one === "string" ? one.slice(gap(i - 1).length) : formula(one, gap(i)));
}
const isBlock = (one) => one?.math?.attributes.some(([name, value]) => name === "display" && value === "block");

/** A short answer, as code or as the formula that it is. */
export const answer = (text, one) => one ? h("span.answermath", null, formula(one)) : h("code", null, text);

/** Text with formulas, cut until its button is clicked. */
export function longRich(spec, text, parts, most = 6000) {
  if (!parts || text.length <= most) return parts ? h(spec, null, rich(text, parts)) : null;
  const head = [];
  let used = 0;
  for (const one of parts) {
    const size = typeof one === "string" ? one.length : one.source.length;
    if (used + size > most) { if (typeof one === "string") head.push(one.slice(0, most - used)); break; }
    head.push(one);
    used += size;
  }
  const box = h(spec, null, rich(text, head));
  box.append(h("button.more", { type: "button", onclick: () => box.replaceChildren(...h("div", null, rich(text, parts)).childNodes) }, `… show all ${text.length.toLocaleString("en")} characters`));
  return box;
}
