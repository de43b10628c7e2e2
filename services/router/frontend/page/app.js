// The page: one stream of snapshots, two actions. The key goes into a header, never into an address or a cookie.

import { bars, dots, flow, h, spark, tell } from "./draw.js";
import { take } from "./history.js";
import { PHASES, bytes, clock, count, number, rate, seconds, share } from "./words.js";

const at = (id) => document.getElementById(id);
const ROLES = ["prefill", "decode", "router"];
const poolOf = (worker) => worker.model ? `${worker.model}/${worker.role}` : worker.role;  // as operators name it
const roleOf = (pool) => pool.slice(pool.lastIndexOf("/") + 1);
const SILENT_MS = 8000; // a router that says nothing for so long is taken for gone
const AGAIN_MS = [500, 1000, 2000, 5000];

let key = sessionStorage.getItem("tandem-key") ?? "";
let receipts = [], chosen = null, state = null;

// ---- the router

function ask(path, options = {}) {
  const headers = { "x-tandem-dashboard": "1", ...(key && { authorization: `Bearer ${key}` }) };
  return fetch(path, { cache: "no-store", credentials: "omit", ...options, headers });
}

async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the router answered ${response.status}`;
  }
}

async function follow() {
  for (let failures = 0; ; failures += 1) {
    const gone = new AbortController();
    let timer = setTimeout(() => gone.abort(), SILENT_MS);
    try {
      const response = await ask("dashboard/events", { signal: gone.signal });
      if (response.status === 401 || response.status === 403) return askForKey(response.status, await refusal(response));
      if (!response.ok) throw new Error(await refusal(response));
      for await (const [name, data] of events(response.body)) {
        clearTimeout(timer);
        timer = setTimeout(() => gone.abort(), SILENT_MS);
        failures = -1;
        show(name, data);
      }
      live("wait", "connecting");
    } catch (error) {
      live("lost", gone.signal.aborted ? "the router is silent" : String(error.message ?? error));
    } finally {
      clearTimeout(timer);
    }
    await new Promise((done) => setTimeout(done, AGAIN_MS[Math.max(0, Math.min(failures, AGAIN_MS.length - 1))]));
  }
}

async function* events(body) {
  let text = "";
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
      const [name, data] = text.slice(0, end).split("\n");
      text = text.slice(end + 2);
      yield [name.replace("event: ", ""), JSON.parse(data.replace("data: ", ""))];
    }
  }
}

function askForKey(status, why) {
  const useless = status === 403 && !key; // no key helps: the cluster has none, and we are not at its machine
  tell(at("ask-title"), useless ? "Not open from here" : "This cluster requires a key");
  tell(at("why"), key && status === 401 ? "The key that you entered is unknown." : key || useless ? why : "");
  at("enter").hidden = useless;
  key = "";
  sessionStorage.removeItem("tandem-key");
  at("main").hidden = at("forget").hidden = true;
  at("ask").hidden = false;
  live("lost", "not open");
  at("key").focus();
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value.trim();
  sessionStorage.setItem("tandem-key", key);
  at("key").value = "";
  at("ask").hidden = true;
  follow();
});

at("forget").addEventListener("click", () => {
  sessionStorage.removeItem("tandem-key");
  location.reload();
});

// ---- what it says

function live(kind, text) {
  at("live").dataset.state = kind;
  tell(at("live"), text);
}

function show(name, data) {
  if (name === "receipts") return showReceipts(data);
  if (name === "failures") return showFailures(data);
  if (name === "history") return take(data, at("history"), at("history-about"));
  state = data;
  at("main").hidden = false;
  at("forget").hidden = !key;
  live("live", `live from ${data.router}`);
  tell(at("model"), data.model);
  document.title = data.queued ? `(${data.queued} queued) Tandem` : "Tandem";
  warn(data);
  draw();
}

function warn(data) {
  const missing = Object.entries(data.wanted).flatMap(([pool, size]) => {
    const there = data.workers.filter((one) => poolOf(one) === pool && one.state === "ready").length;
    return there < size ? [`${there} of ${size} ${pool} workers are ready`] : [];
  });
  const said = [...(data.registry_ok ? [] : ["the registry does not answer: workers are as they were last seen"]), ...missing];
  at("warning").hidden = !said.length;
  tell(at("warning"), said.join("; "));
}

function draw() {
  const data = state, pool = (role) => data.workers.filter((one) => one.role === role);
  const window = Math.round(data.window), span = window >= 60 ? "the last minute" : `the last ${window} s`;
  for (const place of document.querySelectorAll(".window")) tell(place, `rate while KV moved, ${span}`);
  now(data, span);
  flow(at("flow"), pool("prefill"), pool("decode"), data.links, data.window);
  const judged = Object.values(data.goals).some((goal) => goal.ttft !== null || goal.tpot !== null);
  figures(at("goodput-figures"), judged
    ? [["met", share(data.met, data.ended)], ["good", `${number(data.met / data.window)} /s`],
      ["missed", number(data.ended - data.met)], ["of", count(data.ended, "answer")]]
    : [["ended", `${number(data.ended / data.window)} /s`], ["objective", "none set"]]);
  bars(at("goodput"), data.seconds.map(([ended, met]) => [ended, met]), judged,
    judged ? `${data.met} of ${data.ended} answers met the objectives in ${span}` : `${data.ended} answers in ${span}`);
  for (const [name, place] of [["ttft", 1], ["tpot", 2]]) {
    const goals = [...new Set(Object.values(data.goals).map((goal) => goal[name]))]; // models may differ
    const goal = goals.length === 1 ? goals[0] : null, found = data[name];
    figures(at(`${name}-figures`), [
      ...["p50", "p95", "p99"].map((one) => [one, seconds(found[one]), goal && found[one] > goal]),
      ["objective", goal ? seconds(goal) : goals.length > 1 ? "differs by model" : "none set"]]);
    const points = data.points.filter((point) => point[place] !== null).map((point) => [point[0], point[place]]);
    dots(at(name), points, goal, `${name}: median ${seconds(found.p50)}, 99th percentile ${seconds(found.p99)}`);
  }
  const models = [...new Set([...data.workers.map(poolOf), ...Object.keys(data.wanted)].map((name) => name.slice(0, -roleOf(name).length)))];
  for (const role of ROLES) {
    for (const model of models.filter((one) => (one === "") === (role === "router" || models.every((other) => other === "")))) {
      drawPool(model + role, data.workers.filter((one) => poolOf(one) === model + role));
    }
  }
}

const tiles = new Map();
function now(data, span) {
  const routers = data.workers.filter((one) => one.role === "router");
  const all = (name) => (routers.length > 1 ? routers.reduce((sum, one) => sum + one[name], 0) : data[name === "waiting" ? "queued" : name]);
  const whose = routers.length > 1 ? `, all ${routers.length} routers` : "", mine = routers.length > 1 ? ` of ${data.router}` : "";
  const of = (place) => data.seconds.map((second) => second[place]);
  const sums = (place) => of(place).reduce((a, b) => a + b, 0);
  const ends = data.outcomes;
  for (const [name, value, beside, line] of [
    ["running", number(all("running")), `requests in progress${whose}`, null],
    ["queued", number(all("waiting")), `answers that wait for a place${whose}`, null],
    ["answers", `${number(data.ended / data.window)} /s`, `${number(data.ended)} in ${span}${mine}`, of(0)],
    ["tokens", `${number(data.tokens / data.window)} /s`, `of answers that ended${mine}`, of(2)],
    ["KV moved", rate(sums(3) / data.window), `${bytes(sums(3))} in ${span}${mine}`, of(3)],
    [`since the start${mine}`, `${number(ends.ok ?? 0)} ok`,
      `${number(ends.refused ?? 0)} refused, ${number(ends.failed ?? 0)} failed, ${number(ends.cancelled ?? 0)} cancelled`, null],
  ]) {
    if (!tiles.has(name)) {
      const parts = { value: h("strong"), beside: h("span", { class: "quiet" }), line: h("div") };
      tiles.set(name, parts);
      at("now").append(h("div", { class: "tile" }, h("h3", {}, name), parts.value, parts.beside, parts.line));
    }
    const parts = tiles.get(name);
    tell(parts.value, value);
    tell(parts.beside, beside);
    if (line) parts.line.replaceChildren(spark(line, `${name} of each second in the last minute`));
  }
}

function figures(place, items) {
  const made = items.map(([name, value, bad]) =>
    h("div", { class: bad ? "bad" : "" }, h("span", { class: "quiet" }, name), h("b", {}, value)));
  place.replaceChildren(...made);
}

// ---- pools

const ENDS = ["ok", "refused", "failed"];
const pools = new Map();
function drawPool(name, workers) {
  if (!pools.has(name)) pools.set(name, makePool(name));
  const pool = pools.get(name), wanted = state.wanted[name], role = roleOf(name);
  const ready = workers.filter((one) => one.state === "ready").length;
  tell(pool.about, wanted === undefined ? `${ready} ready` : `${ready} ready of ${wanted} wanted`);
  pool.scale.hidden = wanted === undefined || role === "router";
  pool.fewer.disabled = wanted <= (name === "decode" ? 1 : 0);  // one of several models may go to zero
  for (const [id, row] of pool.rows) {
    if (workers.some((one) => one.worker_id === id)) continue;
    row.element.remove();
    pool.rows.delete(id);
  }
  for (const worker of workers) {
    if (!pool.rows.has(worker.worker_id)) {
      const row = makeRow(worker);
      pool.rows.set(worker.worker_id, row);
      const after = [...pool.rows].filter(([id]) => id > worker.worker_id).map(([, one]) => one.element)[0];
      pool.list.insertBefore(row.element, after ?? null);
    }
    fillRow(pool.rows.get(worker.worker_id), worker);
  }
  pool.none.hidden = workers.length > 0;
  const verdict = state.autoscale?.pools.find((one) => one.role === name);
  pool.why.hidden = !verdict;
  if (!verdict) return;
  const size = verdict.wanted === verdict.size ? `stays ${verdict.size}` : `${verdict.size} to ${verdict.wanted}`;
  tell(pool.why, `autoscaler${state.autoscale.mode === "dry-run" ? " (dry run)" : ""}: ${size}: ${verdict.why}`);
}

function makePool(name) {
  const role = roleOf(name), model = name.slice(0, -role.length);
  const fewer = h("button", { type: "button", "aria-label": `one ${name} worker fewer`, onclick: () => scale(name, -1) }, "−");
  const more = h("button", { type: "button", "aria-label": `one ${name} worker more`, onclick: () => scale(name, 1) }, "+");
  const parts = { fewer, about: h("p", { class: "quiet" }), list: h("ul", { class: "workers" }), rows: new Map(),
    scale: h("div", { class: "row", hidden: "" }, fewer, more), none: h("p", { class: "quiet" }, "nobody"),
    why: h("p", { class: "why", hidden: "" }) };
  at("pools").append(h("section", { class: `card pool ${role}`, "aria-label": `${name} pool` },
    h("div", { class: "title" }, h("h2", {}, role === "router" ? "Routers" : `${model ? name : role[0].toUpperCase() + role.slice(1)} pool`),
      parts.about, parts.scale), parts.why, parts.list, parts.none));
  return parts;
}

function makeRow(worker) {
  const id = worker.worker_id, isRouter = worker.role === "router";
  const row = { state: h("span", { class: "state" }), work: h("span"), beat: h("span", { class: "quiet" }),
    ends: isRouter ? h("span", { class: "ends" }) : null, kv: h("span", { class: "quiet" }), bar: isRouter ? null : h("progress", { max: 1, "aria-label": `KV use of ${id}` }),
    drain: isRouter ? null : h("button", { type: "button", "aria-label": `drain ${id}`, onclick: () => drain(id) }, "Drain") };
  row.element = h("li", {}, h("div", { class: "who" }, h("b", {}, id), row.state), h("div", { class: "work" }, row.work, row.beat),
    row.ends ?? h("div", { class: "kv" }, row.bar, row.kv), row.drain);
  return row;
}

function fillRow(row, worker) {
  row.state.dataset.state = worker.state;
  tell(row.state, worker.state);
  tell(row.work, `${worker.running} running, ${worker.waiting} waiting`);
  const ends = state.routers[worker.worker_id];
  if (row.ends) tell(row.ends, ends ? ENDS.map((name) => `${number(ends[name])} ${name}`).join(", ") + " a second" : "");
  tell(row.beat, worker.heartbeat_age < 1.5 ? worker.address : `last heard of ${seconds(worker.heartbeat_age)} ago`);
  if (!row.bar) return;
  row.bar.value = worker.blocks_total ? worker.blocks_held / worker.blocks_total : 0;
  tell(row.kv, `KV ${number(worker.blocks_held)} of ${number(worker.blocks_total)} blocks`);
  row.drain.disabled = worker.state !== "ready";
}

// ---- actions

function sure(question, meaning, yes) {
  const dialog = at("sure");
  tell(at("question"), question);
  tell(at("meaning"), meaning);
  tell(at("yes"), yes);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue === "yes"), { once: true }));
}

let quiet = 0;
function say(text, bad = false) {
  clearTimeout(quiet);
  at("said").hidden = false;
  at("said").dataset.bad = bad;
  tell(at("said"), text);
  quiet = setTimeout(() => { at("said").hidden = true; }, 8000);
}

async function act(path, done) {
  try {
    const response = await ask(path, { method: "POST" });
    if (!response.ok) return say(await refusal(response), true);
    return say(done(await response.json()));
  } catch (error) {
    return say(`the outcome is unknown: ${error.message}`, true);
  }
}

async function scale(pool, by) {
  const size = state.wanted[pool] + by;
  const meaning = by < 0 ? "The worker with the highest number is drained." : "The new worker is ready when it has loaded the model.";
  if (await sure(`Scale ${pool} to ${size}?`, meaning, `Scale to ${size}`)) {
    await act(`dashboard/pools/${pool}?size=${size}`, (answer) => `${count(answer.wanted[pool], `${pool} worker`)} wanted`);
  }
}

async function drain(id) {
  const meaning = "It accepts no new requests, may finish its requests for 30 s, and ends; the rest continue elsewhere. The supervisor starts it again.";
  if (await sure(`Drain ${id}?`, meaning, "Drain")) {
    say(`${id} drains`);
    await act(`dashboard/workers/${encodeURIComponent(id)}/drain?grace=30`, (answer) =>
      `${id} is drained: ${count(answer.finished, "request")} finished, ${answer.cut} went on elsewhere`);
  }
}

// ---- requests

// A link that names nobody to the other site; null without the setting trace_url, or without a trace.
function trace(id) {
  if (!state?.trace_url || !/^[0-9a-f]{32}$/.test(id ?? "")) return null;
  return h("a", { href: state.trace_url.replace("{trace_id}", id), target: "_blank", rel: "noopener noreferrer" }, "trace");
}

function showFailures(items) {
  tell(at("failures-about"), items.length ? `the latest ${items.length}, of all routers` : "");
  if (!items.length) return at("failures").replaceChildren(h("caption", { class: "quiet" }, "None has failed or been refused."));
  const head = h("tr", {}, ...["when", "", "reason", "tenant", "request", "after", "tokens", "router", ""].map((name) => h("th", { scope: "col" }, name)));
  at("failures").replaceChildren(h("thead", {}, head), h("tbody", {}, ...items.map((one) => h("tr", { class: one.outcome },
    h("td", {}, clock(one.at)), h("td", { class: "outcome" }, one.outcome), h("td", {}, one.reason), h("td", {}, one.tenant || "–"),
    h("td", { class: "id" }, one.request_id || "–"), h("td", {}, seconds(one.seconds)), h("td", {}, number(one.tokens)),
    h("td", {}, one.router), h("td", {}, trace(one.trace_id))))));
  return undefined;
}

const nameOf = (item) => `${item.request_id}/${item.choice}/${item.ended_at}`;

function showReceipts(items) {
  if (at("hold").checked && receipts.length) return;
  receipts = items;
  const list = at("list"), there = new Map([...list.children].map((row) => [row.dataset.name, row]));
  const rows = items.map((item) => there.get(nameOf(item)) ?? makeItem(item));
  const names = new Set(items.map(nameOf));
  for (const [name, row] of there) if (!names.has(name)) row.remove();
  rows.forEach((row, place) => {
    row.id = `request-${place}`;
    if (list.children[place] !== row) list.insertBefore(row, list.children[place] ?? null);
  });
  if (!chosen && items.length) choose(items[0]);
  else mark();
}

function makeItem(item) {
  const goal = state && state.goals[item.model];
  const missed = goal && ((goal.ttft !== null && item.ttft > goal.ttft) || (goal.tpot !== null && item.tpot > goal.tpot));
  const trouble = item.attempts > 1 ? h("span", { class: "flag" }, count(item.attempts, "attempt")) : null;
  const row = h("li", { role: "option", class: missed ? "missed" : "" },
    h("span", { class: "when quiet" }, clock(item.ended_at)),
    h("span", { class: "id" }, item.choices > 1 ? `${item.request_id} (${item.choice + 1} of ${item.choices})` : item.request_id),
    h("span", { class: "numbers" }, `${seconds(item.ttft)} + ${item.completion_tokens} × ${seconds(item.tpot)}`), trouble);
  row.dataset.name = nameOf(item);
  row.addEventListener("click", () => choose(item));
  return row;
}

function choose(item) {
  chosen = item;
  mark();
  drawReceipt(item);
}

function mark() {
  const list = at("list");
  list.removeAttribute("aria-activedescendant");
  for (const row of list.children) {
    const is = chosen !== null && row.dataset.name === nameOf(chosen);
    row.setAttribute("aria-selected", is);
    if (is) list.setAttribute("aria-activedescendant", row.id);
  }
}

at("list").addEventListener("keydown", (event) => {
  const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: 8, PageUp: -8, Home: -1e6, End: 1e6 };
  if (!(event.key in steps) || !receipts.length) return;
  event.preventDefault();
  at("hold").checked = true; // or the list would move under the reader
  const from = chosen ? receipts.findIndex((item) => nameOf(item) === nameOf(chosen)) : -1;
  choose(receipts[Math.max(0, Math.min(receipts.length - 1, from + steps[event.key]))]);
  document.querySelector("#list [aria-selected=true]")?.scrollIntoView({ block: "nearest" });
});

function drawReceipt(item) {
  const local = item.path === "local" || !item.prefill_worker;
  const where = local ? `${item.decode_worker}, prefilled there` : `${item.prefill_worker} → ${item.decode_worker}`;
  const moved = item.transfer && item.transfer.bytes
    ? `${bytes(item.transfer.bytes)} over ${item.transfer.transport} in ${seconds(item.transfer.seconds)}`
      + (item.transfer.seconds ? ` (${rate(item.transfer.bytes / item.transfer.seconds)})` : "")
      + `, ${seconds(item.transfer.exposed)} not hidden by compute` : "nothing was moved";
  const facts = [["path", where], ["tokens", `${item.prompt_tokens} prompt (${item.cached_tokens} cached), ${item.completion_tokens} completion`],
    ["transfer", moved], ...(item.adapter ? [["adapter", item.adapter]] : []),
    ["total", `${seconds(item.total)}, ${seconds(item.tpot)} a token after the first`],
    ...(item.drafted ? [["speculation", `${item.accepted} of ${item.drafted} drafts right`]] : []),
    ...(item.attempts > 1 || item.preemptions
      ? [["trouble", `${count(item.attempts, "attempt")}, ${count(item.preemptions, "preemption")}`]] : [])];
  const traced = trace(item.trace_id);
  if (traced) facts.push(["spans", traced]);
  const guess = item.estimate ? { prefill_queue: item.estimate.wait, prefill_compute: item.estimate.compute } : {};
  let begun = 0;
  const rows = Object.entries(item.phases).map(([name, took]) => {
    const row = bar(name.replace("_", " "), PHASES[name] ?? "", begun, took, item.ttft, guess[name]);
    begun += took;
    return row;
  });
  const rest = Math.max(0, item.total - item.ttft);
  at("receipt").replaceChildren(
    h("h3", {}, h("span", { class: "id" }, item.request_id)),
    h("dl", {}, ...facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    h("h4", {}, `To the first token: ${seconds(item.ttft)}`),
    h("div", { class: "waterfall", role: "list" }, ...rows),
    h("h4", {}, `The whole request: ${seconds(item.total)}`),
    h("div", { class: "waterfall", role: "list" },
      bar("first token", "the phases above", 0, item.ttft, item.total),
      bar("tokens", `${Math.max(0, item.completion_tokens - 1)} after the first`, item.ttft, rest, item.total)),
    ...(Object.keys(guess).length ? [h("p", { class: "quiet" }, "An outline is what the router expected when it placed the request.")] : []),
    ...item.notes.map((note) => h("p", { class: "note" }, note)));
}

function bar(name, about, start, took, whole, guess) {
  const percent = (value) => `${Math.max(0, Math.min(100, whole > 0 ? (100 * value) / whole : 0))}%`;
  const fill = h("i", { class: `phase ${name.replace(" ", "-")}` });
  fill.style.left = `min(${percent(start)}, 100% - 2px)`;
  fill.style.width = `max(2px, ${percent(took)})`;
  const expected = guess ? h("i", { class: "expected", title: `expected ${seconds(guess)}` }) : null;
  if (expected) {
    expected.style.left = percent(start);
    expected.style.width = `min(${percent(guess)}, 100% - ${percent(start)})`;
  }
  return h("div", { role: "listitem" }, h("span", { title: about }, name), h("span", { class: "track" }, fill, expected),
    h("span", { class: "numbers" }, seconds(took)), h("span", { class: "quiet about" }, about));
}

let resized = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(resized);
  resized = requestAnimationFrame(() => state && draw());
});
follow();
