"use strict";
// The report. The selected view is part of the URL, after the #, so that a link shows the same view.
const DATA = JSON.parse(document.getElementById("data").textContent);
const DASHES = [null, "7 3", "2 3", "9 3 2 3"], BORDERS = ["solid", "dashed", "dotted", "dashed"];
// A strategy has the same colour in every report; groups of one colour differ in the dash.
DATA.groups.forEach((group, i) => {
  const alike = DATA.groups.slice(0, i).filter((g) => g.color === `var(--c${group.color})`).length % DASHES.length;
  group.color = `var(--c${group.color})`;
  group.dash = DASHES[alike];
  group.border = BORDERS[alike];
});
const XS = { seconds: ["seconds of training", seconds, "seconds"], bytes: ["bytes sent by workers and server", bytes, "bytes_total"], steps: ["steps per worker", whole, "step"] };
const YS = { value: [DATA.metric, plain, "value"], loss: ["training loss", plain, "loss"] };
const ZOOMS = [1, 2, 4, 8, 16];
const $ = (id) => document.getElementById(id);

// --- the selected view

const FLAGS = ["logx", "logy", "seeds", "near"];
const state = { x: "seconds", y: "value", logx: false, logy: false, seeds: false, near: false, hide: new Set(), timeline: "", zoom: 1 };
const several = DATA.groups.some((g) => g.seeds.length > 1);
function readAddress() {
  const params = new URLSearchParams(location.hash.slice(1));
  const one = (name, known, otherwise) => (known.includes(params.get(name)) ? params.get(name) : otherwise);
  state.x = one("x", Object.keys(XS), "seconds");
  state.y = one("y", Object.keys(YS), "value");
  for (const name of FLAGS) state[name] = params.get(name) === "1";
  const labels = DATA.groups.map((g) => g.label);
  state.hide = new Set(params.getAll("hide").filter((label) => labels.includes(label)));
  const drawn = DATA.groups.filter((g) => g.timeline?.workers.length).map((g) => g.label);
  state.timeline = one("timeline", drawn, drawn[0] ?? "");
  state.zoom = Number(one("zoom", ZOOMS.map(String), "1"));
  if (["light", "dark"].includes(params.get("theme"))) setTheme(params.get("theme"));
}
function writeAddress() {
  const query = new URLSearchParams();
  if (state.x !== "seconds") query.set("x", state.x);
  if (state.y !== "value") query.set("y", state.y);
  for (const name of FLAGS) if (state[name]) query.set(name, "1");
  for (const label of state.hide) query.append("hide", label);
  if ($("timeline-of").selectedIndex > 0) query.set("timeline", state.timeline);
  if (state.zoom !== 1) query.set("zoom", state.zoom);
  history.replaceState(null, "", query.size ? `#${query}` : location.pathname + location.search);
}
function choose(name, value) {
  state[name] = value;
  writeAddress();
  draw();
}
const visible = () => DATA.groups.filter((g) => !state.hide.has(g.label));

// --- controls

