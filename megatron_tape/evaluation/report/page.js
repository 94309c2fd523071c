"use strict";
// Tables are sorted by the buttons that this puts into the titles of their columns; without it they stay in order.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  if (body.rows.length < 2) continue;
  const rows = Array.from(body.rows);
  const titles = Array.from(table.tHead.rows[0].cells);
  const key = (row, column) => {
    const value = row.cells[column].dataset.sort;
    if (value === undefined) return null;
    return row.cells[column].classList.contains("text") || isNaN(value) ? value : Number(value);
  };
  const compare = (a, b) => {
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), undefined, { numeric: true });
  };
  titles.forEach((title, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...title.childNodes);
    title.append(button);
    button.addEventListener("click", () => {
      const before = title.getAttribute("aria-sort");
      const after = { ascending: "descending", descending: null }[before] ?? (before ? null : "ascending");
      titles.forEach((other) => other.removeAttribute("aria-sort"));
      if (after) title.setAttribute("aria-sort", after);
      const sign = after === "descending" ? -1 : 1;
      const sorted = rows.slice();
      if (after) {
        sorted.sort((one, other) => {
          const a = key(one, column), b = key(other, column);
          // Cells without a value stay last in both directions.
          if (a === null || b === null) return (a === null) - (b === null);
          return sign * compare(a, b);
        });
      }
      body.append(...sorted);
    });
  });
}
