// The page: reads the address, shows its view, keeps it up to date, handles the keyboard.

import { focusAgain, focusedIn, h, hideTip } from "/static/dom.js";
import { at, get } from "/static/api.js";
import * as runs from "/static/runs.js";
import * as compare from "/static/compare.js";
import * as run from "/static/run.js";
import * as step from "/static/step.js";
import * as group from "/static/group.js";
import * as rollout from "/static/rollout.js";
import * as rollouts from "/static/rollouts.js";
import * as timeline from "/static/timeline.js";

const main = document.getElementById("main");
const PULSE_MS = 1500;

/** What an address names: {view, params, query}. Ids may hold slashes. */
function parse(url) {
  const parts = url.pathname.split("/").filter(Boolean).map(decodeURIComponent);
  const query = Object.fromEntries(url.searchParams);
  if (parts[0] === "compare") return { view: compare, params: {}, query };
  if (parts[0] !== "run" || parts.length < 2) return { view: runs, params: {}, query };
  const [, name, what, ...rest] = parts;
  const params = { run: name };
  if (what === undefined) return { view: run, params, query };
  if (what === "rollouts") return { view: rollouts, params, query };
  if (what === "step" || what === "timeline")
    return { view: what === "step" ? step : timeline, params: { ...params, stage: rest[0], step: Number(rest[1]) }, query };
  if (what === "group") return { view: group, params: { ...params, id: rest.join("/") }, query };
  if (what === "rollout") return { view: rollout, params: { ...params, id: rest.join("/") }, query };
  return { view: null, params, query };
}

let shown = null;  // {view, params, query, page}
let ticket = 0;    // the newest request to show something

async function show({ keepScroll = false, focus = null, from = null } = {}) {
  const mine = ++ticket;
  const wanted = parse(new URL(location.href));
  hideTip();
  if (!keepScroll) main.classList.add("loading");
  try {
    if (wanted.view === null) throw new Error("this page does not exist");
    const page = await wanted.view.load(wanted.params, wanted.query, context);
    if (mine !== ticket) return;
    shown?.page?.close?.();
    shown = { ...wanted, page };
    here = location.pathname;
    main.replaceChildren(page.node);
    crumbs(page.crumbs || []);
    document.title = `${page.title} · rstar2`;
    page.ready?.();
    if (!keepScroll) focusAnchor();
    if (from !== null) refocus(focus, from);
  } catch (error) {
    if (mine !== ticket) return;
    shown?.page?.close?.();
    shown = { ...wanted, page: null };
    crumbs([["runs", at.runs()]]);
    main.replaceChildren(h("section.empty", null, h("h1", null, "Not found"), h("p", { role: "alert" }, error.message),
      h("p", null, h("a.button", { href: at.runs() }, "All runs"))));
  } finally {
    if (mine === ticket) { main.classList.remove("loading"); main.dataset.ready = String(mine); }
  }
}

function focusAnchor() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target) target.scrollIntoView({ block: "start" });
  else scrollTo(0, 0);
}

/** Focus after a change of address: the same control if it is still there, else the row of the page that
 * was left, else the heading, which screen readers then read. */
function refocus(held, from) {
  const row = [...main.querySelectorAll("[data-row]")].find((one) => one.dataset.row === from);
  if (row) { row.focus({ preventScroll: true }); row.scrollIntoView({ block: "nearest" }); return; }
  if (focusAgain(document, held)) return;
  const heading = main.querySelector("h1");
  heading?.setAttribute("tabindex", "-1");
  heading?.focus({ preventScroll: true });
}

/** What is larger than its frame can be scrolled by keyboard. Formulas can be shown as source if there are any. */
function reachable() {
  for (const one of main.querySelectorAll(".scroll, .question, .thought, pre")) {
    if (one.scrollWidth > one.clientWidth || one.scrollHeight > one.clientHeight) one.tabIndex = 0;
    else if (one !== document.activeElement) one.removeAttribute("tabindex");
  }
  document.getElementById("tex").hidden = main.querySelector(".tex") === null;
}
let planned = 0;
const plan = () => { cancelAnimationFrame(planned); planned = requestAnimationFrame(reachable); };
new MutationObserver(plan).observe(main, { childList: true, subtree: true });
addEventListener("resize", plan);

function crumbs(items) {
  const nodes = [];
  for (const [label, href] of items) {
    nodes.push(h("span.sep", { "aria-hidden": "true" }, "/"), href ? h("a", { href }, label) : h("span", { "aria-current": "page" }, label));
  }
  document.getElementById("crumbs").replaceChildren(...nodes);
}

/** Go to an address of this page; `replace` adds no entry to the history. */
function go(href, { replace = false } = {}) {
  const from = location.pathname, focus = focusedIn(document.body);
  if (replace) history.replaceState(null, "", href);
  else {
    history.replaceState({ focus }, "");  // Back returns to the control that was used
    history.pushState(null, "", href);
  }
  return show({ focus, from });
}

