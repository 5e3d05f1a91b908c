// Tables: rows that sort and leave as CSV, and the matrix of conformance.

const NOT_RECORDED = "not recorded";
const WHERE = [
  ["machine", (r) => r.machine],
  ["versions", (r) => r.versions || NOT_RECORDED],
  ["commit", (r) => r.commit || NOT_RECORDED],
  ["date", (r) => r.date || NOT_RECORDED],
  ["record", (r) => r.record],
];
const WHAT = [
  ["op", (r) => r.op],
  ["format", (r) => r.format],
]; // then the numbers, so that a narrow screen shows them
const HOW = [
  ["library", (r) => r.library],
  ["dtype", (r) => r.dtype],
  ["size", (r) => r.size],
  ["recipe", (r) => r.recipe],
  ["detail", (r) => r.detail],
];
const value = (name) => [name, (row) => row.values[name]];
const baseOp = (op) => op.split(",")[0];

const judgedBy = (row) => [row.machine, row.library, baseOp(row.op), row.format];
const TIMED = indexed(
  ROWS.filter((row) => row.kind === "speed" && row.values.ms),
  judgedBy,
);

/** The speeds of what a row of conformance is about, on the same machine; and what many of them have in common. */
function speedsOf(rows) {
  const [c] = rows;
  const timed = TIMED.get(JSON.stringify(judgedBy(c))) || [];
  const told = timed.map((r) => {
    if (failed(r)) return `no speed is shown: ${r.standing.words}`;
    const number = ofCeiling(r)
      ? `${shareOf(r)} of ${r.values.ceiling}`
      : written(measured(r, "throughput"), unitFor("throughput", r));
    return `${[r.op === c.op ? "" : r.op, r.dtype, r.size, r.detail].filter(Boolean).join(" ")}: ${number}`;
  });
  const shares = timed.filter(ofCeiling).sort((a, b) => ofCeiling(a) - ofCeiling(b));
  const ceilings = [...new Set(shares.map((r) => r.values.ceiling))];
  const range = shares.length ? `: ${shareOf(shares[0])} to ${shareOf(shares.at(-1))} of ${ceilings.join(" or ")}` : "";
  const lines = [...new Set(told)];
  return { lines, summary: `${lines.length} speeds${range}` };
}

function columnsOf(rows) {
  const { show } = state;
  if (show === "conformance")
    return [...WHAT, ...["passed", "failed", "known", "refused"].map(value), ...HOW, ["reasons", (r) => r.note], ...WHERE];
  if (show === "other") {
    const names = [...new Set(rows.flatMap((row) => Object.keys(row.values)))];
    const counted = (name) => rows.some((row) => typeof row.values[name] === "number");
    const ordered = [...names.filter(counted), ...names.filter((name) => !counted(name))];
    return [...WHAT, ...ordered.map(value), ...HOW, ["note", (r) => r.note], ...WHERE];
  }
  return [
    ...WHAT,
    ["ms", (r) => timeOf(r) ?? withoutNumber(r)],
    ["of the ceiling", (r) => ofCeiling(r) ?? undefined],
    ["GB/s", (r) => (timeOf(r) && r.values.moved_bytes ? r.values.moved_bytes / r.values.ms / 1e6 : undefined)],
    ["TFLOP/s", (r) => (timeOf(r) && r.values.flops ? r.values.flops / r.values.ms / 1e9 : undefined)],
    ...HOW,
    value("ceiling"),
    value("ceiling_ms"),
    value("same_bits"),
    ["conformance", (r) => r.standing?.words],
    ["note", (r) => r.note],
    ...WHERE,
  ];
}

const LONG = 60; // characters of a text that may be wrapped
const NARROW = window.matchMedia("(max-width: 40rem)");
const STACKED = [...WHAT, ...HOW].map(([name]) => name); // what a row is: one column on a narrow screen

/** A box that scrolls, with a table in it; its edges fade where there is more. */
function addScrolled(parent, label, attributes = {}) {
  const box = add(parent, "div", { class: "box" });
  const region = add(box, "div", { class: "scroll", role: "region", tabindex: "0", "aria-label": label });
  const table = add(region, "table", attributes);
  const mark = () => {
    box.classList.toggle("more-below", region.scrollTop + region.clientHeight < region.scrollHeight - 1);
    box.classList.toggle("more-right", region.scrollLeft + region.clientWidth < region.scrollWidth - 1);
    box.style.setProperty("--bar-right", `${region.offsetWidth - region.clientWidth}px`);
    box.style.setProperty("--bar-below", `${region.offsetHeight - region.clientHeight}px`);
  };
  region.addEventListener("scroll", mark, { passive: true });
  const sizes = new ResizeObserver(mark);
  sizes.observe(region);
  sizes.observe(table);
  return table;
}

