// Elements that several views use.

import { h } from "/static/dom.js";
import { at } from "/static/api.js";
import { words } from "/static/format.js";

const GOOD = new Set(["ok", "no_output"]);

export const status = (name) => h(`span.badge.${{ finished: "good", running: "live", unreadable: "bad", collapsed: "bad" }[name] || "warn"}`, null, name);

export function outcome(name) {
  const kind = GOOD.has(name) ? "good" : name === "infrastructure" ? "warn" : "bad";
  return h(`span.badge.${kind}`, null, words(name));
}

export const verdict = (reward) => reward === null || reward === undefined ? h("span.badge.warn", null, "not graded")
  : reward > 0.5 ? h("span.badge.good", null, "correct") : h("span.badge.bad", null, "wrong");

export function kept(value) {
  if (value === true) return h("span.badge.keep", null, "kept");
  if (value === false) return h("span.badge.drop", null, "dropped");
  return h("span.badge.none", null, "not used");
}

/** The 2G rollouts of a group as squares: colour is the verdict, filled means kept. */
export function dots(rollouts) {
  const title = (r) => `${r.reward === null ? "not graded" : r.reward > 0.5 ? "correct" : "wrong"}${r.kept === null ? "" : r.kept ? ", kept" : ", dropped"}${r.failed ? `, tool errors: ${r.failed}` : ""}`;
  return h("span.dots", null, rollouts.map((r, i) =>
    h(`i.dot.${r.reward > 0.5 ? "right" : "wrong"}.${r.kept === true ? "kept" : r.kept === false ? "dropped" : "unused"}${r.failed ? ".failing" : ""}`, { title: `${i}: ${title(r)}` })));
}

export const legendOfDots = () => h("p.legend.small", null,
  h("span", null, h("i.dot.right.kept"), "correct, kept"), h("span", null, h("i.dot.wrong.kept"), "wrong, kept"),
  h("span", null, h("i.dot.right.dropped"), "dropped"), h("span", null, h("i.dot.right.unused"), "group not used"),
  h("span", null, h("i.dot.right.kept.failing"), "had a tool error"));

export function bar(share, kind = "right") {
  return h("span.meter", { role: "img", "aria-label": `${Math.round(100 * share)}%` }, h(`i.${kind}`, { style: { width: `${100 * share}%` } }));
}

/** Previous and next, with keys. */
export function turner(previous, following, what) {
  return h("span.turner", null,
    previous ? h("a.button", { href: previous, title: `previous ${what} ( [ )`, "aria-label": `previous ${what}` }, "‹") : h("span.button.off", { "aria-hidden": "true" }, "‹"),
    following ? h("a.button", { href: following, title: `next ${what} ( ] )`, "aria-label": `next ${what}` }, "›") : h("span.button.off", { "aria-hidden": "true" }, "›"));
}

export const crumbsOf = (run, ...more) => [[run, at.run(run)], ...more];

export function facts(pairs) {
  return h("dl.facts", null, pairs.filter(([, v]) => v !== null && v !== undefined && v !== "").map(([k, v]) => [h("dt", null, k), h("dd", null, v)]));
}

export function tabs(items, current) {
  return h("nav.tabs", { "aria-label": "views" }, items.map(([name, label, href]) =>
    h(`a.tab${name === current ? ".on" : ""}`, { href, "aria-current": name === current ? "page" : null }, label)));
}
