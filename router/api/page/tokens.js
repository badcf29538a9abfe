// The tokens of the steps that the timeline shows, one chip each: own, accepted draft and rejected draft tokens.

import { element } from "./dom.js";
import { count } from "./figures.js";
import { outcome } from "./lanes.js";

const SHOWN = 1200; // maximum chips

// Draws one row per sample. `steps`: the steps in view, each with its `index` among all steps, by which its chips are
// found.
export function tokenStrip(steps, samples) {
  let left = SHOWN;
  let hidden = 0;
  const rows = samples.map((sample) => {
    const groups = [];
    for (const step of steps.filter((candidate) => candidate.sample === sample)) {
      const { own, accepted, rejected } = outcome(step);
      const number = own + accepted + rejected; // a faulty node may send any number; only a few become chips
      if (number > left) {
        hidden += number;
        left = 0;
        continue;
      }
      left -= number;
      groups.push(element("span", { class: "group", "data-step": step.index }, chipsOf(step)));
    }
    const label = samples.length > 1 ? element("span", { class: "sample" }, `sample ${sample}`) : null;
    return element("p", { class: "strip" }, label, groups);
  });
  return [rows, hidden ? element("p", { class: "quiet" }, `${count(hidden)} more tokens: zoom in to see them.`) : null];
}

function chipsOf(step) {
  const { own, accepted, rejected } = outcome(step);
  return [
    ...chips("accepted", accepted, step.tokens?.slice(0, accepted)),
    ...chips("own", own, step.tokens?.slice(accepted)),
    ...chips("rejected", rejected, step.rejected),
  ];
}

function chips(kind, number, texts) {
  return Array.from({ length: number }, (_, index) => {
    const text = texts?.[index];
    const hasText = text !== undefined && text !== null && text !== "";
    const name = `chip ${kind}${hasText ? "" : " bare"}`;
    return kind === "rejected"
      ? element("del", { class: name }, hasText ? text : null)
      : element("span", { class: name }, hasText ? text : null);
  });
}
