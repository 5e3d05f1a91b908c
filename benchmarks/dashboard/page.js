"use strict";
// The page in four parts: what there is, what is chosen, charts, tables. Nothing is fetched; the state is in the address.

// ---- what there is --------------------------------------------------------------------------------------------------

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const BLANK = { recipe: "", detail: "", note: "", size: [] };

function asRow(row, version = null) {
  const whole = { ...BLANK, ...row, ...data.runs[row.run], version };
  return { ...whole, size: whole.size.length ? `[${whole.size.join(", ")}]` : "", sizes: whole.size };
}

const ROWS = data.rows.map((row) => asRow(row));
const PAST = data.versions.flatMap((version, i) => version.rows.map((row) => asRow(row, i)));

const KINDS = { speed: "speed", conformance: "conformance", other: "everything else" };
const FACETS = {
  op: "Op", format: "Format", library: "Library", machine: "Device", size: "Size", dtype: "Dtype", record: "Record",
};
const FASTEST = "the fastest of mxref";

/** What a row is under a facet: one value, but a product's formats are several. */
function under(row, facet) {
  return facet === "format" ? row.format.split(" ") : row[facet] === "" ? [] : [row[facet]];
}

// A row's numbers, of which a measure is one.
const ofCeiling = (row) => (row.values.ceiling_ms ? row.values.ceiling_ms / row.values.ms : null);
const shareOf = (row) => (ofCeiling(row) < 0.1 ? String(Number(ofCeiling(row).toPrecision(2))) : ofCeiling(row).toFixed(2));

/** What a row did in its time, and the unit of its rate: bytes, or operations where it has no bytes or they are asked for. */
function workOf(row, measure) {
  const { moved_bytes: bytes, flops } = row.values;
  if (flops && (!bytes || measure === "operations")) return [flops, "FLOP/s"];
  return bytes ? [bytes, "B/s"] : [null, "s"];
}

/** The number that a chart shows of a row, in units of one; null where there is none. */
function measured(row, measure, ms = row.values.ms) {
  if (!ms) return null;
  if (measure === "share") return row.values.ceiling_ms ? row.values.ceiling_ms / ms : null;
  const [work] = workOf(row, measure);
  return measure === "time" || !work ? ms / 1e3 : (work / ms) * 1e3;
}

function written(value, unit) {
  if (value === null || value === undefined) return "";
  if (value === 0 || (unit === "" && Number.isInteger(value))) return `${value} ${unit}`.trim();
  if (unit === "") return value.toPrecision(3).replace(/e.*/, (e) => ` × 10^${Number(e.slice(1))}`);
  const steps = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""], [1e-3, "m"], [1e-6, "µ"], [1e-9, "n"]];
  const [step, prefix] = steps.find(([size]) => value >= size * 0.9995) || [1, ""];
  return `${Number((value / step).toPrecision(3))} ${prefix}${unit}`;
}

const unitFor = (measure, row) => (measure === "share" ? "" : measure === "time" ? "s" : workOf(row, measure)[1]);

function grouped(rows, key) {
  const groups = new Map();
  for (const row of rows) {
    const name = JSON.stringify(key(row));
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(row);
  }
  return [...groups.values()];
}

// ---- what is chosen -------------------------------------------------------------------------------------------------

const DEFAULTS = { show: "speed", measure: "throughput", baseline: FASTEST, sort: "" };
let state = readState();

function readState() {
  const given = new URLSearchParams(location.hash.slice(1));
  const read = { ...DEFAULTS, all: new Set(given.getAll("all")) };
  for (const name of Object.keys(DEFAULTS)) if (given.has(name)) read[name] = given.get(name);
  if (!(read.show in KINDS)) read.show = DEFAULTS.show;
  if (![...$("measure").options].some((option) => option.value === read.measure)) read.measure = DEFAULTS.measure;
  for (const facet in FACETS) read[facet] = new Set(given.getAll(facet));
  return read;
}

function writeState() {
  const params = new URLSearchParams();
  for (const name of Object.keys(DEFAULTS)) if (state[name] !== DEFAULTS[name]) params.set(name, state[name]);
  for (const name of [...Object.keys(FACETS), "all"]) for (const value of state[name]) params.append(name, value);
  window.history.replaceState(null, "", `#${params}`);
}

const HAS = Object.fromEntries(
  Object.keys(KINDS).map((kind) => [kind, Object.keys(FACETS).filter((f) => ROWS.some((row) => row.kind === kind && under(row, f).length))]),
);

/** Whether a row passes the filters; what no row of its kind has, as conformance has no size, does not filter it. */
function chosen(row) {
  return HAS[row.kind].every((facet) => !state[facet].size || under(row, facet).some((value) => state[facet].has(value)));
}

