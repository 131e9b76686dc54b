// One head's matrix, large: a canvas with the names of the tokens, a cross through the cell under the pointer, and zoom.

const FONT = "11px ui-sans-serif, system-ui, 'Segoe UI', 'Noto Sans', sans-serif";
const NAME_ROOM = 12; // pixels of a cell that has room for the name of its token
const SLOPE_ROOM = 16; // of a cell whose key's name can be aslant; in narrower ones it is upright
const LARGEST_CELL = 46;
const TALLEST = 600;

class HeatMap {
  // point(q, k, how) is called when a cell is pointed at, by "hover", "tap" or "key"; zoomed(window) when another window
  // is shown.
  constructor({ point, zoomed: changed }) {
    this.point = point;
    this.changed = changed;
    this.tallest = TALLEST;
    this.base = make("canvas", { "aria-hidden": "true" });
    this.over = make("canvas", { class: "cattn-over", "aria-hidden": "true" });
    this.element = make("div", {
      class: "cattn-map", tabindex: "0", role: "application", "aria-roledescription": "heat map of attention weights",
    }, this.base, this.over);
    this.element.addEventListener("keydown", (event) => this.press(event));
    gestures(this.over, {
      hover: (x, y) => this.pointAt(x, y, "hover"),
      tap: (x, y) => this.pointAt(x, y, "tap"),
      brush: (...box) => this.brush(...box),
      zoom: (factor, x, y) => this.zoom(factor, ...this.cell(x, y).map((at) => at + 0.5)),
    });
  }

  // names.query and names.key are functions from positions to texts, or null where there are no tokens. The cells
  // `crossed`, pairs of query and key, get a cross.
  set({ grid, whole, window, names, scale, crossed = [] }) {
    Object.assign(this, { grid, whole, window: { ...window }, names, scale, crossed });
    this.box = null;
    this.draw();
  }

  get size() {
    return [this.window.q1 - this.window.q0, this.window.k1 - this.window.k0];
  }

  layout() {
    const [rows, columns] = this.size;
    const context = this.base.getContext("2d");
    context.font = FONT;
    const available = Math.max(this.element.clientWidth, 120);
    const widest = (name, from, to) => {
      let width = 0;
      for (let i = from; i < Math.min(to, from + 64); i++) width = Math.max(width, context.measureText(name(i)).width);
      return width;
    };
    const cut = Math.min(110, available / 4);
    const plan = (named, aslant) => {
      const { q0, q1, k0, k1 } = this.window;
      const queries = named && this.names ? Math.min(widest(this.names.query, q0, q1), cut) : 0;
      const keys = named && this.names ? Math.min(widest(this.names.key, k0, k1), cut) : 0;
      const left = Math.max(queries, context.measureText(String(q1)).width) + 24;
      const top = Math.max(keys * (aslant ? 0.71 : 1) + 10, 14) + 18;
      const right = Math.max(aslant ? keys * 0.71 - 4 : 0, 16);
      let width = Math.min(LARGEST_CELL, (available - left - right) / columns);
      let height = Math.max(Math.min(width, this.tallest / rows), Math.min(18, this.tallest / rows));
      if (rows >= columns / 2 && rows <= columns * 2) width = Math.min(width, height);
      if (rows === columns) height = width = Math.min(width, height);
      if (width > 4) width = Math.floor(width * 4) / 4;
      if (height > 4) height = Math.floor(height * 4) / 4;
      return { left, top, right, width, height, keysNamed: keys > 0, queriesNamed: queries > 0, cut, aslant };
    };
    let shape = plan(true, true);
    if (shape.width < SLOPE_ROOM) shape = plan(true, false);
    shape.keysNamed &&= shape.width >= NAME_ROOM;
    shape.queriesNamed &&= shape.height >= NAME_ROOM;
    if (!shape.keysNamed && !shape.queriesNamed) shape = { ...plan(false, false), keysNamed: false, queriesNamed: false };
    shape.bottom = shape.top + rows * shape.height;
    shape.end = shape.left + columns * shape.width;
    this.shape = shape;
  }

