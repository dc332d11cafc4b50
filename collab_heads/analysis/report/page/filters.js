// Which heads are shown: by role, layer, label, and words.

const NO_ROLE = "no role";

function isShown(head) {
  const { group, layer, kind, text } = state.filter;
  const site = siteOf(head);
  if ((group && site.group !== group) || (layer && site.layer !== Number(layer))) return false;
  if (kind && (kind === NO_ROLE ? head.kinds.length : !head.kinds.includes(kind))) return false;
  const said = `${site.group} layer ${site.layer} head ${head.number} ${rolesOf(head)} ${site.path}`.toLowerCase();
  const words = text.toLowerCase().match(/(layer|head) \d+|\S+/g) ?? []; // "layer 3" is not the layer of head 3
  return words.every((word) => matches(said, word));
}

/** Numbers are looked for whole: "3" is not in "13". */
function matches(said, word) {
  return /^((layer|head) )?\d+$/.test(word) ? new RegExp(`(^|\\D)${word}(\\D|$)`).test(said) : said.includes(word);
}

function filtersForm() {
  const set = (name) => (value) => change({ filter: { ...state.filter, [name]: value } });
  const all = (values, text = (value) => value) => [["", "all"], ...values.map((value) => [value, text(value)])];
  const layers = [...new Set(DATA.sites.map((site) => site.layer))].sort((one, other) => one - other);
  const kinds = [...new Set(HEADS.flatMap((head) => head.kinds))];
  const text = element("input", { type: "search", placeholder: "layer 3 head 7", input: () => set("text")(text.value) });
  const count = element("output", { class: "count" });
  const form = element(
    "form",
    { id: "filters", role: "search", "aria-label": "Which heads are shown", submit: (event) => event.preventDefault() },
    DATA.groups.length > 1 ? choice("role", all(DATA.groups), set("group")) : null,
    choice("layer", all(layers), set("layer")),
    kinds.length ? choice("label", all([...kinds, NO_ROLE]), set("kind")) : null,
    element("label", {}, "find", text),
    element("button", { type: "reset" }, "show all"),
    count,
  );
  form.addEventListener("reset", () => change({ filter: { group: "", layer: "", kind: "", text: "" } }));
  const tell = () => (count.value = `${HEADS.filter(isShown).length} of ${HEADS.length} heads`);
  whenChanged((changes) => changes.filter && tell());
  tell();
  return form;
}
