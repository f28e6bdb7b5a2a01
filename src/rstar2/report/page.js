"use strict";
// Tooltips over the charts and the switch between light and dark. The page reads well without it.
(() => {
  const tip = document.getElementById("tip");
  const line = (parent, tag, text) => {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;  // never innerHTML: names come from the run
    parent.appendChild(node);
    return node;
  };
  for (const svg of document.querySelectorAll("svg[data-chart]")) {
    const chart = JSON.parse(svg.dataset.chart);
    const [left, right, low, high] = chart.x;
    const cursor = svg.querySelector(".cursor");
    const hide = () => { tip.hidden = true; cursor.setAttribute("hidden", ""); };
    const show = (event) => {
      const box = svg.getBoundingClientRect();
      const pixel = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
      const wanted = low + (pixel - left) / (right - left) * (high - low);
      const xs = chart.series[0].x;
      const x = xs.reduce((a, b) => Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a, xs[0]);
      const at = left + (x - low) / ((high - low) || 1) * (right - left);
      cursor.setAttribute("x1", at);
      cursor.setAttribute("x2", at);
      cursor.removeAttribute("hidden");
      tip.replaceChildren();
      const span = chart.spans.find((s) => s[1] <= x && x <= s[2]);
      line(tip, "b", chart.xName + " " + x + (span ? " · " + span[0] : ""));
      for (const series of chart.series) {
        const index = series.x.indexOf(x);
        if (index < 0 || series.t[index] === null) continue;
        const row = line(tip, "div");
        line(row, "i").style.background = `var(--s${series.colour})`;
        row.append(series.name + " " + series.t[index]);
      }
      tip.hidden = false;
      const room = innerWidth - tip.offsetWidth - 8;
      tip.style.left = Math.max(8, Math.min(room, event.clientX + 14)) + "px";
      tip.style.top = Math.max(8, event.clientY - tip.offsetHeight - 12) + "px";
    };
    svg.addEventListener("pointermove", show);
    svg.addEventListener("pointerdown", show);
    svg.addEventListener("pointerleave", hide);
  }
  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
})();
