// One request: where its time went, its timeline, its tokens and its moves.

import { PARTS, breakdown, endOf, moveCosts, sentence, timedSteps } from "./breakdown.js";
import { drawn, element, update } from "./dom.js";
import { count, decimal, duration, inSeconds, largest, plural, seconds } from "./figures.js";
import { lanesOf } from "./lanes.js";
import { describeSpan, describeStep, draw, thingAt } from "./picture.js";
import { isOver, lasted, stateWord } from "./requests.js";
import { tokenStrip } from "./tokens.js";

const SAMPLES_AT_ONCE = 4;
const SHORTEST = 1e-4; // minimum seconds that the whole width shows
const LEGEND = [
  ["queue", "queue"],
  ["prefill", "prefill"],
  ["kv", "KV transfer"],
  ["own", "the target's own token"],
  ["accepted", "accepted draft token"],
  ["rejected", "rejected draft token"],
  ["moves", "move to another node"],
];
const HINT = "Point at a bar for its details; drag over a part, or Ctrl and the wheel, to zoom.";

export function requestView(content, serial) {
  const parts = skeleton(serial);
  let record = null;
  let steps = []; // with `start` and `index`
  let shown = null; // {from, to} in seconds; null: the whole request
  let chosen = null; // index of a step
  let picture = null;
  let drag = null;

  const view = { name: "requests", title: `Request ${serial}`, url: `api/requests/${serial}`, isOver: false, show, missing, close };
  const resized = new ResizeObserver(() => record && redraw());

  function missing() {
    view.isOver = true;
    if (record !== null) return; // evicted since then; the page shows it almost to its end
    update(content, [
      element("h1", {}, `Request ${serial}`),
      element("p", {}, "The router has no record of this request: it keeps the most recent ones only. ", element("a", { href: "#/requests" }, "Recent requests")),
    ]);
  }

  function close() {
    resized.disconnect();
  }

  function show(figures) {
    if (record === null) {
      content.replaceChildren(...parts.all);
      resized.observe(parts.svg.parentElement);
    }
    record = { spans: [], steps: [], moves: [], ...figures };
    steps = timedSteps(record).map((step, index) => ({ ...step, index }));
    view.isOver = isOver(record);
    update(parts.head, headOf(record, serial));
    update(parts.where, whereOf(record));
    update(parts.dropped, record.num_dropped_steps ? [droppedNote(record)] : []);
    update(parts.moves, movesOf(record));
    offerSamples();
    redraw();
  }

  function offerSamples() {
    const number = largest(steps.map((step) => step.sample + 1), record.num_samples ?? 1);
    parts.samples.parentElement.hidden = number < 2;
    if (parts.samples.options.length === number + 1) return;
    const options = Array.from({ length: number }, (_, sample) => element("option", { value: sample }, `sample ${sample}`));
    parts.samples.replaceChildren(element("option", { value: "all" }, "all samples"), ...options);
    parts.samples.value = number <= SAMPLES_AT_ONCE ? "all" : "0";
  }

  function chosenSamples() {
    const found = [...new Set(steps.map((step) => step.sample))].sort((one, other) => one - other);
    const value = parts.samples.value;
    return value === "all" || value === "" ? (found.length ? found : [0]) : [Number(value)];
  }

  const whole = () => ({ from: 0, to: endOf(record) * 1.01 });

  function redraw() {
    const window = shown ?? whole();
    const samples = chosenSamples();
    const markers = record.moves.map((move) => ({ at: move.at, text: move.cause, kind: "move" }));
    if (typeof record.ttft_seconds === "number") markers.push({ at: record.ttft_seconds, text: "first token", kind: "first" });
    markers.sort((one, other) => one.at - other.at);
    picture = draw(parts.svg, {
      width: parts.svg.parentElement.clientWidth,
      view: window,
      lanes: lanesOf({ ...record, steps }, samples),
      markers,
      end: endOf(record),
    });
    mark();
    const inside = steps.filter((step) => step.at >= window.from && step.start <= window.to);
    update(parts.strip, steps.length ? tokenStrip(inside, samples) : [element("p", { class: "quiet" }, "No step yet.")]);
    parts.whole.disabled = shown === null;
  }

  // Outlines the chosen step in the picture and among the tokens, and shows its details.
  function mark() {
    parts.svg.querySelector(".chosen")?.remove();
    parts.strip.querySelector(".chosen")?.classList.remove("chosen");
    const step = steps[chosen];
    if (!step) return;
    parts.strip.querySelector(`[data-step="${step.index}"]`)?.classList.add("chosen");
    update(parts.details, [describeStep(step)]);
    const lane = picture.lanes.find((candidate) => candidate.steps.some((other) => other.index === step.index));
    if (!lane) return;
    const x = Math.max(picture.plot.left, picture.plot.xOf(step.start));
    const width = Math.min(picture.plot.right, picture.plot.xOf(step.at)) - x;
    if (width < 0) return;
    parts.svg.append(drawn("rect", { class: "chosen", x: x - 1, y: lane.top - 1, width: Math.max(2, width) + 2, height: lane.height + 2 }));
  }

  function choose(index) {
    chosen = index;
    mark();
  }

  function zoom(factor, middle) {
    const window = shown ?? whole();
    const centre = middle ?? (window.from + window.to) / 2;
    look(centre - (centre - window.from) * factor, centre + (window.to - centre) * factor);
  }

  function look(from, to) {
    const { to: end } = whole();
    const width = Math.min(Math.max(to - from, SHORTEST), end);
    const start = Math.min(Math.max(0, from), end - width);
    shown = width >= end * 0.999 ? null : { from: start, to: start + width };
    redraw();
  }

  const pan = (share) => {
    const window = shown ?? whole();
    const by = (window.to - window.from) * share;
    look(window.from + by, window.to + by);
  };

  function step(by) {
    if (!steps.length) return;
    const next = chosen === null ? (by > 0 ? 0 : steps.length - 1) : Math.min(steps.length - 1, Math.max(0, chosen + by));
    const window = shown ?? whole();
    const { start, at } = steps[next];
    if (start < window.from || at > window.to) {
      const half = Math.max((window.to - window.from) / 2, at - start);
      look((start + at) / 2 - half, (start + at) / 2 + half);
    }
    choose(next);
  }

  function whereIs(event) {
    const box = parts.svg.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  function point(event) {
    const [x, y] = whereIs(event);
    const thing = thingAt(x, y, picture, endOf(record));
    if (thing?.step) choose(thing.step.index);
    else {
      choose(null);
      update(parts.details, [thing ? describeSpan(thing.span) : HINT]);
    }
  }

  parts.svg.addEventListener("pointermove", (event) => {
    if (!picture) return;
    if (drag === null) return point(event);
    const [x] = whereIs(event);
    drag.to = Math.min(picture.plot.right, Math.max(picture.plot.left, x));
    drag.box.setAttribute("x", Math.min(drag.from, drag.to));
    drag.box.setAttribute("width", Math.abs(drag.to - drag.from));
    return null;
  });
  parts.svg.addEventListener("pointerdown", (event) => {
    const [x] = whereIs(event);
    if (!picture || event.button !== 0) return;
    if (event.pointerType === "touch") point(event); // a finger scrolls the page
    if (event.pointerType === "touch" || x < picture.plot.left) return;
    parts.svg.setPointerCapture(event.pointerId);
    drag = { from: x, to: x, box: drawn("rect", { class: "drag", x, y: 0, width: 0, height: picture.bottom }) };
    parts.svg.append(drag.box);
  });
  const dropped = () => {
    if (drag === null) return;
    const { from, to, box } = drag;
    drag = null;
    box.remove();
    const ends = [from, to].map(picture.plot.timeAt).sort((one, other) => one - other);
    if (Math.abs(to - from) > 5) look(...ends);
  };
  parts.svg.addEventListener("pointerup", dropped);
  parts.svg.addEventListener("pointercancel", dropped);
  parts.svg.addEventListener("dblclick", () => look(0, Infinity));
  parts.svg.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.shiftKey) return; // the page scrolls
      event.preventDefault();
      if (event.ctrlKey) zoom(event.deltaY > 0 ? 1.25 : 0.8, picture.plot.timeAt(whereIs(event)[0]));
      else pan(Math.sign(event.deltaY || event.deltaX) * 0.1);
    },
    { passive: false },
  );
  const keys = {
    ArrowRight: () => step(1),
    ArrowLeft: () => step(-1),
    "+": () => zoom(0.5, steps[chosen]?.at),
    "=": () => zoom(0.5, steps[chosen]?.at),
    "-": () => zoom(2),
    0: () => look(0, Infinity),
    Home: () => step(-Infinity),
    End: () => step(Infinity),
  };
  parts.svg.addEventListener("keydown", (event) => {
    if (!record || event.ctrlKey || event.altKey || event.metaKey || !(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });
  parts.strip.addEventListener("pointerover", (event) => {
    const group = event.target.closest("[data-step]");
    if (group) choose(Number(group.dataset.step));
  });
  parts.samples.addEventListener("change", redraw);
  parts.closer.addEventListener("click", () => zoom(0.5, steps[chosen]?.at));
  parts.farther.addEventListener("click", () => zoom(2));
  parts.earlier.addEventListener("click", () => pan(-0.5));
  parts.later.addEventListener("click", () => pan(0.5));
  parts.whole.addEventListener("click", () => look(0, Infinity));
  return view;
}

// Makes the elements that stay while figures change.
function skeleton(serial) {
  const button = (text, label) => element("button", { type: "button", "aria-label": label, title: label }, text);
  const parts = {
    head: element("div", { class: "head" }),
    where: element("section", { class: "where", "aria-label": "Where the time went" }),
    dropped: element("div"),
    moves: element("section", { class: "moves" }),
    svg: drawn("svg", { class: "timeline", tabindex: 0, role: "img", "aria-label": `Timeline of request ${serial}` }),
    strip: element("div", { class: "strips" }),
    details: element("p", { class: "details", "aria-live": "polite" }, HINT),
    samples: element("select", { "aria-label": "Samples" }),
    closer: button("+", "Zoom in"),
    farther: button("−", "Zoom out"),
    earlier: button("‹", "Earlier"),
    later: button("›", "Later"),
    whole: button("Whole", "The whole request"),
  };
  const legend = LEGEND.map(([name, text]) => element("li", {}, swatch(name), text));
  parts.all = [
    parts.head,
    parts.where,
    parts.dropped,
    element(
      "section",
      { "aria-label": "Timeline" },
      element(
        "div",
        { class: "controls" },
        element("h2", {}, "Timeline"),
        element("label", { hidden: true }, parts.samples),
        element("span", { class: "buttons" }, parts.earlier, parts.farther, parts.whole, parts.closer, parts.later),
      ),
      element("div", { class: "canvas" }, parts.svg),
      parts.details,
      element("ul", { class: "legend" }, legend),
    ),
    element("section", { "aria-label": "Tokens" }, element("h2", {}, "Tokens"), parts.strip),
    parts.moves,
  ];
  return parts;
}

const swatch = (name) =>
  drawn("svg", { class: "swatch", viewBox: "0 0 10 10", "aria-hidden": "true" }, drawn("rect", { class: `c-${name}`, width: 10, height: 10, rx: 2 }));

function headOf(record, serial) {
  const figure = (name, value, note) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value, note ? element("small", {}, note) : null));
  const cached = record.num_cached_tokens ? `${count(record.num_cached_tokens)} cached` : null;
  return [
    element("p", { class: "back" }, element("a", { href: "#/requests" }, "‹ Requests")),
    element("h1", {}, `Request ${serial} `, stateWord(record), element("span", { class: "id" }, record.request_id)),
    record.error ? element("p", { class: "verdict bad" }, record.error) : null,
    element(
      "dl",
      { class: "figures" },
      figure("prompt tokens", count(record.num_prompt_tokens), cached),
      figure("generated tokens", count(record.num_generated_tokens), record.num_samples > 1 ? `${record.num_samples} samples` : null),
      figure("queue", seconds(record.queue_seconds)),
      figure("first token", seconds(record.ttft_seconds)),
      figure(isOver(record) ? "total" : "so far", seconds(lasted(record))),
      figure("acceptance length", record.mean_acceptance_length ? decimal(record.mean_acceptance_length, 2) : "–"),
      figure("moves", count(record.moves.length)),
      figure("arrived", `${duration(record.age_seconds)} ago`),
      element("div", { class: "wide" }, element("dt", {}, "nodes"), element("dd", {}, (record.nodes ?? []).join(", ") || "–")),
    ),
  ];
}

