// The core of cattn in WebAssembly, and the stages of attention that it computes: the bits of Python's functions.

const STATUS = ["", "there is not enough memory for so many tokens", "the computation was stopped"];
const MOST_BYTES = 2 ** 31 - 1; // of one array in the module's memory, which a page can address with a sign
const MOST_CELLS_LIVE = 2 ** 22; // of one stage that is shown, all layers and heads; as _live.py has it
const STAGE = { qk: 0, bias: 2, mask: 3, softmax: 4, dropout: 5, out: 6 }; // as enum cattn_stage numbers them

class Core {
  static async start(bytes) {
    const { instance } = await WebAssembly.instantiate(bytes, {});
    instance.exports._initialize();
    return new Core(instance.exports);
  }

  constructor(functions) {
    this.functions = functions;
  }

  // Calls a function whose last argument takes `length` numbers, and returns these. Typed arrays are copied into the
  // module's memory; null is an absent array.
  call(name, length, ...given) {
    const taken = [];
    const allocate = (size) => {
      const at = size + 8 > MOST_BYTES ? 0 : this.functions.allocate(size + 8) >>> 0;
      if (!at) throw new Error(STATUS[1]);
      taken.push(at);
      return at;
    };
    try {
      const places = given.map((x) => (ArrayBuffer.isView(x) ? allocate(x.byteLength) : x ?? 0));
      const out = allocate(length * 4);
      const { memory } = this.functions; // allocate may have moved its buffer
      given.forEach((x, i) => ArrayBuffer.isView(x)
        && new Uint8Array(memory.buffer, places[i]).set(new Uint8Array(x.buffer, x.byteOffset, x.byteLength)));
      const status = this.functions[name](...places, out);
      if (status) throw new Error(STATUS[status]);
      return new Float32Array(memory.buffer, out, length).slice();
    } finally {
      taken.forEach((at) => this.functions.release(at));
    }
  }

  linear(x, weight, bias, depth) {
    const [rows, columns] = [x.length / depth, weight.length / depth];
    return this.call("linear", rows * columns, rows, columns, depth, x, weight, bias);
  }

  layerNorm(x, weight) {
    return this.call("layer_norm", x.length, x.length / weight.length, weight.length, x, weight);
  }

  gelu(x) {
    return this.call("gelu", x.length, x.length, x);
  }

  dropout(x, p, seed) {
    return this.call("dropout", x.length, x.length, x, p, seed);
  }
}

// What a call of attention takes besides its arrays, as the arguments of Python's function have it: a window of n keys on
// either side of a query's position, its own among them (0: none); `first` is the first valid key; `cells` are the hidden
// pairs of an attn_mask, "query,key".
const OPTIONS = {
  method: "neg_inf", causal: true, window: 0, softcap: 0, slopes: null, sink: null, temperature: 1, scale: null,
  dropout: 0, seed: 123, offset: 0, first: 0, cells: [],
};

const STAGES = {
  scores: "query · key",
  scaled: "scaled",
  masked: "masked",
  weights: "weights",
  dropped: "after dropout",
  output: "output",
};

// The attention of one layer: arrays (heads, tokens, width), sizes { heads, T_q, T_k, D, D_v }.
class Attention {
  constructor(core, sizes, arrays, options) {
    Object.assign(this, { core, sizes, arrays, options: { ...OPTIONS, ...options } });
    this.known = {};
  }

  get renormalizes() {
    return this.options.method === "renormalize";
  }

  get scale() {
    return (this.options.scale ?? 1 / Math.sqrt(this.sizes.D)) / this.options.temperature;
  }

  // Refuses a stage of so many layers that is too large to be shown, before the core is asked for its numbers.
  static check(n_layers, { heads, T_q, T_k, D_v }, stage) {
    const columns = stage === "output" ? D_v : T_k;
    if (n_layers * heads * T_q * columns <= MOST_CELLS_LIVE) return;
    const all = n_layers * heads === 1 ? "" : `${n_layers * heads} heads of `;
    throw new Error(`There are too many tokens: ${all}${T_q} × ${columns} numbers, of at most ${MOST_CELLS_LIVE.toLocaleString("en")} that a stage shows.`);
  }

  // The edited cells as pairs, without what a longer text has left behind.
  get cells() {
    const { T_q, T_k } = this.sizes;
    return this.options.cells.map((cell) => cell.split(",").map(Number)).filter(([q, k]) => q < T_q && k < T_k);
  }

