"use strict";
const byId = id => document.getElementById(id);

// Makes an element. Children are elements or texts; a text is never read as HTML.
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function drawn(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// 1234567 as 1.23M, 0.00001 as 1e-5, 0.123456 as 0.1235.
function short(value) {
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e12)) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  const units = size < 1e4 ? [] : [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]];
  const [unit, divisor] = units.find(each => size >= each[1]) ?? ["", 1];
  return `${Number((value / divisor).toPrecision(4))}${unit}`;
}

function duration(seconds) {
  const [s, m, h] = [Math.round(seconds), Math.round(seconds / 60), seconds / 3600];
  return s < 90 ? `${s} s` : m < 90 ? `${m} min` : h < 48 ? `${h.toFixed(1)} h` : `${(h / 24).toFixed(1)} days`;
}

// Round values that divide an axis into about `number` parts.
function ticks(low, high, number) {
  const raw = (high - low) / number, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(each => each * power).find(each => each >= raw * .999);
  const first = Math.ceil(low / step - 1e-6);
  return Array.from({length: Math.floor(high / step + 1e-6) - first + 1}, (_, i) => (first + i) * step);
}

// Points [x, y] without those that no pixel could show: of each group the smallest and the largest stay.
function thinned(points, most = 600) {
  if (points.length <= most) return points;
  const size = Math.ceil(2 * points.length / most), kept = [];
  for (let i = 0; i < points.length; i += size) {
    const group = points.slice(i, i + size).sort((a, b) => a[1] - b[1]);
    kept.push(...[group[0], group.at(-1)].sort((a, b) => a[0] - b[0]));
  }
  return kept;
}

// Means of the last `width` values.
const smoothed = (points, width) => points.map(([x], i) => {
  const last = points.slice(Math.max(0, i - width + 1), i + 1);
  return [x, last.reduce((sum, each) => sum + each[1], 0) / last.length];
});

// A chart with a title; `draw` shows lines {points: [[x, y]], kind: "", "pale" or "second", dots: true or false}.
// Points are in the order of x. The pointer reads the first line's values.
class Chart {
  constructor(title, axis) {
    this.value = element("span");
    this.svg = drawn("svg", {viewBox: "0 0 460 190", role: "img", "aria-label": title});
    this.node = element("div", {class: "card chart"}, element("div", {class: "title"}, element("span", {}, title), this.value),
      this.svg);
    this.axis = axis;
    this.lines = [];
    this.svg.addEventListener("pointermove", event => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.draw(this.lines));
  }

  draw(lines) {
    this.lines = lines;
    const points = lines.flatMap(each => each.points);
    if (!points.length) return;
    let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const [x, y] of points) {
      [left, right] = [Math.min(left, x), Math.max(right, x)];
      [low, high] = [Math.min(low, y), Math.max(high, y)];
    }
    if (left === right) [left, right] = [left - 1, right + 1];
    // Equal values may differ by rounding.
    const room = high - low < 1e-6 * Math.abs(high) || low === high ? Math.abs(low) * .1 || 1 : (high - low) * .06;
    // Values that are never negative have no axis below 0.
    [low, high] = [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
    this.across = x => 48 + (x - left) / (right - left) * 404;
    const up = y => 160 - (y - low) / (high - low) * 152;
    const parts = [];
    for (const y of ticks(low, high, 4)) {
      parts.push(drawn("line", {class: "tick", x1: 48, x2: 452, y1: up(y), y2: up(y)}),
        drawn("text", {x: 42, y: up(y) + 4, "text-anchor": "end"}, short(y)));
    }
    for (const x of ticks(left, right, 6).filter(Number.isInteger)) {
      parts.push(drawn("text", {x: this.across(x), y: 175, "text-anchor": "middle"}, short(x)));
    }
    parts.push(drawn("text", {x: 452, y: 189, "text-anchor": "end"}, this.axis));
    for (const {points, kind, dots} of lines) {
      const places = thinned(points).map(([x, y]) => [this.across(x), up(y)].map(each => each.toFixed(1)));
      parts.push(drawn("path", {class: kind, d: places.map((each, i) => `${i ? "L" : "M"}${each}`).join("")}));
      if (dots || points.length === 1) parts.push(...places.map(([cx, cy]) => drawn("circle", {class: kind, cx, cy, r: 2.5})));
    }
    this.svg.replaceChildren(...parts);
    this.value.textContent = short(lines[0].points.at(-1)[1]);
  }

  point(event) {
    const points = this.lines[0]?.points ?? [];
    if (!points.length) return;
    const box = this.svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * 460;
    const nearest = points.reduce((a, b) => Math.abs(this.across(b[0]) - x) < Math.abs(this.across(a[0]) - x) ? b : a);
    this.svg.querySelector(".cursor")?.remove();
    const place = this.across(nearest[0]);
    this.svg.append(drawn("line", {class: "tick cursor", x1: place, x2: place, y1: 8, y2: 160}));
    this.value.textContent = `${this.axis} ${short(nearest[0])}: ${short(nearest[1])}`;
  }
}