const swatch = (group) => tag("span", { class: "swatch", style: `color:${group.color};border-top-style:${group.border}` });
function segments(host, name, options) {
  for (const [value, label] of options) {
    const input = tag("input", { type: "radio", name, value });
    input.addEventListener("change", () => choose(name, value));
    $(host).append(tag("label", {}, input, tag("span", {}, label)));
  }
}
function check(host, label, isOn, onChange, mark) {
  const input = tag("input", { type: "checkbox", "data-of": label });
  input.addEventListener("change", () => onChange(input.checked));
  input.isOn = isOn;
  host.append(tag("label", {}, input, ...(mark ? [mark] : []), label));
}
function buildControls() {
  for (const group of DATA.groups)
    check($("strategies"), group.label, () => !state.hide.has(group.label), (on) => {
      if (on) state.hide.delete(group.label);
      else state.hide.add(group.label);
      choose("hide", state.hide);
    }, swatch(group));
  segments("x", "x", [["seconds", "seconds"], ["bytes", "bytes"], ["steps", "steps"]]);
  segments("y", "y", [["value", DATA.metric], ["loss", "training loss"]]);
  check($("logs"), "log x", () => state.logx, (on) => choose("logx", on));
  check($("logs"), "log y", () => state.logy, (on) => choose("logy", on));
  if (DATA.target != null) check($("logs"), "zoom to target", () => state.near, (on) => choose("near", on));
  if (DATA.groups.some((g) => g.seeds.length > 1)) check($("logs"), "each seed", () => state.seeds, (on) => choose("seeds", on));
  for (const group of DATA.groups) if (group.timeline?.workers.length) $("timeline-of").append(tag("option", { value: group.label }, `${group.label}, seed ${group.seeds[0]}`));
  for (const zoom of ZOOMS) $("zoom").append(tag("option", { value: zoom }, `${zoom}×`));
  $("timeline-of").addEventListener("change", (event) => choose("timeline", event.target.value));
  $("zoom").addEventListener("change", (event) => choose("zoom", Number(event.target.value)));
}
function showControls() {
  for (const input of document.querySelectorAll("#controls input"))
    input.checked = input.isOn ? input.isOn() : state[input.name] === input.value;
  $("timeline-of").value = state.timeline;
  $("zoom").value = state.zoom;
}

// --- the parts that never change

function buildHead() {
  $("title").textContent = DATA.title;
  $("verdict").textContent = DATA.verdict ?? "";
  $("verdict").hidden = !DATA.verdict;
  for (const note of Object.values(DATA.losses)) $("losses").append(tag("li", {}, note));
  for (const [label, value] of DATA.facts) $("facts").append(tag("div", {}, tag("dt", {}, label), tag("dd", {}, value)));
  for (const note of DATA.notes) $("notes").append(tag("li", {}, note));
  for (const run of DATA.incomplete) $("notes").append(tag("li", {}, `incomplete: ${run} was stopped before its last step`));
}
function figure(known, format, runs, best) {
  if (!known || known.mean == null) return [tag("span", {}, "–")];
  const parts = [tag("span", best ? { class: "best" } : {}, format(known.mean))];
  if (known.spread != null) parts.push(tag("small", {}, `± ${format(known.spread)}`));
  if (runs && known.runs < runs) parts.push(tag("small", {}, `${known.runs} of ${runs} runs`));
  return parts;
}
// The columns of the comparison with BSP: [label, a function that finds the figure of a group, one that shows it].
function versusColumns() {
  const points = DATA.metric === "accuracy", scaled = (v) => digits(points ? 100 * v : v, 2);
  const signed = (v) => (v ? `${v < 0 ? "−" : "+"}${Math.abs(scaled(v))}` : "0");
  const change = (k) => (k.mean == null ? figure(k) : [tag("span", {}, signed(k.mean)), ...(k.spread == null ? [] : [tag("small", {}, `± ${scaled(k.spread)}`)])]);
  return [
    ["x BSP", (g) => g.versus.speedup, (k) => figure(k, (v) => `${digits(v, 2)}x`)],
    [points ? "Δ accuracy, points" : `Δ ${DATA.metric}`, (g) => g.versus.change, change],
  ];
}
function buildTable() {
  const hasTarget = DATA.target != null;
  const goal = hasTarget ? plain(DATA.target) : "";
  const toTarget = (format) => (known, runs, best) => (known.runs ? figure(known, format, runs, best) : [tag("span", {}, "never")]);
  const unit = (name, units) => oneUnit(DATA.groups.map((g) => g.figures[name].mean).filter((v) => v != null), units);
  const [race_s, race_s_unit] = unit("seconds_to_target", SECONDS), [all_s, all_s_unit] = unit("seconds", SECONDS);
  const [race_b, race_b_unit] = unit("bytes_to_target", BYTES), [all_b, all_b_unit] = unit("bytes_total", BYTES);
  const columns = [
    ...(hasTarget ? [[`${race_s_unit} to ${goal}`, "seconds_to_target", toTarget(race_s), true], [`${race_b_unit} to ${goal}`, "bytes_to_target", toTarget(race_b), true]] : []),
    ...(DATA.groups[0].versus ? versusColumns() : []),
    [DATA.metric, "value", (k) => figure(k, decimals)],
    [`${all_s_unit} in all`, "seconds", (k) => figure(k, all_s)],
    [`${all_b_unit} sent`, "bytes_total", (k) => figure(k, all_b)],
    ["samples/s", "samples_per_second", (k) => figure(k, whole)],
    ["synced", "synced", (k) => figure(k, percent)],
    ["waiting", "waiting", (k) => figure(k, percent)],
  ];
  const head = tag("tr", {}, tag("th", { scope: "col" }, "strategy"), ...columns.map(([label]) => tag("th", { scope: "col" }, label)));
  const rows = DATA.order.map((name) => DATA.groups.find((g) => g.label === name)).map((group) => {
    const cells = columns.map(([label, name, show, race]) => {
      if (typeof name === "function") return tag("td", { "data-label": label }, ...show(name(group)));
      const reached = DATA.groups.map((g) => g.figures[name].mean).filter((v) => v); // zero bytes are not compared
      const best = race && reached.length > 1 && group.figures[name].mean === Math.min(...reached);
      return tag("td", { "data-label": label }, ...show(group.figures[name], group.seeds.length, best));
    });
    return tag("tr", {}, tag("th", { scope: "row", title: allSettings(group.settings) }, swatch(group), group.label, tag("small", {}, group.changed.filter((text) => !group.label_settings.includes(text)).join(" "))), ...cells);
  });
  $("table").append(tag("thead", {}, head), tag("tbody", {}, ...rows));
  const bold = hasTarget ? " Bold: fastest, or fewest bytes, to the target." : "";
  $("table-hint").textContent = (several ? "Means over the seeds ± one standard deviation." : "One seed, so no spread is shown.") + bold;
}
function buildOrigin() {
  const host = $("origin");
  for (const command of DATA.commands) {
    const copy = tag("button", { type: "button" }, "Copy");
    copy.addEventListener("click", () => navigator.clipboard?.writeText(command).then(() => { copy.textContent = "Copied"; }));
    host.append(tag("h3", {}, "Made by", copy), tag("pre", {}, command));
  }
  const list = (rows) => tag("dl", { class: "facts" }, ...rows.map(([k, v]) => tag("div", {}, tag("dt", {}, k), tag("dd", {}, String(v ?? "none")))));
  for (const known of DATA.environments) host.append(tag("h3", {}, "Machine of rank 0"), list(Object.entries(known)));
  if (DATA.started) host.append(tag("p", { class: "hint" }, `First run started ${DATA.started.replace("T", " ").replace("+00:00", " UTC")}.`));
  for (const group of DATA.groups) {
    const settings = Object.entries(group.settings);
    host.append(tag("h3", {}, swatch(group), group.label), list([["settings", group.changed.join(" ") || "defaults"], ["seeds", group.seeds.join(", ")], ["steps", group.steps]]));
    if (settings.length) host.append(tag("details", {}, tag("summary", {}, "all settings"), list(settings)));
  }
}

