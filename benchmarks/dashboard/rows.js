// What there is: the rows of all records, and their numbers.

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
  op: "Op",
  format: "Format",
  library: "Library",
  machine: "Device",
  size: "Size",
  dtype: "Dtype",
  record: "Record",
};
const FASTEST = "the fastest of mxref";

/** What a row is under a facet: one value, but a product's formats are several. */
function under(row, facet) {
  return facet === "format" ? row.format.split(" ") : row[facet] === "" ? [] : [row[facet]];
}

const inWords = (format) => (format === "-" ? "no format" : format);

// A row's numbers, of which a measure is one.
const ofCeiling = (row) => (row.values.ceiling_ms && timeOf(row) ? row.values.ceiling_ms / row.values.ms : null);
const shareOf = (row) => digits(ofCeiling(row), ofCeiling(row) < 1 ? 2 : 3);

/** What a row did in its time, and the unit of its rate: bytes, or operations if it has no bytes or they are asked for. */
function workOf(row, measure) {
  const { moved_bytes: bytes, flops } = row.values;
  if (flops && (!bytes || measure === "operations")) return [flops, "FLOP/s"];
  return bytes ? [bytes, "B/s"] : [null, "s"];
}

/** Whether conformance of what a row measures has failed: a red gate shows no number. */
const failed = (row) => row.standing?.outcome === "failed";
const timeOf = (row) => (failed(row) ? undefined : row.values.ms);

/** The number that a chart shows of a row, in units of one; null where there is none. */
function measured(row, measure, ms = row.values.ms) {
  if (!ms || failed(row)) return null;
  if (measure === "share") return row.values.ceiling_ms ? row.values.ceiling_ms / ms : null;
  const [work] = workOf(row, measure);
  return measure === "time" || !work ? ms / 1e3 : (work / ms) * 1e3;
}

const whole = (value) => value.toLocaleString("en-US");

/** A number to `count` digits, zeros at its end too, never as 1e3; of a larger one, all before the point. */
function digits(value, count) {
  if (value === 0) return "0";
  const power = Math.floor(Math.log10(Math.abs(value)));
  if (power >= count - 1) return whole(Math.round(value));
  if (power < -6) return `${(value / 10 ** power).toPrecision(count)}\u00a0×\u00a010^${power}`;
  return value.toFixed(count - 1 - power);
}

/** A number with its unit, to three digits; `short`: without zeros at its end, as an axis has it. */
function written(value, unit, short = false) {
  if (value === null || value === undefined) return "";
  if (value === 0 || (unit === "" && Number.isInteger(value))) return `${whole(value)} ${unit}`.trim();
  const steps = [
    [1e15, "P"],
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
    [1, ""],
    [1e-3, "m"],
    [1e-6, "µ"],
    [1e-9, "n"],
  ];
  const [step, prefix] = (unit && steps.find(([size]) => value >= size * 0.9995)) || [1, ""];
  const number = value / step;
  if (short) return `${Number(number.toPrecision(3))} ${prefix}${unit}`.trim();
  return `${unit ? number.toPrecision(3) : digits(number, 3)} ${prefix}${unit}`.trim();
}

const unitFor = (measure, row) => (measure === "share" ? "" : measure === "time" ? "s" : workOf(row, measure)[1]);

/** Rows by what their key is as JSON. */
function indexed(rows, key) {
  const groups = new Map();
  for (const row of rows) {
    const name = JSON.stringify(key(row));
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(row);
  }
  return groups;
}

const grouped = (rows, key) => [...indexed(rows, key).values()];
