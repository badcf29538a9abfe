// Computes the lanes of a timeline from top to bottom: what is drawn, not how.

import { timedSteps } from "./breakdown.js";

const ROWS = 4; // of frames in flight at the same time; further ones overlap in the drawing
const ROW_HEIGHT = 9; // pixels, as all heights here
const SPAN_HEIGHT = 26;
const STEPS_HEIGHT = 46;

// [{key, title, note, height, spans: [{…span, row, rows, isFaint}], steps: […]}]; `samples`: the samples whose steps are shown.
export function lanesOf(record, samples) {
  const spans = record.spans;
  const lanes = [];
  const waiting = spans.filter((span) => ["encode", "queue", "open"].includes(span.kind));
  lanes.push({ key: "queue", title: "queue", note: "router", height: SPAN_HEIGHT, spans: waiting.map(plain), steps: [] });

  const prefill = spans.filter((span) => ["prefill", "prefill_chunk"].includes(span.kind));
  for (const node of named(prefill)) {
    const own = prefill.filter((span) => span.node === node);
    const chunked = new Set(own.filter((span) => span.kind === "prefill_chunk").map((span) => span.attempt));
    const shown = own.map((span) => ({ ...plain(span), isFaint: span.kind === "prefill" && chunked.has(span.attempt) }));
    lanes.push({ key: "prefill", title: "prefill", note: node, height: SPAN_HEIGHT, spans: shown, steps: [] });
  }

  // The sending node reports frames; they are drawn in the lane of the node that receives them.
  const transfer = spans.filter((span) => ["kv_frame", "kv_transfer"].includes(span.kind));
  const receivers = new Map(transfer.filter((span) => span.kind === "kv_transfer").map((span) => [span.attempt, span.node]));
  const receiver = (span) => receivers.get(span.attempt) ?? span.node;
  for (const node of new Set(transfer.map(receiver))) {
    const own = transfer.filter((span) => receiver(span) === node);
    const packed = stacked(own.filter((span) => span.kind === "kv_frame"));
    const rows = Math.max(1, ...packed.map((span) => span.row + 1));
    const whole = own.filter((span) => span.kind === "kv_transfer").map((span) => ({ ...plain(span), isFaint: packed.length > 0 }));
    const shown = [...whole, ...packed.map((span) => ({ ...span, rows }))];
    lanes.push({ key: "kv", title: "KV transfer", note: node, height: Math.max(SPAN_HEIGHT, rows * ROW_HEIGHT), spans: shown, steps: [] });
  }

  const decode = spans.filter((span) => span.kind === "decode");
  const steps = timedSteps(record);
  for (const node of named([...decode, ...steps])) {
    const own = steps.filter((step) => step.node === node);
    const shown = samples.filter((sample) => own.some((step) => step.sample === sample));
    const whole = decode.filter((span) => span.node === node).map((span) => ({ ...plain(span), isFaint: true }));
    for (const sample of shown.length ? shown : samples.slice(0, 1)) {
      lanes.push({
        key: "decode",
        title: "decode",
        note: samples.length > 1 ? `${node}, sample ${sample}` : node,
        height: STEPS_HEIGHT,
        spans: whole,
        steps: own.filter((step) => step.sample === sample),
      });
    }
  }
  return lanes;
}

const plain = (span) => ({ ...span, row: 0, rows: 1, isFaint: false });
const named = (items) => [...new Set(items.map((item) => item.node))];

// Puts overlapping frames into different rows.
function stacked(spans) {
  const ends = Array(ROWS).fill(-1);
  return [...spans]
    .sort((one, other) => one.start - other.start)
    .map((span) => {
      const free = ends.findIndex((end) => end <= span.start);
      const row = free < 0 ? ends.indexOf(Math.min(...ends)) : free;
      ends[row] = span.end ?? Infinity;
      return { ...span, row, isFaint: false };
    });
}

// Returns how many of a step's tokens are the target's own, accepted draft tokens and rejected draft tokens.
export function outcome(step) {
  const accepted = Math.min(step.num_accepted, step.num_tokens); // an answer can end between accepted tokens
  return { own: step.num_tokens - accepted, accepted, rejected: Math.max(0, step.num_draft_tokens - step.num_accepted) };
}
