"use strict";
// Charts as SVG, drawn to the available width. No library: the page must be self-contained and small.
const SVG = "http://www.w3.org/2000/svg";
const LONGEST_LABEL = 24; // characters of a label at the end of a line
const MARGIN = { top: 14, right: 14, bottom: 40, left: 58 };

function put(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) if (value != null) node.setAttribute(name, value);
  for (const child of children) node.append(child);
  return node;
}
const svg = (name, attributes, ...children) => put(document.createElementNS(SVG, name), attributes, children);
const tag = (name, attributes, ...children) => put(document.createElement(name), attributes, children);

// --- numbers for people

const digits = (value, n) => Number(value.toPrecision(n));
function bytes(value) {
  if (value == null) return "–";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  for (; Math.abs(value) >= 999.5 && unit < units.length - 1; unit++) value /= 1000;
  return `${digits(value, 3)} ${units[unit]}`;
}
function seconds(value) {
  if (value == null) return "–";
  if (value !== 0 && Math.abs(value) < 1e-3) return `${digits(value * 1e6, 3)} µs`;
  if (value !== 0 && Math.abs(value) < 1) return `${digits(value * 1e3, 3)} ms`;
  return value >= 1000 ? `${Math.round(value).toLocaleString("en")} s` : `${digits(value, 3)} s`;
}
// A column has one unit, that of its greatest value: [a function that writes a value, the unit's name].
const SECONDS = [["µs", 1e-6], ["ms", 1e-3], ["s", 1]];
const BYTES = [["B", 1], ["kB", 1e3], ["MB", 1e6], ["GB", 1e9], ["TB", 1e12]];
function oneUnit(values, units) {
  const most = Math.max(...values.map(Math.abs), 0);
  const [name, size] = [...units].reverse().find(([, s]) => most >= s) ?? units.at(-1);
  return [(value) => (value == null ? "–" : value / size >= 1000 ? whole(value / size) : String(digits(value / size, 3))), name];
}
const percent = (value) => (value == null ? "–" : `${Math.round(100 * value)}%`);
const plain = (value) => (value == null ? "–" : Math.abs(value) >= 1e5 ? value.toExponential(1) : String(digits(value, 4)));
// As the terminal writes a metric: a column of them has its points below each other.
const decimals = (value) => (value == null || Math.abs(value) >= 1e5 ? plain(value) : value.toFixed(4));
const whole = (value) => (value == null ? "–" : Math.round(value).toLocaleString("en"));

const allSettings = (settings) => Object.entries(settings).map(([k, v]) => `${k}=${v ?? "none"}`).join(" ") || "no settings";

// --- scales

function ticksLinear(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(k * step || 0);
  return ticks;
}
function ticksLog(low, high, wanted) {
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((to - from) / Math.max(1, wanted)));
  const mantissas = to - from <= 1 ? [1, 2, 3, 5, 7] : to - from <= 2 ? [1, 2, 5] : [1];
  const ticks = [];
  for (let power = from; power <= to; power += every)
    for (const m of mantissas) ticks.push(m * 10 ** power);
  return ticks.filter((t) => t >= low * 0.999 && t <= high * 1.001);
}
function scale(values, log, from, to, wanted) {
  let low = Math.min(...values), high = Math.max(...values);
  if (log) {
    if (low === high) { low /= 2; high *= 2; }
    const a = Math.log(low), b = Math.log(high);
    const at = (v) => from + ((Math.log(v) - a) / (b - a)) * (to - from);
    return { at, ticks: ticksLog(low, high, wanted), low, high };
  }
  if (low === high) { const half = Math.abs(low) / 2 || 0.5; low -= half; high += half; }
  const at = (v) => from + ((v - low) / (high - low)) * (to - from);
  return { at, ticks: ticksLinear(low, high, wanted), low, high };
}

// --- lines