  draw() {
    if (!this.grid || !this.element.clientWidth) return;
    this.layout();
    const { left, top, right, bottom, end } = this.shape;
    const ratio = window.devicePixelRatio || 1;
    for (const canvas of [this.base, this.over]) {
      canvas.width = Math.ceil((end + right) * ratio);
      canvas.height = Math.ceil((bottom + 4) * ratio);
      canvas.style.width = `${canvas.width / ratio}px`;
      canvas.style.height = `${canvas.height / ratio}px`;
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    const [rows, columns] = this.size;
    const height = Math.max(Math.min(rows, Math.round((bottom - top) * ratio)), 1);
    const width = Math.max(Math.min(columns, Math.round((end - left) * ratio)), 1);
    const picture = document.createElement("canvas");
    paint(picture, this.grid.picture(this.window, height, width), height, width, this.scale);
    const context = this.base.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.drawImage(picture, left, top, end - left, bottom - top);
    this.drawLines(context);
    this.drawNames(context);
    this.drawCross();
  }

  drawLines(context) {
    const { left, top, bottom, end, width, height } = this.shape;
    const [rows, columns] = this.size;
    context.strokeStyle = this.style("--cattn-gap");
    context.lineWidth = 1;
    context.beginPath();
    if (width >= 8 && height >= 8) {
      for (let k = 1; k < columns; k++) context.rect(left + k * width - 0.5, top, 0, bottom - top);
      for (let q = 1; q < rows; q++) context.rect(left, top + q * height - 0.5, end - left, 0);
    }
    context.stroke();
    const { q0, k0 } = this.window;
    context.strokeStyle = this.style("--cattn-second");
    context.lineWidth = 1.5;
    context.beginPath();
    for (const [q, k] of this.crossed.filter(([row, column]) => this.grid.covers({ q0: row, q1: row + 1, k0: column, k1: column + 1 }))) {
      const [x, y] = [left + (k - k0) * width, top + (q - q0) * height];
      if (q < q0 || k < k0 || y >= bottom || x >= end) continue;
      context.moveTo(x + 0.2 * width, y + 0.2 * height);
      context.lineTo(x + 0.8 * width, y + 0.8 * height);
      context.moveTo(x + 0.8 * width, y + 0.2 * height);
      context.lineTo(x + 0.2 * width, y + 0.8 * height);
    }
    context.stroke();
  }

  style(name) {
    return getComputedStyle(this.element).getPropertyValue(name).trim();
  }

  drawNames(context) {
    const { left, top, bottom, end, width, height, keysNamed, queriesNamed, cut, aslant } = this.shape;
    const { q0, q1, k0, k1 } = this.window;
    context.font = FONT;
    context.textBaseline = "middle";
    const faint = this.style("--cattn-faint");
    context.fillStyle = faint;
    context.textAlign = "left";
    context.fillText(`${this.column || "key"} →`, left, 8);
    context.save();
    context.translate(8, Math.min(top + 44, bottom));
    context.rotate(-Math.PI / 2);
    context.fillText("← query", 0, 0);
    context.restore();
    context.fillStyle = this.style("--cattn-ink");
    context.strokeStyle = faint;
    const keyTicks = keysNamed ? ticksOf(k0, k1, k1 - k0) : ticksOf(k0, k1, (end - left) / 46);
    for (const k of keyTicks) {
      const x = left + (k - k0 + 0.5) * width;
      context.save();
      context.translate(x, top - 6);
      if (keysNamed) context.rotate(aslant ? -Math.PI / 4 : -Math.PI / 2);
      context.textAlign = keysNamed ? "left" : "center";
      context.fillText(keysNamed ? cutText(context, this.names.key(k), cut) : String(k), 0, keysNamed ? 0 : -4);
      context.restore();
      if (!keysNamed) this.tick(context, x, top - 4, x, top);
    }
    const queryTicks = queriesNamed ? ticksOf(q0, q1, q1 - q0) : ticksOf(q0, q1, (bottom - top) / 28);
    context.textAlign = "right";
    for (const q of queryTicks) {
      const y = top + (q - q0 + 0.5) * height;
      const text = queriesNamed ? cutText(context, this.names.query(q), cut) : String(q);
      context.fillText(text, left - 6, y + 0.5);
      if (!queriesNamed) this.tick(context, left - 4, y, left, y);
    }
  }

  tick(context, ...[x0, y0, x1, y1]) {
    context.beginPath();
    context.moveTo(x0, y0);
    context.lineTo(x1, y1);
    context.stroke();
  }

  // Marks row and column of the point, and the rectangle that is being drawn.
  drawCross() {
    if (!this.shape) return;
    const { left, top, bottom, end, width, height } = this.shape;
    const context = this.over.getContext("2d");
    context.clearRect(0, 0, this.over.width, this.over.height);
    const { q0, q1, k0, k1 } = this.window;
    const { q, k, queries = [q], keys = [k] } = this.at || {};
    const accent = this.style("--cattn-accent");
    const band = (x, y, w, h) => {
      context.lineWidth = 3;
      context.strokeStyle = this.style("--cattn-halo");
      context.strokeRect(x, y, w, h);
      context.lineWidth = 1.5;
      context.strokeStyle = accent;
      context.strokeRect(x, y, w, h);
    };
    const y = top + (q - q0) * height;
    const x = left + (k - k0) * width;
    const [thick, wide] = [Math.max(height, 3), Math.max(width, 3)];
    for (const at of queries) if (at >= q0 && at < q1) band(left, top + (at - q0) * height, end - left, thick);
    for (const at of keys) if (at >= k0 && at < k1) band(left + (at - k0) * width, top, wide, bottom - top);
    if (q >= q0 && q < q1 && k >= k0 && k < k1) {
      context.lineWidth = 2.5;
      context.strokeRect(x - 1, y - 1, wide + 2, thick + 2);
    }
    if (this.box) {
      const [x0, y0, x1, y1] = this.box;
      context.fillStyle = this.style("--cattn-veil");
      context.fillRect(x0, y0, x1 - x0, y1 - y0);
      context.lineWidth = 1;
      context.strokeRect(x0, y0, x1 - x0, y1 - y0);
    }
  }

  mark(q, k, queries, keys) {
    this.at = { q, k, queries, keys };
    this.drawCross();
  }

  cell(x, y) {
    const { left, top, width, height } = this.shape;
    const [rows, columns] = this.size;
    const clip = (value, size) => Math.min(Math.max(Math.floor(value), 0), size - 1);
    return [this.window.q0 + clip((y - top) / height, rows), this.window.k0 + clip((x - left) / width, columns)];
  }

  pointAt(x, y, how) {
    if (!this.shape) return;
    const { left, top, bottom, end } = this.shape;
    if (x < left - 60 || y < top - 60 || x > end + 4 || y > bottom + 4) return;
    this.point(...this.cell(x, y), how);
  }

  brush(x0, y0, x1, y1, done) {
    this.box = done || (x0 === x1 && y0 === y1) ? null : [x0, y0, x1, y1];
    if (done) {
      const [[qa, ka], [qb, kb]] = [this.cell(x0, y0), this.cell(x1, y1)];
      const window = { q0: Math.min(qa, qb), q1: Math.max(qa, qb) + 1, k0: Math.min(ka, kb), k1: Math.max(ka, kb) + 1 };
      if (window.q1 - window.q0 > 1 && window.k1 - window.k0 > 1) this.show(window);
    }
    this.drawCross();
  }

  zoom(factor, q, k) {
    const { q0, q1, k0, k1 } = this.window;
    const [top, bottom] = zoomed(q0, q1, this.whole.q1, factor, q);
    const [left, right] = zoomed(k0, k1, this.whole.k1, factor, k);
    this.show({ q0: top, q1: bottom, k0: left, k1: right });
  }

  // Zooms around the marked cell, or the middle; a factor of 0 shows everything.
  zoomBy(factor) {
    const { q0, q1, k0, k1 } = this.window;
    const { q = -1, k = -1 } = this.at || {};
    const inside = q >= q0 && q < q1 && k >= k0 && k < k1;
    if (factor === 0) this.show({ ...this.whole });
    else this.zoom(factor, inside ? q + 0.5 : (q0 + q1) / 2, inside ? k + 0.5 : (k0 + k1) / 2);
  }

  show(window) {
    this.window = window;
    this.changed(window);
  }

  // `swapped`: up and down are for keys, as in a list of them.
  press(event, swapped = false) {
    const { q = this.window.q0, k = this.window.k0 } = this.at || {};
    const far = event.shiftKey ? 10 : 1;
    const [down, right] = swapped ? [[q, k + far], [q + far, k]] : [[q + far, k], [q, k + far]];
    const [up, left] = [down, right].map(([a, b]) => [2 * q - a, 2 * k - b]);
    const moves = {
      ArrowUp: up, ArrowDown: down, ArrowLeft: left, ArrowRight: right,
      Home: [q, this.window.k0], End: [q, this.window.k1 - 1], PageUp: [q - 10, k], PageDown: [q + 10, k],
    };
    const zooms = { "+": 2, "=": 2, "-": 0.5, 0: 0 };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in moves) {
      const clip = (value, from, to) => Math.min(Math.max(value, from), to - 1);
      const { q0, q1, k0, k1 } = this.window;
      this.point(clip(moves[event.key][0], q0, q1), clip(moves[event.key][1], k0, k1), "key");
    } else if (event.key in zooms) {
      this.zoomBy(zooms[event.key]);
    } else {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  }
}
