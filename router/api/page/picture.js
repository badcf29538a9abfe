// Draws the lanes of a request over time as SVG: one path for each kind of bar in a lane, so that even an
// answer of thousands of steps has a few hundred bars at most at any zoom.

import { drawn, update } from "./dom.js";
import { bytes, count, largest, plural, seconds } from "./figures.js";
import { outcome } from "./lanes.js";

const LABELS = 156; // pixels, like all that follow
const NARROW_LABELS = 84;
const NARROW = 640;
const MARGIN = 12;
const MARKERS = 18; // height of one row of markers' names
const AXIS = 22;
const GAP = 8;
const THINNEST = 1.5; // narrower bars are merged
const NEAR = 4; // maximum distance of the pointer from a bar that it selects
const TICKS = [1, 2, 5];
const OUTCOMES = ["own", "accepted", "rejected"]; // from the bottom of a bar to its top
const KIND_CLASS = { encode: "encode", queue: "queue", open: "open", prefill: "prefill", prefill_chunk: "prefill", kv_frame: "kv", kv_transfer: "kv", decode: "decode" };

export function geometry(width, view) {
  const labels = width < NARROW ? NARROW_LABELS : LABELS;
  const inner = Math.max(40, width - labels - MARGIN);
  const scale = inner / (view.to - view.from);
  return {
    width,
    left: labels,
    right: labels + inner,
    xOf: (at) => labels + (at - view.from) * scale,
    timeAt: (x) => view.from + (x - labels) / scale,
    scale,
  };
}

// Draws into `svg`. Returns {lanes with their `top`, plot, bottom}. `markers`: [{at, text, kind}].
export function draw(svg, { width, view, lanes, markers, end }) {
  const plot = geometry(width, view);
  const names = placed(markers, plot, view);
  let top = MARKERS * Math.max(1, ...names.map((name) => name.row + 1));
  const first = top;
  const placedLanes = lanes.map((lane) => {
    const result = { ...lane, top };
    top += lane.height + GAP;
    return result;
  });
  const bottom = top;
  svg.setAttribute("width", width);
  svg.setAttribute("height", bottom + AXIS);
  svg.setAttribute("viewBox", `0 0 ${width} ${bottom + AXIS}`);
  update(svg, [
    drawn("title", {}, "Timeline of the request. Arrow keys go from step to step; + and − zoom; 0 shows the whole."),
    drawn("defs", {}, drawn("clipPath", { id: "plot" }, drawn("rect", { x: plot.left, y: 0, width: plot.right - plot.left, height: bottom }))),
    ticks(plot, view, bottom),
    placedLanes.map((lane) => laneGroup(lane, plot, view, end)),
    markerGroup(names, plot, first, bottom),
  ]);
  return { lanes: placedLanes, plot, bottom };
}

function ticks(plot, view, bottom) {
  const wanted = (view.to - view.from) / Math.max(2, (plot.right - plot.left) / 90);
  const power = 10 ** Math.floor(Math.log10(wanted));
  const step = power * (TICKS.find((factor) => factor * power >= wanted) ?? 10);
  const group = drawn("g", { class: "ticks" });
  for (let index = Math.ceil(view.from / step - 1e-9); index * step <= view.to * (1 + 1e-9); index += 1) {
    const x = plot.xOf(index * step).toFixed(1);
    group.append(
      drawn("line", { x1: x, x2: x, y1: MARKERS - 4, y2: bottom }),
      drawn("text", { x, y: bottom + 15, "text-anchor": x > plot.right - 16 ? "end" : "middle" }, tickLabel(index * step, step)),
    );
  }
  return group;
}

function tickLabel(at, step) {
  if (step < 1e-3) return `${(at * 1000).toFixed(Math.min(3, Math.ceil(-Math.log10(step * 1000))))} ms`;
  if (step < 0.1 && at < 1) return `${(at * 1000).toFixed(0)} ms`;
  return `${at.toFixed(step >= 1 ? 0 : Math.ceil(-Math.log10(step)))} s`;
}

