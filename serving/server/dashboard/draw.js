// Makes elements and small drawings. All text comes in as text nodes: nothing from outside is ever HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) node.append(child.nodeType ? child : String(child));
  }
  return node;
}

export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);
export const $ = (id) => document.getElementById(id);

/** Replaces what a node has, where the data it was drawn from has changed: screen readers and selections stay. */
export function show(node, data, draw) {
  const key = JSON.stringify(data);
  if (node.drawn === key) return;
  node.drawn = key;
  node.replaceChildren(...[draw(data)].flat());
}

/** A node of a width that the policy for styles allows: set by script, not in markup. */
export function sized(node, share) {
  node.style.flexGrow = String(Math.max(0, share));
  node.style.flexBasis = "0";
  return node;
}

export function coloured(node, name) {
  node.style.background = `var(--${name})`;
  return node;
}

/** A line through values; null leaves a gap. `least` and `most` bound the axis. */
export function sparkline(values, { kind = "accent", least = 0, most = 1, area = false, label }) {
  const [width, height] = [Math.max(1, values.length - 1), 30];
  const y = (value) => 28 - (26 * (Math.min(most, Math.max(least, value)) - least)) / (most - least || 1);
  let path = "", pen = false;
  values.forEach((value, at) => {
    if (value === null) { pen = false; return; }
    path += pen ? `L${at} ${y(value).toFixed(1)}` : `M${at} ${y(value).toFixed(1)}h0`;
    pen = true;
  });
  const shape = { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label };
  const filled = area && values.every((value) => value !== null);
  return svg("svg", shape,
    filled ? svg("path", { class: "area", d: `${path}L${width} 30L0 30Z` }) : null,
    svg("path", { class: `line-${kind}`, d: path }));
}

/** Cells in the course of time, each filled from below by what was met and then by what was late; `each` spans a cell. */
export function strip({ met, missed }, each, label) {
  const cells = [];
  for (let at = 0; at < met.length; at += each) {
    const add = (values) => values.slice(at, at + each).reduce((all, value) => all + value, 0);
    const [yes, no] = [add(met), add(missed)];
    const x = cells.length * 5;
    const late = yes + no ? (24 * no) / (yes + no) : 0;
    cells.push(yes + no
      ? svg("g", {}, yes ? svg("rect", { class: "met", x, y: late ? late + 1 : 0, width: 3.6, height: 24 - late - (late ? 1 : 0) }) : null,
        no ? svg("rect", { class: "late", x, y: 0, width: 3.6, height: late }) : null)
      : svg("rect", { class: "nothing", x, y: 10.5, width: 3.6, height: 3 }));
  }
  const shape = { viewBox: `0 0 ${cells.length * 5 - 1.4} 24`, preserveAspectRatio: "none", role: "img", "aria-label": label };
  return svg("svg", { ...shape, class: "strip" }, cells);
}

/** A bar of parts [{name, value, colour}], `whole` wide. */
export function stack(parts, whole, label, thin = false) {
  const used = parts.reduce((sum, part) => sum + part.value, 0);
  const bar = el("div", { class: thin ? "stack thin" : "stack", role: "img", "aria-label": label });
  for (const part of parts.filter((each) => each.value > 0)) {
    const piece = el("i", { title: part.title ?? part.name });
    bar.append(sized(coloured(piece, part.colour), part.value));
  }
  if (whole > used) bar.append(sized(el("i"), whole - used));
  return bar;
}

const LIMITS = [0.125, 4];
const MARGIN = { left: 46, right: 12, top: 10, bottom: 24 };

/** Calls as marks: across by when they ended, up by TTFT relative to what the objective allowed, in powers of two. */
export function callChart(calls, { width, height, now, seconds, chosen }) {
  const right = width - MARGIN.right, rail = height - MARGIN.bottom;
  const bottom = rail - 18;
  const [low, high] = LIMITS.map(Math.log2);
  const x = (time) => MARGIN.left + (right - MARGIN.left) * (1 - (now - time) / seconds);
  const y = (ratio) => {
    const at = (Math.min(high, Math.max(low, Math.log2(ratio))) - low) / (high - low);
    return bottom - (bottom - MARGIN.top) * at;
  };
  const lines = [4, 2, 1, 0.5, 0.25, 0.125].map((ratio) => {
    const name = { 4: "4 ×", 2: "2 ×", 1: "limit", 0.5: "½", 0.25: "¼", 0.125: "⅛" }[ratio];
    return [
      svg("line", { class: ratio === 1 ? "limit" : "grid", x1: MARGIN.left, x2: right, y1: y(ratio), y2: y(ratio) }),
      svg("text", { class: ratio === 1 ? "strong" : "", x: MARGIN.left - 8, y: y(ratio) + 4, "text-anchor": "end" }, name),
    ];
  });
  const times = [];
  for (let ago = 0; ago <= seconds; ago += 60) {
    const place = { x: x(now - ago), y: height - 5, "text-anchor": ago ? "middle" : "end" };
    times.push(svg("text", ago === seconds ? { ...place, "text-anchor": "start" } : place,
      ago ? `${ago / 60} min ago` : "now"));
  }
  const every = width < 520 ? 2 : 1;
  const marks = calls.filter((call) => now - call.time_s <= seconds && call.time_s <= now + 5).map((call) => {
    const left = Math.min(right, x(call.time_s));
    const up = call.ttft_limit_ms ? y(call.ttft_ms / call.ttft_limit_ms) : rail - 4;
    const kind = call.met === null ? "none" : call.met ? "met" : "missed";
    const shape = kind === "missed"
      ? svg("path", { d: `M${left} ${up - 6}L${left + 6} ${up}L${left} ${up + 6}L${left - 6} ${up}Z` })
      : svg("circle", { cx: left, cy: up, r: 4.5 });
    shape.setAttribute("class", `mark ${kind}${call.number === chosen ? " chosen" : ""}`);
    shape.dataset.number = call.number;
    return shape;
  });
  // The chosen one lies on top.
  marks.sort((one, other) => one.classList.contains("chosen") - other.classList.contains("chosen"));
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
    svg("rect", { class: "over", x: MARGIN.left, y: MARGIN.top, width: right - MARGIN.left, height: y(1) - MARGIN.top }),
    ...lines, ...times.filter((_, at) => at % every === 0 || every === 1), ...marks);
}
