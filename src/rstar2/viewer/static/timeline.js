// The timeline of a step: one line per rollout, grouped by engine.

import { h, hideTip, showTip } from "/static/dom.js";
import { at, get } from "/static/api.js";
import { percent, plural, seconds } from "/static/format.js";
import { crumbsOf, tabs } from "/static/parts.js";

const AXIS = 22, HEAD = 18, AREA = 54;

export async function load({ run, stage, step }, query, context) {
  const data = await get("timeline", run, { stage, step });
  const view = build(run, data, context);
  const label = /^(eval|filter)-/.test(stage) ? stage : `${stage} ${step}`;
  const node = h("section", null,
    h("div.headline", null, h("h1", null, stage, h("span.muted", null, ` step ${step}`))),
    tabs([["groups", "Groups", at.step(run, stage, step)], ["timeline", "Timeline", at.timeline(run, stage, step)]], "timeline"),
    h("div.row", null, h("p.legend", null, data.states.map((state) => h("span", null, h("i.key", { style: { background: data.colours[data.states.indexOf(state)] } }), `${state} ${percent(view.shares.get(state) || 0)}`))),
      h("span.downloads", null, ["trace", "picture"].map((what) => h("a.button", { href: `/api/${what}/${encodeURIComponent(run)}?stage=${encodeURIComponent(stage)}&step=${step}`, download: "", title: what === "trace" ? "opens in ui.perfetto.dev and chrome://tracing" : "download as an SVG file" }, { trace: "Chrome trace", picture: "SVG" }[what])))),
    h("p.muted.small", null, `${plural(data.trajectories.length, "rollout")} on ${plural(data.engines.length, "engine")} in ${seconds(data.end / 1000)}. The upper part shows the number of rollouts in each state, the lower part one line per rollout. Scroll to zoom, drag to move, click to open.`),
    view.node);
  return { title: `timeline ${label}`, node, crumbs: crumbsOf(run, [label, at.step(run, stage, step)], ["timeline", null]), up: at.step(run, stage, step), ready: view.draw, close: view.close };
}

function build(run, data, context) {
  const lanes = layout(data);
  const canvas = h("canvas.gantt", { role: "img", tabindex: "0", "aria-label": `timeline of ${data.trajectories.length} rollouts` });
  const frame = h("div.ganttbox", null, canvas);
  let from = 0, to = Math.max(1, data.end);
  const height = AXIS + lanes.height;
  const shares = new Map();
  let total = 0;
  for (const [, , state, a, b] of data.spans) { shares.set(data.states[state], (shares.get(data.states[state]) || 0) + b - a); total += b - a; }
  for (const [state, ms] of shares) shares.set(state, ms / (total || 1));

  const draw = () => {
    const ratio = devicePixelRatio || 1, width = frame.clientWidth || 800;
    canvas.width = width * ratio; canvas.height = height * ratio;
    canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d"), css = getComputedStyle(document.documentElement), color = (name) => css.getPropertyValue(name).trim();
    pen.scale(ratio, ratio);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui, sans-serif";
    const px = (ms) => (ms - from) / (to - from) * width;
    axis(pen, from, to, width, height, px, color);
    for (const lane of lanes.engines) {
      pen.fillStyle = color("--soft"); pen.fillRect(0, lane.top, width, HEAD - 3);
      pen.fillStyle = color("--muted"); pen.fillText(`${lane.name || "no engine"}: ${lane.rows} rollouts, busy ${percent(lane.busy)}`, 6, lane.top + 11);
    }
    const colours = data.colours;
    for (const lane of lanes.engines) area(pen, lane, colours, from, to, width);
    for (const [engine, who, state, a, b] of data.spans) {
      if (b < from || a > to) continue;
      const x = px(a), y = lanes.y(engine, who);
      pen.fillStyle = colours[state];
      pen.fillRect(x, y, Math.max(0.6, px(b) - x), lanes.rowHeight - (lanes.rowHeight > 3 ? 1 : 0));
    }
  };
  const hit = (event) => {
    const box = canvas.getBoundingClientRect();
    const ms = from + (event.clientX - box.left) / box.width * (to - from), y = event.clientY - box.top;
    return data.spans.find(([engine, who, , a, b]) => a <= ms && ms <= b && Math.abs(lanes.y(engine, who) + lanes.rowHeight / 2 - y) <= lanes.rowHeight / 2 + 0.5);
  };
  let dragged = null, moved = false;
  canvas.addEventListener("pointermove", (event) => {
    if (dragged) {
      const by = (dragged.x - event.clientX) / canvas.clientWidth * (to - from);
      if (Math.abs(event.clientX - dragged.x) > 3) moved = true;
      pan(dragged.from + by, dragged.to + by); return;
    }
    const span = hit(event);
    if (!span) { hideTip(); return; }
    const [engine, who, state, a, b] = span, reward = data.rewards[who];
    showTip([data.trajectories[who], ["state", data.states[state], data.colours[state]], ["duration", seconds((b - a) / 1000)], ["start", seconds(a / 1000)], ["engine", data.engines[engine]], ["verdict", reward === null ? "not graded" : reward > 0.5 ? "correct" : "wrong"]], event.clientX, event.clientY);
  });
  const pan = (a, b) => { const size = b - a; if (a < 0) { a = 0; b = size; } if (b > data.end) { b = data.end; a = Math.max(0, b - size); } from = a; to = Math.max(a + 1, b); draw(); };
  const zoom = (factor, x) => { const size = Math.max(5, Math.min(data.end, (to - from) * factor)), mid = from + x * (to - from); pan(mid - x * size, mid + (1 - x) * size); };
  canvas.addEventListener("pointerdown", (event) => { dragged = { x: event.clientX, from, to }; moved = false; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", (event) => { dragged = null; const span = !moved && hit(event); if (span) context.go(at.rollout(run, data.trajectories[span[1]])); });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("wheel", (event) => { if (!event.ctrlKey && Math.abs(event.deltaY) < Math.abs(event.deltaX)) return; event.preventDefault(); const box = canvas.getBoundingClientRect(); zoom(event.deltaY > 0 ? 1.2 : 1 / 1.2, (event.clientX - box.left) / box.width); }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const acts = { "+": () => zoom(0.7, 0.5), "=": () => zoom(0.7, 0.5), "-": () => zoom(1.4, 0.5), ArrowLeft: () => pan(from - (to - from) / 5, to - (to - from) / 5), ArrowRight: () => pan(from + (to - from) / 5, to + (to - from) / 5), 0: () => pan(0, data.end) };
    if (acts[event.key]) { acts[event.key](); event.preventDefault(); event.stopPropagation(); }
  });
  const again = () => draw();
  addEventListener("resize", again); addEventListener("themechange", again);
  return { node: frame, draw, shares, close() { removeEventListener("resize", again); removeEventListener("themechange", again); } };
}

