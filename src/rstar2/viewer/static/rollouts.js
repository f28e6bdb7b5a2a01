// Search: the rollouts of a run, filtered, searched by text, one page at a time.

import { h } from "/static/dom.js";
import { at, get } from "/static/api.js";
import { number, plural, whole, words } from "/static/format.js";
import { rich } from "/static/math.js";
import { crumbsOf, kept, outcome, verdict } from "/static/parts.js";

const FIELDS = ["text", "stage", "step", "kind", "reward", "kept", "stop", "outcome", "least", "most", "sort"];

export async function load({ run }, query, context) {
  const facets = await get("facets", run);
  const asked = Object.fromEntries(FIELDS.map((f) => [f, query[f] || ""]));
  const list = h("tbody"), note = h("p.muted", { role: "status", id: "count" }), more = h("p.pages");
  let stopped = false;
  const fetchPage = async (start, budget) => {
    const page = await get("rollouts", run, { ...asked, start });
    if (stopped) return;
    list.append(...page.rows.map((r) => row(run, r)));
    const listed = list.childElementCount;
    note.textContent = asked.text
      ? `${plural(listed, "match", "matches")} in ${whole(page.searched)} of ${plural(page.total, "rollout")}${page.next === null ? "" : " searched"}`
      : page.total === 0 ? "No rollout matches." : `${whole(listed)} of ${plural(page.total, "rollout")}`;
    more.replaceChildren();
    if (page.next === null) return;
    // a text search continues by itself until a page is full
    if (asked.text && budget - page.rows.length > 0) { more.append(h("span.muted", null, "searching …")); return fetchPage(page.next, budget - page.rows.length); }
    more.append(h("button.button", { type: "button", onclick: () => fetchPage(page.next, 50) }, asked.text ? "continue searching" : "show more"));
  };
  const submit = (form) => { const fields = Object.fromEntries(FIELDS.map((f) => [f, form.elements[f]?.value.trim() || ""])); if (fields.sort === "newest") fields.sort = ""; return context.go(at.rollouts(run, fields)); };
  const node = h("section", null, h("h1", null, "Rollouts"), form(facets, asked, submit), note,
    h("div.scroll", null, h("table.matches", null, h("thead", null, h("tr", null, ["problem", "step", "verdict", "chosen", "calls", "stopped", "tokens", "turns", "entropy"].map((t) => h(["step", "calls", "stopped"].includes(t) ? "th.left" : "th", null, t)))), list)), more);
  await fetchPage(0, 50);
  return { title: `search ${run}`, node, crumbs: crumbsOf(run, ["rollouts", null]), up: at.run(run), close() { stopped = true; } };
}

function form(facets, asked, submit) {
  const select = (name, label, values) => h("label", null, h("span", null, label), h("select", { name, onchange: (e) => submit(e.target.form) },
    values.map(([v, t]) => h("option", { value: v, selected: asked[name] === v }, t))));
  const any = (list, all = "any") => [["", all], ...list.map((v) => [v, words(v)])];
  return h("form.filters", { onsubmit: (e) => { e.preventDefault(); submit(e.target); } },
    h("label.wide", null, h("span", null, "text"), h("input", { id: "q", name: "text", type: "search", value: asked.text, placeholder: "in problem, reasoning, code, tool output", autocomplete: "off" })),
    select("stage", "stage", any(facets.stages, "all")),
    h("label", null, h("span", null, "step"), h("input", { name: "step", inputmode: "numeric", size: "4", value: asked.step, onchange: (e) => submit(e.target.form) })),
    facets.kinds.length > 0 && select("kind", "kind", any(facets.kinds)),
    select("reward", "verdict", [["", "any"], ["1", "correct"], ["0", "wrong"], ["none", "not graded"]]),
    select("kept", "chosen", [["", "any"], ["yes", "kept"], ["no", "dropped"], ["unused", "not used"]]),
    select("outcome", "tool outcome", any(["failed", ...facets.outcomes])),
    select("stop", "stopped", any(facets.stops)),
    h("label", null, h("span", null, "tokens"), h("span.between", null, h("input", { name: "least", inputmode: "numeric", size: "4", placeholder: "from", value: asked.least, onchange: (e) => submit(e.target.form) }), h("input", { name: "most", inputmode: "numeric", size: "4", placeholder: "to", value: asked.most, onchange: (e) => submit(e.target.form) }))),
    select("sort", "order", [["newest", "newest"], ["oldest", "oldest"], ["longest", "longest"], ["entropy", "highest entropy"], ["failed", "most failed calls"], ["turns", "most turns"], ["slowest", "slowest"]]),
    h("button.button", null, "Search"));
}

function row(run, r) {
  const href = at.rollout(run, r.id);
  return h("tr", { tabindex: "0", data: { row: href } },
    h("th.clip", null, h("a", { href }, rich(r.prompt || r.id, r.prompt_math))), h("td.left", null, /^(eval|filter)-/.test(r.stage) ? r.stage : `${r.stage} ${r.step}`), h("td", null, verdict(r.reward)),
    h("td", null, /^(eval|filter)-/.test(r.stage) ? "" : kept(r.kept)), h("td.left", null, h("span.outcomes", null, r.outcomes.map(outcome))), h("td.left", null, words(r.stop)), h("td", null, whole(r.tokens)), h("td", null, r.turns), h("td", null, number(r.entropy)));
}
