// Elements of the page.

/** An element: its attributes (functions listen), then children, text among them. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null));
  return made;
}

/** A choice with a label above it: options are [value, text]. */
function choice(label, options, changed) {
  const select = element("select", { change: () => changed(select.value) });
  select.append(...options.map(([value, text]) => element("option", { value }, text)));
  return element("label", {}, label, select);
}

/** Put a note above or below what is pointed at, within the window. */
function placeTip(tip, left, top, bottom) {
  tip.style.left = `${Math.max(4, Math.min(left, document.documentElement.clientWidth - tip.offsetWidth - 4))}px`;
  const below = bottom + 6;
  tip.style.top = `${below + tip.offsetHeight > window.innerHeight ? top - tip.offsetHeight - 6 : below}px`;
}

/** One tab stop for many elements: keys move between them. `next` gives the one to go to, or nothing. */
function withArrows(holder, selector, next) {
  holder.addEventListener("keydown", (event) => {
    const here = event.target.closest(selector);
    if (!here || !/^(Arrow|Page|Home$|End$)/.test(event.key)) return;
    const there = next(here, event.key);
    if (there || !event.key.startsWith("Page")) event.preventDefault(); // where nothing takes these keys, they scroll
    if (!there) return;
    here.tabIndex = -1;
    there.tabIndex = 0;
    there.focus();
  });
}
