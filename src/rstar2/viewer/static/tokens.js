// Token by token: coloured by mask, logprob, ratio, mismatch, entropy, weight version or class.

import { h, hideTip, redraw, showTip, visible } from "/static/dom.js";
import { at } from "/static/api.js";
import { number, percent, words } from "/static/format.js";

const MODES = [
  ["mask", "Mask", "Prompt, sampled tokens and tool responses. Only sampled tokens are trained."],
  ["logprob", "Logprob", "Log probability of each token under the policy that sampled it."],
  ["entropy", "Entropy", "Entropy of the distribution that each token was sampled from. The top 20% of this rollout are underlined."],
  ["ratio", "Ratio", "Probability when the token was trained / when the batch began. Clipping bounds this ratio."],
  ["mismatch", "Mismatch", "Probability by the learner / by the engine with the same weights; 1 if both agree."],
  ["version", "Version", "Version of the weights that sampled each token."],
  ["class", "Class", "Class of each token: reasoning, reflection on a tool response, code, answer, format."],
];
const CLASSES = ["reasoning", "after_ok", "after_error", "code", "answer", "format"];
const PAGE = 4000;

export function tokenView(data, tokens, query, context) {
  const columns = columnsOf(tokens);
  const able = new Set(MODES.map(([name]) => name).filter((name) => name === "mask" || columns.has(name)));
  let mode = able.has(query.color) ? query.color : able.has("entropy") ? "entropy" : "mask";
  let shown = PAGE;
  const box = h("div.tokens", { role: "group", "aria-label": "tokens" });
  const legend = h("div.tokenlegend");
  const detail = h("div.tokendetail", { "aria-live": "polite" });
  const buttons = h("div.modes", { role: "group", "aria-label": "colour by" });

  const value = (i) => columns.get(mode)?.[i];
  const paint = () => {
    redraw(buttons, MODES.map(([name, label, about], i) => h(`button.mode${name === mode ? ".on" : ""}`, {
      type: "button", "aria-pressed": name === mode ? "true" : "false", title: able.has(name) ? `${about} ( ${i + 1} )` : "not recorded for this rollout", disabled: !able.has(name),
      data: { mode: name }, onclick: () => set(name) }, label)));
    box.dataset.mode = mode;
    box.replaceChildren(...spans());
    legend.replaceChildren(...legendOf(mode, tokens, columns));
  };
  const spans = () => {
    const out = [];
    const most = Math.min(tokens.pieces.length, shown);
    for (let i = 0; i < most; i++) out.push(token(i));
    if (most < tokens.pieces.length) out.push(h("button.more", { type: "button", onclick: () => { shown = tokens.pieces.length; paint(); } }, `… show all ${tokens.pieces.length.toLocaleString("en")} tokens`));
    return out;
  };
  const token = (i) => {
    const source = tokens.source[i], piece = tokens.pieces[i];
    const node = h(`span.tok.${{ p: "prompt", s: "sampled", t: "tool" }[source]}`, { data: { i } });
    const text = visible(piece);
    node.append(text === "" ? "·" : text.replace(/\n/g, "⏎\n"));
    if (source === "s") {
      const v = value(i);
      if (mode === "class") node.classList.add(`c-${columns.get("class")[i]}`);
      else if (mode === "version") node.classList.add(`v${columns.get("version")[i] % 8}`);
      else if (mode !== "mask" && v !== undefined && v !== null) heat(node, mode, v, columns);
      if (columns.get("top")?.[i] && (mode === "entropy" || mode === "class")) node.classList.add("topent");
    }
    return node;
  };
  const set = (name) => { if (!able.has(name)) return; mode = name; context.note({ color: name }); paint(); };
  const rows = (i) => {
    const source = tokens.source[i];
    const out = [`token ${i} · id ${tokens.ids[i]}`, ["text", JSON.stringify(visible(tokens.pieces[i]))], ["source", { p: "prompt", s: "sampled", t: "tool response" }[source]]];
    if (source === "s") {
      out.push(["turn", String(columns.get("turn")[i] + 1)], ["logprob", number(columns.get("logprob")[i])], ["probability", percent(Math.exp(columns.get("logprob")[i]))]);
      if (columns.has("entropy")) out.push(["entropy", `${number(columns.get("entropy")[i])}${columns.get("top")[i] ? " (top 20%)" : ""}`]);
      if (columns.has("ratio")) out.push(["ratio", number(columns.get("ratio")[i])], ["mismatch", number(columns.get("mismatch")[i])]);
      out.push(["weights", `version ${columns.get("version")[i]}`], ["class", words(columns.get("class")[i])]);
    }
    return out;
  };
  const pin = (i) => {
    for (const old of box.querySelectorAll(".pinned")) old.classList.remove("pinned");
    const node = box.querySelector(`[data-i="${i}"]`);
    node?.classList.add("pinned");
    detail.replaceChildren(h("div.card.pin", null, rows(i).map((row) => typeof row === "string" ? h("b", null, row) : h("span.kv", null, h("span.muted", null, row[0]), h("span", null, row[1])))));
    context.note({ token: i });
    return node;
  };
  box.addEventListener("pointerover", (event) => {
    const i = event.target.dataset?.i;
    if (i !== undefined && event.pointerType === "mouse") showTip(rows(Number(i)), event.clientX, event.clientY);
  });
  box.addEventListener("pointerleave", hideTip);
  box.addEventListener("click", (event) => { const i = event.target.dataset?.i; if (i !== undefined) pin(Number(i)); });
  paint();
  return {
    node: h("div.tokenview", null, buttons, legend, !tokens.decoded && h("p.notice.warn", null, "No tokenizer was recorded for this run: token ids are shown."), box, detail),
    keys(key) { const at_ = Number(key) - 1; if (MODES[at_]) { set(MODES[at_][0]); return true; } return false; },
    ready() { if (query.token !== undefined) { if (Number(query.token) >= shown) { shown = tokens.pieces.length; paint(); } pin(Number(query.token))?.scrollIntoView({ block: "center" }); } },
  };
}

