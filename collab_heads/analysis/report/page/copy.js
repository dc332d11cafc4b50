// Code to take away: a button at every block.

const SHOWN = 2000; // milliseconds for which the button says what it has done

function copyButtons() {
  for (const block of document.querySelectorAll("main pre")) {
    const said = element("span", { "aria-live": "polite" }, "copy");
    async function copy() {
      said.textContent = (await copied(block)) ? "copied" : "selected: press Ctrl+C";
      setTimeout(() => (said.textContent = "copy"), SHOWN);
    }
    const holder = element("div", { class: "code" });
    block.replaceWith(holder);
    holder.append(block, element("button", { type: "button", class: "copy", click: copy }, said));
  }
}

/** Copy a block; where a browser forbids it, select it. */
async function copied(block) {
  try {
    await navigator.clipboard.writeText(block.textContent);
    return true;
  } catch {
    window.getSelection().selectAllChildren(block);
    return document.execCommand("copy");
  }
}
