// Put the parts into the page.

if (HEADS) {
  state.sentence = DATA.first;
  const linked = headNamed(location.hash);
  state.head = linked >= 0 ? linked : Math.max(0, HEADS.findIndex((head) => head.labels.length));
  const hint = "In every map a row is a layer and a column is a head. Point at a head to see its numbers and the same head in all maps; click, or press Enter, to open it.";
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
  skipLinks();
  copyButtons();
  followLinks();
  if (linked >= 0) document.getElementById("head").scrollIntoView({ block: "start" });
}

/** Links at the top, seen when the tabulator reaches them: a page has many stops before its maps. */
function skipLinks() {
  const link = (text, selector) => {
    const go = (event) => {
      event.preventDefault();
      document.querySelector(selector)?.focus();
    };
    return element("a", { href: "#explore", click: go }, text);
  };
  const links = [link("Skip to the maps", '#maps [data-head][tabindex="0"]')];
  if (DATA.sentences.length) links.push(link("Skip to the attention maps", ".matrix.open"));
  document.body.prepend(element("nav", { class: "skip", "aria-label": "skip links" }, links));
}
