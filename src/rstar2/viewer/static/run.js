// One run: its results, its curves by stage, and links to its steps.

import { h, redraw } from "/static/dom.js";
import { at, get } from "/static/api.js";
import { ago, number, percent, plural, seconds, whole, words } from "/static/format.js";
import { figure } from "/static/chart.js";
import { facts, status } from "/static/parts.js";

export async function load({ run }, query, context) {
  const about = await get("run", run);
  const curves = about.trouble ? null : await get("curves", run);
  const node = h("section.run", null, ...view(run, about, curves, context));
  return {
    title: run, node, crumbs: [["runs", "/?all"], [run, null]], up: "/?all", running: about.status === "running",
    async update() {
      const again = await load({ run }, query, context);
      redraw(node, [...again.node.childNodes]);
      this.running = again.running;
    },
  };
}

function view(run, about, curves, context) {
  if (about.trouble) return [h("h1", null, run), h("p.notice.bad", { role: "alert" }, about.trouble), facts([["directory", about.path]])];
  const joined = join(about, curves);
  return [
    head(run, about),
    about.unreadable > 0 && h("p.notice.warn", { role: "alert" }, `${plural(about.unreadable, "line")} of this run cannot be read and ${about.unreadable === 1 ? "is" : "are"} left out.`),
    about.progress < 1 && h("p.notice", { role: "status" }, `Reading rollouts: ${percent(about.progress)}`),
    tiles(about),
    ...sections(run, about, curves, joined, context, [stepStrip(run, about, joined), stageTable(run, about)]),
    kinds(about),
    h("h2", null, "Details"),
    h("details.card", { id: "facts" }, h("summary", null, "Environment"), facts([["directory", about.path], ...Object.entries(about.environment)])),
    h("details.card", { id: "settings" }, h("summary", null, "Settings"), h("pre.recipe", null, yaml(about.settings))),
    h("details.card", { id: "events" }, h("summary", null, `Events (${about.events.length})`), h("table.events", null, about.events.map((e) =>
      h("tr", null, h("td.muted", null, new Date(e.time * 1000).toISOString().replace("T", " ").slice(0, 19)), h("td", null, e.event), h("td.left.muted", null, brief(e)))))),
  ];
}

function head(run, about) {
  const now = about.now ? ` · ${about.now.stage} step ${about.now.step}` : "";
  return h("div.hero", null,
    h("h1", null, run),
    h("p.lead", null, status(about.status), ` ${about.recipe} · seed ${about.seed} · model ${about.model} · ${seconds(about.busy_s)} of training and evaluation`,
      about.status === "running" ? `${now} · last step ${ago(about.updated)}` : ""),
    h("p.actions", null, h("a.button", { href: at.rollouts(run) }, `Search ${plural(about.rollouts, "rollout")}`),
      about.evaluations.length > 1 && [" ", h("a.button", { href: at.compare({ a: run, b: run }) }, "Compare before and after RL")]));
}

function tiles(about) {
  const out = [];
  for (const mode of ["greedy", "sampled"]) {
    const all = about.evaluations.filter((e) => e.mode === mode);
    if (all.length) out.push(tile(`${mode} accuracy`, all.length > 1 ? percent(all[0].accuracy.mean) : null, percent(all.at(-1).accuracy.mean), all.at(-1).accuracy.mean - all[0].accuracy.mean,
      `${whole(all.at(-1).accuracy.count)} held-out problems, 95% ${percent(all.at(-1).accuracy.low)} – ${percent(all.at(-1).accuracy.high)}`));
  }
  const sampled = about.evaluations.filter((e) => e.mode === "sampled");
  const ends = sampled.length ? sampled : about.evaluations;
  if (ends.length) {
    const [a, b] = [ends[0], ends.at(-1)], two = ends.length > 1;
    out.push(tile("tool-error rate in correct rollouts", two ? percent(a.failing_calls_in_correct) : null, percent(b.failing_calls_in_correct), drop(a.failing_calls_in_correct, b.failing_calls_in_correct), `${b.mode} evaluation`));
    out.push(tile("tokens per rollout", two ? whole(a.mean_length) : null, whole(b.mean_length), 0, "tool output included"));
  } else if (about.reward !== null) {
    out.push(tile("reward", null, percent(about.reward), 0, "mean of the last steps"));
    out.push(tile("tool-error rate in correct rollouts", null, percent(about.failing), 0, "mean of the last steps"));
  }
  return out.length ? h("div.tiles", null, out) : null;
}

