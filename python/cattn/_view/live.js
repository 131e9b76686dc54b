// A view whose numbers the reader changes: controls, stages, the view of weights, and the same as a program in Python.

// A labelled control. `read` and `show` turn the element's text into the option's value, and back into words.
function control(words, input, words_of) {
  const output = make("output");
  const label = make("label", {}, `${words} `, input, words_of ? output : null);
  return { input, label, show: () => words_of && setText(output, words_of(input)) };
}

const STEPS = ["scores", "scaled", "masked", "weights", "dropped"];

// The steps of a query as the core has computed them.
class LiveSteps extends Steps {
  constructor(view, point) {
    super({ point });
    this.view = view;
    this.element.querySelector(".cattn-sliders").remove();
  }

  set({ query, at, key, name }) {
    this.key = key;
    if (this.element.hidden) return;
    const { live, chosen } = this.view;
    const rows = STEPS.map((stage) => live.row(chosen[0], stage, at));
    setText(this.intro, `Query ${query}, from score to output, for each key.`);
    this.heads.replaceChildren(...["key", ...STEPS.map((stage) => STAGES[stage]), ""].map((text) => make("th", { scope: "col" }, text)));
    const write = (x) => (x === -Infinity ? "−∞" : Number.isFinite(x) ? x.toFixed(3) : exactText(x, "float32"));
    this.table.replaceChildren(...Array.from(rows[0], (_, k) => {
      const bar = make("span", { class: "cattn-bar" });
      bar.style.width = `${Math.min(Math.max(rows.at(-1)[k], 0), 1) * 100}%`;
      bar.style.background = "var(--cattn-line)";
      return make("tr", { "data-at": k, "aria-selected": k === key ? "true" : null },
        make("th", { scope: "row" }, make("bdi", {}, name(k))), ...rows.map((row) => make("td", {}, write(row[k]))),
        make("td", { class: "cattn-room" }, bar));
    }));
    const words = live.source.sizes.D_v ? [make("p", {}, make("b", {}, "output"), ` ${this.output(at, write)}`)] : [];
    this.after.replaceChildren(...words);
  }

  // The first numbers of a query's output, or why there are none: it may be much larger than the weights.
  output(at, write) {
    const { live, chosen } = this.view;
    try {
      const numbers = live.row(chosen[0], "output", at);
      return Array.from(numbers.subarray(0, 16), write).join("  ") + (numbers.length > 16 ? " …" : "");
    } catch (error) {
      return error.message;
    }
  }
}

// The view of one stage. A column belongs to a key, or at the last stage to a dimension of the output.
class StageView extends WeightsView {
  get live() {
    return this.model.get("live");
  }

  makeSteps(point) {
    return new LiveSteps(this, point);
  }

  update({ low, high, stage }, numbers) {
    Object.assign(this.info, { low, high, stage });
    this.data = numbers;
    for (const cell of this.thumbnails || []) cell.numbers = null;
    if (this.theme) this.refresh();
  }

  showHead() {
    this.map.column = this.info.column;
    super.showHead();
    setText(this.title, [this.title.textContent === "weights" ? "" : this.title.textContent, this.info.stage].filter(Boolean).join(", "));
  }

  point(q, k, how) {
    if (how !== "tap" || !this.live.taps(q, k)) super.point(q, k, how);
  }

  press(event) {
    const { editing } = this.live;
    if (editing && event.target === this.map.element && (event.key === "Enter" || event.key === " ")) {
      this.live.taps(this.at.q, this.at.k);
      event.preventDefault();
    } else {
      super.press(event);
    }
  }

  showPoint() {
    super.showPoint();
    const { q, k } = this.at;
    if (this.info.column === "key") {
      const dropped = this.live.stage === "dropped" && !this.parts && this.live.row(this.chosen[0], "weights", q)[k] > 0;
      const number = this.status.querySelector("b");
      if (dropped && number.textContent === "hidden") setText(number, "dropped");
      return;
    }
    const query = this.quoted(this.queryName(q), q);
    setText(this.keyLane.title, `Output of query ${query}`);
    setText(this.queryLane.title, `Dimension ${k} of all queries`);
    setText(this.largest[0].caption, `largest of query ${query}`);
    setText(this.largest[1].caption, `largest of dimension ${k}`);
    const words = this.status.firstChild;
    words.data = words.data.replace("→ key", "→ dimension");
  }
}

