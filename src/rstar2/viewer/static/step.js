// One step (or an evaluation): its groups, each with its rollouts as squares.

import { h, redraw } from "/static/dom.js";
import { at, get } from "/static/api.js";
import { number, percent, plural, seconds, whole, words } from "/static/format.js";
import { rich } from "/static/math.js";
import { bar, crumbsOf, dots, legendOfDots, tabs, turner } from "/static/parts.js";

const LABELS = { failing_calls_in_correct: "tool-error rate in correct rollouts", tool_errors: "tool-error rate" };
const SHOWN = [["reward", percent], ["failing_calls_in_correct", percent], ["tool_errors", percent], ["response_length", whole], ["truncated", percent], ["entropy", number], ["mismatch/abs", number], ["time/step", seconds]];

export async function load({ run, stage, step }, query, context) {
  const start = Number(query.start || 0);
  const data = await get("step", run, { stage, step, start });
  const training = !/^(eval|filter)-/.test(stage);
  const previous = data.previous === null ? null : at.step(run, stage, data.previous);
  const following = data.following === null ? null : at.step(run, stage, data.following);
  const order = query.sort || "drawn";
  const node = h("section", null,
    h("div.headline", null, h("h1", null, stage, training && h("span.muted", null, ` step ${step}`)), turner(previous, following, "step")),
    data.total > 0 && tabs([["groups", `Groups (${data.total})`, at.step(run, stage, step)], ["timeline", "Timeline", at.timeline(run, stage, step)]], "groups"),
    figures(data.metrics),
    data.total === 0 ? h("p.muted", null, "No rollouts of this step are recorded.") : [
      h("div.row", null, legendOfDots(), h("label.sort", null, "order ", h("select", { id: "sort", onchange: (e) => context.go(at.step(run, stage, step, { sort: e.target.value, start: start || "" })) },
        [["drawn", "as recorded"], ["hard", "hardest first"], ["easy", "easiest first"], ["failing", "most tool errors"], ["unused", "not used first"]].map(([v, t]) => h("option", { value: v, selected: v === order }, t))))),
      h("ol.groups", null, sorted(data.groups, order).map((group) => row(run, group, training))),
      pages(run, stage, step, data, order),
    ]);
  return { title: `${stage} ${step}`, node, crumbs: crumbsOf(run, [training ? `${stage} ${step}` : stage, null]), up: at.run(run), previous, following,
    async update() {  // a running run adds steps, and may repeat this one
      const again = await load({ run, stage, step }, query, context);
      if (again.total === this.total && again.following === this.following) return;
      Object.assign(this, { total: again.total, previous: again.previous, following: again.following });
      redraw(node, [...again.node.childNodes]);
    },
    total: data.total,
  };
}

function sorted(groups, order) {
  const key = { hard: (g) => g.right / (g.graded || 1), easy: (g) => -g.right / (g.graded || 1), failing: (g) => -g.failed, unused: (g) => Number(g.used) }[order];
  return key ? [...groups].sort((a, b) => key(a) - key(b)) : groups;
}

function figures(metrics) {
  const known = SHOWN.filter(([name]) => metrics[name] !== undefined && metrics[name] !== null);
  if (!known.length) return null;
  const all = Object.entries(metrics);
  return h("div", null, h("div.figures", null, known.map(([name, format]) => h("span.figure", null, h("b", null, format(metrics[name])), h("small", null, LABELS[name] || words(name))))),
    h("details.small", { id: "metrics" }, h("summary.muted", null, `all ${all.length} metrics`), h("div.columns", null, all.map(([k, v]) => h("div.kv", null, h("span.muted", null, k), h("span", null, number(v)))))));
}

function row(run, group, training) {
  const href = at.group(run, group.id);
  return h("li.grouprow", { tabindex: "0", data: { row: href } },
    h("a.prompt", { href }, rich(group.prompt || group.problem, group.prompt_math)),
    h("span.tags", null, group.kind && h("span.badge.plain", null, words(group.kind)), training && !group.used && h("span.badge.none", null, group.why || "not used")),
    h("span.right", null, h("span.num", null, `${group.right}/${group.graded}`), bar(group.graded ? group.right / group.graded : 0)),
    dots(group.rollouts),
    h("span.muted.small.extra", null, `${plural(Math.round(group.tokens), "token")}, ${group.failed} of ${plural(group.calls, "call")} failed`));
}

function pages(run, stage, step, data, order) {
  if (data.total <= data.groups.length) return null;
  const size = 100, end = data.start + data.groups.length;
  return h("p.pages", null,
    data.start > 0 && h("a.button", { href: at.step(run, stage, step, { start: Math.max(0, data.start - size) || "", sort: order === "drawn" ? "" : order }) }, "‹ earlier"),
    h("span.muted", null, ` ${data.start + 1} – ${end} of ${data.total} `),
    end < data.total && h("a.button", { href: at.step(run, stage, step, { start: end, sort: order === "drawn" ? "" : order }) }, "later ›"));
}
