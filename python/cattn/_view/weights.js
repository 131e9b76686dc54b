// The view of weights: small pictures of all heads, one head large, its tokens as text.

const THUMBNAIL = 64; // cells of a small picture, at most
const MOST_CELLS = 2 ** 21; // that are asked of the kernel at once

class WeightsView extends View {
  constructor(model, element) {
    super(model, element);
    const { n_layers: layers, heads, T_q, T_k } = this.info;
    this.whole = { q0: 0, q1: T_q, k0: 0, k1: T_k };
    this.window = { ...this.whole };
    this.data = numbersOf(this.bytes.slice(0, this.info.bytes ?? this.bytes.length), this.info.dtype);
    this.cellsOfHead = Math.ceil(T_q / this.info.block) * Math.ceil(T_k / this.info.block);
    this.details = new Map(); // exact parts of heads that came from the kernel
    this.map = new HeatMap({
      point: (q, k, how) => this.point(q, k, how),
      zoomed: (window) => {
        this.window = window;
        this.showHead();
      },
    });
    const partner = (q) => (this.info.shared ? q + this.info.offset : this.at.k);
    const owner = (k) => (this.info.shared && k >= this.info.offset ? k - this.info.offset : this.at.q);
    // Each text shows the sum of the tokens that are marked in it: of the rows above, of the columns below.
    const { shared, offset } = this.info;
    const addQuery = (q) => (shared ? this.add("k", q + offset) : this.add("q", q));
    const addKey = (k) => (shared && k >= offset ? this.add("q", k - offset) : this.add("k", k));
    const pointQuery = (q, how) => (how === "add" ? addQuery(q) : this.point(q, partner(q), how));
    const pointKey = (k, how) => (how === "add" ? addKey(k) : this.point(owner(k), k, how));
    this.lines = new Lines({ point: (kind, at, how) => (kind === "query" ? pointQuery(at, how) : pointKey(at, how)) });
    this.steps = this.makeSteps((k, how) => this.point(this.at.q, k, how));
    this.form = "map";
    this.held = { q: [], k: [] }; // tokens that are marked together
    this.keyLane = new Lane({ point: pointKey });
    this.queryLane = new Lane({ point: pointQuery });
    this.largest = [new Largest("looks at most", pointKey), new Largest("is looked at most by", pointQuery)];
    this.title = make("h2", { class: "cattn-title" });
    this.compare = make("button", {
      type: "button", class: "cattn-compare", "aria-pressed": "false", onclick: () => this.toggleCompare(),
    }, "Compare two heads");
    const many = layers * heads > 1;
    this.zooms = this.zoomButtons((factor) => this.map.zoomBy(factor));
    this.bar = make("div", { class: "cattn-bar-of-tools" }, this.scaleButtons(), many ? this.compare : null, this.formButtons(), this.fileButtons());
    this.hint = make("p", { class: "cattn-hint" }, "Point at a token or a cell to see its weights; a click holds it. Shift and a "
      + "click, or Shift and an arrow key, mark several tokens of a text, which then shows their sum. Drag over the map, or press + and "
      + "−, to zoom. Arrow keys move.");
    this.tables = make("div", { class: "cattn-tables" }, ...this.largest.map((table) => table.element));
    this.columns_ = (...parts) => make("div", { class: many ? "cattn-columns" : "cattn-columns cattn-single" }, many ? this.makeHeads() : null, ...parts);
    this.arrange();
    this.root.addEventListener("keydown", (event) => this.press(event));
    this.follow();
    this.start();
  }

  // Puts the parts on the page.
  arrange() {
    this.root.append(this.bar, this.hint, this.info.note ? make("p", { class: "cattn-hint cattn-note" }, this.info.note) : "",
      this.columns_(
        make("div", { class: "cattn-large" }, make("header", {}, this.title, this.zooms),
          this.status, this.map.element, this.lines.element, this.steps.element),
        make("div", { class: "cattn-texts" }, this.keyLane.element, this.queryLane.element, this.tables)));
  }

