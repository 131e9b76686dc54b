// The forms beside the heat map: text, strips, lines, and the steps from scores to output.

// ---- the tokens as text, coloured weight by weight, and the list of the largest weights ----

const MOST_CHIPS_WITH_NUMBERS = 48;
const MOST_TOKENS = 1024; // in one lane; with more, the lane follows the window of the heat map
const unique = Math.random().toString(36).slice(2, 8); // several views in a page load this module several times
let lanes = 0;

class Lane {
  constructor({ point }) {
    this.title = make("h3", { id: `cattn-${unique}-${++lanes}` });
    this.text = make("div", { class: "cattn-text", role: "listbox", tabindex: "0", "aria-labelledby": this.title.id, "aria-multiselectable": "true" });
    this.element = make("section", { class: "cattn-lane" }, this.title, this.text);
    this.point = point;
    const at = (event) => event.target.closest && event.target.closest("[data-at]");
    this.text.addEventListener("pointerover", (event) => at(event) && point(Number(at(event).dataset.at), "hover"));
    this.text.addEventListener("click", (event) => at(event) && point(Number(at(event).dataset.at), event.shiftKey ? "add" : "tap"));
    this.text.addEventListener("mousedown", (event) => event.shiftKey && event.preventDefault()); // it would select the text
    this.text.addEventListener("keydown", (event) => this.press(event));
    this.shown = "";
  }

  // Writes the tokens from..to. name(i) is a token's text; without tokens it is the position.
  build(name, from, to) {
    const few = to - from <= MOST_CHIPS_WITH_NUMBERS;
    const names = Array.from({ length: to - from }, (_, i) => name(from + i));
    const shown = JSON.stringify([from, few, names]);
    if (shown === this.shown) return;
    [this.shown, this.from, this.to, this.few] = [shown, from, to, few];
    this.chips = names.map((text, i) =>
      make("span", { class: "cattn-chip", role: "option", "data-at": from + i, id: `${this.title.id}-${from + i}` },
        make("bdi", {}, text), few ? make("small", { "aria-hidden": "true" }) : null));
    this.text.replaceChildren(...this.chips);
    this.text.classList.toggle("cattn-few", few);
    this.marked = [];
  }

  // Colours token i by value(i), and marks the tokens `all`, of which `at` is the last one; `asking` are marked as those
  // whose weights the colours show, if they stand in the same text.
  paint(value, scale, at, label, all = [at], asking = []) {
    this.chips.forEach((chip, i) => {
      const x = value(this.from + i);
      const unknown = x === undefined;
      const level = unknown ? HIDDEN_LEVEL : scale.level(x);
      if (chip.level !== level || chip.scale !== scale) {
        const hidden = level === HIDDEN_LEVEL;
        chip.style.background = hidden ? "" : scale.css[level];
        chip.style.color = hidden ? "" : scale.ink[level];
        [chip.level, chip.scale] = [level, scale];
      }
      if (this.few) setText(chip.lastChild, unknown ? "" : chipText(x));
      if ((this.few || this.from + i === at) && (chip.number !== x || !chip.hasAttribute("aria-label"))) {
        chip.number = x;
        chip.setAttribute("aria-label", `${chip.firstChild.textContent}, ${unknown ? "not known" : label(x)}`);
      }
    });
    for (const chip of this.marked) chip.removeAttribute("aria-selected");
    for (const chip of this.asking || []) chip.classList.remove("cattn-asking");
    const chips = (list) => list.map((i) => this.chips[i - this.from]).filter(Boolean);
    [this.marked, this.asking] = [chips(all), chips(asking)];
    for (const chip of this.marked) chip.setAttribute("aria-selected", "true");
    for (const chip of this.asking) chip.classList.add("cattn-asking");
    this.last = this.chips[at - this.from];
    this.text.setAttribute("aria-activedescendant", this.last ? this.last.id : "");
    this.at = at;
  }

  reveal() {
    if (this.last) scrollInto(this.text, this.last);
  }

