// Formats numbers for people. null and undefined, which mean unknown, become "–".

const NONE = "–";
const known = (value) => typeof value === "number" && Number.isFinite(value);

export function seconds(value) {
  if (!known(value)) return NONE;
  if (value >= 100) return `${value.toFixed(0)} s`;
  if (value >= 10) return `${value.toFixed(1)} s`;
  if (value >= 0.0995) return `${value.toFixed(2)} s`;
  return value >= 0.00995 ? `${(value * 1000).toFixed(0)} ms` : `${(value * 1000).toFixed(1)} ms`;
}

// For a column: the same unit and number of digits in each row.
export const inSeconds = (value) => (known(value) ? value.toFixed(3) : NONE);

export function duration(value) {
  if (!known(value)) return NONE;
  const whole = Math.floor(value);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

// Works for any number of values, unlike Math.max(...values).
export const largest = (values, least) => values.reduce((most, value) => Math.max(most, value), least);

export const count = (value) => (known(value) ? Math.round(value).toLocaleString("en-US") : NONE);
export const decimal = (value, digits) => (known(value) ? value.toFixed(digits) : NONE);
export const percent = (value) => (known(value) ? `${(value * 100).toFixed(0)} %` : NONE);

export function bytes(value) {
  if (!known(value)) return NONE;
  if (value < 1e3) return `${value.toFixed(0)} B`;
  return value < 1e6 ? `${(value / 1e3).toFixed(1)} kB` : `${(value / 1e6).toFixed(1)} MB`;
}

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
