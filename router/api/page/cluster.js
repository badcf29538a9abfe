// The overview: the router's figures, and one row per node. Nodes in trouble are named first.

import { drawn, element, update } from "./dom.js";
import { bytes, count, decimal, duration, percent, plural, seconds } from "./figures.js";

const ROLES = ["prefill", "decode", "draft"];
const COLUMNS = ["node", "state", "batch", "KV cache", "tokens/s", "acceptance length", "look-ahead hits", "KV traffic", "step"];
const REMEMBERED = 60; // values of tokens/s in each node's small curve
const FEWEST = 8; // minimum number of values in a curve
const FULL = 0.9; // minimum share of the KV cache for the bar to be marked as full

// Returns a node's problems, worst first, as [severity, word].
function troubles(node) {
  const found = [];
  if (node.state === "lost") found.push(["bad", "lost"]);
  if (node.error && node.state !== "lost") found.push(["bad", node.state === "serving" ? "error" : "refused"]);
  if (node.is_late) found.push(["warning", "late"]);
  if (node.state === "draining") found.push(["warning", "draining"]);
  if (node.state === "starting") found.push(["info", "starting"]);
  return found;
}

const worst = (node) => troubles(node)[0]?.[0] ?? "good";

export function clusterView(content) {
  const curves = new Map(); // of tokens/s, by node; those of removed nodes are deleted
  const view = {
    name: "cluster",
    title: "Cluster",
    url: "api/cluster",
    show(cluster) {
      const nodes = cluster.nodes ?? [];
      remember(curves, nodes);
      const sick = nodes.filter((node) => ["bad", "warning"].includes(worst(node)));
      view.title = sick.length ? `${sick.length} sick` : "Cluster";
      update(content, [
        element("h1", {}, "Cluster"),
        verdict(nodes, sick),
        routerFigures(cluster),
        nodes.length ? nodeTable(cluster, nodes, curves) : null,
      ]);
    },
  };
  return view;
}

function remember(curves, nodes) {
  for (const name of curves.keys()) if (!nodes.some((node) => node.name === name)) curves.delete(name);
  for (const node of nodes) {
    curves.set(node.name, [...(curves.get(node.name) ?? []), node.tokens_per_second ?? 0].slice(-REMEMBERED));
  }
}

function verdict(nodes, sick) {
  if (!nodes.length) return element("p", { class: "verdict info" }, "No node has reported to this router yet.");
  const missing = ["decode", "prefill"].filter(
    (role) => !nodes.some((node) => node.role === role && node.state === "serving"),
  );
  const parts = [];
  if (missing.includes("decode")) parts.push("No decode node serves: requests wait or are refused.");
  else if (missing.length) parts.push("No prefill node serves: decode nodes compute prompts, which is slower.");
  if (sick.length) {
    const named = sick.map((node) => `${node.name} (${troubles(node).map(([, word]) => word).join(", ")})`);
    parts.push(`${sick.length} of ${plural(nodes.length, "node")} in trouble: ${named.join(", ")}.`);
  }
  if (parts.length) {
    const isBad = missing.includes("decode") || sick.some((node) => worst(node) === "bad");
    return element("p", { class: `verdict ${isBad ? "bad" : "warning"}` }, parts.join(" "));
  }
  const starting = nodes.filter((node) => node.state === "starting").length;
  if (starting) return element("p", { class: "verdict info" }, `${plural(starting, "node")} starting; all others serve.`);
  return element("p", { class: "verdict good" }, nodes.length === 1 ? "The only node serves." : `All ${nodes.length} nodes serve.`);
}

function routerFigures(cluster) {
  const figure = (name, value, note) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value, note ? element("small", {}, note) : null));
  return element(
    "dl",
    { class: "figures", "aria-label": "Router" },
    figure("running", count(cluster.num_requests_running)),
    figure("waiting", count(cluster.num_requests_waiting)),
    figure("waiting tokens", count(cluster.num_waiting_tokens)),
    figure("oldest wait", cluster.num_requests_waiting ? seconds(cluster.oldest_wait_seconds) : "–"),
    figure("moves", count(cluster.num_moves)),
    figure("uptime", duration(cluster.uptime_seconds)),
    element("div", { class: "wide" }, element("dt", {}, "model"), element("dd", {}, cluster.model || "–")),
    element("div", { class: "wide" }, element("dt", {}, "numerics"), element("dd", {}, cluster.numerics || "–")),
    element("div", {}, element("dt", {}, "version"), element("dd", {}, cluster.version || "–")),
  );
}