  press(event) {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    const ends = { Home: this.from, End: this.to - 1 };
    if ((step === undefined && !(event.key in ends)) || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = step === undefined ? ends[event.key] : this.at + step;
    this.point(Math.min(Math.max(at, this.from), this.to - 1), event.shiftKey ? "add" : "key");
    event.preventDefault();
    event.stopPropagation();
  }
}

// The largest numbers of a row or column as a table with bars.
class Largest {
  constructor(title, point) {
    this.body = make("tbody");
    this.caption = make("caption", {}, title);
    this.element = make("table", { class: "cattn-largest" }, this.caption, this.body);
    this.body.addEventListener("click", (event) => {
      const row = event.target.closest("tr");
      if (row) point(Number(row.dataset.at), "tap");
    });
  }

  // entries: pairs of position and number, in any order.
  show(entries, name, scale, text, most = 6) {
    const size = ([, x]) => (Number.isNaN(x) ? Infinity : Math.abs(x));
    const best = entries.filter(([, x]) => x !== 0 && x !== -Infinity).sort((a, b) => size(b) - size(a) || a[0] - b[0]);
    const top = best.slice(0, most);
    const full = top.length ? size(top[0]) || 1 : 1;
    this.body.replaceChildren(...top.map((entry) => {
      const [at, x] = entry;
      const part = Number.isFinite(size(entry)) ? Math.min(size(entry) / full, 1) : 1;
      const bar = make("span", { class: "cattn-bar" });
      bar.style.width = `${Math.max(part * 100, 1)}%`;
      bar.style.background = scale.css[scale.level(x)];
      const position = name(at) === String(at) ? "" : String(at);
      return make("tr", { "data-at": at, "data-value": x },
        make("th", { scope: "row" }, make("bdi", {}, name(at))), make("td", { class: "cattn-at" }, position),
        make("td", { class: "cattn-room" }, bar), make("td", { class: "cattn-number" }, text(x)));
    }));
    this.element.hidden = top.length === 0;
  }
}

// ---- statistics of each token as strips along the text ----

const STRIP_HEIGHT = 56;
const GUTTER = 56; // pixels left of the strips for their scales
const MARGIN = 10; // pixels right of them

// One statistic of all heads: one number for each query or key, or the mean of each block of them.
class Series {
  constructor({ name, title, dtype, block, length, offset }, data) {
    Object.assign(this, { name, title, dtype, block, length, offset, data });
    this.columns = Math.ceil(length / block);
  }

  // The number of a head at a position of the text; undefined where there is none.
  at(head, position) {
    const i = position - this.offset;
    if (i < 0 || i >= this.length) return undefined;
    return this.data[head * this.columns + Math.floor(i / this.block)];
  }

  range(head, from = this.offset, to = this.offset + this.length) {
    let [low, high] = [Infinity, -Infinity];
    const [first, last] = this.blocks(from, to);
    for (let i = head * this.columns + first; i < head * this.columns + last; i++) {
      const x = this.data[i];
      if (Number.isFinite(x)) {
        if (x < low) low = x;
        if (x > high) high = x;
      }
    }
    return low <= high ? { low, high } : { low: 0, high: 1 };
  }

  blocks(from, to) {
    const clip = (position) => Math.min(Math.max(position - this.offset, 0), this.length);
    return [Math.floor(clip(from) / this.block), Math.ceil(clip(to) / this.block)];
  }

  // Returns lowest, mean and highest number of each pixel of a window of the text; NaN where there is none.
  pixels(head, from, to, width) {
    const [low, mean, high] = [0, 1, 2].map(() => new Float64Array(width).fill(NaN));
    for (let pixel = 0; pixel < width; pixel++) {
      const start = from + (pixel * (to - from)) / width;
      const end = from + ((pixel + 1) * (to - from)) / width;
      const [first, last] = this.blocks(Math.floor(start), Math.max(Math.ceil(end), Math.floor(start) + 1));
      let [least, most, sum, count] = [Infinity, -Infinity, 0, 0];
      for (let i = head * this.columns + first; i < head * this.columns + last; i++) {
        const x = this.data[i];
        if (!Number.isFinite(x)) continue;
        if (x < least) least = x;
        if (x > most) most = x;
        sum += x;
        count++;
      }
      if (count) [low[pixel], mean[pixel], high[pixel]] = [least, sum / count, most];
    }
    return { low, mean, high };
  }
}

// A strip: a title with the number at the point, and a curve. The band is the range where a pixel has several tokens.
class Strip {
  constructor(series, { point, brush, zoom }) {
    this.series = series;
    this.value = make("output", { class: "cattn-number" });
    this.base = make("canvas", { "aria-hidden": "true" });
    this.over = make("canvas", { class: "cattn-over", "aria-hidden": "true" });
    const plot = make("div", { class: "cattn-plot" }, this.base, this.over);
    this.element = make("section", { class: "cattn-strip", "data-field": series.name },
      make("header", {}, make("h3", {}, series.title), this.value), plot);
    const position = (x) => {
      const part = Math.min(Math.max((x - GUTTER) / this.width, 0), 1 - 1e-9);
      return this.from + part * (this.to - this.from);
    };
    gestures(this.over, {
      hover: (x) => this.width && point(Math.floor(position(x)), "hover"),
      tap: (x) => this.width && point(Math.floor(position(x)), "tap"),
      brush: (x0, _, x1, __, done) => {
        this.box = done || x0 === x1 ? null : [x0, x1];
        if (done) brush(Math.floor(Math.min(position(x0), position(x1))), Math.ceil(Math.max(position(x0), position(x1))));
        this.mark(this.marked);
      },
      zoom: (factor, x) => zoom(factor, position(x)),
    });
  }

