// What a head does in a sentence, in words: an alternative text, and the first thing to read.

const IN_SELF_ATTENTION = [
  ["the previous token", (query) => query - 1],
  ["the token itself", (query) => query],
  ["the next token", (query) => query + 1],
  ["the first token", () => 0],
  ["the last token", (_, keys) => keys - 1],
];
const IN_CROSS_ATTENTION = [
  ["the token at the same position", (query) => query],
  ["the first token", () => 0],
  ["the last token", (_, keys) => keys - 1],
];

/** "82 % of attention to the previous token": where most of the attention goes, of the places that have names. */
function seenInWords(seen) {
  const { queries, keys, weight, self } = seen;
  const shares = (self ? IN_SELF_ATTENTION : IN_CROSS_ATTENTION).map(([name, place]) => {
    const found = queries.map((_, query) => place(query, keys.length));
    const sum = found.reduce((total, key, query) => total + (key >= 0 && key < keys.length ? weight(query, key) : 0), 0);
    return [sum / queries.length, name];
  });
  const [share, name] = shares.sort((one, other) => other[0] - one[0])[0];
  return `${percent(share)} of attention to ${state.words ? name.replace("token", "word") : name}`;
}

const SPACE = "\u2423"; // an open box, where a token begins a word

/** Tokens as running text: word pieces are put together. */
function textOf(tokens) {
  const spaced = tokens.some((token) => token.startsWith(SPACE));
  return spaced ? tokens.join("").replaceAll(SPACE, " ").trim() : tokens.join(" ").replaceAll(" ##", "");
}

/** What a sentence is called in the list: how many tokens it has, and its beginning. */
function sentenceName(sentence) {
  const side = DATA.sites[0].sides[0];
  const text = textOf(sentence.tokens[side]);
  return `${sentence.length[side]} tokens: ${text.length > 60 ? `${text.slice(0, 60)}…` : text}`;
}