// series: {label, color, dash, points: [{x, y, low, high, step}], seeds: [[{x, y}]]}
function lineChart(host, options) {
  const width = Math.max(280, host.clientWidth || 900), height = width < 520 ? 300 : 400;
  const labelled = width >= 640;
  const room = labelled ? 10 + 6.8 * Math.min(LONGEST_LABEL, Math.max(0, ...options.series.map((s) => s.label.length))) : 0;
  const inside = { left: MARGIN.left, right: width - MARGIN.right - room, top: MARGIN.top, bottom: height - MARGIN.bottom };
  const usable = (p) => p.x != null && p.y != null && (!options.xLog || p.x > 0) && (!options.yLog || p.y > 0);
  const series = options.series.map((s) => ({ ...s, points: s.points.filter(usable), seeds: s.seeds.map((l) => l.filter(usable)) }));
  const all = series.flatMap((s) => [...s.points, ...s.seeds.flat()]);
  host.replaceChildren();
  if (!all.length) {
    host.append(tag("p", { class: "hint" }, "Nothing to show: no evaluation with these numbers."));
    return;
  }
  const goal = options.target != null && (!options.yLog || options.target > 0) ? [options.target] : [];
  const shown = options.near && goal.length ? nearTarget(series, goal[0], all, options.rising) : all;
  const x = scale([...shown.map((p) => p.x), ...(options.xLog ? [] : [0])], options.xLog, inside.left, inside.right, width / 80);
  const reach = shown.flatMap((p) => [p.y, p.low, p.high]).filter((v) => v != null && (!options.yLog || v > 0));
  const y = scale([...reach, ...goal], options.yLog, inside.bottom, inside.top, 6);
  const name = `${options.yLabel} over ${options.xLabel}: ${series.map((s) => s.label).join(", ")}`;
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0, "aria-label": name });
  const frame = { x: inside.left, y: inside.top - 2, width: inside.right - inside.left + 4, height: inside.bottom - inside.top + 4 };
  root.append(svg("clipPath", { id: `inside-${host.id}` }, svg("rect", frame)));
  const clipped = svg("g", { "clip-path": `url(#inside-${host.id})` });
  for (const t of y.ticks) {
    root.append(svg("line", { class: "grid", x1: inside.left, x2: inside.right, y1: y.at(t), y2: y.at(t) }));
    root.append(svg("text", { x: inside.left - 8, y: y.at(t) + 4, "text-anchor": "end" }, options.yFormat(t)));
  }
  for (const t of x.ticks) {
    root.append(svg("line", { class: "axis", x1: x.at(t), x2: x.at(t), y1: inside.bottom, y2: inside.bottom + 4 }));
    const anchor = x.at(t) > inside.right - 18 ? "end" : "middle";
    root.append(svg("text", { x: x.at(t), y: inside.bottom + 18, "text-anchor": anchor }, options.xFormat(t)));
  }
  root.append(svg("line", { class: "axis", x1: inside.left, x2: inside.right, y1: inside.bottom, y2: inside.bottom }));
  root.append(svg("text", { x: (inside.left + inside.right) / 2, y: height - 4, "text-anchor": "middle" }, options.xLabel));
  root.append(svg("text", { x: inside.left, y: 10 }, options.yLabel));
  for (const g of goal) {
    root.append(svg("line", { class: "target", x1: inside.left, x2: inside.right, y1: y.at(g), y2: y.at(g) }));
    root.append(svg("text", { x: inside.left + 4, y: y.at(g) + (y.at(g) < inside.top + 20 ? 14 : -5) }, `target ${plain(g)}`));
  }
  const path = (points, of) => points.map((p, i) => `${i ? "L" : "M"}${x.at(p.x).toFixed(1)} ${y.at(of(p)).toFixed(1)}`).join("");
  for (const s of series) {
    const ranged = s.points.filter((p) => p.low != null && (!options.yLog || p.low > 0));
    if (!s.seeds.length && ranged.some((p) => p.high > p.low)) {
      const clamp = (v) => Math.min(Math.max(v, y.low), y.high);
      const back = [...ranged].reverse();
      const d = path(ranged, (p) => clamp(p.high)) + path(back, (p) => clamp(p.low)).replace("M", "L") + "Z";
      clipped.append(svg("path", { class: "band", d, style: `fill:${s.color}` }));
    }
    for (const line of s.seeds) clipped.append(svg("path", { class: "seed", d: path(line, (p) => p.y), style: `stroke:${s.color}` }));
  }
  for (const s of series) {
    clipped.append(svg("path", { class: "line", d: path(s.points, (p) => p.y), style: `stroke:${s.color}`, "stroke-dasharray": s.dash, "data-label": s.label }));
    if (s.points.length === 1) clipped.append(svg("circle", { cx: x.at(s.points[0].x), cy: y.at(s.points[0].y), r: 3.5, style: `fill:${s.color}` }));
  }
  root.append(clipped);
  host.append(root);
  const inView = (p) => p.x <= x.high && p.y >= y.low && p.y <= y.high;
  const viewed = series.map((s) => ({ ...s, points: s.points.filter(inView) }));
  if (labelled) labelEnds(root, viewed, x, y, inside);
  follow(root, viewed, x, y, inside, width, options);
}

