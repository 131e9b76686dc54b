// A view whose numbers the reader changes: controls, stages, the view of weights, and the same as a program in Python.

// A labelled control; `words_of` turns what it is set to into words. A box stands before its words.
function control(words, input, words_of) {
  const output = make("output");
  const label = make("label", {}, ...(input.type === "checkbox" ? [input, words] : [`${words} `, input, words_of ? output : null].filter(Boolean)));
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
    const weights = Array.from(rows[3]);
    const largest = weights.indexOf(Math.max(...weights));
    setText(this.intro, weights[largest] > 0
      ? `Query ${query}, from score to output, for each key. The largest weight is ${signed(weights[largest])}, of key ${this.view.quoted(name(largest), largest)}.`
      : `Query ${query} sees no key: all its weights are 0.`);
    this.heads.replaceChildren(...["key", ...STEPS.map((stage) => STAGES[stage]), ""].map((text) => make("th", { scope: "col" }, text)));
    this.table.replaceChildren(...Array.from(rows[0], (_, k) => {
      const bar = make("span", { class: "cattn-bar" });
      bar.style.width = `${Math.min(Math.max(rows.at(-1)[k], 0), 1) * 100}%`;
      bar.style.background = "var(--cattn-line)";
      return make("tr", { "data-at": k, "aria-selected": k === key ? "true" : null },
        make("th", { scope: "row" }, make("bdi", {}, name(k))), ...rows.map((row) => make("td", {}, signed(row[k]))),
        make("td", { class: "cattn-room" }, bar));
    }));
    if (this.table.rows[key]) scrollInto(this.scroll, this.table.rows[key]);
    const words = live.source.sizes.D_v ? [make("p", {}, make("b", {}, "output"), ` ${this.output(at)}`)] : [];
    this.after.replaceChildren(...live.products(chosen[0], at, key), ...words);
  }

  // The first numbers of a query's output, or why there are none: it may be much larger than the weights.
  output(at) {
    const { live, chosen } = this.view;
    try {
      const numbers = live.row(chosen[0], "output", at);
      return Array.from(numbers.subarray(0, 16), (x) => signed(x)).join("  ") + (numbers.length > 16 ? " …" : "");
    } catch (error) {
      return error.message;
    }
  }
}

const TALLEST_LIVE = 380; // pixels of the map, so that it stands on the first screen

// The view of one stage. A column belongs to a key, or at the last stage to a dimension of the output.
class StageView extends WeightsView {
  get live() {
    return this.model.get("live");
  }

  makeSteps(point) {
    return new LiveSteps(this, point);
  }

  // The text and the map come first; what a reader needs later stands under the controls of the page.
  arrange() {
    const { after } = this.live;
    this.hint.append(" A cross marks a cell that you have hidden.");
    const columns = this.columns_();
    columns.classList.add("cattn-map-first");
    columns.prepend(make("div", { class: "cattn-large" }, make("header", {}, this.title), this.map.element, this.lines.element,
      this.steps.element, this.status));
    this.map.tallest = TALLEST_LIVE;
    this.root.append(this.keyLane.element, columns);
    this.bar.append(this.zooms);
    this.more = make("div", {}, this.bar, this.hint, this.queryLane.element, this.tables);
    this.more.addEventListener("keydown", (event) => this.press(event));
    after.replaceChildren(this.more);
  }

  update({ low, high, stage }, numbers) {
    Object.assign(this.info, { low, high, stage });
    this.data = numbers;
    for (const cell of this.thumbnails || []) cell.numbers = null;
    if (this.theme) this.refresh();
  }

  get crossed() {
    return this.info.column === "key" ? this.live.hiddenByHand : [];
  }

