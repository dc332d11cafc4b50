// Colours that people with any kind of colour vision can tell apart, and ink that can be read on them.

const SEQUENTIAL = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725"];
const DIVERGING = ["#2d004b", "#542788", "#8073ac", "#b2abd2", "#f7f7f7", "#fdb863", "#e08214", "#b35806", "#7f3b08"];
const EQUAL_CONTRAST = 0.179; // the luminance at which black and white text can be read equally well (WCAG 2.2)

function channels(colour) {
  return [1, 3, 5].map((start) => parseInt(colour.slice(start, start + 2), 16));
}

/** The colour at a place from 0 to 1. */
function between(colours, place) {
  const at = Math.min(1, Math.max(0, place)) * (colours.length - 1);
  const first = Math.min(Math.floor(at), colours.length - 2);
  const [one, other] = [channels(colours[first]), channels(colours[first + 1])];
  const mixed = one.map((value, i) => Math.round(value + (at - first) * (other[i] - value)));
  return `#${mixed.map((value) => value.toString(16).padStart(2, "0")).join("")}`;
}

/** The scale of a measure: a number for every colour, see scales.py, and the colour of a value between them. */
function scaleOf({ scale, stops }) {
  const [low, middle, high] = [stops[0], stops[stops.length / 2 - 0.5], stops.at(-1)];
  const colours = low < 0 && high > 0 ? DIVERGING : SEQUENTIAL;
  function colour(value) {
    const above = 1 + stops.slice(1, -1).filter((stop) => stop < value).length;
    const [below, width] = [stops[above - 1], stops[above] - stops[above - 1]];
    return between(colours, high > low ? (above - 1 + (width > 0 ? (value - below) / width : 0.5)) / (stops.length - 1) : 0.5);
  }
  const said = scale === "linear" ? "" : `by ${scale}: the middle is ${number(middle)}`;
  return { low, high, said, colours, colour };
}

/** One colour beside the other, as the background of a cell. */
function stripes(colours) {
  const edges = colours.map((colour, place) => `${colour} ${(100 * place) / colours.length}% ${(100 * (place + 1)) / colours.length}%`);
  return `linear-gradient(to right, ${edges.join(", ")})`;
}

function ink(colour) {
  const [red, green, blue] = channels(colour).map((value) => {
    const share = value / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > EQUAL_CONTRAST ? "#000000" : "#ffffff";
}
