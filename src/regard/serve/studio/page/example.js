// A small text that a model can learn in a minute: random sentences from a small grammar.

const WORDS = {
  adjective: ["small", "old", "grey", "quick", "sleepy", "brave", "hungry", "quiet"],
  noun: ["cat", "dog", "bird", "fox", "mouse", "horse", "child", "sailor"],
  verb: ["sees", "follows", "finds", "likes", "helps", "hears", "chases", "misses"],
  place: ["in the garden", "by the river", "under the old tree", "near the house", "at the market", "on the hill"],
  time: ["in the morning", "at noon", "in the evening", "every day", "when it rains", "in winter"],
};

export function exampleText(sentences = 900) {
  let state = 7;
  const random = n => (state = (state * 48271) % 2147483647) % n;
  const pick = kind => WORDS[kind][random(WORDS[kind].length)];
  const thing = () => `the ${random(3) ? `${pick("adjective")} ` : ""}${pick("noun")}`;
  const capital = text => text[0].toUpperCase() + text.slice(1);
  const lines = [];
  for (let n = 0; n < sentences; n++) {
    const place = random(2) ? ` ${pick("place")}` : "";
    const kind = random(4);
    if (kind === 0) lines.push(`${capital(pick("time"))}, ${thing()} ${pick("verb")} ${thing()}${place}.`);
    else if (kind === 1) lines.push(`${capital(thing())} ${pick("verb")} ${thing()}, and ${thing()} ${pick("verb")} ${thing()}.`);
    else lines.push(`${capital(thing())} ${pick("verb")} ${thing()}${place}${random(2) ? ` ${pick("time")}` : ""}.`);
  }
  return lines.join("\n") + "\n";
}
