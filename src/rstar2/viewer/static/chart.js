// Charts as inline SVG: lines over stages, stacked areas, tooltips, clickable steps.

import { h, hideTip, s, showTip } from "/static/dom.js";
import { number } from "/static/format.js";

const W = 460, H = 230, LEFT = 46, RIGHT = 12, TOP = 20, BOTTOM = 24;
const known = (v) => v !== null && v !== undefined && Number.isFinite(v);

function ticks(low, high, count = 4) {
  const width = high - low;
  if (!(width > 0)) return [low];
  const raw = width / count, unit = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 2.5, 5, 10].map((m) => m * unit).find((v) => v >= raw * 0.999);
  const out = [];
  for (let i = Math.ceil(low / size - 1e-9); i <= Math.floor(high / size + 1e-9); i++) out.push(Number((i * size).toPrecision(12)));
  return out;
}

function smooth(values, window) {
  const half = Math.floor(window / 2);
  return values.map((_, i) => {
    const near = values.slice(Math.max(0, i - half), i + half + 1).filter(known);
    return near.length ? near.reduce((a, b) => a + b, 0) / near.length : null;
  });
}

function path(xs, ys, px, py) {
  let out = "", pen = false;
  xs.forEach((x, i) => {
    if (!known(ys[i])) { pen = false; return; }
    out += `${pen ? "L" : "M"}${px(x).toFixed(1)} ${py(ys[i]).toFixed(1)}`;
    pen = true;
  });
  return out;
}

/**
 * A figure with a chart. `series`: [{name, colour, x, y, smooth?}].
 * Options: title, note, format, range [low, high] (a least range of y), spans [{name, start, end}],
 * stacked, log, xName, onpick(x), points (mark every value).
 */
export function figure(series, options) {
  const shown = series.filter((one) => one.y.some(known));
  if (!shown.length) return null;
  const legend = shown.length > 1 && h("span.legend", null, shown.map((one) =>
    h("span", null, h("i.key", { style: { background: colour(one.colour) } }), one.name)));
  return h("figure.card", { data: { chart: options.title } },
    h("figcaption", null, h("h3", null, options.title), legend),
    draw(shown, options),
    options.note && h("p.muted.small", null, options.note));
}

export const colour = (index) => `var(--s${index % 8})`;