const ofKind = () => ROWS.filter((row) => row.kind === state.show);

function change(changes) {
  Object.assign(state, changes);
  writeState();
  render();
}

// ---- making elements ------------------------------------------------------------------------------------------------

function add(parent, tag, attributes = {}, ...children) {
  const svg = parent instanceof SVGElement || tag === "svg";
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  parent.append(element);
  return element;
}

/** Choices of the form: made anew when another kind of records is shown. */
function makeFilters() {
  $("show").querySelectorAll("label").forEach((label) => label.remove());
  for (const [kind, name] of Object.entries(KINDS)) {
    const label = add($("show"), "label");
    const onchange = () => change({ show: kind, sort: "" });
    add(label, "input", { type: "radio", name: "show", value: kind, onchange }).checked = state.show === kind;
    label.append(` ${name}`);
  }
  $("facets").replaceChildren();
  for (const [facet, title] of Object.entries(FACETS)) {
    const counts = new Map();
    for (const row of ofKind()) for (const value of under(row, facet)) counts.set(value, (counts.get(value) || 0) + 1);
    if (!counts.size) continue;
    for (const value of state[facet]) if (!counts.has(value)) counts.set(value, 0);
    const details = add($("facets"), "details", { class: "facet", id: `facet-${facet}` });
    add(details, "summary");
    const field = add(details, "fieldset");
    add(field, "legend", {}, title);
    const sorted = [...counts].sort(([a], [b]) => (facet === "size" ? 0 : (a > b) - (a < b)));
    for (const [value, count] of sorted) {
      const label = add(field, "label");
      const onchange = (event) => choose(facet, value, event.target.checked);
      add(label, "input", { type: "checkbox", value, name: facet, onchange }).checked = state[facet].has(value);
      label.append(value === "-" ? "- (none)" : value);
      add(label, "span", { class: "count", "aria-label": `${count} rows` }, String(count));
    }
    details.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !details.open) return;
      details.open = false;
      details.querySelector("summary").focus();
    });
    details.addEventListener("focusout", (event) => {
      if (event.relatedTarget && !details.contains(event.relatedTarget)) details.open = false;
    });
    summarize(facet);
  }
  $("measure").value = state.measure;
  const libraries = [...new Set(ROWS.filter((row) => row.kind === "speed").map((row) => row.library))];
  $("baseline").replaceChildren();
  for (const name of [FASTEST, ...libraries]) add($("baseline"), "option", { value: name }, name);
  $("baseline").value = libraries.includes(state.baseline) ? state.baseline : FASTEST;
  for (const id of ["measure", "baseline"]) $(id).disabled = state.show !== "speed";
}

function choose(facet, value, on) {
  const values = new Set(state[facet]);
  if (on) values.add(value);
  else values.delete(value);
  change({ [facet]: values });
}

function summarize(facet) {
  const details = $(`facet-${facet}`);
  if (!details) return;
  const [count, values] = [details.querySelectorAll("input").length, [...state[facet]]];
  const what = !values.length ? "all" : values.length === 1 ? values[0] : `${values.length} of ${count}`;
  details.querySelector("summary").textContent = `${FACETS[facet]}: ${what}`;
  details.classList.toggle("chosen", values.length > 0);
}

// ---- charts ---------------------------------------------------------------------------------------------------------

const SHOWN = 4; // charts of a device in a section, until more are asked for

/** The machine of the rows of a chart. Rows of two machines are refused: their numbers cannot be compared. */
function oneMachine(rows) {
  const machines = [...new Set(rows.map((row) => row.machine))];
  if (machines.length !== 1) throw new Error(`refused: one chart of ${machines.length} machines: ${machines.join("; ")}`);
  return machines[0];
}

const named = (row) => [row.format === "-" ? "" : row.format, row.library, row.recipe].filter(Boolean).join(" · ");
const LIBRARIES = [...new Set(ROWS.filter((row) => row.kind === "speed").map((row) => row.library))];
const [OURS, THEIRS] = [LIBRARIES.filter((name) => name.startsWith("mxref")), LIBRARIES.filter((name) => !name.startsWith("mxref"))];
const colourOf = ({ library }) =>
  OURS.includes(library) ? `c${[0, 2, 5][OURS.indexOf(library) % 3]}` : `c${[1, 3, 4, 6, 7][THEIRS.indexOf(library) % 5]}`;
const textWidth = (text, size = 12) => text.length * size * 0.56;
let figures = 0;

