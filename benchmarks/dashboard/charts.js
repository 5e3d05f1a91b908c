// Charts, as SVG. Each is of one machine, and has a description in words.

const SHOWN = 4; // charts of a device in a section, until more are asked for

/** The machine of the rows of a chart. Rows of two machines are refused: their numbers cannot be compared. */
function oneMachine(rows) {
  const machines = [...new Set(rows.map((row) => row.machine))];
  if (machines.length !== 1) throw new Error(`refused: one chart of ${machines.length} machines: ${machines.join("; ")}`);
  return machines[0];
}

const named = (row) => [row.format === "-" ? "" : row.format, row.library, row.recipe].filter(Boolean).join(" · ");
const LIBRARIES = [...new Set(ROWS.filter((row) => row.kind === "speed").map((row) => row.library))];
const [OURS, THEIRS] = [LIBRARIES.filter(isOurs), LIBRARIES.filter((name) => !isOurs(name))];
const colourOf = ({ library }) =>
  OURS.includes(library) ? `c${[0, 2, 5][OURS.indexOf(library) % 3]}` : `c${[1, 3, 4, 6, 7][THEIRS.indexOf(library) % 5]}`;
const pen = document.createElement("canvas").getContext("2d");
const fontFamily = getComputedStyle(document.body).fontFamily;

/** How wide a text is in the page's own font, in pixels; `weight` as CSS has it. */
function textWidth(text, size = 12, weight = 400) {
  pen.font = `${weight} ${size}px ${fontFamily}`;
  return pen.measureText(text).width;
}

let figures = 0;

