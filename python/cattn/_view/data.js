// What is shown: numbers, their colours, and matrices of weights. _page.py joins the scripts of this folder to one ES
// module.

// ---- bytes to numbers, numbers to text ----

const BITS = { float16: 11, bfloat16: 8, float32: 24, float64: 53 }; // of the significand
const LEAST_EXPONENT = { float16: -14, bfloat16: -126, float32: -126, float64: -1022 };

// Front ends hand over bytes as a DataView, an ArrayBuffer or a typed array; the saved page has them in base64.
function bytesOf(value) {
  if (typeof value === "string") {
    const text = atob(value);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    return bytes;
  }
  return value.buffer ? new Uint8Array(value.buffer, value.byteOffset, value.byteLength) : new Uint8Array(value);
}

let halves = null; // the values of all 65536 numbers of float16

function halfTable() {
  if (halves) return halves;
  halves = new Float32Array(65536);
  for (let bits = 0; bits < 65536; bits++) {
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    let value = exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24;
    if (exponent === 31) value = fraction ? NaN : Infinity;
    halves[bits] = bits >> 15 ? -value : value;
  }
  return halves;
}

// Returns the numbers of a little-endian array. Halves become float32, which holds each of them exactly.
function numbersOf(bytes, dtype) {
  const size = { float64: 8, float32: 4, int32: 4 }[dtype] || 2;
  const whole = bytes.byteOffset % size === 0 ? bytes : bytes.slice();
  const length = Math.floor(whole.byteLength / size);
  if (dtype === "float64") return new Float64Array(whole.buffer, whole.byteOffset, length);
  if (dtype === "float32") return new Float32Array(whole.buffer, whole.byteOffset, length);
  if (dtype === "int32") return new Int32Array(whole.buffer, whole.byteOffset, length);
  const bits = new Uint16Array(whole.buffer, whole.byteOffset, length);
  if (dtype === "bfloat16") {
    const wide = new Uint32Array(length);
    for (let i = 0; i < length; i++) wide[i] = bits[i] << 16;
    return new Float32Array(wide.buffer);
  }
  const table = halfTable();
  const numbers = new Float32Array(length);
  for (let i = 0; i < length; i++) numbers[i] = table[bits[i]];
  return numbers;
}

// Returns the shortest decimal that is this number in its dtype, so that what is read from the page is the array's.
function exactText(x, dtype) {
  if (Number.isNaN(x)) return "nan";
  if (!Number.isFinite(x)) return x > 0 ? "inf" : "-inf";
  const write = (short) => (x !== 0 && Math.abs(x) < 1e-4 ? short.toExponential() : String(short));
  if (x === 0 || dtype === "float64") return write(x);
  const size = Math.abs(x);
  let exponent = Math.floor(Math.log2(size));
  if (2 ** exponent > size) exponent--; // log2 is rounded
  exponent = Math.max(exponent, LEAST_EXPONENT[dtype]);
  const above = 2 ** (exponent - BITS[dtype]); // half of the distance to the next number
  const below = size === 2 ** exponent && exponent > LEAST_EXPONENT[dtype] ? above / 2 : above;
  for (let digits = 1; digits < 17; digits++) {
    const short = Number(x.toPrecision(digits));
    const error = Math.abs(short) - size;
    if (error < above && -error < below) return write(short);
  }
  return write(x);
}

// Returns a number for a small label: about three digits.
function shortText(x) {
  if (!Number.isFinite(x)) return exactText(x, "float64");
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size < 0.001) return x.toExponential(0);
  if (size >= 1e6) return x.toExponential(1);
  if (size >= 100) return String(Math.round(x));
  return String(Number(x.toPrecision(3)));
}

// Returns a number for a token's chip: two digits after the point, three of small ones.
function chipText(x) {
  if (!Number.isFinite(x)) return x === -Infinity ? "" : exactText(x, "float64");
  if (x === 0) return "";
  if (Math.abs(x) < 0.0005) return "~0";
  return x.toFixed(Math.abs(x) < 0.01 ? 3 : 2).replace(/^(-?)0\./, "$1.");
}

// Returns the positions of about `most` round ticks from `from` up to but not including `to`.
function ticksOf(from, to, most) {
  let step = 1;
  for (let factor = 0; (to - from) / step > Math.max(most, 1); factor++) step *= [2, 2.5, 2][factor % 3];
  const ticks = [];
  for (let at = Math.ceil(from / step) * step; at < to; at += step) ticks.push(at);
  return ticks;
}

