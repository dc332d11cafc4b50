// What the reader has chosen. Parts of the page listen to what they show.

const state = {
  head: 0, // the head that is open
  sentence: 0,
  view: "lines",
  words: false, // instead of the pieces of a vocabulary
  across: "layer", // the maps beside each other: all heads of a layer, or one head in all layers
  filter: { group: "", layer: "", kind: "", text: "" },
};
const listeners = [];

function whenChanged(listener) {
  listeners.push(listener);
}

/** Change some of the state; listeners are told what. */
function change(changes) {
  Object.assign(state, changes);
  for (const listener of listeners) listener(changes);
}

/** Open a head. From the keyboard, the reader goes there; on a narrow page everybody does. */
function openHead(place, event) {
  change({ head: place });
  const panel = document.getElementById("head");
  const byKeyboard = event && event.detail === 0;
  if (byKeyboard) panel.querySelector("h3").focus();
  const { top, bottom } = panel.getBoundingClientRect();
  if (top > window.innerHeight / 2 || bottom < 100) panel.scrollIntoView({ block: "start" });
}
