// Two evaluations side by side: of two runs, or of two stages of one. Curves, paired accuracy, one problem's rollouts.

import { h } from "/static/dom.js";
import { at, get } from "/static/api.js";
import { number, percent, plural, seconds, whole, words } from "/static/format.js";
import { figure } from "/static/chart.js";
import { diff } from "/static/diff.js";
import { rich } from "/static/math.js";
import { dots, verdict } from "/static/parts.js";
import { COMPARED, line } from "/static/runs.js";

export async function load(_, query, context) {
  const asked = { a: query.a, b: query.b, sa: query.sa, sb: query.sb, mode: query.mode };
  const data = await get("compare", null, asked);
  const two = data.a.run !== data.b.run;
  const curves = two ? await Promise.all([data.a, data.b].map((side) => get("curves", side.run))) : [];
  const heads = two ? await get("runs") : [];
  const problem = h("div", { id: "problem" });
  const show = (row) => { context.note({ problem: row.problem }); return sideBySide(problem, data, row); };
  const node = h("section.compare", null,
    h("h1", null, title(data, two)),
    choices(data, asked, context),
    tiles(data),
    data.unmatched > 0 && h("p.notice", null, `${plural(data.unmatched, "problem")} that only one side has, or that differ in their text, are left out.`),
    problem,
    h("div.pair.kindpair", null, kinds(data), two && results(heads, data)),
    two && [h("h2", null, "Training curves"), h("div.grid2", null, COMPARED.map(([metric, name, note, format, range]) =>
      figure([data.a, data.b].map((side, i) => line({ name: side.run }, curves[i], metric, i)), { title: name, note, format, range, xName: "RL step" })))],
    h("h2", { id: "problems" }, "Problems"), problems(data, show, query));
  const chosen = data.problems.find((row) => row.problem === query.problem);
  return { title: title(data, two), node, crumbs: [["runs", "/?all"], ["compare", null]], up: two ? "/?all" : at.run(data.a.run), ready() { if (chosen) sideBySide(problem, data, chosen); } };
}

const label = (data, side) => data.a.run === data.b.run ? `after ${data[side].stage}` : data[side].run;
const title = (data, two) => two ? `${data.a.run} and ${data.b.run}` : `${data.a.run}: after ${data.a.stage} and after ${data.b.stage}`;

function choices(data, asked, context) {
  const select = (name, text, values, chosen) => h("label", null, h("span", null, text), h("select", { name, onchange: (e) => context.go(at.compare({ ...asked, [name]: e.target.value })) },
    values.map((v) => h("option", { value: v, selected: v === chosen }, v))));
  return h("form.filters", { onsubmit: (e) => e.preventDefault() },
    select("sa", `A: ${data.a.run}, after`, data.a.stages, data.a.stage), select("sb", `B: ${data.b.run}, after`, data.b.stages, data.b.stage), select("mode", "evaluation", data.modes, data.mode));
}

const signed = (v, format) => v === 0 ? format(0) : `${v > 0 ? "+" : "−"}${format(Math.abs(v))}`;
const points = (v) => `${number(Number((100 * v).toFixed(1)))}`;

function tiles(data) {
  const p = data.paired, gain = p.difference.mean;
  const clear = p.difference.low > 0 || p.difference.high < 0;
  const tile = (name, value, note, kind = "") => h("div.tile", null, h("div.tile-name", null, name), h("div.tile-value", null, h(`span.is${kind}`, null, value)), h("div.tile-note", null, note));
  const interval = (e) => `95% ${percent(e.low)} – ${percent(e.high)}, ${plural(e.count, "problem")}`;
  return h("div.tiles", null,
    tile(`A: ${label(data, "a")}`, percent(data.first.mean), interval(data.first)), tile(`B: ${label(data, "b")}`, percent(data.second.mean), interval(data.second)),
    tile("B − A, paired by problem", `${signed(gain, points)} points`, `95% ${signed(p.difference.low, points)} to ${signed(p.difference.high, points)}, p ${p.p < 0.001 ? "< 0.001" : `= ${number(p.p)}`}`, clear ? gain > 0 ? ".better" : ".worse" : ""),
    tile("problems: B is better, worse", `${p.better}, ${p.worse}`, `${signed(p.tokens.mean, whole)} tokens per rollout (95% ${signed(p.tokens.low, whole)} to ${signed(p.tokens.high, whole)})`));
}