  draw(head, from, to, style) {
    const available = this.element.clientWidth;
    if (!available) return;
    Object.assign(this, { head, from, to, style, width: Math.max(available - GUTTER - MARGIN, 40) });
    const ratio = window.devicePixelRatio || 1;
    for (const canvas of [this.base, this.over]) {
      canvas.width = available * ratio;
      canvas.height = STRIP_HEIGHT * ratio;
      canvas.style.width = `${available}px`;
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    const context = this.base.getContext("2d");
    const width = Math.round(this.width * ratio);
    const { low, mean, high } = this.series.pixels(head, from, to, width);
    let { low: least, high: most } = this.series.range(head, from, to);
    if (least >= 0 && least < most / 2) least = 0;
    if (most === least) most = least + 1;
    const bottom = STRIP_HEIGHT - 4;
    const y = (x) => bottom - ((x - least) / (most - least)) * (bottom - 6);
    context.font = FONT;
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillStyle = style("--cattn-faint");
    context.fillText(shortText(most), GUTTER - 6, 9);
    context.fillText(shortText(least), GUTTER - 6, bottom - 3);
    context.fillStyle = style("--cattn-well");
    context.fillRect(GUTTER, 2, this.width, bottom - 1);
    const across = (i) => GUTTER + ((i + 0.5) * this.width) / width;
    context.fillStyle = style("--cattn-band");
    for (let i = 0; i < width; i++) {
      if (high[i] > low[i]) context.fillRect(across(i) - 0.5 / ratio, y(high[i]), 1 / ratio, y(low[i]) - y(high[i]));
    }
    context.strokeStyle = style("--cattn-line");
    context.lineWidth = 1.25;
    context.lineJoin = "round";
    context.beginPath();
    let drawing = false;
    for (let i = 0; i < width; i++) {
      const there = !Number.isNaN(mean[i]);
      if (there) context[drawing ? "lineTo" : "moveTo"](across(i), y(mean[i]));
      drawing = there;
    }
    context.stroke();
    this.mark(this.marked);
  }

  // Draws the line at a position, and writes the number there.
  mark(position) {
    this.marked = position;
    if (!this.width) return;
    const context = this.over.getContext("2d");
    context.clearRect(0, 0, this.over.width, this.over.height);
    context.fillStyle = this.style("--cattn-accent");
    const token = this.width / (this.to - this.from);
    if (position >= this.from && position < this.to) {
      context.globalAlpha = token > 3 ? 0.3 : 1;
      context.fillRect(GUTTER + (position - this.from) * token, 2, Math.max(token, 1.5), STRIP_HEIGHT - 5);
      context.globalAlpha = 1;
    }
    if (this.box) {
      context.fillStyle = this.style("--cattn-veil");
      context.fillRect(Math.min(...this.box), 2, Math.abs(this.box[1] - this.box[0]), STRIP_HEIGHT - 5);
    }
    const x = this.series.at(this.head, position);
    const mean = this.series.block > 1 ? "≈ " : "";
    setText(this.value, x === undefined ? "" : mean + exactText(x, this.series.dtype));
  }
}

// Positions under the strips, and a bar that shows which part of the text they show; dragging it moves the part.
class Axis {
  constructor(move) {
    this.canvas = make("canvas", { "aria-hidden": "true" });
    this.thumb = make("span");
    this.bar = make("div", { class: "cattn-range", "aria-hidden": "true" }, this.thumb);
    this.element = make("div", {}, this.canvas, this.bar);
    const drag = (event) => {
      if (!event.buttons) return;
      const box = this.bar.getBoundingClientRect();
      move((event.clientX - box.left) / box.width);
    };
    this.bar.addEventListener("pointerdown", (event) => {
      this.bar.setPointerCapture(event.pointerId);
      drag(event);
    });
    this.bar.addEventListener("pointermove", drag);
  }

