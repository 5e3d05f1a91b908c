// What each section draws of the rows that are chosen.

/** The charts of a section, machine by machine: the first few, and a button for the rest; each its rows and `draw`. */
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
  if (most > SHOWN) addAll(parent, id, SHOWN, count, "charts", " of each device");
}

/** A button that shows all of a section, or its first few again. */
function addAll(parent, id, few, count, what, each = "") {
  const toggle = () => {
    const all = new Set(state.all);
    if (!all.delete(id)) all.add(id);
    change({ all });
    $(id).querySelector("button.all").focus();
  };
  const text = state.all.has(id) ? `Show the first ${few} ${what}${each}` : `Show all ${count} ${what}`;
  add(parent, "button", { type: "button", class: "all", onclick: toggle }, text);
}

const rowCount = (charts) => charts.reduce((sum, chart) => sum + chart.rows.length, 0);
const titleOf = (row, ...rest) =>
  [row.op, row.dtype === "-" ? "" : row.dtype, ...rest, row.detail].filter(Boolean).join(", ");
const most = (a, b) => b.length - a.length;

function drawThroughput(rows) {
  const panels = grouped(rows, (r) => [r.machine, r.record, r.op, r.dtype, r.size, r.detail, unitFor(state.measure, r)]);
  const withCeilings = (panel) => panel.some((row) => row.values.ceiling);
  const numbers = (panel) => panel.filter((row) => row.values.ceiling && measured(row, state.measure) !== null).length;
  panels.sort((a, b) => withCeilings(b) - withCeilings(a) || numbers(b) - numbers(a) || most(a, b));
  const charts = panels.map((panel) => {
    const held = grouped(
      panel.filter((row) => row.values.ceiling),
      (row) => row.values.ceiling,
    ).sort(most);
    const ceilings = held.map(([row]) => row.values.ceiling); // the chart's own first; of any other, a number says so
    const bars = panel
      .filter((row) => !ceilings.includes(row.library))
      .map((row) => {
        const value = measured(row, state.measure);
        const number = state.measure === "share" && value ? digits(value, 3) : written(value, unitFor(state.measure, row));
        const of = ceilings.indexOf(row.values.ceiling) > 0 ? ` of ${row.values.ceiling}` : "";
        const share = ofCeiling(row) ? (state.measure === "share" ? of : `, ${shareOf(row)}${of}`) : "";
        const ceiling = row.values.ceiling_ms ? measured(row, state.measure, row.values.ceiling_ms) : null;
        return { row, value, ceiling, text: value === null ? withoutNumber(row) : number + share };
      });
    const way = unitFor(state.measure, panel[0]) === "s" ? 1 : -1;
    bars.sort((a, b) => (a.value === null) - (b.value === null) || way * (a.value - b.value));
    const marked = bars.some((bar) => bar.value !== null && bar.ceiling);
    const share = state.measure !== "share" && marked;
    const head = { throughput: "throughput", operations: "operations", share: "share of the ceiling", time: "time" }[state.measure];
    const below = marked ? `ceiling: ${ceilings[0]}${ceilings[1] ? ", or what a number names" : ""}` : "";
    const draw = (parent) =>
      barChart(parent, titleOf(panel[0], panel[0].size), bars, { head: head + (share ? ", share of the ceiling" : ""), below });
    return { rows: bars.map((bar) => bar.row), draw };
  });
  drawAll(
    "throughput",
    charts.filter((chart) => chart.rows.length),
    "No row with a time passes the filters.",
  );
}

const withoutNumber = (row) => (failed(row) ? "failed conformance" : row.values.ms ? "no ceiling" : "no number");

