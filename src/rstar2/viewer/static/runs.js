// All opened runs: their results, and their curves compared.

import { h, redraw } from "/static/dom.js";
import { at, get } from "/static/api.js";
import { ago, number, percent, seconds, whole } from "/static/format.js";
import { figure, spark } from "/static/chart.js";
import { status } from "/static/parts.js";

export const COMPARED = [
  ["reward", "Reward", "Mean reward of all rollouts of a step.", percent, [0, 1]],
  ["failing_calls_in_correct", "Tool-error rate in correct rollouts", "Failed tool calls as a share of all tool calls.", percent, [0, 0.1]],
  ["response_length", "Response length", "Tokens, tool output included.", number, null],
  ["entropy", "Entropy", "Mean per sampled token, in nats.", number, null],
  ["truncated", "Truncated", "Rollouts cut at the length limit.", percent, [0, 0.1]],
  ["time/step", "Seconds per step", "", number, null],
];

export async function load(_, query, context) {
  const heads = await get("runs");
  const curves = new Map();
  await Promise.all(heads.filter((r) => !r.trouble).map(async (r) => curves.set(r.name, await get("curves", r.name))));
  if (heads.length === 1 && query.all === undefined) { await context.go(at.run(heads[0].name), { replace: true }); }
  const node = h("section", null, ...view(heads, curves, context));
  return {
    title: "runs", node, crumbs: [["runs", null]], running: heads.some((r) => r.status === "running"),
    async update() { const again = await load(_, { all: "" }, context); redraw(node, [...again.node.childNodes]); },
  };
}

/** Two runs to compare side by side. */
function chooser(runs, context) {
  if (runs.length < 2) return null;
  const select = (name, label, chosen) => h("select", { name, "aria-label": label }, runs.map((r, i) => h("option", { value: r.name, selected: i === chosen }, r.name)));
  return h("form.chooser", { onsubmit: (e) => { e.preventDefault(); const { a, b } = e.target.elements; context.go(at.compare({ a: a.value, b: b.value })); } },
    select("a", "first run", 0), " and ", select("b", "second run", 1), h("button.button", null, "Compare side by side"));
}

function view(heads, curves, context) {
  return [
    h("h1", null, heads.length === 1 ? "One run" : `${heads.length} runs`),
    h("div.scroll", null, h("table.runs", null,
      h("thead", null, h("tr", null, ["run", "status", "recipe", "seed", "RL steps", "reward", "trend", "accuracy, first → last", "tool-error rate in correct rollouts", "mean length", "time", "last step"].map((t) => h(t === "recipe" ? "th.left" : "th", null, t)))),
      h("tbody", null, heads.map((r) => row(r, curves.get(r.name)))))),
    ...heads.filter((r) => r.trouble).map((r) => h("p.notice.bad", { role: "alert" }, h("b", null, r.name), `: ${r.trouble}`)),
    h("div.row", null, h("h2", null, "Comparison"), chooser(heads.filter((r) => !r.trouble && r.evaluations.length), context)),
    h("div.grid2", null, COMPARED.map(([metric, title, note, format, range]) => figure(heads.filter((r) => curves.has(r.name)).map((r, i) => line(r, curves.get(r.name), metric, i)), { title, note, format, range, xName: "RL step" }))),
    compared(heads),
  ];
}

function row(r, curve) {
  if (r.trouble) return h("tr", { tabindex: "0" }, h("th", null, r.name), h("td", null, status(r.status)), h("td.left", { colspan: "10" }, "written in another format (see below)"));
  const ends = ["sampled", "greedy"].map((mode) => r.evaluations.filter((e) => e.mode === mode)).find((e) => e.length) || [];
  const first = ends[0], last = ends.at(-1);
  const href = at.run(r.name);
  return h("tr", { tabindex: "0", data: { row: href } },
    h("th", null, h("a", { href }, r.name)), h("td", null, status(r.status)),
    h("td.left.recipename", { title: r.recipe }, r.recipe, r.variant && h("span.muted", null, ` · ${r.variant}`)), h("td", null, r.seed),
    h("td", null, whole(r.rl_steps), h("span.muted", null, ` / ${whole(r.rl_steps_planned)}`)),
    h("td", null, percent(r.reward)), h("td", null, curve ? spark(line(r, curve, "reward", 0).y, percent) : ""),
    h("td", null, last ? [h("span.muted", null, `${percent(first.accuracy.mean)} → `), h("b", null, percent(last.accuracy.mean))] : "–"),
    h("td", null, percent(r.failing)), h("td", null, whole(r.length)), h("td", null, seconds(r.busy_s)), h("td", null, ago(r.updated)));
}

/** One metric over all RL stages of a run, by RL step. */
export function line(r, curves, metric, index) {
  const x = [], y = [];
  let offset = 0;
  for (const [name, stage] of Object.entries(curves.stages)) {
    if (name === "sft" || name.startsWith("eval-") || name.startsWith("filter-")) continue;
    stage.step.forEach((step, i) => { x.push(offset + step); y.push(stage.metrics[metric]?.[i] ?? null); });
    offset += stage.step.at(-1) || 0;
  }
  return { name: r.name, colour: index, x, y, smooth: 5 };
}

function compared(heads) {
  const rows = heads.filter((r) => !r.trouble).flatMap((r) => r.evaluations.map((e) => [r, e]));
  if (!rows.length) return null;
  return h("div", null, h("h2", null, "Evaluations"), h("div.scroll", null, h("table", null,
    h("thead", null, h("tr", null, ["run", "after", "mode", "accuracy", "95% interval", "tool-error rate in correct rollouts", "tool-error rate in all", "mean length", "truncated"].map((t) => h("th", null, t)))),
    h("tbody", null, rows.map(([r, e]) => h("tr", null, h("th", null, r.name), h("td", null, e.stage), h("td", null, e.mode), h("td", null, h("b", null, percent(e.accuracy.mean))),
      h("td.muted", null, `${percent(e.accuracy.low)} – ${percent(e.accuracy.high)}`), h("td", null, percent(e.failing_calls_in_correct)), h("td", null, percent(e.tool_errors)), h("td", null, whole(e.mean_length)), h("td", null, percent(e.truncated))))))));
}