// A source of queries, keys and values has `sizes`, `tokens` (or null), and run(options, pads, core), which returns the
// arrays of each layer. It may have names of its layers, query_tokens, slopes, a note, `pads` (whether padding can be put
// before its tokens), `element`, its own controls, and `after`, which stands under the stages. It calls changed() when the
// reader has changed its input.
class LiveView {
  constructor({ core, sources, element, title, options = {} }) {
    Object.assign(this, { core, sources, title });
    this.options = { ...OPTIONS, ...options };
    this.initial = { ...this.options, cells: [...this.options.cells] };
    this.stage = "weights";
    this.root = make("div", { class: "cattn-view cattn-live", role: "group", "aria-label": title });
    element.append(this.root);
    this.host = make("div");
    this.problem = make("p", { class: "cattn-hint cattn-note", role: "alert" });
    this.after = make("div");
    this.given = make("div");
    this.program = make("pre", { tabindex: "0", "aria-label": "the program" });
    this.copied = make("output", { "aria-live": "polite" });
    this.root.append(this.makeSources(), this.given, this.makeControls(), this.makeStages(), this.problem, this.after, this.host);
    for (const source of sources) source.changed = () => this.renew();
    watchTheme(this.root, (theme) => (this.root.dataset.theme = theme));
    this.choose(0);
  }

  // ---- controls ----
  makeSources() {
    this.tabs = this.sources.map((source, i) =>
      make("button", { type: "button", "data-source": source.name, onclick: () => this.choose(i) }, source.words));
    return make("span", { class: "cattn-group", role: "group", "aria-label": "input", hidden: this.sources.length < 2 }, ...this.tabs);
  }

  choose(i) {
    if (this.source) { // cells and slopes are of the other input
      Object.assign(this.options, { cells: [], slopes: null });
      this.controls.slopes.input.checked = false;
    }
    this.source = this.sources[i];
    this.tabs.forEach((tab, j) => tab.setAttribute("aria-pressed", String(i === j)));
    this.given.replaceChildren(...(this.source.element ? [this.source.element] : []));
    if (this.padding) this.padding.label.hidden = this.padded.label.hidden = !this.source.pads;
    this.renew();
  }

  makeControls() {
    const range = (name, most, step, value, min = 0) => make("input", {
      type: "range", name, min: Math.min(min, value), max: Math.max(most, value), step, value, oninput: () => this.read(name),
    });
    const off = (text) => (input) => (Number(input.value) === 0 ? "off" : text(input));
    const plain = (input) => String(Number(input.value));
    const box = (name, checked) => make("input", { type: "checkbox", name, checked, onchange: () => this.read(name) });
    const { options } = this;
    this.method = make("select", { name: "method", onchange: () => this.read("method") },
      make("option", { value: "neg_inf" }, "−∞ before the softmax"), make("option", { value: "renormalize" }, "0 after the softmax, then renormalise"));
    this.controls = {
      causal: control("causal", box("causal", options.causal)),
      window: control("window", range("window", 16, 1, options.window), off((input) => `${input.value} tokens`)),
      method: control("masked by", this.method),
      temperature: control("temperature", range("temperature", 4, 0.1, options.temperature, 0.1), plain),
      softcap: control("softcap", range("softcap", 20, 1, options.softcap), off(plain)),
      slopes: control("ALiBi", box("slopes", Boolean(options.slopes))),
      sink: control("sink", range("sink", 8, 0.5, options.sink ?? -8.5, -8.5), (input) => (Number(input.value) < -8 ? "off" : plain(input))),
      dropout: control("dropout", range("dropout", 0.9, 0.1, options.dropout), off(plain)),
      seed: control("seed", make("input", { type: "number", name: "seed", min: 0, max: 4294967295, step: 1, value: options.seed, oninput: () => this.read("seed") })),
    };
    this.padding = control("padding", range("padding", 8, 1, 0), off((input) => `${input.value} tokens`));
    this.padded = control("hide padding", box("hidden", true));
    this.edit = make("button", { type: "button", "aria-pressed": "false", onclick: () => this.setEditing(!this.editing) }, "Edit the mask");
    this.reset = make("button", { type: "button", onclick: () => this.restore() }, "Start again");
    const group = (words, ...parts) => make("fieldset", {}, make("legend", {}, words), ...parts);
    const { causal, window, method, temperature, softcap, slopes, sink, dropout, seed } = Object.fromEntries(
      Object.entries(this.controls).map(([name, { label }]) => [name, label]));
    return make("form", { class: "cattn-controls", onsubmit: (event) => event.preventDefault() },
      group("Mask", causal, window, this.padding.label, this.padded.label, this.edit, method),
      group("Scores", temperature, softcap, slopes, sink),
      group("Dropout", dropout, seed), this.reset);
  }

