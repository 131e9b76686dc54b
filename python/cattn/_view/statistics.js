// The view of statistics: a row of colours for each head, the strips of one head, and near by the weights themselves.

const MOST_OF_A_WINDOW = 256; // tokens whose weights are asked of Python
const MOST_WORDS = 512; // tokens that are written under the strips
const ROW_HEIGHT = 14;

class StatisticsView extends View {
  constructor(model, element) {
    super(model, element);
    this.length = this.info.length;
    [this.from, this.to] = [0, this.length];
    this.series = this.info.fields.map((field) => new Series(field, this.numbers(field)));
    const { top } = this.info;
    this.top = top && { keys: this.numbers(top.keys), weights: this.numbers(top.weights), dtype: top.weights.dtype };
    this.series.forEach((series) => {
      const { n_layers: layers, heads } = this.info;
      const ranges = Array.from({ length: layers * heads }, (_, i) => series.range(i));
      series.low = Math.min(...ranges.map(({ low }) => low));
      series.high = Math.max(...ranges.map(({ high }) => high));
      if (series.low >= 0 && series.low < series.high / 2) series.low = 0;
    });
    this.field = this.series[0];
    const actions = {
      point: (position, how) => this.pointPosition(position, how),
      brush: (from, to) => this.show(from, to),
      zoom: (factor, at) => this.show(...zoomed(this.from, this.to, this.length, factor, at, 8)),
    };
    this.strips = this.series.map((series) => new Strip(series, actions));
    this.axis = new Axis((part) => {
      const size = this.to - this.from;
      const from = Math.min(Math.max(Math.round(part * this.length - size / 2), 0), this.length - size);
      this.show(from, from + size);
    });
    this.map = new HeatMap({
      point: (q, k, how) => this.point(q, k, how),
      zoomed: ({ q0, q1 }) => this.show(q0 + this.info.offset, q1 + this.info.offset),
    });
    this.words = new Lane({ point: (position, how) => this.pointPosition(position, how) });
    this.queries = new Lane({ point: (position, how) => this.pointPosition(position, how) });
    const toKey = (k, how) => this.point(this.at.q, k, how);
    this.largest = new Largest("looks at most", toKey);
    this.range = make("span", { class: "cattn-where" });
    this.title = make("h2", { class: "cattn-title" });
    this.hint = make("p", { class: "cattn-hint" });
    this.near = make("div", { class: "cattn-columns cattn-near" },
      make("div", { class: "cattn-large" }, this.map.element),
      make("div", { class: "cattn-texts" }, this.words.element, this.queries.element, this.largest.element));
    this.plots = make("div", {
      class: "cattn-strips", tabindex: "0", role: "application", "aria-roledescription": "strips of statistics",
      onkeydown: (event) => this.pressStrips(event),
    }, ...this.strips.map((strip) => strip.element), this.axis.element);
    this.root.append(
      make("div", { class: "cattn-bar-of-tools" }, this.makeSelect(), this.scaleButtons()),
      this.makeRows(),
      make("header", {}, this.title, this.range, this.zoomButtons((factor) => this.zoomBy(factor))),
      this.status, this.plots, this.hint, this.near,
    );
    this.follow();
    this.start();
  }

  numbers({ start, bytes, dtype }) {
    return numbersOf(this.bytes.subarray(start, start + bytes), dtype);
  }

  makeSelect() {
    const options = this.series.map((series, i) => make("option", { value: String(i) }, series.title));
    const select = make("select", {
      "aria-label": "statistic of the rows of heads", onchange: () => {
        this.field = this.series[Number(select.value)];
        this.refresh();
      },
    }, ...options);
    return select;
  }

