// Numbers as text.

// As report/summary.py rounds: ties (only x.25 and x.75 are exact ones) go to the even digit, and what
// is no share, such as a reward of 2.5, is shown as a number.
export function percent(v) {
  if (v === null || v === undefined) return "–";
  if (v < 0 || v > 1) return String(Number(v.toPrecision(3)));
  const x = 100 * v;
  return `${(x % 1 === 0.25 ? x - 0.05 : x).toFixed(1).replace(/\.0$/, "")}%`;
}

export function number(v) {
  if (v === null || v === undefined) return "–";
  const a = Math.abs(v);
  if (v === 0) return "0";
  if (a >= 1e6) return `${(v / 1e6).toFixed(a >= 1e7 ? 0 : 1)}M`;
  if (a >= 1e4) return `${(v / 1e3).toFixed(0)}k`;
  if (a >= 100 || Number.isInteger(v)) return Math.round(v).toLocaleString("en");
  if (a < 1e-3) return v.toExponential(1);
  return String(Number(v.toPrecision(3)));
}

export const whole = (v) => v === null || v === undefined ? "–" : Math.round(v).toLocaleString("en");

export function seconds(v) {
  if (v === null || v === undefined) return "–";
  if (v === 0) return "0";
  if (v < 1e-3) return `${(1e6 * v).toFixed(0)} µs`;
  if (v < 1) return `${(1e3 * v).toFixed(v < 0.01 ? 1 : 0)} ms`;
  if (v < 60) return `${v.toFixed(v < 10 ? 1 : 0)} s`;
  if (v < 3600) return `${Math.floor(v / 60)} min ${String(Math.round(v % 60)).padStart(2, "0")} s`;
  return `${Math.floor(v / 3600)} h ${String(Math.floor((v % 3600) / 60)).padStart(2, "0")} min`;
}

export function ago(time) {
  if (!time) return "–";
  const past = Date.now() / 1000 - time;
  if (past < 90) return `${Math.max(0, Math.round(past))} s ago`;
  if (past < 5400) return `${Math.round(past / 60)} min ago`;
  if (past < 129600) return `${Math.round(past / 3600)} h ago`;
  return new Date(time * 1000).toISOString().slice(0, 10);
}

export const words = (name) => String(name).replaceAll("_", " ");
export const plural = (n, one, many = `${one}s`) => `${whole(n)} ${n === 1 ? one : many}`;
