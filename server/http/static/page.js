// Reads /debug/grid.json once a second and draws it. No library, no build step, no inline code.
"use strict";

const find = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
let metric = "use";
let latest = null;
let pointed = null;

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") node.className = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

const short = (value, digits = 3) =>
  value >= 1e4 ? Intl.NumberFormat("en", { notation: "compact" }).format(value) : String(+value.toPrecision(digits));
const bytes = (n) => (n >= 1e9 ? short(n / 1e9) + " GB" : n >= 1e6 ? short(n / 1e6) + " MB" : short(n / 1e3) + " kB");
const percent = (share) => (100 * share).toFixed(share < 0.0995 ? 1 : 0) + " %";
const duration = (s) => (s >= 1 ? short(s) + " s" : s >= 1e-3 ? short(s * 1e3) + " ms" : short(s * 1e6) + " µs");
const last = (series) => [...series].reverse().find((value) => value !== null) ?? 0;

// What each metric shows of a bucket, and how strong its colour is: value, text.
const METRICS = {
  use: { of: (b) => b.rows ?? 0, text: (v) => short(v), legend: "rows since the start, darker is more" },
  waste: {
    of: (b) => (b.computed ? 1 - b.real / b.computed : null),
    text: percent,
    legend: "share of the computed elements that was padding",
  },
  time: { of: (b) => b.seconds, text: duration, legend: "device time of one run" },
  memory: {
    of: (b) => (b.code_bytes === null ? null : b.code_bytes + b.temp_bytes),
    text: bytes,
    legend: "machine code and scratch memory of the program",
  },
};

function path(values, top, close) {
  const step = 100 / (values.length - 1);
  let out = "";
  let open = false;
  values.forEach((value, index) => {
    if (value === null) { open = close && open; return; }
    const point = `${(index * step).toFixed(2)} ${(38 - (36 * value) / top).toFixed(2)}`;
    out += (open ? "L" : "M") + point;
    open = true;
  });
  return close && out ? out + "L100 40L0 40Z" : out;
}

function chart(title, value, lines, note) {
  const top = Math.max(...lines.flat().filter((v) => v !== null), 1e-9);
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 100 40");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${title}, last two minutes: ${value} now, at most ${short(top)}`);
  const draw = (d, kind) => {
    const node = document.createElementNS(SVG, "path");
    node.setAttribute("d", d);
    node.setAttribute("class", kind);
    svg.append(node);
  };
  draw("M0 39.5L100 39.5", "base");
  if (lines.length === 1) draw(path(lines[0].map((v) => v ?? 0), top, true), "area");
  lines.forEach((line, index) => draw(path(line, top, false), index ? "second" : "curve"));
  const caption = make("figcaption", {}, make("span", {}, title), make("span", {}, note));
  return make("figure", { class: "chart" }, caption, make("b", {}, value), svg);
}

function drawCharts(s) {
  const waiting = latest.models.reduce((sum, m) => sum + (m.waiting_rows ?? 0), 0);
  const peak = (series) => "peak " + short(Math.max(...series.map((v) => v ?? 0)));
  find("charts").replaceChildren(
    chart("Requests / s", short(last(s.requests)), [s.requests, s.errors], "errors in amber"),
    chart("Latency", `${short(last(s.p50_ms))} ms`, [s.p50_ms, s.p99_ms], `p99 ${short(last(s.p99_ms))} ms, amber`),
    chart("Rows / s", short(last(s.rows)), [s.rows], peak(s.rows)),
    chart("Waiting rows", short(waiting), [s.waiting], peak(s.waiting)),
    chart("Device busy", percent(last(s.busy)), [s.busy], ""),
  );
}

function describe(model, b) {
  const parts = [`${model.name} ${b.bucket}: ${b.state}`];
  if (b.state === "warm") parts[0] += b.planned ? ", in use" : ", not planned with now";
  if (b.error) parts.push(b.error);
  if (b.source) parts.push(b.source === "compiled" ? "compiled here" : `from the ${b.source}`);
  if (b.seconds !== null) parts.push(`${duration(b.seconds)} a run`);
  if (b.code_bytes !== null) parts.push(`${bytes(b.code_bytes)} code, ${bytes(b.temp_bytes)} scratch`);
  if (b.runs) {
    parts.push(`${short(b.runs)} runs, ${short(b.rows)} rows, ${percent(1 - b.real / b.computed)} padding`);
    parts.push(`${duration(b.wasted_s)} wasted`);
  }
  return parts.join(" · ");
}

function show(model, bucket) {
  pointed = [model.name, bucket.bucket];
  find("detail").textContent = describe(model, bucket);
}

