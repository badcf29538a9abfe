// Computes from a request's record where its time went. Times are seconds since its arrival.

import { count, largest, plural, seconds } from "./figures.js";

// In the order in which they occur.
export const PARTS = {
  encode: "encoding",
  queue: "queue",
  prefill: "prefill",
  kv: "KV transfer not hidden by compute",
  decode: "decoding",
  moves: "moves",
  other: "elsewhere",
};
const NAMED_SHARE = 0.01; // minimum share of the whole for a part to be named
const NAMED_SECONDS = 0.01; // or this minimum in seconds, for parts with their own cause

// Returns the end of the request, or the last known time while it runs.
export function endOf(record) {
  const known = [record.e2e_seconds, ...record.spans.map((span) => span.end ?? span.start), ...record.steps.map((step) => step.at)];
  if (record.e2e_seconds === null || record.e2e_seconds === undefined) known.push(record.age_seconds);
  return largest(known.filter((at) => typeof at === "number"), 1e-6);
}

// Returns the steps with their beginnings: the previous step of the same sample and attempt. The first such step begins
// where the work before it ended.
export function timedSteps(record) {
  const before = new Map();
  return [...record.steps]
    .sort((one, other) => one.at - other.at)
    .map((step) => {
      const key = `${step.sample}/${step.attempt}/${step.node}`;
      const start = before.get(key) ?? firstStart(record, step);
      before.set(key, step.at);
      return { ...step, start: Math.min(start, step.at) };
    });
}

function firstStart(record, step) {
  const own = record.spans.filter((span) => span.attempt === step.attempt && span.kind !== "decode");
  const ends = own.map((span) => span.end ?? span.start).filter((end) => end <= step.at);
  const moves = record.moves.map((move) => move.at).filter((at) => at <= step.at);
  return Math.max(0, ...ends, ...moves);
}

// Returns what each move cost: the time from the last token before it to the next one or, before the first token, the
// work that was lost.
export function moveCosts(record) {
  const moves = [...record.moves].sort((one, other) => one.at - other.at);
  const ats = record.steps.map((step) => step.at).sort((one, other) => one - other);
  const end = endOf(record);
  return moves.map((move, index) => {
    const earlier = moves[index - 1]?.at ?? 0;
    const later = moves[index + 1]?.at ?? Infinity;
    const last = ats.findLast((at) => at <= move.at);
    if (last === undefined) {
      const work = record.spans.filter((span) => ["open", "prefill", "prefill_chunk"].includes(span.kind));
      const starts = work.map((span) => span.start).filter((start) => start >= earlier && start <= move.at);
      return { ...move, from: Math.min(move.at, ...starts), to: move.at };
    }
    const next = ats.find((at) => at > move.at) ?? end;
    return { ...move, from: index && last < earlier ? move.at : last, to: Math.min(next, later) };
  });
}

// Returns {part: seconds} in the order of PARTS, whose sum is the whole. If several parts overlap, the first one listed
// here counts.
export function breakdown(record) {
  const whole = endOf(record);
  const spans = (kind) => record.spans.filter((span) => span.kind === kind).map((span) => [span.start, span.end ?? whole]);
  const ranked = [
    ["moves", moveCosts(record).map((cost) => [cost.from, cost.to])],
    ["queue", spans("queue")],
    ["encode", spans("encode")],
    ["decode", timedSteps(record).map((step) => [step.start, step.at])],
    ["prefill", spans("prefill_chunk")],
    ["kv", [...spans("kv_frame"), ...transferTails(record, whole)]],
    ["prefill", spans("prefill")], // the whole call, including waits in the node before and between its chunks
    ["other", [[0, whole]]],
  ];
  const result = Object.fromEntries(Object.keys(PARTS).map((part) => [part, 0]));
  let covered = [];
  let sum = 0;
  for (const [part, intervals] of ranked) {
    covered = united([...covered, ...intervals.map(([from, to]) => [Math.max(0, from), Math.min(whole, to)])]);
    const length = covered.reduce((total, [from, to]) => total + to - from, 0);
    result[part] += length - sum;
    sum = length;
  }
  return result;
}

// A transfer overlaps the computation of the prompt, chunk by chunk. Only the time after the last chunk counts, or after
// the call if chunks are unknown.
function transferTails(record, whole) {
  const end = (span) => span.end ?? whole;
  const transfers = record.spans.filter((span) => span.kind === "kv_transfer");
  return transfers.map((transfer) => {
    const own = record.spans.filter((span) => span.attempt === transfer.attempt);
    const chunks = own.filter((span) => span.kind === "prefill_chunk");
    const computed = chunks.length ? chunks : own.filter((span) => span.kind === "prefill");
    return [largest(computed.map(end), transfer.start), end(transfer)];
  });
}

function united(intervals) {
  const result = [];
  for (const [from, to] of intervals.filter(([start, end]) => end > start).sort((one, other) => one[0] - other[0])) {
    const last = result.at(-1);
    if (last && from <= last[1]) last[1] = Math.max(last[1], to);
    else result.push([from, to]);
  }
  return result;
}

// Returns the parts of the sentence as [{text, isLargest}]. The caller joins them with ", ".
export function sentence(record, times = breakdown(record)) {
  const whole = endOf(record);
  const main = Object.keys(times).reduce((most, part) => (times[part] > times[most] ? part : most));
  const isNamed = (part) => times[part] >= NAMED_SHARE * whole || (part !== "other" && times[part] >= NAMED_SECONDS);
  const said = Object.keys(PARTS).filter((part) => part === main || isNamed(part));
  return said.map((part) => ({ text: phrase(part, times[part], record), isLargest: part === main }));
}

function phrase(part, time, record) {
  const moves = moveCosts(record); // chunks during a move are part of its cost
  const isKept = (span) => !moves.some((move) => move.from <= span.start && span.start < move.to);
  const chunks = record.spans.filter((span) => span.kind === "prefill_chunk" && isKept(span)).length;
  const steps = record.steps.length + (record.num_dropped_steps ?? 0);
  const words = {
    queue: "in the queue",
    encode: "encoding the prompt",
    prefill: chunks ? `prefill (${plural(chunks, "chunk")})` : "prefill",
    kv: "KV transfer not hidden by compute",
    decode: `decoding ${plural(record.num_generated_tokens, "token")} in ${plural(steps, "step")}`,
    moves: `lost to ${plural(record.moves.length, "move")} (${costs(record)})`,
    other: "elsewhere (opening sessions, sending, waiting for nodes)",
  };
  return `${seconds(time)} ${words[part]}`;
}

const NAMED_MOVES = 3;

function costs(record) {
  const moves = moveCosts(record);
  const named = moves.slice(0, NAMED_MOVES).map(({ cause, at, from, to }) => {
    const cost = moves.length > 1 ? `, ${seconds(to - from)}` : "";
    return `${cause} at ${seconds(at)}${cost}`;
  });
  if (moves.length > NAMED_MOVES) named.push(`${count(moves.length - NAMED_MOVES)} more`);
  return named.join("; ");
}
