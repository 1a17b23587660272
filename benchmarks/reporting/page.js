"use strict";
// Sort a table by a column, filter the rows of all tables, fold sections on a phone.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

// Return the number at the start of a cell in its smallest unit, or null if it holds no number.
function value(text) {
  const found = /^([+-]?[\d,]*\.?\d+)\s*([KMGT]?i?B\b)?/.exec(text);
  return found && Number(found[1].replaceAll(",", "")) * 1024 ** Math.max(0, UNITS.indexOf(found[2]));
}

// Compare two cells; those without a number come last in either direction.
function compare(one, other, words, sign) {
  if (words) return sign * one.localeCompare(other, "en", { numeric: true });
  const [a, b] = [value(one), value(other)];
  if (a === null || b === null) return (a === null) - (b === null);
  return sign * (a - b);
}

function sort(head) {
  const up = head.ariaSort !== "ascending", place = head.cellIndex;
  const body = head.closest("table").tBodies[0];
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.ariaSort = up ? "ascending" : "descending";
  const words = head.classList.contains("words"), sign = up ? 1 : -1;
  const cell = (row) => row.cells[place].textContent;
  body.append(...[...body.rows].sort((a, b) => compare(cell(a), cell(b), words, sign)));
}

for (const head of document.querySelectorAll("thead th")) {
  const button = document.createElement("button");
  button.append(...head.childNodes);
  button.addEventListener("click", () => sort(head));
  head.append(button);
}

function filter(text) {
  const wanted = text.toLowerCase().split(/\s+/);
  for (const table of document.querySelectorAll("table")) {
    let shown = 0;
    for (const row of table.tBodies[0].rows) {
      const found = row.textContent.toLowerCase();
      row.hidden = !wanted.every((word) => found.includes(word));
      shown += !row.hidden;
    }
    const total = table.tBodies[0].rows.length;
    table.closest("details").querySelector("output").value =
      shown < total ? `${shown} of ${total} rows` : "";
  }
}

if (document.querySelector("table")) {
  const label = document.createElement("label"), input = document.createElement("input");
  label.className = "filter";
  input.type = "search";
  label.append("Show only rows with these words", input);
  input.addEventListener("input", () => filter(input.value));
  document.querySelector("nav").after(label);
}

const sections = [...document.querySelectorAll("section > details")];
if (matchMedia("(max-width: 600px)").matches)
  sections.forEach((section, place) => { section.open = place === 0; });

function unfold() {
  const section = /^#part\d+$/.test(location.hash) && document.querySelector(location.hash);
  if (section) {
    section.firstElementChild.open = true;
    section.scrollIntoView();
  }
}
addEventListener("hashchange", unfold);
unfold();
