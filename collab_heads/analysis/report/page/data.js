"use strict";
// What the page is about: heads, their numbers, and where they look in some sentences.

const DATA = JSON.parse(document.getElementById("data").textContent);
const HEADS = DATA.heads;
const STEPS = 255; // of a byte

function siteOf(head) {
  return DATA.sites[head.site];
}

/** "Layer 3, head 7", after the group where there are several. */
function nameOf(head) {
  const name = `layer ${siteOf(head).layer}, head ${head.number}`;
  return DATA.groups.length > 1 ? `${siteOf(head).group}, ${name}` : name[0].toUpperCase() + name.slice(1);
}

/** What a head does, in words. */
function rolesOf(head) {
  return head.labels.join(", ") || "no role";
}

function percent(weight) {
  return `${Math.round(100 * weight)} %`;
}

/** A number as people read it, with three digits that count. */
function number(value) {
  if (value === null) return "";
  const size = Math.abs(value);
  return size !== 0 && (size < 0.001 || size >= 1e5) ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

/** The place of a value among those of all heads, 1 for the largest. */
function rankOf(head, measure) {
  const value = head.values[measure];
  return 1 + HEADS.filter((other) => other.values[measure] !== null && other.values[measure] > value).length;
}

/** A head by its site and its original number. */
function headAt(site, headNumber) {
  return HEADS.find((head) => head.site === site && head.number === headNumber);
}

async function inflate(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const unpacked = new Map(); // sentence -> a promise of its weights

/**
 * The attention of a head in a sentence: tokens that look, tokens looked at, and the weight from one to the other.
 * `root` is the square root of the weight as a byte, which is what colours show. `words`: see words.js.
 */
async function attentionOf(head, place, words) {
  const sentence = DATA.sentences[place];
  if (!unpacked.has(place)) unpacked.set(place, inflate(sentence.maps));
  const bytes = await unpacked.get(place);
  const sizes = DATA.sites.map((site) => {
    const [queries, keys] = site.sides.map((side) => sentence.tokens[side].length);
    return { queries, keys, bytes: site.heads * queries * keys };
  });
  const { queries, keys } = sizes[head.site];
  const before = sizes.slice(0, head.site).reduce((sum, size) => sum + size.bytes, 0);
  const index = HEADS.filter((other) => other.site === head.site).indexOf(head);
  const start = before + index * queries * keys;
  const own = bytes.subarray(start, start + queries * keys);
  const { power } = sentence;
  const [from, to] = siteOf(head).sides;
  const seen = {
    queries: sentence.tokens[from],
    keys: sentence.tokens[to],
    self: from === to,
    cut: Math.max(sentence.length[from] - queries, sentence.length[to] - keys),
    weight: (query, key) => (own[query * keys + key] / STEPS) ** power,
    root: (query, key) => (power === 2 ? own[query * keys + key] : Math.round(Math.sqrt(own[query * keys + key] * STEPS))),
  };
  return words ? inWords(seen, sentence.words[from], sentence.words[to]) : seen;
}
