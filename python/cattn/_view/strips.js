// Statistics of each token as strips along the text.

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