// ---- colours ----

// Both scales are monotone in lightness, so that they can be read without seeing hues: more weight is
// farther from the page's background. YlGnBu and the diverging pair follow ColorBrewer, the dark scale is viridis.

const SEQUENTIAL = {
  light: "ffffd9 edf8b1 c7e9b4 7fcdbb 41b6c4 1d91c0 225ea8 253494 081d58",
  dark: "440154 482878 3e4989 31688e 26828e 1f9e89 35b779 6ece58 b5de2b fde725",
};
const DIVERGING = {
  light: "053061 2166ac 4393c3 a6d0e4 f7f7f7 fdc98a e08214 b35806 7f3b08",
  dark: "9fd3ff 58a6ea 2f6fae 24486b 303237 6b4620 ad6a1f e8953a ffc680",
};
const HIDDEN = { light: "e9ebee", dark: "26292e" };
const BROKEN = { light: "c8102e", dark: "ff5a5f" }; // NaN and infinity
const LEVELS = 255;
const DECADES = 4; // of the logarithmic scale

const channels = (hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));

function colourTable(stops) {
  const points = stops.split(" ").map(channels);
  return Array.from({ length: LEVELS + 1 }, (_, level) => {
    const place = (level / LEVELS) * (points.length - 1);
    const below = Math.min(Math.floor(place), points.length - 2);
    return points[below].map((c, i) => Math.round(c + (points[below + 1][i] - c) * (place - below)));
  });
}

// WCAG's relative luminance.
function luminance([red, green, blue]) {
  const linear = (c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue);
}

// Colours of numbers. A level is an index into the tables: 0 to 255, HIDDEN_LEVEL or BROKEN_LEVEL.
const HIDDEN_LEVEL = LEVELS + 1;
const BROKEN_LEVEL = LEVELS + 2;

class Scale {
  constructor({ low, high, log, theme, diverging, zeroIsHidden = true }) {
    this.diverging = diverging ?? low < 0;
    this.log = log;
    this.zeroIsHidden = zeroIsHidden;
    this.low = this.diverging || zeroIsHidden ? 0 : low;
    this.high = this.diverging ? Math.max(Math.abs(low), Math.abs(high)) : high;
    this.span = this.high > this.low ? this.high - this.low : 1;
    const table = colourTable((this.diverging ? DIVERGING : SEQUENTIAL)[theme]);
    table.push(channels(HIDDEN[theme]), channels(BROKEN[theme]));
    this.css = table.map(([r, g, b]) => `rgb(${r} ${g} ${b})`);
    this.ink = table.map((colour) => (luminance(colour) > 0.179 ? "#000" : "#fff"));
    this.packed = Uint32Array.from(table, ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0);
  }

  level(x) {
    if (x === -Infinity || (x === 0 && this.zeroIsHidden)) return HIDDEN_LEVEL;
    if (!Number.isFinite(x)) return BROKEN_LEVEL;
    let part = (Math.abs(x - this.low)) / this.span;
    if (!this.diverging && x < this.low) part = 0;
    if (this.log) part = part > 0 ? 1 + Math.log10(part) / DECADES : 0;
    part = Math.min(Math.max(part, 0), 1);
    if (this.diverging) part = 0.5 + (x < 0 ? -part : part) / 2;
    return Math.round(part * LEVELS);
  }

  // A bar of all colours as a CSS background, and the numbers under its ends.
  legend() {
    const stops = Array.from({ length: 17 }, (_, i) => this.css[Math.round((i / 16) * LEVELS)]);
    const least = this.low + this.span * 10 ** -DECADES;
    const first = this.diverging ? -this.high : this.log ? least : this.low;
    return { background: `linear-gradient(to right, ${stops.join(", ")})`, ends: [first, this.low + this.span] };
  }
}

// ---- matrices of weights, whole or in part, exact or as the largest weight of each block ----

// A rectangle of one head's matrix: queries q0 to q1, keys k0 to k1, one number for each block of `block` x `block`.
class Grid {
  constructor({ q0 = 0, q1, k0 = 0, k1, block = 1, data, start = 0, dtype }) {
    Object.assign(this, { q0, q1, k0, k1, block, data, start, dtype });
    this.columns = Math.ceil((k1 - k0) / block);
  }