/** The frame that all charts have: caption, where the numbers come from, and an empty picture with its description. */
function frame(parent, title, rows, description, width, height) {
  const machine = oneMachine(rows);
  const id = `chart-${++figures}`;
  const figure = add(parent, "figure", { "data-machine": machine });
  const caption = add(figure, "figcaption", {}, title);
  const today = rows.filter((row) => row.version === null); // the history names its commits below
  const runs = today.map((row) => `commit ${row.commit || NOT_RECORDED}, ${row.date || `date ${NOT_RECORDED}`}`);
  const small = add(caption, "small", {}, [machine, ...new Set(rows.map((row) => row.record))].join(" · "));
  for (const run of new Set(runs)) {
    small.append(" · ");
    add(small, "span", { class: "whole" }, run);
  }
  const by = { "aria-labelledby": `${id}-t`, "aria-describedby": `${id}-d` };
  const svg = add(figure, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", ...by });
  add(svg, "title", { id: `${id}-t` }, `${title}, ${machine}`);
  add(svg, "desc", { id: `${id}-d` }, description);
  return { figure, svg };
}

function widthOf(parent) {
  const columns = getComputedStyle(parent).gridTemplateColumns.split(" ").map(parseFloat);
  return Math.max(240, Math.round((columns[0] || parent.clientWidth || 400) - 28));
}

/**
 * Bars from zero, or from one on a logarithmic scale; each with a mark for its ceiling where it has one, and marked where
 * conformance has more to say than that all passed. `head`: what the numbers at the right are; `rest`: rows without a bar.
 */
function barChart(parent, title, bars, { logarithmic = false, below = "", head = "", rest = [] } = {}) {
  const rows = bars.map((bar) => bar.row);
  const width = widthOf(parent);
  const [labels, texts] = [bars.map((bar) => named(bar.row) + markOf(bar.row)), bars.map((bar) => bar.text)];
  const longest = Math.max(...labels.map((label) => textWidth(label)));
  const beyond = bars.filter((bar) => bar.value !== null).map((bar) => textWidth(bar.text));
  const [over, right] = [longest > 0.42 * width, Math.max(0, ...beyond) + 8];
  const [left, step, top] = [over ? 2 : longest + 8, over ? 42 : 22, head ? 20 : 4];
  const beside = (i) => bars[i].value === null && textWidth(labels[i]) + textWidth(texts[i], 12, 600) + 10 < width; // on one line
  const steps = bars.map((_, i) => (beside(i) ? 22 : step));
  const tops = [top];
  for (const each of steps) tops.push(tops.at(-1) + each);
  const height = tops.at(-1) + 4;
  const values = bars.flatMap((bar) => [bar.value, bar.ceiling]).filter((value) => value);
  const [low, high] = logarithmic ? [Math.min(1, ...values), Math.max(1, ...values)] : [0, Math.max(...values, 1e-30)];
  const room = (bar) => // what its number leaves to a bar and its mark; a short bar leaves room for a long number
    bar.value === null ? width : ((width - left - textWidth(bar.text) - 8) * high) / Math.max(bar.value, bar.ceiling);
  const span = logarithmic ? width - left - right : Math.min(width - left, ...bars.map(room));
  const at = (value) =>
    left + span * (!logarithmic ? value / high : high === low ? 0.5 : Math.log(value / low) / Math.log(high / low));
  const description = bars.map((bar, i) => `${labels[i]}: ${bar.text}`).join("; ");
  const told = [head, description, ...reasonsOf(rows), below].filter(Boolean).join("; ");
  const { figure, svg } = frame(parent, title, rows, told, width, height);
  if (below) add(figure, "p", { class: "below" }, below);
  addNotes(figure, [...rows, ...rest]);
  if (head) add(svg, "text", { x: width, y: 12, "text-anchor": "end", class: "quiet" }, head);
  if (logarithmic) add(svg, "line", { class: "ceiling", x1: at(1), x2: at(1), y1: top - 4, y2: height });
  bars.forEach((bar, i) => {
    const above = over && !beside(i);
    const y = tops[i] + (above ? 19 : 0);
    const group = add(svg, "g", { class: "bar", "data-machine": bar.row.machine });
    const meant = variantOf(bar.row) ? `${variantOf(bar.row)}: ${VARIANTS[variantOf(bar.row)]}` : "";
    const more = [bar.row.note, bar.row.standing && `conformance: ${bar.row.standing.words}`, meant].filter(Boolean);
    add(group, "title", {}, [`${labels[i]}: ${bar.text}`, ...more].join("\n"));
    const place = above ? { x: left, y: y - 4 } : { x: over ? left : left - 8, y: y + 13, "text-anchor": over ? "start" : "end" };
    const squeezed = over && textWidth(labels[i]) > width - left; // a long name on a narrow screen
    const fitted = squeezed ? { textLength: width - left, lengthAdjust: "spacingAndGlyphs" } : {};
    const label = add(group, "text", { ...place, ...fitted }, named(bar.row));
    if (markOf(bar.row)) add(label, "tspan", { class: classOf(bar.row) }, markOf(bar.row));
    const nothing = failed(bar.row) ? "failed" : "quiet";
    const end = { x: width, y: y + 13, "text-anchor": "end" };
    if (bar.value === null) return void add(group, "text", { ...end, class: nothing }, bar.text);
    const [from, to] = logarithmic ? [at(1), at(bar.value)].sort((a, b) => a - b) : [left, at(bar.value)];
    const colour = isHollow(bar.row) ? `${colourOf(bar.row)} hollow` : colourOf(bar.row);
    add(group, "rect", { class: colour, x: from, y: y + 2, width: Math.max(1.5, to - from), height: 13, rx: 2 });
    if (bar.ceiling)
      add(group, "line", { class: "ceiling", x1: at(bar.ceiling), x2: at(bar.ceiling), y1: y - 1, y2: y + 18 });
    add(group, "text", { ...end, class: "quiet" }, bar.text);
  });
}

const COLOURS = 8; // c0 to c7
const [TILT, TICK_LINE] = [38, 13]; // of names below a chart: degrees, and pixels from one to the next
const DASHES = [null, "7 3", "2 3", "9 3 2 3", "5 5"];
const MARKS = ["M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0", "M-4,-4h8v8h-8z", "M0,-5L5,4H-5z", "M0,-5L5,0L0,5L-5,0z"];

/** Lines through points at named places; `series`: label, and points with place, value, ceiling and row. */
function lineChart(parent, title, places, series, unit, rest = []) {
  const points = series.flatMap((line) => line.points);
  const width = widthOf(parent);
  const values = points.flatMap((point) => [point.value, point.ceiling]).filter((value) => value !== null);
  const [least, high] = [Math.min(...values), Math.max(...values)];
  const logarithmic = least > 0 && high / least > 20;
  const low = logarithmic ? least : 0;
  const ticks = ticksOf(low, high, logarithmic);
  const longest = Math.max(...places.map((place) => textWidth(place, 11)));
  const [scale, right] = [Math.max(...ticks.map((tick) => textWidth(written(tick, unit, true), 11))) + 8, 14];
  const tilted = (places.length > 2 ? 1.5 : 2) * longest + 8 > (width - scale - right) / Math.max(1, places.length - 1);
  const [left, bottom] = tilted ? [Math.max(scale, 0.8 * longest + 8), 0.62 * longest + 18] : [scale, 22];
  const [top, plot] = [10, 190];
  const [first, last] = [Math.min(low, ticks[0]), Math.max(high, ticks.at(-1)) || 1];
  const y = (value) =>
    top + plot * (1 - (logarithmic ? Math.log(value / first) / Math.log(last / first) : (value - first) / (last - first)));
  const x = (place) => left + (places.length === 1 ? 0.5 : place / (places.length - 1)) * (width - left - right);
  const every = tilted ? Math.ceil(TICK_LINE / Math.sin((TILT * Math.PI) / 180) / (x(1) - x(0))) : 1; // from the last
  const told = series.map(
    (line) => `${line.label}: ${line.points.map((p) => `${places[p.place]} ${written(p.value, unit)}`).join(", ")}`,
  );
  const { figure, svg } = frame(
    parent,
    title,
    points.map((point) => point.row),
    told.join("; "),
    width,
    top + plot + bottom,
  );
  for (const tick of ticks) {
    add(svg, "line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) });
    add(svg, "text", { class: "quiet", x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, written(tick, unit, true));
  }
  places.forEach((place, i) => {
    if ((places.length - 1 - i) % every) return;
    const at = [x(i), top + plot + 16];
    const turn = tilted
      ? { "text-anchor": "end", transform: `rotate(-${TILT} ${at.join(" ")})` }
      : { "text-anchor": i === 0 ? "start" : i === places.length - 1 ? "end" : "middle" };
    add(svg, "text", { class: "quiet", x: at[0], y: at[1], ...turn }, place);
  });
  const ceilings = new Set(
    series.map((line) =>
      line.points
        .map((p) => (p.ceiling ? `${x(p.place)},${y(p.ceiling)}` : ""))
        .filter(Boolean)
        .join(" "),
    ),
  );
  for (const ceiling of ceilings) if (ceiling) add(svg, "polyline", { class: "dashed", points: ceiling });
  const legend = add(figure, "ul", { class: "legend" });
  series.forEach((line, i) => {
    oneMachine(line.points.map((point) => point.row));
    const round = Math.floor(i / COLOURS); // colours come again, with other marks and dashes
    const [colour, mark, dash] = [`c${i % COLOURS}`, MARKS[(i + round) % MARKS.length], DASHES[round % DASHES.length]];
    const group = add(svg, "g", { class: "series", "data-machine": line.points[0].row.machine });
    add(group, "polyline", {
      class: `line ${colour}`,
      style: "fill:none",
      "stroke-dasharray": dash,
      points: line.points.map((p) => `${x(p.place)},${y(p.value)}`).join(" "),
    });
    for (const point of line.points) {
      const dot = add(group, "path", {
        class: colour,
        d: mark,
        transform: `translate(${x(point.place)} ${y(point.value)})`,
      });
      add(dot, "title", {}, `${line.label}, ${places[point.place]}: ${written(point.value, unit)}, ${point.row.versions}`);
    }
    const item = add(legend, "li");
    const swatch = add(item, "svg", { viewBox: "-13 -6 26 12", "aria-hidden": "true" });
    add(swatch, "line", { class: `line ${colour}`, "stroke-dasharray": dash, x1: -13, x2: 13, y1: 0, y2: 0 });
    add(swatch, "path", { class: colour, d: mark });
    item.append(line.label);
  });
  const held = new Set(points.filter((point) => point.ceiling).map((point) => point.row.values.ceiling));
  if (held.size) add(legend, "li", {}, `- - - ceiling: ${[...held].join(", ")}`);
  addNotes(figure, [...points.map((point) => point.row), ...rest]);
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