function cell(model, bucket, most) {
  const { of, text } = METRICS[metric];
  const value = of(bucket);
  const shown = bucket.state === "warm" ? (value === null || value === undefined ? "–" : text(value)) : bucket.state;
  const button = make("button", { type: "button", "aria-label": `${bucket.bucket}: ${metric} ${shown}` }, shown);
  button.dataset.key = `${model.name} ${bucket.bucket}`;
  if (bucket.state === "warm") {
    const strength = most > 0 && value ? 8 + 84 * Math.sqrt(value / most) : 0;
    button.style.setProperty("--v", strength.toFixed(1));
    if (strength > 55) button.classList.add("strong");
    if (!bucket.planned) button.classList.add("spare");
  } else button.classList.add(bucket.state);
  button.addEventListener("mouseenter", () => show(model, bucket));
  button.addEventListener("focus", () => show(model, bucket));
  return make("td", {}, button);
}

// As many columns side by side as can be read; the rest goes into further tables below.
function heatMaps(model) {
  const label = (sizes) => sizes.join("×") || "items";
  const columns = [...new Map(model.buckets.map((b) => [label(b.sizes.slice(1)), b.sizes.slice(1)])).entries()];
  columns.sort(([, a], [, b]) => a.reduce((s, v, i) => s || v - b[i], 0));
  const rows = [...new Set(model.buckets.map((b) => b.sizes[0]))].sort((a, b) => a - b);
  const most = Math.max(...model.buckets.map((b) => METRICS[metric].of(b) ?? 0));
  const widest = Math.max(46, 16 + 8 * Math.max(...columns.map(([name]) => name.length)));
  const room = Math.max(1, Math.floor((Math.max(560, find("models").clientWidth) - 92) / widest));
  const tables = Math.ceil(columns.length / room);
  const each = Math.ceil(columns.length / tables);
  return Array.from({ length: tables }, (_, place) =>
    heatMap(model, columns.slice(place * each, (place + 1) * each), rows, most, label));
}

function heatMap(model, columns, rows, most, label) {
  const table = make("table", { class: "heat" });
  const corner = make("th", { class: "corner", scope: "col" }, `${model.axes[0]} \\ ${model.axes.slice(1).join("×") || "–"}`);
  const head = make("tr", {}, corner);
  for (const [name] of columns) head.append(make("th", { scope: "col" }, name));
  table.append(make("caption", { class: "hidden" }, `Buckets of ${model.name}`), make("thead", {}, head));
  const body = make("tbody");
  for (const size of rows) {
    if (!columns.some(([name]) => model.buckets.some((b) => b.sizes[0] === size && label(b.sizes.slice(1)) === name))) continue;
    const line = make("tr", {}, make("th", { scope: "row" }, String(size)));
    for (const [name] of columns) {
      const bucket = model.buckets.find((b) => b.sizes[0] === size && label(b.sizes.slice(1)) === name);
      line.append(bucket ? cell(model, bucket, most) : make("td", { class: "none", "aria-label": "no bucket" }, "·"));
    }
    body.append(line);
  }
  table.append(body);
  return table;
}

// A model that generates text has no grid, but programs: what each did.
function programTable(model) {
  const table = make("table", { class: "programs" }, make("caption", { class: "hidden" }, `Programs of ${model.name}`));
  const heads = ["program", "from", "a run", "runs", "rows", "tokens", "padding"];
  table.append(make("thead", {}, make("tr", {}, ...heads.map((name, place) => make("th", { scope: "col", class: place > 1 ? "number" : "" }, name)))));
  const body = make("tbody");
  for (const one of model.programs) {
    const seconds = one.runs ? one.device_s / one.runs : one.seconds;
    const used = one.runs ? [short(one.runs), short(one.rows), short(one.real), percent(1 - one.real / one.computed)] : ["0", "0", "0", "–"];
    const cells = [one.program, one.source, duration(seconds), ...used];
    body.append(make("tr", {}, ...cells.map((text, place) => make("td", place > 1 ? { class: "number" } : {}, text))));
  }
  table.append(body);
  return table;
}