  draw(from, to, length, style) {
    const available = this.element.clientWidth;
    const width = available - GUTTER - MARGIN;
    if (width < 1) return;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = available * ratio;
    this.canvas.height = 18 * ratio;
    this.canvas.style.width = `${available}px`;
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = FONT;
    context.fillStyle = context.strokeStyle = style("--cattn-faint");
    for (const tick of ticksOf(from, to, width / 64)) {
      const x = GUTTER + ((tick - from + (to - from < width / 3 ? 0.5 : 0)) * width) / (to - from);
      context.fillRect(x, 0, 1, 4);
      context.textAlign = x > available - 40 ? "right" : "center";
      context.fillText(String(tick), x, 15);
    }
    this.bar.style.margin = `2px ${MARGIN}px 0 ${GUTTER}px`;
    this.thumb.style.left = `${(from / length) * 100}%`;
    this.thumb.style.width = `${((to - from) / length) * 100}%`;
    this.bar.hidden = from === 0 && to === length;
  }
}

// ---- lines between two copies of the text, and the steps from scores to output of one query ----

const MOST_LINES = 64; // tokens of a copy
const SVG = (() => { // the name space
  const template = document.createElement("template");
  template.innerHTML = "<svg></svg>";
  return template.content.firstChild.namespaceURI;
})();

function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Queries on the left, keys on the right, and a line for each weight: the wider, the larger.
class Lines {
  constructor({ point }) {
    this.point = point;
    this.element = make("div", { class: "cattn-lines", tabindex: "0", hidden: true });
    this.hint = make("p", { class: "cattn-hint" });
  }

  set({ grid, window, names, scale }) {
    Object.assign(this, { grid, window, names, scale });
    const { q0, q1, k0, k1 } = window;
    if (q1 - q0 > MOST_LINES || k1 - k0 > MOST_LINES || grid.block > 1) {
      setText(this.hint, `Lines are for ${MOST_LINES} tokens and fewer: zoom in, in the map.`);
      this.element.replaceChildren(this.hint);
      this.drawn = null;
      return;
    }
    const row = 18;
    const height = Math.max(q1 - q0, k1 - k0) * row + 24;
    const context = make("canvas").getContext("2d");
    context.font = `700 ${FONT}`; // as the marked ones
    const side = (from, to, name, x, anchor, kind) => Array.from({ length: to - from }, (_, i) => {
      const text = draw("text", {
        x, y: 30 + i * row, "text-anchor": anchor, class: "cattn-name", "data-kind": kind, "data-at": from + i,
      });
      const whole = name ? name(from + i) : String(from + i);
      const short = cutText(context, whole, 118);
      text.textContent = short;
      if (short !== whole) text.append(draw("title", {}, whole));
      return text;
    });
    const lines = [];
    for (let q = q0; q < q1; q++) {
      for (let k = k0; k < k1; k++) {
        const x = grid.at(q, k);
        const part = Math.min(Math.abs(x) / scale.high, 1);
        if (!(part > 0.004)) continue; // too faint to be seen
        const line = draw("line", { x1: 128, y1: 26 + (q - q0) * row, x2: 272, y2: 26 + (k - k0) * row,
          stroke: x < 0 ? scale.css[32] : "var(--cattn-line)", "stroke-width": (0.5 + 3.5 * part).toFixed(2) });
        Object.assign(line, { query: q, key: k, part });
        lines.push(line);
      }
    }
    const head = (x, anchor, words) => {
      const text = draw("text", { x, y: 12, "text-anchor": anchor, class: "cattn-side" });
      text.textContent = words;
      return text;
    };
    this.names_ = [...side(q0, q1, names && names.query, 122, "end", "query"),
      ...side(k0, k1, names && names.key, 278, "start", "key")];
    this.drawn = lines;
    this.picture = draw("svg", { viewBox: `0 0 400 ${height}`, role: "img", "aria-label": "lines from queries to keys" },
      head(122, "end", "query"), head(278, "start", "key"), ...lines, ...this.names_);
    const at = (event) => event.target.closest("[data-at]");
    const go = (event, how) => at(event) && this.point(at(event).dataset.kind, Number(at(event).dataset.at), how);
    this.picture.addEventListener("pointerover", (event) => go(event, "hover"));
    this.picture.addEventListener("click", (event) => go(event, "tap"));
    this.element.replaceChildren(this.picture);
  }