function nodeTable(cluster, nodes, curves) {
  const roles = [...ROLES, ...new Set(nodes.map((node) => node.role).filter((role) => !ROLES.includes(role)))];
  const groups = roles.map((role) => {
    const members = nodes.filter((node) => node.role === role);
    if (!members.length) return null;
    return element(
      "tbody",
      { "aria-label": `${role} nodes` },
      element(
        "tr",
        { class: "role" },
        element("th", { colspan: COLUMNS.length, scope: "rowgroup" }, `${role} `, element("small", {}, members.length)),
      ),
      members.map((node) => nodeRows(cluster, node, curves.get(node.name))),
    );
  });
  return element(
    "div",
    { class: "scrolled" },
    element(
      "table",
      { class: "nodes" },
      element("thead", {}, element("tr", {}, COLUMNS.map((name, index) => columnHead(name, index)))),
      groups,
    ),
  );
}

const columnHead = (name, index) => element("th", { scope: "col", class: index > 3 ? "number" : null }, name);

function nodeRows(cluster, node, curve) {
  const messages = messagesOf(cluster, node);
  const badness = worst(node);
  const cell = (index, ...children) =>
    element("td", { "data-label": COLUMNS[index], class: index > 3 ? "number" : null }, children);
  const isDecode = node.role === "decode";
  const row = element(
    "tr",
    { class: `node ${badness}`, "data-node": node.name, "data-state": node.state },
    element(
      "th",
      { scope: "row", class: "name" },
      element("span", {}, node.name),
      node.target && node.target !== node.name ? element("small", {}, node.target) : null,
    ),
    cell(1, stateWords(node)),
    cell(2, `${count(node.num_running)} running`, node.num_waiting ? `, ${count(node.num_waiting)} waiting` : null),
    cell(3, kvBar(node)),
    cell(4, sparkline(curve), decimal(node.tokens_per_second, 1)),
    cell(5, isDecode && node.mean_acceptance_length ? decimal(node.mean_acceptance_length, 2) : "–"),
    cell(6, node.look_ahead_hit_rate ? percent(node.look_ahead_hit_rate) : "–"),
    cell(7, node.kv_bytes_per_second ? `${bytes(node.kv_bytes_per_second)}/s` : "–"),
    cell(8, count(node.step)),
  );
  if (!messages.length) return [row];
  return [
    row,
    element("tr", { class: `message ${badness}` }, element("td", { colspan: COLUMNS.length }, messages.join(" · "))),
  ];
}

function stateWords(node) {
  const found = troubles(node);
  const words = found.some(([, word]) => word === node.state) ? found : [["good", node.state], ...found];
  return words.map(([badness, word]) => element("span", { class: `state ${badness}` }, word));
}

// Describes each node in words, so that operators need not compare columns.
function messagesOf(cluster, node) {
  const messages = [];
  if (node.error) messages.push(node.error);
  if (node.is_late) messages.push("its progress is overdue");
  if (node.version && cluster.version && node.version !== cluster.version) {
    messages.push(`version ${node.version}, the router has ${cluster.version}`);
  }
  if (node.role !== "draft" && node.numerics && cluster.numerics && node.numerics !== cluster.numerics) {
    messages.push(`numerics ${node.numerics}, others have ${cluster.numerics}`);
  }
  return messages;
}

function kvBar(node) {
  if (!node.kv_blocks_total) return "–";
  const used = node.kv_blocks_total - node.kv_blocks_free;
  const share = Math.min(1, Math.max(0, used / node.kv_blocks_total));
  const text = `${percent(share)} of ${count(node.kv_blocks_total)} blocks`;
  return [
    drawn(
      "svg",
      { class: "bar", viewBox: "0 0 100 8", preserveAspectRatio: "none", role: "img", "aria-label": `KV cache: ${text}` },
      drawn("rect", { class: "track", width: 100, height: 8, rx: 2 }),
      drawn("rect", { class: share >= FULL ? "fill full" : "fill", width: (share * 100).toFixed(1), height: 8, rx: 2 }),
    ),
    element("small", {}, text),
  ];
}

function sparkline(curve) {
  if (!curve || curve.length < FEWEST) return null;
  const most = Math.max(...curve, 1e-9);
  const points = curve.map((value, index) => `${index + REMEMBERED - curve.length},${(15 - (14 * value) / most).toFixed(1)}`);
  return drawn(
    "svg",
    { class: "curve", viewBox: `0 0 ${REMEMBERED} 16`, preserveAspectRatio: "none", "aria-hidden": "true" },
    drawn("polyline", { points: points.join(" ") }),
  );
}
