// One attention map with its tokens: rows look, columns are looked at. The tokens stay in sight while it scrolls.

function mapView(seen, say) {
  const { queries, keys, weight } = seen;
  const buttons = {
    query: tokenButtons(queries, "query", (query) => ` looks at ${strongest(keys, (key) => weight(query, key))}`),
    key: tokenButtons(keys, "key", (key) => ` is looked at by ${strongest(queries, (query) => weight(query, key))}`),
  };
  const canvas = element("canvas", { class: "cells", "aria-hidden": "true" });
  paintMap(canvas, seen, Infinity);
  const labels = (side, name) => element("div", { class: side, role: "group", "aria-label": name }, buttons[side]);
  const view = element("div", { class: "labelled" }, labels("key", "tokens looked at"), labels("query", "tokens that look"), canvas);
  view.style.setProperty("--columns", keys.length);
  view.style.setProperty("--rows", queries.length);
  whenPointed(view, (pointed) => paintTokens(seen, buttons, pointed));
  canvas.addEventListener("mousemove", (event) => {
    const [query, key] = cellUnder(event, seen);
    paintTokens(seen, buttons, { side: "query", place: query });
    buttons.key[key].classList.add("pointed");
    say(cellInWords(seen, query, key));
  });
  return view;
}

/** The cell of a map under the pointer: its row and its column. */
function cellUnder({ target, clientX, clientY }, { queries, keys }) {
  const { left, top, width, height } = target.getBoundingClientRect();
  const place = (share, count) => Math.max(0, Math.min(count - 1, Math.floor(share * count)));
  return [place((clientY - top) / height, queries.length), place((clientX - left) / width, keys.length)];
}

function cellInWords({ queries, keys, weight }, query, key) {
  return `${queries[query]} looks at ${keys[key]}: ${percent(weight(query, key))}`;
}
