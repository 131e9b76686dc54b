// What the two views share: the state that Python sees, the theme, tokens, heads and the scale; and the entry points.

let views = 0;

class View {
  constructor(model, element) {
    this.model = model;
    const info = model.get("info");
    const all = [...(info.tokens || []), ...(info.query_tokens || [])];
    this.info = { ...info, tokens: readable(info.tokens, all), query_tokens: readable(info.query_tokens, all) };
    this.number = ++views;
    this.kernel = new Kernel(model, Boolean(this.info.kernel));
    this.root = make("div", { class: "cattn-view", role: "group", "aria-label": this.info.title });
    this.bytes = bytesOf(model.get("weights"));
    this.compared = false; // whether the next head that is chosen is compared with the first
    this.pinned = false;
    this.undo = [];
    this.listen("change:heads", () => this.setHeads());
    this.listen("change:scale", () => this.theme && this.refresh());
    this.listen("change:query", () => this.follow());
    this.listen("change:key", () => this.follow());
    element.append(this.root);
    const words = [this.info.heading, this.info.entry].filter(Boolean).join(", ");
    if (words) this.root.append(make(this.info.heading ? "h1" : "p", {}, words));
    this.status = make("output", { class: "cattn-status", "aria-live": "polite" });
  }

  // Begins to draw: the subclass has made its elements.
  start() {
    this.undo.push(watchTheme(this.root, (theme) => {
      this.theme = theme;
      this.root.dataset.theme = theme;
      this.refresh();
    }));
    let width = 0;
    const observer = new ResizeObserver(() => {
      if (this.root.clientWidth !== width && this.theme) this.resize();
      width = this.root.clientWidth;
    });
    observer.observe(this.root);
    this.undo.push(() => observer.disconnect());
  }

  listen(event, action) {
    this.model.on(event, action);
    this.undo.push(() => this.model.off(event, action));
  }

  close() {
    this.kernel.close();
    this.undo.forEach((stop) => stop());
    this.root.remove();
  }

  save(changes) {
    for (const [name, value] of Object.entries(changes)) this.model.set(name, value);
    this.model.save_changes();
  }

  style(name) {
    return getComputedStyle(this.root).getPropertyValue(name).trim();
  }

  // ---- names ----
  keyName(k) {
    return this.info.tokens ? this.shown(this.info.tokens[k] ?? "", k) : String(k);
  }

  queryName(q) {
    if (this.info.query_tokens) return this.shown(this.info.query_tokens[q] ?? "", q);
    return this.info.shared ? this.keyName(q + this.info.offset) : String(q);
  }

  // A token as it is written. In plain text a word stands without the space before it, and a part of a word has a hyphen.
  shown(token, at) {
    const text = visible(token);
    if (!this.info.plain) return text;
    return at > 0 && /^[\p{L}\p{N}]/u.test(token) ? `-${text}` : text.replace(/^·(?=.)/, "");
  }

  get names() {
    const { tokens, query_tokens: queries } = this.info;
    if (!tokens && !queries) return null;
    return { query: (q) => this.queryName(q), key: (k) => this.keyName(k) };
  }

  // A token in a sentence: its text and its position, or the position alone.
  quoted(name, position) {
    return name === String(position) && !this.info.tokens ? `${position}` : `“${name}” (${position})`;
  }

  layerName(layer) {
    return this.info.layers ? this.info.layers[layer] : String(layer);
  }

  headName([layer, head]) {
    const words = this.info.n_layers > 1 || this.info.layers ? [`${this.info.axis} ${this.layerName(layer)}`] : [];
    return [...words, ...(this.info.heads > 1 ? [`head ${head}`] : [])].join(", ");
  }

  // ---- heads ----
  get chosen() {
    const valid = ([layer, head]) => layer >= 0 && layer < this.info.n_layers && head >= 0 && head < this.info.heads;
    const heads = (this.model.get("heads") || []).filter(valid).slice(0, 2);
    return heads.length ? heads : [[0, 0]];
  }