const drop = (before, after) => before === null || after === null ? 0 : before - after;
const tile = (name, before, after, gain, note) => h("div.tile", null, h("div.tile-name", null, name),
  h("div.tile-value", null, before !== null && [h("span.was", null, before), h("span.arrow", null, "→")], h(`span.is${gain > 0 ? ".better" : gain < 0 ? ".worse" : ""}`, null, after)), h("div.tile-note", null, note));

function stageTable(run, about) {
  if (!about.stages.length) return h("p.muted", null, "Nothing is recorded yet.");
  const rows = about.stages.map((stage) => {
    const made = about.evaluations.find((e) => e.rollouts === stage.name);
    const last = stage.recorded.at(-1);
    const href = last === undefined ? null : at.step(run, stage.name, last);
    return h(`tr.${stage.kind}`, { tabindex: href ? "0" : null, data: href ? { row: href } : {} },
      h("th", null, href ? h("a", { href }, stage.name) : stage.name), h("td.left", null, stage.kind),
      h("td", null, stage.kind === "sft" || stage.kind === "rl" ? whole(stage.steps) : ""), h("td", null, stage.groups ? whole(stage.groups) : ""), h("td", null, stage.rollouts ? whole(stage.rollouts) : ""),
      h("td", null, made ? [h("b", null, percent(made.accuracy.mean)), h("small.muted", null, ` ${percent(made.accuracy.low)} – ${percent(made.accuracy.high)}`)] : ""),
      h("td", null, made ? percent(made.failing_calls_in_correct) : ""), h("td", null, made ? whole(made.mean_length) : ""));
  });
  return h("div", null, h("h2", { id: "stages" }, "Stages"), h("div.scroll", null, h("table", null,
    h("thead", null, h("tr", null, ["stage", "kind", "steps", "groups", "rollouts", "accuracy", "tool-error rate in correct rollouts", "mean length"].map((t) => h("th", null, t)))), h("tbody", null, rows))));
}

// ---------------------------------------------------------------------------- curves

/** RL stages one after another: x is the RL step, spans are the stages. */
function join(about, curves) {
  const spans = [], x = [], at_ = [], columns = new Map();
  for (const stage of about.stages.filter((one) => one.kind === "rl")) {
    const curve = curves.stages[stage.name];
    if (!curve) continue;
    spans.push({ name: stage.name, start: stage.offset + 0.5, end: stage.offset + stage.steps + 0.5, offset: stage.offset });
    curve.step.forEach((step, i) => {
      for (const [name, values] of Object.entries(curve.metrics)) {
        if (!columns.has(name)) columns.set(name, new Array(x.length).fill(null));
        columns.get(name)[x.length] = values[i];
      }
      x.push(stage.offset + step);
      at_.push([stage.name, step]);
      for (const column of columns.values()) if (column.length < x.length) column.push(null);
    });
  }
  return { x, at: at_, spans, columns };
}