// The evaluations around the target: up to a quarter more time than the last line takes to reach it.
function nearTarget(series, goal, all, rising) {
  const sign = rising ? 1 : -1;
  const times = series.map((s) => s.points.find((p) => sign * p.y >= sign * goal)?.x).filter((t) => t != null);
  if (!times.length) return all;
  const until = 1.25 * Math.max(...times);
  const beyond = Math.max(...all.map((p) => sign * (p.y - goal)), 0.01 * Math.abs(goal));
  const near = all.filter((p) => p.x <= until && sign * (p.y - goal) >= -3 * beyond);
  return near.map((p) => ({ x: p.x, y: p.y }));
}

// The name of each line at its end; names that would cover each other are moved apart.
function labelEnds(root, series, x, y, inside) {
  const ends = series.filter((s) => s.points.length).map((s) => ({ s, p: s.points.at(-1) }));
  ends.sort((a, b) => y.at(a.p.y) - y.at(b.p.y));
  let above = inside.top - 10;
  const places = ends.map((e) => (above = Math.max(y.at(e.p.y) + 4, above + 13)));
  const over = Math.max(0, (places.at(-1) ?? 0) - inside.bottom);
  ends.forEach(({ s, p }, i) => {
    const at = places[i] - over, edge = inside.right + 8;
    const name = s.label.length > LONGEST_LABEL ? `${s.label.slice(0, LONGEST_LABEL - 1)}…` : s.label;
    root.append(svg("line", { class: "leader", x1: x.at(p.x) + 3, y1: y.at(p.y), x2: edge - 2, y2: at - 4, style: `stroke:${s.color}` }));
    root.append(svg("text", { class: "end", x: edge, y: at, style: `fill:${s.color}` }, name));
  });
}

// The pointer, a finger, or the arrow keys move a cursor; the tip shows each line's nearest evaluation.
function follow(root, series, x, y, inside, width, options) {
  const cursor = svg("line", { class: "cursor", y1: inside.top, y2: inside.bottom, visibility: "hidden" });
  const dots = series.map((s) => svg("circle", { r: 4, style: `fill:${s.color}`, visibility: "hidden" }));
  root.append(cursor, ...dots);
  const stops = [...new Set(series.flatMap((s) => s.points.map((p) => x.at(p.x))))].sort((a, b) => a - b);
  let stop = -1;
  const show = (at, clientX, clientY) => {
    put(cursor, { x1: at, x2: at, visibility: "visible" }, []);
    const rows = series.map((s, i) => {
      const near = s.points.reduce((a, b) => (a && Math.abs(x.at(a.x) - at) <= Math.abs(x.at(b.x) - at) ? a : b), null);
      if (!near) return null;
      put(dots[i], { cx: x.at(near.x), cy: y.at(near.y), visibility: "visible" }, []);
      const mark = tag("span", { class: "swatch", style: `color:${s.color}` });
      return tag("tr", {}, tag("td", {}, mark, s.label), tag("td", {}, options.yFormat(near.y)), tag("td", {}, options.xFormat(near.x)));
    });
    showTip(tag("table", {}, ...rows.filter(Boolean)), clientX, clientY);
  };
  const hide = () => {
    for (const node of [cursor, ...dots]) node.setAttribute("visibility", "hidden");
    hideTip();
  };
  root.addEventListener("pointermove", (event) => {
    const box = root.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * width;
    if (at >= inside.left - 5 && at <= inside.right + 5) show(at, event.clientX, event.clientY);
  });
  root.addEventListener("pointerleave", hide);
  root.addEventListener("blur", hide);
  root.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    stop = Math.min(Math.max(stop + move, 0), stops.length - 1);
    const box = root.getBoundingClientRect();
    show(stops[stop], box.left + (stops[stop] / width) * box.width, box.top + 60);
  });
}

