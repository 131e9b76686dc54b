// The sources of the live page: a tiny GPT that reads a sentence, and numbers that the reader types.

// A word with the space before it is one piece if it is known as a whole, and else pieces of its bytes: the pair that was
// learnt first is merged first.
class Tokenizer {
  // pieces: the texts of the tokens, each byte as the character of its number.
  constructor({ pieces, merges, pattern, line }) {
    this.pieces = pieces.map((piece) => Uint8Array.from(piece, (letter) => letter.charCodeAt(0)));
    this.words = new RegExp(pattern, "gu");
    this.line = new RegExp(line, "gu");
    this.whole = new Map(pieces.map((piece, id) => [piece, id]));
    this.merges = merges;
    this.ranks = new Map(merges.map(([a, b], rank) => [a * 65536 + b, rank]));
    this.known = new Map();
  }

  encode(text) {
    const ids = [];
    for (const [word] of text.replace(this.line, "$1 ").matchAll(this.words)) {
      if (!this.known.has(word)) this.known.set(word, this.pieceOf(word));
      for (const id of this.known.get(word)) ids.push(id);
    }
    return ids;
  }

  pieceOf(word) {
    const letters = Array.from(new TextEncoder().encode(word), (byte) => String.fromCharCode(byte));
    const whole = this.whole.get(letters.join(""));
    return whole === undefined ? this.merge(letters.map((letter) => this.whole.get(letter))) : [whole];
  }

  // Joins the pairs in the order of their ranks, each from left to right. A joined pair is a part of later ones only, so
  // one walk over the ranks is enough, and it takes time in proportion to the length of the word.
  merge(ids) {
    const before = ids.map((_, i) => i - 1);
    const after = ids.map((_, i) => i + 1);
    const places = []; // of each rank: where its pair was seen
    const note = (i) => {
      const rank = this.ranks.get(ids[i] * 65536 + ids[after[i]]);
      if (rank !== undefined) (places[rank] ||= []).push(i);
    };
    ids.forEach((_, i) => note(i));
    this.merges.forEach(([a, b, id], rank) => {
      for (const i of (places[rank] || []).sort((x, y) => x - y)) {
        const next = after[i];
        if (ids[i] !== a || ids[next] !== b) continue; // a part of it has been joined to another neighbour
        [ids[i], ids[next], after[i]] = [id, -1, after[next]];
        if (after[i] < ids.length) before[after[i]] = i;
        if (before[i] >= 0) note(before[i]);
        note(i);
      }
    });
    return ids.filter((id) => id >= 0);
  }

