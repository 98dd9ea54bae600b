"use strict";
// Asks /view once a second for the points it has not had yet, and draws the last 15 minutes, or what there is of them. Names reach the
// page as text only.

const SPAN_S = 900;
const LEAST_SPAN_S = 60;
const byId = (id) => document.getElementById(id);
const isNumber = (x) => typeof x === "number" && Number.isFinite(x);

const short = (x, digits = 3) => {
  if (!isNumber(x)) return "–";
  for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(x) >= size) return `${Number((x / size).toPrecision(digits))} ${unit}`;
  return `${Number(x.toPrecision(digits))}`;
};
const whole = (x) => (isNumber(x) ? x.toLocaleString("en") : "–");
const percent = (x) => (isNumber(x) ? `${Number((100 * x).toFixed(x < 0.1 ? 1 : 0))} %` : "–");
const micros = (x) => (!isNumber(x) ? "–" : x >= 1e6 ? `${short(x / 1e6)} s` : x >= 1e3 ? `${short(x / 1e3)} ms` : `${short(x)} µs`);
const seconds = (x) => (!isNumber(x) ? "–" : x >= 5400 ? `${short(x / 3600)} h` : x >= 90 ? `${short(x / 60)} min` : `${short(x)} s`);
const clock = (x, parts) => new Date(1000 * x).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false, ...parts });
const bytes = (x) => {
  if (!isNumber(x)) return "–";
  let unit = 0;
  for (; x >= 1024 && unit < 4; unit++) x /= 1024;
  return `${Number(x.toPrecision(3))} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
};

// Where the values' axis ends and how it is divided; uPlot's own ways otherwise.
const SHARE = { y: { range: [0, 1] } };
const RISING = { y: { range: (u, low, high) => [0, high > 0 ? high * 1.1 : 1] } };
const onlyDecades = (u, splits) => splits.map((split) => (Math.abs(Math.log10(split) - Math.round(Math.log10(split))) < 1e-9 ? split : null));
const DECADES = {
  y: { distr: 3, range: (u, low, high) => (low > 0 ? [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high) + 0.01)] : [1, 1000]) },
  axis: { filter: onlyDecades },
  lines: { filter: onlyDecades },
};
const TIMES = { ...RISING, axis: { incrs: [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 36000, 86400] } };

// title, how its values read, its axis, and its series: key, label, colour
const CHARTS = [
  ["Ring fill", percent, SHARE, [["fill", "fill", "--blue"]]],
  ["Rows committed a second", short, RISING, [["rows_per_s", "rows/s", "--blue"]]],
  ["Batches granted a second", short, RISING, [["batches_per_s", "batches/s", "--blue"]]],
  ["Waits: share of the time", percent, SHARE, [["collectors_wait", "collectors", "--orange"], ["learners_wait", "learners", "--blue"]]],
  ["Commit latency", micros, DECADES, [["commit_p50_us", "p50", "--blue"], ["commit_p99_us", "p99", "--orange"]]],
  ["Grant latency", micros, DECADES, [["grant_p50_us", "p50", "--blue"], ["grant_p99_us", "p99", "--orange"]]],
  ["Samples per insert", short, RISING, [["samples_per_insert", "ratio", "--blue"]]],
  ["Sample age (uniform draws)", seconds, TIMES, [["sample_age_p50_s", "p50", "--blue"], ["sample_age_p95_s", "p95", "--orange"]]],
];

let columns = null; // key -> values, the oldest first
let charts = [];
let next = 0;
let lookedAt = Date.now() / 1000;

const element = (tag, text, className) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
};
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Where the time axis begins: a young run fills the charts as an old one does.
const begin = () => Math.max(lookedAt - SPAN_S, Math.min(columns?.time_s[0] ?? lookedAt, lookedAt - LEAST_SPAN_S));
const tickTime = (tick) => clock(tick, lookedAt - begin() < 300 ? { second: "2-digit" } : {});

// Under the cursor, or the newest.
const atCursor = (reads) => (u, value, series, place) => reads(place === null ? u.data[series].at(-1) : value);

function makeChart([title, reads, values, series]) {
  const card = element("section", undefined, "chart");
  card.append(element("h2", title));
  byId("charts").append(card);
  const line = { stroke: colour("--line"), width: 1 };
  const axis = { stroke: colour("--faint"), grid: line, ticks: line };
  const ruled = { ...line, ...values.lines };
  const plot = new uPlot({
    width: card.clientWidth - 16,
    height: 170,
    cursor: { sync: { key: "time" } },
    scales: {
      x: { range: () => [begin(), lookedAt] },
      y: values.y,
    },
    axes: [
      { ...axis, size: 30, space: 70, values: (u, ticks) => ticks.map(tickTime) },
      { ...axis, grid: ruled, ticks: ruled, size: 66, values: (u, ticks) => ticks.map((tick) => (tick === null ? null : reads(tick))), ...values.axis },
    ],
    series: [
      { label: "at", value: (u, x) => (isNumber(x) ? clock(x, { second: "2-digit" }) : "now") },
      ...series.map(([, label, name]) => ({ label, stroke: colour(name), width: 1.5, points: { show: false }, value: atCursor(reads) })),
    ],
  }, [[], ...series.map(() => [])], card);
  return { card, plot, keys: series.map(([key]) => key) };
}

function remake() {
  byId("charts").replaceChildren();
  charts.forEach(({ plot }) => plot.destroy());
  charts = CHARTS.map(makeChart);
  draw();
}

function draw() {
  if (columns) charts.forEach(({ plot, keys }) => plot.setData([columns.time_s, ...keys.map((key) => columns[key])]));
}

function take({ keys, points, next: after }) {
  if (!columns || after < next) columns = Object.fromEntries(keys.map((key) => [key, []])); // the exporter is a new one
  for (const point of points) {
    const { time_s: times } = columns;
    if (times.length && point[0] <= times[times.length - 1]) continue; // the clock was set back
    keys.forEach((key, place) => columns[key].push(point[place]));
  }
  const late = columns.time_s.findIndex((time) => time >= lookedAt - SPAN_S);
  if (late > 0) keys.forEach((key) => columns[key].splice(0, late));
  next = after;
}

function showNumbers(report) {
  const { ring, ingress, rates, flow, counters } = report;
  const numbers = [
    [ring ? `rows of ${short(ring.capacity_rows)}` : "rows", ring ? short(ring.size_rows) : "–"],
    ["ring memory", ring ? bytes(ring.device_bytes || ring.host_bytes) : "–"],
    ["slots, shared memory", bytes(ingress.host_bytes)],
    ["slots occupied", whole(ingress.occupied_slots)],
    ["ingest", `${bytes(rates.bytes_per_s)}/s`],
    ["samples per insert", short(flow.samples_per_insert)],
    ["rows committed", short(counters.rows_committed)],
    ["rejected, lost", `${whole(counters.rows_rejected)}, ${whole(counters.rows_lost)}`],
    ["leases revoked", whole(counters.leases_revoked)],
  ];
  byId("numbers").replaceChildren(...numbers.map(([label, value]) => {
    const card = element("div", undefined, "number");
    card.append(element("b", value), element("span", label));
    return card;
  }));
}

function showTable(id, heads, rows) {
  const line = (tag, cells) => {
    const row = element("tr");
    row.append(...cells.map((cell) => element(tag, cell)));
    return row;
  };
  byId(id).replaceChildren(line("th", heads), ...(rows.length ? rows.map((cells) => line("td", cells)) : [line("td", ["none attached"])]));
}

const waits = (client) => (client.waiting_on ? `${seconds(client.waiting_s)}: ${client.waiting_on}` : "");

function showClients({ collectors, learners }) {
  showTable("collectors", ["name", "pid", "lanes", "credits", "committed rows", "rejected rows", "waits"],
    collectors.map((c) => [c.name, c.pid, c.lanes, c.credits, whole(c.committed_rows), whole(c.rejected_rows), waits(c)]));
  showTable("learners", ["name", "pid", "open leases", "batches", "rows", "dropped", "waits"],
    learners.map((c) => [c.name, c.pid, c.open_leases, whole(c.batches), whole(c.rows), whole(c.dropped), waits(c)]));
}

function show({ report, error, restarts }) {
  const badge = byId("phase");
  byId("absent").hidden = !error;
  byId("absent").textContent = error ?? "";
  badge.textContent = report ? report.phase.replaceAll("_", " ") : "absent";
  badge.className = `badge ${!report ? "bad" : report.phase === "serving" ? "good" : ""}`;
  if (!report) {
    showClients({ collectors: [], learners: [] });
    byId("flow").textContent = "";
    return;
  }
  const { device, flow } = report;
  byId("name").textContent = document.title = `replay-server ${report.name}`;
  const again = restarts ? `, ${restarts} restart${restarts > 1 ? "s" : ""} seen` : "";
  byId("where").textContent = `${device.name || device.kind}, pid ${report.pid}, up ${seconds(report.uptime_s)}${again}`;
  byId("flow").textContent = `flow: ${flow.state.replaceAll("_", " ")}${flow.reason ? ` for ${seconds(flow.since_s)}: ${flow.reason}` : ""}`;
  showNumbers(report);
  showClients(report);
}

async function look() {
  try {
    const answer = await fetch(`view?after=${next}`, { signal: AbortSignal.timeout(5000) });
    const view = await answer.json();
    lookedAt = view.time_s;
    take(view);
    show(view);
    draw();
    document.body.dataset.points = columns.time_s.length;
    document.body.dataset.span = Math.round(lookedAt - begin());
  } catch (error) {
    show({ report: null, error: `the exporter does not answer (${error.message})` });
  }
  setTimeout(look, 1000);
}

let resizing;
new ResizeObserver(() => {
  clearTimeout(resizing);
  resizing = setTimeout(() => charts.forEach(({ card, plot }) => plot.setSize({ width: card.clientWidth - 16, height: 170 })), 100);
}).observe(byId("charts"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", remake);
remake();
look();