function showTip(content, clientX, clientY) {
  const tip = document.getElementById("tip");
  tip.replaceChildren(content);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, clientX + box.width + 24 > innerWidth ? clientX - box.width - 14 : clientX + 14)}px`;
  tip.style.top = `${Math.max(6, Math.min(clientY + 14, innerHeight - box.height - 6))}px`;
}
function hideTip() { document.getElementById("tip").hidden = true; }

// --- a dot per strategy: time against the last value, with the spread over the seeds

// dots: {label, color, x: {mean, spread}, y: {mean, spread}}
function scatterChart(host, dots, xLabel, yLabel) {
  const shown = dots.filter((d) => d.x.mean != null && d.y.mean != null);
  host.replaceChildren();
  if (!shown.length) {
    host.append(tag("p", { class: "hint" }, "Nothing to show: no run has both numbers."));
    return;
  }
  const width = Math.max(280, host.clientWidth || 900), height = width < 520 ? 280 : 340;
  const inside = { left: MARGIN.left, right: width - 24, top: MARGIN.top + 8, bottom: height - MARGIN.bottom };
  const ends = (k) => [k.mean - (k.spread ?? 0), k.mean + (k.spread ?? 0)];
  const x = scale([0, ...shown.flatMap((d) => ends(d.x)), 1.05 * Math.max(...shown.map((d) => d.x.mean))], false, inside.left, inside.right, width / 90);
  const y = scale(shown.flatMap((d) => ends(d.y)), false, inside.bottom - 10, inside.top + 10, 5);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${yLabel} against ${xLabel}` });
  for (const t of y.ticks) {
    root.append(svg("line", { class: "grid", x1: inside.left, x2: inside.right, y1: y.at(t), y2: y.at(t) }));
    root.append(svg("text", { x: inside.left - 8, y: y.at(t) + 4, "text-anchor": "end" }, plain(t)));
  }
  for (const t of x.ticks) root.append(svg("text", { x: x.at(t), y: inside.bottom + 18, "text-anchor": "middle" }, seconds(t)));
  root.append(svg("line", { class: "axis", x1: inside.left, x2: inside.right, y1: inside.bottom, y2: inside.bottom }));
  root.append(svg("text", { x: (inside.left + inside.right) / 2, y: height - 4, "text-anchor": "middle" }, xLabel));
  root.append(svg("text", { x: inside.left, y: 10 }, yLabel));
  const taken = [];
  for (const d of [...shown].sort((a, b) => y.at(a.y.mean) - y.at(b.y.mean))) {
    const cx = x.at(d.x.mean), cy = y.at(d.y.mean), style = `stroke:${d.color}`;
    if (d.x.spread) root.append(svg("line", { class: "spread", x1: x.at(ends(d.x)[0]), x2: x.at(ends(d.x)[1]), y1: cy, y2: cy, style }));
    if (d.y.spread) root.append(svg("line", { class: "spread", x1: cx, x2: cx, y1: y.at(ends(d.y)[0]), y2: y.at(ends(d.y)[1]), style }));
    root.append(svg("circle", { cx, cy, r: 5, style: `fill:${d.color}`, "data-label": d.label }, svg("title", {}, `${d.label}: ${seconds(d.x.mean)}, ${plain(d.y.mean)}`)));
    const length = 8 * d.label.length, left = cx > inside.right - length, from = left ? cx - 8 - length : cx + 8;
    const covers = (t, y) => Math.abs(t.y - y) < 13 && t.from < from + length && from < t.from + t.length;
    let at = cy - 8;
    while (taken.some((t) => covers(t, at))) at += 13;
    taken.push({ from, length, y: at });
    root.append(svg("text", { x: left ? cx - 8 : cx + 8, y: at, "text-anchor": left ? "end" : "start" }, d.label));
  }
  host.append(root);
}