  covers({ q0, q1, k0, k1 }) {
    return this.q0 <= q0 && q1 <= this.q1 && this.k0 <= k0 && k1 <= this.k1;
  }

  at(q, k) {
    if (q < this.q0 || q >= this.q1 || k < this.k0 || k >= this.k1) return NaN;
    const row = Math.floor((q - this.q0) / this.block);
    return this.data[this.start + row * this.columns + Math.floor((k - this.k0) / this.block)];
  }

  // The rectangle's numbers minus the numbers of another head at the same place.
  minus(other) {
    const length = this.columns * Math.ceil((this.q1 - this.q0) / this.block);
    const data = new Float64Array(length);
    for (let i = 0; i < length; i++) {
      const [a, b] = [this.data[this.start + i], other.data[other.start + i]];
      data[i] = a === b ? 0 : a - b; // equal infinities, too, are no difference
    }
    return new Grid({ ...this, data, start: 0, dtype: "float64" });
  }

  // Returns rows x columns numbers for a picture of a window: each the one farthest from 0 of those that fall on it.
  picture({ q0, q1, k0, k1 }, rows, columns) {
    const result = new Float64Array(rows * columns);
    const first = (from, origin) => Math.floor((from - origin) / this.block);
    for (let row = first(q0, this.q0); row * this.block + this.q0 < q1; row++) {
      const q = Math.max(row * this.block + this.q0, q0);
      const next = Math.min((row + 1) * this.block + this.q0, q1);
      const top = Math.floor(((q - q0) * rows) / (q1 - q0));
      const bottom = Math.max(Math.ceil(((next - q0) * rows) / (q1 - q0)), top + 1);
      for (let column = first(k0, this.k0); column * this.block + this.k0 < k1; column++) {
        const x = this.data[this.start + row * this.columns + column];
        const k = Math.max(column * this.block + this.k0, k0);
        const after = Math.min((column + 1) * this.block + this.k0, k1);
        const left = Math.floor(((k - k0) * columns) / (k1 - k0));
        const right = Math.max(Math.ceil(((after - k0) * columns) / (k1 - k0)), left + 1);
        for (let r = top; r < bottom; r++) {
          for (let c = left; c < right; c++) {
            const place = r * columns + c;
            const seen = result[place];
            if (!(Math.abs(x) <= Math.abs(seen)) && !Number.isNaN(seen) && x !== -Infinity) result[place] = x;
          }
        }
      }
    }
    return result;
  }

  // Returns the range of the finite numbers.
  range() {
    let [low, high] = [0, 0];
    const end = this.start + this.columns * Math.ceil((this.q1 - this.q0) / this.block);
    for (let i = this.start; i < end; i++) {
      const x = this.data[i];
      if (Number.isFinite(x)) {
        if (x < low) low = x;
        if (x > high) high = x;
      }
    }
    return { low, high };
  }
}

function paint(canvas, numbers, rows, columns, scale) {
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer);
  for (let i = 0; i < pixels.length; i++) pixels[i] = scale.packed[scale.level(numbers[i])];
  context.putImageData(image, 0, 0);
}

// Asks Python for parts of matrices that are too large to be sent as a whole. Without a kernel nobody answers.
class Kernel {
  constructor(model, listening) {
    this.model = model;
    this.listening = listening; // whether a kernel can be asked at all
    this.waiting = new Map();
    this.next = 0;
    this.receive = (message, buffers) => {
      const answer = message && this.waiting.get(message.id);
      if (!answer) return;
      this.waiting.delete(message.id);
      answer(message, buffers && buffers.length ? bytesOf(buffers[0]) : null);
    };
    if (listening) model.on("msg:custom", this.receive);
  }

  // Calls answer(message, bytes) once. A later question with the same subject replaces this one.
  ask(subject, question, answer) {
    for (const [id, other] of this.waiting) if (other.subject === subject) this.waiting.delete(id);
    const id = `${subject}-${Math.random().toString(36).slice(2)}-${this.next++}`;
    const waiting = (message, bytes) => answer(message, bytes);
    waiting.subject = subject;
    this.waiting.set(id, waiting);
    this.model.send({ ...question, id });
  }

  close() {
    if (this.listening) this.model.off("msg:custom", this.receive);
  }
}
