"use strict";
// The dashboard of a running job: snapshots arrive as server-sent events, and the page draws each as a whole.
const $ = (id) => document.getElementById(id);
const COLUMNS = [
  ["step", (w) => whole(w.steps)],
  ["steps/s", (w) => plain(w.steps_per_s)],
  ["computing per step", (w) => seconds(w.step_compute_s)],
  ["waiting", (w) => percent(w.waiting)],
  ["staleness", (w) => `${plain(w.staleness_mean)} (at most ${w.staleness_max})`],
  ["sent", (w) => bytes(w.bytes_sent)],
  ["synced / local", (w) => `${whole(w.sync_steps)} / ${whole(w.local_steps)}`],
];
$("table").append(
  tag("thead", {}, tag("tr", {}, tag("th", { scope: "col" }, "worker"), ...COLUMNS.map(([label]) => tag("th", { scope: "col" }, label)))),
  tag("tbody", {}),
);
let updatedAt = performance.now(), ended = false;

const MOST_LINES = 8;
function duration(value) {
  const whole = Math.round(value), minutes = Math.floor(whole / 60);
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}
// A line per worker; of many workers those that wait least, for whom the others wait.
function waitingSeries(state) {
  const ranks = state.workers.map((w) => w.rank);
  const mean = (rank) => state.moments.reduce((sum, m) => sum + (m.waiting[rank] ?? 1), 0);
  const shown = [...ranks].sort((a, b) => mean(a) - mean(b)).slice(0, MOST_LINES).sort((a, b) => a - b);
  return shown.map((rank) => {
    const points = state.moments.filter((m) => m.waiting[rank] != null).map((m) => ({ x: m.seconds, y: m.waiting[rank] }));
    return { label: `rank ${rank}`, color: `var(--c${rank % 11})`, dash: null, points, seeds: [] };
  });
}

function show(state) {
  updatedAt = performance.now();
  if (!state.strategy) return;
  document.title = `${state.strategy} ${state.step}/${state.total_steps}`;
  $("title").textContent = `${state.task}: ${state.strategy}`;
  const value = state.history.length ? state.history.at(-1).value : null;
  const facts = [["settings", tag("span", { title: allSettings(state.settings) }, state.changed.join(" ") || "defaults")], ["step", `${whole(state.step)} of ${whole(state.total_steps)}`], ["training time", seconds(state.seconds)], ["left", state.left_s == null ? "–" : duration(state.left_s)], ["samples/s", whole(state.samples_per_s)],
    ["loss", plain(state.loss)], [state.metric, plain(value)], ["sent by all", bytes(state.bytes_total)]];
  $("facts").replaceChildren(...facts.map(([k, v]) => tag("div", {}, tag("dt", {}, k), tag("dd", {}, v))));
  $("progress").value = state.step / state.total_steps;
  $("straggler").textContent = state.straggler ? `Straggler: ${state.straggler}` : "No worker stands out as slow.";
  $("table").tBodies[0].replaceChildren(...state.workers.map((worker) => {
    const cells = COLUMNS.map(([label, of]) => tag("td", { "data-label": label }, of(worker)));
    const slow = worker.name === state.straggler ? [tag("small", { class: "slow" }, "straggler")] : [];
    return tag("tr", {}, tag("th", { scope: "row" }, worker.name, ...slow), ...cells);
  }));
  $("left-out").textContent = state.left_out ? `and ${state.left_out} faster workers` : "";
  const points = state.history.map((p) => ({ x: p.seconds, y: p.value }));
  const series = [{ label: state.metric, color: "var(--c0)", dash: null, points, seeds: [] }];
  const over = { xLabel: "seconds of training", xFormat: seconds };
  const losses = state.moments.map((m) => ({ x: m.seconds, y: m.loss }));
  lineChart($("loss"), { ...over, series: [{ label: "loss", color: "var(--c1)", dash: null, points: losses, seeds: [] }], yLabel: "loss", yFormat: plain });
  lineChart($("waiting"), { ...over, series: waitingSeries(state), yLabel: "waiting", yFormat: percent });
  $("events").replaceChildren(...[...state.events].reverse().map(({ at_s, kind, text }) => tag("li", { class: kind }, `${seconds(at_s)}: ${text}`)));
  $("no-events").hidden = state.events.length > 0;
  lineChart($("course"), { series, xLabel: "seconds of training", yLabel: state.metric, xFormat: seconds, yFormat: plain, target: state.target });
}
function showStatus() {
  const silent = (performance.now() - updatedAt) / 1000;
  $("status").textContent = ended ? "Training has ended." : silent > 3 ? `No update for ${Math.round(silent)} s.` : "Live.";
}
const source = new EventSource("events");
source.addEventListener("message", (event) => { show(JSON.parse(event.data)); showStatus(); });
source.addEventListener("end", () => { ended = true; source.close(); showStatus(); });
setInterval(showStatus, 1000);
