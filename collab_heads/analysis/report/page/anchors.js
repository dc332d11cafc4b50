// Links to heads: "#3-7" opens head 7 of layer 3, and the address names the head that is open.

/** The place of the head that the end of an address names; -1 if it names none. */
function headNamed(hash) {
  const name = hash.slice(1);
  const exact = HEADS.findIndex((head) => head.anchor === name);
  // without the role: the first role that has such a head
  return exact < 0 && /^\d+-\d+$/.test(name) ? HEADS.findIndex((head) => head.anchor.endsWith(`-${name}`)) : exact;
}

function followLinks() {
  whenChanged((changes) => {
    // replaced, not added: "back" leads out of the page, not through every head that was looked at
    if ("head" in changes) history.replaceState(null, "", `#${HEADS[state.head].anchor}`);
  });
  window.addEventListener("hashchange", () => {
    const place = headNamed(location.hash);
    if (place >= 0 && place !== state.head) openHead(place);
  });
}