/** Ratios of times within a run: beside other libraries, and, in a section of its own, among what is all mxref's. */
function drawRatios(rows) {
  const ceilings = new Map(
    grouped(rows, (row) => row.record).map((g) => [g[0].record, new Set(g.map((row) => row.values.ceiling))]),
  );
  const compared = rows.filter((row) => !ceilings.get(row.record).has(row.library));
  const timed = compared.filter(timeOf);
  const panels = grouped(timed, (r) => [r.machine, r.record, r.op, r.dtype, r.size, r.detail]).map((panel) =>
    grouped(panel, (row) => row.format).flatMap((group) => {
      const fits = (row) => (state.baseline === FASTEST ? isOurs(row.library) : row.library === state.baseline);
      const base = group.filter(fits).sort((a, b) => a.values.ms - b.values.ms)[0];
      if (!base || new Set(group.map((row) => row.library)).size < 2) return [];
      return group
        .filter((row) => row !== base)
        .map((row) => {
          const value = base.values.ms / row.values.ms;
          return { row, value, base, text: `${digits(value, 3)} ×` };
        });
    }),
  );
  const among = (bar) => isOurs(bar.row.library) && isOurs(bar.base.library);
  drawRatiosOf(
    "ratios",
    panels.map((bars) => bars.filter((bar) => !among(bar))),
    "No other library of a run does what mxref does in the same format here.",
  );
  drawRatiosOf(
    "variants",
    panels.map((bars) => bars.filter(among)),
    "No two of mxref's own of a run do the same op in the same format here.",
  );
}

function drawRatiosOf(id, panels, none) {
  const charts = panels
    .filter((bars) => bars.length)
    .sort(most)
    .map((bars) => ({
      rows: bars.map((bar) => bar.row),
      draw: (parent) => {
        bars.sort((a, b) => b.value - a.value);
        const libraries = [...new Set(bars.map((bar) => bar.base.library))];
        const bases = libraries.length === 1 ? libraries : [...new Set(bars.map((bar) => named(bar.base)))];
        barChart(parent, titleOf(bars[0].row, bars[0].row.size), bars, {
          logarithmic: true,
          head: "times as fast",
          below: `1 × is ${bases.join("; ")}${bars.some((bar) => bar.row.format !== "-") ? ", in the same format" : ""}`,
        });
      },
    }));
  drawAll(id, charts, none);
}

const seriesOf = (rows) => grouped(rows, (row) => [row.format, row.library, row.recipe]);

/** The rows of one chart of lines, or of one a format if that chart would have more lines than colours; and its title. */
function readable(rows, ...title) {
  if (seriesOf(rows).length <= COLOURS) return [{ rows, title: titleOf(rows[0], ...title) }];
  const ceilings = new Set(rows.map((row) => row.values.ceiling)); // drawn with what is held against them
  return grouped(
    rows.filter((row) => row.format !== "-" || !ceilings.has(row.library)),
    (row) => row.format,
  ).map((of) => ({ rows: of, title: titleOf(of[0], ...title, inWords(of[0].format)), format: of[0].format }));
}

const inFormat = (rows = [], format = null) => rows.filter((row) => format === null || row.format === format);

function drawSweep(rows) {
  const timed = rows.filter((row) => measured(row, state.measure) !== null);
  const key = (r) => [r.machine, r.record, r.op, r.dtype, r.detail, unitFor(state.measure, r)];
  const panels = grouped(timed, key);
  const red = indexed(rows.filter(failed), key);
  const charts = panels
    .flatMap((panel) => readable(panel))
    .filter(({ rows }) => new Set(rows.map((row) => row.size)).size > 1)
    .sort((a, b) => most(a.rows, b.rows))
    .map(({ rows: panel, title, format }) => {
      const counts = new Map(panel.map((row) => [row.size, row.sizes.reduce((a, b) => a * b, 1)]));
      const places = [...counts.keys()].sort((a, b) => counts.get(a) - counts.get(b));
      const rest = inFormat(red.get(JSON.stringify(key(panel[0]))), format);
      const draw = (parent) =>
        drawLines(parent, title, places, seriesOf(panel), (row) => places.indexOf(row.size), rest);
      return { rows: panel, draw };
    });
  drawAll("sweep", charts, "No op of a run has several sizes here.");
}

