// Draws the panels of the dashboard from a snapshot: tiles, memory, apps, levels, contexts, experts.

import { $, coloured, el, show, sized, sparkline, stack, strip } from "./draw.js";

const DASH = "–";
// A smaller share of objectives that are met is marked.
const GOOD = 0.8;
export const ms = (value) =>
  value === null || value === undefined ? DASH
    : value >= 10000 ? `${Math.round(value / 1000)} s` : value >= 1000 ? `${(value / 1000).toFixed(1)} s`
      : `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`;
const percent = (share) => (share === null ? DASH : `${Math.round(100 * share)} %`);
export const count = (value, one, many) => `${value.toLocaleString("en")} ${value === 1 ? one : many}`;

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) [value, at] = [value / 1024, at + 1];
  return `${value >= 1000 ? Math.round(value) : Number(value.toPrecision(3))} ${units[at]}`;
}

/** The place of a level in the scale of colours, by the levels that the model serves. */
export function levelColour(level, levels) {
  const at = levels.indexOf(level);
  if (at < 0 || levels.length < 2) return "level-2";
  return `level-${Math.round((at * 4) / (levels.length - 1))}`;
}

const sum = (values) => values.reduce((all, value) => all + value, 0);

export function tiles({ figures, history }, levels) {
  const { course } = history;
  const span = `last ${Math.round((course.met.length * history.span_s) / 60)} minutes`;
  const apps = Object.values(history.apps);
  const [met, missed] = [sum(apps.map((app) => app.met)), sum(apps.map((app) => app.missed))];
  $("tile-met").classList.toggle("late", met + missed > 0 && met < GOOD * (met + missed));
  figure("tile-met", met + missed ? Math.round((100 * met) / (met + missed)) : DASH, met + missed ? "%" : "");
  $("note-met").textContent = met + missed
    ? `of ${count(met + missed, "answer", "answers")} with an objective` : "no answers with an objective yet";
  show($("spark-met"), [course.met, course.missed], () => strip(course, 2, `Objectives met and missed, ${span}`));

  const rates = course.tokens_per_s;
  const minute = rates.slice(-7, -1);
  figure("tile-tokens", Math.round(sum(minute) / minute.length).toLocaleString("en"), "");
  $("note-tokens").textContent = `last minute; engine busy ${percent(sum(course.busy.slice(-7, -1)) / 6)}`;
  show($("spark-tokens"), rates, (values) =>
    sparkline(values, { most: Math.max(1, ...values), area: true, label: `Tokens per second, ${span}` }));

  const running = figures.running ?? [];
  figure("tile-running", sum(running.map((each) => each.count)), "");
  $("note-running").textContent = running.length
    ? [...new Set(running.map((each) => each.app))].join(", ") : "the engine is idle";
  show($("cells-running"), [running, levels], () => {
    const cells = [...running].sort((one, other) => other.level - one.level).flatMap((each) =>
      Array.from({ length: Math.min(each.count, 16) }, () =>
        coloured(el("i", { title: `${each.app} at ${each.level} %` }), levelColour(each.level, levels))));
    return cells.length ? cells : [el("i", { class: "idle" })];
  });

  const { waiting = 0, limit = 0, oldest_ms: oldest = 0 } = figures.queue ?? {};
  figure("tile-queue", waiting, limit ? `of ${limit}` : "");
  $("note-queue").textContent = waiting ? `the oldest for ${ms(oldest)}` : "nothing waits";
  show($("meter-queue"), [waiting, limit], () => {
    const full = el("b");
    full.style.width = `${limit ? Math.min(100, (100 * waiting) / limit) : 0}%`;
    return el("span", { role: "img", "aria-label": `${waiting} of ${limit} places taken` }, waiting ? full : null);
  });

  const batches = course.rows.slice(-6).filter((value) => value !== null);
  const rows = batches.length ? sum(batches) / batches.length : null;
  figure("tile-rows", rows === null ? DASH : rows.toFixed(1), "");
  $("note-rows").textContent = rows === null ? "nothing was decoded of late" : "mean of the last minute";
  show($("spark-rows"), course.rows, (values) =>
    sparkline(values, { least: 0, most: Math.max(2, ...values.map((each) => each ?? 0)), label: `Answers per dispatch, ${span}` }));
}

function figure(id, value, unit) {
  show($(id), [value, unit], () => [String(value), ...(unit ? [el("small", {}, ` ${unit}`)] : [])]);
}

