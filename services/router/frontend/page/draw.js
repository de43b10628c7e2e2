// Elements and small drawings. Whatever comes from the cluster becomes a text node or a number, never markup.

import { bytes, rate, seconds } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";

function fill(element, about, children) {
  for (const [name, value] of Object.entries(about)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const h = (tag, about = {}, ...children) => fill(document.createElement(tag), about, children);
export const s = (tag, about = {}, ...children) => fill(document.createElementNS(SVG, tag), about, children);

export function tell(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function sheet(place, height, label, ...children) {
  const width = Math.max(240, place.clientWidth);
  place.replaceChildren(s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    ...children));
}

const widthOf = (place) => Math.max(240, place.clientWidth);
const LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 20;

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 5, 7.5, 10].find((step) => step * power >= value * 0.999) * power;
}

function frame(width, height, top, name, span) {
  const parts = [];
  for (const part of [0, 0.5, 1]) {
    const y = height - BOTTOM - part * (height - TOP - BOTTOM);
    parts.push(s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
    parts.push(s("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, part ? name(part * top) : "0"));
  }
  for (const ago of [span, span / 2, 0]) {
    const x = width - RIGHT - (ago / span) * (width - LEFT - RIGHT);
    const anchor = ago === span ? "start" : ago ? "middle" : "end";
    parts.push(s("text", { x, y: height - 4, "text-anchor": anchor }, ago ? `${ago} s ago` : "now"));
  }
  return parts;
}

// One dot for each answer: [seconds ago, value, whether it met the objectives].
export function dots(place, points, goal, label, span = 60) {
  const width = widthOf(place), height = 150;
  const values = points.map((point) => point[1]).sort((a, b) => a - b);
  const high = values.length ? values[Math.floor(0.99 * (values.length - 1))] * 1.15 : 0;
  const top = nice(Math.max(high, goal ? goal * 1.25 : 0, 1e-3));
  const at = (value) => height - BOTTOM - (Math.min(value, top) / top) * (height - TOP - BOTTOM);
  const marks = points.filter((point) => point[0] <= span).map(([ago, value, met]) => s("circle", {
    class: goal ? (value > goal ? "miss" : "met") : "plain", r: 2.6, cy: at(value),
    cx: width - RIGHT - (ago / span) * (width - LEFT - RIGHT),
  }));
  const line = goal ? [
    s("line", { class: "goal", x1: LEFT, x2: width - RIGHT, y1: at(goal), y2: at(goal) }),
    s("text", { class: "goal", x: LEFT + 4, y: at(goal) - 4 }, `objective ${seconds(goal)}`),
  ] : [];
  sheet(place, height, label, ...frame(width, height, top, seconds, span), ...marks, ...line);
}

// Bars of [ended, met] for each second, the newest last.
export function bars(place, pairs, judged, label) {
  const width = widthOf(place), height = 150;
  const top = nice(Math.max(4, ...pairs.map((pair) => pair[0])));
  const step = (width - LEFT - RIGHT) / pairs.length, unit = (height - TOP - BOTTOM) / top;
  const marks = pairs.flatMap(([ended, met], place) => {
    const x = LEFT + place * step, low = height - BOTTOM, wide = Math.max(1, step - 1.5);
    return [
      met ? s("rect", { class: judged ? "met" : "plain", x, y: low - met * unit, width: wide, height: met * unit }) : null,
      ended > met
        ? s("rect", { class: "miss", x, y: low - ended * unit, width: wide, height: (ended - met) * unit }) : null,
    ];
  });
  sheet(place, height, label, ...frame(width, height, top, (value) => `${value}`, pairs.length), ...marks);
}

export function spark(values, label) {
  const width = 120, height = 26, top = Math.max(...values, 1e-9);
  const path = values.map((value, at) =>
    `${at ? "L" : "M"}${((at / (values.length - 1)) * width).toFixed(1)} ${(height - 2 - (value / top) * (height - 4)).toFixed(1)}`);
  return s("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img",
    "aria-label": label }, s("path", { d: path.join("") }));
}

// Prefill workers on the left, decode workers on the right; a line for each pair that handed over.
export function flow(place, prefills, decodes, links, window) {
  const width = widthOf(place), wide = Math.min(112, width * 0.27), tall = 40, gap = 26;
  const rows = Math.max(prefills.length, decodes.length, 1);
  const height = Math.max(170, rows * (tall + gap) + gap);
  const spot = (list, at) => (height - list.length * (tall + gap) + gap) / 2 + at * (tall + gap);
  const box = (worker, x, y, kind) => s("g", { class: `node ${kind} ${worker.state}` },
    s("rect", { x, y, width: wide, height: tall, rx: 8 }),
    s("text", { class: "name", x: x + wide / 2, y: y + 17, "text-anchor": "middle" }, worker.worker_id),
    s("text", { x: x + wide / 2, y: y + 32, "text-anchor": "middle" },
      worker.state === "ready" ? `${worker.running} running` : worker.state));
  const right = width - wide - 1, most = Math.max(...links.map((link) => link.bytes), 1);
  const lines = [], words = [];
  const shown = links.filter((link) => link.prefill).sort((a, b) => b.bytes - a.bytes).slice(0, 24);
  shown.forEach((link, order) => {
    const from = prefills.findIndex((one) => one.worker_id === link.prefill);
    const to = decodes.findIndex((one) => one.worker_id === link.decode);
    if (from < 0 || to < 0) return;
    const y1 = spot(prefills, from) + tall / 2, y2 = spot(decodes, to) + tall / 2, middle = (wide + right) / 2;
    const path = `M${wide} ${y1}C${middle} ${y1} ${middle} ${y2} ${right} ${y2}`;
    const thick = 1.5 + 5 * Math.sqrt(link.bytes / most);
    lines.push(s("path", { class: "pipe", d: path, "stroke-width": thick }));
    lines.push(s("path", { class: "moving", d: path, "stroke-width": Math.max(1.5, thick - 2) }));
    if (order < 6) {
      const [x, y] = bezier(Math.abs(y1 - y2) < 4 ? 0.56 : 0.26, wide, y1, right, y2); // crossing ones near their source
      const speed = link.seconds ? rate(link.bytes / link.seconds) : bytes(link.bytes);
      words.push(s("text", { class: "speed", x, y: y - 4, "text-anchor": "middle" }, speed));
    }
  });
  const alone = new Map(links.filter((link) => !link.prefill).map((link) => [link.decode, link.requests]));
  const moved = links.reduce((sum, link) => sum + link.bytes, 0);
  const label = `${shown.length} pairs of workers handed over, ${rate(moved / window)} of KV`;
  const none = !prefills.length ? s("text", { x: 4, y: height / 2 }, "no prefill worker: decode workers prefill")
    : !shown.length ? s("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "no KV has moved lately") : null;
  sheet(place, height, label, ...lines, none,
    ...prefills.map((worker, at) => box(worker, 1, spot(prefills, at), "prefill")),
    ...decodes.map((worker, at) => box(worker, right, spot(decodes, at), "decode")), ...words,
    ...decodes.map((worker, at) => (alone.has(worker.worker_id)
      ? s("text", { class: "speed", x: right + wide / 2, y: spot(decodes, at) - 3, "text-anchor": "middle" },
        `${alone.get(worker.worker_id)} prefilled here`) : null)));
}

function bezier(t, x1, y1, x2, y2) {
  const middle = (x1 + x2) / 2, u = 1 - t;
  const mix = (a, b, c, d) => u * u * u * a + 3 * u * u * t * b + 3 * u * t * t * c + t * t * t * d;
  return [mix(x1, middle, middle, x2), mix(y1, y1, y2, y2)];
}