function kinds(data) {
  if (data.kinds.length < 2) return null;
  return h("div", null, h("h2", null, "By kind of problem"), h("div.scroll", null, h("table", null,
    h("thead", null, h("tr", null, ["kind", "problems", "A", "B", "B − A", "95% interval"].map((t) => h("th", null, t)))),
    h("tbody", null, data.kinds.map((k) => h("tr", null, h("th", null, words(k.kind || "–")), h("td", null, whole(k.first.count)), h("td", null, percent(k.first.mean)), h("td", null, percent(k.second.mean)),
      h("td", null, h("b", null, signed(k.difference.mean, points))), h("td.muted", null, `${signed(k.difference.low, points)} to ${signed(k.difference.high, points)}`)))))));
}

/** What the two runs have on record besides. */
function results(heads, data) {
  const [a, b] = [data.a, data.b].map((side) => heads.find((one) => one.name === side.run));
  if (!a || !b) return null;
  const rows = [["recipe", (r) => r.recipe], ["seed", (r) => r.seed], ["resampling", (r) => r.variant], ["model", (r) => r.model], ["RL steps", (r) => whole(r.rl_steps)], ["reward, last steps", (r) => percent(r.reward)], ["tool-error rate in correct rollouts", (r) => percent(r.failing)], ["mean length", (r) => whole(r.length)], ["time", (r) => seconds(r.busy_s)]];
  return h("div", null, h("h2", null, "Runs"), h("div.scroll", null, h("table", null, h("thead", null, h("tr", null, h("th", null, "figure"), h("th", null, a.name), h("th", null, b.name))),
    h("tbody", null, rows.map(([name, value]) => h("tr", null, h("th", null, name), h("td", null, value(a)), h("td", null, value(b))))))));
}

const squares = (rewards) => dots(rewards.map((reward) => ({ reward, kept: true, failed: 0 })));

function problems(data, show, query) {
  const list = h("tbody"), order = query.order || "largest";
  const fill = (which) => list.replaceChildren(...data.problems.filter((row) => ({ better: row.difference > 0, worse: row.difference < 0, differ: row.difference !== 0 }[which] ?? true)).map((row) =>
    h("tr", null, h("th.clip", null, h("button.link", { type: "button", name: "problem", value: row.problem, "aria-label": `compare ${row.prompt}`, onclick: () => show(row) }, rich(row.prompt, row.prompt_math))),
      h("td.left", null, words(row.kind)), h("td.left", null, squares(row.rewards[0])), h("td.left", null, squares(row.rewards[1])), h("td", null, h("b", null, signed(row.difference, points))))));
  fill(order);
  return [h("label.sort", null, "show ", h("select", { id: "which", onchange: (e) => fill(e.target.value) }, [["all", "all problems"], ["differ", "problems that differ"], ["better", "B is better"], ["worse", "B is worse"]].map(([v, t]) => h("option", { value: v }, t)))),
    h("div.scroll", null, h("table.matches.problems", null, h("thead", null, h("tr", null, ["problem", "kind", "A", "B", "B − A"].map((t) => h(["kind", "A", "B"].includes(t) ? "th.left" : "th", null, t)))), list))];
}

/** The rollouts of one problem: one of each side, with the differences marked. */
async function sideBySide(box, data, row) {
  const sides = [data.a, data.b], groups = await Promise.all(sides.map((side, i) => get("group", side.run, { id: row.groups[i] })));
  const at_ = [0, 1].map(() => 0);
  const draw = async () => {
    const two = await Promise.all(sides.map((side, i) => get("rollout", side.run, { id: groups[i].rollouts[at_[i]].id })));
    const text = (r) => r.segments.map((part) => `${{ thought: "", code: "▸ ", result: "◂ ", answer: "= " }[part.kind]}${part.text}`).join("\n\n");
    const marked = diff(text(two[0]), text(two[1]));
    box.replaceChildren(h("h2", null, rich(row.prompt, row.prompt_math)), h("p.muted", null, "expected answer ", h("code", null, groups[0].problem.answer)), h("div.pair", null, two.map((r, i) => h("div.card", null,
      h("div.rollout-head", null, h("b", null, `${"AB"[i]}: ${label(data, "ab"[i])}`),
        groups[i].rollouts.length > 1 && h("select", { "aria-label": `rollout of ${"AB"[i]}`, onchange: (e) => { at_[i] = Number(e.target.value); draw(); } }, groups[i].rollouts.map((one, n) => h("option", { value: n, selected: n === at_[i] }, `rollout ${n}`))),
        verdict(r.reward?.value), h("span.muted.small", null, plural(r.tokens, "token")), h("a.small", { href: at.rollout(sides[i].run, r.id) }, "open")),
      h("pre.diff", null, marked[i].map(([same, piece]) => same ? piece : h("mark", null, piece)))))));
    box.dataset.ready = `${row.problem} ${at_.join(",")}`;
  };
  await draw();
  box.scrollIntoView({ block: "nearest" });
}