  choose(layer, head, compare) {
    const [first] = this.chosen;
    const same = first[0] === layer && first[1] === head;
    const heads = (compare || this.compared) && !same ? [first, [layer, head]] : [[layer, head]];
    this.setComparing(false);
    this.save({ heads });
    this.setHeads();
  }

  setComparing(on) {
    this.compared = on;
    if (!this.compare) return;
    this.compare.setAttribute("aria-pressed", String(on));
    this.root.classList.toggle("cattn-comparing", on);
    setText(this.compare, on ? "Choose a second head" : "Compare two heads");
  }

  // ---- the bar ----
  scaleButtons() {
    const button = (value, text) => make("button", {
      type: "button", "data-scale": value, onclick: () => {
        this.save({ scale: value });
        this.refresh();
      },
    }, text);
    this.scales = [button("linear", "linear"), button("log", "log")];
    this.legend = make("span", { class: "cattn-legend", "aria-hidden": "true" }, make("span"), make("i"), make("span"));
    return make("span", { class: "cattn-group", role: "group", "aria-label": "scale of colours" }, ...this.scales,
      this.legend);
  }

  showScale(scale) {
    for (const button of this.scales) {
      button.setAttribute("aria-pressed", String(button.dataset.scale === this.model.get("scale")));
    }
    const { background, ends } = scale.legend();
    this.legend.children[1].style.background = background;
    const [first, last] = ends.map(shortText);
    setText(this.legend.children[0], scale.log && !scale.diverging ? `≤ ${first}` : first);
    setText(this.legend.children[2], last);
  }

  zoomButtons(zoom) {
    const button = (text, label, factor) =>
      make("button", { type: "button", title: label, "aria-label": label, onclick: () => zoom(factor) }, text);
    return make("span", { class: "cattn-group cattn-zoom", role: "group", "aria-label": "zoom" },
      button("−", "zoom out", 0.5), button("+", "zoom in", 2), button("all", "show everything", 0));
  }

  get log() {
    return this.model.get("scale") === "log";
  }
}

// ---- render() for anywidget, showSaved() for a page without a kernel ----

function render({ model, el }) {
  const view = model.get("info").kind === "weights" ? new WeightsView(model, el) : new StatisticsView(model, el);
  return () => view.close();
}

// A model that lives in the page: what anywidget's model is to a view with a kernel.
function pageModel(state) {
  const listeners = {};
  return {
    get: (name) => state[name],
    set(name, value) {
      const changed = JSON.stringify(state[name]) !== JSON.stringify(value);
      state[name] = value;
      if (changed) (listeners[`change:${name}`] || []).forEach((listener) => listener());
    },
    save_changes() {},
    on: (name, listener) => (listeners[name] ||= []).push(listener),
    off: (name, listener) => (listeners[name] = (listeners[name] || []).filter((other) => other !== listener)),
  };
}

function showSaved(state, el) {
  render({ el, model: pageModel(state) });
}

// Returns the bytes of a saved page, which are deflated and in base64.
async function unpack(text) {
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// In a frame the saved page takes the theme of the page around it, and gives the frame its height. Where it may not reach
// the frame, as in a file, it sends the height to the page around it.
function fitIntoFrame() {
  if (window.parent === window) return;
  let frame = null;
  try {
    frame = window.frameElement;
  } catch {
    // the page around is of another origin
  }
  const fit = () => {
    const height = document.body.offsetHeight + 2;
    if (frame) frame.style.height = `${height}px`;
    else window.parent.postMessage({ cattnHeight: height }, "*");
  };
  new ResizeObserver(fit).observe(document.body);
  if (!frame) return;
  const picture = frame.nextElementSibling;
  if (picture && picture.classList.contains("cattn-picture")) picture.style.display = "none";
  watchTheme(frame.parentElement, (theme) => (document.documentElement.style.colorScheme = theme));
}

export default { render };
