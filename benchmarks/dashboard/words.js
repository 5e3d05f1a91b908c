// The page's own words, said where they are first met, and what conformance says of a bar.

const UNQUANTIZED = "unquantized";
const isOurs = (library) => library.startsWith("mxref");

/** What a name of ours says after its backend. */
const VARIANTS = {
  folded:
    "both operands are decoded first, with their block scales multiplied into them, in a pass of its own",
  portable: "nothing that only one maker's GPUs have: each tile of the result decodes what it multiplies",
  "decode first": "all weights are decoded with mxref's kernel, then multiplied by torch in bfloat16; not the reference's bits",
  blockwise: "the defined product: an exact dot of each block, scaled, added in order",
  dequantized: "both operands are decoded to bfloat16 first, and their values multiplied",
  decoded: "the values of a checkpoint, in bfloat16",
  "as stored": "codes and scales of a checkpoint as they are, not decoded",
  "losses measured": "with what rounding costs each tensor",
  bare: "the function itself",
  dispatched: "the function through mxref's choice of a kernel",
};
/** Words of labels that are not names of ours, what they mean, and where they are met. */
const LABELS = [
  ["in brackets", "the shape of the values; of a product [M, N, K]; of a layer of experts its tokens first", (r) => r.size],
  ["two formats", "of a product's two sides: of weights, then of activations; one: of both", (r) => r.format.includes(" ")],
  [UNQUANTIZED, "in no block format: plain bfloat16", (r) => under(r, "format").includes(UNQUANTIZED)],
  [
    "bytes of moe_experts",
    "the packed weights of the experts that are met, whoever runs; one that multiplies decoded weights reads more",
    (r) => r.op === "moe_experts" && r.values.moved_bytes,
  ],
  ["fused decode", "the product's kernel decodes the weights that it meets", (r) => r.library.endsWith("fused decode")],
];
const LISTED = ["folded", "portable", "decode first", "blockwise", "dequantized"]; // the others: at a bar
const variantOf = ({ library }) => Object.keys(VARIANTS).find((name) => isOurs(library) && library.endsWith(name));

/** What a bar's outcome in conformance adds to its label, if it is not that all has passed. */
const MARKS_OF = { failed: " ✗", refused: " – refused", "no record": " – no record", "partly refused": " °" };
const sameBits = (row) => row.values.same_bits === true;
function markOf(row) {
  if (row.version !== null && !failed(row)) return ""; // of what was, only what has no number
  return row.standing?.outcome === "no record" && sameBits(row) ? " °" : MARKS_OF[row.standing?.outcome] || "";
}
const classOf = (row) => (failed(row) ? "failed" : "refused");
const isHollow = (row) => row.standing && (row.standing.outcome === "refused" || markOf(row) === MARKS_OF["no record"]);

/** In words, each once: what the marks of these rows stand for, and the formats that have them. */
function notesOf(rows) {
  const said = { failed: "✗ failed conformance, so there is no number", refused: "– refused: answered by the reference" };
  const then = (group) => [...new Set(group.map((row) => row.version))].filter((version) => version !== null).map(commitOf);
  return grouped(
    rows.filter((row) => markOf(row)),
    (row) => markOf(row),
  ).map((group) => {
    const at = then(group).length ? ` at ${then(group).join(", ")}` : "";
    const what = (said[group[0].standing.outcome] || markOf(group[0]).trim()) + at;
    const reasons = grouped(group, (row) => row.standing.words).map((same) => {
      const formats = [...new Set(same.map((row) => row.format))].filter((format) => format !== "-").join(", ");
      return `${formats ? `${formats}: ` : ""}${same[0].standing.words}`;
    });
    const some = group.every((row) => row.standing.outcome === "partly refused");
    const briefly = [...new Set(group.flatMap((row) => row.standing.reasons))]; // counts stand at a bar and in the table
    const told = some ? `some of its cases are refused: ${briefly.join("; ")}` : reasons.join("; ");
    return { class: classOf(group[0]), text: `${what}: ${told}` };
  });
}

/** Why rows have no number, each reason once; conformance that failed has a note of its own. */
const reasonsOf = (rows) =>
  grouped(
    rows.filter((row) => row.kind === "speed" && !row.values.ms && !failed(row)),
    (row) => row.note,
  ).map((same) => `no number for ${same.map(named).join(", ")}: ${same[0].note || "the record does not say why"}`);

function addNotes(figure, rows) {
  for (const reason of reasonsOf(rows)) add(figure, "p", { class: "below" }, reason);
  for (const note of notesOf(rows)) add(figure, "p", { class: `below ${note.class}` }, note.text);
}

/** Above the charts: the words that what is shown needs. */
function drawWords(rows) {
  const [marks, labels] = $("words").querySelectorAll("dl");
  const about = {
    "ceiling, the upright mark":
      "what a throughput is held against: a copy of as many bytes, or the plain product, timed in the same run; " +
      "each chart names its own",
    "the second number of a bar": "its share of the ceiling: 1 is as fast, 0.5 takes twice the time, more than 1 is faster",
    "°": "conformance has something to add, which stands below the chart",
  };
  const words = Object.fromEntries(
    LABELS.filter(([, , isMet]) => rows.some(isMet)).map(([word, meaning]) => [word, meaning]),
  );
  for (const row of rows) {
    const variant = variantOf(row);
    if (LISTED.includes(variant)) words[variant] = VARIANTS[variant];
  }
  for (const [list, said] of [
    [marks, about],
    [labels, words],
  ]) {
    list.replaceChildren();
    for (const [word, meaning] of Object.entries(said)) {
      add(list, "dt", {}, word);
      add(list, "dd", {}, meaning);
    }
  }
  labels.parentElement.hidden = !Object.keys(words).length;
  const legend = $("whose");
  legend.replaceChildren();
  for (const [ours, text] of [
    [true, "mxref: its kernels, their variants and the reference"],
    [false, "other libraries"],
  ]) {
    const colours = [...new Set(rows.filter((row) => isOurs(row.library) === ours).map(colourOf))];
    if (!colours.length) continue;
    const item = add(legend, "li");
    const swatch = add(item, "svg", { viewBox: `0 0 ${14 * colours.length} 12`, "aria-hidden": "true" });
    swatch.style.width = `${14 * colours.length}px`;
    colours.forEach((colour, i) => add(swatch, "rect", { class: colour, x: 14 * i, y: 0, width: 12, height: 12, rx: 2 }));
    item.append(text);
  }
}