  makeStages() {
    this.stages = Object.entries(STAGES).map(([stage, words]) =>
      make("button", { type: "button", "data-stage": stage, onclick: () => this.setStage(stage) }, words));
    const copy = make("button", { type: "button", class: "cattn-copy", onclick: () => this.copy() }, "Copy as Python");
    this.details = make("details", { ontoggle: () => this.showProgram() }, make("summary", {}, "The program"), this.program);
    return make("div", { class: "cattn-stages" },
      make("span", { class: "cattn-group", role: "group", "aria-label": "stage" }, ...this.stages), copy, this.copied, this.details);
  }

  // Takes over one option: the others may have values that their controls cannot show.
  read(name) {
    const { input } = this.controls[name] || {};
    const values = {
      causal: () => input.checked,
      slopes: () => (input.checked ? this.slopes : null),
      method: () => this.method.value,
      sink: () => (Number(input.value) < -8 ? null : Number(input.value)),
      seed: () => Math.min(Math.max(Math.floor(Number(input.value)) || 0, 0), 2 ** 32 - 1),
    };
    if (name in this.options) this.options[name] = values[name] ? values[name]() : Number(input.value);
    this.renew();
  }

  // ALiBi's slopes: of the call or of Python's function. For a power of 2 of heads they are 2^(-8/n), its square and so on.
  get slopes() {
    const { heads } = this.source.sizes;
    return this.initial.slopes || this.source.slopes || Array.from({ length: heads }, (_, i) => 2 ** ((-8 / heads) * (i + 1)));
  }

  restore() {
    this.options = { ...this.initial, cells: [...this.initial.cells] };
    const { controls, options } = this;
    for (const name of ["window", "temperature", "softcap", "dropout", "seed"]) controls[name].input.value = options[name];
    controls.causal.input.checked = options.causal;
    controls.slopes.input.checked = Boolean(options.slopes);
    controls.sink.input.value = options.sink ?? -8.5;
    this.method.value = options.method;
    this.padding.input.value = 0;
    this.padded.input.checked = true;
    this.setEditing(false);
    this.renew();
  }

  setEditing(on) {
    this.editing = on;
    this.edit.setAttribute("aria-pressed", String(on));
    setText(this.edit, on ? "Done" : "Edit the mask");
    if (on) setText(this.copied, "Click a cell, or move to it with the arrow keys and press Enter, to hide or show it.");
    else setText(this.copied, "");
    this.root.classList.toggle("cattn-editing", on);
  }

  toggle(q, k) {
    const cell = `${q},${k}`;
    const { cells } = this.options;
    this.options.cells = cells.includes(cell) ? cells.filter((other) => other !== cell) : [...cells, cell];
    this.renew();
  }

  setStage(stage) {
    this.stage = stage;
    this.renew(false);
  }

  // ---- numbers ----

