// Words in place of the pieces of a vocabulary. Attention to a word is the sum over its pieces, from a word their mean.

const HAS_WORDS = DATA.sentences.some((sentence) => Object.keys(sentence.words).length);

/** What is seen by words, of the side that looks and of the side that is looked at; a side without words keeps its tokens. */
function inWords(seen, looking, looked) {
  const [from, to] = [spans(looking, seen.queries), spans(looked, seen.keys)];
  const weights = from.places.map(([first, last]) =>
    to.places.map(([begin, end]) => {
      let sum = 0;
      for (let query = first; query < last; query += 1) for (let key = begin; key < end; key += 1) sum += seen.weight(query, key);
      return Math.min(1, sum / (last - first)); // bytes are rounded: a sum may be a little too large
    }),
  );
  return {
    ...seen,
    queries: from.texts,
    keys: to.texts,
    weight: (query, key) => weights[query][key],
    root: (query, key) => Math.round(Math.sqrt(weights[query][key]) * STEPS),
  };
}

/** The words of a side, and the pieces of each: the place of the first, and that behind the last. */
function spans(words, tokens) {
  const { starts, texts } = words || { starts: [...tokens.keys()], texts: tokens };
  return { texts, places: starts.map((start, word) => [start, starts[word + 1] ?? tokens.length]) };
}