/** Charts grouped by question; `after` follows the first group. */
function sections(run, about, curves, joined, context, after) {
  const { x, spans, columns } = joined;
  const pick = (value) => { const i = x.indexOf(value); if (i >= 0) context.go(at.step(run, ...joined.at[i])); };
  const names = [...columns.keys()];
  const one = (metric, name, index = 0, extra = {}) => ({ name, colour: index, x, y: columns.get(metric) || [], smooth: 5, ...extra });
  const chart = (title, note, list, format = number, range = null, extra = {}) => x.length ? figure(list.map(([metric, name], i) => one(metric, name, i, extra.plain ? { smooth: 0 } : {})), { title, note, format, range, spans, xName: "RL step", onpick: pick, ...extra }) : null;
  const startingWith = (prefix) => names.filter((n) => n.startsWith(prefix)).map((n) => [n, words(n.slice(prefix.length))]);
  const engines = [...new Set(names.map((n) => /^engine\/(.+)\/kv_share$/.exec(n)?.[1]).filter(Boolean))];
  const perEngine = (what, fallback) => engines.length ? engines.map((e) => [`engine/${e}/${what}`, e]) : [[`engine/${fallback}`, "all engines"]];
  const time = [["time/generate", "generate"], ["time/tools", "tools"], ["time/grade", "grade"], ["time/learn", "learn"], ["time/publish", "publish"]].filter(([n]) => columns.has(n));
  const sft = curves.stages.sft;
  const groups = [
    ["learning", "Is it learning?", [
      chart("Reward", "Mean reward of all rollouts of a step. Click a step to open it.", [["reward", "reward"]], percent, [0, 1]),
      heldOut(about, spans),
      chart("Accuracy by kind", "Training rollouts by kind of problem.", startingWith("accuracy/"), percent, [0, 1]),
      chart("Groups", "Groups per step. Groups with equal rewards are dropped and replaced.", [["groups/used", "used"], ["groups/dropped", "dropped"], ["groups/refilled", "replacements"]], number, null, { plain: true }),
    ]],
    ["tools", "How does it use the tool?", [
      chart("Tool-error rate", "Failed tool calls as a share of all tool calls.", [["failing_calls_in_correct", "in correct rollouts"], ["tool_errors", "in all rollouts"]], percent, [0, 0.05]),
      chart("Tool errors by outcome", "Share of all tool calls.", startingWith("tool_errors/"), percent, [0, 0.02]),
      chart("Calls and turns", "Per rollout.", [["calls", "calls"], ["turns", "turns"]], number),
    ]],
    ["length", "How long are rollouts?", [
      chart("Response length", "Mean tokens per rollout.", [["response_length", "with tool output"], ["sampled_length", "sampled"]], number),
      chart("Truncated and unanswered", "Rollouts cut at the length limit, at the turn limit, or without an answer.", [["truncated", "length limit"], ["max_turns", "turn limit"], ["no_answer", "no answer"]], percent, [0, 0.05]),
    ]],
    ["policy", "Is the policy healthy?", [
      chart("Entropy", "Mean entropy of the policy per sampled token, in nats.", [["entropy", "entropy"]], number),
      chart("Mismatch", "Absolute difference of the logprobs of engine and learner on the same tokens.", [["mismatch/abs", "mean"], ["mismatch/abs_max", "largest"]], number, null, { log: (columns.get("mismatch/abs") || []).some((v) => v > 0), plain: true }),
      chart("Clipped tokens", "Share of tokens whose ratio is outside the clipping range.", [["ratio/clip_low", "below"], ["ratio/clip_high", "above"], ["mismatch/capped", "importance capped"]], percent),
      chart("Gradient norm", "", [["grad_norm", "norm"]], number),
    ]],
    ["time", "Where does time go?", [
      chart("Seconds per step", "Time of a step by part.", time, number, null, { stacked: true }),
      chart("KV cache in use", "Reserved share of each engine's cache, mean over the step.", perEngine("kv_share", "kv_share"), percent, [0, 1], { plain: true }),
      chart("Idle engines", "Share of the step in which an engine was idle.", perEngine("idle_share", "idle_share"), percent, [0, 1], { plain: true }),
      chart("Code environment: calls per second", "Calls executed while rollouts were collected.", [["codeenv/calls_per_s", "calls/s"]], number, null, { plain: true }),
      chart("Code environment: latency", "Time that a turn waited for its tool calls.", [["codeenv/latency_p50_s", "median"], ["codeenv/latency_s", "mean"], ["codeenv/latency_p95_s", "95th percentile"]], seconds, null, { plain: true }),
      chart("Tokens per second", "Sampled tokens of all engines.", [["tokens_per_s", "tokens/s"]], number, null, { plain: true }),
    ]],
    ["sft", "Before RL", [
      sft && figure([{ name: "loss", colour: 3, x: sft.step, y: sft.metrics.loss || [], smooth: 9 }, ...(sft.metrics.heldout_loss ? [{ name: "held out", colour: 1, x: sft.step, y: sft.metrics.heldout_loss, points: true }] : [])], { title: "SFT loss", note: "Logarithmic scale.", log: true }),
    ]],
  ];
  const made = groups.map(([id, title, charts]) => { const known = charts.filter(Boolean); return known.length ? h("div", { id }, h("h2", null, title), h("div.grid2", null, known)) : null; });
  return [made[0], ...after, ...made.slice(1)];
}