  // ---- heads ----
  makeRows() {
    const { n_layers: layers, heads } = this.info;
    this.rows = Array.from({ length: layers * heads }, (_, i) => {
      const at = [Math.floor(i / heads), i % heads];
      const name = this.headName(at);
      const label = layers > 1 ? `${this.layerName(at[0])} · ${at[1]}` : `${at[1]}`;
      const canvas = make("canvas", { "aria-hidden": "true" });
      const row = make("div", {
        role: "option", class: "cattn-strip-row", tabindex: "-1", "aria-label": name, title: name,
        onclick: () => this.choose(...at, false),
      }, make("span", { "aria-hidden": "true" }, label), canvas);
      return Object.assign(row, { at, canvas });
    });
    const words = layers > 1 ? `${this.info.axis} · head` : "head";
    this.list = make("div", {
      role: "listbox", class: "cattn-rows", "aria-label": "heads", onkeydown: (event) => this.pressRow(event),
    }, ...this.rows);
    return make("div", { class: "cattn-overview", hidden: layers * heads === 1 }, make("h3", {}, words), this.list);
  }

  pressRow(event) {
    const row = event.target.closest(".cattn-strip-row");
    const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!row || (step === undefined && event.key !== "Enter" && event.key !== " ")) return;
    if (step) {
      const next = this.rows[this.rows.indexOf(row) + step];
      if (next) {
        this.rows.forEach((other) => (other.tabIndex = other === next ? 0 : -1));
        next.focus();
      }
    } else {
      this.choose(...row.at, false);
      if (event.key === "Enter") this.plots.focus();
    }
    event.preventDefault();
    event.stopPropagation();
  }

  get head() {
    const [layer, head] = this.chosen[0];
    return layer * this.info.heads + head;
  }

  setHeads() {
    if (!this.theme) return;
    const active = this.rows.includes(this.root.getRootNode().activeElement);
    this.rows.forEach((row, i) => {
      row.setAttribute("aria-selected", String(i === this.head));
      if (!active) row.tabIndex = i === this.head ? 0 : -1;
    });
    setText(this.title, this.headName(this.chosen[0]) || "statistics");
    this.plots.setAttribute("aria-label", `${this.headName(this.chosen[0])}, statistics of ${this.length} tokens. `
      + "Left and right move, plus and minus zoom, Escape goes back to the heads.");
    this.grid = null;
    this.drawStrips();
  }

  drawRows() {
    if (this.rows.length < 2) return;
    const width = Math.max(Math.round(this.list.clientWidth - GUTTER - MARGIN), 10);
    const { low, high } = this.field;
    this.scale = new Scale({ low, high, log: this.log, theme: this.theme, diverging: false, zeroIsHidden: false });
    this.rows.forEach((row, i) => {
      const { mean } = this.field.pixels(i, this.from, this.to, width);
      for (let x = 0; x < width; x++) if (Number.isNaN(mean[x])) mean[x] = -Infinity;
      paint(row.canvas, mean, 1, width, this.scale);
      row.canvas.style.width = `${width}px`;
      row.canvas.style.height = `${ROW_HEIGHT}px`;
    });
  }

  // ---- drawing ----
  refresh() {
    const { low, high } = this.field;
    this.scale = new Scale({ low, high, log: this.log, theme: this.theme, diverging: false, zeroIsHidden: false });
    this.showScale(this.scale);
    this.drawRows();
    this.setHeads();
  }

  resize() {
    this.drawRows();
    this.drawStrips();
  }

  show(from, to) {
    const size = Math.min(Math.max(to - from, Math.min(8, this.length)), this.length);
    this.from = Math.min(Math.max(from, 0), this.length - size);
    this.to = this.from + size;
    if (this.drawing) return;
    this.drawing = requestAnimationFrame(() => {
      this.drawing = null;
      this.drawRows();
      this.drawStrips();
    });
  }

  zoomBy(factor) {
    const { position } = this.at;
    const inside = position >= this.from && position < this.to;
    if (factor === 0) this.show(0, this.length);
    else this.show(...zoomed(this.from, this.to, this.length, factor, inside ? position + 0.5 : (this.from + this.to) / 2, 8));
  }

  drawStrips() {
    const style = (name) => this.style(name);
    setText(this.range, this.to - this.from < this.length
      ? `tokens ${this.from} to ${this.to - 1} of ${this.length}` : `${this.length} tokens`);
    for (const strip of this.strips) strip.draw(this.head, this.from, this.to, style);
    this.axis.draw(this.from, this.to, this.length, style);
    this.drawNear();
    this.showPoint();
  }

  // The rectangle of the matrix that belongs to the window of the text.
  get rectangle() {
    const { offset, T_q, T_k } = this.info;
    const clip = (value, size) => Math.min(Math.max(value, 0), size);
    return {
      q0: clip(this.from - offset, T_q), q1: clip(this.to - offset, T_q),
      k0: clip(this.from, T_k), k1: clip(this.to, T_k),
    };
  }

  // Near by, the tokens are written, and their weights are drawn if Python can compute them.
  drawNear() {
    const size = this.to - this.from;
    const { kernel, windows } = this.info;
    const window = this.rectangle;
    const possible = size <= MOST_OF_A_WINDOW && window.q1 > window.q0 && window.k1 > window.k0;
    if (possible && kernel && windows && !(this.grid && this.grid.covers(window))) this.askWindow(window);
    const drawn = possible && this.grid && this.grid.covers(window);
    this.near.hidden = size > MOST_WORDS;
    this.near.classList.toggle("cattn-without-map", !drawn);
    this.queries.element.hidden = !drawn;
    if (!this.near.hidden) {
      this.words.build((p) => this.keyName(p), this.from, Math.min(this.to, this.info.T_k));
      if (drawn) {
        this.queries.build((p) => this.queryName(p - this.info.offset), window.q0 + this.info.offset,
          window.q1 + this.info.offset);
        this.mapScale = new Scale({ ...this.grid.range(), log: this.log, theme: this.theme });
        this.map.set({ grid: this.grid, whole: { q0: 0, q1: this.info.T_q, k0: 0, k1: this.info.T_k }, window,
          names: this.names, scale: this.mapScale });
      }
    }
    const ways = "Drag across a strip, pinch, or press + to zoom in.";
    const more = kernel && windows ? ` ${MOST_OF_A_WINDOW} tokens or fewer show their weights.` : "";
    setText(this.hint, size > (more ? MOST_OF_A_WINDOW : MOST_WORDS) ? ways + more : "");
  }

  askWindow(window) {
    const [layer, head] = this.chosen[0];
    this.kernel.ask("window", { kind: "window", layer, head, ...window }, (message, bytes) => {
      if (message.error) {
        setText(this.hint, `weights_of raised ${message.error}`);
        return;
      }
      this.grid = new Grid({ ...window, data: numbersOf(bytes, message.dtype), dtype: message.dtype });
      this.drawNear();
      this.showPoint();
    });
  }

  // ---- the point ----
  follow() {
    const { offset, T_q, T_k } = this.info;
    const clip = (value, size) => Math.min(Math.max(value < 0 ? size - 1 : value, 0), size - 1);
    const q = clip(this.model.get("query"), T_q);
    this.at = { q, k: clip(this.model.get("key"), T_k), position: q + offset };
    if (this.theme) this.showPoint();
  }

  pointPosition(position, how) {
    const { offset, T_q, T_k } = this.info;
    const q = Math.min(Math.max(position - offset, 0), T_q - 1);
    this.point(q, Math.min(position, T_k - 1), how, position);
  }

  point(q, k, how, position = q + this.info.offset) {
    const same = position === this.at.position && k === this.at.k;
    if (how === "hover" && (this.pinned || same)) return;
    this.pinned = how === "hover" ? this.pinned : how === "key" || !(this.pinned && same);
    this.at = { q, k, position };
    if (how !== "hover") this.save({ query: q, key: k });
    if (!this.frame) {
      this.frame = requestAnimationFrame(() => {
        this.frame = null;
        this.showPoint();
      });
    }
  }

  pressStrips(event) {
    if (this.map.element.contains(event.target) || event.ctrlKey || event.metaKey || event.altKey) return;
    const far = event.shiftKey ? Math.max(Math.round((this.to - this.from) / 20), 1) : 1;
    const step = { ArrowLeft: -far, ArrowRight: far }[event.key];
    const zooms = { "+": 2, "=": 2, "-": 0.5, 0: 0 };
    if (step !== undefined) {
      const position = Math.min(Math.max(this.at.position + step, 0), this.length - 1);
      const size = this.to - this.from;
      if (position < this.from) this.show(position, position + size);
      if (position >= this.to) this.show(position + 1 - size, position + 1);
      this.pointPosition(position, "key");
    } else if (event.key in zooms) {
      this.zoomBy(zooms[event.key]);
    } else if (event.key === "Escape" && this.pinned) {
      this.pinned = false;
      this.showPoint();
    } else if (event.key === "Escape" && this.rows.length > 1) {
      this.rows[this.head].focus();
    } else {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  }

  // The keys with the largest weights of a query, as pairs of key and weight; null where the statistics lack them.
  topKeys(q) {
    if (!this.top) return null;
    const { top_k: count, T_q } = this.info;
    const start = (this.head * T_q + q) * count;
    const pairs = Array.from({ length: count }, (_, i) => [this.top.keys[start + i], this.top.weights[start + i]]);
    return pairs.filter(([key]) => key >= 0);
  }

  showPoint() {
    const { q, k, position } = this.at;
    const { offset } = this.info;
    for (const strip of this.strips) strip.mark(position);
    const query = this.quoted(this.queryName(q), q);
    const grid = this.near.classList.contains("cattn-without-map") ? null : this.grid;
    const row = (key) => (grid && q >= grid.q0 && q < grid.q1 && key >= grid.k0 && key < grid.k1 ? grid.at(q, key) : undefined);
    const top = this.topKeys(q);
    if (!this.near.hidden) {
      this.showWords(query, grid, row, top);
      this.map.mark(q, k);
    }
    const lit = grid || !this.near.hidden ? row(k) : undefined;
    const dtype = grid ? grid.dtype : this.field.dtype;
    const name = this.quoted(this.keyName(Math.min(position, this.info.T_k - 1)), position);
    const words = lit === undefined ? `token ${name}` : `query ${query} → key ${this.quoted(this.keyName(k), k)}: `;
    const value = lit === undefined ? "" : exactText(lit, dtype);
    Object.assign(this.status.dataset, { query: q, key: k, position, value });
    const best = !grid && top ? ` looks most at ${top.slice(0, 3).map(([key, weight]) =>
      `${this.quoted(this.keyName(key), key)} ${shortText(weight)}`).join(", ")}` : "";
    this.status.replaceChildren(words, make("b", {}, value), best, this.pinned ? " · pinned" : "");
  }

  showWords(query, grid, row, top) {
    const { k, position } = this.at;
    const { offset } = this.info;
    if (grid) {
      const column = (p) => (k >= grid.k0 && k < grid.k1 ? grid.at(p - offset, k) : undefined);
      const text = (x) => exactText(x, grid.dtype);
      setText(this.words.title, `Keys that query ${query} looks at`);
      setText(this.queries.title, `Queries that look at key ${this.quoted(this.keyName(k), k)}`);
      this.words.paint(row, this.mapScale, k, text);
      this.queries.paint(column, this.mapScale, position, text);
    } else {
      setText(this.words.title, `The text, coloured by ${this.field.title}`);
      this.words.paint((p) => this.field.at(this.head, p), this.scale, position,
        (x) => exactText(x, this.field.dtype));
    }
    const scale = this.mapScale || new Scale({ low: 0, high: 1, log: this.log, theme: this.theme });
    this.largest.show(top || [], (key) => this.keyName(key), scale,
      (x) => exactText(x, this.top.dtype), 8);
    setText(this.largest.caption, `query ${query} looks most at`);
  }
}