// --- the time of a worker in two bars: computing and waiting, and beneath them communication

function splitRow(worker, longest) {
  const widthOf = (value) => `width:${((100 * value) / (longest || 1)).toFixed(2)}%`;
  const label = `worker ${worker.rank}: computing ${seconds(worker.compute_s)}, waiting ${seconds(worker.wait_s)}, communicating ${seconds(worker.communicate_s)}`;
  const workBar = tag("b", {}, tag("i", { class: "computing", style: widthOf(worker.compute_s) }), tag("i", { class: "waiting", style: widthOf(worker.wait_s) }));
  const communicationBar = tag("b", {}, tag("i", { class: "communicating", style: widthOf(worker.communicate_s) }));
  const bars = tag("span", { class: "bars", role: "img", "aria-label": label, title: label }, workBar, communicationBar);
  const total = worker.compute_s + worker.wait_s;
  return tag("div", { class: "worker" }, tag("span", {}, `rank ${worker.rank}`), bars, tag("span", {}, seconds(total)));
}

// --- the timeline: one row per worker, with thin rows for its messages beneath

const THIN = { communicating: [21, 4], push: [21, 3], pull: [25, 3], combine: [21, 4] };
const SPANS = { computing: "computing", waiting: "waiting", communicating: "communicating", push: "pushing to the server",
  pull: "pulling from the server", combine: "summing at the server", evaluating: "evaluating" };
