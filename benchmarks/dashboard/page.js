// The page: everything is drawn anew when anything is chosen.

function render() {
  const open = document.querySelector(".facet[open]");
  const [scrolled, focused] = [open?.querySelector("fieldset").scrollTop, document.activeElement];
  const again = focused?.closest?.(".facet, #show") && [focused.name, focused.value, focused.closest(".facet")?.id];
  makeFilters();
  if (open && $(open.id)) {
    $(open.id).open = true;
    $(open.id).querySelector("fieldset").scrollTop = scrolled;
  }
  if (again)
    [...document.querySelectorAll("#filters input")].find((one) => one.name === again[0] && one.value === again[1])?.focus();
  const rows = ofKind().filter((row) => chosen(row));
  const machines = [...new Set(rows.map((row) => row.machine))];
  const known = machines.filter((machine) => machine !== data.unknown);
  const unknown = rows.filter((row) => row.machine === data.unknown).length;
  $("status").textContent = [
    `${rows.length} of ${ofKind().length} rows`,
    ...(known.length ? [`${known.length} ${known.length === 1 ? "device" : "devices"}`] : []),
    ...(unknown ? [`${unknown} rows do not record theirs`] : []),
  ].join(", ");
  for (const section of document.querySelectorAll("section[data-show]")) {
    section.hidden = !section.dataset.show.split(" ").includes(state.show);
    if (section.hidden) section.querySelector(".charted, .tables").replaceChildren(); // what is not shown has no names either
  }
  figures = 0;
  if (state.show === "speed") {
    drawWords(rows);
    drawThroughput(rows);
    drawRatios(rows);
    drawSweep(rows);
  }
  if (state.show === "conformance") drawMatrix(rows);
  const gone = state.show === "other" ? [] : drawHistory(machines);
  $("machines").hidden = machines.length + gone.length < 2;
  $("machines").textContent =
    "Numbers of different devices cannot be compared: " +
    (state.show === "other" ? "each row says its own." : "each has charts of its own, and no line or bar chart holds two.") +
    ` Here: ${machines.join("; ")}.${gone.length ? ` In the history alone: ${gone.join("; ")}.` : ""}`;
  const tables = $("rows").querySelector(".tables");
  tables.replaceChildren();
  if (!rows.length) add(tables, "p", {}, "No row passes the filters.");
  else if (state.show === "other")
    for (const group of grouped(rows, (row) => row.record)) drawTable(tables, group[0].record, group);
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
  } catch {
    // a page from a file may not be allowed to
  }
});
$("measure").addEventListener("change", (event) => change({ measure: event.target.value }));
$("baseline").addEventListener("change", (event) => change({ baseline: event.target.value }));
$("clear").addEventListener("click", () =>
  change({ ...Object.fromEntries(Object.keys(FACETS).map((facet) => [facet, new Set()])), sort: "" }),
);
$("link").addEventListener("click", () => copy(location.href, "link copied"));
$("skip").addEventListener("click", () => $("h-rows").focus());
document.addEventListener("click", (event) => {
  for (const open of document.querySelectorAll(".facet[open]"))
    if (!open.contains(event.target) && event.target.isConnected) open.open = false;
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
