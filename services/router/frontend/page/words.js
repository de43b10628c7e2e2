// Numbers as people read them; the same units as `tandem generate --receipt`.

const digits = (value) => value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2);

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1) return `${digits(value)} s`;
  if (size >= 1e-3) return `${digits(value * 1e3)} ms`;
  return `${(value * 1e6).toFixed(0)} µs`;
}

export function bytes(count) {
  let value = count;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return unit === "B" ? `${value.toFixed(0)} B` : `${digits(value)} ${unit}`;
    value /= 1024;
  }
  return `${digits(value)} TiB`;
}

export function rate(perSecond) {
  if (!perSecond) return "0 B/s";
  if (perSecond >= 1e8) return `${digits(perSecond / 1e9)} GB/s`;
  if (perSecond >= 1e5) return `${digits(perSecond / 1e6)} MB/s`;
  return `${digits(perSecond / 1e3)} kB/s`;
}

export function number(value) {
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return value >= 1000 ? Math.round(value).toLocaleString("en") : digits(value);
}

export const share = (part, whole) => (whole ? `${Math.floor((100 * part) / whole)} %` : "–");

export const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;

export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString("en-GB");

export const PHASES = {
  tokenize: "text to tokens",
  queue: "no decode worker had room",
  first_answer: "the prompt's KV, of the first answer",
  retries: "attempts that failed before",
  dispatch: "router to decode worker and back",
  reserve: "blocks on the decode worker",
  handoff: "decode worker to prefill worker and back",
  prefill_queue: "other prompts came first",
  prefill_compute: "the prompt itself",
  deliver: "out of the router",
};
