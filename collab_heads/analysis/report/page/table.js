// The table of all heads: it sorts by a click on a column, and shows the heads that the filters leave.

function sortableTable(table) {
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const columns = [...table.tHead.rows[0].cells];
  const numberColumn = columns.findIndex((cell) => cell.textContent === "head");
  rows.forEach((row, place) => {
    const cell = row.cells[numberColumn];
    const link = { "aria-label": `open ${nameOf(HEADS[place])}`, class: "link", href: `#${HEADS[place].anchor}` };
    cell.replaceChildren(element("a", link, cell.textContent));
    row.dataset.head = place;
    row.removeAttribute("id"); // where a link goes without scripts; here it opens the head
    row.addEventListener("click", (event) => openHead(place, event));
  });
  columns.forEach((cell, column) => {
    const sort = element("button", { class: "link", click: () => sortBy(column) }, cell.textContent);
    cell.setAttribute("aria-sort", "none");
    cell.replaceChildren(sort);
  });

  function sortBy(column) {
    const isNumeric = columns[column].classList.contains("number");
    const was = columns[column].getAttribute("aria-sort");
    // numbers begin with the largest, words with the first
    const now = was === "none" ? (isNumeric ? "descending" : "ascending") : was === "ascending" ? "descending" : "ascending";
    columns.forEach((cell, each) => cell.setAttribute("aria-sort", each === column ? now : "none"));
    const sign = now === "ascending" ? 1 : -1;
    const text = (row) => row.cells[column].textContent;
    rows.sort((one, other) => {
      const [first, second] = [text(one), text(other)];
      if (!first || !second) return Number(!first) - Number(!second); // what has no value comes last
      return sign * (isNumeric ? Number(first) - Number(second) : first.localeCompare(second));
    });
    body.append(...rows);
  }

  const show = () => rows.forEach((row) => (row.hidden = !isShown(HEADS[row.dataset.head])));
  const mark = () => rows.forEach((row) => row.classList.toggle("open", Number(row.dataset.head) === state.head));
  whenChanged((changes) => {
    if (changes.filter) show();
    if ("head" in changes) mark();
  });
  mark();
}