/** The frame that all charts have: caption, where the numbers come from, and an empty picture with its description. */
function frame(parent, title, rows, description, width, height) {
  const machine = oneMachine(rows);
  const id = `chart-${++figures}`;
  const figure = add(parent, "figure", { "data-machine": machine });
  const caption = add(figure, "figcaption", {}, title);
  add(caption, "small", {}, [machine, ...new Set(rows.map((row) => row.record))].join(" · "));
  const svg = add(figure, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-labelledby": `${id}-t ${id}-d` });
  add(svg, "title", { id: `${id}-t` }, `${title}, ${machine}`);
  add(svg, "desc", { id: `${id}-d` }, description);
  return { figure, svg };
}

function widthOf(parent) {
  const columns = getComputedStyle(parent).gridTemplateColumns.split(" ").map(parseFloat);
  return Math.max(240, Math.round((columns[0] || parent.clientWidth || 400) - 28));
}

/** Bars from zero, or from one on a logarithmic scale; each with a mark for its ceiling where it has one. */
function barChart(parent, title, bars, { logarithmic = false, below = "" } = {}) {
  const rows = bars.map((bar) => bar.row);
  const width = widthOf(parent);
  const [labels, texts] = [bars.map((bar) => named(bar.row)), bars.map((bar) => bar.text)];
  const longest = Math.max(...labels.map((label) => textWidth(label)));
  const [above, right] = [longest > 0.42 * width, Math.max(...texts.map((text) => textWidth(text))) + 8];
  const [left, step, top] = [above ? 2 : longest + 8, above ? 38 : 22, 4];
  const height = top + step * bars.length + 4;
  const span = width - left - right;
  const values = bars.flatMap((bar) => [bar.value, bar.ceiling]).filter((value) => value);
  const [low, high] = logarithmic ? [Math.min(1, ...values), Math.max(1, ...values)] : [0, Math.max(...values, 1e-30)];
  const at = (value) =>
    left + span * (!logarithmic ? value / high : high === low ? 0.5 : Math.log(value / low) / Math.log(high / low));
  const description = bars.map((bar, i) => `${labels[i]}: ${bar.text}`).join("; ");
  const { figure, svg } = frame(parent, title, rows, [description, below].filter(Boolean).join("; "), width, height);
  if (below) add(figure, "p", { class: "below" }, below);
  if (logarithmic) add(svg, "line", { class: "ceiling", x1: at(1), x2: at(1), y1: 0, y2: height });
  bars.forEach((bar, i) => {
    const y = top + i * step + (above ? 18 : 0);
    const group = add(svg, "g", { class: "bar", "data-machine": bar.row.machine });
    add(group, "title", {}, `${labels[i]}: ${bar.text}${bar.row.note ? ` (${bar.row.note})` : ""}`);
    const place = above ? { x: left, y: y - 5 } : { x: left - 8, y: y + 13, "text-anchor": "end" };
    add(group, "text", place, labels[i]);
    if (bar.value === null) return void add(group, "text", { x: left, y: y + 12, class: "quiet" }, bar.text);
    const [from, to] = logarithmic ? [at(1), at(bar.value)].sort((a, b) => a - b) : [left, at(bar.value)];
    add(group, "rect", { class: colourOf(bar.row), x: from, y: y + 2, width: Math.max(1.5, to - from), height: 13, rx: 2 });
    if (bar.ceiling) add(group, "line", { class: "ceiling", x1: at(bar.ceiling), x2: at(bar.ceiling), y1: y - 1, y2: y + 18 });
    add(group, "text", { x: width, y: y + 13, "text-anchor": "end", class: "quiet" }, bar.text);
  });
}

const MARKS = ["M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0", "M-4,-4h8v8h-8z", "M0,-5L5,4H-5z", "M0,-5L5,0L0,5L-5,0z"];

/** Lines through points at named places; `series`: label, and points with place, value, ceiling and row. */
function lineChart(parent, title, places, series, unit) {
  const points = series.flatMap((line) => line.points);
  const width = widthOf(parent);
  const values = points.flatMap((point) => [point.value, point.ceiling]).filter((value) => value !== null);
  const [least, high] = [Math.min(...values), Math.max(...values)];
  const logarithmic = least > 0 && high / least > 20;
  const low = logarithmic ? least : 0;
  const ticks = ticksOf(low, high, logarithmic);
  const longest = Math.max(...places.map((place) => textWidth(place, 11)));
  const [scale, right] = [Math.max(...ticks.map((tick) => textWidth(written(tick, unit), 11))) + 8, 14];
  const tilted = (places.length > 2 ? 1.5 : 2) * longest + 8 > (width - scale - right) / Math.max(1, places.length - 1);
  const [left, bottom] = tilted ? [Math.max(scale, 0.8 * longest), 0.62 * longest + 18] : [scale, 22];
  const [top, plot] = [10, 190];
  const [first, last] = [Math.min(low, ticks[0]), Math.max(high, ticks.at(-1))];
  const y = (value) =>
    top + plot * (1 - (logarithmic ? Math.log(value / first) / Math.log(last / first) : (value - first) / (last - first)));
  const x = (place) => left + (places.length === 1 ? 0.5 : place / (places.length - 1)) * (width - left - right);
  const told = series.map((line) => `${line.label}: ${line.points.map((p) => `${places[p.place]} ${written(p.value, unit)}`).join(", ")}`);
  const { figure, svg } = frame(parent, title, points.map((point) => point.row), told.join("; "), width, top + plot + bottom);
  for (const tick of ticks) {
    add(svg, "line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) });
    add(svg, "text", { class: "quiet", x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, written(tick, unit));
  }
  places.forEach((place, i) => {
    const at = [x(i), top + plot + 16];
    const turn = tilted ? { "text-anchor": "end", transform: `rotate(-38 ${at.join(" ")})` } : { "text-anchor": i === 0 ? "start" : i === places.length - 1 ? "end" : "middle" };
    add(svg, "text", { class: "quiet", x: at[0], y: at[1], ...turn }, place);
  });
  const ceilings = new Set(series.map((line) => line.points.map((p) => (p.ceiling ? `${x(p.place)},${y(p.ceiling)}` : "")).filter(Boolean).join(" ")));
  for (const ceiling of ceilings) if (ceiling) add(svg, "polyline", { class: "dashed", points: ceiling });
  const legend = add(figure, "ul", { class: "legend" });
  series.forEach((line, i) => {
    oneMachine(line.points.map((point) => point.row));
    const [colour, mark] = [`c${i % 8}`, MARKS[(i + Math.floor(i / 8)) % MARKS.length]];
    const group = add(svg, "g", { class: "series", "data-machine": line.points[0].row.machine });
    add(group, "polyline", { class: `line ${colour}`, style: "fill:none", points: line.points.map((p) => `${x(p.place)},${y(p.value)}`).join(" ") });
    for (const point of line.points) {
      const dot = add(group, "path", { class: colour, d: mark, transform: `translate(${x(point.place)} ${y(point.value)})` });
      add(dot, "title", {}, `${line.label}, ${places[point.place]}: ${written(point.value, unit)}, ${point.row.versions}`);
    }
    const item = add(legend, "li");
    const swatch = add(item, "svg", { viewBox: "-13 -6 26 12", "aria-hidden": "true" });
    add(swatch, "line", { class: `line ${colour}`, x1: -13, x2: 13, y1: 0, y2: 0 });
    add(swatch, "path", { class: colour, d: mark });
    item.append(line.label);
  });
  if ([...ceilings].some(Boolean)) add(legend, "li", {}, "- - - ceiling");
}

function ticksOf(low, high, logarithmic) {
  if (logarithmic) {
    const [from, to] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const every = Math.ceil((to - from) / 6);
    return Array.from({ length: Math.floor((to - from) / every) + 1 }, (_, i) => 10 ** (from + i * every));
  }
  const raw = (high - low || high || 1) / 4;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((size) => size * power >= raw) * power;
  return Array.from({ length: Math.ceil(high / step) + 1 }, (_, i) => i * step);
}

/** The charts of a section, machine by machine: the first few, and a button for the rest. `charts`: rows, and how to draw. */
function drawAll(id, charts, none) {
  const parent = $(id).querySelector(".charted");
  parent.replaceChildren();
  if (!charts.length) return void add(parent, "p", {}, none);
  const machines = grouped(charts, (chart) => oneMachine(chart.rows)).sort((a, b) => rowCount(b) - rowCount(a));
  for (const own of machines) {
    add(parent, "h3", {}, oneMachine(own[0].rows));
    const grid = add(parent, "div", { class: "charts" });
    for (const chart of own.slice(0, state.all.has(id) ? own.length : SHOWN)) chart.draw(grid);
  }
  const [most, count] = [Math.max(...machines.map((own) => own.length)), charts.length];
  if (most <= SHOWN) return;
  const toggle = () => {
    const all = new Set(state.all);
    if (!all.delete(id)) all.add(id);
    change({ all });
    $(id).querySelector(".charted > button").focus();
  };
  const text = state.all.has(id) ? `Show the first ${SHOWN} charts of each device` : `Show all ${count} charts`;
  add(parent, "button", { type: "button", onclick: toggle }, text);
}

const rowCount = (charts) => charts.reduce((sum, chart) => sum + chart.rows.length, 0);
const titleOf = (row, ...rest) => [row.op, row.dtype === "-" ? "" : row.dtype, ...rest, row.detail].filter(Boolean).join(", ");
const most = (a, b) => b.length - a.length;

function drawThroughput(rows) {
  const panels = grouped(rows, (r) => [r.machine, r.record, r.op, r.dtype, r.size, r.detail, unitFor(state.measure, r)]);
  const withCeilings = (panel) => panel.some((row) => row.values.ceiling);
  panels.sort((a, b) => withCeilings(b) - withCeilings(a) || most(a, b));
  const charts = panels.map((panel) => {
    const ceilings = new Set(panel.map((row) => row.values.ceiling));
    const bars = panel.filter((row) => !ceilings.has(row.library)).map((row) => {
      const value = measured(row, state.measure);
      const unit = unitFor(state.measure, row);
      const share = state.measure !== "share" && ofCeiling(row) ? `, ${shareOf(row)}` : "";
      const ceiling = row.values.ceiling_ms ? measured(row, state.measure, row.values.ceiling_ms) : null;
      return { row, value, ceiling, text: value === null ? row.note || "no number" : written(value, unit) + share };
    });
    const way = unitFor(state.measure, panel[0]) === "s" ? 1 : -1;
    bars.sort((a, b) => (a.value === null) - (b.value === null) || way * (a.value - b.value));
    const draw = (parent) => barChart(parent, titleOf(panel[0], panel[0].size), bars);
    return { rows: bars.map((bar) => bar.row), draw };
  });
  drawAll("throughput", charts.filter((chart) => chart.rows.length), "No row with a time passes the filters.");
}

function drawRatios(rows) {
  const ceilings = new Map(grouped(rows, (row) => row.record).map((g) => [g[0].record, new Set(g.map((row) => row.values.ceiling))]));
  const timed = rows.filter((row) => row.values.ms && !ceilings.get(row.record).has(row.library));
  const panels = grouped(timed, (r) => [r.machine, r.record, r.op, r.dtype, r.size, r.detail]).map((panel) =>
    grouped(panel, (row) => row.format).flatMap((group) => {
      const fits = (row) => (state.baseline === FASTEST ? row.library.startsWith("mxref") : row.library === state.baseline);
      const base = group.filter(fits).sort((a, b) => a.values.ms - b.values.ms)[0];
      if (!base || new Set(group.map((row) => row.library)).size < 2) return [];
      return group.filter((row) => row !== base).map((row) => {
        const value = base.values.ms / row.values.ms;
        return { row, value, base, text: `${written(value, "")} ×` };
      });
    }),
  );
  const charts = panels.filter((bars) => bars.length).sort(most).map((bars) => ({
    rows: bars.map((bar) => bar.row),
    draw: (parent) => {
      bars.sort((a, b) => b.value - a.value);
      const libraries = new Set(bars.map((bar) => named({ ...bar.base, format: "-" })));
      const bases = libraries.size === 1 ? [...libraries] : [...new Set(bars.map((bar) => named(bar.base)))];
      barChart(parent, titleOf(bars[0].row, bars[0].row.size), bars, { logarithmic: true, below: `1 × is ${bases.join("; ")}` });
    },
  }));
  drawAll("ratios", charts, "No two libraries of a run do the same op in the same format here.");
}

const seriesOf = (rows) => grouped(rows, (row) => [row.format, row.library, row.recipe]);

function drawSweep(rows) {
  const timed = rows.filter((row) => measured(row, state.measure) !== null);
  const panels = grouped(timed, (r) => [r.machine, r.record, r.op, r.dtype, r.detail, unitFor(state.measure, r)]);
  const charts = panels.filter((panel) => new Set(panel.map((row) => row.size)).size > 1).sort(most).map((panel) => {
    const counts = new Map(panel.map((row) => [row.size, row.sizes.reduce((a, b) => a * b, 1)]));
    const places = [...counts.keys()].sort((a, b) => counts.get(a) - counts.get(b));
    const draw = (parent) => drawLines(parent, titleOf(panel[0]), places, seriesOf(panel), (row) => places.indexOf(row.size));
    return { rows: panel, draw };
  });
  drawAll("sweep", charts, "No op of a run has several sizes here.");
}

function drawLines(parent, title, places, lines, placeOf) {
  const unit = unitFor(state.measure, lines[0][0]);
  const series = lines.map((rows) => ({
    label: named(rows[0]),
    points: rows.map((row) => ({
      row,
      place: placeOf(row),
      value: measured(row, state.measure),
      ceiling: row.values.ceiling_ms ? measured(row, state.measure, row.values.ceiling_ms) : null,
    })).sort((a, b) => a.place - b.place),
  }));
  lineChart(parent, title, places, series, unit);
}

function drawHistory() {
  const note = ["Each point is a committed version of a record, in the order of commits."];
  if (data.missing) note.push(`There is nothing to draw: ${data.missing}.`);
  if (data.unread.length) note.push(`Not drawn, since their form is no longer known: ${data.unread.map((why) => why.split(":")[0]).join(", ")}.`);
  $("history-note").textContent = note.join(" ");
  const rows = PAST.filter((row) => row.kind === state.show && chosen(row));
  const charts = state.show === "speed" ? historyOfSpeed(rows) : historyOfConformance(rows);
  drawAll("history", charts, data.missing ? "" : "Nothing here has been measured at two commits.");
}

const commitOf = (version) => `${data.versions[version].commit || "not committed"} ${data.versions[version].committed.slice(5, 10)}`;

function historyOfSpeed(rows) {
  const timed = rows.filter((row) => measured(row, state.measure) !== null && row.format + row.library !== "-torch copy");
  const panels = grouped(timed, (r) => [r.machine, r.op, r.dtype, r.size, r.detail, unitFor(state.measure, r)]);
  return panels.flatMap((panel) => {
    const lines = seriesOf(panel).filter((line) => new Set(line.map((row) => row.version)).size > 1);
    if (!lines.length) return [];
    const versions = [...new Set(lines.flat().map((row) => row.version))].sort((a, b) => a - b);
    const places = versions.map(commitOf);
    const title = titleOf(panel[0], panel[0].size);
    return [{ rows: lines.flat(), draw: (parent) => drawLines(parent, title, places, lines, (row) => versions.indexOf(row.version)) }];
  }).sort((a, b) => b.rows.length - a.rows.length);
}

function historyOfConformance(rows) {
  return grouped(rows, (row) => [row.machine, row.library]).flatMap((panel) => {
    const versions = [...new Set(panel.map((row) => row.version))].sort((a, b) => a - b);
    if (versions.length < 2) return [];
    const series = grouped(panel, (row) => row.detail).flatMap((level) =>
      ["passed", "failed", "refused"].map((outcome) => ({
        label: `${outcome}, ${level[0].detail}`,
        points: grouped(level, (row) => row.version).map((of) => ({
          row: of[0],
          place: versions.indexOf(of[0].version),
          value: of.reduce((sum, row) => sum + row.values[outcome], 0),
          ceiling: null,
        })),
      })),
    );
    const draw = (parent) => lineChart(parent, `${panel[0].library}: cases`, versions.map(commitOf), series, "");
    return [{ rows: panel, draw }];
  });
}

// ---- tables ---------------------------------------------------------------------------------------------------------

const WHERE = [["machine", (r) => r.machine], ["versions", (r) => r.versions], ["commit", (r) => r.commit], ["date", (r) => r.date], ["record", (r) => r.record]];
const WHAT = [["op", (r) => r.op], ["format", (r) => r.format], ["dtype", (r) => r.dtype], ["library", (r) => r.library], ["recipe", (r) => r.recipe], ["size", (r) => r.size], ["detail", (r) => r.detail]];
const value = (name) => [name, (row) => row.values[name]];
const baseOp = (op) => op.split(",")[0];

/** Outcomes of the same backend on the same machine in what a row of a speed is about, and the reverse. */
function casesOf(row) {
  const same = (c) => c.kind === "conformance" && [c.machine, c.library, c.op, c.format, c.dtype].join() === [row.machine, row.library, baseOp(row.op), row.format, row.dtype].join();
  const counts = ROWS.filter(same).map((c) => ["passed", "failed", "refused"].filter((k) => c.values[k]).map((k) => `${c.values[k]} ${k}`).join(", "));
  return counts.join("; ");
}

function speedsOf(rows) {
  const [c] = rows;
  const same = (r) => r.kind === "speed" && r.values.ms && [r.machine, r.library, baseOp(r.op), r.format].join() === [c.machine, c.library, c.op, c.format].join();
  return ROWS.filter(same).map((r) => {
    const number = ofCeiling(r) ? `${shareOf(r)} of ${r.values.ceiling}` : written(measured(r, "throughput"), unitFor("throughput", r));
    return `${[r.op === c.op ? "" : r.op, r.dtype, r.size].filter(Boolean).join(" ")}: ${number}`;
  });
}

function columnsOf(rows) {
  const { show } = state;
  if (show === "conformance") return [...WHAT, ...["passed", "failed", "known", "refused"].map(value), ["reasons", (r) => r.note], ...WHERE];
  if (show === "other") {
    const names = [...new Set(rows.flatMap((row) => Object.keys(row.values)))];
    return [...WHAT, ...names.map(value), ["note", (r) => r.note], ...WHERE];
  }
  return [
    ...WHAT, value("ms"),
    ["GB/s", (r) => (r.values.ms && r.values.moved_bytes ? r.values.moved_bytes / r.values.ms / 1e6 : undefined)],
    ["TFLOP/s", (r) => (r.values.ms && r.values.flops ? r.values.flops / r.values.ms / 1e9 : undefined)],
    value("ceiling"), value("ceiling_ms"), ["of the ceiling", (r) => ofCeiling(r) ?? undefined],
    value("same_bits"),
    ["conformance", casesOf], ["note", (r) => r.note], ...WHERE,
  ];
}

const WIDE = ["note", "reasons", "detail"]; // columns whose long texts are wrapped

const shown = (cell) => (typeof cell === "number" && !Number.isInteger(cell) ? String(Number(cell.toPrecision(4))) : String(cell ?? ""));

/** A table whose columns sort, and which leaves as CSV with every digit. */
function drawTable(parent, title, rows) {
  const columns = columnsOf(rows).map(([name, get]) => ({ name, cells: rows.map(get) }));
  const kept = columns.filter((column) => column.cells.some((cell) => ![undefined, null, "", "-"].includes(cell)));
  let order = rows.map((_, i) => i);
  const by = kept.find((column) => column.name === state.sort.replace("-", ""));
  if (by) {
    const [way, text] = [state.sort.startsWith("-") ? -1 : 1, (cell) => String(cell ?? "")];
    const missing = (i) => by.cells[i] === undefined;
    const after = (a, b) => (a > b) - (a < b);
    const compared = (a, b) => (typeof by.cells[a] === "number" ? by.cells[a] - by.cells[b] : after(text(by.cells[a]), text(by.cells[b])));
    order = order.sort((a, b) => missing(a) - missing(b) || way * compared(a, b));
  }
  const csv = () => [kept.map((c) => c.name), ...order.map((i) => kept.map((c) => c.cells[i]))].map((line) => line.map(quoted).join(",")).join("\r\n") + "\r\n";
  const tools = add(parent, "div", { class: "tools" });
  add(tools, "button", { type: "button", class: "copy", onclick: () => copy(csv(), `${rows.length} rows copied as CSV`) }, "Copy as CSV");
  add(tools, "button", { type: "button", class: "download", onclick: () => download(csv(), `mxref-${state.show}.csv`) }, "Download CSV");
  add(tools, "span", {}, `${rows.length} rows`);
  const region = add(parent, "div", { class: "scroll", role: "region", tabindex: "0", "aria-label": `Table: ${title}` });
  const table = add(region, "table");
  add(table, "caption", {}, title);
  const header = add(add(table, "thead"), "tr");
  for (const { name, cells } of kept) {
    const sorted = state.sort === name ? "ascending" : state.sort === `-${name}` ? "descending" : "none";
    const number = cells.some((cell) => typeof cell === "number") ? "number" : "";
    const th = add(header, "th", { scope: "col", class: number, "aria-sort": sorted });
    const mark = { ascending: " ▲", descending: " ▼", none: "" }[sorted];
    const onclick = () => {
      change({ sort: sorted === "ascending" ? `-${name}` : name });
      [...document.querySelectorAll("#rows th button")].find((b) => b.dataset.column === name && b.closest(".scroll").getAttribute("aria-label") === `Table: ${title}`)?.focus();
    };
    add(th, "button", { type: "button", onclick, "data-column": name }, name + mark);
  }
  const body = add(table, "tbody");
  for (const i of order) {
    const tr = add(body, "tr");
    for (const { name, cells } of kept) {
      const text = shown(cells[i]);
      add(tr, "td", { class: typeof cells[i] === "number" ? "number" : WIDE.includes(name) && text.length > 60 ? "wide" : "" }, text);
    }
  }
}

const quoted = (cell) => (/[",\r\n]/.test(String(cell ?? "")) ? `"${String(cell).replaceAll('"', '""')}"` : String(cell ?? ""));

async function copy(text, said) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = add(document.body, "textarea", {});
    area.value = text;
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  $("status").textContent = said;
}

function download(text, name) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  const link = add(document.body, "a", { href: url, download: name });
  link.click();
  link.remove();
  URL.revokeObjectURL(url);
}

/** Op by format by dtype: one table a record, with the reasons of refusals and the speed of the same backend. */
function drawMatrix(rows) {
  const parent = $("matrix").querySelector(".tables");
  parent.replaceChildren();
  if (!rows.length) add(parent, "p", {}, "No case passes the filters.");
  for (const record of grouped(rows, (row) => [row.record, row.machine, row.library])) {
    const title = `${record[0].library} on ${oneMachine(record)}, ${record[0].detail}, ${record[0].record}`;
    const dtypes = [...new Set(record.map((row) => row.dtype))];
    const region = add(parent, "div", { class: "scroll", role: "region", tabindex: "0", "aria-label": `Matrix: ${title}` });
    const table = add(region, "table", { class: "matrix" });
    add(table, "caption", {}, title);
    const header = add(add(table, "thead"), "tr");
    const groups = grouped(record, (row) => [row.op, row.format]);
    const timed = groups.some((group) => speedsOf(group).length);
    for (const name of ["op", "format", ...dtypes, ...(timed ? ["speed"] : [])]) add(header, "th", { scope: "col" }, name);
    const body = add(table, "tbody");
    for (const group of groups) {
      const tr = add(body, "tr");
      add(tr, "td", {}, group[0].op);
      add(tr, "td", {}, group[0].format);
      for (const dtype of dtypes) {
        const cell = add(tr, "td", { class: "cell" });
        const row = group.find((one) => one.dtype === dtype);
        if (row) outcomes(cell, row);
      }
      const cell = timed ? add(tr, "td", { class: "cell" }) : null;
      for (const speed of timed ? speedsOf(group) : []) add(cell, "span", {}, speed);
    }
  }
}

function outcomes(cell, row) {
  const marks = { passed: "✓", failed: "✗", known: "✗", refused: "–" };
  for (const [outcome, mark] of Object.entries(marks)) {
    if (!row.values[outcome]) continue;
    const kind = outcome === "known" ? "failed" : outcome;
    add(cell, "span", { class: kind }, `${mark} ${row.values[outcome]} ${outcome}`);
  }
  if (row.note) add(cell, "small", {}, row.note);
}

// ---- the page -------------------------------------------------------------------------------------------------------

function render() {
  const open = document.querySelector(".facet[open]");
  const [scrolled, focused] = [open?.querySelector("fieldset").scrollTop, document.activeElement];
  const again = focused?.closest?.(".facet, #show") && [focused.name, focused.value, focused.closest(".facet")?.id];
  makeFilters();
  if (open && $(open.id)) {
    $(open.id).open = true;
    $(open.id).querySelector("fieldset").scrollTop = scrolled;
  }
  if (again) [...document.querySelectorAll("#filters input")].find((one) => one.name === again[0] && one.value === again[1])?.focus();
  const rows = ofKind().filter((row) => chosen(row));
  const machines = [...new Set(rows.map((row) => row.machine))];
  $("status").textContent = `${rows.length} of ${ofKind().length} rows, ${machines.length} ${machines.length === 1 ? "device" : "devices"}`;
  $("machines").hidden = machines.length < 2;
  $("machines").textContent = `${machines.length} devices are shown: ${machines.join("; ")}. Their numbers cannot be compared: each has charts of its own, and no line or bar chart holds two.`;
  for (const section of document.querySelectorAll("section[data-show]")) {
    section.hidden = !section.dataset.show.split(" ").includes(state.show);
  }
  figures = 0;
  if (state.show === "speed") {
    drawThroughput(rows);
    drawRatios(rows);
    drawSweep(rows);
  }
  if (state.show === "conformance") drawMatrix(rows);
  if (state.show !== "other") drawHistory();
  const tables = $("rows").querySelector(".tables");
  tables.replaceChildren();
  if (!rows.length) add(tables, "p", {}, "No row passes the filters.");
  else if (state.show === "other") for (const group of grouped(rows, (row) => row.record)) drawTable(tables, group[0].record, group);
  else drawTable(tables, `Every row of ${KINDS[state.show]} that passes the filters`, rows);
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").value = theme;
}

function remembered() {
  try {
    return { light: "light", dark: "dark" }[localStorage.getItem("theme")] || "auto"; // the book keeps its own there too
  } catch {
    return "auto";
  }
}

$("theme").addEventListener("change", (event) => {
  setTheme(event.target.value);
  try {
    localStorage.setItem("theme", event.target.value);
  } catch {} // a page from a file may not be allowed to
});
$("measure").addEventListener("change", (event) => change({ measure: event.target.value }));
$("baseline").addEventListener("change", (event) => change({ baseline: event.target.value }));
$("clear").addEventListener("click", () => change({ ...Object.fromEntries(Object.keys(FACETS).map((facet) => [facet, new Set()])), sort: "" }));
$("link").addEventListener("click", () => copy(location.href, "link copied"));
$("skip").addEventListener("click", () => $("h-rows").focus());
document.addEventListener("click", (event) => {
  for (const open of document.querySelectorAll(".facet[open]")) if (!open.contains(event.target) && event.target.isConnected) open.open = false;
});
window.addEventListener("hashchange", () => {
  state = readState();
  render();
});
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth !== width) render();
  width = window.innerWidth;
});
setTheme(remembered());
render();