function laneGroup(lane, plot, view, end) {
  const middle = lane.top + lane.height / 2;
  return drawn(
    "g",
    { class: "lane", "data-lane": lane.key, "data-node": lane.note },
    drawn("rect", { class: "track", x: plot.left, y: lane.top, width: plot.right - plot.left, height: lane.height }),
    drawn("text", { x: 0, y: middle - 2, class: "title" }, lane.title),
    drawn("text", { x: 0, y: middle + 11, class: "note" }, shortened(lane.note, plot.left)),
    drawn("g", { "clip-path": "url(#plot)" }, spanPaths(lane, plot, view, end), stepPaths(lane, plot, view)),
  );
}

function shortened(text, width) {
  const most = Math.floor((width - 8) / 6.2);
  return text.length > most ? `…${text.slice(1 - most)}` : text;
}

function spanPaths(lane, plot, view, end) {
  const paths = new Map(); // "class" → [data, number of bars]
  const lastX = new Map(); // end of the last bar, by class and row
  for (const span of lane.spans) {
    const to = span.end ?? end;
    if (to < view.from || span.start > view.to) continue;
    const name = `c-${KIND_CLASS[span.kind] ?? "other"}${span.isFaint ? " faint" : ""}${span.end === null ? " open" : ""}`;
    const x = Math.max(plot.left - 2, plot.xOf(span.start));
    const barEnd = Math.min(plot.right + 2, Math.max(plot.xOf(to), x + THINNEST));
    const key = `${name}/${span.row}`;
    if (barEnd <= (lastX.get(key) ?? -1)) continue; // covered by an earlier bar
    lastX.set(key, barEnd);
    const height = lane.height / span.rows;
    const inset = span.rows > 1 ? 1 : 0;
    const width = barEnd - x > 4 ? barEnd - x - 0.7 : barEnd - x;
    const path = paths.get(name) ?? { data: "", bars: 0 };
    path.data += rectangle(x, lane.top + span.row * height, width, height - inset);
    path.bars += 1;
    paths.set(name, path);
  }
  return [...paths].map(([name, { data, bars }]) => drawn("path", { class: name, d: data, "data-bars": bars }));
}

const rectangle = (x, y, width, height) => `M${x.toFixed(2)} ${y.toFixed(1)}h${width.toFixed(2)}v${height.toFixed(1)}h${(-width).toFixed(2)}z`;

// A bar's height is its number of tokens: own ones at the bottom, then accepted and rejected draft tokens. Steps of less
// than about a pixel are merged into one bar with their mean.
function stepPaths(lane, plot, view) {
  const steps = lane.steps.filter((step) => step.at >= view.from && step.start <= view.to);
  if (!steps.length) return [];
  const most = largest(lane.steps.map((step) => step.num_tokens + outcome(step).rejected), 2);
  const unit = lane.height / most;
  const paths = { own: "", accepted: "", rejected: "" };
  const widthOf = (step) => (step.at - step.start) * plot.scale;
  let bars = 0;
  for (let index = 0; index < steps.length; ) {
    const x = plot.xOf(steps[index].start);
    const sums = { own: 0, accepted: 0, rejected: 0 };
    const begin = index;
    let to = x;
    do {
      const step = steps[index];
      for (const [name, number] of Object.entries(outcome(step))) sums[name] += number;
      to = plot.xOf(step.at);
      index += 1;
    } while (index < steps.length && to - x < THINNEST && widthOf(steps[index]) < THINNEST);
    const width = Math.max(THINNEST, to - x > 4 ? to - x - 1 : to - x);
    let y = lane.top + lane.height;
    for (const name of OUTCOMES) {
      const height = (unit * sums[name]) / (index - begin);
      y -= height;
      if (height > 0) paths[name] += rectangle(x, y, width, unit > 6 ? height - 0.6 : height);
    }
    bars += 1;
  }
  return OUTCOMES.filter((name) => paths[name]).map((name) =>
    drawn("path", { class: `step c-${name}`, d: paths[name], "data-bars": bars, "data-steps": steps.length }),
  );
}