function heldOut(about, spans) {
  const series = ["greedy", "sampled"].map((mode, index) => {
    const all = about.evaluations.filter((e) => e.mode === mode);
    const x = all.map((e) => { const span = spans.find((one) => one.name === e.stage); return span ? Math.floor(span.end) : 0; });
    return { name: mode, colour: index + 1, x, y: all.map((e) => e.accuracy.mean), low: all.map((e) => e.accuracy.low), high: all.map((e) => e.accuracy.high), points: true };
  });
  return figure(series, { title: "Held-out accuracy", note: "After SFT and each stage, with 95% intervals.", format: percent, range: [0, 1], spans, xName: "RL step" });
}

function kinds(about) {
  const all = about.evaluations.filter((e) => e.mode === "greedy").length ? about.evaluations.filter((e) => e.mode === "greedy") : about.evaluations;
  const names = [...new Set(all.flatMap((e) => Object.keys(e.kinds)))];
  if (!names.length) return null;
  return h("div", null, h("h2", null, "Held-out accuracy by kind"), h("div.scroll", null, h("table.heat", null,
    h("thead", null, h("tr", null, h("th", null, `${all[0].mode}, after`), all.map((e) => h("th", null, e.stage)))),
    h("tbody", null, names.map((name) => h("tr", null, h("th", null, words(name)), all.map((e) => { const v = e.kinds[name]?.mean; return h("td", { style: { "--v": v ?? 0 } }, percent(v)); })))))));
}

/** Every step as a cell, coloured by reward, with a link to its groups. */
function stepStrip(run, about, joined) {
  const rewards = joined.columns.get("reward");
  if (!rewards) return null;
  const has = new Map(about.stages.map((stage) => [stage.name, new Set(stage.recorded)]));
  return h("div", null, h("h2", { id: "steps" }, "Steps"), h("p.muted.small", null, "Darker steps have a higher reward. Click a step to see its groups."),
    joined.spans.map((span) => h("div.strip", null, h("span.strip-name", null, span.name), h("span.cells", null, joined.at.flatMap(([stage, step], i) => {
      if (stage !== span.name) return [];
      const label = `${stage} step ${step}: reward ${percent(rewards[i])}`;
      const style = { "--v": rewards[i] ?? 0 };
      return [has.get(stage)?.has(step) ? h("a.cell", { href: at.step(run, stage, step), title: label, "aria-label": label, style }) : h("span.cell.off", { title: `${label} (no rollouts recorded)`, style })];
    })))));
}

function yaml(value, indent = "") {
  if (value === null || typeof value !== "object") return `${value}`;
  const entries = Array.isArray(value) ? value.map((v, i) => [`- ${i}`, v]) : Object.entries(value);
  if (!entries.length) return Array.isArray(value) ? "[]" : "{}";
  return entries.map(([k, v]) => typeof v === "object" && v !== null && Object.keys(v).length ? `${indent}${k}:\n${yaml(v, `${indent}  `)}` : `${indent}${k}: ${yaml(v)}`).join("\n");
}

function brief(event) {
  const { time, event: name, environment, ...rest } = event;
  return Object.entries(rest).map(([k, v]) => `${k} ${typeof v === "object" ? JSON.stringify(v) : v}`).join(" · ");
}
