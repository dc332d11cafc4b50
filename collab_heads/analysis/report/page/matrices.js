// Attention maps beside each other: all heads of a layer, or one head in all layers. Rows look, columns are looked at.

const MOST_CELLS = 256; // a side of a map: where there are more tokens, a cell is the largest weight of several
const SIDES = [112, 256]; // of a map in pixels, at least and at most; a pixel a token in between
const SHADES = Array.from({ length: STEPS + 1 }, (_, root) => channels(between(SEQUENTIAL, root / STEPS)));

/** The heads whose maps stand beside that of the open head. */
function headsBeside(head) {
  const isBeside = {
    layer: (other) => other.site === head.site,
    head: (other) => siteOf(other).group === siteOf(head).group && other.number === head.number,
  };
  const found = HEADS.filter(isBeside[state.across]);
  return found.sort((one, other) => siteOf(one).layer - siteOf(other).layer || one.number - other.number);
}

function matrices() {
  const section = element("section", { id: "matrices", "aria-label": "Attention maps of several heads" });
  if (!DATA.sentences.length) return section;
  const title = element("h3", { "aria-live": "polite" });
  const ways = [["layer", "all heads of its layer"], ["head", "the same head in all layers"]];
  const across = choice("beside the head that is open", ways, (value) => change({ across: value }));
  const bar = element("i", { class: "bar" });
  bar.style.background = `linear-gradient(to right, ${SEQUENTIAL.join(",")})`;
  const key = element("span", { class: "key" }, "0", bar, "100 % of attention; the middle is 25 %");
  const hint = "Rows look, columns are looked at, in the sentence chosen for the head that is open: point at a cell to read its tokens. A click or Enter opens a head, which shows its map with all tokens.";
  const maps = element("div", { class: "maps", role: "group" });
  const tip = element("div", { class: "tip", role: "tooltip", hidden: true });
  section.append(title, element("div", { class: "choices" }, across, key), element("p", { class: "hint" }, hint), maps, tip);
  let shown = "";

  async function show() {
    const [head, place, words] = [HEADS[state.head], state.sentence, state.words];
    const heads = headsBeside(head);
    const wanted = `${heads.map((each) => HEADS.indexOf(each))} of ${place} ${words}`;
    if (wanted !== shown) {
      shown = wanted;
      const figures = await Promise.all(heads.map(async (each) => mapOf(each, await attentionOf(each, place, words))));
      if (wanted !== shown) return; // meanwhile changed
      maps.replaceChildren(...figures);
      const { group, layer } = siteOf(head);
      const where = DATA.groups.length > 1 ? `${group}, ` : "";
      title.textContent = `Attention maps: ${where}${state.across === "layer" ? `layer ${layer}` : `head ${head.number}, all layers`}`;
      maps.setAttribute("aria-label", title.textContent);
    }
    for (const button of maps.children) {
      const isOpen = button.dataset.head === String(state.head);
      button.classList.toggle("open", isOpen);
      button.tabIndex = isOpen ? 0 : -1;
    }
  }

  /** The weight under the pointer. */
  function point(event) {
    const button = event.target.closest(".matrix");
    tip.hidden = !button || event.target.tagName !== "CANVAS";
    if (tip.hidden) return;
    tip.replaceChildren(cellInWords(button.seen, ...cellUnder(event, button.seen)));
    placeTip(tip, event.clientX + 8, event.clientY, event.clientY + 8);
  }

  maps.addEventListener("mousemove", point);
  maps.addEventListener("mouseleave", () => (tip.hidden = true));
  maps.addEventListener("click", (event) => {
    const button = event.target.closest(".matrix");
    if (button) openHead(Number(button.dataset.head), event);
  });
  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  withArrows(maps, ".matrix", (here, key) => {
    const every = [...maps.children];
    return key === "Home" || key === "End" ? every.at(key === "Home" ? 0 : -1) : every[every.indexOf(here) + steps[key]];
  });
  whenChanged((changes) => {
    if ("head" in changes || "sentence" in changes || "words" in changes || "across" in changes) show();
  });
  show();
  return section;
}

/** The map of a head as a button. */
function mapOf(head, seen) {
  const name = state.across === "layer" ? `head ${head.number}` : `layer ${siteOf(head).layer}`;
  const canvas = element("canvas");
  paintMap(canvas, seen, MOST_CELLS);
  const label = `${nameOf(head)}: ${seenInWords(seen)}`;
  const button = element("button", { class: "matrix", type: "button", "data-head": HEADS.indexOf(head), "aria-label": label }, canvas, element("span", {}, name));
  const side = Math.min(SIDES[1], Math.max(SIDES[0], seen.keys.length));
  button.style.setProperty("--side", `${side}px`);
  canvas.classList.toggle("cells", 2 * seen.keys.length <= side);
  button.seen = seen;
  return button;
}

/** Paint a map of at most so many cells a side. */
function paintMap(canvas, { queries, keys, root }, mostCells) {
  const step = Math.max(1, Math.ceil(Math.max(queries.length, keys.length) / mostCells));
  const [width, height] = [keys.length, queries.length].map((count) => Math.ceil(count / step));
  const most = new Uint8Array(width * height);
  queries.forEach((_, query) =>
    keys.forEach((_, key) => {
      const cell = Math.floor(query / step) * width + Math.floor(key / step);
      most[cell] = Math.max(most[cell], root(query, key));
    }),
  );
  Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  most.forEach((shade, cell) => image.data.set([...SHADES[shade], 255], 4 * cell));
  context.putImageData(image, 0, 0);
}
