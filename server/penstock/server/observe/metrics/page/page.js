// The status page: fetches and displays /status.json every second. Values from clients are set as
// text, never as markup.

import { Chart } from "/charts.js";

const PERIOD_MS = 1000;
const TIMEOUT_MS = 7000;
const NOTHING = "–";

const byId = (id) => document.getElementById(id);
const models = new Map();
let lastSeen = null;

const whole = (value) => (value === null ? NOTHING : Math.round(value).toLocaleString("en"));

function seconds(value) {
  if (value === null || value === undefined) return NOTHING;
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 0.1) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 1) return `${(value * 1e3).toFixed(0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

const words = (reason) => reason.toLowerCase().replaceAll("_", " ");

class ModelView {
  constructor() {
    this.element = byId("model").content.firstElementChild.cloneNode(true);
    this.charts = {
      requests: new Chart("Requests", ["running", "waiting"], whole),
      rates: new Chart("Tokens per second", ["generated", "prefilled"], whole),
      ttft: new Chart("Time to first token", ["p50", "p90", "p99"], seconds),
      itl: new Chart("Between tokens", ["p50", "p90", "p99"], seconds),
      step: new Chart("Step", ["mean"], seconds),
      kv: new Chart("KV cache in use", ["used"], (share) => `${whole(share)} %`, 100),
    };
    const charts = this.element.querySelector(".charts");
    for (const chart of Object.values(this.charts)) charts.append(chart.element);
  }

  part(name) {
    return this.element.querySelector(`[data-value="${name}"]`);
  }

  set(name, text) {
    this.part(name).textContent = text;
  }

  show(model, time_s) {
    this.set("model", model.model);
    this.set("state", model.is_up ? "engine up" : "engine down");
    this.part("state").className = `pill ${model.is_up ? "good" : "bad"}`;
    this.set("running", whole(model.num_processing));
    this.set("slots", model.max_num_seqs ? `of ${whole(model.max_num_seqs)}` : "");
    this.set("waiting", whole(model.num_pending));
    this.set("waits-for", model.num_pending && model.waits_for ? `for ${words(model.waits_for)}` : "");
    this.set("decode-rate", whole(model.decode_tokens_per_s));
    this.set("prefill-rate", whole(model.prefill_tokens_per_s));
    this.set("step", seconds(model.mean_step_s));
    this.set("estimate", seconds(model.estimated_queue_s));
    this.showCache(model.cache);
    this.showLatencies(model);
    this.showTotals(model);
    const curve = (percentiles) => [percentiles.p50_s, percentiles.p90_s, percentiles.p99_s];
    const total = model.cache.num_total_blocks;
    const { charts } = this;
    charts.requests.add(time_s, [model.num_processing, model.num_pending]);
    charts.rates.add(time_s, [model.decode_tokens_per_s, model.prefill_tokens_per_s]);
    charts.ttft.add(time_s, curve(model.ttft));
    charts.itl.add(time_s, curve(model.itl));
    charts.step.add(time_s, [model.mean_step_s]);
    charts.kv.add(time_s, [total ? (100 * model.cache.num_used_blocks) / total : null]);
  }

  showCache(cache) {
    const total = cache.num_total_blocks;
    const shares = { used: cache.num_used_blocks, cached: cache.num_cached_blocks, free: cache.num_free_blocks };
    const bar = this.part("kv-bar");
    const labels = [];
    for (const [state, num] of Object.entries(shares)) {
      const share = total ? (100 * num) / total : 0;
      bar.querySelector(`.${state}`).style.width = `${share}%`;
      this.set(`kv-${state}`, `${whole(num)} (${share.toFixed(share < 10 ? 1 : 0)} %)`);
      labels.push(`${state} ${share.toFixed(0)} percent`);
    }
    bar.setAttribute("aria-label", `KV cache: ${labels.join(", ")}`);
    this.set("kv-text", `${whole(total)} blocks of ${cache.block_size_tokens} tokens`);
  }

  showLatencies(model) {
    const rows = [
      ["First token", model.ttft], ["Between tokens", model.itl],
      ["In the queue", model.queue], ["Total", model.total],
    ].map(([name, percentiles]) => {
      const row = document.createElement("tr");
      const head = document.createElement("th");
      head.scope = "row";
      head.textContent = name;
      const { p50_s, p90_s, p99_s, num } = percentiles;
      row.append(head, ...[p50_s, p90_s, p99_s].map((value) => cell(seconds(value), "number")));
      row.append(cell(whole(num), "number"));
      return row;
    });
    this.element.querySelector(".percentiles tbody").replaceChildren(...rows);
  }

  showTotals(model) {
    const prompt = model.num_prompt_tokens;
    const hits = prompt ? ` (${((100 * model.num_cached_prompt_tokens) / prompt).toFixed(0)} % cached)` : "";
    const totals = [
      ["Completed", whole(model.num_completed)], ["Cancelled", whole(model.num_cancelled)],
      ["Failed", whole(model.num_failed)], ["Rejected", whole(model.num_rejected)],
      ["Preemptions", whole(model.num_preemptions)], ["Steps", whole(model.num_steps)],
      ["Prompt tokens", whole(prompt) + hits], ["Generated tokens", whole(model.num_completion_tokens)],
      ["Engine restarts", whole(model.num_engine_restarts)],
    ].map(([name, value]) => {
      const entry = document.createElement("div");
      const term = document.createElement("dt");
      const description = document.createElement("dd");
      term.textContent = name;
      description.textContent = value;
      entry.append(term, description);
      return entry;
    });
    this.element.querySelector(".totals").replaceChildren(...totals);
  }
}

function cell(text, className = "") {
  const made = document.createElement("td");
  made.textContent = text;
  made.className = className;
  return made;
}

function requestRow(request) {
  const row = document.createElement("tr");
  const id = cell(request.request_id, "id");
  id.title = request.request_id;
  const place = request.queue_position === null ? "" : ` (${request.queue_position} ahead)`;
  const trace = cell(request.trace_id ? request.trace_id.slice(0, 8) : "", "trace");
  trace.title = request.trace_id;
  row.append(
    id,
    cell(request.state, request.state === "PENDING" ? "state-PENDING" : "state-PROCESSING"),
    cell(request.phase),
    cell(request.waits_for ? words(request.waits_for) + place : place.trim()),
    cell(request.tenant),
    cell(String(request.priority), "number"),
    cell(seconds(request.age_s), "number"),
    cell(whole(request.num_prompt_tokens), "number"),
    cell(whole(request.num_cached_tokens), "number"),
    cell(whole(request.num_output_tokens), "number"),
    cell(whole(request.num_blocks), "number"),
    cell(whole(request.num_preemptions), "number"),
    trace,
  );
  return row;
}

function showRequests(status) {
  const { requests, num_requests: num, requests_problem: problem } = status;
  const count = num > requests.length ? `${whole(num)}, the oldest ${requests.length} shown` : whole(num);
  byId("num-requests").textContent = problem ? "" : count;
  byId("requests-problem").hidden = !problem;
  byId("requests-problem").textContent = problem ? `Unknown: ${problem}` : "";
  byId("requests").tBodies[0].replaceChildren(...requests.map(requestRow));
  byId("requests").hidden = requests.length === 0;
  byId("no-requests").hidden = requests.length > 0 || Boolean(problem);
}

function show(status) {
  byId("uptime").textContent = `up ${seconds(status.uptime_s)}`;
  const num = status.fronts.length;
  const streams = status.fronts.reduce((sum, front) => sum + front.num_streams, 0);
  byId("fronts").textContent = `${num} front${num === 1 ? "" : "s"}, ${whole(streams)} open call${streams === 1 ? "" : "s"}`;
  byId("draining").hidden = !status.is_draining;
  const present = new Set(status.models.map((model) => model.model));
  for (const [name, view] of models) {
    if (!present.has(name)) {
      view.element.remove();
      models.delete(name);
    }
  }
  for (const model of status.models) {
    if (!models.has(model.model)) {
      const view = new ModelView();
      models.set(model.model, view);
      byId("models").append(view.element);
    }
    models.get(model.model).show(model, status.time_s);
  }
  showRequests(status);
  const [first] = status.models;
  document.title = first ? `${first.num_processing} running, ${first.num_pending} waiting · Penstock` : "Penstock";
}

function setConnection(state, text) {
  document.body.dataset.connection = state;
  // Only changes, because screen readers announce each assignment.
  if (byId("connection").textContent !== text) byId("connection").textContent = text;
}

async function refresh() {
  try {
    const answer = await fetch("/status.json", { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    show(await answer.json());
    lastSeen = new Date();
    setConnection("live", "live");
    byId("lost").hidden = true;
  } catch (error) {
    console.warn("no status:", error);
    setConnection("lost", "connection lost");
    const since = lastSeen ? `The figures were received at ${lastSeen.toLocaleTimeString()}.` : "";
    const text = `The service does not respond. ${since} Trying again every second.`;
    if (byId("lost").textContent !== text) byId("lost").textContent = text;
    byId("lost").hidden = false;
  } finally {
    setTimeout(refresh, PERIOD_MS);
  }
}

refresh();