  showHead() {
    this.map.column = this.info.column;
    super.showHead();
    const named = this.parts ? "" : this.live.nameOf(this.chosen[0]);
    const words = this.title.textContent === "weights" ? "" : this.title.textContent;
    setText(this.title, [words + (named && `, which ${named}`), this.info.stage].filter(Boolean).join(": "));
    for (const cell of this.thumbnails || []) {
      const name = this.live.nameOf([cell.layer, cell.head]);
      setText(cell.caption, [this.info.n_layers === 1 ? cell.head : "", name].filter((word) => word !== "").join(" "));
      cell.setAttribute("aria-label", [this.headName([cell.layer, cell.head]), name].filter(Boolean).join(": "));
      cell.title = cell.getAttribute("aria-label");
    }
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
      const number = this.status.querySelector("b");
      if (number.textContent === "hidden") setText(number, this.live.why(this.chosen[0], q, k));
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

// What a head does, if most of its weight is there: the first name is the most worth a look. A rule has the keys at which
// a query then looks, by the places before it of the same word; none for a query that it does not speak of.
const LEAST_WEIGHT = 0.5;
const NAMES = {
  "finds what came after the same word": (q, same) => same.map((k) => k + 1).filter((k) => k < q),
  "looks one word back": (q) => (q > 0 ? [q - 1] : []),
  "looks at the same word before": (q, same) => same,
  "looks at itself": (q) => (q > 0 ? [q] : []),
  "looks at the first word": (q) => (q > 1 ? [0] : []),
};
const sum = (list, size) => list.reduce((total, x) => total + size(x), 0);

// For each token the places before it of the same token.
function sameBefore(tokens, length) {
  const places = new Map();
  return Array.from({ length }, (_, q) => {
    const before = (tokens && places.get(tokens[q])) || [];
    if (tokens) places.set(tokens[q], [...before, q]);
    return before;
  });
}

// The names of the heads of a layer: "" for a head that has none, and for all if queries and keys are of two texts.
function namesOf(layer, tokens) {
  const { heads, T_q, T_k } = layer.sizes;
  if (T_q !== T_k) return Array(heads).fill("");
  const weights = layer.stage("weights");
  const same = sameBefore(tokens, T_q);
  return Array.from({ length: heads }, (_, head) => Object.keys(NAMES).find((name) => {
    const seen = same.flatMap((before, q) => {
      const keys = NAMES[name](q, before);
      return keys.length ? [sum(keys, (k) => weights[(head * T_q + q) * T_k + k])] : [];
    });
    return seen.length > 1 && sum(seen, (x) => x) / seen.length > LEAST_WEIGHT;
  }) || "");
}

// A source of queries, keys and values has `sizes`, `tokens` (or null), and run(options, pads, core), which returns the
// arrays of each layer. It may have names of its layers, query_tokens, slopes, a note, `pads` (whether padding can be put
// before its tokens), `element`, its own controls, and `next`, which stands above the text. It calls changed() when the
// reader has changed its input.
class LiveView {
  constructor({ core, sources, element, title, options = {}, heading = [], story = null }) {
    Object.assign(this, { core, sources, title });
    this.options = { ...OPTIONS, ...options };
    this.initial = { ...this.options, cells: [...this.options.cells] };
    this.stage = "weights";
    this.root = make("div", { class: "cattn-view cattn-live", role: "group", "aria-label": title });
    element.append(this.root);
    [this.host, this.after, this.given, this.next] = Array.from({ length: 4 }, () => make("div"));
    this.problem = make("p", { class: "cattn-hint cattn-note", role: "alert" });
    this.program = make("pre", { tabindex: "0", "aria-label": "the program" });
    this.copied = make("output", { "aria-live": "polite" });
    this.root.append(make("div", { class: "cattn-top" }, heading[0] || "", this.makeSources(), ...heading.slice(1)), this.given, this.problem, this.next);
    this.makeControls();
    this.story = story && story(this);
    this.root.append(...(story ? [this.story.element] : []), this.host, this.makeStages(), this.form, this.after);
    for (const source of sources) source.changed = (anew) => this.renew(true, anew);
    watchTheme(this.root, (theme) => (this.root.dataset.theme = theme));
    this.choose(0);
    const follow = () => this.follow(new URLSearchParams(location.hash.slice(1)));
    addEventListener("hashchange", follow);
    follow();
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
    this.next.replaceChildren(...(this.source.next ? [this.source.next] : []));
    this.padding.label.hidden = this.padded.label.hidden = !this.source.pads;
    if (this.story) {
      this.story.tell(0); // its control is one of the other input, too
      this.story.element.hidden = !this.source.pads;
    }
    this.renew(true, true);
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
    const group = (words, purpose, ...parts) =>
      make("details", {}, make("summary", {}, make("b", {}, words), ` ${purpose}`), make("div", {}, ...parts));
    const { causal, window, method, temperature, softcap, slopes, sink, dropout, seed } = Object.fromEntries(
      Object.entries(this.controls).map(([name, { label }]) => [name, label]));
    this.form = make("form", { class: "cattn-controls", onsubmit: (event) => event.preventDefault() },
      group("Mask", "which words a word may see", causal, window, this.padding.label, this.padded.label, method, this.edit),
      group("Scores", "how sharply a word chooses", temperature, softcap, slopes, sink),
      group("Dropout", "weights left out by chance", dropout, seed), this.reset);
  }

  makeStages() {
    this.stages = Object.entries(STAGES).map(([stage, words]) =>
      make("button", { type: "button", "data-stage": stage, onclick: () => this.setStage(stage) }, words));
    const link = make("button", { type: "button", class: "cattn-link", hidden: location.protocol === "about:", onclick: () => this.copyLink() }, "Copy a link");
    const copy = make("button", { type: "button", class: "cattn-copy", onclick: () => this.copy() }, "Copy as Python");
    this.details = make("details", { ontoggle: () => this.showProgram() }, make("summary", {}, "The program"), this.program);
    return make("div", { class: "cattn-stages" },
      make("span", { class: "cattn-group", role: "group", "aria-label": "stage" }, ...this.stages), copy, link, this.copied, this.details);
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
    const heads = this.source.sizes ? this.source.sizes.heads : 1;
    return this.initial.slopes || this.source.slopes || Array.from({ length: heads }, (_, i) => 2 ** ((-8 / heads) * (i + 1)));
  }

  restore() {
    this.options = { ...this.initial, cells: [...this.initial.cells] };
    this.padding.input.value = 0;
    this.padded.input.checked = true;
    this.showOptions();
    this.setEditing(false);
    this.renew();
  }

  // Sets the controls to the options.
  showOptions() {
    const { controls, options } = this;
    for (const name of ["window", "temperature", "softcap", "dropout", "seed"]) controls[name].input.value = options[name];
    controls.causal.input.checked = options.causal;
    controls.slopes.input.checked = Boolean(options.slopes);
    controls.sink.input.value = options.sink ?? -8.5;
    this.method.value = options.method;
  }

  setEditing(on) {
    this.editing = on;
    this.edit.setAttribute("aria-pressed", String(on));
    setText(this.edit, on ? "Done" : "Edit the mask");
    if (on) setText(this.copied, "Click a cell, or move to it with the arrow keys and press Enter, to hide or show it, in all heads.");
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

  // Shows another stage, or other numbers, which are computed at most once in a frame; `anew` looks for a head and a query
  // that are worth a look.
  renew(computes = true, anew = false) {
    this.stale ||= computes;
    this.anew ||= anew;
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
        this.names = this.layers.map((layer) => namesOf(layer, this.source.tokens));
        this.stale = false; // after an error it is computed again
      }
      if (!this.source.sizes.D_v && this.stage === "output") this.stage = "dropped";
      this.stages.at(-1).hidden = !this.source.sizes.D_v;
      this.show();
      setText(this.problem, this.source.note || "");
    } catch (error) {
      setText(this.problem, error.message);
    }
    if (this.details.open) this.showProgram();
    if (this.story) this.story.show();
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
      kind: "weights", title: this.title, heading: "", entry: "", note: "", axis: "layer", n_layers: this.layers.length, heads, plain: Boolean(this.source.plain),
      T_q, T_k: columns, offset: output ? 0 : Math.max(T_k - T_q, 0), shared, tokens: output ? null : tokens,
      query_tokens: shared ? null : this.source.query_tokens || (tokens && tokens.slice(-T_q)), layers: this.source.layers || null,
      dtype: "float32", low, high, block: 1, rounded: "", bytes: numbers.byteLength,
      stage: this.stages.find((button) => button.dataset.stage === this.stage).textContent, column: output ? "dimension" : "key",
    };
    const same = this.view && ["n_layers", "heads", "T_q", "T_k", "tokens", "query_tokens", "column"].every(
      (name) => JSON.stringify(info[name]) === JSON.stringify(this.info[name]));
    this.info = info;
    if (same && !this.anew) {
      this.view.update(info, numbers);
      return;
    }
    const kept = this.view ? { head: this.view.chosen[0], form: this.view.form, scale: this.state.scale } : {};
    const opens = this.opening(this.anew ? this.source.opens : kept.head);
    if (same) {
      this.state.scale = kept.scale;
      this.view.update(info, numbers);
      this.look(...opens);
    } else {
      if (this.view) this.view.close();
      const [head, query, key] = opens;
      this.state = { info, weights: numbers, heads: [head], query, key, scale: kept.scale || "linear", live: this };
      this.view = new StageView(pageModel(this.state), this.host);
      if (kept.form) this.view.setForm(kept.form);
    }
    this.anew = false;
  }