  // Bytes (T_q, T_k), 0 where an edited cell is hidden; null without such cells.
  get mask() {
    const { cells, sizes: { T_q, T_k } } = this;
    if (!cells.length) return null;
    const mask = new Uint8Array(T_q * T_k).fill(1);
    for (const [q, k] of cells) mask[q * T_k + k] = 0;
    return mask;
  }

  // Why a query does not see a key by its position, in words; "" if it does.
  reason(q, k) {
    const { causal, window, offset, first } = this.options;
    const away = k - q - offset;
    if (k < first) return "hidden: padding";
    if (causal && away > 0) return "hidden: it comes later";
    return window > 0 && Math.abs(away) >= window ? "hidden: outside of the window" : "";
  }

  // Bytes (T_q, T_k), 1 where the query sees the key by all masks.
  get visible() {
    const { T_q, T_k } = this.sizes;
    const seen = this.mask || new Uint8Array(T_q * T_k).fill(1);
    for (let q = 0; q < T_q; q++) for (let k = 0; k < T_k; k++) if (this.reason(q, k)) seen[q * T_k + k] = 0;
    return seen;
  }

  attention(stage, changes = {}) {
    const { heads, T_q, T_k, D, D_v } = this.sizes;
    const options = { ...this.options, ...changes };
    const { query, key, value } = this.arrays;
    const side = options.window > 0 ? options.window - 1 : -1;
    const numbers = Float64Array.of(heads, T_q, T_k, D, D_v, options.scale ?? this.scale, options.softcap, options.causal ? 1 : 0,
      side, side, options.offset, options.first, options.dropout, options.seed);
    const slopes = options.slopes && Float32Array.from(options.slopes);
    const sinks = options.sink === null ? null : new Float32Array(heads).fill(options.sink);
    const length = heads * T_q * (stage === "out" ? D_v : T_k);
    const mask = "mask" in changes ? changes.mask : this.mask;
    return this.core.call("attention", length, numbers, STAGE[stage], query, key, stage === "out" ? value : null, mask, slopes, sinks);
  }

  compute(stage) {
    const { heads, T_q, T_k, D_v } = this.sizes;
    const unmasked = { causal: false, window: 0, first: 0, mask: null, scale: this.scale, dropout: 0, sink: null };
    const masked = { scale: this.scale };
    if (stage === "scores") return this.attention("qk", { scale: 1 });
    if (stage === "scaled") return this.attention("qk", masked);
    if (!this.renormalizes) return this.attention({ masked: "mask", weights: "softmax", dropped: "dropout", output: "out" }[stage], masked);
    if (stage === "masked") return this.attention("softmax", unmasked);
    if (stage === "weights") {
      return this.core.call("renormalized_softmax", heads * T_q * T_k, heads, T_q, T_k, this.attention("bias", unmasked), this.visible);
    }
    if (stage === "dropped") return this.core.dropout(this.stage("weights"), this.options.dropout, this.options.seed);
    const result = new Float32Array(heads * T_q * D_v);
    for (let head = 0; head < heads; head++) {
      const [dropped, value] = [this.stage("dropped"), this.arrays.value];
      const turned = new Float32Array(D_v * T_k);
      for (let k = 0; k < T_k; k++) for (let d = 0; d < D_v; d++) turned[d * T_k + k] = value[(head * T_k + k) * D_v + d];
      result.set(this.core.linear(dropped.subarray(head * T_q * T_k, (head + 1) * T_q * T_k), turned, null, T_k), head * T_q * D_v);
    }
    return result;
  }

  // One stage of all heads, computed once.
  stage(name) {
    Attention.check(1, this.sizes, name);
    return (this.known[name] ||= this.compute(name));
  }

  // ---- the same in Python ----

  // The program that prints row `q` of a stage of a head; its variables have the names of the stages.
  python(stage, head, q, tokens) {
    const { softcap, slopes, offset } = this.options;
    const { T_q, T_k } = this.sizes;
    const shape = [`scale=${pythonFloat(this.scale)}`];
    if (softcap) shape.push(`softcap=${pythonFloat(softcap)}`);
    if (slopes) shape.push(`alibi_slopes=[${slopes.map(pythonFloat).join(", ")}]`);
    if (offset || T_q !== T_k) shape.push(`query_offset=${BigInt(offset)}`);
    return [
      "import base64", "", "import numpy as np", "", "import cattn", "", "",
      "def array(text, *shape):", '    return np.frombuffer(base64.b64decode(text), "<f4").reshape(shape)', "", "",
      ...this.pythonArrays(tokens),
      `scores = cattn.attention_weights(query, key, scale=1.0, stage="qk")`,
      `options = dict(${shape.join(", ")})`,
      `scaled = cattn.attention_weights(query, key, scale=options["scale"], stage="qk")`,
      ...(this.renormalizes ? this.pythonRenormalized() : this.pythonFilled()),
      "", `print(${stage}[0, ${head}, ${q}])`, "",
    ].join("\n");
  }