function drawModels() {
  const models = latest.models.filter((m) => m.buckets);
  const held = document.activeElement?.dataset?.key;
  const parts = latest.models.flatMap((m) => {
    const counts = m.buckets
      ? `${m.buckets.filter((b) => b.state === "warm").length} of ${m.buckets.length} warm`
      : m.programs ? `${m.free_pages} free pages` : "no grid";
    const line = `version ${m.version}, ${counts}, ${m.waiting_rows ?? 0} waiting, ${m.running_rows ?? 0} running`;
    const title = make("h3", {}, `${m.name} `, make("span", { class: "quiet" }, line));
    const tables = m.buckets ? heatMaps(m) : m.programs?.length ? [programTable(m)] : [];
    return [title, ...tables.map((table) => make("div", { class: "scroll" }, table))];
  });
  if (parts.length) find("models").replaceChildren(...parts);
  // Without a grid there is nothing to colour, to point at or to explain.
  for (const id of ["metric", "legend", "detail", "explain-part"]) find(id).hidden = !models.length && parts.length > 0;
  find("legend").textContent = `${METRICS[metric].legend} · dashed: not warm yet · dotted: warm, but not planned with`;
  if (held) document.querySelector(`[data-key="${CSS.escape(held)}"]`)?.focus({ preventScroll: true });
  for (const model of models) {
    const bucket = pointed && model.name === pointed[0] && model.buckets.find((b) => b.bucket === pointed[1]);
    if (bucket) find("detail").textContent = describe(model, bucket);
  }
}

function drawEvents() {
  const rows = [...latest.events].reverse().slice(0, 10).map((e) =>
    make("tr", {},
      make("td", {}, e.bucket || "–"), make("td", {}, e.model || "–"),
      make("td", e.error ? { class: "bad" } : {}, e.error ? "failed" : e.source),
      make("td", { class: "number" }, e.seconds.toFixed(3)), make("td", {}, e.error ?? e.cause)));
  find("events").tBodies[0].replaceChildren(...rows);
}

function drawFields() {
  const models = latest.models.filter((m) => m.buckets);
  const key = JSON.stringify(models.map((m) => [m.name, m.axes]));
  if (find("fields").dataset.key === key || !models.length) return;
  find("fields").dataset.key = key;
  const field = (name, input) => make("label", {}, name, input);
  const choice = make("select", { name: "model" }, ...models.map((m) => make("option", {}, m.name)));
  const inputs = () => models[choice.selectedIndex].axes.map((axis, place) =>
    field(place ? axis : "rows", make("input", { name: place ? axis : "rows", inputmode: "numeric", required: "", value: place ? "37" : "3" })));
  const redraw = () => find("fields").replaceChildren(field("model", choice), ...inputs());
  choice.addEventListener("change", redraw);
  redraw();
}

async function ask(event) {
  event.preventDefault();
  const reply = await fetch("/debug/explain?" + new URLSearchParams(new FormData(find("explain"))));
  const body = await reply.json();
  if (!reply.ok) {
    find("answer").replaceChildren(make("p", { class: "bad" }, body.error?.message ?? body.error));
    return;
  }
  const head = make("tr", {}, ...["bucket", "runs", "ms a run", "ms in all", "padding"].map((name, place) =>
    make("th", { scope: "col", class: place ? "number" : "" }, name)));
  const lines = body.candidates.slice(0, 12).map((c) => {
    const numbers = [c.runs, short(c.seconds * 1e3) + (c.measured ? "" : " (guess)"), short(c.total_s * 1e3), percent(c.padding)];
    const cells = numbers.map((n) => make("td", { class: "number" }, String(n)));
    return make("tr", { class: c.chosen ? "chosen" : "" }, make("td", {}, c.bucket + (c.chosen ? " ✓" : "")), ...cells);
  });
  const table = make("table", {}, make("thead", {}, head), make("tbody", {}, ...lines));
  const left = `A batch leaves ${body.leaves.rule}. So far here: ${body.leaves.why}.`;
  find("answer").replaceChildren(make("p", {}, body.why), make("p", {}, left), make("div", { class: "scroll" }, table));
}

function setState(word, kind) {
  const node = find("state");
  if (node.textContent !== word) node.textContent = word;
  node.className = `pill ${kind}`;
}

async function refresh() {
  try {
    const reply = await fetch("/debug/grid.json");
    if (!reply.ok) throw new Error(reply.statusText);
    latest = await reply.json();
    const state = latest.status.state;
    setState(state, latest.ready ? "good" : latest.live && state !== "failed" ? "warn" : "bad");
    find("version").textContent = latest.version;
    find("progress").textContent = latest.ready ? "" : latest.progress;
    find("uptime").textContent = `up ${new Date(latest.uptime_s * 1e3).toISOString().slice(11, 19)}`;
    drawCharts(latest.series);
    drawModels();
    drawFields();
    drawEvents();
  } catch (error) {
    setState("no answer", "bad");
    console.error(error);
  }
  setTimeout(refresh, 1000);
}

find("explain").addEventListener("submit", ask);
find("metric").addEventListener("change", (event) => { metric = event.target.value; if (latest) drawModels(); });
refresh();