const context = {
  go,
  /** Change the query of the current address without loading the view again. */
  note(query) {
    const url = new URL(location.href);
    for (const [k, v] of Object.entries(query)) {
      if (v === null || v === "" || v === undefined) url.searchParams.delete(k); else url.searchParams.set(k, v);
    }
    history.replaceState(history.state, "", url);
  },
};

document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href]");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || link.hasAttribute("download")) return;
  const url = new URL(link.href);
  if (url.origin !== location.origin || url.pathname.startsWith("/api/")) return;
  if (url.pathname === location.pathname && url.search === location.search && url.hash) return;
  event.preventDefault();
  go(url.pathname + url.search + url.hash);
});
let here = location.pathname;
addEventListener("popstate", (event) => show({ focus: event.state?.focus || null, from: here }));

// ---------------------------------------------------------------------------- live

let versions = {};
let lost = false;

async function pulse() {
  try {
    const now = await get("pulse");
    if (lost) { lost = false; }
    const mine = shown?.params.run;
    const before = versions;
    versions = now;
    const changed = Object.keys(now).filter((name) => before[name] !== undefined && before[name] !== now[name]);
    const touches = mine === undefined ? changed.length > 0 : changed.includes(mine);
    if (touches && !document.hidden) {
      if (shown.page?.update) await shown.page.update();
      else if (!shown.page) await show({ keepScroll: true });
    }
    live(touches ? "updated" : "");
  } catch {
    lost = true;
    live("");
  }
  setTimeout(pulse, document.hidden ? 4 * PULSE_MS : PULSE_MS);
}

function live(text) {
  const node = document.getElementById("live");
  node.classList.toggle("lost", lost);
  if (lost) node.textContent = "● no answer from the server";
  else if (text) { node.textContent = "● live"; node.classList.remove("flash"); void node.offsetWidth; node.classList.add("flash"); }
  else node.textContent = shown?.page?.running ? "● live" : "";
}

// ---------------------------------------------------------------------------- theme, keyboard

const root = document.documentElement;
try { const kept = localStorage.getItem("theme"); if (kept) root.dataset.theme = kept; } catch { /* storage may be off */ }

function switchTheme() {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch { /* storage may be off */ }
  dispatchEvent(new Event("themechange"));
}

/** Formulas as MathML, or as the source that the model read or wrote. */
function switchSource() {
  const source = root.dataset.formulas !== "source";
  root.dataset.formulas = source ? "source" : "";
  document.getElementById("tex").setAttribute("aria-pressed", String(source));
}

const KEYS = [
  ["j  k", "next, previous row (or rollout)"], ["Enter", "open the row"], ["u", "one level up"],
  ["[  ]", "previous, next step, group or rollout"], ["/", "search rollouts"], ["t", "switch between light and dark"], ["m", "show formulas as LaTeX source"],
  ["1 … 7", "colour tokens by mask, logprob, …"], ["?", "show this list"], ["Esc", "close"],
];

function help() {
  const box = document.getElementById("help");
  if (box.open) { box.close(); return; }
  box.replaceChildren(h("h2", null, "Keyboard shortcuts"), h("table.keys", null, KEYS.map(([k, what]) =>
    h("tr", null, h("td", null, k.split("  ").map((one) => h("kbd", null, one))), h("td", null, what)))),
  h("form", { method: "dialog" }, h("button.button", null, "Close")));
  box.showModal();
}

function moveRow(by) {
  const rows = [...main.querySelectorAll("[data-row]")];
  if (!rows.length) return false;
  const at_ = rows.indexOf(document.activeElement);
  const next = rows[Math.max(0, Math.min(rows.length - 1, at_ < 0 ? 0 : at_ + by))];
  next.focus();
  next.scrollIntoView({ block: "nearest" });
  return true;
}

function search() {
  const name = shown?.params.run || Object.keys(versions)[0];
  const box = document.getElementById("q");
  if (box) { box.focus(); box.select(); } else if (name) go(at.rollouts(name)).then(() => document.getElementById("q")?.focus());
}

addEventListener("keydown", (event) => {
  if (event.metaKey || event.ctrlKey || event.altKey) return;
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (document.getElementById("help").open && event.key !== "?") return;  // the dialog has its own keys
  if (typing) { if (event.key === "Escape") event.target.blur(); return; }
  const page = shown?.page;
  const actions = {
    "?": help, "/": search, t: switchTheme, m: switchSource,
    u: () => page?.up && go(page.up), "[": () => page?.previous && go(page.previous), "]": () => page?.following && go(page.following),
    j: () => moveRow(1) || (page?.following && go(page.following)), k: () => moveRow(-1) || (page?.previous && go(page.previous)),
    Escape: hideTip,
  };
  if (page?.keys?.(event.key)) { event.preventDefault(); return; }
  if (event.key === "Enter" && document.activeElement?.dataset?.row) { event.preventDefault(); go(document.activeElement.dataset.row); return; }
  const action = actions[event.key];
  if (action) { event.preventDefault(); action(); }
});
document.getElementById("theme").addEventListener("click", switchTheme);
document.getElementById("tex").addEventListener("click", switchSource);
document.getElementById("keys").addEventListener("click", help);
document.getElementById("find").addEventListener("click", search);

show().then(pulse);