/** Columns over all tokens (holes where a token was not sampled). */
function columnsOf(tokens) {
  const places = [...tokens.source].flatMap((c, i) => c === "s" ? [i] : []);
  const spread = (values) => { const out = []; places.forEach((place, n) => { out[place] = values[n]; }); return out; };
  const columns = new Map([["logprob", spread(tokens.logprob)], ["version", spread(tokens.version)], ["class", spread(tokens.kind)], ["turn", spread(tokens.turn)]]);
  const top = new Set(tokens.top);
  columns.set("top", spread(places.map((_, n) => top.has(n))));
  if (tokens.entropy) columns.set("entropy", spread(tokens.entropy));
  if (tokens.old) {
    columns.set("ratio", spread(tokens.old.map((old, n) => Math.exp(tokens.current[n] - old))));
    columns.set("mismatch", spread(tokens.old.map((old, n) => Math.exp(old - tokens.logprob[n]))));
  }
  return columns;
}

function heat(node, mode, v, columns) {
  if (mode === "ratio" || mode === "mismatch") {
    const away = Math.max(-1, Math.min(1, Math.log(v) / Math.log(mode === "ratio" ? 1.28 : 1.05)));
    node.classList.add(away >= 0 ? "up" : "down");
    node.style.setProperty("--v", Math.abs(away).toFixed(3));
  } else {
    const scale = mode === "entropy" ? Math.max(1, ...columns.get("entropy").filter((x) => x !== undefined)) : 4;
    const size = mode === "entropy" ? v / scale : Math.min(1, -v / scale);
    node.classList.add("heat");
    node.style.setProperty("--v", Math.max(0, Math.min(1, size)).toFixed(3));
  }
}

function legendOf(mode, tokens, columns) {
  const about = h("span.muted.small", null, MODES.find(([name]) => name === mode)[2]);
  const key = (cls, label) => h("span.keyed", null, h(`i.swatch.${cls}`), label);
  if (mode === "mask") return [key("prompt", "prompt"), key("sampled", "sampled: trained"), key("tool", "tool response: masked out"), about];
  if (mode === "class") {
    const all = tokens.kind.length || 1;
    return [...CLASSES.map((name) => [name, tokens.kind.filter((k) => k === name).length]).filter(([, n]) => n).map(([name, n]) => key(`c-${name}`, `${words(name)} ${percent(n / all)}`)), about];
  }
  if (mode === "version") return [...[...new Set(tokens.version)].map((v) => key(`v${v % 8}`, `version ${v}`)), about];
  if (mode === "ratio" || mode === "mismatch") return [h("span.ramp.two"), h("span.muted.small", null, mode === "ratio" ? "0.78 … 1 … 1.28" : "0.95 … 1 … 1.05"), about];
  const top = mode === "entropy" ? Math.max(1, ...(tokens.entropy || [1])) : 4;
  return [h("span.ramp"), h("span.muted.small", null, mode === "entropy" ? `0 … ${number(top)} nats` : "certain … e⁻⁴"), about];
}
