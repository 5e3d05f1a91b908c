// What is chosen: the state, which stands in the address, and the form that changes it.

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
  Object.keys(KINDS).map((kind) => [
    kind,
    Object.keys(FACETS).filter((f) => ROWS.some((row) => row.kind === kind && under(row, f).length)),
  ]),
);

/** Whether a row passes the filters; what no row of its kind has, as conformance has no size, does not filter it. */
function chosen(row, except = "") {
  return HAS[row.kind].every(
    (facet) => facet === except || !state[facet].size || under(row, facet).some((value) => state[facet].has(value)),
  );
}

const ofKind = () => ROWS.filter((row) => row.kind === state.show);

function change(changes) {
  Object.assign(state, changes);
  writeState();
  render();
}

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
  $("show")
    .querySelectorAll("label")
    .forEach((label) => label.remove());
  for (const [kind, name] of Object.entries(KINDS)) {
    const label = add($("show"), "label");
    const onchange = () => change({ show: kind, sort: "" });
    add(label, "input", { type: "radio", name: "show", value: kind, onchange }).checked = state.show === kind;
    label.append(` ${name}`);
  }
  $("facets").replaceChildren();
  for (const [facet, title] of Object.entries(FACETS)) {
    const counts = new Map(); // of the rows that the other filters leave
    for (const row of ofKind())
      for (const value of under(row, facet)) counts.set(value, (counts.get(value) || 0) + chosen(row, facet));
    if (!counts.size) continue;
    for (const value of state[facet]) if (!counts.has(value)) counts.set(value, 0);
    const details = add($("facets"), "details", { class: "facet", id: `facet-${facet}` });
    add(details, "summary");
    const field = add(details, "fieldset");
    add(field, "legend", {}, title);
    const first = (value) => facet === "library" && isOurs(value);
    const sorted = [...counts].sort(([a], [b]) => (facet === "size" ? 0 : first(b) - first(a) || (a > b) - (a < b)));
    const others = facet === "library" && sorted.find(([value]) => !isOurs(value));
    for (const [value, count] of sorted) {
      if (others && value === sorted[0][0] && first(value)) add(field, "b", {}, "mxref's own");
      if (others && value === others[0]) add(field, "b", {}, "other libraries");
      const label = add(field, "label", { class: count ? "" : "none" });
      const onchange = (event) => choose(facet, value, event.target.checked);
      add(label, "input", { type: "checkbox", value, name: facet, onchange }).checked = state[facet].has(value);
      label.append(facet === "format" ? inWords(value) : value);
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
  add($("baseline"), "option", { value: FASTEST }, FASTEST);
  for (const [label, names] of [
    ["mxref's own", libraries.filter(isOurs)],
    ["other libraries", libraries.filter((name) => !isOurs(name))],
  ]) {
    const group = add($("baseline"), "optgroup", { label });
    for (const name of names) add(group, "option", { value: name }, name);
  }
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