function whereOf(record) {
  const whole = endOf(record);
  const times = breakdown(record);
  const opening = isOver(record) ? { failed: "Failed after ", aborted: "Aborted after " }[record.state] ?? "" : "So far ";
  const words = sentence(record, times).flatMap(({ text, isLargest }, index) => [
    index ? ", " : "",
    isLargest ? element("strong", {}, text) : text,
  ]);
  let at = 0;
  const bars = Object.keys(PARTS).map((part) => {
    const x = at;
    at += (100 * times[part]) / whole;
    return drawn("rect", { class: `c-${part}`, x: x.toFixed(3), width: (at - x).toFixed(3), height: 8 }, drawn("title", {}, `${PARTS[part]}: ${seconds(times[part])}`));
  });
  return [
    element("p", { class: "sentence" }, `${opening}${seconds(whole)}: `, words, "."),
    drawn("svg", { class: "stack", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" }, bars),
  ];
}

function droppedNote(record) {
  return element(
    "p",
    { class: "verdict warning" },
    `The record is cut: it has ${plural(record.steps.length, "step")}, and ${plural(record.num_dropped_steps, "step")} more took place.`,
  );
}

function movesOf(record) {
  if (!record.moves.length) return [];
  const rows = moveCosts(record).map((move) =>
    element(
      "tr",
      {},
      element("td", { class: "number" }, inSeconds(move.at)),
      element("td", {}, move.cause),
      element("td", {}, move.node || "–"),
      element("td", { class: "number" }, inSeconds(move.to - move.from)),
      element("td", { class: "error" }, move.error || "–"),
    ),
  );
  const heads = ["at (s)", "cause", "away from", "cost (s)", "error"].map((name, index) =>
    element("th", { scope: "col", class: index % 3 ? null : "number" }, name),
  );
  return [
    element("h2", {}, "Moves"),
    element("div", { class: "scrolled" }, element("table", {}, element("thead", {}, element("tr", {}, heads)), element("tbody", {}, rows))),
  ];
}