function placed(markers, plot, view) {
  const ends = [];
  return markers
    .filter((marker) => marker.at >= view.from && marker.at <= view.to)
    .map((marker) => {
      const x = plot.xOf(marker.at);
      const width = 6.2 * marker.text.length + 12;
      const isLeft = x + width > plot.right; // its name is drawn left of it
      const from = isLeft ? x - width : x;
      let row = ends.findIndex((end) => end <= from);
      if (row < 0) row = ends.push(0) - 1;
      ends[row] = from + width;
      return { ...marker, x, isLeft, row: Math.min(row, 3) };
    });
}

function markerGroup(names, plot, first, bottom) {
  return names.map(({ x, isLeft, row, text, kind }) =>
    drawn(
      "g",
      { class: `marker ${kind}`, "data-marker": kind },
      drawn("line", { x1: x.toFixed(1), x2: x.toFixed(1), y1: row * MARKERS + 4, y2: bottom }),
      drawn("text", { x: isLeft ? x - 5 : x + 5, y: row * MARKERS + 12, "text-anchor": isLeft ? "end" : "start" }, text),
    ),
  );
}

// Returns what is at this point of the picture: {step}, {span} or null.
export function thingAt(x, y, { lanes, plot }, end) {
  const lane = lanes.find(({ top, height }) => y >= top - GAP / 2 && y < top + height + GAP / 2);
  if (!lane || x < plot.left - NEAR) return null;
  const at = plot.timeAt(x);
  const near = NEAR / plot.scale;
  const step = lane.steps.find((candidate) => candidate.at >= at);
  if (step && step.start <= at + near) return { step };
  const distance = (span) => Math.max(span.start - at, at - (span.end ?? end), 0);
  const row = (span) => Math.min(span.rows - 1, Math.max(0, Math.floor(((y - lane.top) / lane.height) * span.rows)));
  const found = lane.spans
    .filter((span) => distance(span) <= near && (span.rows === 1 || span.row === row(span)))
    .sort((one, other) => one.isFaint - other.isFaint || distance(one) - distance(other));
  return found.length ? { span: found[0] } : null;
}

const NAMES = { encode: "encoding the prompt", queue: "queue", open: "opening a session", prefill: "prefill", prefill_chunk: "prefill chunk", kv_frame: "KV frame", kv_transfer: "KV transfer", decode: "decode" };

export function describeSpan(span) {
  const long = span.end === null ? "not ended" : seconds(span.end - span.start);
  const place = { kv_frame: "from", kv_transfer: "to" }[span.kind] ?? "on";
  const parts = [`${NAMES[span.kind] ?? span.kind}${span.node ? ` ${place} ${span.node}` : ""}`, `at ${seconds(span.start)}, ${long}`];
  if (span.num_tokens !== null && span.num_tokens !== undefined) parts.push(plural(span.num_tokens, "token"));
  if (span.bytes !== null && span.bytes !== undefined) {
    const rate = span.end > span.start ? `, ${bytes(span.bytes / (span.end - span.start))}/s` : "";
    parts.push(`${bytes(span.bytes)}${rate}`);
  }
  if (span.attempt) parts.push(`attempt ${span.attempt + 1}`);
  if (span.detail) parts.push(span.detail);
  return parts.join(" · ");
}

export function describeStep(step) {
  const { own, accepted, rejected } = outcome(step);
  const last = step.position + step.num_tokens - 1;
  const drafts = step.num_draft_tokens
    ? `${count(step.num_draft_tokens)} drafted, ${count(rejected)} rejected`
    : step.wanted_drafts
      ? "drafts wanted, none found in time"
      : "no drafts wanted";
  const parts = [
    `step on ${step.node}${step.sample ? `, sample ${step.sample}` : ""}`,
    `at ${seconds(step.start)}, ${seconds(step.at - step.start)}`,
    `batch ${count(step.batch)}`,
    `position ${step.position}${last > step.position ? `–${last}` : ""}`,
    `${plural(step.num_tokens, "token")}: ${own} own, ${accepted} accepted`,
    drafts,
  ];
  if (step.tokens?.length) parts.push(step.tokens.map((text) => `“${text}”`).join(" "));
  return parts.join(" · ");
}
