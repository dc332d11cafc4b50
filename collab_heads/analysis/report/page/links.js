// Where a head looks in a sentence: tokens that look on the left, tokens looked at on the right, lines between them.

const FAINT = 0.04; // weights below are not drawn
const SVG = "http://www.w3.org/2000/svg";

/** "the 62 %, a 20 %": the most of what a token looks at, or is looked at by. */
function strongest(tokens, weightOf) {
  const order = tokens.map((token, place) => [weightOf(place), token]).filter(([weight]) => weight >= FAINT);
  order.sort((one, other) => other[0] - one[0]);
  return order.slice(0, 3).map(([weight, token]) => `${token} ${percent(weight)}`).join(", ") || "all alike";
}

/** The tokens of a side as buttons, one tab stop for all. */
function tokenButtons(tokens, side, say) {
  return tokens.map((token, place) => {
    const label = `${token}${say(place)}`;
    const last = { "data-side": side, "data-place": place, "aria-label": label, tabindex: place ? -1 : 0 };
    return element("button", { class: "token", type: "button", ...last }, element("span", {}, token), element("small"));
  });
}

/** What a pointed token is to the others: from a query to keys, from a key to queries. */
function paintTokens(seen, buttons, pointed) {
  for (const side of ["query", "key"]) {
    buttons[side].forEach((button, place) => {
      const other = pointed && pointed.side !== side;
      const weight = other ? (side === "key" ? seen.weight(pointed.place, place) : seen.weight(place, pointed.place)) : 0;
      button.style.setProperty("--weight", weight);
      button.querySelector("small").textContent = other && weight >= FAINT ? percent(weight) : "";
      button.classList.toggle("pointed", Boolean(pointed) && pointed.side === side && pointed.place === place);
    });
  }
}

/** Call `show` with the token that is hovered or focused, and with nothing when there is none. */
function whenPointed(view, show) {
  const tell = (event) => {
    const button = event.target.closest(".token");
    show(button ? { side: button.dataset.side, place: Number(button.dataset.place) } : null);
  };
  for (const kind of ["mouseover", "focusin"]) view.addEventListener(kind, tell);
  for (const kind of ["mouseleave", "focusout"]) view.addEventListener(kind, () => show(null));
  const steps = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 };
  withArrows(view, ".token", (here, key) => {
    const same = [...view.querySelectorAll(`.token[data-side="${here.dataset.side}"]`)];
    if (key === "Home" || key === "End") return same.at(key === "Home" ? 0 : -1);
    return same[same.indexOf(here) + steps[key]];
  });
}

function linesView(seen) {
  const { queries, keys, weight } = seen;
  const buttons = {
    query: tokenButtons(queries, "query", (query) => ` looks at ${strongest(keys, (key) => weight(query, key))}`),
    key: tokenButtons(keys, "key", (key) => ` is looked at by ${strongest(queries, (query) => weight(query, key))}`),
  };
  const lines = document.createElementNS(SVG, "svg");
  const height = Math.max(queries.length, keys.length);
  lines.setAttribute("viewBox", `0 0 100 ${height}`);
  lines.setAttribute("preserveAspectRatio", "none");
  lines.setAttribute("aria-hidden", "true");
  const column = (side, name) =>
    element("div", { class: "tokens", role: "group", "aria-label": name }, buttons[side]);
  const view = element("div", { class: "lines" }, column("query", "tokens that look"), lines, column("key", "tokens looked at"));
  view.style.setProperty("--rows", height);

  function show(pointed) {
    paintTokens(seen, buttons, pointed);
    const drawn = [];
    for (let query = 0; query < queries.length; query += 1) {
      for (let key = 0; key < keys.length; key += 1) {
        const isMeant = !pointed || (pointed.side === "query" ? pointed.place === query : pointed.place === key);
        if (isMeant && weight(query, key) >= FAINT) drawn.push(lineOf(query, key, weight(query, key)));
      }
    }
    lines.replaceChildren(...drawn);
  }

  whenPointed(view, show);
  show(null);
  return view;
}

function lineOf(query, key, weight) {
  const line = document.createElementNS(SVG, "line");
  const place = { x1: 0, y1: query + 0.5, x2: 100, y2: key + 0.5, opacity: weight.toFixed(2) };
  for (const [name, value] of Object.entries(place)) line.setAttribute(name, value);
  return line;
}

/** The sentence as text: pointing at a token shades those that it looks at. */
function shadingView(seen) {
  const { queries, keys, weight } = seen;
  const say = (query) => ` looks at ${strongest(keys, (key) => weight(query, key))}`;
  const buttons = { query: tokenButtons(queries, "query", say), key: tokenButtons(keys, "key", () => "") };
  buttons.key.forEach((button) => button.setAttribute("tabindex", -1));
  const row = (side, name) =>
    element("div", { class: "flow" }, element("span", { class: "side" }, name), element("div", { role: "group", "aria-label": name }, buttons[side]));
  const view = element("div", { class: "shading" }, row("query", "looks"), row("key", "is looked at"));
  const show = (pointed) => paintTokens(seen, buttons, pointed || { side: "query", place: widest(seen) });
  whenPointed(view, show);
  show(null);
  return view;
}

/** The query with the largest weight: what is shown before anything is pointed at. */
function widest({ queries, keys, weight }) {
  const most = queries.map((_, query) => Math.max(...keys.map((_, key) => weight(query, key))));
  return most.indexOf(Math.max(...most));
}
