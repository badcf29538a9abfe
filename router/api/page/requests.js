// The recent requests in a table, which can be sorted by a column and filtered by a text.

import { drawn, element, update } from "./dom.js";
import { count, decimal, duration, inSeconds, largest } from "./figures.js";

const SHOWN = 500; // maximum rows; a browser needs more than a second for thousands
const COLUMNS = [
  // [key, heading, value to sort by, is a number]
  ["serial", "request", (request) => request.serial, false],
  ["state", "state", (request) => request.state, false],
  ["prompt", "prompt", (request) => request.num_prompt_tokens, true],
  ["generated", "generated", (request) => request.num_generated_tokens, true],
  ["queue", "queue (s)", (request) => request.queue_seconds, true],
  ["ttft", "first token (s)", (request) => request.ttft_seconds, true],
  ["total", "total (s)", (request) => lasted(request), true],
  ["acceptance", "acceptance length", (request) => request.mean_acceptance_length, true],
  ["moves", "moves", (request) => movesOf(request), true],
  ["nodes", "nodes", (request) => (request.nodes ?? []).join(" "), false],
];
const BADNESS = { failed: "bad", aborted: "warning", waiting: "info", running: "info", finished: "good" };

export const lasted = (request) => request.e2e_seconds ?? (isOver(request) ? null : request.age_seconds);
export const movesOf = (request) => Math.max(0, (request.attempts ?? 1) - 1);
export const isOver = (request) => !["waiting", "running"].includes(request.state);
export const stateWord = (request) =>
  element("span", { class: `state ${BADNESS[request.state] ?? "info"}` }, request.state);

export function requestsView(content) {
  let requests = null;
  let order = { key: "serial", isDescending: true };
  const filter = element("input", { type: "search", placeholder: "id, state, node or error", "aria-label": "Filter" });
  const slowest = element("button", { type: "button" }, "Slowest first");
  const newest = element("button", { type: "button" }, "Newest first");
  const tally = element("span", { class: "quiet", role: "status" });
  const table = element("div", { class: "scrolled" });
  const redraw = () => {
    if (requests === null) return;
    const chosen = matching(requests, filter.value);
    const rows = sorted(chosen, order);
    const most = largest(rows.map((request) => lasted(request) ?? 0), 1e-9);
    newest.setAttribute("aria-pressed", String(order.key === "serial" && order.isDescending));
    slowest.setAttribute("aria-pressed", String(order.key === "total" && order.isDescending));
    update(tally, [tallied(requests, chosen)]);
    update(table, [requests.length ? requestTable(rows.slice(0, SHOWN), order, most) : null]);
  };
  const sortBy = (key, isDescending) => {
    order = { key, isDescending };
    redraw();
  };
  filter.addEventListener("input", redraw);
  slowest.addEventListener("click", () => sortBy("total", true));
  newest.addEventListener("click", () => sortBy("serial", true));
  table.addEventListener("click", (event) => {
    const key = event.target.closest("button[data-key]")?.dataset.key;
    if (key) sortBy(key, key === order.key ? !order.isDescending : true);
    else if (!event.target.closest("a") && !String(getSelection())) {
      const row = event.target.closest("tr[data-serial]");
      if (row) location.hash = `#/requests/${row.dataset.serial}`;
    }
  });
  return {
    name: "requests",
    title: "Requests",
    url: "api/requests",
    show(figures) {
      if (requests === null) {
        content.replaceChildren(
          element("h1", {}, "Requests"),
          element("div", { class: "controls" }, filter, newest, slowest, tally),
          table,
        );
      }
      requests = figures.requests ?? [];
      redraw();
    },
  };
}

function matching(requests, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return requests;
  return requests.filter((request) => {
    const found = [request.serial, request.request_id, request.state, request.error, ...(request.nodes ?? [])].join(" ").toLowerCase();
    return words.every((word) => found.includes(word));
  });
}

function sorted(requests, { key, isDescending }) {
  const valueOf = COLUMNS.find(([name]) => name === key)[2];
  const sign = isDescending ? -1 : 1;
  return [...requests].sort((one, other) => {
    const [a, b] = [valueOf(one) ?? null, valueOf(other) ?? null];
    if (a === null || b === null) return (a === null) - (b === null); // unknown values come last
    return sign * (a < b ? -1 : a > b ? 1 : 0) || other.serial - one.serial;
  });
}

function tallied(requests, chosen) {
  if (!requests.length) return "No request has come to this router yet.";
  const shown = chosen.length > SHOWN ? `, ${SHOWN} of them shown` : "";
  if (chosen.length === requests.length) return `${count(requests.length)} kept${shown}`;
  return `${count(chosen.length)} of ${count(requests.length)}${shown}`;
}

function requestTable(rows, order, most) {
  const heads = COLUMNS.map(([key, heading, , isNumber]) => {
    const sort = key === order.key ? (order.isDescending ? "descending" : "ascending") : null;
    const arrow = sort ? element("span", { "aria-hidden": "true" }, sort === "descending" ? " ▾" : " ▴") : null;
    return element(
      "th",
      { scope: "col", "aria-sort": sort, class: isNumber ? "number" : null },
      element("button", { type: "button", "data-key": key }, heading, arrow),
    );
  });
  return element(
    "table",
    { class: "requests" },
    element("thead", {}, element("tr", {}, heads)),
    element("tbody", {}, rows.map((request) => requestRow(request, most))),
  );
}

function requestRow(request, most) {
  const cell = (index, ...children) => {
    const [, heading, , isNumber] = COLUMNS[index];
    return element("td", { "data-label": heading, class: isNumber ? "number" : null }, children);
  };
  const moves = movesOf(request);
  const cached = request.num_cached_tokens ? element("small", {}, `${count(request.num_cached_tokens)} cached`) : null;
  return element(
    "tr",
    { "data-serial": request.serial },
    element(
      "th",
      { scope: "row", class: "name" },
      element("a", { href: `#/requests/${request.serial}` }, `${request.serial} `, element("span", { class: "id" }, request.request_id)),
      element("small", {}, `${duration(request.age_seconds)} ago`),
    ),
    cell(1, stateWord(request), request.error ? element("small", { class: "error" }, request.error) : null),
    cell(2, count(request.num_prompt_tokens), cached),
    cell(3, count(request.num_generated_tokens), request.num_samples > 1 ? element("small", {}, `${request.num_samples} samples`) : null),
    cell(4, inSeconds(request.queue_seconds)),
    cell(5, inSeconds(request.ttft_seconds)),
    cell(6, inSeconds(lasted(request)), shares(request, most)),
    cell(7, request.mean_acceptance_length ? decimal(request.mean_acceptance_length, 2) : "–"),
    cell(8, moves ? element("span", { class: "state warning" }, moves) : "0"),
    cell(9, request.nodes?.length ? request.nodes.map((node) => [element("span", { class: "node-name" }, node), " "]) : "–"),
  );
}

// Draws the time in the queue, from there to the first token, and the rest, relative to the slowest request.
function shares(request, most) {
  const total = lasted(request);
  if (total === null || total === undefined) return null;
  const queue = Math.min(request.queue_seconds ?? (request.state === "waiting" ? total : 0), total);
  const first = Math.min(Math.max(request.ttft_seconds ?? total, queue), total);
  const at = (value) => ((100 * value) / most).toFixed(2);
  const part = (name, from, to) => drawn("rect", { class: `c-${name}`, x: at(from), width: at(to - from), height: 6 });
  return drawn(
    "svg",
    { class: "shares", viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" },
    part("queue", 0, queue),
    part("prefill", queue, first),
    part("decode", first, total),
  );
}