  // Shows the lines of the marked queries and keys, and the others faint.
  mark(queries, keys) {
    for (const line of this.drawn || []) {
      line.setAttribute("opacity", queries.includes(line.query) || keys.includes(line.key) ? 0.25 + 0.75 * line.part : 0.06 + 0.2 * line.part);
    }
    for (const name of this.drawn ? this.names_ : []) {
      name.classList.toggle("cattn-marked", (name.dataset.kind === "query" ? queries : keys).includes(Number(name.dataset.at)));
    }
  }
}

// A number from 0 to 1 for each key, the same every time: which weights a dropout of p drops.
function drawn(query, key, seed) {
  let x = (query * 73856093) ^ (key * 19349663) ^ (seed * 83492791);
  x = Math.imul(x ^ (x >>> 16), 0x45d9f3b);
  x = Math.imul(x ^ (x >>> 16), 0x45d9f3b);
  return ((x ^ (x >>> 16)) >>> 0) / 2 ** 32;
}

function softmaxOf(scores) {
  const top = Math.max(...scores);
  const terms = scores.map((x) => (top === -Infinity ? 0 : Math.exp(x - top)));
  const sum = terms.reduce((a, b) => a + b, 0);
  return terms.map((x) => (sum > 0 ? x / sum : 0));
}

const signed = (x, digits = 3) => (x === -Infinity ? "−∞" : Number.isFinite(x) ? x.toFixed(digits).replace("-", "−") : exactText(x, "float64"));
const MOST_TERMS = 16; // of a sum that is written out

// The products of a query and a key by dimension, which are the terms of their score: as a sum and as colours.
function productParts(query, key) {
  const products = query.map((x, d) => x * key[d]);
  const most = Math.max(...products.map(Math.abs)) || 1;
  const cells = products.slice(0, 128).map((x, d) => {
    const cell = make("span", { title: `dimension ${d}: ${x.toFixed(4)}` });
    cell.style.background = `color-mix(in srgb, ${x < 0 ? "var(--cattn-second)" : "var(--cattn-line)"} ${Math.round((Math.abs(x) / most) * 100)}%, transparent)`;
    return cell;
  });
  const term = (x) => (x < 0 ? `(${signed(x, 2)})` : signed(x, 2));
  const terms = query.slice(0, MOST_TERMS).map((x, d) => `${term(x)} × ${term(key[d])}`).join(" + ");
  return [make("p", {}, make("b", {}, "query × key, by dimension")), make("div", { class: "cattn-products" }, ...cells),
    make("p", { class: "cattn-terms" }, `${terms}${query.length > MOST_TERMS ? " + …" : ""} = ${signed(products.reduce((a, b) => a + b, 0))}`)];
}

// Scores, mask, weights, dropout and output of the query under the pointer, with temperature and dropout to move.
class Steps {
  constructor({ point }) {
    this.point = point;
    this.seed = 1;
    const slider = (name, least, most, value, step) => make("input", {
      type: "range", min: least, max: most, step, value, "aria-label": name, oninput: () => this.show(),
    });
    this.temperature = slider("temperature", 0.1, 4, 1, 0.1);
    this.dropout = slider("dropout", 0, 0.9, 0, 0.1);
    this.labels = [make("output"), make("output")];
    this.intro = make("p", { class: "cattn-hint" });
    this.table = make("tbody");
    this.heads = make("tr");
    this.after = make("div", { class: "cattn-output" });
    this.scroll = make("div", { class: "cattn-scroll" }, make("table", {}, make("thead", {}, this.heads), this.table));
    const again = make("button", { type: "button", onclick: () => { this.seed += 1; this.show(); } }, "drop others");
    this.table.addEventListener("click", (event) => {
      const row = event.target.closest("tr");
      if (row) this.point(Number(row.dataset.at), "tap");
    });
    this.element = make("div", { class: "cattn-steps", tabindex: "0", role: "group", "aria-label": "steps", hidden: true },
      make("div", { class: "cattn-sliders" },
        make("label", {}, "temperature ", this.temperature, this.labels[0]),
        make("label", {}, "dropout ", this.dropout, this.labels[1]), again),
      this.intro,
      this.scroll, this.after);
  }