// --- the charts

function courseSeries() {
  const xName = XS[state.x][2], yName = YS[state.y][2];
  const points = (list) => list.map((p) => ({ x: p[xName], y: p[yName], low: p[`${yName}_low`], high: p[`${yName}_high`] }));
  return visible().map((g) => ({
    label: g.label, color: g.color, dash: g.dash, points: points(g.curve),
    seeds: state.seeds && g.seeds.length > 1 ? g.runs.map((run) => points(run.history)) : [],
  }));
}
function drawCourse() {
  const [xLabel, xFormat] = XS[state.x], [yLabel, yFormat] = YS[state.y];
  lineChart($("course"), { series: courseSeries(), xLabel, yLabel, xFormat, yFormat, xLog: state.logx, yLog: state.logy, target: state.y === "value" ? DATA.target : null, near: state.near && state.y === "value", rising: DATA.higher_is_better });
  $("course").dataset.x = state.x;
  $("course").dataset.y = state.y;
  $("course-hint").textContent = `Each line connects the evaluations${several ? "; the band spans the least and the greatest value of the seeds" : ""}. Point at the chart, or use the arrow keys in it, to read the numbers.`;
}
function drawScatter() {
  const aimed = DATA.target != null, name = aimed ? "seconds_to_target" : "seconds";
  const dots = visible().map((g) => ({ label: g.label, color: g.color, x: g.figures[name], y: g.figures.value }));
  scatterChart($("scatter"), dots, aimed ? `seconds to ${plain(DATA.target)}` : "seconds for all steps", `last ${DATA.metric}`);
  $("scatter-metric").textContent = DATA.metric;
  const missing = aimed ? dots.filter((d) => d.x.mean == null).map((d) => d.label) : [];
  $("scatter-hint").textContent = `${DATA.higher_is_better ? "Up" : "Down"} and to the left is better.${several ? " Bars: one standard deviation over the seeds." : ""}` + (missing.length ? ` Not shown, for the target was never reached: ${missing.join(", ")}.` : "");
}
function drawSplit() {
  const groups = visible();
  const longest = Math.max(...groups.flatMap((g) => g.workers.map((w) => Math.max(w.compute_s + w.wait_s, w.communicate_s))), 0);
  $("split").replaceChildren(...groups.map((group) => {
    const rows = group.workers.map((w) => splitRow(w, longest));
    const more = group.worker_count - group.workers.length;
    if (more > 0) rows.push(tag("p", { class: "hint" }, `and ${more} more workers`));
    return tag("div", {}, tag("h3", {}, swatch(group), group.label), ...rows);
  }));
}
function drawTimeline() {
  const group = DATA.groups.find((g) => g.label === state.timeline);
  if (!group) {
    $("timeline").replaceChildren(tag("p", { class: "hint" }, "No timeline was recorded for these runs."));
    return;
  }
  timelineChart($("timeline"), group.timeline, state.zoom);
  $("timeline-key").replaceChildren(...timelineKey(group.timeline));
  const few = group.timeline.workers.length < group.worker_count ? ` The first ${group.timeline.workers.length} workers of ${group.worker_count}.` : "";
  $("timeline-hint").textContent = `The last ${seconds(group.timeline.seconds)} of the run.${few} The thin rows are a worker's messages, from sending to arrival; a pull may wait at the server. To see the whole run, train with --trace FILE and open the file in Perfetto.`;
}
function drawDecisions() {
  const groups = visible().filter((g) => g.decisions?.steps);
  if (groups.length) decisionsChart($("decisions"), groups);
  else $("decisions").replaceChildren(tag("p", { class: "hint" }, "No synchronization decisions were recorded for these runs."));
}
function drawStaleness() {
  const groups = visible().filter((g) => g.staleness.length);
  $("staleness").replaceChildren();
  for (const group of groups) {
    const total = group.staleness.reduce((sum, [, n]) => sum + n, 0);
    const mean = group.staleness.reduce((sum, [k, n]) => sum + k * n, 0) / total;
    const host = tag("div", {}, tag("h3", {}, swatch(group), group.label), tag("p", { class: "hint" }, `mean ${plain(mean)}, at most ${group.staleness.at(-1)[0]}, in ${whole(total)} reads`));
    $("staleness").append(host);
    histogram(host, group.staleness, group.color);
  }
  if (!groups.length) $("staleness").append(tag("p", { class: "hint" }, "None of these strategies reads weights from a server, so no weights are stale."));
}
function draw() {
  showControls();
  drawCourse();
  drawScatter();
  drawSplit();
  drawTimeline();
  drawDecisions();
  drawStaleness();
}

buildHead();
buildTable();
buildControls();
buildOrigin();
$("save").addEventListener("click", () => {
  const chart = document.querySelector("#course svg");
  if (!chart) return;
  const file = URL.createObjectURL(new Blob([standalone(chart, courseSeries())], { type: "image/svg+xml" }));
  tag("a", { href: file, download: `${DATA.task}-${state.y}-over-${state.x}.svg` }).click();
  setTimeout(() => URL.revokeObjectURL(file), 1000);
});
readAddress();
draw();
addEventListener("hashchange", () => { readAddress(); draw(); });
let drawnWidth = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === drawnWidth) return; // a phone's address bar changes only the height
  drawnWidth = innerWidth;
  draw();
});