function drawLines(parent, title, places, lines, placeOf, rest = []) {
  const unit = unitFor(state.measure, lines[0][0]);
  const series = lines.map((rows) => ({
    label: named(rows[0]) + markOf(rows[0]),
    points: rows
      .map((row) => ({
        row,
        place: placeOf(row),
        value: measured(row, state.measure),
        ceiling: row.values.ceiling_ms ? measured(row, state.measure, row.values.ceiling_ms) : null,
      }))
      .sort((a, b) => a.place - b.place),
  }));
  lineChart(parent, title, places, series, unit, rest);
}

/** Draws it, and returns those of its machines that are not among `machines`. */
function drawHistory(machines) {
  const note = ["Each chart is of one record, each point a committed version of it, in the order of commits."];
  if (state.show === "conformance") note.push("The number of cases changes as cases are added.");
  if (data.missing) note.push(`There is nothing to draw: ${data.missing}.`);
  if (data.unread.length)
    note.push(`Not drawn, since their form is no longer known: ${data.unread.map((why) => why.split(":")[0]).join(", ")}.`);
  const rows = PAST.filter((row) => row.kind === state.show && chosen(row));
  const charts = state.show === "speed" ? historyOfSpeed(rows) : historyOfConformance(rows);
  const drawn = [...new Set(charts.map((chart) => oneMachine(chart.rows)))];
  const gone = drawn.filter((machine) => !machines.includes(machine));
  if (gone.length) note.push(`In the history alone, since no record of today is of it: ${gone.join("; ")}.`);
  $("history-note").textContent = note.join(" ");
  drawAll("history", charts, data.missing ? "" : "Nothing here has been measured at two commits.");
  return gone;
}

const commitOf = (version) =>
  `${data.versions[version].commit || "not committed"} ${data.versions[version].committed.slice(5, 10)}`;

function historyOfSpeed(rows) {
  const timed = rows.filter((row) => measured(row, state.measure) !== null && row.format + row.library !== "-torch copy");
  const panels = grouped(timed, (r) => [r.machine, r.record, r.op, r.dtype, r.size, r.detail, unitFor(state.measure, r)]);
  const about = (row) => [titleOf(row, row.size), row.machine, row.record];
  const red = indexed(rows.filter(failed), about);
  return panels
    .flatMap((panel) => readable(panel, panel[0].size))
    .flatMap(({ rows: panel, title, format }) => {
      const lines = seriesOf(panel).filter((line) => new Set(line.map((row) => row.version)).size > 1);
      if (!lines.length) return [];
      const versions = [...new Set(lines.flat().map((row) => row.version))].sort((a, b) => a - b);
      const places = versions.map(commitOf);
      const rest = inFormat(red.get(JSON.stringify(about(panel[0]))), format);
      return [
        {
          rows: lines.flat(),
          draw: (parent) => drawLines(parent, title, places, lines, (row) => versions.indexOf(row.version), rest),
        },
      ];
    })
    .sort((a, b) => b.rows.length - a.rows.length);
}

function historyOfConformance(rows) {
  return grouped(rows, (row) => [row.machine, row.library, row.record]).flatMap((panel) => {
    const versions = [...new Set(panel.map((row) => row.version))].sort((a, b) => a - b);
    if (versions.length < 2) return [];
    const ops = [...new Set(panel.map((row) => row.op))];
    const title = `${panel[0].library}: cases of ${ops.length > 3 ? `${ops.length} ops` : ops.join(", ")}`;
    const outcomes = ["passed", "failed", "known", "refused"].filter(
      (outcome) => outcome !== "known" || panel.some((row) => row.values.known),
    );
    const series = grouped(panel, (row) => row.detail).flatMap((level) =>
      outcomes.map((outcome) => ({
        label: `${outcome}, ${level[0].detail}`,
        points: grouped(level, (row) => row.version).map((of) => ({
          row: of[0],
          place: versions.indexOf(of[0].version),
          value: of.reduce((sum, row) => sum + row.values[outcome], 0),
          ceiling: null,
        })),
      })),
    );
    const draw = (parent) => lineChart(parent, title, versions.map(commitOf), series, "");
    return [{ rows: panel, draw }];
  });
}