const spanName = (kind) => (kind === "front" || kind === "back" ? "communicating" : kind);
function timelineKey(timeline) {
  const drawn = new Set(timeline.workers.flat().map(([kind]) => spanName(kind)));
  return Object.entries(SPANS).filter(([name]) => drawn.has(name)).map(([name, text]) => tag("span", {}, tag("i", { class: name }), text));
}
function timelineChart(host, timeline, zoom) {
  const row = 30, left = 48, foot = 24;
  const width = Math.max(280, host.clientWidth || 900) * zoom;
  const height = timeline.workers.length * row + foot;
  const at = (s) => left + (s / timeline.seconds) * (width - left - 10);
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Timeline of ${timeline.workers.length} workers` });
  for (const t of ticksLinear(0, timeline.seconds, width / 120)) {
    root.append(svg("line", { class: "grid", x1: at(t), x2: at(t), y1: 0, y2: height - foot }));
    root.append(svg("text", { x: at(t), y: height - 8, "text-anchor": t ? "middle" : "start" }, t ? seconds(t) : "0"));
  }
  timeline.workers.forEach((spans, rank) => {
    const top = rank * row;
    root.append(svg("text", { x: 0, y: top + 16 }, `rank ${rank}`));
    for (const [kind, from, to] of spans) {
      const name = spanName(kind), [down, tall] = THIN[name] ?? [5, 14];
      const box = { x: at(from).toFixed(2), y: top + down, width: Math.max(0.4, at(to) - at(from)).toFixed(2), height: tall };
      root.append(svg("rect", { class: name, ...box }, svg("title", {}, `${SPANS[name] ?? name} ${seconds(to - from)}`)));
    }
  });
  host.replaceChildren(root);
}

// --- synchronization decisions: one row per strategy, one bar per bin of steps

function decisionsChart(host, groups) {
  const row = 46, left = 10, foot = 38, top = 4;
  const width = Math.max(280, host.clientWidth || 900), height = top + groups.length * row + foot;
  const longest = Math.max(...groups.map((g) => g.decisions.steps), 1);
  const at = (s) => left + (s / longest) * (width - left - 12);
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Fraction of synchronized steps over time" });
  groups.forEach((group, i) => {
    const base = top + (i + 1) * row, { steps, width: each, synced } = group.decisions;
    const fraction = synced.reduce((a, b) => a + b, 0) / Math.max(1, steps);
    root.append(svg("text", { x: left, y: base - 32 }, `${group.label}: ${percent(fraction)} of ${whole(steps)} steps`));
    root.append(svg("line", { class: "grid", x1: left, x2: at(longest), y1: base, y2: base }));
    synced.forEach((count, k) => {
      const from = k * each, to = Math.min(steps, from + each);
      const tall = (24 * count) / Math.max(1, to - from);
      const gap = at(to) - at(from) > 4 ? 1 : 0;
      if (tall) root.append(svg("rect", { x: at(from), y: base - tall, width: Math.max(0.5, at(to) - at(from) - gap), height: tall, style: `fill:${group.color}` },
        svg("title", {}, `steps ${from + 1} to ${to}: ${count} synchronized`)));
    });
  });
  for (const t of ticksLinear(0, longest, width / 110))
    root.append(svg("text", { x: at(t), y: height - 22, "text-anchor": t ? (at(t) > width - 24 ? "end" : "middle") : "start" }, whole(t)));
  root.append(svg("text", { x: width / 2, y: height - 5, "text-anchor": "middle" }, "step"));
  host.replaceChildren(root);
}

// --- staleness: the fraction of reads by their staleness

function histogram(host, counts, color) {
  const total = counts.reduce((sum, [, n]) => sum + n, 0), last = counts[counts.length - 1][0];
  const width = Math.max(240, host.clientWidth || 320), height = 130, left = 38, base = height - 22;
  const each = Math.min(40, (width - left) / (last + 1));
  const most = Math.max(...counts.map(([, n]) => n / total));
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": counts.map(([k, n]) => `${k} steps stale: ${percent(n / total)}`).join(", ") });
  for (const t of ticksLinear(0, most, 3)) {
    const y = base - (t / most) * (base - 10);
    root.append(svg("line", { class: "grid", x1: left, x2: width, y1: y, y2: y }), svg("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, percent(t)));
  }
  for (const [behind, n] of counts) {
    const tall = ((n / total) * (base - 10)) / most;
    root.append(svg("rect", { x: left + behind * each + 1, y: base - tall, width: Math.max(1, each - 2), height: tall, style: `fill:${color}` },
      svg("title", {}, `${behind} steps stale: ${n} reads, ${percent(n / total)}`)));
  }
  const every = Math.ceil(26 / each);
  for (let k = 0; k <= last; k += every) root.append(svg("text", { x: left + (k + 0.5) * each, y: height - 6, "text-anchor": "middle" }, String(k)));
  host.append(root);
}

// --- a chart as a file of its own, with the colours of the page and a legend

function standalone(root, series) {
  const copy = root.cloneNode(true), originals = [root, ...root.querySelectorAll("*")];
  const [, , width, height] = root.getAttribute("viewBox").split(" ").map(Number);
  [copy, ...copy.querySelectorAll("*")].forEach((node, i) => {
    const style = getComputedStyle(originals[i]);
    const styles = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size"].map((name) => `${name}:${style.getPropertyValue(name)}`);
    node.setAttribute("style", originals[i].getAttribute("visibility") === "hidden" ? "display:none" : styles.join(";"));
  });
  const ink = getComputedStyle(document.body).color, paper = getComputedStyle(document.documentElement).backgroundColor;
  let left = MARGIN.left;
  for (const s of series) {
    const line = root.querySelector(`.line[data-label="${CSS.escape(s.label)}"]`);
    copy.append(svg("line", { x1: left, x2: left + 22, y1: height + 12, y2: height + 12, style: `stroke:${getComputedStyle(line).stroke};stroke-width:2.2`, "stroke-dasharray": s.dash }));
    copy.append(svg("text", { x: left + 28, y: height + 16, style: `fill:${ink};font-size:12px` }, s.label));
    left += 50 + 7.5 * s.label.length;
  }
  const wide = Math.max(width, left);
  copy.prepend(svg("rect", { width: wide, height: height + 26, style: `fill:${paper}` }));
  for (const name of ["class", "tabindex"]) copy.removeAttribute(name);
  put(copy, { xmlns: SVG, viewBox: `0 0 ${wide} ${height + 26}`, width: wide, height: height + 26, style: "font-family:system-ui,sans-serif" }, []);
  return new XMLSerializer().serializeToString(copy);
}