function draw(series, o) {
  const format = o.format || number;
  const xs = [...new Set(series.flatMap((one) => one.x))].sort((a, b) => a - b);
  const stacked = o.stacked ? stack(series, xs) : null;
  const values = stacked ? stacked.flatMap((one) => one.top).filter(known) : series.flatMap((one) => one.y).filter((v) => known(v) && (!o.log || v > 0));
  let low = Math.min(...values, ...(o.range ? [o.range[0]] : [])), high = Math.max(...values, ...(o.range ? [o.range[1]] : []));
  if (stacked) low = 0;
  if (low === high) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
  const fy = o.log ? Math.log10 : (v) => v;
  const pad = o.range || stacked ? 0 : 0.06 * (fy(high) - fy(low));
  const [y0, y1] = [fy(low) - (low === 0 ? 0 : pad), fy(high) + pad];
  const [x0, x1] = [xs[0], xs.at(-1)];
  const px = (x) => x1 === x0 ? (LEFT + W - RIGHT) / 2 : LEFT + (x - x0) / (x1 - x0) * (W - LEFT - RIGHT);
  const py = (v) => H - BOTTOM - (fy(v) - y0) / (y1 - y0) * (H - TOP - BOTTOM);
  const svg = s("svg.chart", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": o.title, tabindex: o.onpick ? "0" : null });
  for (const [i, span] of (o.spans || []).entries()) {
    const a = px(Math.max(x0, span.start)), b = px(Math.min(x1, span.end));
    if (i % 2 === 0) svg.append(s("rect.band", { x: a, y: TOP - 12, width: Math.max(0, b - a), height: H - BOTTOM - TOP + 12 }));
    if (b - a > 26) svg.append(s("text.span", { x: (a + b) / 2, y: TOP - 3, "text-anchor": "middle" }, span.name));
  }
  const marks = o.log ? logTicks(low, high) : ticks(y0, y1);
  for (const mark of marks) {
    const y = py(mark);
    svg.append(s("line.grid", { x1: LEFT, x2: W - RIGHT, y1: y, y2: y }), s("text", { x: LEFT - 6, y: y + 3.5, "text-anchor": "end" }, format(mark)));
  }
  const xTicks = ticks(x0, x1, 6).filter(Number.isInteger);
  for (const mark of xTicks.length ? xTicks : [x0]) svg.append(s("text", { x: px(mark), y: H - 8, "text-anchor": "middle" }, number(mark)));
  if (stacked) for (const one of stacked) svg.append(s("path.area", { d: area(xs, one.bottom, one.top, px, py), style: { fill: colour(one.colour) } }));
  else for (const one of series) lines(svg, one, px, py, xs.length, series.length > 4);
  const cursor = s("line.cursor", { y1: TOP - 12, y2: H - BOTTOM, visibility: "hidden" });
  svg.append(cursor);
  listen(svg, cursor, { series, xs, px, o, format });
  return svg;
}

function lines(svg, one, px, py, count, crowded) {
  const style = { stroke: colour(one.colour) };
  if (one.smooth && one.y.length > 2 * one.smooth) {
    if (!crowded) svg.append(s("path.line.faint", { d: path(one.x, one.y, px, py), style }));
    svg.append(s("path.line", { d: path(one.x, smooth(one.y, one.smooth), px, py), style }));
  } else svg.append(s("path.line", { d: path(one.x, one.y, px, py), style }));
  if (one.points || count < 2 || one.y.filter(known).length < 3)
    one.x.forEach((x, i) => known(one.y[i]) && svg.append(s("circle.point", { cx: px(x), cy: py(one.y[i]), r: 3.2, style: { fill: colour(one.colour) } })));
  (one.low || []).forEach((v, i) => known(v) && svg.append(s("line.whisker", { x1: px(one.x[i]), x2: px(one.x[i]), y1: py(v), y2: py(one.high[i]), style })));
}

function logTicks(low, high) {
  const out = [];
  const few = high / low > 200;
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
    for (const m of few ? [1] : [1, 2, 5]) { const v = m * 10 ** e; if (v >= low && v <= high) out.push(v); }
  return out.length ? out : [low, high];
}

function stack(series, xs) {
  let base = xs.map(() => 0);
  return series.map((one) => {
    const at = new Map(one.x.map((x, i) => [x, one.y[i]]));
    const bottom = base;
    base = xs.map((x, i) => bottom[i] + (known(at.get(x)) ? at.get(x) : 0));
    return { colour: one.colour, bottom, top: base };
  });
}

function area(xs, bottom, top, px, py) {
  const there = xs.map((x, i) => `${px(x).toFixed(1)} ${py(top[i]).toFixed(1)}`);
  const back = xs.map((x, i) => `${px(x).toFixed(1)} ${py(bottom[i]).toFixed(1)}`).reverse();
  return `M${[...there, ...back].join("L")}Z`;
}

function listen(svg, cursor, { series, xs, px, o, format }) {
  let at = null;
  const put = (x, clientX, clientY) => {
    at = x;
    cursor.setAttribute("x1", px(x)); cursor.setAttribute("x2", px(x)); cursor.setAttribute("visibility", "visible");
    const span = (o.spans || []).find((one) => one.start <= x && x <= one.end);
    const label = span ? `${span.name} · step ${x - (span.offset || 0)}` : `${o.xName || "step"} ${x}`;
    const rows = series.flatMap((one) => {
      const i = one.x.indexOf(x);
      return i < 0 || !known(one.y[i]) ? [] : [[one.name, format(one.y[i]), colour(one.colour)]];
    });
    showTip([label, ...rows, ...(o.onpick ? [["click to open", ""]] : [])], clientX, clientY);
  };
  const nearest = (event) => {
    const box = svg.getBoundingClientRect();
    const pixel = (event.clientX - box.left) / box.width * W;
    return xs.reduce((a, b) => Math.abs(px(b) - pixel) < Math.abs(px(a) - pixel) ? b : a, xs[0]);
  };
  svg.addEventListener("pointermove", (event) => put(nearest(event), event.clientX, event.clientY));
  svg.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); hideTip(); });
  svg.addEventListener("blur", () => { cursor.setAttribute("visibility", "hidden"); hideTip(); });
  if (o.onpick) {
    svg.classList.add("pick");
    svg.addEventListener("click", (event) => { hideTip(); o.onpick(nearest(event)); });
    svg.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: -1, ArrowRight: 1 };
      if (moves[event.key]) {
        const i = Math.max(0, Math.min(xs.length - 1, (at === null ? xs.length : xs.indexOf(at)) + moves[event.key]));
        const box = svg.getBoundingClientRect();
        put(xs[i], box.left + px(xs[i]) / W * box.width, box.top + 40);
        event.preventDefault();
      } else if (event.key === "Enter" && at !== null) { hideTip(); o.onpick(at); event.preventDefault(); }
    });
  }
}

/** A small line chart for tables. */
export function spark(values, format = number) {
  const numbers = values.filter(known);
  if (numbers.length < 2) return h("span.muted", null, "–");
  const low = Math.min(...numbers), high = Math.max(...numbers);
  const px = (i) => 2 + i / (values.length - 1) * 96, py = (v) => 22 - (high === low ? 10 : (v - low) / (high - low) * 20);
  const line = s("path.line", { d: path(values.map((_, i) => i), smooth(values, 5), px, py), style: { stroke: colour(0) } });
  return s("svg.spark", { viewBox: "0 0 100 24", role: "img", "aria-label": `from ${format(numbers[0])} to ${format(numbers.at(-1))}` }, line);
}
