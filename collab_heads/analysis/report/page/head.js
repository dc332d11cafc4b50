// The head that is open: what it does, where it looks in a sentence, its numbers, the heads nearest to it.

const VIEWS = { lines: linesView, shading: shadingView, map: mapView };

function headPanel() {
  const panel = element("aside", { id: "head", "aria-label": "The head that is open" });
  const title = element("h3", { tabindex: -1 });
  const link = element("a", { class: "anchor" });
  const roles = element("p", { class: "roles" });
  const sentence = choice("sentence", DATA.sentences.map((each, place) => [place, sentenceName(each)]), (value) =>
    change({ sentence: Number(value) }),
  );
  sentence.querySelector("select").value = state.sentence;
  const view = choice("show as", Object.keys(VIEWS).map((name) => [name, name]), (value) => change({ view: value }));
  const units = [["", "pieces of words"], ["words", "words"]];
  const unit = HAS_WORDS ? choice("of", units, (value) => change({ words: Boolean(value) })) : null;
  const words = element("p", { class: "words", "aria-live": "polite" });
  const said = element("p", { class: "words said", "aria-hidden": "true" }); // of the token that is pointed at: its label
  const tokens = element("div", { id: "tokens", role: "group" });
  const say = (text) => (said.textContent = text);
  for (const kind of ["mouseover", "focusin"]) {
    tokens.addEventListener(kind, (event) => {
      const token = event.target.closest(".token");
      if (token) say(token.getAttribute("aria-label"));
    });
  }
  const about = element("div", { class: "about" });
  const looking = DATA.sentences.length ? [element("div", { class: "choices" }, sentence, view, unit), words, said, tokens] : [];
  const back = element("button", { type: "button", class: "link back", click: goBack }, "back to the maps");
  panel.append(element("div", { class: "title" }, title, link), back, roles, ...looking, about);
  panel.addEventListener("keydown", (event) => {
    if (event.key === "Escape") goBack();
  });

  function goBack() {
    document.querySelector('#maps [data-head][tabindex="0"]').focus();
  }

  function showHead() {
    const head = HEADS[state.head];
    title.textContent = nameOf(head);
    link.textContent = `#${head.anchor}`;
    link.href = `#${head.anchor}`;
    link.setAttribute("aria-label", `link to ${nameOf(head)}`);
    roles.replaceChildren(...chips(head));
    about.replaceChildren(...numbersOf(head), ...neighboursOf(head));
  }

  async function showSentence() {
    if (!DATA.sentences.length) return;
    const wanted = () => [HEADS[state.head], state.sentence, state.view, state.words];
    const [head, place, shape, inWhole] = wanted();
    const seen = await attentionOf(head, place, inWhole);
    if (wanted().some((now, i) => now !== [head, place, shape, inWhole][i])) return; // meanwhile changed
    const cut = seen.cut > 0 ? ` Only the first tokens are shown; ${seen.cut} more are not.` : "";
    words.textContent = `${nameOf(head)}: ${seenInWords(seen)} in this sentence.${cut}`;
    say(`Point at a ${inWhole ? "word" : "token"} to read where it looks.`);
    tokens.setAttribute("aria-label", words.textContent);
    tokens.replaceChildren(VIEWS[shape](seen, say));
  }

  whenChanged((changes) => {
    if ("head" in changes) showHead();
    if (["head", "sentence", "view", "words"].some((name) => name in changes)) showSentence();
  });
  showHead();
  showSentence();
  return panel;
}

function chips(head) {
  if (!head.labels.length) return [element("span", {}, "no role")];
  return head.labels.map((label, place) => element("span", { class: "chip" }, label, element("small", {}, head.figures[place])));
}

function numbersOf(head) {
  const rows = DATA.measures
    .map((measure, place) => [measure, place])
    .filter(([, place]) => head.values[place] !== null)
    .map(([measure, place]) =>
      element("tr", {}, element("th", { scope: "row" }, measure.name), element("td", { class: "number" }, number(head.values[place])), element("td", {}, `${rankOf(head, place)} of ${HEADS.length}`)),
    );
  const header = element("thead", {}, element("tr", {}, ["measure", "value", "rank"].map((name) => element("th", { scope: "col" }, name))));
  return [element("h4", {}, "Numbers"), element("table", {}, header, element("tbody", {}, rows))];
}

function neighboursOf(head) {
  const open = (other, text) => {
    const place = HEADS.indexOf(other);
    return element("li", {}, element("button", { type: "button", class: "link", click: (event) => openHead(place, event) }, `head ${other.number}`), element("small", {}, text));
  };
  const parts = [];
  if (head.nearest.length) {
    const items = head.nearest.map(([other, cosine]) => open(headAt(head.site, other), `cosine ${number(cosine)}`));
    parts.push(element("h4", {}, "Nearest heads of its layer"), element("ul", { class: "heads" }, items));
  }
  if (siteOf(head).sharesKeys) {
    const others = HEADS.filter((other) => other !== head && other.site === head.site && other.key === head.key);
    const items = others.map((other) => open(other, ""));
    parts.push(element("h4", {}, `Shares key head ${head.key} with`), element("ul", { class: "heads" }, items.length ? items : "no other head"));
  }
  return parts;
}