/** How the cells of a column are written: all numbers to four digits, if one of them is not whole. */
function writerOf(cells) {
  const numbers = cells.filter((cell) => typeof cell === "number");
  const number = numbers.every(Number.isInteger) ? whole : (cell) => digits(cell, 4);
  return (cell) => (typeof cell === "number" ? number(cell) : String(cell ?? ""));
}

/** What a row is, in one cell. */
function addStacked(td, texts) {
  texts.forEach((text, i) => {
    if (i) td.append(" · ");
    add(td, i ? "span" : "b", {}, text.startsWith("[") ? text.replaceAll(" ", "\u00a0") : text); // a size does not break
  });
}

const isLong = (text) => text.length > LONG;
const LISTED_ROWS = 1000; // of a table, until all are asked for

/** A table whose columns sort, and which leaves as CSV with every row and digit. */
function drawTable(parent, title, rows) {
  const columns = columnsOf(rows).map(([name, get]) => ({ name, cells: rows.map(get) }));
  const kept = columns.filter((column) => column.cells.some((cell) => ![undefined, null, "", "-"].includes(cell)));
  for (const column of kept) {
    column.texts = column.cells.map(writerOf(column.cells));
    column.kind = column.cells.some((cell) => typeof cell === "number") ? "number" : "";
  }
  let order = rows.map((_, i) => i);
  const by = kept.find((column) => column.name === state.sort.replace("-", ""));
  if (by) {
    const [way, text] = [state.sort.startsWith("-") ? -1 : 1, (cell) => String(cell ?? "")];
    const counts = by.cells.some((cell) => typeof cell === "number"); // then what is no number comes last
    const missing = (i) => by.cells[i] === undefined || (counts && typeof by.cells[i] !== "number");
    const after = (a, b) => (a > b) - (a < b);
    const compared = (a, b) =>
      typeof by.cells[a] === "number" ? by.cells[a] - by.cells[b] : after(text(by.cells[a]), text(by.cells[b]));
    order = order.sort((a, b) => missing(a) - missing(b) || way * compared(a, b));
  }
  const csv = () =>
    [kept.map((c) => c.name), ...order.map((i) => kept.map((c) => c.cells[i]))]
      .map((line) => line.map(quoted).join(","))
      .join("\r\n") + "\r\n";
  const tools = add(parent, "div", { class: "tools" });
  add(
    tools,
    "button",
    { type: "button", class: "copy", onclick: () => copy(csv(), `${rows.length} rows copied as CSV`) },
    "Copy as CSV",
  );
  add(
    tools,
    "button",
    { type: "button", class: "download", onclick: () => download(csv(), `mxref-${state.show}.csv`) },
    "Download CSV",
  );
  add(tools, "span", {}, `${rows.length} rows`);
  const table = addScrolled(parent, `Table: ${title}`);
  const header = add(add(table, "thead"), "tr");
  const stackable = kept.filter(({ name, texts }) => NARROW.matches && STACKED.includes(name) && !texts.some(isLong));
  const isShared = ({ name, texts }) => name !== "op" && texts.every((text) => text === texts[0]);
  const [shared, stacked] = [stackable.filter(isShared), stackable.filter((column) => !isShared(column))];
  add(add(table, "caption"), "span", {}, [title, ...shared.map(({ texts }) => texts[0])].join(" · "));
  const places = [...(stacked.length ? [stacked] : []), ...kept.filter((c) => !stackable.includes(c)).map((c) => [c])];
  for (const place of places) {
    const way = (name) => ({ [name]: "ascending", [`-${name}`]: "descending" })[state.sort];
    const sorted = place.map(({ name }) => way(name)).find(Boolean) || "none";
    const kind = place === stacked ? "stacked" : place[0].kind;
    const th = add(header, "th", { scope: "col", class: kind, "aria-sort": sorted });
    for (const { name } of place) {
      const onclick = () => {
        change({ sort: way(name) === "ascending" ? `-${name}` : name });
        [...document.querySelectorAll("#rows th button")]
          .find((b) => b.dataset.column === name && b.closest(".scroll").getAttribute("aria-label") === `Table: ${title}`)
          ?.focus();
      };
      const mark = { ascending: " ▲", descending: " ▼" }[way(name)] || "";
      add(th, "button", { type: "button", onclick, "data-column": name }, name + mark);
    }
  }
  const body = add(table, "tbody");
  for (const i of state.all.has("rows") ? order : order.slice(0, LISTED_ROWS)) {
    const tr = add(body, "tr");
    for (const place of places) {
      if (place === stacked) {
        const td = add(tr, "td", { class: "stacked" });
        const texts = stacked.map((column) => column.texts[i]).filter((text) => text !== "" && text !== "-");
        addStacked(td, texts);
        continue;
      }
      const [{ kind, texts }] = place;
      const td = add(tr, "td", { class: kind });
      (isLong(texts[i]) ? add(td, "div", { class: "long" }) : td).append(texts[i]);
    }
  }
  if (rows.some((row) => row.commit?.endsWith("-dirty")))
    add(parent, "p", { class: "below" }, "-dirty: measured with changes to that commit that were not committed themselves");
  if (rows.length > LISTED_ROWS) addAll(parent, "rows", LISTED_ROWS, rows.length, "rows");
}