  // Shows a head, and a query with a key.
  look(head, query, key) {
    this.view.choose(...head, false);
    this.view.point(query, key, "key");
    this.view.pinned = false;
  }

  // What is worth a look: the head, if none is given, that has the first of the names, or else whose queries have the
  // largest weights; of its queries, not of punctuation, the one with the largest weight where the name says, or else on
  // another token.
  opening(head) {
    const { sizes: { T_q, T_k, heads }, tokens, query_tokens: queries } = this.source;
    const offset = Math.max(T_k - T_q, 0);
    const all = this.layers.flatMap((_, layer) => Array.from({ length: heads }, (__, i) => [layer, i]));
    const largest = (of) => sum([...Array(T_q).keys()], (q) => this.row(of, "weights", q).reduce((a, b) => Math.max(a, b), 0));
    const best = (list, size) => list.reduce((a, b) => (size(b) > size(a) ? b : a));
    const named = all.filter((of) => this.nameOf(of));
    const order = Object.keys(NAMES);
    const chosen = head || (named.length ? best(named, (of) => -order.indexOf(this.nameOf(of))) : best(all, largest));
    const rule = NAMES[this.nameOf(chosen)] || ((q) => [...Array(T_k).keys()].filter((k) => k !== q + offset));
    const isWord = (q) => !tokens || /[\p{L}\p{N}]/u.test(queries ? queries[q] : tokens[q + offset]);
    const same = sameBefore(tokens, T_q);
    let found = [chosen, -1, -1, 0];
    for (let q = T_q > 2 ? Math.floor(T_q / 2) : 0; q < T_q; q++) {
      const weights = this.row(chosen, "weights", q);
      for (const k of isWord(q) ? rule(q, same[q]) : []) {
        if (weights[k] > 0 && weights[k] >= found[3]) found = [chosen, q, k, weights[k]];
      }
    }
    return found.slice(0, 3);
  }

