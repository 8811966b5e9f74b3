// Reads /metrics and /requests every two seconds and shows them in tables.

const PERIOD_MS = 2000, SHOWN = 50;
let key = sessionStorage.getItem("key") ?? "";
const at = (id) => document.getElementById(id);

/** Samples of Prometheus's text format: [{name, labels, value}]. */
export function parse(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const found = /^(\w+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g))
      labels[name] = value.replace(/\\(.)/g, (_, each) => (each === "n" ? "\n" : each));
    samples.push({ name: found[1].replace(/^jaxllm_/, ""), labels, value: Number(found[3]) });
  }
  return samples;
}

/** The sum of a metric's samples whose labels have these values; null where there is none. */
function sum(samples, name, wanted = {}) {
  const found = samples.filter((each) =>
    each.name === name && Object.entries(wanted).every(([label, value]) => each.labels[label] === value));
  return found.length ? found.reduce((total, each) => total + each.value, 0) : null;
}

const values = (samples, name, label) =>
  [...new Set(samples.filter((each) => each.name === name).map((each) => each.labels[label]))].sort();
const count = (value) => (value === null ? "–" : Math.round(value).toLocaleString("en"));
const bytes = (value) => (value === null ? "–" : `${(value / 2 ** 20).toFixed(value < 2 ** 30 ? 1 : 0)} MiB`);
const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");
const mean = (samples, name, wanted) => {
  const number = sum(samples, `${name}_count`, wanted);
  return number ? `${Math.round((1000 * sum(samples, `${name}_sum`, wanted)) / number)} ms` : "–";
};

function fill(id, heads, rows) {
  const row = (cells, kind) => {
    const made = document.createElement("tr");
    for (const text of cells) made.append(Object.assign(document.createElement(kind), { textContent: text }));
    return made;
  };
  at(id).replaceChildren(row(heads, "th"), ...rows.map((cells) => row(cells, "td")));
}

function show(samples) {
  const met = sum(samples, "objectives_total", { met: "true" }) ?? 0;
  fill("now", ["", ""], [
    ["Objectives met", percent(met, met + (sum(samples, "objectives_total", { met: "false" }) ?? 0))],
    ["Answers that run", count(sum(samples, "running_calls"))],
    ["Calls that wait", `${count(sum(samples, "queue_calls"))} of ${count(sum(samples, "queue_limit_calls"))}`],
    ["Tokens of answers", count(sum(samples, "answer_tokens_total"))],
    ["Drafted", percent(sum(samples, "drafted_tokens_total"), sum(samples, "answer_tokens_total"))],
    ["Memory", `${bytes(sum(samples, "memory_bytes"))} of ${bytes(sum(samples, "memory_limit_bytes") || null)}`],
  ]);
  fill("apps", ["App", "Accepted", "Refused", "Failed", "Met", "TTFT", "TPOT", "Contexts"],
    values(samples, "calls_accepted_total", "app").map((app) => {
      const hit = sum(samples, "objectives_total", { app, met: "true" }) ?? 0;
      return [
        app, count(sum(samples, "calls_accepted_total", { app })), count(sum(samples, "calls_refused_total", { app })),
        count(sum(samples, "calls_failed_total", { app })), percent(hit, sum(samples, "objectives_total", { app })),
        mean(samples, "ttft_seconds", { app }), mean(samples, "tpot_seconds", { app }),
        count(sum(samples, "contexts", { app })),
      ];
    }));
  fill("memory", ["Kind", "Size", "Limit"], values(samples, "holding_size_bytes", "holding").map((holding) =>
    [holding, bytes(sum(samples, "holding_size_bytes", { holding })), bytes(sum(samples, "holding_limit_bytes", { holding }))]));
  fill("plans", ["Level", "Plans"], values(samples, "plans_total", "level").map((level) =>
    [`${level} %`, count(sum(samples, "plans_total", { level }))]));
  fill("refusals", ["App", "Status", "Code", "Field", "Requests"], samples
    .filter((each) => each.name === "requests_refused_total").sort((a, b) => b.value - a.value)
    .map(({ labels, value }) => [labels.app || "unknown", labels.status, labels.code, labels.field, count(value)]));
}

/** Rows of the last requests, newest first. */
export const rows = (requests) => requests.slice(0, SHOWN).map((each) => [
  new Date(1000 * each.time_s).toLocaleTimeString(), each.app || "unknown", `${each.method} ${each.path}`,
  each.status, `${Math.round(each.total_ms).toLocaleString("en")} ms`, each.tokens ?? "",
  each.ttft_ms === undefined ? "" : `${Math.round(each.ttft_ms)} ms`,
  each.code === undefined ? each.outcome : [each.code, each.param, each.reason].filter(Boolean).join(": "),
]);

async function refresh() {
  try {
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const response = await fetch("/metrics", { headers, cache: "no-store" });
    at("key-form").hidden = response.status !== 401 && response.status !== 403;
    at("state").textContent = response.ok ? "Ready" : at("key-form").hidden ? `Status ${response.status}` : "Needs a key";
    if (response.ok) {
      show(parse(await response.text()));
      const listed = await (await fetch("/requests", { headers, cache: "no-store" })).json();
      fill("requests", ["Time", "App", "Request", "Status", "Took", "Tokens", "TTFT", "Outcome"], rows(listed.data));
    }
  } catch {
    at("state").textContent = "Not reachable";
  }
  setTimeout(refresh, PERIOD_MS);
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value.trim();
  sessionStorage.setItem("key", key);
});
refresh();