  // ---- forms ----
  makeSteps(point) {
    return new Steps({ point });
  }

  formButtons() {
    const button = (form, text) =>
      make("button", { type: "button", "data-form": form, onclick: () => this.setForm(form) }, text);
    this.forms = [button("map", "map"), button("lines", "lines"), button("steps", "step by step")];
    this.forms[0].setAttribute("aria-pressed", "true");
    return make("span", { class: "cattn-group", role: "group", "aria-label": "form" }, ...this.forms);
  }

  setForm(form) {
    this.form = form;
    for (const button of this.forms) button.setAttribute("aria-pressed", String(button.dataset.form === form));
    for (const [name, part] of Object.entries({ map: this.map, lines: this.lines, steps: this.steps })) {
      part.element.hidden = name !== form;
    }
    this.zooms.hidden = form !== "map";
    this.showHead();
  }

  fileButtons() {
    const button = (kind) => make("button", {
      type: "button", "data-file": kind, title: `save what is shown as ${kind}`, "aria-label": `save as ${kind}`, onclick: () => this.saveFile(kind),
    }, kind);
    return make("span", { class: "cattn-group", role: "group", "aria-label": "save" }, button("PNG"), button("SVG"));
  }

  // The map or the lines as a file: SVG has a rectangle for each cell of the map.
  saveFile(kind) {
    const name = this.headName(this.chosen[0]).replace(/\W+/g, "-") || "weights";
    if (kind === "PNG" && this.form === "map") return offer(this.map.base.toDataURL("image/png"), `${name}.png`);
    const lines = this.form === "lines" && this.lines.drawn;
    const picture = lines ? this.lines.picture.cloneNode(true) : this.mapAsSvg();
    for (const node of picture.querySelectorAll("text")) {
      node.setAttribute("fill", this.style(node.classList.contains("cattn-side") ? "--cattn-faint" : "--cattn-ink"));
      node.setAttribute("font-family", "sans-serif");
      node.setAttribute("font-size", "11");
    }
    for (const node of picture.querySelectorAll("line[stroke^='var']")) node.setAttribute("stroke", this.style("--cattn-line"));
    const [width, height] = picture.getAttribute("viewBox").split(" ").slice(2);
    picture.setAttribute("width", width);
    picture.setAttribute("height", height);
    const url = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(picture))}`;
    if (kind === "SVG") return offer(url, `${name}.svg`);
    const image = new Image();
    image.onload = () => {
      const canvas = make("canvas", { width: 2 * width, height: 2 * height });
      canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height);
      offer(canvas.toDataURL("image/png"), `${name}.png`);
    };
    image.onerror = () => this.status.replaceChildren("This browser cannot draw the picture: save it as SVG.");
    image.src = url;
  }

  mapAsSvg() {
    const { q0, q1, k0, k1 } = this.window;
    const [rows, columns] = [Math.min(q1 - q0, 256), Math.min(k1 - k0, 256)];
    const numbers = this.current.picture(this.window, rows, columns);
    const cell = Math.max(2, Math.min(24, Math.floor(640 / Math.max(rows, columns))));
    const named = cell >= 10;
    const [left, top] = named ? [100, 100] : [4, 4];
    const parts = Array.from(numbers, (x, i) => draw("rect", {
      x: left + (i % columns) * cell, y: top + Math.floor(i / columns) * cell, width: cell, height: cell,
      fill: this.shownScale.css[this.shownScale.level(x)],
    }));
    const text = (words, x, y, attributes) => {
      const node = draw("text", { x, y, ...attributes });
      node.textContent = words;
      return node;
    };
    const context = make("canvas").getContext("2d");
    context.font = FONT;
    for (let q = 0; named && q < rows; q++) {
      parts.push(text(cutText(context, this.queryName(q0 + q), left - 10), left - 6, top + (q + 0.7) * cell, { "text-anchor": "end" }));
    }
    for (let k = 0; named && k < columns; k++) {
      const [x, y] = [left + (k + 0.6) * cell, top - 6];
      parts.push(text(cutText(context, this.keyName(k0 + k), top * 1.2), x, y, { transform: `rotate(-45 ${x} ${y})` }));
    }
    const size = [left + columns * cell + (named ? 90 : 4), top + rows * cell + 4];
    return draw("svg", { viewBox: `0 0 ${size.join(" ")}` }, ...parts);
  }

  // Query, keys and values of the head, where they were given: functions from positions to rows.
  vectors() {
    const operands = this.info.operands;
    if (!operands || this.parts) return null;
    const [layer, head] = this.chosen[0];
    const rows = (name, length) => {
      const found = operands[name];
      if (!found) return null;
      this.numbers ||= {};
      const bytes = () => this.bytes.slice(found.start, found.start + found.bytes);
      this.numbers[name] ||= numbersOf(bytes(), found.dtype);
      const start = (layer * found.heads + Math.floor((head * found.heads) / this.info.heads)) * length * found.width;
      return (i) => Array.from(this.numbers[name].subarray(start + i * found.width, start + (i + 1) * found.width));
    };
    const { T_q, T_k } = this.info;
    const [query, key, value] = [rows("query", T_q), rows("key", T_k), rows("value", T_k)];
    return { query: query && key ? query(this.at.q) : null, key, value, scale: operands.scale };
  }

  // ---- heads ----
  makeHeads() {
    const { n_layers: layers, heads } = this.info;
    this.thumbnails = [];
    const rows = Array.from({ length: layers }, (_, layer) => {
      const cells = Array.from({ length: heads }, (_, head) => {
        const name = this.headName([layer, head]);
        const canvas = make("canvas", { "aria-hidden": "true" });
        const caption = make("span", {}, layers === 1 ? String(head) : "");
        const cell = make("div", {
          role: "gridcell", class: "cattn-head", tabindex: "-1", "aria-label": name, title: name,
          onclick: (event) => this.choose(layer, head, event.shiftKey),
        }, canvas, caption);
        Object.assign(cell, { layer, head, canvas, caption });
        this.thumbnails.push(cell);
        return cell;
      });
      const label = layers === 1 ? null : make("span", { role: "rowheader" }, this.layerName(layer));
      return make("div", { role: "row", class: "cattn-row" }, label, ...cells);
    });
    const numbers = Array.from({ length: heads }, (_, head) => make("span", {}, String(head)));
    const top = layers === 1 ? null : make("div", { class: "cattn-row cattn-numbers", "aria-hidden": "true" },
      make("span", {}, ""), ...numbers);
    this.heads = make("div", {
      role: "grid", class: layers === 1 ? "cattn-heads cattn-flat" : "cattn-heads", "aria-label": "heads",
      "aria-multiselectable": "true", onkeydown: (event) => this.pressHead(event),
    }, top, ...rows);
    this.heads.style.setProperty("--cattn-heads", heads);
    const many = this.info.axis === "layer" ? "layers" : "entries";
    const words = layers === 1 ? `${heads} heads` : `${layers} ${many} (down) of ${heads} heads (across)`;
    return make("div", { class: "cattn-overview" }, make("h3", {}, words), this.heads);
  }

  pressHead(event) {
    const cell = event.target.closest(".cattn-head");
    if (!cell || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = this.thumbnails.indexOf(cell);
    const columns = this.columns();
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (step !== undefined) {
      const next = this.thumbnails[at + step];
      if (next) this.focusHead(next);
    } else if (event.key === "Home" || event.key === "End") {
      this.focusHead(this.thumbnails.at(event.key === "Home" ? 0 : -1));
    } else if (event.key === "Enter") {
      this.choose(cell.layer, cell.head, event.shiftKey);
      this.map.element.focus();
    } else if (event.key === " " || event.key === "c") {
      this.choose(cell.layer, cell.head, true);
    } else {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  }

  // How many small pictures stand in a line.
  columns() {
    const top = this.thumbnails[0].offsetTop;
    const next = this.thumbnails.findIndex((cell) => cell.offsetTop > top + 2);
    return next < 0 ? this.thumbnails.length : next;
  }

  focusHead(cell) {
    for (const other of this.thumbnails) other.tabIndex = other === cell ? 0 : -1;
    cell.focus();
  }

  markHeads() {
    if (!this.thumbnails) return;
    const [first, second] = this.chosen;
    const is = (cell, head) => Boolean(head) && cell.layer === head[0] && cell.head === head[1];
    const active = this.thumbnails.includes(this.root.getRootNode().activeElement);
    for (const cell of this.thumbnails) {
      cell.setAttribute("aria-selected", String(is(cell, first) || is(cell, second)));
      cell.classList.toggle("cattn-second", is(cell, second));
      if (!active) cell.tabIndex = is(cell, first) ? 0 : -1;
    }
  }

  drawThumbnails() {
    const { q1, k1 } = this.whole;
    for (const cell of this.thumbnails || []) {
      const rows = Math.min(q1, THUMBNAIL);
      const columns = Math.min(k1, THUMBNAIL);
      cell.numbers ||= this.overview([cell.layer, cell.head]).picture(this.whole, rows, columns);
      paint(cell.canvas, cell.numbers, rows, columns, this.scale);
    }
  }

  toggleCompare() {
    if (this.chosen.length === 2) this.choose(...this.chosen[0], false);
    else this.setComparing(!this.compared);
  }

  // Keys that no element has taken: the point moves also after a click on a button, a line or a row.
  press(event) {
    if (event.key === "Escape") this.escape(event);
    else if (!event.target.closest("input")) this.map.press(event, this.form === "steps");
  }

  escape(event) {
    if (this.compared) this.setComparing(false);
    else if (this.chosen.length === 2) this.choose(...this.chosen[0], false);
    else if (this.pinned) {
      this.pinned = false;
      this.held = { q: [], k: [] };
      this.showPoint();
    } else if (this.map.element === event.target && this.thumbnails) {
      this.focusHead(this.thumbnails.find((cell) => cell.tabIndex === 0) || this.thumbnails[0]);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // ---- numbers ----
  overview([layer, head]) {
    const start = (layer * this.info.heads + head) * this.cellsOfHead;
    const { q1, k1 } = this.whole;
    return new Grid({ q1, k1, start, block: this.info.block, data: this.data, dtype: this.info.dtype });
  }

  // The best that is known of a head in this window. What is only known in blocks is asked of the kernel.
  grid(head) {
    if (this.info.block === 1) return this.overview(head);
    const known = this.details.get(String(head));
    if (known && known.covers(this.window)) return known;
    const { q0, q1, k0, k1 } = this.window;
    if (this.info.kernel && (q1 - q0) * (k1 - k0) <= MOST_CELLS) {
      const [layer, number] = head;
      const window = { q0, q1, k0, k1 };
      this.kernel.ask(String(head), { kind: "window", layer, head: number, ...window }, (message, bytes) => {
        if (message.error) return;
        const data = numbersOf(bytes, message.dtype);
        this.details.delete(String(head)); // the oldest go first
        this.details.set(String(head), new Grid({ ...window, data, dtype: message.dtype }));
        while (this.details.size > 4) this.details.delete(this.details.keys().next().value);
        this.showHead();
      });
    }
    return this.overview(head);
  }

  // ---- drawing ----
  refresh() {
    const { low, high } = this.info;
    this.scale = new Scale({ low, high, log: this.log, theme: this.theme });
    this.drawThumbnails();
    this.setHeads();
  }

  resize() {
    this.map.draw();
  }

  setHeads() {
    if (!this.theme) return;
    this.markHeads();
    this.showHead();
  }

  showHead() {
    const [first, second] = this.chosen;
    const grids = [first, second].filter(Boolean).map((head) => this.grid(head));
    if (grids.length === 2 && grids[0].block === grids[1].block && grids[0].covers(grids[1])
      && grids[1].covers(grids[0])) {
      this.current = grids[0].minus(grids[1]);
    } else {
      this.current = grids.length === 2 ? this.overview(first).minus(this.overview(second)) : grids[0];
    }
    this.parts = grids.length === 2 ? grids : null;
    const range = this.parts ? this.current.range() : this.info;
    this.shownScale = this.parts
      ? new Scale({ ...range, log: this.log, theme: this.theme, diverging: true, zeroIsHidden: false })
      : this.scale;
    const name = this.parts ? `${this.headName(first)} − ${this.headName(second)}` : this.headName(first);
    setText(this.title, name || "weights");
    if (this.compare && !this.compared) {
      setText(this.compare, this.parts ? "Stop comparing" : "Compare two heads");
    }
    this.showScale(this.shownScale);
    this.map.element.setAttribute("aria-label", `${name || "weights"}: ${this.info.T_q} queries, ${this.info.T_k} keys. `
      + "Arrow keys move, plus and minus zoom, Escape goes back to the heads.");
    const { current: grid, whole, window, names, shownScale: scale } = this;
    this.map.set({ grid, whole, window, names, scale, crossed: this.crossed });
    if (this.form === "lines") this.lines.set({ grid, window, names, scale });
    const small = (size) => size <= MOST_TOKENS;
    const { T_q, T_k } = this.info;
    this.queryLane.build((q) => this.queryName(q), ...(small(T_q) ? [0, T_q] : this.part(window.q0, window.q1)));
    this.keyLane.build((k) => this.keyName(k), ...(small(T_k) ? [0, T_k] : this.part(window.k0, window.k1)));
    this.showPoint();
  }

  // Cells of the map that get a cross.
  get crossed() {
    return [];
  }

  part(from, to) {
    return [from, Math.min(to, from + MOST_TOKENS)];
  }

  // ---- the point ----
  follow() {
    const clip = (value, size) => Math.min(Math.max(value < 0 ? size - 1 : value, 0), size - 1);
    this.at = { q: clip(this.model.get("query"), this.info.T_q), k: clip(this.model.get("key"), this.info.T_k) };
    if (this.theme) this.showPoint();
  }

  point(q, k, how) {
    if (how === "hover" && (this.pinned || (q === this.at.q && k === this.at.k))) return;
    const again = this.pinned && q === this.at.q && k === this.at.k;
    this.pinned = how === "hover" ? this.pinned : how === "key" || !again;
    this.at = { q, k };
    if (how !== "hover") this.held = { q: [], k: [] };
    if (how !== "hover") this.save({ query: q, key: k });
    this.showSoon();
  }

  // Marks one more query ("q") or key ("k"), or one less.
  add(kind, at) {
    const held = this.held[kind].length ? this.held[kind] : [this.at[kind]];
    this.held[kind] = !held.includes(at) ? [...held, at] : held.length > 1 ? held.filter((other) => other !== at) : held;
    this.at = { ...this.at, [kind]: this.held[kind].at(-1) };
    this.pinned = true;
    this.save({ query: this.at.q, key: this.at.k });
    this.showSoon();
  }

  marked(kind) {
    return this.held[kind].length ? this.held[kind] : [this.at[kind]];
  }

  showSoon() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      this.showPoint();
      this.keyLane.reveal();
      this.queryLane.reveal();
    });
  }

  // A number as text: a weight has the digits of its dtype, a sum of several is rounded to seven.
  text(x) {
    return this.sums ? exactText(Number(x.toPrecision(7)), "float64") : exactText(x, this.current.dtype);
  }

  showPoint() {
    const { q, k } = this.at;
    const { T_q, T_k } = this.info;
    const [grid, scale] = [this.current, this.shownScale];
    const [queries, keys] = [this.marked("q"), this.marked("k")];
    this.sums = queries.length * keys.length > 1;
    this.map.mark(q, k, queries, keys);
    if (this.form === "lines") this.lines.mark(queries, keys);
    this.root.classList.toggle("cattn-pinned", this.pinned);
    const cell = (query, key) => (grid.covers({ q0: query, q1: query + 1, k0: key, k1: key + 1 }) ? grid.at(query, key) : undefined);
    const sum = (numbers) => (numbers.includes(undefined) ? undefined : numbers.reduce((a, b) => a + b));
    const row = (key) => sum(queries.map((query) => cell(query, key)));
    const column = (query) => sum(keys.map((key) => cell(query, key)));
    const several = (list, name) => (list.length > 4 ? `${list.length} tokens` : list.map((i) => this.quoted(name(i), i)).join(" + "));
    const [query, key] = [several(queries, (i) => this.queryName(i)), several(keys, (i) => this.keyName(i))];
    setText(this.keyLane.title, `Keys that query ${query} looks at`);
    setText(this.queryLane.title, `Queries that look at key ${key}`);
    const { shared, offset } = this.info;
    const asking = shared ? queries.map((i) => i + offset) : [];
    const above = shared && this.held.q.length ? asking : keys;
    const below = shared && this.held.k.length ? keys.map((i) => i - offset) : queries;
    this.keyLane.paint(row, scale, above.at(-1), (x) => this.text(x), above, asking);
    this.queryLane.paint(column, scale, below.at(-1), (x) => this.text(x), below);
    this.showStatus(query, key, sum(keys.map(row)));
    if (this.form === "steps") {
      const { k0, k1 } = T_k <= MOST_TOKENS ? { k0: 0, k1: T_k } : this.window;
      const numbers = Array.from({ length: k1 - k0 }, (_, i) => cell(q, k0 + i) ?? 0);
      this.steps.set({
        query: this.quoted(this.queryName(q), q), at: q, key: k, row: numbers, from: k0, name: (i) => this.keyName(i), vectors: this.vectors(), scale,
        negative: this.info.low < 0,
      });
    }
    const pairs = (size, value) =>
      Array.from({ length: size }, (_, i) => [i, value(i)]).filter(([, x]) => x !== undefined);
    const lists = [[T_k, row, (i) => this.keyName(i)], [T_q, column, (i) => this.queryName(i)]];
    lists.forEach(([size, value, name], i) => {
      const wanted = Math.max(T_q, T_k) > MOST_CHIPS_WITH_NUMBERS && grid.block === 1;
      this.largest[i].show(wanted ? pairs(size, value) : [], name, scale, (x) => this.text(x));
    });
    setText(this.largest[0].caption, `query ${query} looks most at`);
    setText(this.largest[1].caption, `key ${key} is looked at most by`);
  }

  showStatus(query, key, x) {
    const { q, k } = this.at;
    const known = x !== undefined;
    const block = this.current.block;
    let words = this.sums ? "the sum is " : "";
    if (this.parts && known && block === 1 && !this.sums) {
      words = this.parts.map((part) => exactText(part.at(q, k), part.dtype)).join(" − ") + " = ";
    }
    if (known && block > 1) words = `in ${block} × ${block} cells the largest is `;
    const isHidden = known && !this.parts && (x === 0 || x === -Infinity);
    const short = known && this.parts ? String(Number(x.toPrecision(4))) : known ? this.text(x) : "…";
    const number = make("b", {}, isHidden ? "hidden" : short);
    const rounded = this.info.rounded && known && !isHidden ? ` (rounded to ${this.info.rounded})` : "";
    Object.assign(this.status.dataset, { query: q, key: k, value: known ? this.text(x) : "", block });
    this.status.replaceChildren(`query ${query} → key ${key}: ${words}`, number, rounded, this.pinned ? " · pinned" : "");
  }
}
