// Maps, layer by head: one of what heads do and one of every measure. All show the same heads in the same places.

/** One map in all its groups; `paint` colours a cell (nothing: not measured there), `say` puts it into words. */
function mapFigure({ title, legend, key, paint, say }) {
  const about = element("details", {}, element("summary", { tabindex: -1 }, "what is this?"), element("p", {}, legend));
  const isMeasured = (group) => HEADS.some((head) => siteOf(head).group === group && paint(head));
  const grids = DATA.groups.filter(isMeasured).map((group) => gridOf(group, title, paint, say));
  return element("figure", { class: "map" }, element("figcaption", {}, element("strong", {}, title), key, about), grids);
}

function gridOf(group, title, paint, say) {
  const sites = DATA.sites.map((site, place) => ({ ...site, place })).filter((site) => site.group === group);
  const columns = Math.max(...sites.map((site) => site.total));
  const label = `${title}, ${group}: a row per layer, a column per head`;
  const grid = element("div", { role: "grid", "aria-label": label, class: columns > 16 ? "grid small" : "grid" });
  grid.style.setProperty("--heads", columns);
  sites.sort((one, other) => one.layer - other.layer);
  grid.append(columnNumbers(columns));
  for (const site of sites) {
    const row = element("div", { role: "row", class: "row" }, element("span", { role: "rowheader" }, `${site.layer}`));
    for (let head = 0; head < site.total; head += 1) row.append(cellOf(headAt(site.place, head), paint, say));
    grid.append(row);
  }
  const name = element("span", { class: "group", "aria-hidden": "true" }, group);
  return element("div", { class: "panel" }, DATA.groups.length > 1 ? name : null, grid);
}

/** The numbers of the heads above a map; where columns are narrow, every fourth. */
function columnNumbers(columns) {
  const every = columns > 16 ? 4 : 1;
  const numbers = Array.from({ length: columns }, (_, head) =>
    element("span", { role: "columnheader", "aria-label": `head ${head}` }, head % every ? "" : `${head}`),
  );
  return element("div", { role: "row", class: "row numbers" }, element("span", { role: "columnheader", "aria-label": "layer" }), numbers);
}

function cellOf(head, paint, say) {
  if (!head) return element("span", { role: "gridcell", class: "removed", "aria-label": "removed" });
  const place = HEADS.indexOf(head);
  const label = `${nameOf(head)}: ${say(head)}`;
  const cell = element("button", { role: "gridcell", tabindex: -1, "data-head": place, "aria-label": label });
  const { colours, letter } = paint(head) || { colours: [], letter: "" };
  if (colours[0]) Object.assign(cell.style, { background: stripes(colours), color: ink(colours[0]) });
  cell.textContent = letter;
  if (siteOf(head).sharesKeys) {
    const next = headAt(head.site, head.number + 1);
    cell.classList.add("shared");
    if (!next || next.key !== head.key) cell.classList.add("last");
  }
  return cell;
}

function roleMap() {
  const kindsOf = (head) => (head.kinds.length ? head.kinds : [DATA.none]);
  const seen = Object.keys(DATA.kinds).filter((kind) => HEADS.some((head) => kindsOf(head).includes(kind)));
  const key = element("span", { class: "key" }, seen.map((kind) => {
    const { colour, letter } = DATA.kinds[kind];
    const box = element("i", { class: "cell" }, letter);
    if (colour) Object.assign(box.style, { background: colour, color: ink(colour) });
    return element("span", {}, box, kind === DATA.none ? NO_ROLE : kind);
  }));
  const paint = (head) => ({
    colours: kindsOf(head).map((kind) => DATA.kinds[kind].colour),
    letter: kindsOf(head).map((kind) => DATA.kinds[kind].letter).join(""),
  });
  return mapFigure({ title: DATA.roles.title, legend: DATA.roles.legend, key, paint, say: rolesOf });
}

function measureMap(measure, place) {
  const scale = scaleOf(measure);
  const bar = element("i", { class: "bar" });
  bar.style.background = `linear-gradient(to right, ${scale.colours.join(",")})`;
  const key = element("span", { class: "key" }, element("span", {}, number(scale.low), bar, number(scale.high)), scale.said);
  const paint = (head) => (head.values[place] === null ? null : { colours: [scale.colour(head.values[place])], letter: "" });
  const say = (head) => `${measure.name} ${number(head.values[place]) || "not measured"}`;
  return mapFigure({ title: measure.title, legend: measure.legend, key, paint, say });
}