  // Shows another stage, or other numbers, which are computed at most once in a frame.
  renew(computes = true) {
    this.stale ||= computes;
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      this.update(this.stale);
    });
  }

  update(computes = true) {
    for (const one of [...Object.values(this.controls), this.padding, this.padded]) one.show();
    const pads = this.source.pads ? Number(this.padding.input.value) : 0;
    const options = { ...this.options, first: this.padded.input.checked ? pads : 0 };
    this.controls.sink.input.disabled = options.method === "renormalize";
    for (const button of this.stages) {
      button.setAttribute("aria-pressed", String(button.dataset.stage === this.stage));
      const renormalizes = button.dataset.stage === "masked" && options.method === "renormalize";
      setText(button, renormalizes ? "not masked yet" : STAGES[button.dataset.stage]);
    }
    try {
      if (computes || !this.layers) {
        const layers = this.source.run(options, pads, this.core);
        this.layers = layers.map((arrays) => new Attention(this.core, this.source.sizes, arrays, options));
        this.stale = false; // after an error it is computed again
      }
      if (!this.source.sizes.D_v && this.stage === "output") this.stage = "dropped";
      this.stages.at(-1).hidden = !this.source.sizes.D_v;
      this.show();
      setText(this.problem, this.source.note || "");
    } catch (error) {
      setText(this.problem, error.message);
    }
    this.after.replaceChildren(...(this.source.after ? [this.source.after] : []));
    if (this.details.open) this.showProgram();
  }

  show() {
    const { heads, T_q, T_k, D_v } = this.source.sizes;
    const columns = this.stage === "output" ? D_v : T_k;
    Attention.check(this.layers.length, this.source.sizes, this.stage);
    const parts = this.layers.map((layer) => layer.stage(this.stage));
    const numbers = new Float32Array(this.layers.length * heads * T_q * columns);
    parts.forEach((part, i) => numbers.set(part, i * part.length));
    const { low, high } = new Grid({ q1: 1, k1: numbers.length, data: numbers }).range();
    const tokens = this.source.tokens;
    const output = this.stage === "output";
    const shared = !output && T_q === T_k;
    const info = {
      kind: "weights", title: this.title, heading: "", entry: "", note: "", axis: "layer", n_layers: this.layers.length, heads,
      T_q, T_k: columns, offset: output ? 0 : Math.max(T_k - T_q, 0), shared, tokens: output ? null : tokens,
      query_tokens: shared ? null : this.source.query_tokens || (tokens && tokens.slice(-T_q)), layers: this.source.layers || null,
      dtype: "float32", low, high, block: 1, rounded: "", bytes: numbers.byteLength,
      stage: this.stages.find((button) => button.dataset.stage === this.stage).textContent, column: output ? "dimension" : "key",
    };
    const same = this.view && ["n_layers", "heads", "T_q", "T_k", "tokens", "query_tokens", "column"].every(
      (name) => JSON.stringify(info[name]) === JSON.stringify(this.info[name]));
    this.info = info;
    if (same) {
      this.view.update(info, numbers);
      return;
    }
    const kept = this.view ? { heads: this.view.chosen, form: this.view.form, scale: this.state.scale } : {};
    if (this.view) this.view.close();
    const state = { info, weights: numbers, heads: kept.heads || [this.source.opens || [0, 0]], query: -1, key: -1, scale: kept.scale || "linear", live: this };
    this.state = state;
    this.view = new StageView(pageModel(state), this.host);
    if (kept.form) this.view.setForm(kept.form);
  }

  // What the view asks: whether a click on a cell edits the mask, and the numbers of a query at a stage.
  taps(q, k) {
    if (this.editing && this.stage !== "output") this.toggle(q, k);
    return this.editing;
  }

  row([layer, head], stage, q) {
    const { T_q, T_k, D_v } = this.source.sizes;
    const width = stage === "output" ? D_v : T_k;
    return this.layers[layer].stage(stage).subarray((head * T_q + q) * width, (head * T_q + q + 1) * width);
  }

  // ---- the same in Python ----
  get text() {
    const [layer, head] = this.view.chosen[0];
    const q = Math.min(Math.max(this.view.at.q, 0), this.source.sizes.T_q - 1);
    return this.layers[layer].python(this.stage, head, q, this.source.tokens);
  }

  showProgram() {
    if (this.details.open) setText(this.program, this.text);
  }

  async copy() {
    const { text } = this;
    try {
      await navigator.clipboard.writeText(text);
      setText(this.copied, "Copied: paste it into Python.");
    } catch { // a file or a frame may not write to the clipboard
      this.details.open = true;
      this.showProgram();
      const range = document.createRange();
      range.selectNodeContents(this.program);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      setText(this.copied, document.execCommand("copy") ? "Copied: paste it into Python." : "Selected: press Ctrl+C.");
    }
  }
}

// Queries, keys and values that stay as they are: a saved view of a call.
class FixedSource {
  constructor(info, bytes) {
    Object.assign(this, { name: "arrays", words: "arrays", tokens: readable(info.tokens), query_tokens: readable(info.query_tokens), layers: info.layers, opens: info.opens, slopes: info.slopes });
    const { heads, T_q, T_k } = info;
    const numbers = (name) => info[name] && numbersOf(bytes.slice(info[name].start, info[name].start + info[name].bytes), "float32");
    const [query, key, value] = ["query", "key", "value"].map(numbers);
    this.sizes = { heads, T_q, T_k, D: info.query.width, D_v: value ? info.value.width : 0 };
    const part = (array, i) => array && array.subarray((array.length / info.n_layers) * i, (array.length / info.n_layers) * (i + 1));
    this.arrays = Array.from({ length: info.n_layers }, (_, i) => ({ query: part(query, i), key: part(key, i), value: part(value, i) }));
  }

  run() {
    return this.arrays;
  }
}

async function showLive(info, bytes, core, element) {
  const sources = [new FixedSource(info, bytes)];
  element.live = new LiveView({ core: await Core.start(core), sources, element, title: info.title, options: info.options });
}