  nameOf([layer, head]) {
    return this.names[layer][head];
  }

  // ---- a link to what is shown ----
  get link() {
    const parts = new URLSearchParams();
    for (const [name, text] of Object.entries(this.source.texts || {})) parts.set(name, text);
    if (this.source !== this.sources[0]) parts.set("input", this.source.name);
    for (const [name, value] of Object.entries(this.options)) {
      if (JSON.stringify(value) !== JSON.stringify(this.initial[name])) parts.set(name, name === "slopes" ? Boolean(value) : value ?? "off");
    }
    if (Number(this.padding.input.value)) parts.set("padding", this.padding.input.value);
    if (!this.padded.input.checked) parts.set("hidden", false);
    const { chosen: [head], at: { q, k }, form } = this.view;
    for (const [name, value] of Object.entries({ stage: this.stage, form, head, at: [q, k] })) parts.set(name, value);
    return `${location.href.split("#")[0]}#${parts}`;
  }

  // Shows what a link says, as far as it is known and possible: a control takes no value that its reader could not choose.
  follow(parts) {
    if (![...parts.keys()].length) return;
    const input = this.sources.findIndex(({ name }) => name === parts.get("input"));
    const numbers = (name) => (/^\d+,\d+$/.test(parts.get(name) || "") ? parts.get(name).split(",").map(Number) : null);
    this.choose(Math.max(input, 0));
    this.restore();
    for (const [name, input_] of Object.entries(this.source.inputs || {})) if (parts.has(name)) input_.value = parts.get(name);
    this.update();
    for (const [name, { input: each }] of Object.entries({ ...this.controls, padding: this.padding, hidden: this.padded })) {
      if (!parts.has(name)) continue;
      const value = parts.get(name);
      each.closest("details").open = true;
      if (each.type === "checkbox") each.checked = value === "true";
      else if (name !== "method" || value === "renormalize") each.value = value === "off" ? each.min : value;
      if (name in this.controls) this.read(name);
    }
    const cells = (parts.get("cells") || "").match(/\d+,\d+/g);
    if (parts.has("cells")) this.options.cells = cells ? cells.map((cell) => cell.split(",").map(Number).join()) : [];
    this.stage = Object.hasOwn(STAGES, parts.get("stage")) ? parts.get("stage") : "weights";
    this.update();
    const [head, at] = [numbers("head"), numbers("at")];
    const { heads } = this.source.sizes;
    if (this.view && head && head[0] < this.layers.length && head[1] < heads) this.view.choose(...head, false);
    if (this.view && at && at[0] < this.view.info.T_q && at[1] < this.view.info.T_k) this.view.point(...at, "key");
    if (this.view && ["lines", "steps"].includes(parts.get("form"))) this.view.setForm(parts.get("form"));
    if (this.story) this.story.tell(Number(parts.get("step")) || 0);
  }