  pythonArrays(tokens) {
    const { heads, T_q, T_k, D, D_v } = this.sizes;
    const { query, key, value } = this.arrays;
    const array = (numbers, ...shape) => {
      const bytes = new Uint8Array(numbers.buffer, numbers.byteOffset, numbers.byteLength);
      return `array("${btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""))}", 1, ${heads}, ${shape.join(", ")})`;
    };
    const lines = tokens ? [`tokens = [${tokens.map(pythonText).join(", ")}]`] : [];
    lines.push(`query = ${array(query, T_q, D)}  # batch, heads, tokens, width`, `key = ${array(key, T_k, D)}`);
    if (value) lines.push(`value = ${array(value, T_k, D_v)}`);
    if (this.mask) {
      const cells = this.cells.map(([q, k]) => `(${q}, ${k})`).join(", ");
      lines.push(`attn_mask = np.ones((${T_q}, ${T_k}), bool)`,
        `attn_mask[tuple(np.transpose([${cells}]))] = False  # hidden pairs of query and key`);
    }
    return lines;
  }

  // Arguments that hide keys by position, for attention and for causal_mask.
  get pythonRanges() {
    const { causal, window } = this.options;
    return [...(causal ? ["is_causal=True"] : []), ...(window > 0 ? [`window_size=(${window - 1}, ${window - 1})`] : [])];
  }

  pythonFilled() {
    const { sink, dropout, seed, first } = this.options;
    const masks = [...this.pythonRanges, ...(first ? [`key_value_seq_starts=${first}`] : []), ...(this.mask ? ["attn_mask=attn_mask"] : [])];
    const drops = dropout ? `, dropout_p=${pythonFloat(dropout)}, rng=cattn.TorchGenerator(${seed})` : "";
    const sinks = sink === null ? "" : Array(this.sizes.heads).fill(pythonFloat(sink)).join(", ");
    return [
      ...(masks.length ? [`options |= dict(${masks.join(", ")})`] : []),
      `masked = cattn.attention_weights(query, key, **options, stage="mask")`,
      ...(sinks ? [`options |= dict(sinks=[${sinks}])`] : []),
      "weights = cattn.attention_weights(query, key, **options)",
      `dropped = cattn.attention_weights(query, key, **options${drops}, stage="dropout")`,
      ...(this.arrays.value ? [`output = cattn.scaled_dot_product_attention(query, key, value, **options${drops})`] : []),
    ];
  }

  pythonRenormalized() {
    const { T_q, T_k } = this.sizes;
    const { causal, dropout, seed, offset, first } = this.options;
    const seen = [T_q, T_k, ...(causal ? [] : ["is_causal=False"]), `query_offset=${BigInt(offset)}`, ...this.pythonRanges];
    return [
      `visible = cattn.causal_mask(${seen.join(", ")})${this.mask ? " & attn_mask" : ""}`,
      ...(first ? [`visible[:, :${first}] = False  # padding`] : []),
      "masked = cattn.attention_weights(query, key, **options)  # not yet",
      `biased = cattn.attention_weights(query, key, **options, stage="bias")`,
      `weights = cattn.masked_softmax(biased, visible, method="renormalize")`,
      dropout ? `dropped = cattn.dropout(weights, ${pythonFloat(dropout)}, rng=cattn.TorchGenerator(${seed}))` : "dropped = weights",
      ...(this.arrays.value
        ? ["output = np.stack([cattn.functional.linear(w, v.T) for w, v in zip(dropped[0], value[0])])[None]"] : []),
    ];
  }
}

// A literal of a float, as `exactText` writes the number.
function pythonFloat(x) {
  const text = exactText(x, "float64");
  if (!Number.isFinite(x)) return `float("${text}")`;
  return /^-?\d+$/.test(text) ? `${text}.0` : text;
}

// A literal of ASCII: JSON's escapes are Python's but for letters beyond 16 bits.
function pythonText(text) {
  return JSON.stringify(text).replace(/[\u007f-\u{10ffff}]/gu, (letter) => {
    const code = letter.codePointAt(0).toString(16);
    return code.length > 4 ? `\\U${code.padStart(8, "0")}` : `\\u${code.padStart(4, "0")}`;
  });
}
