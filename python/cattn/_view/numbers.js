// Bytes to numbers, numbers to text. _page.py joins the scripts of this folder to one ES module.

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
