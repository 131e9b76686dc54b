// Two more forms of one head: lines between two copies of the text, and the steps from scores to output of one query.

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

  // Shows the lines of the marked query and key, and the others faint.
  mark(q, k) {
    for (const line of this.drawn || []) {
      line.setAttribute("opacity", line.query === q || line.key === k ? 0.25 + 0.75 * line.part : 0.06 + 0.2 * line.part);
    }
    for (const name of this.drawn ? this.names_ : []) {
      name.classList.toggle("cattn-marked", Number(name.dataset.at) === (name.dataset.kind === "query" ? q : k));
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
      const key = vectors.key(this.key);
      const products = vectors.query.map((x, d) => x * key[d]);
      const most = Math.max(...products.map(Math.abs)) || 1;
      const cells = products.slice(0, 128).map((x, d) => {
        const cell = make("span", { title: `dimension ${d}: ${x.toFixed(4)}` });
        cell.style.background = `color-mix(in srgb, ${x < 0 ? "var(--cattn-second)" : "var(--cattn-line)"} ${Math.round((Math.abs(x) / most) * 100)}%, transparent)`;
        return cell;
      });
      parts.push(make("p", {}, make("b", {}, "query × key, by dimension")), make("div", { class: "cattn-products" }, ...cells));
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