const quoted = (cell) =>
  /[",\r\n]/.test(String(cell ?? "")) ? `"${String(cell).replaceAll('"', '""')}"` : String(cell ?? "");

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

/** Op by format by dtype: one table a record, with the speed of the same backend and the reasons of refusals. */
function drawMatrix(rows) {
  const parent = $("matrix").querySelector(".tables");
  parent.replaceChildren();
  if (!rows.length) add(parent, "p", {}, "No case passes the filters.");
  for (const record of grouped(rows, (row) => [row.record, row.machine, row.library])) {
    const title = `${record[0].library} on ${oneMachine(record)}, ${record[0].detail}, ${record[0].record}`;
    const dtypes = [...new Set(record.map((row) => row.dtype))].sort();
    const table = addScrolled(parent, `Matrix: ${title}`, { class: "matrix" });
    add(add(table, "caption"), "span", {}, title);
    const header = add(add(table, "thead"), "tr");
    const groups = grouped(record, (row) => [row.op, row.format]);
    const timed = groups.some((group) => speedsOf(group).lines.length);
    const refusing = record.some((row) => row.note);
    const last = [...(timed ? ["speed"] : []), ...(refusing ? ["why refused"] : [])];
    const names = NARROW.matches ? ["op, format", ["cases", ...last].join(", ")] : ["op", "format", ...dtypes, ...last];
    for (const name of names) add(header, "th", { scope: "col" }, name);
    const body = add(table, "tbody");
    for (const group of groups) {
      const tr = add(body, "tr");
      const [{ op, format }] = group;
      const first = add(tr, "td", { class: NARROW.matches ? "stacked" : "" });
      if (NARROW.matches) addStacked(first, [op, inWords(format)]);
      else first.append(op);
      if (!NARROW.matches) add(tr, "td", { class: "operands" }, inWords(format));
      const all = NARROW.matches ? add(tr, "td", { class: "cell speed" }) : null; // one cell instead of columns
      for (const dtype of dtypes) {
        const row = group.find((one) => one.dtype === dtype);
        const cell = all ? row && add(all, "div", { class: "dtype" }, dtype) : add(tr, "td", { class: "cell" });
        if (row) outcomes(cell, row);
      }
      if (timed) addSpeeds(all || add(tr, "td", { class: "cell speed" }), speedsOf(group));
      const reasons = refusing ? all || add(tr, "td", { class: "cell why" }) : null;
      const why = new Set(group.flatMap((row) => row.note.split("; ").filter(Boolean)));
      for (const reason of refusing ? why : []) add(reasons, "small", {}, reason);
    }
  }
}

const FEW_SPEEDS = 4; // of a cell; more are folded

function addSpeeds(cell, { lines, summary }) {
  const parent = lines.length > FEW_SPEEDS ? add(cell, "details") : cell;
  if (parent !== cell) add(parent, "summary", {}, summary);
  for (const line of lines) add(parent, "span", {}, line);
}

function outcomes(cell, row) {
  const marks = { passed: "✓", failed: "✗", known: "✗", refused: "–" };
  for (const [outcome, mark] of Object.entries(marks)) {
    if (!row.values[outcome]) continue;
    const kind = outcome === "known" ? "failed" : outcome;
    add(cell, "span", { class: kind }, `${mark} ${whole(row.values[outcome])} ${outcome}`);
  }
}
