// Shows the view that the address names, and updates its figures once a second.

import { clusterView } from "./cluster.js";
import { element, update } from "./dom.js";
import { duration } from "./figures.js";
import { requestView } from "./request.js";
import { requestsView } from "./requests.js";

const EVERY_MILLISECONDS = 1000;
const PATIENCE_MILLISECONDS = 5000;

const content = document.getElementById("view");
const trouble = document.getElementById("trouble");
const freshness = document.getElementById("freshness");

let view = null; // {name, title, url, isOver, show(figures), missing(), close()}
let answeredAt = null; // time of the view's last answer, in milliseconds of the page's clock
let timer = 0;
let turn = 0; // counts changes of view; answers to requests from before a change are ignored

function routed() {
  const [name, serial] = location.hash.replace(/^#\/?/, "").split("/");
  if (name === "requests" && /^\d{1,18}$/.test(serial ?? "")) return requestView(content, serial);
  return name === "requests" ? requestsView(content) : clusterView(content);
}

function open() {
  turn += 1;
  view?.close?.();
  content.replaceChildren(element("p", { class: "quiet" }, "Loading…"));
  view = routed();
  answeredAt = null;
  entitle(view.title);
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.route === view.name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  calm();
  poll();
}

async function poll() {
  const asked = turn;
  try {
    const answer = await fetch(view.url, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MILLISECONDS) });
    const isMissing = answer.status === 404 && view.missing;
    if (!answer.ok && !isMissing) throw new Error(`HTTP ${answer.status}`);
    const figures = isMissing ? null : await answer.json();
    if (asked !== turn) return;
    if (isMissing) view.missing();
    else view.show(figures);
  } catch (error) {
    if (asked === turn) worry(error);
    return again(asked);
  }
  answeredAt = performance.now();
  entitle(view.title);
  calm();
  if (!view.isOver) again(asked);
}

function again(asked) {
  if (asked !== turn) return;
  clearTimeout(timer);
  if (document.hidden) document.addEventListener("visibilitychange", poll, { once: true }); // the page is not visible
  else timer = setTimeout(poll, EVERY_MILLISECONDS);
}

function entitle(title) {
  document.title = `${title} – Outrider`;
}

function calm() {
  trouble.hidden = true;
  document.body.classList.remove("stale");
  update(freshness, [answeredAt === null ? "" : view.isOver ? "complete" : "live"]);
}

function worry(error) {
  const age = answeredAt === null ? null : (performance.now() - answeredAt) / 1000;
  const figures = age === null ? "There are no figures yet." : `The figures below are ${duration(age)} old.`;
  const reason = error.name === "TimeoutError" ? `nothing in ${PATIENCE_MILLISECONDS / 1000} s` : error.message;
  update(trouble, [`The router does not answer (${reason}). ${figures} Asking again each second.`]);
  trouble.hidden = false;
  document.body.classList.add("stale");
  update(freshness, ["not live"]);
}

addEventListener("hashchange", open);
open();