const KINDS = {
  weights: "Weights", kv: "Running caches", contexts: "Contexts", prefixes: "Prefixes", drafts: "Drafts",
  layers: "Layers", experts: "Experts", adapters: "Adapters", other: "Runtime and the rest",
};

export function memory({ figures }) {
  const { process_bytes: taken = 0, limit_bytes: limit = 0, holdings = {}, pressure } = figures.memory ?? {};
  const parts = Object.entries(holdings).map(([name, each]) => ({
    name: KINDS[name] ?? name, colour: name in KINDS ? name : "other", value: each.size_bytes ?? 0,
    most: each.limit_bytes,
  }));
  const rest = taken - sum(parts.map((part) => part.value));
  if (rest > 0) parts.push({ name: KINDS.other, colour: "other", value: rest });
  $("memory-sum").textContent = taken ? (limit ? `${bytes(taken)} of ${bytes(limit)}` : bytes(taken)) : "";
  show($("memory-bar"), [parts, limit, taken], () => {
    if (!taken) return el("p", { class: "empty" }, "The service does not say what takes memory.");
    const title = (part) => `${part.name}: ${bytes(part.value)}`;
    const label = parts.map(title).join(", ");
    const whole = Math.max(limit, taken);
    const bar = stack(parts.map((part) => ({ ...part, title: title(part) })), whole, label);
    if (!limit) return [bar, el("p", { class: "faint scale" }, "no budget: --memory sets one")];
    const free = limit - taken;
    return [bar, el("p", { class: "faint scale number" }, el("span", {}, "0"),
      el("span", {}, free >= 0 ? `${bytes(free)} free` : `${bytes(-free)} over the budget`))];
  });
  show($("memory-parts"), parts, () => [...parts].sort((one, other) => other.value - one.value).map((part) =>
    el("li", {}, coloured(el("span", { class: "swatch" }), part.colour), part.name, el("span", {}, bytes(part.value)),
      el("span", { class: "faint" }, part.most === undefined ? "" : `of ${bytes(part.most)}`))));
  const read = figures.read_bytes?.weights;
  $("memory-note").textContent = [
    pressure > 0.01 && `This machine is short of memory: tasks wait for it ${percent(pressure)} of the time.`,
    read && `${bytes(read)} of weights were read from storage since the start.`,
  ].filter(Boolean).join(" ");
}

export function apps({ history }) {
  const rows = Object.entries(history.apps).sort(([, one], [, other]) => other.taken - one.taken);
  show($("apps"), rows, () => {
    if (!rows.length) {
      return el("p", { class: "empty" }, "No app has called yet. Point an OpenAI client at ",
        el("code", {}, `${location.origin}/v1`), ", or ask something below.");
    }
    const heads = ["App", "Objectives met", "TTFT", "TPOT", "Answers", "Failed or refused"];
    return el("table", {},
      el("thead", {}, el("tr", {}, heads.map((head, at) => el("th", { scope: "col", class: at === 1 && "met" }, head)))),
      el("tbody", {}, rows.map(([name, app]) => {
        const asked = app.met + app.missed;
        const share = asked ? app.met / asked : null;
        const lost = app.failed + app.refused;
        return el("tr", {},
          el("th", { scope: "row", title: name }, name),
          el("td", { class: "met" }, el("div", { class: "share" },
            el("b", { class: share !== null && share < GOOD && "late" }, percent(share)),
            asked ? strip(app.course, 3, `${name}: objectives met and missed over time`)
              : el("span", { class: "faint" }, "no objective"))),
          el("td", { "data-name": "TTFT" }, ms(app.ttft_ms)),
          el("td", { "data-name": "TPOT" }, ms(app.tpot_ms)),
          el("td", { "data-name": "Answers" }, app.ended.toLocaleString("en")),
          el("td", { "data-name": "Failed or refused", class: !lost && "zero" }, lost.toLocaleString("en")));
      })));
  });
}

const SOURCES = {
  whole: ["level-3", "whole"], proposed: ["level-1", "proposed"], fallback: ["drafts", "fallback"],
  nearest: ["late", "nearest"],
};