  // row: the weights of the query; vectors: query, key(k) and value(k), or null where they were not given.
  set({ query, at, key, row, from, name, vectors, scale, negative }) {
    Object.assign(this, { query, at, key, row, from, name, vectors, scale, negative });
    this.show();
  }

  show() {
    if (!this.row || this.element.hidden) return;
    const [temperature, p] = [Number(this.temperature.value), Number(this.dropout.value)];
    setText(this.labels[0], temperature.toFixed(1));
    setText(this.labels[1], p.toFixed(1));
    const { row, vectors, from } = this;
    const hidden = row.map((x) => x === 0 || x === -Infinity);
    const factor = vectors && vectors.query ? vectors.scale ?? 1 / Math.sqrt(vectors.query.length) : 1;
    const score = (_, i) => {
      if (vectors && vectors.query) return vectors.query.reduce((sum, x, d) => sum + x * vectors.key(from + i)[d], 0) * factor;
      return this.negative ? row[i] : Math.log(row[i]);
    };
    const scores = row.map(score);
    const masked = scores.map((x, i) => (hidden[i] ? -Infinity : x / temperature));
    const weights = softmaxOf(masked);
    const dropped = weights.map((x, i) => (drawn(this.at, from + i, this.seed) < p ? 0 : x / (1 - p)));
    const given = vectors && vectors.query;
    const words = given ? "scores are query · key × scale" : "scores are the logarithms of the weights, as far as weights tell";
    setText(this.intro, `Query ${this.query}: ${words}; divided by the temperature, hidden ones −∞, then the softmax.`);
    this.heads.replaceChildren(...["key", "score", "masked", "weight", "after dropout", ""].map((text) => make("th", { scope: "col" }, text)));
    const write = (x) => (x === -Infinity ? "−∞" : Number.isFinite(x) ? x.toFixed(3) : "");
    this.table.replaceChildren(...row.map((_, i) => {
      const bar = make("span", { class: "cattn-bar" });
      bar.style.width = `${Math.min(dropped[i], 1) * 100}%`;
      bar.style.background = this.scale.css[this.scale.level(Math.min(dropped[i], this.scale.high)) % 256] || "";
      return make("tr", { "data-at": from + i, "aria-selected": from + i === this.key ? "true" : null },
        make("th", { scope: "row" }, make("bdi", {}, this.name(from + i))), make("td", {}, hidden[i] && !given ? "" : write(scores[i])),
        make("td", {}, write(masked[i])), make("td", {}, hidden[i] ? "hidden" : write(weights[i])),
        make("td", {}, hidden[i] ? "" : dropped[i] === 0 ? "dropped" : write(dropped[i])), make("td", { class: "cattn-room" }, bar));
    }));
    if (this.key !== this.revealed && this.table.rows[this.key - from]) scrollInto(this.scroll, this.table.rows[this.key - from]);
    this.revealed = this.key;
    this.after.replaceChildren(...this.outputs(dropped, from));
    this.sums = { weights, dropped };
  }

  outputs(weights, from) {
    const { vectors } = this;
    const list = (title, numbers) => make("p", {}, make("b", {}, title), ` ${[...numbers].slice(0, 16).map((x) => x.toFixed(3)).join("  ")}${numbers.length > 16 ? " …" : ""}`);
    const parts = [];
    if (vectors && vectors.query && this.key >= from && this.key < from + weights.length) {
      parts.push(...productParts(vectors.query, vectors.key(this.key)));
    }
    if (vectors && vectors.value) {
      const width = vectors.value(from).length;
      const sum = Array.from({ length: width }, (_, d) =>
        weights.reduce((total, w, i) => total + (w === 0 ? 0 : w * vectors.value(from + i)[d]), 0));
      parts.push(list("output: weights × values", sum));
    }
    return parts;
  }
}

// Offers a file to the reader.
function offer(url, name) {
  make("a", { href: url, download: name }).click();
}