/** All maps. Hovering or focusing a cell tells its numbers and shows the head in every map; a click opens it. */
function mapsOfHeads() {
  const maps = element("div", { id: "maps", role: "group", "aria-label": "maps: arrows move, Page Up and Page Down change the map, Enter opens a head" });
  maps.append(...(HEADS.some((head) => head.kinds.length) ? [roleMap()] : []), ...DATA.measures.map(measureMap));
  const tip = element("div", { id: "tip", class: "tip", role: "tooltip", hidden: true });
  const cells = HEADS.map((_, place) => [...maps.querySelectorAll(`[data-head="${place}"]`)]);
  let pointed = null;

  function point(event) {
    const cell = event.target.closest("[data-head]");
    if (pointed !== null) cells[pointed].forEach((each) => each.classList.remove("pointed"));
    pointed = cell ? Number(cell.dataset.head) : null;
    tip.hidden = !cell;
    if (!cell) return;
    cells[pointed].forEach((each) => each.classList.add("pointed"));
    const head = HEADS[pointed];
    tip.replaceChildren(element("strong", {}, cell.getAttribute("aria-label")), element("span", {}, rolesOf(head)));
    const { left, bottom, top } = cell.getBoundingClientRect();
    placeTip(tip, left, top, bottom);
  }

  for (const kind of ["mouseover", "focusin"]) maps.addEventListener(kind, point);
  for (const kind of ["mouseleave", "focusout"]) maps.addEventListener(kind, () => point({ target: document.body }));
  maps.addEventListener("click", (event) => {
    const cell = event.target.closest("[data-head]");
    if (cell) openHead(Number(cell.dataset.head), event);
  });
  /** One stop of the tabulator for all maps, and one for the legend of the map where it is. */
  function stopAt(cell) {
    for (const each of maps.querySelectorAll('[tabindex="0"]')) each.tabIndex = -1;
    for (const each of [cell, cell.closest("figure").querySelector("summary")]) each.tabIndex = 0;
  }

  function stopAtHead() {
    const map = maps.querySelector('[data-head][tabindex="0"]')?.closest("figure");
    stopAt(cells[state.head].find((cell) => cell.closest("figure") === map) || cells[state.head][0]);
  }

  maps.addEventListener("focusin", (event) => {
    if (event.target.matches("[data-head]")) stopAt(event.target);
  });
  withArrows(maps, "button[data-head]", (cell, key) => {
    const same = cells[cell.dataset.head]; // in all maps
    return key.startsWith("Page") ? same[same.indexOf(cell) + (key === "PageDown" ? 1 : -1)] : cellBeside(cell, key);
  });
  const mark = () => {
    cells.forEach((each, place) => each.forEach((cell) => cell.classList.toggle("open", place === state.head)));
    stopAtHead();
  };
  const fade = () => cells.forEach((each, place) => each.forEach((cell) => cell.classList.toggle("faded", !isShown(HEADS[place]))));
  whenChanged((changes) => {
    if ("head" in changes) mark();
    if (changes.filter) fade();
  });
  mark();
  return [maps, tip];
}

/** The next cell in the direction of an arrow key, over removed heads. */
function cellBeside(cell, key) {
  const row = cell.parentElement;
  const column = [...row.children].indexOf(cell);
  const isHead = (each) => each && each.matches("button");
  if (key === "ArrowRight" || key === "ArrowLeft") {
    const step = key === "ArrowRight" ? "nextElementSibling" : "previousElementSibling";
    let there = cell[step];
    while (there && !isHead(there)) there = there[step];
    return there;
  }
  if (key === "Home" || key === "End") return [...row.children].filter(isHead).at(key === "Home" ? 0 : -1);
  const step = key === "ArrowDown" ? "nextElementSibling" : "previousElementSibling";
  let there = row[step];
  while (there && !isHead(there.children[column])) there = there[step];
  return there && there.children[column];
}