/** The position of each rollout's line: below its engine, in order of start. */
function layout(data) {
  const starts = new Map(), busy = data.engines.map(() => []);
  const generating = data.states.indexOf("generating");
  for (const [engine, who, state, a, b] of data.spans) {
    const key = engine * 1e7 + who;
    starts.set(key, Math.min(a, starts.get(key) ?? Infinity));
    if (state === generating) busy[engine].push([a, b]);
  }
  const rows = data.engines.map((_, engine) => [...starts].filter(([key]) => Math.floor(key / 1e7) === engine).sort((a, b) => a[1] - b[1]).map(([key]) => key));
  const count = rows.reduce((n, one) => n + one.length, 0);
  const rowHeight = count > 1200 ? 1.5 : count > 400 ? 2 : count > 120 ? 4 : 8;
  const place = new Map(), engines = [];
  let top = AXIS;
  rows.forEach((keys, engine) => {
    engines.push({ name: data.engines[engine], top, rows: keys.length, busy: union(busy[engine]) / (data.end || 1), changes: changes(data, engine) });
    keys.forEach((key, i) => place.set(key, top + HEAD + AREA + 5 + i * rowHeight));
    top += HEAD + AREA + 5 + keys.length * rowHeight + 8;
  });
  return { engines, rowHeight, height: top - AXIS, y: (engine, who) => place.get(engine * 1e7 + who) };
}

/** When the number of rollouts in each state changes: [[ms, state, +1 or -1], ...] in order. */
function changes(data, engine) {
  return data.spans.flatMap(([e, , state, a, b]) => e === engine ? [[a, state, 1], [b, state, -1]] : []).sort((x, y) => x[0] - y[0]);
}

/** How many rollouts of an engine were in which state, stacked, one column per pixel. */
function area(pen, lane, colours, from, to, width) {
  const now = colours.map(() => 0), columns = [];
  let next = 0, most = 1;
  for (let x = 0; x < width; x++) {
    const ms = from + (x + 0.5) / width * (to - from);
    while (next < lane.changes.length && lane.changes[next][0] <= ms) { const [, state, by] = lane.changes[next++]; now[state] += by; }
    columns.push([...now]);
    most = Math.max(most, now.reduce((a, b) => a + b, 0));
  }
  const bottom = lane.top + HEAD + AREA;
  columns.forEach((column, x) => {
    let y = bottom;
    column.forEach((count, state) => { const size = AREA * count / most; pen.fillStyle = colours[state]; pen.fillRect(x, y - size, 1.05, size); y -= size; });
  });
}

function union(spans) {
  let total = 0, end = -1;
  for (const [a, b] of [...spans].sort((x, y) => x[0] - y[0])) { if (b > end) { total += b - Math.max(a, end); end = b; } }
  return total;
}

function axis(pen, from, to, width, height, px, color) {
  const raw = (to - from) / Math.max(2, width / 110), unit = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 5, 10].map((m) => m * unit).find((v) => v >= raw);
  pen.textAlign = "left";
  for (let t = Math.ceil(from / size) * size; t <= to; t += size) {
    const x = Math.round(px(t)) + 0.5;
    pen.strokeStyle = color("--line"); pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, height); pen.stroke();
    pen.fillStyle = color("--muted"); pen.fillText(seconds(t / 1000), x + 4, 12);
  }
}
