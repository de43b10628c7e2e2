// The last hours, drawn by uPlot (uplot/, MIT licence), of all routers together. The router sends all points once, and
// then each new one.

import { h, tell } from "./draw.js";
import { count, number, seconds } from "./words.js";

const KEPT = 2160;
const SPANS = [["15 min", 900], ["1 h", 3600], ["6 h", 21600]];
const CHARTS = [
  ["Requests that ended, a second", number, [["ok", "ok", "--met"], ["refused", "refused", "--wait"],
    ["failed", "failed", "--miss"], ["cancelled", "cancelled", "--quiet"]]],
  ["Requests in progress, answers waiting", number, [["in progress", "running", "--strong"], ["waiting", "queued", "--miss"]]],
  ["Time to first token", seconds, [["median", "ttft_p50", "--strong"], ["95th percentile", "ttft_p95", "--prefill"]]],
  ["Tokens a second", number, [["tokens", "tokens", "--strong"]]],
];

let columns = [], points = [], every = 10, span = SPANS[0][1], drawn = [], buttons = [];
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const two = (value) => String(value).padStart(2, "0");
const minute = (unix) => { const at = new Date(unix * 1000); return `${two(at.getHours())}:${two(at.getMinutes())}`; };

export function take(data, place, about) {
  if (!drawn.length) build(place);
  ({ columns, every } = data);
  const newest = points.length ? points[points.length - 1][0] : 0;
  points = [...points, ...data.points.filter((point) => point[0] > newest)].slice(-KEPT);
  tell(about, points.length ? `a point every ${every} s, from ${minute(points[0][0])}` : "the first point comes in some seconds");
  fill();
}

function build(place) {
  buttons = SPANS.map(([name, length]) => h("button", { type: "button", "aria-pressed": String(length === span),
    onclick: () => { span = length; fill(); } }, name));
  const charts = CHARTS.map(([title]) => h("div", { class: "chart", role: "img", "aria-label": title }));
  place.replaceChildren(h("div", { class: "row spans", role: "group", "aria-label": "how far back" }, ...buttons),
    h("div", { class: "charts" }, ...CHARTS.map(([title], at) => h("div", {}, h("h3", {}, title), charts[at]))));
  drawn = charts.map((element) => ({ element, plot: null }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => fill(true));
  addEventListener("resize", () => requestAnimationFrame(() => fill(true)));
}

function fill(again = false) {
  buttons.forEach((button, at) => button.setAttribute("aria-pressed", String(SPANS[at][1] === span)));
  const end = points.length ? points[points.length - 1][0] : Date.now() / 1000;
  const shown = points.filter((point) => point[0] >= end - span);
  const column = (name) => shown.map((point) => point[columns.indexOf(name)]);
  const times = column("at");
  CHARTS.forEach(([title, words, lines], at) => {
    const chart = drawn[at], data = [times, ...lines.map(([, name]) => column(name))];
    if (again && chart.plot) { chart.plot.destroy(); chart.plot = null; }
    chart.plot ??= new globalThis.uPlot(options(chart.element, words, lines), data, chart.element);
    chart.plot.setData(data, false);
    chart.plot.setScale("x", { min: end - span, max: end });
    const now = shown[shown.length - 1];
    const said = now ? lines.map(([label, name]) => `${label} ${words(now[columns.indexOf(name)])}`).join(", ") : "nothing yet";
    chart.element.setAttribute("aria-label", `${title}, ${count(shown.length, "point")}; now: ${said}`);
  });
}

function options(element, words, lines) {
  const axis = { stroke: color("--quiet"), grid: { stroke: color("--edge"), width: 1 }, ticks: { show: false },
    font: "11px system-ui, sans-serif" };
  return {
    width: Math.max(220, element.clientWidth), height: 150, cursor: { drag: { x: false, y: false }, y: false },
    scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
    axes: [{ ...axis, values: (_, splits) => splits.map(minute), space: 64, size: 26 },
      { ...axis, values: (_, splits) => splits.map((value) => (value === 0 ? "0" : words(value))), size: 58, space: 34 }],
    series: [{}, ...lines.map(([label, , name]) => ({ label, stroke: color(name), width: 1.6, points: { show: false },
      value: (plot, value, at, index) => { // under the pointer, otherwise the newest
        const shown = index === null ? plot.data[at][plot.data[at].length - 1] : value;
        return shown === null || shown === undefined ? "–" : words(shown);
      } }))],
  };
}
