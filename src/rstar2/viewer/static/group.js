// One problem: its rollouts, why each was kept or dropped, and two of them side by side.

import { h } from "/static/dom.js";
import { at, get } from "/static/api.js";
import { number, percent, plural, whole, words } from "/static/format.js";
import { crumbsOf, kept, outcome, turner, verdict } from "/static/parts.js";
import { answer, rich } from "/static/math.js";
import { diff } from "/static/diff.js";

const LEFT = new Set(["why", "answer", "calls", "stopped"]);

export async function load({ run, id }, query, context) {
  const data = await get("group", run, { id });
  const training = !/^(eval|filter)-/.test(data.stage);
  const previous = data.previous && at.group(run, data.previous), following = data.following && at.group(run, data.following);
  const up = at.step(run, data.stage, data.step);
  const compare = h("div", { id: "compare" });
  const chosen = new Set((query.diff || "").split(",").filter(Boolean));
  const pick = async (name, on) => {
    if (on) chosen.add(name); else chosen.delete(name);
    while (chosen.size > 2) chosen.delete([...chosen][0]);
    for (const box of node.querySelectorAll("input[name=diff]")) box.checked = chosen.has(box.value);
    context.note({ diff: [...chosen].join(",") });
    await fillCompare(compare, run, id, [...chosen]);
  };
  const node = h("section", null,
    h("div.headline", null, h("h1.question", null, rich(data.problem.prompt, data.problem.prompt_math)), turner(previous, following, "group")),
    h("p.lead", null, "expected answer ", answer(data.problem.answer, data.problem.answer_math), data.problem.kind && ` · ${words(data.problem.kind)}`, ` · grader ${data.problem.grader}`, data.problem.source && ` · ${data.problem.source}`),
    training && explain(data),
    Object.keys(data.lost).length > 0 && h("p.notice.warn", null, `Rollouts lost to infrastructure failures, not counted: ${Object.entries(data.lost).map(([n, c]) => `${n} ×${c}`).join(", ")}`),
    table(run, data, training, chosen, pick),
    h("p.muted.small", null, training ? ["p_err: failed calls / calls (0.5 without a call). p_format: 1 without an answer tag, else (tags − 1) / turns. Weight: 1 / (ε + p_err + p_format) for correct rollouts, 1 for wrong ones. "] : "", "Select two rollouts to compare them."),
    compare);
  return {
    title: data.problem.prompt.slice(0, 60), node, up, previous, following,
    crumbs: crumbsOf(run, [training ? `${data.stage} ${data.step}` : data.stage, up], ["group", null]),
    ready() { if (chosen.size === 2) fillCompare(compare, run, id, [...chosen]); },
  };
}

function explain(data) {
  if (!data.used) return h("p.notice", null, h("b", null, "Not used"), ": ", data.why || "this group is not in the batch.");
  const q = data.quota, total = q.right + q.wrong, keep = q.right_kept + q.wrong_kept;
  const how = { roc: "correct rollouts are sampled with a probability that falls with their errors, wrong ones uniformly", flat: "correct and wrong ones are sampled uniformly, in RoC's numbers", uniform: "sampled uniformly", none: "the first ones, as in plain GRPO", release: "the correct ones with the fewest errors and the first wrong ones" }[data.variant] || data.variant;
  return h("p.notice", null, h("b", null, `${keep} of ${total} kept`), `: ${q.right_kept} of ${q.right} correct, ${q.wrong_kept} of ${q.wrong} wrong; ${how}.`);
}

function table(run, data, training, chosen, pick) {
  const shares = weights(data.rollouts), heaviest = Math.max(...data.rollouts.filter((r) => r.correct).map((r) => r.weight), 1e-9);
  const heads = ["compare", "#", "verdict", ...(training ? ["chosen", "why"] : []), "answer", "calls", "stopped", "p_err", "p_format", ...(training ? ["weight"] : []), "tokens", "turns", "entropy"];
  return h("div.scroll", null, h("table.rollouts", null, h("thead", null, h("tr", null, heads.map((t) => h(LEFT.has(t) ? "th.left" : "th", null, t)))),
    h("tbody", null, data.rollouts.map((r, i) => {
      const name = r.id.slice(data.id.length + 1), href = at.rollout(run, r.id);
      if (!r.recorded) return h("tr.off", null, h("td"), h("th", null, name), h("td", null, verdict(r.correct ? 1 : 0)), training && [h("td", null, kept(r.chosen)), h("td.left.why", null, r.reason)], h("td.left.muted", { colspan: "9" }, "not recorded (record.trajectories is kept)"));
      return h(`tr${training ? r.chosen ? ".kept" : ".dropped" : ""}`, { tabindex: "0", data: { row: href } },
        h("td", null, h("input", { type: "checkbox", name: "diff", value: name, checked: chosen.has(name), "aria-label": `compare rollout ${name}`, onchange: (e) => pick(name, e.target.checked) })),
        h("th", null, h("a", { href }, name)), h("td", null, verdict(r.reward)),
        training && [h("td", null, kept(data.used ? r.chosen : null)), h("td.left.why", null, r.reason || data.why)],
        h("td.left", null, answer(r.answer || "–", r.answer_math)),
        h("td.left", null, h("span.outcomes", null, r.results.map(outcome))), h("td.left", null, words(r.stop)),
        h("td", null, number(r.p_err)), h("td", null, number(r.p_format)),
        training && h("td", null, data.used ? h("span.weight", { title: `${percent(shares[i])} of the weight of ${r.correct ? "correct" : "wrong"} rollouts` }, number(r.weight), r.correct && h("i", { style: { width: `${Math.round(44 * r.weight / heaviest)}px` } })) : "–"),
        h("td", null, whole(r.tokens)), h("td", null, whole(r.turns)), h("td", null, number(r.entropy)));
    }))));
}

/** Each rollout's share of the weight among those of the same verdict. */
function weights(rollouts) {
  const total = (good) => rollouts.filter((r) => r.correct === good).reduce((sum, r) => sum + r.weight, 0);
  const sums = { true: total(true), false: total(false) };
  return rollouts.map((r) => sums[r.correct] ? r.weight / sums[r.correct] : 0);
}

async function fillCompare(box, run, group, names) {
  if (names.length < 2) { box.replaceChildren(); return; }
  const two = await Promise.all(names.map((name) => get("rollout", run, { id: `${group}/${name}` })));
  const text = (r) => r.segments.map((part) => `${{ thought: "", code: "▸ ", result: "◂ ", answer: "= " }[part.kind]}${part.text}`).join("\n\n");
  const sides = diff(text(two[0]), text(two[1]));
  box.replaceChildren(h("h2", null, "Comparison"), h("div.pair", null, two.map((r, i) => h("div.card", null,
    h("div.rollout-head", null, h("a", { href: at.rollout(run, r.id) }, `rollout ${names[i]}`), verdict(r.reward?.value), r.choice && kept(r.choice.kept), h("span.muted.small", null, plural(r.tokens, "token"))),
    h("pre.diff", null, sides[i].map(([same, words_]) => same ? words_ : h("mark", null, words_)))))));
  box.dataset.ready = names.join(",");
}
