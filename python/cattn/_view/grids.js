// Matrices of weights, whole or in part, exact or as the largest weight of each block.

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
