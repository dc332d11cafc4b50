// Put the parts into the page.

if (HEADS) {
  state.sentence = Math.max(0, Math.floor((DATA.sentences.length - 1) / 2)); // of middle length
  const linked = headNamed(location.hash);
  state.head = linked >= 0 ? linked : Math.max(0, HEADS.findIndex((head) => head.labels.length));
  const hint = "Point at a head to see its numbers and the same head in all maps; click, or press Enter, to open it.";
  const explorer = document.getElementById("explorer");
  explorer.append(filtersForm(), element("p", { class: "hint" }, hint), element("div", { class: "columns" }, mapsOfHeads(), headPanel(), matrices()));
  sortableTable(document.querySelector("#all table"));
  document.querySelector("#all").insertBefore(
    element("p", { class: "hint" }, "A click on a column sorts, one on a row opens the head above; the filters above count here, too."),
    document.querySelector("#all .scroll"),
  );
  for (const link of document.querySelectorAll("#savings a[data-head]")) {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      openHead(Number(link.dataset.head), event);
    });
  }
  followLinks();
  if (linked >= 0) document.getElementById("head").scrollIntoView({ block: "start" });
}
