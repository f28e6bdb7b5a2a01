// One trajectory: as text, or token by token.

import { h, long } from "/static/dom.js";
import { at, get } from "/static/api.js";
import { number, plural, seconds, words } from "/static/format.js";
import { crumbsOf, kept, outcome, tabs, turner, verdict } from "/static/parts.js";
import { answer, longRich, rich } from "/static/math.js";
import { python } from "/static/highlight.js";
import { tokenView } from "/static/tokens.js";

export async function load({ run, id }, query, context) {
  const data = await get("rollout", run, { id });
  const tab = query.tab === "tokens" ? "tokens" : "read";
  const keep = { tab: tab === "read" ? "" : tab, color: query.color || "" };
  const previous = data.previous && at.rollout(run, data.previous, keep), following = data.following && at.rollout(run, data.following, keep);
  const up = at.group(run, data.group);
  const name = id.slice(data.group.length + 1);
  const body = tab === "tokens" ? tokenView(data, await get("tokens", run, { id }), query, context) : { node: read(data) };
  const node = h("section.rollout", null,
    h("div.headline", null, h("h1.question", null, rich(data.problem.prompt, data.problem.prompt_math)), turner(previous, following, "rollout")),
    summary(data),
    tabs([["read", "Read", at.rollout(run, id)], ["tokens", `Tokens (${data.tokens})`, at.rollout(run, id, { tab: "tokens" })]], tab),
    body.node);
  return {
    title: `${name}: ${data.problem.prompt.slice(0, 50)}`, node, up, previous, following, keys: body.keys,
    crumbs: crumbsOf(run, [/^(eval|filter)-/.test(data.stage) ? data.stage : `${data.stage} ${data.step}`, at.step(run, data.stage, data.step)], ["group", up], [`rollout ${name}`, null]),
    ready: body.ready, close: body.close,
  };
}

function summary(data) {
  const choice = data.choice;
  return h("div.verdictbar", null,
    verdict(data.reward?.value),
    h("span", null, data.answer ? ["answered ", answer(data.answer, data.answer_math)] : h("span.muted", null, "no answer"), data.correct ? "" : [" · expected ", answer(data.problem.answer, data.problem.answer_math)]),
    choice && [kept(choice.kept), h("span.muted", null, `${choice.reason} · p_err ${number(choice.p_err)} · p_format ${number(choice.p_format)} · weight ${number(choice.weight)}`)],
    !choice && !/^(eval|filter)-/.test(data.stage) && h("span.badge.none", null, "group not used"),
    h("span.muted.small", null, `stopped: ${words(data.stop)} · ${plural(data.turns.length, "turn")} · ${plural(data.tokens, "token")}, ${data.sampled} sampled · ${seconds(data.wall_s)}${data.attempts > 1 ? ` · attempt ${data.attempts}` : ""}`));
}

function read(data) {
  const parts = [];
  if (data.prompt) parts.push(h("details.turn.promptbox", null, h("summary", null, "prompt with the chat template applied"), long("pre.box", data.prompt)));
  const turns = new Map();
  for (const part of data.segments) { if (!turns.has(part.turn)) turns.set(part.turn, []); turns.get(part.turn).push(part); }
  for (const [number_, segments] of turns) {
    const turn = data.turns[number_];
    parts.push(h("article.turn", { id: `turn-${number_ + 1}` },
      h("header", null, h("a.anchor", { href: `#turn-${number_ + 1}` }, `Turn ${number_ + 1}`), turn && h("span.muted.small", null, times(turn))),
      segments.map((part) => segment(part, data))));
  }
  if (!parts.length) parts.push(h("p.muted", null, "No tokens were sampled."));
  return h("div.turns", null, parts);
}

const times = (turn) => [`${turn.sampled} tokens`, turn.queue_s > 0.001 && `queued ${seconds(turn.queue_s)}`, `generated ${seconds(turn.generate_s - turn.queue_s)}`,
  turn.tools_s > 0.0005 && `tools ${seconds(turn.tools_s)}`, turn.engine, turn.cached > 0 && `${turn.cached} cached`, turn.finish !== "stop" && `ended by ${turn.finish}`].filter(Boolean).join(" · ");

function segment(part, data) {
  const rest = part.cut > 0 && h("p.muted.small", null, `${part.cut.toLocaleString("en")} more characters are recorded but not shown.`);
  if (part.kind === "thought") return h("div.seg.thought", null, longRich("div", part.text, part.math) || long("div", part.text), rest);
  if (part.kind === "code") return h("div.seg.code", null, h("span.tag", null, "python"), long("pre", part.text, 20000, python), rest);
  if (part.kind === "answer") return h(`div.seg.answer${data.correct ? "" : ".failed"}`, null, longRich("div", part.text, part.math) || long("div", part.text), rest);
  const about = [`${seconds(part.wall_s)}`, part.queue_s > 0.001 && `queued ${seconds(part.queue_s)}`, part.peak_mb > 0 && `${number(part.peak_mb)} MB`, part.exit_code && `exit ${part.exit_code}`, part.signal && `signal ${part.signal}`, part.isolation, part.attempts > 1 && `${part.attempts} attempts`, part.truncated && "output truncated"].filter(Boolean).join(" · ");
  return h(`div.seg.result${part.failed ? ".failed" : ""}`, null, h("span.tag", null, outcome(part.outcome), h("span.muted", null, ` ${about}`)), long("pre", part.text || part.message || "(no output)"), rest);
}