export function plans({ figures, history }, levels) {
  const made = sum(history.plans.map((plan) => plan.count));
  const known = [...new Set([...levels, ...history.plans.map((plan) => plan.level)])].sort((one, other) => other - one);
  const sources = Object.keys(SOURCES).filter((source) => history.plans.some((plan) => plan.source === source));
  show($("plans-key"), sources, () => sources.flatMap((source) =>
    [coloured(el("span", { class: "swatch" }), SOURCES[source][0]), SOURCES[source][1]]));
  const fed = sum(history.chunks.map((chunk) => chunk.count));
  $("chunks-note").textContent = fed ? `Prompts come in chunks of ${history.chunks
    .map((chunk) => `${chunk.tokens} tokens in ${chunk.mode} (${percent(chunk.count / fed)})`).join(", ")}.` : "";
  const running = new Map();
  for (const each of figures.running ?? []) running.set(each.level, (running.get(each.level) ?? 0) + each.count);
  show($("plans"), [history.plans, known, [...running]], () => {
    if (!made) return el("p", { class: "empty" }, "No plans yet. Each call shows here which share of the model answered it.");
    const order = Object.keys(SOURCES);
    const of = (level) => history.plans.filter((plan) => plan.level === level)
      .sort((one, other) => order.indexOf(one.source) - order.indexOf(other.source));
    const most = Math.max(...known.map((level) => sum(of(level).map((plan) => plan.count))));
    return known.map((level) => {
      const own = of(level), total = sum(own.map((plan) => plan.count)), now = running.get(level) ?? 0;
      const track = el("div", { class: "track", role: "img", "aria-label": own.map((plan) => `${plan.source} ${plan.count}`).join(", ") });
      for (const plan of own) {
        const piece = el("i", { title: `${plan.source}: ${plan.count.toLocaleString("en")}` });
        track.append(sized(coloured(piece, (SOURCES[plan.source] ?? ["other"])[0]), plan.count));
      }
      track.append(sized(el("i"), most - total));
      return el("div", { class: "level" }, el("b", {}, `${level} %`),
        el("div", {}, track, el("div", { class: "run" }, Array.from({ length: Math.min(now, 12) }, () => el("i")))),
        el("span", { class: "faint" }, now ? `${now} now · ${percent(total / made)}` : percent(total / made)));
    });
  });
}

const WIDTHS = [["raw", "raw"], ["8", "8 bits"], ["4", "4"], ["2", "2"]];

export function contexts({ figures }) {
  const own = Object.entries(figures.contexts ?? {}).sort(([, one], [, other]) => other.contexts - one.contexts);
  show($("contexts-key"), own.length > 0, (any) => (any ? ["chunks in memory", ...WIDTHS.flatMap(([width, name]) =>
    [coloured(el("span", { class: "swatch" }), `w-${width}`), name])] : []));
  show($("contexts"), own, () => {
    if (figures.contexts === undefined) {
      return el("p", { class: "empty" }, "This service keeps no contexts: ", el("code", {}, "--contexts DIR"), " has it keep some.");
    }
    if (!own.length) return el("p", { class: "empty" }, "No app has a context yet.");
    const chunks = (app) => sum(Object.values(app.chunks ?? {}));
    const most = Math.max(1, ...own.map(([, app]) => chunks(app)));
    return own.map(([name, app]) => {
      const parts = WIDTHS.map(([width, text]) =>
        ({ name: `${text}: ${app.chunks?.[width] ?? 0}`, colour: `w-${width}`, value: app.chunks?.[width] ?? 0 }));
      const told = [count(app.contexts ?? 0, "context", "contexts"), count(chunks(app), "chunk", "chunks"),
        `${bytes(app.stored_bytes ?? 0)} stored`, ...(app.pinned ? [`${app.pinned} pinned`] : [])];
      return el("div", { class: "widths" }, el("b", { title: name }, name),
        stack(parts, most, `${name}: ${parts.map((part) => part.name).join(", ")}`, true),
        el("span", { class: "faint" }, told.join(" · ")));
    });
  });
}

export function experts({ figures }) {
  const own = figures.experts;
  $("experts-panel").hidden = !own;
  if (!own) return;
  const read = figures.read_bytes?.experts;
  show($("experts"), [own, read], () => {
    const facts = [["Hit rate", own.visits ? `${((100 * own.hits) / own.visits).toFixed(1)} %` : DASH],
      ["Visits", (own.visits ?? 0).toLocaleString("en")], ["Foreseen", (own.foreseen ?? 0).toLocaleString("en")],
      ...(read === undefined ? [] : [["Read from storage", bytes(read)]])];
    return el("dl", { class: "facts" }, facts.map(([name, value]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  });
}