  // A token as text; bytes that are a part of a letter are written as numbers.
  text(id) {
    try {
      return new TextDecoder("utf-8", { fatal: true }).decode(this.pieces[id]);
    } catch {
      return Array.from(this.pieces[id], (byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
    }
  }
}

const add = (a, b) => Float32Array.from(a, (x, i) => x + b[i]); // each sum is rounded to float32 once

// The model of examples/small_gpt.py, with the core's functions.
class GPT {
  // info: heads, layers, context, and where each array of weights is; bytes: int8 rows with a scale each, or float32.
  constructor(info, bytes) {
    Object.assign(this, info);
    this.weights = Object.fromEntries(Object.entries(info.arrays).map(([name, { start, shape, scales }]) => {
      const length = shape.reduce((a, b) => a * b, 1);
      if (scales === undefined) return [name, numbersOf(bytes.slice(start, start + 4 * length), "float32")];
      const scale = numbersOf(bytes.slice(scales, scales + 4 * shape[0]), "float32");
      const stored = new Int8Array(bytes.buffer, bytes.byteOffset + start, length);
      return [name, Float32Array.from(stored, (x, i) => x * scale[Math.floor(i / shape[1])])];
    }));
    this.width = info.arrays.token.shape[1];
  }

  // Returns query, key and value of each layer, and the logits after the last token. `first` tokens are padding, which
  // stands at position 0, as the first token does.
  run(ids, pads, core, options) {
    const { weights: W, width, heads } = this;
    const [T, D] = [ids.length, width / heads];
    const sizes = { heads, T_q: T, T_k: T, D, D_v: D };
    let x = new Float32Array(T * width);
    ids.forEach((id, t) => {
      const position = Math.max(t - pads, 0);
      for (let d = 0; d < width; d++) x[t * width + d] = W.token[id * width + d] + W.position[position * width + d];
    });
    const layers = [];
    for (let i = 0; i < this.layers; i++) {
      const qkv = core.linear(core.layerNorm(x, W[`${i} norm 1`]), W[`${i} qkv`], null, width);
      const part = (which) => {
        const array = new Float32Array(T * width);
        for (let head = 0; head < heads; head++) {
          for (let t = 0; t < T; t++) {
            const from = t * 3 * width + which * width + head * D;
            array.set(qkv.subarray(from, from + D), (head * T + t) * D);
          }
        }
        return array;
      };
      const arrays = { query: part(0), key: part(1), value: part(2) };
      layers.push(arrays);
      const out = new Attention(core, sizes, arrays, options).stage("output");
      const joined = new Float32Array(T * width);
      for (let head = 0; head < heads; head++) {
        for (let t = 0; t < T; t++) joined.set(out.subarray((head * T + t) * D, (head * T + t + 1) * D), t * width + head * D);
      }
      const y = add(x, core.linear(joined, W[`${i} out`], null, width));
      const up = core.linear(core.layerNorm(y, W[`${i} norm 2`]), W[`${i} up`], W[`${i} up bias`], width);
      x = add(y, core.linear(core.gelu(up), W[`${i} down`], null, 4 * width));
    }
    const last = core.layerNorm(x.slice((T - 1) * width), W.norm);
    return { layers, logits: core.linear(last, W.token, null, width) };
  }
}

const SENTENCES = {
  "a repetition": "The cat sat on the mat. The dog sat on the box. The cat sat on the",
  "the book": "Your journey starts with one step",
  "a story": "The dog was tired because the cat sat on the box. Then the fox went to the house, and it was happy.",
  "at random": "small fox house matrix bird code small fox house matrix bird code small fox house matrix",
};
const MOST_NEXT = 5;

class SentenceSource {
  constructor(model, tokenizer) {
    Object.assign(this, { name: "sentence", words: "a sentence", model, tokenizer, pads: true, plain: true });
    this.input = make("textarea", { id: "sentence", rows: 2, maxlength: 20000, spellcheck: "false", oninput: () => this.changed() });
    [this.input.value] = Object.values(SENTENCES);
    this.inputs = { sentence: this.input };
    const buttons = Object.entries(SENTENCES).map(([words, sentence]) => make("button", {
      type: "button", onclick: () => {
        this.input.value = sentence;
        this.changed(true);
      },
    }, words));
    this.element = make("div", {}, make("label", { for: "sentence", class: "unseen" }, `A sentence of at most ${model.context} tokens, which a tiny GPT reads`),
      this.input, make("span", { class: "cattn-next" }, "Try", ...buttons));
    this.choices = Array.from({ length: MOST_NEXT }, () => {
      const choice = make("button", { type: "button", title: "append this word", onclick: () => {
        this.input.value += choice.text;
        this.changed();
      } }, make("bdi"), make("span"));
      return choice;
    });
    this.next = make("p", { class: "cattn-next", "aria-live": "polite" }, "Next word:", ...this.choices);
  }

  get texts() {
    return { sentence: this.input.value };
  }

  run(options, pads, core) {
    const most = this.model.context - pads;
    const all = this.tokenizer.encode(this.input.value);
    const ids = all.length ? all.slice(0, most) : this.tokenizer.encode(" ");
    this.note = all.length > most ? `The model reads ${most} tokens: the text has ${all.length}, of which the first are shown.`
      : all.length ? "" : "Type a sentence.";
    const padded = [...Array(pads).fill(0), ...ids];
    this.tokens = [...Array(pads).fill("[pad]"), ...ids.map((id) => this.tokenizer.text(id))];
    const [T, D] = [padded.length, this.model.width / this.model.heads];
    this.sizes = { heads: this.model.heads, T_q: T, T_k: T, D, D_v: D };
    const { layers, logits } = this.model.run(padded, pads, core, options);
    Object.assign(this, { ids, logits, text: this.input.value });
    this.show(logits);
    return layers;
  }

  // The tokens that may come next, by the softmax of the logits. The buttons stay, and so does the focus on one of them.
  show(logits) {
    const best = softmaxOf(Array.from(logits)).map((p, id) => [p, id]).sort((a, b) => b[0] - a[0]).slice(0, MOST_NEXT);
    best.forEach(([p, id], i) => {
      this.choices[i].text = this.tokenizer.text(id);
      this.choices[i].dataset.id = id;
      setText(this.choices[i].firstChild, visible(this.choices[i].text).replace(/^·(?=.)/, ""));
      setText(this.choices[i].lastChild, ` ${Math.round(100 * p)} %`);
    });
  }
}

const BOOK = `0.43 0.15 0.89
0.55 0.87 0.66
0.57 0.85 0.64
0.22 0.58 0.33
0.77 0.25 0.10
0.05 0.80 0.55`;

// One number, as Python and NumPy write it; undefined if the word is something else.
function numberOf(word) {
  const [, sign, size] = /^([-+]?)(.*)$/s.exec(word);
  if (/^(inf|infinity)$/i.test(size)) return sign === "-" ? -Infinity : Infinity;
  if (/^nan$/i.test(size)) return NaN;
  return /^(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i.test(size) ? Number(word) : undefined;
}

// The numbers of a row, which one kind of separator divides: in “1,5 0” a comma may be a decimal one.
function rowOf(text, name) {
  const shown = text.length > 40 ? `${text.slice(0, 40)}…` : text;
  const kinds = new Set((text.match(/\s*[,;]\s*|\s+/g) || []).map((separator) => separator.trim() || " "));
  if (kinds.size > 1) throw new Error(`${name}: “${shown}” mixes separators; write 1.5 with a point, and spaces or commas between numbers`);
  return text.split(/\s*[,;]\s*|\s+/).map((word) => {
    const x = numberOf(word);
    if (x !== undefined) return x;
    throw new Error(word ? `${name}: “${word.slice(0, 40)}” is not a number` : `${name}: “${shown}” lacks a number beside a separator`);
  });
}

const MOST_NUMBERS = 2 ** 17; // of one array, so that an answer comes at once

// Rows of numbers, as NumPy prints them or as they are copied from a table: a row ends with its bracket, or else its line.
function matrixOf(text, name) {
  const count = (text.match(/[^\s,;[\]]+/g) || []).length;
  const [found, most] = [count, MOST_NUMBERS].map((n) => n.toLocaleString("en"));
  if (count > MOST_NUMBERS) throw new Error(`${name} has ${found} numbers, of at most ${most} that this page reads`);
  const list = text.replace(/^\s*(array|tensor)\(|(,\s*dtype=[\w.]+)?\s*\)\s*$/g, "");
  const rows = list.includes("[") ? list.split("]").map((row) => row.replace(/^\s*,?[\s[]*/, "")) : list.split(/\n/);
  const numbers = rows.map((row) => row.trim()).filter(Boolean).map((row) => rowOf(row, name));
  if (!numbers.length) throw new Error(`${name} has no numbers`);
  numbers.forEach((row, i) => {
    if (row.length !== numbers[0].length) throw new Error(`${name}: row ${i} has ${row.length} numbers, row 0 has ${numbers[0].length}`);
  });
  return { rows: numbers.length, columns: numbers[0].length, data: Float32Array.from(numbers.flat()) };
}

class NumbersSource {
  constructor() {
    Object.assign(this, { name: "numbers", words: "numbers", tokens: null });
    const area = (name, text, words) => {
      const input = make("textarea", { id: `numbers-${name}`, rows: text ? 6 : 2, spellcheck: "false", oninput: () => this.changed() });
      input.value = text;
      return [input, make("div", {}, make("label", { for: `numbers-${name}` }, words), input)];
    };
    const [[query, first], [key, second], [value, third]] = [
      area("query", BOOK, "query, a row for each token"), area("key", "", "key, if it is not the query"), area("value", "", "value, if it is not the key")];
    this.inputs = { query, key, value };
    this.element = make("div", { class: "cattn-tables" }, first, second, third);
  }

  get texts() {
    return Object.fromEntries(Object.entries(this.inputs).map(([name, { value }]) => [name, value]));
  }

  run() {
    const query = matrixOf(this.inputs.query.value, "query");
    const or = (name, other) => (this.inputs[name].value.trim() ? matrixOf(this.inputs[name].value, name) : other);
    const key = or("key", query);
    const value = or("value", key);
    if (key.columns !== query.columns) throw new Error(`key has ${key.columns} columns, query has ${query.columns}`);
    if (value.rows !== key.rows) throw new Error(`value has ${value.rows} rows, key has ${key.rows}`);
    const sizes = { heads: 1, T_q: query.rows, T_k: key.rows, D: query.columns, D_v: value.columns };
    for (const stage of ["weights", "output"]) Attention.check(1, sizes, stage);
    this.sizes = sizes;
    return [{ query: query.data, key: key.data, value: value.data }];
  }
}

async function showPage({ model, tokenizer, heading }, weights, core, element) {
  const sources = [new SentenceSource(new GPT(model, weights), new Tokenizer(tokenizer)), new NumbersSource()];
  element.live = new LiveView({
    core: await Core.start(core), sources, element, title: heading, story: (live) => new Story(live),
    heading: [make("h1", {}, heading), make("p", { class: "cattn-lead" }, "Each word asks: which earlier words matter to me?")],
  });
}