  copyLink() {
    const { link } = this;
    history.replaceState(null, "", link);
    this.offer(link, "Copied: the link keeps the text, the options and the head.");
  }

  // What the view asks: whether a click on a cell edits the mask, and the numbers of a query at a stage.
  taps(q, k) {
    if (this.editing && this.stage !== "output") this.toggle(q, k);
    return this.editing;
  }

  get hiddenByHand() {
    return ["masked", "weights", "dropped"].includes(this.stage) ? this.layers[0].cells : [];
  }

  // Why a weight that is 0 is 0, or a score −∞.
  why(head, q, k) {
    const layer = this.layers[head[0]];
    if (this.stage === "dropped" && this.row(head, "weights", q)[k] > 0) return "dropped";
    if (!this.row(head, "weights", q).some((x) => x !== 0)) return "hidden: this query sees no key, and all its weights are 0";
    const byHand = layer.mask && !layer.mask[q * this.source.sizes.T_k + k] ? "hidden by hand, in all heads" : "";
    return layer.reason(q, k) || byHand || "0, as it is too small for a number of 32 bits";
  }

  // How the score of a query and a key becomes a weight.
  products([layer, head], q, k) {
    const { arrays: { query, key }, sizes: { T_q, T_k, D }, options: { temperature, scale }, renormalizes } = this.layers[layer];
    const vector = (array, length, i) => Array.from(array.subarray((head * length + i) * D, (head * length + i + 1) * D));
    const at = (stage) => signed(this.row([layer, head], stage, q)[k]);
    const divided = [scale === null ? ` / √${D}` : ` × ${shortText(scale)}`, ...(temperature === 1 ? [] : [` / ${temperature}`])].join("");
    const hidden = !this.layers[layer].visible[q * T_k + k];
    const masked = renormalizes ? `${hidden ? "hidden: 0 after the softmax" : "seen"}` : `${hidden ? "hidden" : "after the mask"}: ${at("masked")}`;
    const power = renormalizes ? `divided by the sum of what is seen` : `e^${at("masked")} / sum`;
    return [...productParts(vector(query, T_q, q), vector(key, T_k, k)),
      make("p", { class: "cattn-terms" }, `${at("scores")}${divided} = ${at("scaled")}, ${masked}, ${power} = ${at("weights")}`)];
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

  copy() {
    this.offer(this.text, "Copied: paste it into Python.");
  }

  async offer(text, done) {
    try {
      await navigator.clipboard.writeText(text);
      setText(this.copied, done);
    } catch { // a file or a frame may not write to the clipboard
      this.details.open = true;
      setText(this.program, text);
      const range = document.createRange();
      range.selectNodeContents(this.program);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      setText(this.copied, document.execCommand("copy") ? done : "Selected: press Ctrl+C.");
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
  const heading = info.heading ? [make("h1", {}, info.heading)] : [];
  const { title, options } = info;
  element.live = new LiveView({ core: await Core.start(core), sources, element, title, options, heading });
}
